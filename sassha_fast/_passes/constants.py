"""Numbers of the host as tensors on a device, copied there once: under capture there is no copying from the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def constant(values: tuple[Any, ...], device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor of constants."""
    return torch.tensor(values, dtype=dtype, device=device)


def vector(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Numbers and 0-d tensors as one float64 tensor on the device."""
    if not any(isinstance(v, Tensor) for v in values):
        return constant(tuple(values), device)
    parts = [
        v.reshape(()).to(device, torch.float64) if isinstance(v, Tensor) else constant((v,), device)[0] for v in values
    ]
    return torch.stack(parts)
