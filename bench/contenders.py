"""One set-up for all optimizers on given shapes: the same weights and gradients, and what counts as their work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from eager import EagerSASSHA
from kernels import kernel_backends, tensors
from measure import Timed, seconds_of, stopwatch
from shapes import Shapes, count
from torch import Tensor
from torch.optim import Optimizer

from sassha_fast import SAM, SASSHA, AdaHessian, SophiaH

try:
    from pytorch_optimizer import Shampoo
except ImportError:  # an extra of the benchmarks
    Shampoo = None

NEVER = 10**9  # a refresh interval that leaves ordinary steps only, after the first
LR, RHO = 1e-3, 0.05


@lru_cache(maxsize=2)
def _gradients(shapes: tuple[tuple[int, ...], ...], seed: int) -> list[Tensor]:
    """Gradients that no contender writes to; all have the same, so that a hundred million parameters fit."""
    return tensors(list(shapes), seed)


def _parameters(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(t.to(dtype)) for t in tensors(shapes, 0)]


def _set_grads(params: list[torch.nn.Parameter], grads: list[Tensor]) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = g


def _refresh(opt: Optimizer, params: list[torch.nn.Parameter]) -> None:
    """The first step, which refreshes, so that there is a curvature: that of ‖x‖²/2."""
    _set_grads(params, [p * 1.0 for p in params])
    opt.step()
    opt.zero_grad()


def one_call(shapes: Shapes, make: Callable[..., Optimizer], *, refresh: bool = False, **options: object) -> Timed:
    """``step`` with gradients in place."""
    params = _parameters(shapes)
    opt = make(params, lr=LR, **options)
    if refresh:
        _refresh(opt, params)
    _set_grads(params, _gradients(tuple(shapes), 1))
    return stopwatch(opt.step)


def three_calls(
    shapes: Shapes,
    make: Callable[..., Optimizer],
    *,
    refresh: bool = True,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> Timed:
    """The work of perturb_weights, unperturb and step.

    Setting gradients is the backward passes' work and not timed, for no contender. Giving their memory back is
    zero_grad's, and costs nothing here: see ``measure.keep_freed_memory``.
    """
    params = _parameters(shapes, dtype)
    opt = make(params, lr=LR, rho=0.0 if refresh else RHO, **options)
    if refresh:
        _refresh(opt, params)
        for group in opt.param_groups:
            group["rho"] = RHO
    first, second = _gradients(tuple(shapes), 1), _gradients(tuple(shapes), 2)

    def copied(grads: list[Tensor]) -> None:
        """Sets copies as gradients, whose memory nobody else holds."""
        _set_grads(params, [g.to(dtype, copy=True) for g in grads])

    def descend() -> None:
        opt.unperturb()
        opt.step()

    def timed() -> float:
        copied(first)
        taken = seconds_of(partial(opt.perturb_weights, zero_grad=True))
        copied(second)
        taken += seconds_of(descend)
        opt.zero_grad()
        return taken

    return timed


def shampoo(shapes: Shapes) -> Timed:
    """The mean over ten steps of which one inverts the preconditioners.

    Each has copies of the gradients, which it transposes in place.
    """
    params = _parameters(shapes)
    opt = Shampoo(params, lr=LR)

    def step(interval: int) -> float:
        _set_grads(params, [g.clone() for g in _gradients(tuple(shapes), 1)])
        opt.preconditioning_compute_steps = interval
        return seconds_of(opt.step)

    return lambda: 0.9 * step(NEVER) + 0.1 * step(1)


@dataclass(frozen=True)
class Contender:
    """How to build an optimizer that is timed on shapes.

    Attributes:
        build: Takes the shapes.
        calls: What one step consists of: "three calls", or "step" alone.
        most_parameters: It is left out of models that are larger,
        most_tensors: or that have more tensors.
    """

    build: Callable[[Shapes], Timed]
    calls: str
    most_parameters: int = 10**9
    most_tensors: int = 10**9

    def takes(self, shapes: Shapes) -> bool:
        return count(shapes) <= self.most_parameters and len(shapes) <= self.most_tensors


def _sassha(backend: str) -> Contender:
    return Contender(partial(three_calls, make=SASSHA, lazy_hessian=NEVER, backend=backend), "three calls")


def _adamw(**options: bool) -> Contender:
    return Contender(partial(one_call, make=torch.optim.AdamW, **options), "step")


def _sam(params: list[torch.nn.Parameter], **options: object) -> SAM:
    return SAM(params, torch.optim.AdamW, fused=True, **options)


# Contenders that are compared to a hair stand next to each other.
OURS = f"sassha {kernel_backends()[0]}"
CONTENDERS = {
    OURS: _sassha(kernel_backends()[0]),
    "adamw fused": _adamw(fused=True),
    "sam": Contender(partial(three_calls, make=_sam, refresh=False), "three calls"),
    "adahessian": Contender(partial(one_call, make=AdaHessian, refresh=True, lazy_hessian=NEVER), "step"),
    "sophia-h": Contender(partial(one_call, make=SophiaH, refresh=True, lazy_hessian=NEVER), "step"),
    "adamw foreach": _adamw(foreach=True),
    "adamw for-loop": _adamw(foreach=False, fused=False),
    **{f"sassha {backend}": _sassha(backend) for backend in (*kernel_backends()[1:], "foreach")},
    "eager loop": Contender(partial(three_calls, make=EagerSASSHA, lazy_hessian=NEVER), "three calls"),
}
if Shampoo is not None:
    # Its preconditioners are square in every dimension, and each tensor has its own to invert.
    CONTENDERS["shampoo"] = Contender(shampoo, "step", most_parameters=10**6, most_tensors=100)


def build(shapes: Shapes) -> dict[str, Timed]:
    """All optimizers that take these shapes."""
    return {name: contender.build(shapes) for name, contender in CONTENDERS.items() if contender.takes(shapes)}
