"""The optimizer that all public classes are: groups, the calls of a step, checkpoints. Arithmetic is in its parts."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from .._parallel.reducer import Reducer
from .._passes.accessors import clear_grads, hooked, no_grad, requires_grad
from .._passes.shards import local
from ..checks import check_count, check_param, parameter_name
from ..stats import Stats
from ..variant import Ascent as AscentOf
from .amp import Amp, StepHook, Unscaling, forget_scaler, has_unscaled
from .attributes import Capturable, Fixed, Method, OfProducts, Option
from .checkpoints import entries_to_save, loaded, master_weights
from .closure import Accumulated, Closure, as_closure, is_running, run, run_shadow
from .compact import as_full
from .contexts import KINKED, CreateGraph, frozen_batchnorm, refresh_context
from .gap import decomposes
from .guards import SyncedGraph
from .keys import HESSIAN_STEP
from .options import HYPERPARAMETERS, CheckedGroups, Options, check_group
from .params import Parameters
from .state import check_structure
from .step import Ascent, Descent, Parts, Phase, Step

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class FusedOptimizer(Optimizer, Joinable):
    """An optimizer of an ascent and a descent. Public classes choose these and document the arguments.

    Attributes:
        stats (Stats): What the last step saw; see :class:`sassha_fast.Stats`.
        ascent_part: Where gradient and curvature are taken.
        descent_part: What is made of them.
        checked_hyperparameters: Those of the groups that are checked here.
    """

    ascent_part: type[Ascent]
    descent_part: type[Descent]
    checked_hyperparameters: Sequence[str] = tuple(HYPERPARAMETERS)
    variant = Method()
    lazy_hessian = Option()
    n_samples = OfProducts()
    grad_reduce = Option()
    reduce_grads = Option()
    perturb_sync = Option()
    seed = OfProducts()
    hvp = OfProducts()
    hvp_point = OfProducts()
    backend = Option()
    bias_correction = Option()
    hessian_power_scheduler = Option()
    rho_scheduler = Option()
    max_grad_norm = Option()
    skip_nonfinite = Option()
    stochastic_rounding = Option()
    capturable = Capturable()
    unseen = Option()
    state_bits = Fixed()
    master_weight_bits = Fixed()
    full_precision_below = Fixed()
    _step_supports_amp_scaling = True  # GradScaler.step then sets `grad_scale` and `found_inf` for the call

    def __init__(self, params: Params, options: Options, defaults: dict[str, Any]) -> None:
        """Puts the parts together."""
        self._assemble(options)
        Optimizer.__init__(self, params, defaults)
        self.parts.params.check_overlap(options.caller)
        self._parts.checked.expect(self.defaults)

    def _assemble(self, options: Options) -> None:
        """Everything that is neither groups nor state, as it is before the first step."""
        Joinable.__init__(self)
        self.stats = Stats()
        ascent, descent = self.ascent_part(), self.descent_part()
        checked = CheckedGroups(self.checked_hyperparameters, options.caller)
        self._parts = Parts(options, Parameters(), Reducer(options.caller), ascent, descent, self.stats, checked)
        self._step: Step | None = None

    @property
    def parts(self) -> Parts:
        """What the optimizer is made of, with groups and state as they are now. For adapters of frameworks."""
        self._parts.params.follow(self.param_groups, self.state)
        return self._parts

    @property
    def adaptive(self) -> bool:
        """Whether ε is scaled by the weights, as ASAM does."""
        return self._parts.options.variant.adaptive

    def _patch_step_function(self) -> None:
        """Torch's frame around ``step`` is for subclasses that have their own: ours runs hooks itself."""
        if type(self).step is not FusedOptimizer.step:
            super()._patch_step_function()
            return
        self._zero_grad_profile_name = f"Optimizer.zero_grad#{type(self).__name__}.zero_grad"

    # ---- parameters ---------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in ``torch.optim``; refuses bad hyperparameters and parameters that can't be trained."""
        name = self._parts.options.caller
        self._refuse_in_closure("add_param_group")
        self._refuse_while_away("add_param_group", "the weights are perturbed")
        group = dict(param_group) if isinstance(param_group, dict) else {}
        if "params" not in group:
            found = f"has {sorted(group)}" if isinstance(param_group, dict) else f"is a {type(param_group).__name__}"
            raise ValueError(f"{name}: a parameter group {found}, expected a dict with 'params'")
        self._parts.options.refuse_in(group, self.defaults)
        given = {**self.defaults, **group}
        check_group(given, [key for key in self.checked_hyperparameters if key in self.defaults], caller=name)
        params = group["params"]
        group["params"] = (
            [params] if isinstance(params, Tensor) else params if isinstance(params, set) else list(params)
        )
        for i, entry in enumerate(group["params"]):
            named, param = entry if isinstance(entry, tuple) else (None, entry)
            check_param(parameter_name(len(self.param_groups), i, named), param, caller=name)
        super().add_param_group(group)
        self._give_up("add_param_group")
        self._parts.params.drop_plans()
        self._parts.reducer.reduced = None

    def get_params(self) -> Iterator[Tensor]:
        """All parameters that require gradients."""
        return (p for group in self.param_groups for p in group["params"] if p.requires_grad)

    # ---- the step at hand ---------------------------------------------------------------------------------------

    def _current(self) -> Step | None:
        """The step at hand, if one has begun and is not over."""
        step = self._step
        if step is not None and step.is_void:
            step.forget()
        if step is not None and step.is_broken:  # a second interrupt came before the first was dealt with
            step.roll_back()
        return None if step is None or step.phase is Phase.ENDED else step

    @property
    def is_between_steps(self) -> bool:
        """Whether no step has moved weights or taken products that are still to be used."""
        step = self._current()
        return step is None or not (step.is_away or step.phase is Phase.COLLECTED)

    def _begin(self, parts: Parts | None = None) -> Step:
        """A new step, of parts that follow the groups already, if they are given."""
        step = self._step = Step(parts or self.parts)
        self._parts.given_up_by = None
        return step

    def _give_up(self, call: str) -> None:
        """Forgets the step at hand. If its gradients were complete, :meth:`step` has to know by which call."""
        step = self._current()
        if step is not None and step.phase is Phase.COLLECTED:
            self._parts.given_up_by = call
        self._parts.stop_listening()
        self._step = None

    def _refuse_given_up(self) -> None:
        """Raises if the coming refresh needs products that were taken, and then given up."""
        parts, call = self.parts, self._parts.given_up_by
        if call is not None and Step(parts).refresh.scheduled and not parts.params.have_graphs():
            name = parts.options.caller
            raise RuntimeError(
                f"{name}.step: {call}() came between {parts.ascent.closing_call}() and step(), and the products of "
                f"this refresh were given up; call zero_grad() and begin the step again, and {call}() before or "
                "after it"
            )

    def _expected(self) -> Step:
        """The step at hand, or one to ask questions about the coming one."""
        return self._current() or Step(self.parts)

    def _refuse_while_away(self, caller: str, what: str) -> None:
        step = self._current()
        if step is not None and step.is_away:
            parts = self._parts
            raise RuntimeError(f"{parts.options.caller}.{caller}: {what}; call {parts.ascent.closing_call}() first")

    def _release_step(self) -> None:
        """After an exception: no closure runs any more, and where weights were left away, calls may bring them back."""
        if self._step is not None:
            self._step.driven = False

    def _refuse_in_closure(self, call: str) -> None:
        step = self._current()
        if step is not None and step.driven and not is_running(step):  # a second interrupt kept it from its end
            step.driven = False
            step.roll_back()
        elif step is not None and step.driven:
            name = self._parts.options.caller
            raise RuntimeError(
                f"{name}.{call}: it was called within a closure of {name}.step, which runs all passes of the step "
                f"itself; leave {call}() out of the closure"
            )

    @property
    def hessian_due(self) -> bool:
        """Whether the coming step refreshes the curvature. With exact products its last pass needs a graph.

        True every ``lazy_hessian`` steps until a refresh has succeeded, and, once ``perturb_weights`` has shown which
        parameters take part, also if one of them has no curvature yet (in one process; several keep to the schedule).
        """
        return self._expected().hessian_due

    @property
    def probes_due(self) -> int:
        """How many times ``probe_weights()`` and a backward pass have to follow the last one, in this step."""
        return self._expected().probes_due

    @property
    def hessian_power_t(self) -> float:
        """The Hessian power in use, of the first group."""
        return float(self.param_groups[0]["hessian_power"])

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()``, with a graph where the coming step needs one. For closures and hand-written loops."""
        step = self._expected()
        with CreateGraph() if step.differentiates and step.wants_graph else nullcontext():
            loss.backward()  # type: ignore[no-untyped-call]

    # ---- calls of hand-written loops ----------------------------------------------------------------------------

    @no_grad
    def perturb_weights(self, zero_grad: bool = True) -> None:
        """Climbs to x + ε from the gradients of the first backward pass.

        Args:
            zero_grad: Drop these gradients afterwards. Their memory then holds x until :meth:`unperturb`, but for those
                that somebody else holds, or views of their memory (``p.grad.detach()``, ``.view()``, ``.numpy()``). A
                bare address (``data_ptr()``) or storage (``untyped_storage()``) is not seen.
        """
        self._refuse_in_closure("perturb_weights")
        step, options = self._current(), self._parts.options
        if step is not None and step.is_away:
            raise RuntimeError(
                f"{options.caller}.perturb_weights: the weights are perturbed already; call "
                f"{self._parts.ascent.closing_call}() first"
            )
        parts = self.parts
        parts.check_groups()
        Join.notify_join_context(self)
        if step is None or step.phase is not Phase.BEGUN or step.climbed:  # a new first pass ends what was left open
            step = self._begin(parts)
        step.climb(zero_grad=zero_grad)

    @no_grad
    def unperturb(self, scaler: GradScaler | None = None) -> None:
        """Restores x, bit for bit; on a refresh, first takes the Hessian-vector products at x + ε.

        It always restores. If a refresh is due and the gradients have no graph it raises afterwards.

        Args:
            scaler: The ``torch.amp.GradScaler`` that scaled the losses, whose scale the products carry too.
        """
        self._refuse_in_closure("unperturb")
        step, options = self._current(), self._parts.options
        if step is None or not step.is_away:
            raise RuntimeError(
                f"{options.caller}.unperturb: the weights are not perturbed; call perturb_weights() first"
            )
        if options.hvp_point == "upstream":  # the graph is still to be used, with weights that it did not see
            step.check_untouched("unperturb")
            step.come_back(tell_autograd=False)
        is_unscaled = scaler is not None and has_unscaled(scaler, self)
        if is_unscaled:
            step.refuse_spent_scaler("unperturb")
        step.collect("unperturb", scaler=scaler, is_unscaled=is_unscaled)
        step.come_back()

    @no_grad
    def take_products(self, scaler: GradScaler | None = None) -> None:
        """On a refresh, takes the products now: before gradients are clipped or unscaled.

        :meth:`step` does it by itself where neither happens between the last backward pass and it.

        Args:
            scaler: The ``torch.amp.GradScaler`` that scaled the loss, whose scale the products carry too.
        """
        self._refuse_in_closure("take_products")
        step = self._current()
        if step is not None and step.phase is Phase.COLLECTED and step.climbed and not step.is_stale:
            return  # unperturb() has taken them
        if step is None or step.phase is Phase.COLLECTED:  # a new first pass ends what was left open
            step = self._begin()
        step.collect("take_products", scaler=scaler)
        step.come_back()

    @no_grad
    def probe_weights(self) -> None:
        """Moves the weights to the next finite-difference probe; the gradients there complete the product.

        Call it, and a backward pass after it, ``probes_due`` times between the last backward pass and
        :meth:`unperturb` (M-SASSHA: :meth:`step`), which puts the gradients of that pass back.
        """
        self._refuse_in_closure("probe_weights")
        step = self._current()
        if step is None or not step.is_away or not step.probes_due:
            away, parts = step is not None and step.is_away, self._parts
            needs = f"finite differences need {parts.ascent.probe_recipe}"
            raise RuntimeError(
                f"{parts.options.caller}.probe_weights: no probe is due (hvp={parts.options.hvp!r}, "
                f"hessian_due={self.hessian_due}, weights moved: {away}); "
                f"{needs if parts.descent.has_curvature else 'there is no curvature to probe for'}"
            )
        step.check_probe()
        step.probe()

    def _check_ready(self, *, closure: bool) -> None:
        """Raises unless the weights are where :meth:`step` may start from."""
        del closure
        step = self._current()
        if step is not None and step.is_away:
            parts = self._parts
            raise RuntimeError(
                f"{parts.options.caller}.step: the weights are still perturbed; call "
                f"{parts.ascent.closing_call}() first"
            )

    @override
    @hooked(lambda opt: forget_scaler(opt))
    @no_grad
    def step(  # type: ignore[override]
        self,
        closure: Closure | Accumulated | Sequence[Closure] | None = None,
        *unnamed: object,
        ascent_closure: Closure | Accumulated | Sequence[Closure] | None = None,
        hessian_closure: Closure | Accumulated | Sequence[Closure] | None = None,
        scaler: GradScaler | None = None,
    ) -> Tensor | float | None:
        """Takes a step: from the gradients that are there, or with a closure from beginning to end.

        Args:
            closure: Zeroes gradients, runs forward and backward passes and returns the loss. It is called under
                ``enable_grad`` as often as the method needs gradients (SASSHA: once at x and once at x + ε, or once
                where ρ is 0), with the same random numbers; BatchNorm statistics of an attached model move once. A
                plain ``loss.backward()`` is enough on refreshes too. A sequence of closures accumulates over
                micro-batches: each runs forward and backward passes of its part of the loss and zeroes nothing.
            scaler: The ``torch.amp.GradScaler`` with which closures scale their losses. ``scaler.update()`` follows;
                where gradients overflowed, nothing is changed. (``scaler.step(opt)`` is for hand-written loops.)
            ascent_closure: Computes the gradient at x, which gives the ascent its direction, from another, usually
                smaller, batch; ``closure`` is then called at x + ε alone, and moves BatchNorm statistics there. Both
                begin with the same random numbers. Not called where ρ is 0.
            hessian_closure: On refreshes, computes the products from another, usually smaller, batch. What that one
                lacks, and the gradient's batch has, keeps the curvature that is known of it.

        Returns:
            The loss of the closure's first call: at x, or with ``ascent_closure`` at x + ε.

        Without a closure and without :meth:`SASSHA.perturb_weights` before it, SASSHA takes a step with ρ = 0.
        """
        self._refuse_in_closure("step")
        if unnamed:
            raise TypeError(
                f"{self._parts.options.caller}.step: got {len(unnamed)} more without a name after closure; name them, "
                "as in opt.step(closure, scaler=scaler)"
            )
        try:
            self.parts.check_groups()
            self._check_ready(closure=closure is not None)
            if closure is not None:
                return self._step_with(closure, ascent_closure, hessian_closure, scaler)
            self._check_plain(ascent_closure, hessian_closure, scaler)
            self._step_from_grads()
            return None
        except BaseException:
            self._release_step()
            forget_scaler(self)
            raise

    @override
    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """As in ``torch.optim``. If the hook raises, nothing is left of a call of ``GradScaler.step``."""
        return super().register_step_pre_hook(StepHook(hook))

    @override
    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """As in ``torch.optim``. If the hook raises, nothing is left of a call of ``GradScaler.step``."""
        return super().register_step_post_hook(StepHook(hook))

    def _check_plain(self, *given: object) -> None:
        """Raises if a step without a closure was given what only passes can use."""
        if any(argument is not None for argument in given):
            parts = self._parts
            products = f"{parts.ascent.closing_call}(scaler=scaler) and " if parts.descent.has_curvature else ""
            raise TypeError(
                f"{parts.options.caller}.step: ascent_closure, hessian_closure or scaler was given without closure; "
                f"pass a closure too, or use {products}scaler.step(opt) in a hand-written loop"
            )

    def _check_ascent(self) -> None:
        """Raises if the ascent can't come from another batch than the descent."""
        options = self._parts.options
        name = options.caller
        if options.variant.ascent is not AscentOf.GRADIENT:
            raise TypeError(
                f"{name}.step: ascent_closure is for the gradient that an ascent follows, and {name} takes no gradient "
                "for one; leave it out"
            )
        if decomposes(self.parts.params, options):
            raise ValueError(
                f"{name}.step: ascent_closure gives the gradient of another batch, but with alpha above 0 the descent "
                "is made of the gradients of both passes, which have to be of one batch; leave ascent_closure out, or "
                "set alpha to 0"
            )

    def _step_with(
        self,
        closure: Closure | Accumulated | Sequence[Closure],
        ascent_closure: Closure | Accumulated | Sequence[Closure] | None,
        hessian_closure: Closure | Accumulated | Sequence[Closure] | None,
        scaler: GradScaler | None,
    ) -> Tensor | float:
        """All passes of a step."""
        name = self._parts.options.caller
        if hasattr(self, "found_inf"):
            raise RuntimeError(
                f"{name}.step: GradScaler.step was given a closure, which would scale nothing in its later "
                "passes; replace scaler.step(opt, closure) by opt.step(closure, scaler=scaler)"
            )
        if hessian_closure is not None and not self._parts.descent.has_curvature:
            raise TypeError(f"{name}.step: hessian_closure is for products of the Hessian, which {name} does without")
        if ascent_closure is not None:
            self._check_ascent()
        first = as_closure(closure, caller=name)
        climb = None if ascent_closure is None else as_closure(ascent_closure, caller=name, name="ascent_closure")
        other = None if hessian_closure is None else as_closure(hessian_closure, caller=name, name="hessian_closure")
        enabled = scaler if scaler is not None and scaler.is_enabled() else None
        Join.notify_join_context(self)
        parts = self.parts
        parts.reducer.begin_step(parts.params.all, parts.options.reduce_grads, joins=self._join_config.enable)
        step = self._step = Step(parts, driven=True)
        self._parts.given_up_by = None
        unscale = None if enabled is None else Unscaling(enabled, self, self._parts.params, name)
        try:
            loss = run(step, first, other, ascent_closure=climb, scaler=enabled, unscale=unscale)
        except BaseException:
            if unscale is not None:
                unscale.take_back()
            raise
        self._step = None
        return loss

    def _step_from_grads(self) -> None:
        """The update from the gradients at hand."""
        step, is_rest = self._current(), self._parts.given_up_by is not None
        if step is None:
            self._refuse_given_up()
            step = self._begin()
        if step.is_stale:  # who left that step out zeroed gradients himself
            step = self._begin()
        if self._is_priming(step):
            plan, _ = self._parts.params.gather(self._parts.options)
            if plan is not None:
                self._parts.params.states(plan, self._parts.options)
            self._step = None
            return
        if not step.climbed and not is_rest and self._parts.params.have_grads():
            self._parts.ascent.warn_if_left_out(step)
        gathered = step.collect("step") if step.phase is not Phase.COLLECTED else None
        overflow: Tensor | None = getattr(self, "found_inf", None)
        if overflow is None:
            step.update(gathered)
        else:  # called by GradScaler.step
            left: Tensor | None = getattr(self, "grad_scale", None)
            if left is None and step.was_unscaled_before:
                step.refuse_spent_scaler("step")
            try:
                step.unscale_products(left)
            except RuntimeError:  # a later call must not take products for those of the loss
                step.roll_back()
                raise
            step.update(gathered, Amp(left, overflow))
        self._step = None

    def _is_priming(self, step: Step) -> bool:
        """Whether this is torch.distributed.checkpoint creating state: lr 0, one call, gradients of 0, no state yet."""
        if self.state or step.climbed or step.curvature is not None or not self._parts.descent.has_curvature:
            return False
        if any(float(group["lr"]) != 0.0 for group in self.param_groups):
            return False
        _, grads = self._parts.params.gather(self._parts.options)
        return not any(map(requires_grad, grads)) and not any(bool(local(g).any()) for g in grads)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradients of all parameters. A step whose gradients were complete, or not begun, is given up.

        Args:
            set_to_none: Drop the gradients instead.
        """
        step = self._current()
        if step is not None and step.accumulates:
            name = self._parts.options.caller
            raise RuntimeError(
                f"{name}.step: a closure of the list has called zero_grad(), and the gradients of those before it were "
                "lost with that; leave zero_grad() out of closures that are passed as a list"
            )
        if step is not None and step.randoms is not None and step.has_only_begun:
            step.randoms.note_zero_grad()
        elif step is not None and not step.driven and not step.is_away:
            step.roll_back()
            self._step = None
        self._parts.given_up_by = None
        if not set_to_none or torch._C._autograd._profiler_enabled():
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:  # the same without torch's range in profilers, which takes longer than this
            clear_grads(group["params"])

    def replayed(self, steps: int = 1) -> None:
        """Tells the refresh clock that a CUDA graph of an ordinary step was replayed, which Python can't see.

        After a refresh it takes over what that brought, as an eager step does: one that failed is due again. From then
        on :attr:`stats` are those of the last step that was replayed.

        Args:
            steps: How many steps were replayed.
        """
        name = self._parts.options.caller
        steps = check_count("steps", steps, caller=f"{name}.replayed")
        if not self._parts.descent.has_curvature:
            raise RuntimeError(f"{name}.replayed: {name} never refreshes a curvature, so there is no clock to tell")
        if not self._parts.options.capturable:
            raise RuntimeError(f"{name}.replayed: steps are counted on the host; construct {name} with capturable=True")
        params = self.parts.params
        retry = params.learn()
        clock = params.clock() + steps if retry is None else retry
        for entry in self.state.values():
            entry[HESSIAN_STEP] = clock
        self.stats.set_step(self.stats.replayed)

    # ---- the model ----------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module | None:
        """The model that :meth:`attach` named."""
        return self._parts.reducer.model

    def attach(self, model: nn.Module) -> None:
        """Names the model that closures run.

        BatchNorm statistics then move once per step. With ``DistributedDataParallel``, closures run without its
        reduction and the optimizer reduces gradients and products itself; in hand-written loops it sees which passes
        were reduced. Not part of checkpoints and copies; call it again on a new optimizer.
        """
        options = self._parts.options
        if not isinstance(model, nn.Module):
            raise TypeError(f"{options.caller}.attach: model is {type(model).__name__}, expected a torch.nn.Module")
        self._parts.reducer.attach(model)
        if isinstance(model, DistributedDataParallel):
            model.register_forward_hook(SyncedGraph(options.caller))
        kinked = sorted({type(module).__name__ for module in model.modules() if isinstance(module, KINKED)})
        if kinked and not options.exact:
            warnings.warn(
                f"{options.caller}.attach: finite differences see curvature at the kinks of {', '.join(kinked)} that "
                "exact products ignore; D comes out 1.2 to 2 times larger. Tune lr for it, or use hvp='exact'",
                stacklevel=2,
            )

    def frozen_batchnorm(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """For the second pass of hand-written loops: BatchNorm uses the batch and keeps its running statistics."""
        target = self.model if model is None else model
        if target is None:
            name = self._parts.options.caller
            raise ValueError(f"{name}.frozen_batchnorm: no model is known; pass it, or call attach(model) before")
        return frozen_batchnorm(target)

    def refresh_context(self) -> AbstractContextManager[None]:
        """For all passes of a refresh step in hand-written loops: only operations that have a double backward."""
        return refresh_context(self.model)

    @contextmanager
    def replay_rng(self) -> Iterator[None]:
        """For all passes of hand-written loops: those at x + ε draw the random numbers (dropout) of those at x."""
        step = self._current()
        if step is not None and (step.phase is Phase.COLLECTED or (step.climbed and not step.is_away)):
            step = None  # a new first pass ends what was left open
        if step is None:
            step = self._begin()
        passes = step.replay_random()
        passes.is_running = True
        try:
            yield
        finally:
            passes.is_running = False

    # ---- uneven inputs ------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``torch.distributed.algorithms.Join``: a process out of data takes the steps of the others."""
        options = self._parts.options
        if options.reduce_grads is None and not isinstance(self.model, DistributedDataParallel):
            raise RuntimeError(
                f"{options.caller}.join_hook: it is not known who reduces gradients; call opt.attach(ddp_model) or "
                f"construct {options.caller} with reduce_grads=True"
            )
        return _Shadow(self._shadow_step)

    @no_grad
    def _shadow_step(self) -> None:
        try:
            step = self._step = Step(self.parts, driven=True)
            run_shadow(step)
            self._step = None
        except BaseException:
            self._release_step()
            raise

    @property
    def join_device(self) -> torch.device:
        """Where :meth:`join_hook` has its collectives."""
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    @property
    def join_process_group(self) -> Any:
        """The processes that join."""
        group = self._parts.reducer.group
        return group if group is not None else torch.distributed.group.WORLD

    # ---- checkpoints --------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, as in ``torch.optim``. Raises while the weights are perturbed.

        State in 8 bits and corrections are saved as they are, under names that end in ``_codes``. Those of sharded
        parameters are saved in float32, as other shards could not read them.
        """
        self._refuse_while_away(
            "state_dict", "the weights are perturbed, so a checkpoint of the model would not hold them"
        )
        self.parts.params.wait_for_refresh()
        self._parts.descent.clock(self._parts.params)  # takes over clocks under the authors' key
        entries = entries_to_save(self._parts.params)
        if entries is None:
            return super().state_dict()
        with self._state_as(entries):  # hooks of state_dict see what is saved
            return super().state_dict()

    @contextmanager
    def _state_as(self, entries: dict[Tensor, dict[str, Any]]) -> Iterator[None]:
        """Other state within, for torch to save. No step could go on with it, so an interrupt does not leave it.

        Nor does the call leave it to a step that it comes in the middle of, from a closure or a signal handler.
        """
        kept = self.state
        try:
            try:
                self.state = defaultdict(dict, entries)
                yield
            finally:
                self.state = kept
                self._parts.params.follow(self.param_groups, kept)
        except BaseException:  # maybe an interrupt in the lines before
            self.state = kept
            self._parts.params.follow(self.param_groups, kept)
            raise

    def full_state_dict(self) -> dict[str, Any]:
        """:meth:`state_dict` with m and D in float32, whatever ``state_bits`` is: for other tools, and to look at.

        It takes 8 bytes a parameter, or 12 with ``master_weight_bits``. :meth:`load_state_dict` takes both forms.
        """
        return as_full(self.state_dict())

    @no_grad
    def master_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The weights of a model by name, in float32 with all bits that are known of them: for export.

        A parameter with several names, as of tied layers, is under all of them, as in ``model.state_dict()``. Buffers
        are not among them, so a model that has some loads them with ``strict=False``.

        Args:
            model: One whose parameters this optimizer has. Parameters that it does not have are left out.
        """
        self._refuse_while_away("master_weights", "the weights are perturbed")
        return master_weights(model, self.parts.params, caller=f"{self._parts.options.caller}.master_weights")

    @override
    @no_grad
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this optimizer or of the authors'.

        State becomes what ``state_bits`` and ``master_weight_bits`` say, whatever it was, and is not cast to the dtype
        of the parameters. Nothing is changed if the checkpoint does not fit.
        """
        self._refuse_in_closure("load_state_dict")
        self._refuse_while_away("load_state_dict", "the weights are perturbed")
        given = copy(state_dict)
        for adapt in self._optimizer_load_state_dict_pre_hooks.values():
            adapted = adapt(self, given)
            given = given if adapted is None else adapted
        self._load(check_structure(given, self.param_groups, caller=self._parts.options.caller))
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Takes over what is in a checkpoint, whose structure is known to be good."""
        self._take_over(*loaded(state_dict, self.parts.params, self._parts.options))

    def _take_over(self, state: dict[Tensor, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        Optimizer.__setstate__(self, {"state": state, "param_groups": groups})
        self._parts.params.outcome = None  # of a state that is gone
        self._parts.params.drop_plans()
        self._give_up("load_state_dict")

    @override
    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: state, groups and configuration; what is derived is built again."""
        options, step = self._parts.options, self._current()
        if step is not None and step.is_away:
            raise RuntimeError(
                f"{options.caller}: can't copy or pickle while the weights are perturbed; call "
                f"{self._parts.ascent.closing_call}() first"
            )
        self.parts.params.wait_for_refresh()
        return {**super().__getstate__(), "options": options}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Builds again what :meth:`__getstate__` left out."""
        rest = dict(state)
        options = rest.pop("options", None)
        if options is not None:
            self._assemble(options)
        super().__setstate__(rest)
        self._parts.checked.expect(self.defaults)


class _Shadow(JoinHook):
    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step

    @override
    def main_hook(self) -> None:
        """One step of the others."""
        self.step()
