"""What every pass reads and writes: the table that its kernels keep to, and the bytes that follow from it.

Tests run each pass with nothing but its own columns bound, and read the same numbers from the GPUs' machine code. A
parameter whose state and weight are stored in fewer bits (:class:`~sassha_fast.formats.Format`) takes fewer bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .formats import FULL, GROUP, Format

__all__ = ["METHODS", "PASSES", "Traffic", "bytes_per_parameter", "columns_of", "scale_bytes_per_parameter"]


class Traffic(NamedTuple):
    """Columns of the table (``Row`` in ``csrc/params.h``) whose tensors a pass reads and writes once each.

    ``correction`` is there for parameters that have one.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()


_STEP = ("backup", "grad", "exp_avg", "hessian")

PASSES = {
    "norm": Traffic(("grad",)),
    "perturb": Traffic(("param", "grad", "correction"), ("param", "backup")),
    "restore": Traffic(("backup",), ("param",)),
    "probe": Traffic(("param",), ("param",)),
    "step": Traffic((*_STEP, "correction"), ("param", "exp_avg", "correction")),
    "refresh_step": Traffic((*_STEP, "product", "correction"), ("param", "exp_avg", "hessian", "correction")),
    "step_in_state": Traffic((*_STEP, "correction"), ("backup", "exp_avg", "correction")),
    "refresh_step_in_state": Traffic((*_STEP, "product", "correction"), ("backup", "exp_avg", "hessian", "correction")),
    "momentum_ascent": Traffic(("backup", "exp_avg", "correction"), ("param",)),
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

_SCALES = {"exp_avg": ("exp_avg_scale", 4), "hessian": ("hessian_scale", 2)}  # beside 8-bit codes, and their bytes


def columns_of(name: str, stored: Format = FULL) -> Traffic:
    """The columns that a pass reads and writes of a parameter that is stored so, the scales of groups among them."""

    def found(columns: tuple[str, ...]) -> tuple[str, ...]:
        kept = [column for column in columns if column != "correction" or stored.correction_bits]
        return (*kept, *(_SCALES[column][0] for column in kept if column in _SCALES and stored.state_bits == 8))

    traffic = PASSES[name]
    return Traffic(found(traffic.reads), found(traffic.writes))


def bytes_per_parameter(name: str, dtype: torch.dtype = torch.float32, stored: Format = FULL) -> int:
    """Bytes that a pass moves for each element of a parameter of this dtype.

    The scales of groups are not among them, see :func:`scale_bytes_per_parameter`.
    """
    exp_avg, hessian = stored.dtypes(dtype)
    sizes = {"exp_avg": exp_avg.itemsize, "hessian": hessian.itemsize, "correction": stored.correction_bits // 8}
    traffic = PASSES[name]
    return sum(sizes.get(column, dtype.itemsize) for column in (*traffic.reads, *traffic.writes))


def scale_bytes_per_parameter(name: str, stored: Format) -> float:
    """Bytes that the scales of groups add to that: 4 for m and 2 for D, read or written once for every group."""
    if stored.state_bits != 8:
        return 0.0
    traffic = PASSES[name]
    return sum(_SCALES[column][1] for column in (*traffic.reads, *traffic.writes) if column in _SCALES) / GROUP
