"""Hooks of a model that say what goes wrong before somebody else does, in words that do not help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


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


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors that a model returns."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple, Mapping)):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(part)
