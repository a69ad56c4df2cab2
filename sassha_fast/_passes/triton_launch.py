"""Which chunk of which tensor each program of a Triton kernel takes, and how kernels are started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..triton_kernels import access
from .upload import Uploader

CHUNK: int = access.CHUNK.value
SPAN = 8 * CHUNK  # partial results that one program adds: a single one would add those of a huge tensor for too long


class Chunks:
    """Which chunk of which row each program takes, on the device: built once, as sizes stand while a plan does.

    Partial results lie in the order of groups, rows and chunks, so those of a group and those of a row are spans.

    Attributes:
        launches: For each dtype its code and the chunks of all its tensors.
        total: Number of chunks.
        group_spans: First partial result of each group, and the end, in levels: each adds what the one before gave.
        row_spans: The same for each row.
    """

    def __init__(
        self, numels: Sequence[int], dtypes: Sequence[int], groups: Sequence[int], n_groups: int, uploader: Uploader
    ) -> None:
        """Cuts tensors of these sizes into chunks."""
        sizes, kinds, belongs = (_integers(column) for column in (numels, dtypes, groups))
        order = torch.argsort(belongs, stable=True)
        counts = ((sizes + (CHUNK - 1)) // CHUNK)[order]
        ends = torch.cumsum(counts, 0)
        starts = ends - counts
        places = torch.arange(int(counts.sum()), device="cpu")
        rows = torch.repeat_interleave(order, counts)
        numbers = places - torch.repeat_interleave(starts, counts)
        entries = torch.stack((rows, numbers, places), dim=1).to(torch.int32)
        self.total = len(places)
        self.launches: list[tuple[int, Tensor]] = []
        for kind in sorted(set(dtypes)):
            mine = entries[kinds[rows] == kind]
            if len(mine):
                self.launches.append((kind, uploader.upload(mine.contiguous())))
        row_spans = torch.empty(len(sizes), 2, dtype=torch.int64, device="cpu")
        row_spans[order] = torch.stack((starts, ends), dim=1)
        self.row_spans = [uploader.upload(level) for level in _levels(row_spans)]
        group_spans = _spans(torch.bincount(belongs[rows], minlength=n_groups))
        self.group_spans = [uploader.upload(level) for level in _levels(group_spans)]

    def kept(self) -> list[Tensor]:
        """Everything on the device."""
        return [*(chunks for _, chunks in self.launches), *self.row_spans, *self.group_spans]


def _integers(values: Sequence[int]) -> Tensor:
    """In host memory, whatever torch's default device is."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _spans(lengths: Tensor) -> Tensor:
    """First and last of consecutive spans of these lengths."""
    ends = torch.cumsum(lengths, 0)
    return torch.stack((ends - lengths, ends), dim=1)


def _levels(spans: Tensor) -> list[Tensor]:
    """Spans of at most ``SPAN`` entries, then spans of their results, until one is left for each of ``spans``."""
    begins, ends = spans.unbind(1)
    pieces = (ends - begins + (SPAN - 1)) // SPAN
    if len(spans) == 0 or int(pieces.max()) <= 1:
        return [spans]
    starts = torch.repeat_interleave(torch.cumsum(pieces, 0) - pieces, pieces)
    numbers = torch.arange(int(pieces.sum()), device="cpu") - starts
    first = torch.repeat_interleave(begins, pieces) + numbers * SPAN
    last = torch.minimum(first + SPAN, torch.repeat_interleave(ends, pieces))
    return [torch.stack((first, last), dim=1), *_levels(_spans(pieces))]


@dataclass(frozen=True)
class Launcher:
    """Starts kernels on one device.

    Attributes:
        device: Whose current stream takes them.
        warp_size: Threads of a warp there, which is the vendor's choice.
    """

    device: torch.device
    warp_size: int

    @classmethod
    def on(cls, device: torch.device) -> Launcher:
        """The launcher of a device."""
        return cls(device, 32 if device.type == "cpu" else torch.cuda.get_device_properties(device).warp_size)

    def __call__(self, kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        """Runs a kernel, unless there is nothing to do."""
        if programs == 0:
            return
        options = access.launch_options(constants.get("T"), self.warp_size, constants.get("FORMAT", 0))
        if self.device.type == "cpu":
            kernel[(programs,)](*args, **constants, **options)
            return
        with torch.cuda.device(self.device):
            kernel[(programs,)](*args, **constants, **options)
