"""Backend ``cuda``: the CUDA kernels, one launch per pass and dtype over a table in device memory."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from .cpu import CpuPasses
from .layout import DeviceScalars, Scalars
from .reference import Members
from .upload import Mirrors, Uploader


class CudaPasses(CpuPasses):
    """Passes of the CUDA kernels. Nothing here waits for the device but :meth:`weight_square_sum`."""

    name = "cuda"

    def __init__(self, members: Members) -> None:
        """Writes the table and cuts its rows into chunks."""
        super().__init__(members)
        self.mirrors, self.uploader = Mirrors(self.device), Uploader(self.device)
        chunks, counts = self.ops.table_chunks(self.table)
        self.chunks, self.counts = self.uploader.upload(chunks), counts.tolist()

    @override
    def begin_call(self) -> None:
        self.mirrors.begin()

    @override
    def kept(self) -> list[Tensor]:
        return [*super().kept(), *self.mirrors.kept(), self.chunks]

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
