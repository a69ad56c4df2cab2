"""SAM, ASAM and GSAM on any optimizer of torch: the ascent of SASSHA, and the descent of somebody else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import schedules
from .ascent import Climbing
from .base import Params
from .checks import check_number
from .plan import Plan
from .refresh import Curvature
from .variant import Variant

__all__ = ["SAM"]


class SAM(Climbing):
    r"""Sharpness-aware minimization (Foret et al., 2021) with a given optimizer for the descent.

    ``SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)``. One step is the three calls of
    :class:`sassha_fast.SASSHA`, or ``opt.step(closure)``, which replays random numbers, moves BatchNorm statistics once
    and knows of other processes. ``adaptive=True`` is ASAM, ``alpha`` above 0 is GSAM. Norm and ascent are SASSHA's
    fused passes and restored weights are the original ones, bit for bit.

    Args:
        params: Parameters, named parameters or dicts of parameter groups.
        base_optimizer: Class of the optimizer that descends.
        rho: Radius of the ascent. May differ between parameter groups.
        adaptive: ASAM's scaling of ε by the weights.
        adaptive_bias: Whether it covers parameters of one dimension too.
        alpha: Weight of GSAM's orthogonal component.
        perturb_eps: Added to the gradient norm.
        rho_scheduler: A function of the step number, or an object with ``step()``, that gives ``rho``.
        max_grad_norm: Scales the gradient at x + ε down to this norm.
        skip_nonfinite: Skip a step whose gradient at x + ε is not finite.
        grad_reduce: ``"mean"`` or ``"sum"`` over processes.
        reduce_grads: Whether gradients are reduced over processes here; see :class:`sassha_fast.SASSHA`.
        perturb_sync: Climb along the gradient of all processes.
        backend: Of norm and ascent.
        seed: Key of the rounding of reduced-precision parameters.
        **options: Arguments of the base optimizer.
    """

    def __init__(
        self,
        params: Params,
        base_optimizer: type[Optimizer],
        rho: float = 0.05,
        adaptive: bool = False,
        *,
        adaptive_bias: bool = True,
        alpha: float = 0.0,
        perturb_eps: float = 1e-12,
        rho_scheduler: schedules.Schedule | schedules.Stepping | None = None,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        grad_reduce: str = "mean",
        reduce_grads: bool | None = None,
        perturb_sync: bool = False,
        backend: str = "auto",
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Checks the arguments; see the class."""
        if not isinstance(base_optimizer, type) or not issubclass(base_optimizer, Optimizer):
            raise TypeError(f"SAM: base_optimizer is {base_optimizer!r}, expected a class such as torch.optim.SGD")
        check_number("alpha", alpha, caller=self._name)
        theirs = base_optimizer([torch.zeros(1, requires_grad=True)], **options).defaults
        super().__init__(
            params,
            Variant(adaptive=bool(adaptive), adaptive_bias=bool(adaptive_bias), gap=True),
            lr=0.0,
            betas=(0.0, 0.0),
            weight_decay=0.0,
            eps=0.0,
            hessian_power=1.0,
            lazy_hessian=1,
            n_samples=1,
            rho=rho,
            perturb_eps=perturb_eps,
            rho_scheduler=rho_scheduler,
            max_grad_norm=max_grad_norm,
            skip_nonfinite=skip_nonfinite,
            grad_reduce=grad_reduce,
            reduce_grads=reduce_grads,
            perturb_sync=perturb_sync,
            backend=backend,
            seed=seed,
            numbers={**theirs, "alpha": alpha, "ascents": 0},
        )
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self._share()

    def _share(self) -> None:
        """Groups and state are those of the base optimizer, so schedulers and checkpoints see one of each."""
        self.param_groups = self.base_optimizer.param_groups
        self.state = self.base_optimizer.state

    # ---- no curvature -------------------------------------------------------------------------------------------

    @property
    def _scheduled(self) -> bool:
        return False

    def _without_curvature(self, plan: Plan) -> list[bool]:
        """None that should have some."""
        return [False] * len(plan.params)

    def _clock(self) -> int:
        return int(self.param_groups[0]["ascents"])

    # ---- descent ------------------------------------------------------------------------------------------------

    def _is_priming(self, grads: list[Tensor]) -> bool:
        return False

    def _update(
        self,
        plan: Plan,
        curvature: Curvature,
        *,
        restore: bool = False,
        loss_scale: Tensor | None = None,
        overflow: float | Tensor = 0.0,
        check_finite: bool = False,
    ) -> None:
        """The base optimizer's step from x."""
        grad_scale, skip = self._descent_limits(plan, loss_scale, overflow, check_finite or self.skip_nonfinite)
        self._undo_ascent()
        for group in self.param_groups:
            group["ascents"] += 1
        if skip:
            self.stats.skipped_steps += 1
            return
        if isinstance(grad_scale, Tensor) or grad_scale != 1.0:
            torch._foreach_mul_([p.grad for p in plan.params if p.grad is not None], grad_scale)
        self.base_optimizer.step()

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of a SAM with the same base optimizer."""
        super().load_state_dict(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        missing = [g for g in state_dict["param_groups"] if "ascents" not in g]
        if missing:
            raise ValueError("SAM.load_state_dict: a parameter group has no 'ascents'; it was not written by SAM")
        self.base_optimizer.load_state_dict(state_dict)
        self._share()
        self._plans.clear()

    def __getstate__(self) -> dict[str, Any]:
        """See :meth:`SecondOrder.__getstate__`."""
        return {**super().__getstate__(), "base_optimizer": self.base_optimizer}
