"""Hooks of a model that say what goes wrong before somebody else does, in words that do not help."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from .._passes.shards import local
from .._passes.upload import is_capturing
from .params import Parameters
from .step import Step, some_of

LIGHTNING = ("lightning", "pytorch_lightning")


class SyncedGraph:
    """A forward hook of ``DistributedDataParallel``, whose reduction can't handle a backward pass with a graph.

    A hook of the output is the first thing that runs in a backward pass, and gradients are enabled in it if the pass
    makes a graph.
    """

    def __init__(self, caller: str) -> None:
        """Takes what errors call the optimizer."""
        self.caller = caller

    def __call__(self, model: DistributedDataParallel, args: Any, output: Any) -> None:
        """Watches the backward pass of this forward pass, if DDP will reduce it."""
        if model.require_backward_grad_sync and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._check)  # type: ignore[no-untyped-call]

    def _check(self, grad: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.caller}: DDP would reduce this backward pass, which has a graph (create_graph=True), and fail "
                "with 'a leaf Variable that requires grad is being used in an in-place operation'; run forward and "
                f"backward pass within `with ddp_model.no_sync():`, and {self.caller} reduces gradients and products "
                "itself, or use opt.step(closure)"
            )


# ---- closures of a list ------------------------------------------------------------------------------------------


class LostSums:
    """Notices a closure that gives up the gradients of those before it, by one element of every parameter.

    Whether a gradient was zeroed and then added to can't be seen from what it is. So hooks tell what came, and the
    element of largest magnitude whether it came in place of what was there. Asked once in a training, as it reads them.

    Attributes:
        sums: Parameters that had a gradient other than 0, with the place of that element and its value.
    """

    def __init__(self, params: Parameters) -> None:
        """Looks at the gradients before the closure."""
        self.sums: list[tuple[int, Tensor, int, float]] = []
        self._came: dict[int, float] = {}  # by position
        self._hooks: list[Any] = []
        for i, p in enumerate(params.all):
            if p.grad is None or not p.requires_grad or p.grad.layout is not torch.strided or is_capturing(p.device):
                continue
            grad = local(p.grad.detach()).flatten()
            place = int(grad.abs().argmax()) if grad.numel() else 0
            value = float(grad[place]) if grad.numel() else 0.0
            if value and math.isfinite(value):
                self.sums.append((i, p, place, value))
                self._hooks.append(p.register_hook(partial(self._add, i, place)))  # type: ignore[no-untyped-call]

    def _add(self, i: int, place: int, grad: Tensor) -> None:
        self._came[i] = self._came.get(i, 0.0) + float(local(grad.detach()).flatten()[place])

    def stop(self) -> None:
        """Leaves nothing at the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def warn(self, step: Step, number: int) -> None:
        """Warns if any gradient is only what came in the closure of this number."""
        lost = []
        for i, p, place, before in self.sums:
            now = 0.0 if p.grad is None else float(local(p.grad.detach()).flatten()[place])
            if abs(now - self._came.get(i, 0.0)) < 1e-3 * abs(before):
                lost.append(step.parts.params.names()[i])
        found = some_of(lost)
        if found is not None:
            warnings.warn(
                f"{step.parts.options.caller}.step: closure {number} of the list has zeroed or replaced the gradient "
                f"of {found}, and what the closures before it gave is lost with that; leave zeroing out of closures "
                "that are passed as a list",
                stacklevel=2,
            )


# ---- a model that is not attached -------------------------------------------------------------------------------


def warn_of_lightning(step: Step, closure: object) -> None:
    """Warns if Lightning runs a method that keeps x + ε in the parameters, and nobody shows it the true weights."""
    while isinstance(closure, partial) or hasattr(closure, "__wrapped__"):
        closure = closure.func if isinstance(closure, partial) else closure.__wrapped__
    home = str(getattr(closure, "__module__", "")).partition(".")[0]
    if step.parts.options.variant.x_in_state and home in LIGHTNING:
        name = step.parts.options.caller
        warnings.warn(
            f"{name}.step: Lightning validates and saves what the parameters hold, which is x + ε and not the true "
            "weights; pass callbacks=[SasshaCallback()] to the Trainer (sassha_fast.integrations.lightning), or call "
            "opt.attach(model) and show the true weights yourself by opt.eval() and opt.train()",
            stacklevel=2,
        )


def _something_is_compiled() -> bool:
    """Whether ``torch.compile`` was called. Where this version of torch does not tell, yes."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    compilers = getattr(
        frames, "cached_backends", {"unknown": True}
    )  # None stands for functions that are never compiled
    return frames is not None and any(compiler is not None for compiler in compilers.values())


@contextmanager
def watched_statistics(step: Step) -> Iterator[None]:
    """Around all passes of a step: warns if those after the first move running statistics again."""
    if _something_is_compiled():
        yield  # a hook of all modules would make compiled ones compile again, or warn
        return
    warned = False

    def note(module: nn.Module, args: Any) -> None:
        nonlocal warned
        moves = isinstance(module, _NormBase) and module.training and module.track_running_stats
        if moves and step.climbed and not warned:
            warned = True
            warnings.warn(
                f"{step.parts.options.caller}.step: {type(module).__name__} moves its running statistics in every pass "
                "of a step, as no model is attached; call opt.attach(model) before the first step, and they move once "
                "(in Lightning, callbacks=[SasshaCallback()] does that)",
                stacklevel=2,
            )

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors that a model returns."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple, Mapping)):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(part)
