"""Host memory on a device, by copies that nobody waits for: tables of addresses, and small numbers of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KEPT = 12  # tables on the device: those that the passes of a step take in turn
SPARES = 4  # host buffers made ahead for a capture, which must not allocate pinned memory


def uploaded(values: Tensor, device: torch.device, kept: list[Tensor] | None = None) -> Tensor:
    """The values in memory of the device.

    The copy reads pinned memory, which torch does not hand out again before it is done. A copy that is captured reads
    it at every replay, so it must outlive the graph: ``kept`` gets it.
    """
    if device.type == "cpu":
        return values
    pinned = values.pin_memory()
    if kept is not None and torch.cuda.is_current_stream_capturing():
        kept.append(pinned)
    return pinned.to(device, non_blocking=True)


@dataclass
class _Mirror:
    """A table on the device.

    Attributes:
        content: The table it was copied from, in pinned memory that is never written again.
        there: The copy.
        frozen: Whether a CUDA graph reads the copy, which then keeps its content for good.
    """

    content: Tensor
    there: Tensor
    frozen: bool = False


class Mirrors:
    """Copies of a host table on the device, by content: a table that was there before is not copied again.

    Gradients come at the same addresses step after step, as the caching allocator hands out the same memory; then
    nothing is copied at all.

    Attributes:
        uploads: How many copies were made.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes no copy yet."""
        self.uploads = 0
        self._device = device
        self._kept: list[_Mirror] = []  # the latest used is the last
        self._spares: list[_Mirror] = []

    def __len__(self) -> int:
        """Copies that are kept."""
        return len(self._kept)

    def freeze(self, there: Tensor) -> None:
        """Keeps a copy as it is for good, as one that a CUDA graph reads."""
        for mirror in self._kept:
            mirror.frozen |= mirror.there is there

    def find(self, table: Tensor) -> Tensor:
        """The table on the device, copied there without waiting if it is not there already."""
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        for i, mirror in enumerate(reversed(self._kept), start=1):
            if torch.equal(mirror.content, table):
                self._kept.append(self._kept.pop(-i))
                break
        else:
            mirror = self._from_spare(table) if capturing else self._upload(table)
            self._kept.append(mirror)
        if capturing:
            self.freeze(mirror.there)
        return mirror.there

    def _upload(self, table: Tensor) -> _Mirror:
        free = [mirror for mirror in self._kept if not mirror.frozen]
        if len(free) >= KEPT:
            # The stream orders the copy after the last kernel that reads the table.
            self._kept = [mirror for mirror in self._kept if mirror is not free[0]]
            there = free[0].there
        else:
            there = torch.empty_like(table, device=self._device)
        while self._device.type == "cuda" and len(self._spares) < SPARES:
            self._spares.append(_Mirror(self._pinned(table), torch.empty_like(table, device=self._device)))
        return self._copy(self._pinned(table), there)

    def _from_spare(self, table: Tensor) -> _Mirror:
        if not self._spares:
            raise RuntimeError(
                "SASSHA: no memory is left to capture this step with; run a step outside of the capture before it"
            )
        spare = self._spares.pop()
        spare.content.copy_(table)
        return self._copy(spare.content, spare.there)

    def _copy(self, content: Tensor, there: Tensor) -> _Mirror:
        self.uploads += 1
        there.copy_(content, non_blocking=True)
        return _Mirror(content, there)

    def _pinned(self, table: Tensor) -> Tensor:
        """A new copy on the host; its memory is not handed out again before the device has read it."""
        return table.pin_memory() if self._device.type == "cuda" else table.clone()
