"""``csrc/params.h`` in Python, once: the structs that cross the language boundary. A test compares the two."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

# struct Row: the columns of a table of addresses.
ROW_WORDS = 18
PARAM, GRAD, BACKUP, EXP_AVG, HESSIAN, PRODUCT, FIRST, CORRECTION, EXP_AVG_SCALE, HESSIAN_SCALE = range(10)
NUMEL, LAYOUT, DTYPE, FORMAT, INDEX, GROUP, COHORT, FLAGS = range(10, 18)

# enum Flag, enum DType
OWNS_BUFFER, SIGNED_PRODUCT, PROBE_GRADIENT = 1, 2, 4
DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}

# struct Journal: what the operators have done, in host memory.
X_IN_BACKUP, UPDATES = range(2)
JOURNAL_WORDS = 2

TALLY_WORDS, UNSEEN_WORDS, GAP_WORDS = 3, 3, 3  # structs Tally, Unseen and GapSums

Scalar: TypeAlias = Any  # a float; with ``capturable`` a tensor


class StepScalars(NamedTuple):
    """struct StepScalars: what the update needs beside tensors, of one cohort of parameters."""

    decay: Scalar
    beta1: Scalar
    one_minus_beta1: Scalar
    beta2: Scalar
    one_minus_beta2: Scalar
    bias2: Scalar
    bias2_kept: Scalar
    first: Scalar
    kept: Scalar
    eps: Scalar
    step_size: Scalar
    power: Scalar
    product_scale: Scalar = 1.0
    grad_scale: Scalar = 1.0
    clip: Scalar = math.inf
    skip: Scalar = 0.0
    floor: Scalar = 0.0


class DeviceScalars:
    """Rows of scalars in one float64 tensor on the device. Only the Hessian power is known to the host."""

    def __init__(self, table: Tensor, powers: list[float]) -> None:
        """Takes one row per cohort, with the columns of :class:`StepScalars`, and the power of each."""
        self.table, self.powers = table, powers

    def __len__(self) -> int:
        """Number of cohorts."""
        return len(self.powers)

    def __getitem__(self, cohort: Any) -> StepScalars:
        """The scalars of one cohort, as 0-d tensors."""
        row: tuple[Any, ...] = self.table[cohort].unbind()
        return StepScalars(*row)._replace(power=self.powers[cohort])


Scalars: TypeAlias = "list[StepScalars] | DeviceScalars"  # of every cohort
