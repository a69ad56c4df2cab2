"""The optimizers of the paper's tables by name, and schedules of their learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from examples.lib.presets import Preset, Settings
from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH

# ---- optimizers --------------------------------------------------------------------------------------------------


def _shampoo(params: Iterable[nn.Parameter], s: Settings, **_: Any) -> Optimizer:
    try:
        from pytorch_optimizer import Shampoo
    except ImportError as error:
        raise SystemExit(f"--optimizer shampoo: {error}; pip install pytorch_optimizer") from error
    return Shampoo(
        params, s.lr, weight_decay=s.weight_decay, matrix_eps=s.eps or 1e-6, preconditioning_compute_steps=10
    )


def _second_order(method: type[Optimizer], *names: str) -> Callable[..., Optimizer]:
    """One of ours, with those settings that it knows."""

    def build(params: Iterable[nn.Parameter], s: Settings, hvp: str, **shared: Any) -> Optimizer:
        given = {name: getattr(s, name) for name in ("lazy_hessian", *names)}
        if s.eps is not None:
            given["eps"] = s.eps
        return method(
            params, lr=s.lr, hvp=hvp, max_grad_norm=s.grad_clip, weight_decay=s.weight_decay / s.lr, **given, **shared
        )

    return build


def _sam(base: type[Optimizer], **fixed: Any) -> Callable[..., Optimizer]:
    def build(params: Iterable[nn.Parameter], s: Settings, hvp: str, **shared: Any) -> Optimizer:
        decay = s.weight_decay / s.lr if base is AdamW else s.weight_decay
        return SAM(params, base, rho=s.rho, lr=s.lr, weight_decay=decay, max_grad_norm=s.grad_clip, **fixed, **shared)

    return build


BUILDERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda params, s, **_: SGD(params, s.lr, momentum=0.9, weight_decay=s.weight_decay),
    "adamw": lambda params, s, **_: AdamW(params, s.lr, weight_decay=s.weight_decay / s.lr),
    "sam": _sam(SGD, momentum=0.9),
    "sam-adamw": _sam(AdamW),
    "adahessian": _second_order(AdaHessian),
    "sophia-h": _second_order(SophiaH, "clip_threshold"),
    "shampoo": _shampoo,
    "sassha": _second_order(SASSHA, "rho"),
    "m-sassha": _second_order(MSASSHA, "rho"),
    "g-sassha": _second_order(GSASSHA, "rho", "alpha"),
}
TITLES = {
    "sgd": "SGD",
    "adamw": "AdamW",
    "sam": "SAM",
    "sam-adamw": "SAM on AdamW",
    "adahessian": "AdaHessian",
    "sophia-h": "Sophia-H",
    "shampoo": "Shampoo",
    "sassha": "SASSHA",
    "m-sassha": "M-SASSHA",
    "g-sassha": "G-SASSHA",
}


def build_optimizer(
    name: str, params: Iterable[nn.Parameter], settings: Settings, *, hvp: str = "exact", **shared: Any
) -> Optimizer:
    """An optimizer of the paper's tables. All of them take ``step(closure)``."""
    return BUILDERS[name](params, settings, hvp=hvp, **shared)


# ---- schedules ---------------------------------------------------------------------------------------------------


def build_schedule(opt: Optimizer, preset: Preset, epochs: int, steps: int) -> LRScheduler | ReduceLROnPlateau:
    """The learning rate over ``epochs`` of ``steps``; milestones move with the number of epochs."""
    if preset.schedule == "plateau":
        return ReduceLROnPlateau(opt, "min", factor=preset.decay, patience=5)
    warmup = steps * preset.warmup * epochs / preset.epochs
    milestones = [steps * m * epochs / preset.epochs for m in preset.milestones]

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if preset.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps * epochs - warmup, 1)))
        return preset.decay ** sum(step >= m for m in milestones)

    return LambdaLR(opt, factor)
