"""Backend ``triton``: the Triton kernels, on GPUs of NVIDIA and AMD, or on the CPU in Triton's interpreter."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from .. import formats
from ..checks import lacks_memory
from ..triton_kernels import access, gap, math, norm, perturb, probe, step, unseen
from . import layout
from .accessors import address, dtype, is_contiguous, is_neg, numel
from .layout import DeviceScalars, Scalars
from .reference import Members
from .table import TablePasses, integers, sign_rows
from .triton_launch import Chunks, Launcher
from .upload import Mirrors, Uploader

KERNEL_DTYPES = (tl.float32, tl.float64, tl.bfloat16, tl.float16)  # by code in the table
REDUCED = (layout.DTYPES[torch.bfloat16], layout.DTYPES[torch.float16])
POWERS = {0.5: math.HALF.value, 1.0: math.ONE.value}


class TritonPasses(TablePasses):
    """Passes of the Triton kernels. The methods with the names of operators are what :meth:`launch` runs."""

    name = "triton"
    takes_compact = True

    def __init__(self, members: Members) -> None:
        """Writes the table, and beside it which chunk each program takes."""
        device = members.weights[0].device
        for name, weight in zip(members.names, members.weights, strict=True):
            if weight.device != device:
                raise RuntimeError(
                    f"{members.caller}: {name} is on {weight.device}, but {members.names[0]} is on {device}; "
                    "one set of passes takes the parameters of one device"
                )
        self.launcher = Launcher.on(device)
        self._sizes, self._dtypes = list(map(numel, members.weights)), list(map(dtype, members.weights))
        super().__init__(members)
        kinds, numels = self.columns[layout.DTYPE].tolist(), self.columns[layout.NUMEL].tolist()
        self.mirrors, self.uploader = Mirrors(device), Uploader(device)
        self.chunks = Chunks(numels, kinds, members.groups, members.n_groups, self.uploader)
        self.numbered_chunks = self.chunks
        if not all(self.numbered):
            sizes = [n if mine else 0 for n, mine in zip(numels, self.numbered, strict=True)]
            self.numbered_chunks = Chunks(sizes, kinds, members.groups, members.n_groups, self.uploader)
        self.sign_chunks: tuple[list[tuple[int, int]], Chunks] | None = None

    # ---- memory -------------------------------------------------------------------------------------------------

    @override
    def begin_call(self) -> None:
        self.mirrors.begin()

    @override
    def kept(self) -> list[Tensor]:
        chunks = [self.chunks, self.numbered_chunks, *([] if self.sign_chunks is None else self.sign_chunks[1:])]
        return [*super().kept(), *self.mirrors.kept(), *(tensor for each in chunks for tensor in each.kept())]

    def device_table(self) -> Tensor:
        """The table where the kernels read it. It is uploaded only if it has changed."""
        return self.table if self.device.type == "cpu" else self.mirrors.find(self.table)

    @override
    def scalar_table(self, scalars: Scalars) -> Tensor:
        """Numbers that are on the device already stay there."""
        if isinstance(scalars, DeviceScalars):
            return scalars.table
        late = [(i, j, v) for i, row in enumerate(scalars) for j, v in enumerate(row) if isinstance(v, Tensor)]
        rows = [[0.0 if isinstance(v, Tensor) else v for v in row] for row in scalars] if late else scalars
        table = self.uploader.upload(torch.tensor(rows, dtype=torch.float64, device="cpu"))
        for i, j, value in late:
            table[i, j].copy_(value.reshape(()), non_blocking=True)
        return table

    @override
    def bind(self, column: int, tensors: Sequence[Tensor]) -> tuple[int, int]:
        if column == layout.PARAM:
            self.columns[layout.DTYPE].copy_(integers([layout.DTYPES[w.dtype] for w in tensors]))
            self.columns[layout.NUMEL].copy_(integers([w.numel() for w in tensors]))
            self.columns[layout.LAYOUT].copy_(integers([not w.is_contiguous() for w in tensors]))
        misfits = 0
        addresses = array("q")
        for position, (weight, tensor) in enumerate(zip(self.weights, tensors, strict=True)):
            if tensor.device != weight.device:
                raise RuntimeError(
                    f"{self.members.caller}: {self.members.names[position]} is on {weight.device}, but its gradient or "
                    f"state is on {tensor.device}; move the model before the optimizer is built, or reload its state"
                )
            fits = tensor.layout == torch.strided and self._fits_row(column, tensor, weight)
            misfits += not fits
            addresses.append(tensor.data_ptr() if fits else 0)
        if misfits:
            return misfits, 0
        self.columns[column].copy_(torch.frombuffer(addresses, dtype=torch.int64))
        return 0, self._mark_owned(tensors) if column == layout.GRAD else 0

    @override
    def bind_grads(self, grads: list[Tensor], *, overwrite: bool = False) -> None:
        if overwrite or self._shared is None or not self.all_row_major or not self._fit(grads):
            super().bind_grads(grads, overwrite=overwrite)
            return
        # Nothing to find out about the gradients but where they are, which is cheaper than looking at each.
        addresses = array("q", map(address, grads))
        self.columns[layout.GRAD].copy_(torch.frombuffer(addresses, dtype=torch.int64))
        self.grads, self._refitted, self._backs_up_in_grads = grads, [], False

    def _fit(self, grads: list[Tensor]) -> bool:
        """Whether gradients are what parameters in row-major order have."""
        return (
            all(map(is_contiguous, grads))
            and list(map(numel, grads)) == self._sizes
            and list(map(dtype, grads)) == self._dtypes
            and not any(map(is_neg, grads))
            and all(map(address, grads))  # memory that somebody freed
        )

    def _fits_row(self, column: int, tensor: Tensor, weight: Tensor) -> bool:
        """Whether a tensor is what a column of the row of ``weight`` holds."""
        stored, scales = (
            self.members.format,
            {layout.EXP_AVG_SCALE: torch.float32, layout.HESSIAN_SCALE: torch.bfloat16},
        )
        if column in scales:
            groups = (formats.groups_of(weight.numel()),)
            return tensor.dtype == scales[column] and tensor.shape == groups and tensor.is_contiguous()
        expected = weight.dtype
        if column in (layout.EXP_AVG, layout.HESSIAN):
            expected = stored.dtypes(weight.dtype)[column == layout.HESSIAN]
        elif column == layout.CORRECTION:
            expected = stored.correction_dtype
        fits = tensor.dtype == expected and _same_order(tensor, weight)
        return fits and not (lacks_memory(tensor) or tensor.is_neg() or tensor._is_zerotensor())

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
        flags = self.columns[layout.FLAGS]
        marks = integers(owned) * layout.OWNS_BUFFER
        flags.copy_((flags & ~layout.OWNS_BUFFER) | marks)
        return len(owned) - sum(owned)

    # ---- kernels ------------------------------------------------------------------------------------------------

    @override
    def launch(self, op: str, *args: Any) -> None:
        getattr(self, "run_" + op)(*args)

    def run_square_sums(self, sums: Tensor, column: int, adaptive: bool) -> None:
        """Squares of a column's tensors per group; of |x| ⊙ g where ``adaptive``."""
        table, partials = self.device_table(), self.doubles(self.chunks.total)
        for kind, chunks in self.chunks.launches:
            constants = {"T": KERNEL_DTYPES[kind], "ADAPTIVE": adaptive}
            self.launcher(norm.square_sums, len(chunks), table, chunks, partials, column, **constants)
        sums.copy_(self._finish(partials, self.chunks.group_spans, 1).flatten())

    def _finish(self, partials: Tensor, levels: list[Tensor], words: int) -> Tensor:
        for spans in levels:
            totals = self.doubles(len(spans), words)
            self.launcher(access.finish, len(spans), partials, spans, totals, WORDS=words)
            partials = totals
        return partials

    def run_perturb(self, scales: Tensor, adaptive: bool, seed: int, draw: Tensor, journal: Tensor) -> None:
        """x into the backups, x + ε into the parameters. A backup may be the gradient itself."""
        self._ascend(perturb.perturb, scales, adaptive, seed, draw)
        journal[layout.X_IN_BACKUP] = 1

    def run_restore(self, journal: Tensor) -> None:
        """Backups into the parameters."""
        table = self.device_table()
        for kind, chunks in self.chunks.launches:
            self.launcher(perturb.restore, len(chunks), table, chunks, T=KERNEL_DTYPES[kind])
        journal[layout.X_IN_BACKUP] = 0

    def run_momentum_ascent(self, scales: Tensor, adaptive: bool, seed: int, draw: Tensor) -> None:
        """x + ε into the parameters, from x in the backups and from m."""
        self._ascend(perturb.momentum_ascent, scales, adaptive, seed, draw)

    def _ascend(self, kernel: Any, scales: Tensor, adaptive: bool, seed: int, draw: Tensor) -> None:
        table = self.device_table()
        for kind, chunks in self.chunks.launches:
            constants = {"T": KERNEL_DTYPES[kind], "ADAPTIVE": adaptive, "FORMAT": self.members.format.code}
            self.launcher(kernel, len(chunks), table, chunks, scales, draw, seed, **constants)

    def run_gap_sums(self, sums: Tensor) -> None:
        """‖g‖², g·g̃ and ‖g̃‖² over the table."""
        table, partials = self.device_table(), self.doubles(self.chunks.total, layout.GAP_WORDS)
        for kind, chunks in self.chunks.launches:
            self.launcher(gap.gap_sums, len(chunks), table, chunks, partials, T=KERNEL_DTYPES[kind])
        sums.copy_(self._finish(partials, self.chunks.group_spans, layout.GAP_WORDS).sum(0))

    def run_decompose(self, scales: Tensor) -> None:
        """g̃ − α g⊥ into the gradients."""
        table = self.device_table()
        for kind, chunks in self.chunks.launches:
            self.launcher(gap.decompose, len(chunks), table, chunks, scales, T=KERNEL_DTYPES[kind])

    def run_unseen_sums(self, tallies: Tensor, sums: Tensor) -> None:
        """What a refresh did not see of every row."""
        # Rows of which everything was seen leave their partial results alone.
        table, partials = self.device_table(), self.doubles(self.chunks.total, layout.UNSEEN_WORDS).zero_()
        for kind, chunks in self.chunks.launches:
            tensors, constants = (table, chunks, tallies, partials), {"T": KERNEL_DTYPES[kind]}
            self.launcher(unseen.unseen_sums, len(chunks), *tensors, FORMAT=self.members.format.code, **constants)
        sums.copy_(self._finish(partials, self.chunks.row_spans, layout.UNSEEN_WORDS))

    def run_fill_unseen(self, sums: Tensor, seed: int, state_draw: Tensor | None) -> None:
        """The mean curvature of every row into those of its elements that no refresh has seen."""
        table, form = self.device_table(), self._form_of_state(state_draw)
        state_draw = state_draw if form["STATE_AT_RANDOM"] else None
        for kind, chunks in self.chunks.launches:
            tensors = (table, chunks, sums, state_draw)
            self.launcher(unseen.fill_unseen, len(chunks), *tensors, seed, T=KERNEL_DTYPES[kind], **form)

    def _form_of_state(self, state_draw: Tensor | None) -> dict[str, Any]:
        """What kernels that write state are made for."""
        stored = self.members.format
        return {"FORMAT": stored.code, "STATE_AT_RANDOM": state_draw is not None and stored.state_bits < 32}

    def run_step(
        self,
        scalars: Tensor,
        seed: int,
        draw: int,
        noise: Tensor | None,
        sample: int,
        zero_is_seen: bool,
        adaptive: bool,
        tallies: Tensor | None,
        squares: Tensor | None,
        journal: Tensor,
        power: float | None,
        state_draw: Tensor | None,
    ) -> None:
        """The update; with products where there are ``tallies`` to fill, of x in state where there are ``squares``."""
        table, total = self.device_table(), self.chunks.total
        # A skipped update leaves its tallies alone.
        partial_tallies = None if tallies is None else self.doubles(total, layout.TALLY_WORDS).zero_()
        partial_squares = None if squares is None else self.doubles(total)
        form = {
            "POWER": POWERS.get(-1.0 if power is None else power, math.ANY.value),
            "REFRESH": tallies is not None,
            "SAMPLE": sample,
            "ZERO_IS_SEEN": zero_is_seen,
            "IN_STATE": squares is not None,
            "ADAPTIVE": adaptive,
            **self._form_of_state(state_draw),
        }
        state_draw = state_draw if form["STATE_AT_RANDOM"] else None
        for kind, chunks in self.chunks.launches:
            at_random = noise is not None and kind in REDUCED
            tensors = (
                table,
                chunks,
                scalars,
                partial_tallies,
                partial_squares,
                noise if at_random else None,
                state_draw,
            )
            constants = {"T": KERNEL_DTYPES[kind], "AT_RANDOM": at_random, **form}
            self.launcher(step.step, len(chunks), *tensors, seed, draw, **constants)
        if tallies is not None:
            tallies.copy_(self._finish(partial_tallies, self.chunks.row_spans, layout.TALLY_WORDS))  # type: ignore[arg-type]
        if squares is not None:
            squares.copy_(self._finish(partial_squares, self.chunks.group_spans, 1).flatten())  # type: ignore[arg-type]
        journal[layout.UPDATES] += 1
        if squares is None:
            journal[layout.X_IN_BACKUP] = 0

    @override
    def draw_signs(self, outs: list[Tensor], indices: list[int], seed: int, draw: int) -> None:
        sizes = [(out.numel(), layout.DTYPES[out.dtype]) for out in outs]
        if self.sign_chunks is None or self.sign_chunks[0] != sizes:
            numels, kinds = [n for n, _ in sizes], [kind for _, kind in sizes]
            self.sign_chunks = sizes, Chunks(numels, kinds, [0] * len(outs), 1, self.uploader)
        table = self.uploader.upload(sign_rows(outs, indices))
        for kind, chunks in self.sign_chunks[1].launches:
            self.launcher(probe.rademacher, len(chunks), table, chunks, seed, draw, T=KERNEL_DTYPES[kind])

    @override
    def add_signs(self, h: Tensor, seed: int, draw: int) -> None:
        table = self.device_table()
        for kind, chunks in self.numbered_chunks.launches:
            self.launcher(probe.probe, len(chunks), table, chunks, h, seed, draw, T=KERNEL_DTYPES[kind])


def _same_order(tensor: Tensor, weight: Tensor) -> bool:
    """Whether equal offsets in memory are equal elements."""
    if tensor.shape != weight.shape:
        return False
    return tensor.stride() == weight.stride() or (tensor.is_contiguous() and weight.is_contiguous())
