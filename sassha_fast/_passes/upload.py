"""Host memory on a device, by copies that nobody waits for: tables of addresses, and small numbers of a step.

A copy reads pinned memory, which torch does not hand out again before it is done. A CUDA graph reads it, and the copy,
at every replay, so both have to outlive the graph. Nobody tells when a graph is gone: what a capture has used is kept
as long as the plan that it belongs to, and the optimizer keeps such plans for good.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

# On the device. After a refresh torch's allocator takes some steps to settle, and goes other ways than the last time: a
# run with 40 tensors and refreshes ten steps apart knows most places of gradients after 180 tables.
KEPT_TABLES = 256
FEWEST_TABLES, KEPT_BYTES = 8, 16 << 20  # but of large models fewer, unless that is less than one step takes
KEPT_CONSTANTS = 64  # a learning rate that changes at every step must not fill the device
RESERVED_TABLES = 64  # that captures may upload before an eager step sets more memory aside
RESERVED_BYTES = 1 << 20  # at least


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# ---- pinned memory ----------------------------------------------------------------------------------------------


class Reserve:
    """Pinned memory that was set aside for captures: there it must not be allocated, as CUDA may wait for the device.

    Newer versions of torch find a way. They are asked when there is nothing left.
    """

    def __init__(self) -> None:
        """Has none."""
        self._memory: Tensor | None = None
        self._used = 0

    def prepare(self, largest: int) -> None:
        """Outside of a capture: sees that there is memory for many copies of so many bytes."""
        left = 0 if self._memory is None else self._memory.numel() - self._used
        if left < largest * RESERVED_TABLES // 2 or left < RESERVED_BYTES // 2:
            # What was handed out of the old block keeps it alive.
            size = max(RESERVED_BYTES, largest * RESERVED_TABLES)
            self._memory, self._used = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True), 0

    def pinned(self, values: Tensor) -> Tensor:
        """Within a capture: a pinned copy of a contiguous tensor."""
        size = values.numel() * values.element_size()
        if self._memory is None or self._used + size > self._memory.numel():
            try:
                return values.pin_memory()
            except RuntimeError as error:
                raise RuntimeError(
                    "SASSHA: no memory is left to capture this step with; run a step outside of the capture before it"
                ) from error
        room = self._memory[self._used : self._used + size].view(values.dtype).view(values.shape)
        self._used += -(-size // 64) * 64
        return room.copy_(values)


_RESERVE = Reserve()


class Uploader:
    """Copies to one device.

    Attributes:
        device: Where to.
        uploads: How many copies were made.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes no copy yet."""
        self.device = device
        self.uploads = 0
        self._captured: list[Tensor] = []  # pinned memory and copies that CUDA graphs read

    def upload(self, values: Tensor, there: Tensor | None = None) -> Tensor:
        """The values in memory of the device, if it is given in ``there``; those of a CPU are where they are.

        The stream orders the copy after the last kernel that reads what was there.
        """
        self.uploads += 1
        if self.device.type == "cpu":
            return values if there is None else there.copy_(values)
        if not is_capturing(self.device):
            pinned = values.pin_memory()
            if there is None:
                return pinned.to(self.device, non_blocking=True)
            return there.copy_(pinned, non_blocking=True)
        pinned = _RESERVE.pinned(values)
        there = pinned.to(self.device, non_blocking=True)
        self._captured += [pinned, there]
        return there

    def prepare(self, bytes_each: int) -> None:
        """Sets memory aside for captures, outside of one."""
        if self.device.type == "cuda" and not is_capturing(self.device):
            _RESERVE.prepare(bytes_each)


# ---- tables -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Mirror:
    """A table on the device.

    Attributes:
        content: The table it was copied from.
        digest: By which to look for it.
        there: The copy.
        used: When it was used last.
        frozen: Whether a CUDA graph reads the copy, which then is kept for good.
    """

    content: Tensor
    digest: int
    there: Tensor
    used: int = 0
    frozen: bool = False


class Mirrors:
    """Copies of a host table on the device, by content: a table that was there before is not copied again.

    Gradients come at the same addresses step after step, as the caching allocator hands out the same memory; then
    nothing is copied at all. Passes come in the same order, so the copy to look at first is the one that came next the
    last time.

    What a capture uploads is there only when its graph has been replayed, so no other call finds it.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes no copy yet."""
        self._uploader = Uploader(device)
        self._kept: dict[int, list[_Mirror]] = {}  # by digest
        self._weights = torch.empty(0, dtype=torch.int64, device="cpu")  # of the numbers of a table in its digest
        self._last: _Mirror | None = None
        self._next: dict[int, _Mirror] = {}  # by id of a mirror the one that was used after it, last time
        self._captured: _Mirror | None = None  # of the call at hand, within a capture
        self._room: list[Tensor] | None = None  # memory for copies, from the first on
        self._time = 0

    @property
    def uploads(self) -> int:
        """How many copies were made."""
        return self._uploader.uploads

    def __len__(self) -> int:
        """Copies that are kept."""
        return sum(map(len, self._kept.values()))

    def kept(self) -> list[Tensor]:
        """Memory of all copies."""
        return [*(mirror.there for mirror in self._all()), *(self._room or ())]

    def begin(self) -> None:
        """A call of the optimizer begins: it may be in another capture than the last one, or in none."""
        self._captured = None

    def find(self, table: Tensor) -> Tensor:
        """The table on the device, copied there without waiting if it is not there already."""
        capturing = is_capturing(self._uploader.device)
        mirror = self._known(table)
        if mirror is None and capturing:
            if self._captured is None or not torch.equal(self._captured.content, table):
                self._captured = self._copied(table)
            return self._captured.there
        if mirror is None:
            mirror = self._upload(table)
        mirror.frozen |= capturing
        self._time += 1
        mirror.used = self._time
        if self._last is not None:
            self._next[id(self._last)] = mirror
        self._last = mirror
        return mirror.there

    def _known(self, table: Tensor) -> _Mirror | None:
        for guess in (self._last, self._next.get(id(self._last))):
            if guess is not None and torch.equal(guess.content, table):
                return guess
        same = self._kept.get(self._digest(table), ())
        return next((mirror for mirror in same if torch.equal(mirror.content, table)), None)

    def _all(self) -> Iterable[_Mirror]:
        return chain.from_iterable(self._kept.values())

    def _digest(self, table: Tensor) -> int:
        """A number that few other tables have, also if only their addresses have changed places."""
        numbers = table.view(-1)
        if self._weights.shape != numbers.shape:
            self._weights = torch.arange(1, 2 * numbers.numel(), 2, device="cpu")
        return int(torch.dot(numbers, self._weights))

    def _upload(self, table: Tensor) -> _Mirror:
        size = table.numel() * table.element_size()
        self._uploader.prepare(size)
        if self._room is None:
            # All at once: from then on the allocator's state does not change, and gradients come where they came.
            count = max(FEWEST_TABLES, min(KEPT_TABLES, KEPT_BYTES // max(size, 1)))
            self._room = list(torch.empty((count, *table.shape), dtype=table.dtype, device=self._uploader.device))
        if not self._room:
            free = [mirror for mirror in self._all() if not mirror.frozen]
            if free:
                oldest = min(free, key=lambda mirror: mirror.used)
                same = self._kept.pop(oldest.digest)
                if len(same) > 1:
                    self._kept[oldest.digest] = [mirror for mirror in same if mirror is not oldest]
                self._last, self._next = None, {}
                self._room.append(oldest.there)
        mirror = self._copied(table, self._room.pop() if self._room else None)
        self._kept.setdefault(mirror.digest, []).append(mirror)
        return mirror

    def _copied(self, table: Tensor, there: Tensor | None = None) -> _Mirror:
        content = table.clone()
        return _Mirror(content, self._digest(table), self._uploader.upload(content, there))


# ---- constants --------------------------------------------------------------------------------------------------


class Constants:
    """Numbers of the host as tensors on devices, copied there once."""

    def __init__(self) -> None:
        """Has none."""
        self._latest: OrderedDict[Any, Tensor] = OrderedDict()
        self._frozen: dict[Any, Tensor] = {}  # that CUDA graphs read
        self._written: list[Tensor] = []  # by CUDA graphs
        self._uploaders: dict[torch.device, Uploader] = {}

    def __len__(self) -> int:
        """Tensors that are kept."""
        return len(self._latest) + len(self._frozen)

    def kept(self) -> list[Tensor]:
        """All tensors."""
        return [*self._latest.values(), *self._frozen.values()]

    def constant(
        self, values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.float64, *, name: Any = None
    ) -> Tensor:
        """A tensor of constants.

        Args:
            values: The numbers, nested if ``name`` is given.
            device: Where they are needed.
            dtype: Of the tensor.
            name: What they depend on, if they are many; else they are looked up by themselves.
        """
        key = (tuple(values) if name is None else name, device, dtype)
        found = self._frozen.get(key)
        if found is None:
            found = self._latest.pop(key, None)
            capturing = is_capturing(device)
            if found is None:
                found = self._uploader(device).upload(torch.tensor(values, dtype=dtype, device="cpu"))
                if capturing:
                    return found  # which is there only when the graph has been replayed
            if capturing:
                self._frozen[key] = found
            else:
                self._latest[key] = found
                if len(self._latest) > KEPT_CONSTANTS:
                    self._latest.popitem(last=False)
        return found

    def keep(self, written: Sequence[Tensor]) -> None:
        """Keeps what a graph that is captured writes at every replay, whoever lets go of it before."""
        self._written += written

    def vector(self, values: Sequence[float | Tensor], device: torch.device) -> Tensor:
        """Numbers and 0-d tensors as one float64 tensor on the device. Tensors of the host are numbers there."""
        if device.type != "cpu":
            values = [v.item() if isinstance(v, Tensor) and v.device.type == "cpu" else v for v in values]
        if not any(isinstance(v, Tensor) for v in values):
            return self.constant(values, device)
        parts = [
            v.reshape(()).to(device, torch.float64) if isinstance(v, Tensor) else self.constant((v,), device)[0]
            for v in values
        ]
        return torch.stack(parts)

    def _uploader(self, device: torch.device) -> Uploader:
        return self._uploaders.setdefault(device, Uploader(device))
