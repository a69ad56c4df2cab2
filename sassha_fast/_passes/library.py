"""The native library: loading it, and what torch needs to know of its operators."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

LIBRARY = Path(__file__).parents[1] / "_native.so"


@cache
def load() -> str | None:
    """Loads the native library once. Returns None, or why it can't be loaded."""
    if not LIBRARY.exists():
        return f"{LIBRARY} was not built; run `make build`, or install a wheel"
    try:
        torch.ops.load_library(str(LIBRARY))  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"{LIBRARY} can't be loaded: {error}"
    _register_fakes()
    return None


@dataclass(frozen=True)
class CudaVersions:
    """Versions of CUDA as it writes them, 13020 for 13.2; 0 where nobody can tell.

    Attributes:
        built: Of the compiler that the kernels were built with.
        runtime: Of the runtime that torch has loaded.
        driver: The newest that the driver knows.
        least: The oldest GPU that there is code for, 75 for sm_75.
    """

    built: int
    runtime: int
    driver: int
    least: int


def cuda_versions() -> CudaVersions:
    """Versions of a library that is loaded and was built with CUDA."""
    return CudaVersions(*torch.ops.sassha_fast.cuda_versions())


@cache
def _register_fakes() -> None:
    """Shapes and dtypes without data, so that torch.compile and FakeTensor can trace the operators.

    Once: torch refuses a second time before 2.13.
    """

    def nothing(*args: object) -> None:
        return None

    for name in ("rademacher_", "probe_"):
        torch.library.register_fake(f"sassha_fast::{name}", nothing)
