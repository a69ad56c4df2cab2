"""SAM, ASAM and GSAM on any optimizer of torch: the ascent of SASSHA, and the descent of somebody else."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from . import backends, schedules
from ._core.ascent import GradientAscent
from ._core.descent import Delegated
from ._core.optimizer import FusedOptimizer, Params
from ._core.options import HYPERPARAMETERS, Options
from .checks import check_flag
from .variant import Variant

__all__ = ["SAM"]


class SAM(FusedOptimizer):
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

    ascent_part = GradientAscent
    descent_part = Delegated
    checked_hyperparameters = ("rho", "perturb_eps", "alpha")  # the base optimizer checks its own

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
        name = type(self).__name__
        if not isinstance(base_optimizer, type) or not issubclass(base_optimizer, Optimizer):
            raise TypeError(f"{name}: base_optimizer is {base_optimizer!r}, expected a class such as torch.optim.SGD")
        check_flag("adaptive", adaptive, caller=name)
        check_flag("adaptive_bias", adaptive_bias, caller=name)
        chosen = Options(
            name,
            Variant(adaptive=bool(adaptive), adaptive_bias=bool(adaptive_bias), gap=True),
            rho_scheduler=rho_scheduler,
            max_grad_norm=max_grad_norm,
            skip_nonfinite=skip_nonfinite,
            grad_reduce=grad_reduce,
            reduce_grads=reduce_grads,
            perturb_sync=perturb_sync,
            backend=backends.resolve(backend, caller=name),
            seed=seed,
        )
        theirs = base_optimizer([torch.zeros(1, requires_grad=True)], **options).defaults
        own = {"rho": rho, "perturb_eps": perturb_eps, "alpha": alpha, "rho_step": 0, "ascents": 0}
        super().__init__(params, chosen, {**theirs, **own})
        self._use(base_optimizer(self.param_groups, **options))

    def _use(self, base: Optimizer) -> None:
        """Takes the base optimizer. Groups and state are its own, so schedulers and checkpoints see one of each."""
        self.base_optimizer = base
        self._parts.descent = Delegated(base)
        self.param_groups, self.state = base.param_groups, base.state

    @override
    def _load(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of a SAM with the same base optimizer. Hyperparameters that SAM does not have are left."""
        missing = [g for g in state_dict["param_groups"] if "ascents" not in g]
        if missing:
            name = self._parts.options.caller
            raise ValueError(f"{name}.load_state_dict: a parameter group has no 'ascents'; it was not written by SAM")
        phantoms = HYPERPARAMETERS.keys() - self.defaults.keys()  # which 0.1.0 wrote, and schedulers took for real
        saved = [{key: g[key] for key in g if key not in phantoms} for g in state_dict["param_groups"]]
        self.base_optimizer.load_state_dict({**state_dict, "param_groups": saved})
        self._take_over(self.base_optimizer.state, self.base_optimizer.param_groups)
        self._use(self.base_optimizer)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "base_optimizer": self.base_optimizer}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "base_optimizer" in state:
            self._use(state["base_optimizer"])
