"""The native library: loading it, and what torch needs to know of its operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["LIBRARY", "load"]

LIBRARY = Path(__file__).with_name("_native.so")


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

    def square_sums(grads: list[Tensor], params: list[Tensor], groups: list[int], n_groups: int) -> Tensor:
        device = grads[0].device if grads else torch.device("cpu")
        return torch.empty(n_groups, dtype=torch.float64, device=device)

    def refresh_step(params: list[Tensor], *args: object) -> Tensor:
        return torch.empty(len(params), 3, dtype=torch.float64, device=params[0].device)

    def nothing(*args: object) -> None:
        return None

    def gap_sums(grads: list[Tensor], firsts: list[Tensor]) -> Tensor:
        return torch.empty(3, dtype=torch.float64, device=grads[0].device)

    results: dict[str, Callable[..., Any]] = {
        "square_sums": square_sums,
        "refresh_step_": refresh_step,
        "gap_sums": gap_sums,
    }
    silent = ("perturb_", "restore_", "rademacher_", "probe_", "step_", "momentum_ascent_", "decompose_")
    for name, fake in (*results.items(), *((name, nothing) for name in silent)):
        torch.library.register_fake(f"sassha_fast::{name}", fake)
