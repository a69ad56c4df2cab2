"""Backend ``cuda_sim``: the CUDA kernels on the CPU (csrc/cuda/sim.h), for tests alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sassha_fast._passes.cuda import CudaPasses

LIBRARY = Path(__file__).parents[2] / "build" / "native" / "_cuda_sim.so"
# Ascending, descending, odd ones first, warps backwards, and random ones that change at every barrier.
ORDERS = (0, 1, 2, 3, 4, 5)

if not LIBRARY.exists():
    raise RuntimeError(f"{LIBRARY} was not built; run `make sim`")
torch.ops.load_library(str(LIBRARY))
OPS = torch.ops.sassha_fast_sim


class SimPasses(CudaPasses):
    """Passes of the CUDA kernels over tensors in host memory."""

    name = "cuda_sim"
    ops = OPS


@contextmanager
def thread_order(order: int) -> Iterator[None]:
    """Runs the threads of a block, and the blocks, in another order."""
    OPS.set_order(order)
    try:
        yield
    finally:
        OPS.set_order(0)
