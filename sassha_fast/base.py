"""What all optimizers of the family share: construction, a step from the gradients at hand, checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from itertools import repeat
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Joinable, _JoinConfig

from . import backends, schedules
from .accessors import grad, no_grad, requires_grad
from .checks import check_choice, check_count, check_group, check_number, check_param, parameter_name
from .closures import Closure, closure_step
from .collectives import EarlyReduction
from .contexts import RandomState
from .hutchinson import FiniteDifferences
from .plan import Plan
from .refresh import Curvature
from .state import check_checkpoint, check_is_checkpoint, placed
from .stats import Stats
from .update import Updating
from .variant import Variant

__all__ = ["Params", "SecondOrder"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

# Constructor arguments that hold for the whole optimizer and travel with pickle and deepcopy.
_CONFIG = (
    "variant",
    "lazy_hessian",
    "n_samples",
    "grad_reduce",
    "reduce_grads",
    "perturb_sync",
    "seed",
    "hvp",
    "hvp_point",
    "backend",
    "bias_correction",
    "hessian_power_scheduler",
    "rho_scheduler",
    "max_grad_norm",
    "skip_nonfinite",
    "stochastic_rounding",
    "capturable",
)


class SecondOrder(Updating, Joinable):
    """An optimizer that divides a momentum by an average of Hessian diagonals.

    :class:`sassha_fast.SASSHA` documents the arguments; ``variant`` says which method of the family this is, and
    ``numbers`` are further hyperparameters of its parameter groups.
    """

    _step_supports_amp_scaling = True  # GradScaler.step then sets `grad_scale` and `found_inf` for the call

    def __init__(
        self,
        params: Params,
        variant: Variant,
        *,
        lr: float | Tensor,
        betas: tuple[float, float],
        weight_decay: float,
        lazy_hessian: int,
        n_samples: int,
        eps: float,
        seed: int,
        hessian_power: float,
        hessian_power_scheduler: schedules.Schedule | schedules.Stepping | None = None,
        rho: float = 0.0,
        rho_scheduler: schedules.Schedule | schedules.Stepping | None = None,
        perturb_eps: float = 1e-12,
        hvp: str = "exact",
        hvp_point: str = "perturbed",
        backend: str = "auto",
        bias_correction: bool = True,
        max_grad_norm: float | None = None,
        clip_update: float | None = None,
        hessian_floor: float | None = 0.0,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        capturable: bool = False,
        grad_reduce: str = "mean",
        reduce_grads: bool | None = None,
        perturb_sync: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        numbers: Mapping[str, Any] | None = None,
    ) -> None:
        """Checks the arguments; see the class."""
        name = self._name
        schedules.check_schedule("hessian_power_scheduler", hessian_power_scheduler, caller=name)
        schedules.check_schedule("rho_scheduler", rho_scheduler, caller=name)
        check_count("lazy_hessian", lazy_hessian, caller=name)
        check_count("n_samples", n_samples, caller=name)
        check_choice("grad_reduce", grad_reduce, ("mean", "sum"), caller=name)
        check_choice("hvp", hvp, ("exact", "finite_difference", "central_difference"), caller=name)
        check_choice("hvp_point", hvp_point, ("perturbed", "upstream"), caller=name)
        if hvp != "exact" and hvp_point == "upstream":
            raise ValueError(f"{name}: hvp={hvp!r} has no hvp_point='upstream', which is about graphs; use 'perturbed'")
        if not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"{name}: seed is {seed!r}, expected an integer from 0 to 2^63 − 1")
        if max_grad_norm is not None:
            check_number("max_grad_norm", max_grad_norm, caller=name)
        self.variant = variant
        self.hessian_power_scheduler = hessian_power_scheduler
        self.rho_scheduler = rho_scheduler
        self.lazy_hessian = lazy_hessian
        self.n_samples = n_samples
        self.grad_reduce = grad_reduce
        self.reduce_grads = reduce_grads
        self.perturb_sync = bool(perturb_sync)
        self.seed = seed
        self.hvp = hvp
        self.hvp_point = hvp_point
        self.bias_correction = bool(bias_correction)
        self.max_grad_norm = max_grad_norm
        self.skip_nonfinite = bool(skip_nonfinite)
        self.stochastic_rounding = bool(stochastic_rounding)
        self.capturable = bool(capturable)
        self.backend = backends.resolve(backend, foreach=foreach, fused=fused)
        self._reset()
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "rho": rho,
            "perturb_eps": perturb_eps,
            "eps": eps,
            "hessian_power": hessian_power,
            "hessian_floor": hessian_floor,
            "clip_update": clip_update,
            "maximize": maximize,
            "power_step": 0,
            "rho_step": 0,
            **(numbers or {}),
        }
        super().__init__(params, defaults)

    def _reset(self) -> None:
        """Forgets everything that can be derived again."""
        self.stats = Stats()
        self._flat: list[Tensor] = []
        self._plans: dict[tuple[bool, ...] | None, Plan] = {}
        self._ascent: Plan | None = None
        self._ascended = False  # whether perturb_weights was called since the last step
        self._time: int | None = None  # the clock, from perturb_weights to the end of the step
        self._curvature: Curvature | None = None
        self._probe: FiniteDifferences | None = None
        self._versions: list[int] = []
        self._is_reduced = False
        self._found_local: bool | None = None
        self._synced_pass = False
        self._reduced_before: list[Tensor] | None = None
        self._early: EarlyReduction | None = None
        self._join_config = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]
        self._weight_norm = 0.0  # ‖x‖ of the ascent's parameters, on refreshes by finite differences
        self._random: RandomState | None = None  # of the step's first pass, for replay_rng
        self._wants_graph = True  # whether the running pass of a closure is the one that is differentiated again
        self._model: nn.Module | None = None

    @property
    def adaptive(self) -> bool:
        """Whether ε is scaled by the weights, as ASAM does."""
        return self.variant.adaptive

    # ---- parameters ---------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in ``torch.optim``; refuses bad hyperparameters and sparse or complex parameters."""
        if self._ascent is not None:
            raise RuntimeError(
                f"{self._name}.add_param_group: the weights are perturbed; call {self._collector}() first"
            )
        group = dict(param_group)
        check_group({**self.defaults, **group}, caller=self._name)
        params = group.get("params", ())
        group["params"] = (
            [params] if isinstance(params, Tensor) else params if isinstance(params, set) else list(params)
        )
        for i, entry in enumerate(group["params"]):
            given, param = entry if isinstance(entry, tuple) else (None, entry)
            check_param(parameter_name(len(self.param_groups), i, given), param, caller=self._name)
        super().add_param_group(group)
        self._plans.clear()
        self._reduced_before = None

    def get_params(self) -> Iterator[Tensor]:
        """All parameters that require gradients."""
        return (p for group in self.param_groups for p in group["params"] if p.requires_grad)

    # ---- a step -------------------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        """Raises unless the weights are where a step may start from."""

    @no_grad
    def step(  # type: ignore[override]
        self,
        closure: Closure | Sequence[Closure] | None = None,
        *,
        hessian_closure: Closure | Sequence[Closure] | None = None,
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
            hessian_closure: On refreshes, computes the products from another, usually smaller, batch.

        Returns:
            The loss of the closure's first call.

        Without a closure and without :meth:`SASSHA.perturb_weights` before it, SASSHA takes a step with ρ = 0.
        """
        self._check_ready()
        if closure is not None:
            if hasattr(self, "found_inf"):
                raise RuntimeError(
                    f"{self._name}.step: GradScaler.step was given a closure, which would scale nothing in its later "
                    "passes; replace scaler.step(opt, closure) by opt.step(closure, scaler=scaler)"
                )
            return closure_step(self, closure, hessian_closure, scaler)
        if hessian_closure is not None or scaler is not None:
            raise TypeError(
                f"{self._name}.step: hessian_closure or scaler was given without closure; pass a closure too, or use "
                "the three calls with unperturb(scaler=scaler) and scaler.step(opt)"
            )
        plan, grads = self._gather()
        if plan is not None and self._is_priming(grads):
            self._states(plan)
        else:
            self._descend(plan, grads)
        self._end_of_step()
        return None

    def _descend(self, plan: Plan | None, grads: list[Tensor]) -> None:
        """The update from the gradients at hand, reduced over processes if that was not done before."""
        if plan is not None:
            plan.bind_grads(grads)
        curvature = self._curvature or self._curvature_at(plan, grads, "step")
        self._detach_grads(grads)
        if self._parallel and not self._is_reduced:
            curvature = self._reduced(curvature)
            plan, grads = self._gather()
            if plan is not None:
                plan.bind_grads(grads)
        if plan is None:
            return
        overflow: Tensor | None = getattr(self, "found_inf", None)
        if overflow is None:
            self._update(plan, curvature)
        else:  # called by GradScaler.step
            left: Tensor | None = getattr(self, "grad_scale", None)
            self._update(plan, self._unscaled(curvature, left), loss_scale=left, overflow=overflow)

    def _take_products(self, scaler: GradScaler | None) -> None:
        """Takes the products of a refresh at the present weights, and makes the gradients those to descend along."""
        self._check_untouched(self._collector)
        found = self._with_descent(self._curvature_on_ascent())
        known = found.products is not None and scaler is not None
        self._curvature = replace(found, loss_scale=scaler.get_scale() if known else None)  # type: ignore[union-attr]

    # What a step from a closure asks of the ascent; see ``Climbing`` and ``MSASSHA``.

    def _next_radii(self) -> Sequence[float | Tensor]:
        """Radii of an ascent that a pass of its own precedes, of each group."""
        return ()

    def _needs_ascent(self, rho: Sequence[float | Tensor]) -> bool:
        """Whether the descent gradient takes such a pass and ascent."""
        return False

    def _ascend(self, rho: Sequence[float | Tensor], *, zero_grad: bool) -> None:
        """Moves the weights to x + ε, with a way back from there and from probes around it."""
        raise NotImplementedError

    @property
    def _fuses_differences(self) -> bool:
        """Whether the update may take finite differences itself: its gradient is then ∇f(x+ε), and they are final."""
        return not (self.variant.gap or self.variant.by_filter)

    def _with_descent(self, curvature: Curvature) -> Curvature:
        """Gradients and products of all processes, once the gradients are those to descend along."""
        return self._reduced(curvature)

    def _curvature_on_ascent(self) -> Curvature:
        if not self.hessian_due:
            return Curvature(None)
        if self.hvp != "exact":
            no_pass = self._probe is None and all(map(is_, map(grad, self._flat), repeat(None)))
            return Curvature(None) if no_pass else self._probed_curvature(fused=False)  # the user may clip gradients
        plan, grads = self._gather()
        try:
            return self._curvature_at(plan, grads, self._collector)
        finally:
            self._detach_grads(grads)

    def _unscaled(self, curvature: Curvature, left: Tensor | None) -> Curvature:
        """Takes the loss scale out of the products; ``left`` is what GradScaler left in the gradients."""
        if curvature.products is not None:
            known = curvature.loss_scale or (None if left is None else float(left))
            if known is None:
                raise RuntimeError(
                    f"{self._name}.step: GradScaler has unscaled the gradients, but the products of this refresh still "
                    f"carry a loss scale that is not known here; call {self._collector}(scaler=scaler)"
                )
            curvature = curvature.unscaled(known)
        return curvature

    def _is_priming(self, grads: list[Tensor]) -> bool:
        """Whether this is torch.distributed.checkpoint creating state: lr 0, no ascent, no graph, no state yet."""
        if self.state or self._ascended or any(float(group["lr"]) != 0.0 for group in self.param_groups):
            return False
        return not any(map(requires_grad, grads))

    def _detach_grads(self, grads: list[Tensor]) -> None:
        """Cuts gradients off their graph: together with their parameters they are a cycle that would leak."""
        if any(map(requires_grad, grads)):
            for p in self._flat:
                if p.grad is not None and p.grad.requires_grad:
                    p.grad = p.grad.detach()

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See ``torch.optim.Optimizer.state_dict``. Raises while the weights are perturbed."""
        if self._ascent is not None:
            raise RuntimeError(
                f"{self._name}.state_dict: the weights are perturbed, so a checkpoint of the model would not hold "
                f"them; call {self._collector}() first"
            )
        self._time = None
        self._clock()  # takes over clocks under the authors' key
        return super().state_dict()

    @no_grad
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this optimizer or of the authors'.

        State of reduced-precision parameters stays float32. Nothing is changed if the checkpoint does not fit.
        """
        if self._ascent is not None:
            raise RuntimeError(
                f"{self._name}.load_state_dict: the weights are perturbed; call {self._collector}() first"
            )
        given = copy(state_dict)
        for adapt in self._optimizer_load_state_dict_pre_hooks.values():
            adapted = adapt(self, given)
            given = given if adapted is None else adapted
        check_is_checkpoint(given, caller=self._name)
        self._load(given)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Takes over what is in a checkpoint."""
        apart = self.variant.apart
        loaded = check_checkpoint(state_dict, self.param_groups, self.lazy_hessian, apart=apart, caller=self._name)
        state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        groups = []
        for saved, group in zip(loaded["param_groups"], self.param_groups, strict=True):
            for key, p in zip(saved.pop("params"), group["params"], strict=True):
                if key in loaded["state"]:
                    state[p] = placed(loaded["state"][key], p, on_device=self.capturable, apart=apart)
            groups.append({**deepcopy(saved), "params": group["params"]})
        self.__setstate__({"state": state, "param_groups": groups})
        self._plans.clear()
        self._curvature = self._time = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: state, groups and configuration; what is derived is built again."""
        if self._ascent is not None:
            raise RuntimeError(
                f"{self._name}: can't copy or pickle while the weights are perturbed; call {self._collector}() first"
            )
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _CONFIG}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See :meth:`__getstate__`."""
        if "lazy_hessian" in state or not hasattr(self, "_plans"):
            self._reset()
        super().__setstate__(state)
