"""The native library: loading it, and what torch needs to know of its operators."""

from __future__ import annotations

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


def _register_fakes() -> None:
    """Shapes and dtypes without data, so that torch.compile and FakeTensor can trace the operators."""

    def nothing(*args: object) -> None:
        return None

    for name in ("rademacher_", "probe_"):
        torch.library.register_fake(f"sassha_fast::{name}", nothing)
