"""What every pass reads and writes: the table that its kernels keep to, and the bytes that follow from it.

Tests run each pass with nothing but its own columns bound, and read the same numbers from the GPUs' machine code.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .reference import compute_dtype

__all__ = ["METHODS", "PASSES", "Traffic", "bytes_per_parameter"]


class Traffic(NamedTuple):
    """Columns of the table (``Row`` in ``csrc/params.h``) whose tensors a pass reads and writes once each."""

    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()


PASSES = {
    "norm": Traffic(("grad",)),
    "perturb": Traffic(("param", "grad"), ("param", "backup")),
    "restore": Traffic(("backup",), ("param",)),
    "probe": Traffic(("param",), ("param",)),
    "step": Traffic(("backup", "grad", "exp_avg", "hessian"), ("param", "exp_avg")),
    "refresh_step": Traffic(("backup", "grad", "exp_avg", "hessian", "product"), ("param", "exp_avg", "hessian")),
    "step_in_state": Traffic(("backup", "grad", "exp_avg", "hessian"), ("backup", "exp_avg")),
    "refresh_step_in_state": Traffic(
        ("backup", "grad", "exp_avg", "hessian", "product"), ("backup", "exp_avg", "hessian")
    ),
    "momentum_ascent": Traffic(("backup", "exp_avg"), ("param",)),
    "gap_sums": Traffic(("grad", "first")),
    "decompose": Traffic(("grad", "first"), ("grad",)),
    # After a refresh, of tensors alone of which it did not see every element.
    "unseen_sums": Traffic(("grad", "product", "hessian")),
    "fill_unseen": Traffic(("grad", "product", "hessian"), ("hessian",)),
}

# The passes of an ordinary step from a closure, and of one that refreshes the curvature by exact products.
METHODS = {
    "SASSHA": (("norm", "perturb", "step"), ("norm", "perturb", "refresh_step")),
    "M-SASSHA": (("step_in_state", "momentum_ascent"), ("refresh_step_in_state", "momentum_ascent")),
    "G-SASSHA": (
        ("norm", "perturb", "gap_sums", "decompose", "step"),
        ("norm", "perturb", "gap_sums", "decompose", "refresh_step"),
    ),
    "AdaHessian, Sophia-H": (("step",), ("refresh_step",)),
}

_STATE = ("exp_avg", "hessian")


def bytes_per_parameter(name: str, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that a pass moves for each element of a parameter of this dtype."""
    traffic = PASSES[name]
    state = compute_dtype(dtype).itemsize
    return sum(state if column in _STATE else dtype.itemsize for column in (*traffic.reads, *traffic.writes))
