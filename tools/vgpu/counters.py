"""Counters of the virtual GPU: what a piece of code launched, copied, allocated and waited for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from .library import library, read_text, readable


class Counts(dict[str, int]):
    """Counts by their raw name, which README.md lists; a name that was not counted is 0.

    The properties add up what is asked for most.
    """

    def __missing__(self, name: str) -> int:
        """Nothing was counted under this name."""
        return 0

    def __sub__(self, before: Counts) -> Counts:
        """What was counted since; without zeros."""
        return Counts({name: n - before[name] for name, n in self.items() if n != before[name]})

    def beginning(self, prefix: str) -> dict[str, int]:
        """Counts whose names begin so, by the rest of the name."""
        return {name.removeprefix(prefix): n for name, n in self.items() if name.startswith(prefix)}

    @property
    def launches(self) -> int:
        """Kernels of the library and of Triton that were queued or captured; replays of a graph are not in it."""
        return self["launch"]

    @property
    def kernels(self) -> dict[str, int]:
        """Launches by kernel, demangled: ``sassha::cuda::step_kernel<float, …>``."""
        return {readable(name): n for name, n in self.beginning("launch:").items()}

    @property
    def operators(self) -> dict[str, int]:
        """Torch's own operators on CUDA tensors, by name: ``add.Tensor``."""
        return self.beginning("torch:")

    @property
    def copies(self) -> dict[str, int]:
        """Copies by kind: ``H2D pinned async``, ``D2H pageable sync``, ``D2D async``."""
        return {name: n for name, n in self.beginning("memcpy ").items() if not name.endswith("bytes")}

    @property
    def copied_bytes(self) -> dict[str, int]:
        """Bytes of copies by kind: ``H2D pinned``."""
        found = self.beginning("memcpy ").items()
        return {re.sub(r" bytes$", "", name): n for name, n in found if name.endswith("bytes")}

    @property
    def waits(self) -> int:
        """How often the host waited for the device: synchronizations, and copies that wait."""
        return sum(self.beginning("sync:").values()) + sum(self.beginning("implicit_sync:").values())

    @property
    def allocations(self) -> int:
        """Calls of the runtime for device or pinned memory; torch's caching allocator makes few of them."""
        return self["cudaMalloc"] + self["cudaMallocAsync"] + self["cudaHostAlloc"]

    @property
    def graph_launches(self) -> int:
        """Replays of graphs."""
        return self["graph_launch"]


def counters() -> Counts:
    """All counts since the process began."""
    lines = read_text(library().vgpu_read_counters).splitlines()
    return Counts({name: int(n) for name, n in (line.split("\t") for line in lines)})


@contextmanager
def counting() -> Iterator[Counts]:
    """Counts of a block: what is yielded is filled in at its end.

    Example:
        with vgpu.counting() as counts:
            opt.step()
        assert counts.waits == 0
    """
    before, during = counters(), Counts()
    try:
        yield during
    finally:
        during.update(counters() - before)
