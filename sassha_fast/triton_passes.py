"""Backend ``triton``: the Triton kernels, on GPUs of NVIDIA and AMD, or on the CPU in Triton's interpreter."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .capturable import DeviceScalars
from .passes import Members
from .scalars import StepScalars
from .tables import (
    DTYPE,
    EXP_AVG,
    FLAGS,
    GRAD,
    HESSIAN,
    INDEX,
    LAYOUT,
    NUMEL,
    OWNS_BUFFER,
    PARAM,
    ROW_WORDS,
    TablePasses,
)
from .triton_kernels import access, gap, math, norm, perturb, probe, step
from .triton_launch import Chunks, Launcher, uploaded
from .variant import Sample

__all__ = ["TritonPasses"]

# DType of csrc/params.h, and what the kernels call it.
DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
KERNEL_DTYPES = (tl.float32, tl.float64, tl.bfloat16, tl.float16)
REDUCED = (2, 3)
TALLY_WORDS, GAP_WORDS = 3, 3


class TritonPasses(TablePasses):
    """Passes of the Triton kernels."""

    name = "triton"

    def __init__(self, members: Members) -> None:
        """Writes the table, and beside it which chunk each program takes."""
        self.device = members.weights[0].device
        for name, weight in zip(members.names, members.weights, strict=True):
            if weight.device != self.device:
                raise RuntimeError(
                    f"SASSHA: {name} is on {weight.device}, but {members.names[0]} is on {self.device}; "
                    "one set of passes takes the parameters of one device"
                )
        self.launcher = Launcher.on(self.device)
        super().__init__(members)
        kinds, own = self.columns[DTYPE].tolist(), members.take(self.native)
        numels = self.columns[NUMEL].tolist()
        self.chunks = Chunks(numels, kinds, own.groups, members.n_groups, self.device)
        # Signs are numbered by logical element of the whole parameter: the probe leaves other rows alone.
        probed = [w.is_contiguous() and own.shard(i) is None for i, w in enumerate(own.weights)]
        self.probed_chunks = self.chunks
        if not all(probed):
            sizes = [n if mine else 0 for n, mine in zip(numels, probed, strict=True)]
            self.probed_chunks = Chunks(sizes, kinds, own.groups, members.n_groups, self.device)
        self.sign_chunks: tuple[list[tuple[int, int]], Chunks] | None = None
        self.mirrored: Tensor | None = None  # the table as it was uploaded last
        self.mirror = self.table
        self.captured: list[Tensor] = []
        self.power = math.HALF.value

    # ---- memory -------------------------------------------------------------------------------------------------

    def device_table(self) -> Tensor:
        """The table where the kernels read it. It is uploaded only if it has changed."""
        if self.device.type == "cpu":
            return self.table
        if torch.cuda.is_current_stream_capturing():  # what is copied now arrives when the graph is replayed
            return uploaded(self.table, self.device, self.captured)
        if self.mirrored is None or not torch.equal(self.table, self.mirrored):
            self.mirrored = self.table.clone()
            self.mirror = uploaded(self.mirrored, self.device)
        return self.mirror

    def scalar_table(self, scalars: Sequence[StepScalars]) -> Tensor:
        """See :meth:`TablePasses.scalar_table`. Numbers that are on the device already stay there."""
        powers = set(scalars.powers if isinstance(scalars, DeviceScalars) else [s.power for s in scalars])
        self.power = {0.5: math.HALF, 1.0: math.ONE}.get(powers.pop() if len(powers) == 1 else -1.0, math.ANY).value
        if isinstance(scalars, DeviceScalars):
            return scalars.table
        late = [(i, j, v) for i, row in enumerate(scalars) for j, v in enumerate(row) if isinstance(v, Tensor)]
        rows = [[0.0 if isinstance(v, Tensor) else v for v in row] for row in scalars] if late else scalars
        table = uploaded(torch.tensor(rows, dtype=torch.float64), self.device, self.captured)
        for i, j, value in late:
            table[i, j].copy_(value.reshape(()), non_blocking=True)
        return table

    def _doubles(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float64, device=self.device)

    # ---- kernels ------------------------------------------------------------------------------------------------

    def bind(self, column: int, tensors: Sequence[Tensor]) -> tuple[int, int]:
        """See :meth:`TablePasses.bind`."""
        if column == PARAM:
            self.columns[DTYPE].copy_(torch.tensor([DTYPES[w.dtype] for w in tensors], dtype=torch.int64))
            self.columns[NUMEL].copy_(torch.tensor([w.numel() for w in tensors], dtype=torch.int64))
            self.columns[LAYOUT].copy_(torch.tensor([not w.is_contiguous() for w in tensors], dtype=torch.int64))
        misfits = 0
        addresses = array("q")
        for position, weight, tensor in zip(self.native, self.weights, tensors, strict=True):
            if tensor.device != weight.device:
                raise RuntimeError(
                    f"SASSHA: {self.members.names[position]} is on {weight.device}, but its gradient or state is on "
                    f"{tensor.device}; move the model before the optimizer is built, or reload its state"
                )
            expected = weight.dtype
            if column in (EXP_AVG, HESSIAN) and expected != torch.float64:
                expected = torch.float32
            fits = tensor.layout == torch.strided and tensor.dtype == expected and _same_order(tensor, weight)
            misfits += not fits
            addresses.append(tensor.data_ptr() if fits else 0)
        if misfits:
            return misfits, 0
        if addresses:
            self.columns[column].copy_(torch.frombuffer(addresses, dtype=torch.int64))
        return 0, self._mark_owned(tensors) if column == GRAD else 0

    def _mark_owned(self, grads: Sequence[Tensor]) -> int:
        """Marks the rows whose gradient is alone in its storage, and returns how many are not."""
        owned = [g.untyped_storage().nbytes() == g.numel() * g.element_size() for g in grads]
        ranges = sorted(
            (g.data_ptr(), g.data_ptr() + g.numel() * g.element_size(), i) for i, g in enumerate(grads) if g.numel()
        )
        end, last = 0, 0  # of the range that reaches furthest so far
        for begin, stop, i in ranges:
            if begin < end:
                owned[i] = owned[last] = False
            if stop > end:
                end, last = stop, i
        flags = self.columns[FLAGS]
        marks = torch.tensor(owned, dtype=torch.int64) * OWNS_BUFFER
        flags.copy_((flags & ~OWNS_BUFFER) | marks)
        return len(owned) - sum(owned)

    def _square_sums(self, column: int, adaptive: bool) -> Tensor:
        table, partials = self.device_table(), self._doubles(self.chunks.total)
        for kind, chunks in self.chunks.launches:
            constants = {"T": KERNEL_DTYPES[kind], "ADAPTIVE": adaptive}
            self.launcher(norm.square_sums, len(chunks), table, chunks, partials, column, **constants)
        return self._finish(partials, self.chunks.group_spans, 1)

    def _finish(self, partials: Tensor, levels: list[Tensor], words: int) -> Tensor:
        for spans in levels:
            totals = self._doubles(len(spans), words)
            self.launcher(access.finish, len(spans), partials, spans, totals, WORDS=words)
            partials = totals
        return partials

    def kernel_square_sums(self, adaptive: bool) -> Tensor:
        """See :meth:`TablePasses.kernel_square_sums`."""
        return self._square_sums(GRAD, adaptive).flatten()

    def kernel_weight_square_sum(self) -> Tensor:
        """See :meth:`TablePasses.kernel_weight_square_sum`."""
        return self._square_sums(PARAM, False).sum()

    def kernel_perturb(self, scales: Tensor, adaptive: bool, seed: int, draw: Tensor) -> None:
        """See :meth:`TablePasses.kernel_perturb`."""
        self._ascend(perturb.perturb, scales, adaptive, seed, draw)

    def kernel_restore(self) -> None:
        """See :meth:`TablePasses.kernel_restore`."""
        table = self.device_table()
        for kind, chunks in self.chunks.launches:
            self.launcher(perturb.restore, len(chunks), table, chunks, T=KERNEL_DTYPES[kind])

    def kernel_momentum_ascent(self, scales: Tensor, adaptive: bool, seed: int, draw: Tensor) -> None:
        """See :meth:`TablePasses.kernel_momentum_ascent`."""
        self._ascend(perturb.momentum_ascent, scales, adaptive, seed, draw)

    def _ascend(self, kernel: Any, scales: Tensor, adaptive: bool, seed: int, draw: Tensor) -> None:
        table = self.device_table()
        for kind, chunks in self.chunks.launches:
            constants = {"T": KERNEL_DTYPES[kind], "ADAPTIVE": adaptive}
            self.launcher(kernel, len(chunks), table, chunks, scales, draw, seed, **constants)

    def kernel_gap_sums(self) -> Tensor:
        """See :meth:`TablePasses.kernel_gap_sums`."""
        table, partials = self.device_table(), self._doubles(self.chunks.total, GAP_WORDS)
        for kind, chunks in self.chunks.launches:
            self.launcher(gap.gap_sums, len(chunks), table, chunks, partials, T=KERNEL_DTYPES[kind])
        return self._finish(partials, self.chunks.group_spans, GAP_WORDS).sum(0)

    def kernel_decompose(self, scales: Tensor) -> None:
        """See :meth:`TablePasses.kernel_decompose`."""
        table = self.device_table()
        for kind, chunks in self.chunks.launches:
            self.launcher(gap.decompose, len(chunks), table, chunks, scales, T=KERNEL_DTYPES[kind])

    def kernel_rademacher(self, outs: list[Tensor], indices: list[int], seed: int, draw: int) -> None:
        """See :meth:`TablePasses.kernel_rademacher`."""
        sizes = [(out.numel(), DTYPES[out.dtype]) for out in outs]
        if self.sign_chunks is None or self.sign_chunks[0] != sizes:
            numels, kinds = [n for n, _ in sizes], [kind for _, kind in sizes]
            self.sign_chunks = sizes, Chunks(numels, kinds, [0] * len(outs), 1, self.device)
        rows = torch.zeros(len(outs), ROW_WORDS, dtype=torch.int64)
        rows[:, PARAM] = torch.tensor([out.data_ptr() for out in outs], dtype=torch.int64)
        rows[:, NUMEL] = torch.tensor([n for n, _ in sizes], dtype=torch.int64)
        rows[:, INDEX] = torch.tensor(indices, dtype=torch.int64)
        table = uploaded(rows, self.device, self.captured)
        for kind, chunks in self.sign_chunks[1].launches:
            self.launcher(probe.rademacher, len(chunks), table, chunks, seed, draw, T=KERNEL_DTYPES[kind])

    def kernel_probe(self, weights: list[Tensor], indices: list[int], h: float, seed: int, draw: int) -> None:
        """See :meth:`TablePasses.kernel_probe`. The weights are the rows whose signs the kernel can number."""
        del weights, indices
        table = self.device_table()
        length = uploaded(torch.tensor([h], dtype=torch.float64), self.device, self.captured)
        for kind, chunks in self.probed_chunks.launches:
            self.launcher(probe.probe, len(chunks), table, chunks, length, seed, draw, T=KERNEL_DTYPES[kind])

    def kernel_step(self, scalars: Tensor, seed: int, noise_draw: Tensor | None) -> None:
        """See :meth:`TablePasses.kernel_step`."""
        self._step(scalars, seed, 0, noise_draw)

    def kernel_refresh_step(
        self, scalars: Tensor, seed: int, draw: int, noise_draw: Tensor | None, sample: Sample
    ) -> Tensor:
        """See :meth:`TablePasses.kernel_refresh_step`."""
        tallies = self._no_tallies()
        self._step(scalars, seed, draw, noise_draw, tallies=tallies, sample=sample)
        return self._finish(tallies, self.chunks.row_spans, TALLY_WORDS)

    def kernel_apart_step(self, scalars: Tensor, adaptive: bool, seed: int, noise_draw: Tensor | None) -> Tensor:
        """See :meth:`TablePasses.kernel_apart_step`."""
        squares = self._doubles(self.chunks.total)
        self._step(scalars, seed, 0, noise_draw, squares=squares, adaptive=adaptive)
        return self._finish(squares, self.chunks.group_spans, 1).flatten()

    def kernel_apart_refresh_step(
        self, scalars: Tensor, adaptive: bool, seed: int, draw: int, noise_draw: Tensor | None, sample: Sample
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`TablePasses.kernel_apart_refresh_step`."""
        tallies, squares = self._no_tallies(), self._doubles(self.chunks.total)
        self._step(scalars, seed, draw, noise_draw, tallies=tallies, sample=sample, squares=squares, adaptive=adaptive)
        sums = self._finish(squares, self.chunks.group_spans, 1).flatten()
        return self._finish(tallies, self.chunks.row_spans, TALLY_WORDS), sums

    def _no_tallies(self) -> Tensor:
        """Tallies of all chunks, as a skipped update leaves them."""
        return self._doubles(self.chunks.total, TALLY_WORDS).zero_()

    def _step(
        self,
        scalars: Tensor,
        seed: int,
        draw: int,
        noise: Tensor | None,
        *,
        tallies: Tensor | None = None,
        sample: Sample = Sample.ABS,
        squares: Tensor | None = None,
        adaptive: bool = False,
    ) -> None:
        """The update; with products where there are ``tallies`` to fill, apart where there are ``squares``."""
        table = self.device_table()
        constants = {"POWER": self.power, "REFRESH": tallies is not None, "SAMPLE": int(sample)}
        constants |= {"APART": squares is not None, "ADAPTIVE": adaptive}
        for kind, chunks in self.chunks.launches:
            at_random = noise is not None and kind in REDUCED
            tensors = (table, chunks, scalars, tallies, squares, noise if at_random else None)
            form = {"T": KERNEL_DTYPES[kind], "AT_RANDOM": at_random, **constants}
            self.launcher(step.step, len(chunks), *tensors, seed, draw, **form)


def _same_order(tensor: Tensor, weight: Tensor) -> bool:
    """Whether equal offsets in memory are equal elements."""
    if tensor.shape != weight.shape:
        return False
    return tensor.stride() == weight.stride() or (tensor.is_contiguous() and weight.is_contiguous())
