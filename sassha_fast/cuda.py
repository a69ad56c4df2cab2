"""Backend ``cuda``: the CUDA kernels, one launch per pass and dtype over a table in device memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .capturable import DeviceScalars
from .native import NativePasses
from .passes import Members
from .scalars import StepScalars
from .variant import Sample

__all__ = ["CudaPasses", "Mirrors"]

KEPT = 3  # tables on the device: the ascent's, the update's and a refresh's
SPARES = 4  # host buffers made ahead for a capture, which must not allocate pinned memory


@dataclass
class Mirror:
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
    """

    def __init__(self, device: torch.device) -> None:
        """Makes no copy yet."""
        self.device = device
        self.kept: list[Mirror] = []  # the latest used is the last
        self.spares: list[Mirror] = []
        self.uploads = 0

    def find(self, table: Tensor) -> Tensor:
        """The table on the device, copied there without waiting if it is not there already."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        for i, mirror in enumerate(reversed(self.kept), start=1):
            if torch.equal(mirror.content, table):
                self.kept.append(self.kept.pop(-i))
                break
        else:
            mirror = self._from_spare(table) if capturing else self._upload(table)
            self.kept.append(mirror)
        mirror.frozen |= capturing
        return mirror.there

    def _upload(self, table: Tensor) -> Mirror:
        free = [mirror for mirror in self.kept if not mirror.frozen]
        if len(free) >= KEPT:
            # The stream orders the copy after the last kernel that reads the table.
            self.kept = [mirror for mirror in self.kept if mirror is not free[0]]
            there = free[0].there
        else:
            there = torch.empty_like(table, device=self.device)
        while self.device.type == "cuda" and len(self.spares) < SPARES:
            self.spares.append(Mirror(self._pinned(table), torch.empty_like(table, device=self.device)))
        return self._copy(self._pinned(table), there)

    def _from_spare(self, table: Tensor) -> Mirror:
        if not self.spares:
            raise RuntimeError(
                "SASSHA: no memory is left to capture this step with; run a step outside of the capture before it"
            )
        spare = self.spares.pop()
        spare.content.copy_(table)
        return self._copy(spare.content, spare.there)

    def _copy(self, content: Tensor, there: Tensor) -> Mirror:
        self.uploads += 1
        there.copy_(content, non_blocking=True)
        return Mirror(content, there)

    def _pinned(self, table: Tensor) -> Tensor:
        """A new copy on the host; its memory is not handed out again before the device has read it."""
        return table.pin_memory() if self.device.type == "cuda" else table.clone()


class CudaPasses(NativePasses):
    """Passes of the CUDA kernels. Nothing here waits for the device but :meth:`weight_square_sum`."""

    name = "cuda"

    def __init__(self, members: Members) -> None:
        """Writes the table and cuts its rows into chunks."""
        super().__init__(members)
        self.device = members.weights[0].device
        self.mirrors = Mirrors(self.device)
        chunks, counts = self.ops.table_chunks(self.table)
        self.chunks, self.counts = chunks.to(self.device), counts.tolist()
        self.power: float | None = None

    def scalar_table(self, scalars: Sequence[StepScalars]) -> Tensor:
        """See :meth:`TablePasses.scalar_table`. Fields that are tensors already are put in on the device."""
        powers = scalars.powers if isinstance(scalars, DeviceScalars) else [row.power for row in scalars]
        self.power = powers[0] if powers.count(powers[0]) == len(powers) else None
        if isinstance(scalars, DeviceScalars):
            return scalars.table
        numbers = [[0.0 if isinstance(v, Tensor) else v for v in row] for row in scalars]
        pinned = torch.tensor(numbers, dtype=torch.float64, device="cpu", pin_memory=self.device.type == "cuda")
        table = pinned.to(self.device, non_blocking=True)
        for i, value in enumerate(chain.from_iterable(scalars)):
            if isinstance(value, Tensor):
                table.view(-1)[i].copy_(value)
        return table

    def _call(self, op: Callable[..., Any], *args: Any) -> Any:
        if not self.native:
            return None
        return op(self.mirrors.find(self.table), *args, self.chunks, self.counts)

    def _zeros(self, *sizes: int) -> Tensor:
        """Sums over no rows at all."""
        return torch.zeros(*sizes, dtype=torch.float64, device=self.device)

    def kernel_square_sums(self, adaptive: bool) -> Tensor:
        """See :meth:`TablePasses.kernel_square_sums`."""
        sums: Tensor | None = self._call(self.ops.table_square_sums, self.members.n_groups, adaptive)
        return sums if sums is not None else self._zeros(self.members.n_groups)

    def kernel_perturb(self, scales: Tensor, adaptive: bool, seed: int, draw: Tensor) -> None:
        """See :meth:`TablePasses.kernel_perturb`."""
        self._call(self.ops.table_perturb, scales, adaptive, seed, draw)

    def kernel_restore(self) -> None:
        """See :meth:`TablePasses.kernel_restore`."""
        self._call(self.ops.table_restore)

    def kernel_step(self, scalars: Tensor, seed: int, noise_draw: Tensor | None) -> None:
        """See :meth:`TablePasses.kernel_step`."""
        self._call(self.ops.table_step, scalars, seed, noise_draw, self.power)

    def kernel_refresh_step(
        self, scalars: Tensor, seed: int, draw: int, noise_draw: Tensor | None, sample: Sample
    ) -> Tensor:
        """See :meth:`TablePasses.kernel_refresh_step`."""
        args = (scalars, seed, draw, noise_draw, int(sample), self.power)
        tallies: Tensor | None = self._call(self.ops.table_refresh_step, *args)
        return tallies if tallies is not None else self._zeros(0, 3)

    def kernel_apart_step(self, scalars: Tensor, adaptive: bool, seed: int, noise_draw: Tensor | None) -> Tensor:
        """See :meth:`TablePasses.kernel_apart_step`."""
        args = (scalars, self.members.n_groups, adaptive, seed, noise_draw, self.power)
        squares: Tensor | None = self._call(self.ops.table_apart_step, *args)
        return squares if squares is not None else self._zeros(self.members.n_groups)

    def kernel_apart_refresh_step(
        self, scalars: Tensor, adaptive: bool, seed: int, draw: int, noise_draw: Tensor | None, sample: Sample
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`TablePasses.kernel_apart_refresh_step`."""
        args = (scalars, self.members.n_groups, adaptive, seed, draw, noise_draw, int(sample), self.power)
        found: tuple[Tensor, Tensor] | None = self._call(self.ops.table_apart_refresh_step, *args)
        return found if found is not None else (self._zeros(0, 3), self._zeros(self.members.n_groups))

    def kernel_momentum_ascent(self, scales: Tensor, adaptive: bool, seed: int, draw: Tensor) -> None:
        """See :meth:`TablePasses.kernel_momentum_ascent`."""
        self._call(self.ops.table_momentum_ascent, scales, adaptive, seed, draw)

    def kernel_gap_sums(self) -> Tensor:
        """See :meth:`TablePasses.kernel_gap_sums`."""
        sums: Tensor | None = self._call(self.ops.table_gap_sums)
        return sums if sums is not None else self._zeros(3)

    def kernel_decompose(self, scales: Tensor) -> None:
        """See :meth:`TablePasses.kernel_decompose`."""
        self._call(self.ops.table_decompose, scales)
