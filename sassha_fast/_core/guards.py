"""Hooks of a model that say what goes wrong before somebody else does, in words that do not help."""

from __future__ import annotations

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

from .step import Step

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
