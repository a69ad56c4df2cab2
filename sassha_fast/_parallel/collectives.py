"""Reduction of many tensors over processes in few collectives: after a backward pass, or while it still runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .._passes.accessors import is_changed, noted

BUCKET_BYTES = 25 << 20  # as DDP's: large enough to be bound by bandwidth, small enough to overlap with computation


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors in parts of one dtype and device that fit a bucket. Every process cuts them alike."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    done = []
    for t in tensors:
        key, size = (t.dtype, t.device), t.numel() * t.element_size()
        if key in open_buckets and filled[key] + size > BUCKET_BYTES:
            done.append(open_buckets.pop(key))
        if key not in open_buckets:
            open_buckets[key], filled[key] = [], 0
        open_buckets[key].append(t)
        filled[key] += size
    return [*done, *open_buckets.values()]


def _unpack(flat: Tensor, tensors: Sequence[Tensor], work: Any, divisor: int) -> None:
    """Waits for a message and copies its parts to where they belong."""
    work.wait()
    if divisor > 1:
        flat.div_(divisor)
    parts = torch.split(flat, [t.numel() for t in tensors])
    torch._foreach_copy_(list(tensors), [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])


@torch.no_grad()
def all_reduce_together(
    tensors: Sequence[Tensor], group: Any = None, *, mean: bool = True, op: Any = dist.ReduceOp.SUM
) -> None:
    """Sums, averages, or what ``op`` says, every tensor over the processes, in place and in few collectives.

    The copy of a bucket into its message overlaps with the transfer of the one before.
    """
    in_flight = []
    for bucket in _buckets(tensors):
        flat = torch.cat([t.reshape(-1) for t in bucket])
        in_flight.append((flat, bucket, dist.all_reduce(flat, op=op, group=group, async_op=True)))
    for message in in_flight:
        _unpack(*message, dist.get_world_size(group) if mean else 1)


@dataclass
class _Bucket:
    """Parameters whose gradients travel together.

    Attributes:
        params: In the order of the message.
        waiting: Ids of those whose gradient is not there yet.
        flat: The message, once it is under way.
        work: Its transfer.
        stale: Whether a gradient grew after it was copied, as where a pass runs several backward passes.
        sent: The gradients that were copied, with their versions: a closure may change them after its backward pass.
    """

    params: list[Tensor]
    waiting: set[int] = field(default_factory=set)
    flat: Tensor | None = None
    work: Any = None
    stale: bool = False
    sent: list[tuple[Tensor, int] | None] = field(default_factory=list)

    @property
    def is_changed(self) -> bool:
        """Whether any gradient is not what was copied: clipped in place, say, or another tensor."""
        return any(is_changed(p.grad, sent) for p, sent in zip(self.params, self.sent, strict=True))


class EarlyReduction:
    """Sums gradients over processes while a backward pass still computes others.

    A bucket travels as soon as all its gradients are there and the buckets before it are under way, so every process
    sends them in one order. What is not there when the pass ends travels as zeros: processes need not use the same
    parameters. Gradients are copied into messages and left alone until :meth:`finish`.
    """

    def __init__(self, params: Sequence[Tensor], group: Any) -> None:
        """Cuts the parameters, the last first as a backward pass finds them, into buckets."""
        self.group = group
        self.buckets = [_Bucket(bucket, set(map(id, bucket))) for bucket in _buckets(reversed(params))]
        self.places = {id(p): bucket for bucket in self.buckets for p in bucket.params}
        self.launched = 0
        self.handles: list[RemovableHandle] = []

    def __enter__(self) -> EarlyReduction:
        """From here on, gradients that are accumulated are sent. One that is frozen since gets none in this pass."""
        try:
            for p in (p for bucket in self.buckets for p in bucket.params if p.requires_grad):
                self.handles.append(p.register_post_accumulate_grad_hook(self._ready))  # type: ignore[no-untyped-call]
        except BaseException:  # later passes must not send for this one
            self.__exit__()
            raise
        return self

    def __exit__(self, *args: object) -> None:
        """Up to here."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _ready(self, p: Tensor) -> None:
        bucket = self.places[id(p)]
        if bucket.flat is not None:
            bucket.stale = True
        bucket.waiting.discard(id(p))
        while self.launched < len(self.buckets) and not self.buckets[self.launched].waiting:
            self._launch()

    @torch.no_grad()
    def _launch(self) -> None:
        bucket = self.buckets[self.launched]
        bucket.sent = [noted(p.grad) for p in bucket.params]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in bucket.params]
        bucket.flat = torch.cat([g.reshape(-1) for g in grads])
        bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
        self.launched += 1

    def launch_all(self) -> None:
        """Sends what was not sent during the pass."""
        while self.launched < len(self.buckets):
            self._launch()

    @property
    def stale(self) -> list[bool]:
        """Of every bucket, whether its message is out of date in this process."""
        return [bucket.stale or bucket.is_changed for bucket in self.buckets]

    @torch.no_grad()
    def finish(self, stale: Sequence[bool], *, mean: bool) -> list[Tensor]:
        """Writes the sums, or means, into the gradients that there are.

        Args:
            stale: Of every bucket, whether its message is out of date in any process.
            mean: Divide by the number of processes.

        Returns:
            The parameters of stale buckets, whose gradients are still those of this process.
        """
        left: list[Tensor] = []
        for bucket, old in zip(self.buckets, stale, strict=True):
            assert bucket.flat is not None
            targets = [torch.empty_like(p) if p.grad is None else p.grad.detach() for p in bucket.params]
            if old:
                bucket.work.wait()
                left += bucket.params
            else:
                _unpack(bucket.flat, targets, bucket.work, dist.get_world_size(self.group) if mean else 1)
        return left
