"""Backend ``cuda``: the CUDA kernels, one launch per pass and dtype over a table in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from . import layout
from .cpu import CpuPasses
from .layout import DeviceScalars, Scalars
from .reference import Members
from .table import sign_rows
from .upload import Mirrors, Uploader


@dataclass(frozen=True)
class _SignTable:
    """A table for signs, see :func:`sign_rows`, on the device.

    Attributes:
        content: The table it was copied from.
        there: The copy.
        chunks: The chunks of its rows.
        counts: How many there are.
    """

    content: Tensor
    there: Tensor
    chunks: Tensor
    counts: list[int]


class CudaPasses(CpuPasses):
    """Passes of the CUDA kernels. Nothing here waits for the device."""

    name = "cuda"

    def __init__(self, members: Members) -> None:
        """Writes the table and cuts its rows into chunks."""
        super().__init__(members)
        self.mirrors, self.uploader = Mirrors(self.device), Uploader(self.device)
        chunks, counts = self.ops.table_chunks(self.table)
        self.chunks, self.counts = self.uploader.upload(chunks), counts.tolist()
        self._sign_tables: dict[str, _SignTable] = {}  # of each operator that takes signs the last one

    @override
    def begin_call(self) -> None:
        self.mirrors.begin()

    @override
    def kept(self) -> list[Tensor]:
        tables = (memory for table in self._sign_tables.values() for memory in (table.there, table.chunks))
        return [*super().kept(), *self.mirrors.kept(), self.chunks, *tables]

    @override
    def launch(self, op: str, *args: Any) -> None:
        there = self.mirrors.find(self.table)
        self.operator(op)(there, *args, chunks=self.chunks, counts=self.counts)

    @override
    def scalar_table(self, scalars: Scalars) -> Tensor:
        """Fields that are tensors already are put in on the device."""
        if isinstance(scalars, DeviceScalars):
            return scalars.table
        known = [[0.0 if isinstance(v, Tensor) else v for v in row] for row in scalars]
        table = self.uploader.upload(torch.tensor(known, dtype=torch.float64, device="cpu"))
        for i, value in enumerate(chain.from_iterable(scalars)):
            if isinstance(value, Tensor):
                table.view(-1)[i].copy_(value)
        return table

    # ---- signs --------------------------------------------------------------------------------------------------

    @override
    def draw_signs(self, outs: list[Tensor], indices: list[int], seed: int, draw: int) -> None:
        table = self._sign_table("rademacher", outs, indices)
        self.operator("rademacher")(table.there, seed, draw, chunks=table.chunks, counts=table.counts)

    @override
    def add_signs(self, h: Tensor, seed: int, draw: int) -> None:
        table = self._sign_table("probe", *self.numbered_members())
        self.operator("probe")(table.there, h, seed, draw, chunks=table.chunks, counts=table.counts)

    def _sign_table(self, op: str, tensors: Sequence[Tensor], indices: Sequence[int]) -> _SignTable:
        """A table of these tensors. Only what has changed since the last one of the operator is copied."""
        content, last = sign_rows(tensors, indices), self._sign_tables.get(op)
        if last is not None and torch.equal(last.content, content):
            return last
        if last is not None and torch.equal(last.content[:, layout.NUMEL :], content[:, layout.NUMEL :]):
            found = replace(last, content=content, there=self.uploader.upload(content, last.there))
        else:
            chunks, counts = self.ops.table_chunks(content)
            there = self.uploader.upload(content)
            found = _SignTable(content, there, self.uploader.upload(chunks), counts.tolist())
        self._sign_tables[op] = found
        return found
