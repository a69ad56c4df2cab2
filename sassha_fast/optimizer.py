"""The optimizer: the phases of a step in order. All arithmetic is in the passes of a backend."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, repeat
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Join, Joinable, _JoinConfig

from . import backends, reference, schedules
from .accessors import IDLE_REFCOUNT, grad, no_grad, requires_grad, set_grad
from .checks import check_choice, check_count, check_group, check_number, check_param
from .closures import Closure, closure_step
from .contexts import RandomState
from .hutchinson import FiniteDifferences
from .plan import Plan
from .refresh import Curvature
from .state import check_checkpoint, placed
from .stats import Stats
from .update import Updating

__all__ = ["SASSHA"]

# Constructor arguments that hold for the whole optimizer and travel with pickle and deepcopy.
_CONFIG = (
    "lazy_hessian",
    "n_samples",
    "adaptive",
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


class SASSHA(Updating, Joinable):
    r"""Sharpness-aware second-order optimization with a stable Hessian approximation (SASSHA, ICML 2025).

    A drop-in replacement for the authors' optimizer, and for ``torch.optim.AdamW`` in all that is not specific to
    the method. One step is three calls::

        loss_fn(model).backward()
        opt.perturb_weights(zero_grad=True)
        loss_fn(model).backward(create_graph=opt.hessian_due)
        opt.unperturb()
        opt.step()
        opt.zero_grad()

    Args:
        params: Parameters, named parameters or dicts of parameter groups.
        hessian_power_scheduler: A function of the step number (:mod:`sassha_fast.schedules`) or an object with
            ``step()`` that gives ``hessian_power`` at each step. May also be assigned later.
        lr: Learning rate η, a float or a 0-d tensor.
        betas: Decay of the averages of gradient and curvature.
        weight_decay: Decoupled weight decay λ.
        rho: Radius ρ of the ascent.
        lazy_hessian: Steps k from one refresh of the curvature to the next.
        n_samples: Probes averaged in a refresh.
        perturb_eps: Added to the gradient norm.
        eps: Added to the denominator.
        adaptive: ASAM's scale-invariant ascent.
        grad_reduce: ``"mean"`` or ``"sum"`` over processes, of gradients and products.
        seed: Key of the probes.
        hessian_power: Exponent of the curvature: ½ in the paper.
        hvp: How Hessian-vector products are computed: ``"exact"``, by double backward; ``"finite_difference"``, from
            one more gradient, without a graph; ``"central_difference"``, from two.
        hvp_point: Where the Hessian is taken. ``"perturbed"`` follows the paper: at x + ε. ``"upstream"`` does what
            the authors' image code does, which restores x first and so mixes activations of x + ε with weights x.
        backend: ``"auto"``, ``"cpu"``, ``"foreach"`` or ``"reference"``.
        bias_correction: False leaves both moving averages uncorrected, as the authors' language-model code does.
        rho_scheduler: Like ``hessian_power_scheduler``, for ``rho``.
        max_grad_norm: Scales the gradient at x + ε down to this norm, in the update itself; its norm is one more read.
        clip_update: Bound of every element of m̄/(D̄ + eps).
        skip_nonfinite: Skip a step whose gradient at x + ε is not finite: weights and state stay as they were.
        stochastic_rounding: Round updates of bfloat16 and float16 parameters at random, so that small ones are not
            lost. The same on all backends.
        capturable: Keep step counts and bias corrections on the device and read ``Tensor`` learning rates and radii
            there, so that ordinary steps never wait for the device and can be captured in a CUDA graph. Whether a step
            refreshes is still decided on the host; see :meth:`replayed`.
        reduce_grads: Whether gradients and products are reduced over processes here: True if the passes are local (as
            in the authors' loop, under ``no_sync``), False if they are reduced already. None finds out, from an
            attached ``DistributedDataParallel`` or by comparing gradients in the first step.
        perturb_sync: Climb along the gradient of all processes; False climbs in each along its own (m-sharpness).
        maximize: Maximize the objective instead.
        foreach: torch's name for ``backend="foreach"``.
        fused: torch's name for the backend with kernels.

    ``lr``, ``betas``, ``weight_decay``, ``rho``, ``perturb_eps``, ``eps``, ``hessian_power``, ``clip_update`` and
    ``maximize`` may differ between parameter groups.
    """

    _step_supports_amp_scaling = True  # GradScaler.step then sets `grad_scale` and `found_inf` for the call

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        hessian_power_scheduler: schedules.Schedule | schedules.Stepping | None = None,
        lr: float | Tensor = 0.15,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        rho: float = 0.0,
        lazy_hessian: int = 10,
        n_samples: int = 1,
        perturb_eps: float = 1e-12,
        eps: float = 1e-4,
        adaptive: bool = False,
        grad_reduce: str = "mean",
        seed: int = 0,
        *,
        hessian_power: float = 0.5,
        hvp: str = "exact",
        hvp_point: str = "perturbed",
        backend: str = "auto",
        bias_correction: bool = True,
        rho_scheduler: schedules.Schedule | schedules.Stepping | None = None,
        max_grad_norm: float | None = None,
        clip_update: float | None = None,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        capturable: bool = False,
        reduce_grads: bool | None = None,
        perturb_sync: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        """Checks the arguments; see the class."""
        schedules.check_schedule("hessian_power_scheduler", hessian_power_scheduler)
        schedules.check_schedule("rho_scheduler", rho_scheduler)
        check_count("lazy_hessian", lazy_hessian)
        check_count("n_samples", n_samples)
        check_choice("grad_reduce", grad_reduce, ("mean", "sum"))
        check_choice("hvp", hvp, ("exact", "finite_difference", "central_difference"))
        check_choice("hvp_point", hvp_point, ("perturbed", "upstream"))
        if hvp != "exact" and hvp_point == "upstream":
            raise ValueError(f"SASSHA: hvp={hvp!r} has no hvp_point='upstream', which is about graphs; use 'perturbed'")
        if not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"SASSHA: seed is {seed!r}, expected an integer from 0 to 2^63 − 1")
        if max_grad_norm is not None:
            check_number("max_grad_norm", max_grad_norm)
        self.hessian_power_scheduler = hessian_power_scheduler
        self.rho_scheduler = rho_scheduler
        self.lazy_hessian = lazy_hessian
        self.n_samples = n_samples
        self.adaptive = bool(adaptive)
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
            "clip_update": clip_update,
            "maximize": maximize,
            "power_step": 0,
            "rho_step": 0,
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
        self._join_config = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]
        self._weight_norm = 0.0  # ‖x‖ of the ascent's parameters, on refreshes by finite differences
        self._random: RandomState | None = None  # of the step's first pass, for replay_rng
        self._wants_graph = True  # whether the running pass of a closure is the one that is differentiated again
        self._model: nn.Module | None = None

    # ---- parameters ---------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in ``torch.optim``; refuses bad hyperparameters and sparse or complex parameters."""
        if self._ascent is not None:
            raise RuntimeError("SASSHA.add_param_group: the weights are perturbed; call unperturb() first")
        group = dict(param_group)
        check_group({**self.defaults, **group})
        params = group.get("params", ())
        group["params"] = (
            [params] if isinstance(params, Tensor) else params if isinstance(params, set) else list(params)
        )
        for i, entry in enumerate(group["params"]):
            check_param(entry[1] if isinstance(entry, tuple) else entry, i)
        super().add_param_group(group)
        self._plans.clear()

    def get_params(self) -> Iterator[Tensor]:
        """All parameters that require gradients."""
        return (p for group in self.param_groups for p in group["params"] if p.requires_grad)

    # ---- the three calls ----------------------------------------------------------------------------------------

    @no_grad
    def perturb_weights(self, zero_grad: bool = True) -> None:
        """Climbs to x + ε from the gradients of the first backward pass.

        Args:
            zero_grad: Drop these gradients afterwards. Their memory then holds x until :meth:`unperturb`.
        """
        if self._ascent is not None:
            raise RuntimeError("SASSHA.perturb_weights: the weights are perturbed already; call unperturb() first")
        Join.notify_join_context(self)
        self._ascend(self._next_rho(), zero_grad=zero_grad)

    def _ascend(self, rho: Sequence[float | Tensor], *, zero_grad: bool) -> None:
        self._curvature = self._time = None
        self._is_reduced = False
        if self.perturb_sync and self._parallel and self._grads_are_local(self._parameters()):
            self._reduce([p for p in self._parameters() if p.requires_grad], None)
        plan, grads = self._gather()
        if plan is None:
            raise RuntimeError("SASSHA.perturb_weights: no parameter has a gradient; run loss.backward() first")
        idle: bool | list[bool] = zero_grad
        if any(map(requires_grad, grads)):
            grads, idle = [g.detach() for g in grads], False
        elif zero_grad and max(map(sys.getrefcount, grads)) > IDLE_REFCOUNT:
            idle = [count <= IDLE_REFCOUNT for count in map(sys.getrefcount, grads)]
        plan.bind_grads(grads, overwrite=True)
        self._time = self._clock()
        square_sums = plan.square_sums(adaptive=self.adaptive)
        signed = [-r if group["maximize"] else r for r, group in zip(rho, self.param_groups, strict=True)]
        offsets = [group["perturb_eps"] for group in self.param_groups]
        scales = reference.ascent_scales(square_sums, signed, offsets, on_device=self.capturable)
        if self.hvp != "exact" and (self._time % self.lazy_hessian == 0 or any(self._without_curvature(plan))):
            self._weight_norm = plan.weight_norm()
        plan.count_draw(self._draw(plan))
        plan.perturb(scales, adaptive=self.adaptive, take_grads=idle, seed=self.seed)
        self._ascent, self._ascended = plan, True
        self.stats.square_sums, self.stats.scales = square_sums, scales
        self._moved(plan)
        if zero_grad:
            any(map(set_grad, self._flat, repeat(None)))  # for all p: p.grad = None

    @no_grad
    def unperturb(self, scaler: GradScaler | None = None) -> None:
        """Restores x, bit for bit; on a refresh, first takes the Hessian-vector products at x + ε.

        It always restores. If a refresh is due and the gradients have no graph it raises afterwards.

        Args:
            scaler: The ``torch.amp.GradScaler`` that scaled the losses, whose scale the products carry too.
        """
        if self._ascent is None:
            raise RuntimeError("SASSHA.unperturb: the weights are not perturbed; call perturb_weights() first")
        upstream = self.hvp_point == "upstream"
        try:
            self._check_untouched("unperturb")
            if not upstream:
                found = self._reduced(self._curvature_on_ascent())
                known = found.products is not None and scaler is not None
                self._curvature = replace(found, loss_scale=scaler.get_scale() if known else None)  # type: ignore[union-attr]
            if scaler is not None:
                self.stats.divide_by(scaler)
        finally:  # upstream, the graph is still to be used, with weights that it did not see
            self._undo_ascent(tell_autograd=not upstream)

    def _curvature_on_ascent(self) -> Curvature:
        if not self.hessian_due:
            return Curvature(None)
        if self.hvp != "exact":
            no_pass = self._probe is None and all(map(is_, map(grad, self._flat), repeat(None)))
            return Curvature(None) if no_pass else self._probed_curvature(fused=False)  # the user may clip gradients
        plan, grads = self._gather()
        try:
            return self._curvature_at(plan, grads, "unperturb")
        finally:
            self._detach_grads(grads)

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
            closure: Zeroes gradients, runs forward and backward passes and returns the loss. It is called once at x
                and once at x + ε, under ``enable_grad``, with the same random numbers; BatchNorm statistics of an
                attached model move once. A plain ``loss.backward()`` is enough on refreshes too. With ρ = 0 it is
                called once. A sequence of closures accumulates over micro-batches: each runs forward and backward
                passes of its part of the loss and zeroes nothing.
            scaler: The ``torch.amp.GradScaler`` with which closures scale their losses. ``scaler.update()`` follows;
                where gradients overflowed, nothing is changed. (``scaler.step(opt)`` is for the three calls.)
            hessian_closure: On refreshes, computes the products from another, usually smaller, batch.

        Returns:
            The loss of the closure's first call.

        Without a closure and without :meth:`perturb_weights` before it, this is a step with ρ = 0.
        """
        if self._ascent is not None:
            raise RuntimeError("SASSHA.step: the weights are still perturbed; call unperturb() first")
        if closure is not None:
            if hasattr(self, "found_inf"):
                raise RuntimeError(
                    "SASSHA.step: GradScaler.step was given a closure, which would scale nothing in its later passes; "
                    "replace scaler.step(opt, closure) by opt.step(closure, scaler=scaler)"
                )
            return closure_step(self, closure, hessian_closure, scaler)
        if hessian_closure is not None or scaler is not None:
            raise TypeError(
                "SASSHA.step: hessian_closure or scaler was given without closure; pass a closure too, or use the "
                "three calls with unperturb(scaler=scaler) and scaler.step(opt)"
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

    def _unscaled(self, curvature: Curvature, left: Tensor | None) -> Curvature:
        """Takes the loss scale out of the products; ``left`` is what GradScaler left in the gradients."""
        if curvature.products is not None:
            known = curvature.loss_scale or (None if left is None else float(left))
            if known is None:
                raise RuntimeError(
                    "SASSHA.step: GradScaler has unscaled the gradients, but the products of this refresh still carry "
                    "a loss scale that is not known here; call unperturb(scaler=scaler)"
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
                "SASSHA.state_dict: the weights are perturbed, so a checkpoint of the model would not hold them; "
                "call unperturb() first"
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
            raise RuntimeError("SASSHA.load_state_dict: the weights are perturbed; call unperturb() first")
        loaded = check_checkpoint(state_dict, self.param_groups, self.lazy_hessian)
        super().load_state_dict(loaded)
        for saved, p in zip(chain(*(g["params"] for g in loaded["param_groups"])), self._parameters(), strict=True):
            if saved in loaded["state"]:
                self.state[p] = placed(loaded["state"][saved], p, on_device=self.capturable)
        self._plans.clear()
        self._curvature = self._time = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: state, groups and configuration; what is derived is built again."""
        if self._ascent is not None:
            raise RuntimeError("SASSHA: can't copy or pickle while the weights are perturbed; call unperturb() first")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _CONFIG}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See :meth:`__getstate__`."""
        if "lazy_hessian" in state or not hasattr(self, "_plans"):
            self._reset()
        super().__setstate__(state)
