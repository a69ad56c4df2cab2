"""What ``torch.amp.GradScaler`` does to an optimizer, and what an update has to know of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .params import Parameters


class Amp(NamedTuple):
    """What mixed precision tells an update.

    Attributes:
        loss_scale: What the gradients still have to be divided by.
        overflow: Not 0 if gradients are known to have overflowed.
        check_finite: Find out whether they have.
    """

    loss_scale: Tensor | None = None
    overflow: float | Tensor = 0.0
    check_finite: bool = False


NO_AMP = Amp()


def scale_of(scaler: GradScaler) -> float | Tensor:
    """The loss scale at hand of a scaler that has scaled a loss."""
    scale = scaler._get_scale_async()
    return scaler.get_scale() if scale is None else kept_scale(scale)


def kept_scale(scale: Tensor) -> float | Tensor:
    """A loss scale that its scaler may change. A device is not waited for: what it has stays there."""
    return float(scale) if scale.device.type == "cpu" else scale.double()


def forget_scaler(opt: Optimizer) -> None:
    """Takes back what GradScaler.step sets for a call, which it takes back itself only after a step."""
    for name in ("grad_scale", "found_inf"):
        vars(opt).pop(name, None)


def has_unscaled(scaler: GradScaler, opt: Optimizer) -> bool:
    """Whether a scaler has unscaled the gradients of an optimizer. It tells nobody, so one has to look."""
    states = getattr(scaler, "_per_optimizer_states", {})
    entry = states.get(id(opt)) if scaler.is_enabled() else None
    return entry is not None and getattr(entry.get("stage"), "name", "") == "UNSCALED"


class Unscaling:
    """Takes the loss scale out of the gradients, or tells the update what ``GradScaler.step`` would tell it.

    ``unscale_`` refuses float16 gradients: without their scale, small ones would be lost to rounding.
    """

    def __init__(self, scaler: GradScaler, opt: Optimizer, params: Parameters, caller: str) -> None:
        """Has done nothing yet."""
        self.scaler, self.opt, self.params, self.caller = scaler, opt, params, caller
        self.has_begun = False

    def __call__(self) -> Amp:
        """Once a step, when the gradients are complete."""
        scaler, opt = self.scaler, self.opt
        entry = scaler._per_optimizer_states[id(opt)]
        if entry["stage"] is not OptState.READY:
            raise RuntimeError(
                f"{self.caller}.step: the scaler has served a step since its last update; call "
                "scaler.update() after every step"
            )
        self.has_begun = True
        grads = [p.grad for p in self.params.all if p.grad is not None]
        if all(g.dtype != torch.float16 for g in grads):
            scaler.unscale_(opt)
            return Amp(check_finite=True)
        found = scaler._check_inf_per_device(opt)
        scale = scaler._get_scale_async()
        assert scale is not None  # as there are losses that it has scaled, or the check has raised
        entry["stage"] = OptState.STEPPED
        return Amp(scale, torch.stack([t.to(scale.device, non_blocking=True) for t in found.values()]).sum())

    def take_back(self) -> None:
        """After an exception: the scaler may serve another step before its update, as this one was none."""
        if self.has_begun:
            self.scaler._per_optimizer_states[id(self.opt)]["stage"] = OptState.READY


class StepHook:
    """A hook of ``step``, which is called outside of it."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, opt: Optimizer, *args: Any) -> Any:
        try:
            return self.hook(opt, *args)
        except BaseException:
            forget_scaler(opt)
            raise
