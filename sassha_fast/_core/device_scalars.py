"""Scalars computed on the device, for steps that never wait for it: ``capturable=True``.

Step counts and bias corrections are device tensors, learning rates and radii may be. The formulas are those of
:mod:`sassha_fast._core.scalars`, over columns with an element for every parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .._passes.constants import constant, vector
from .._passes.layout import DeviceScalars
from .scalars import Hyper, Request, formulas, hyper_of, refreshes_before

STEP_BITS = 31  # of a step count


@lru_cache(maxsize=8)
def _squarings(betas: tuple[tuple[float, float], ...], device: torch.device) -> Tensor:
    """β^(2^j) of both betas of each parameter, for every bit j of a step count: [bits, parameters, 2]."""
    rows = [betas]
    for _ in range(STEP_BITS - 1):
        rows.append(tuple((a * a, b * b) for a, b in rows[-1]))
    return torch.tensor(rows, dtype=torch.float64, device=device)


def _powers(betas: tuple[tuple[float, float], ...], steps: Tensor) -> Tensor:
    """β1^t and β2^t of every parameter, multiplied in the order of :func:`scalars.integer_power`."""
    factors = _squarings(betas, steps.device)
    bits = (steps.unsqueeze(0) >> constant(tuple(range(STEP_BITS)), steps.device, torch.int64).unsqueeze(1)) & 1
    factors = torch.where(bits.unsqueeze(-1) == 1, factors, torch.ones_like(factors))
    result = factors[0]
    for factor in factors[1:]:
        result = result * factor
    return result


def device_scalars(
    param_groups: Sequence[Mapping[str, Any]],
    groups: list[int],
    steps: list[Tensor],
    bias2: list[Tensor],
    refreshed: list[bool],
    request: Request,
) -> DeviceScalars:
    """One row of scalars per parameter. See :func:`scalars.cohort_scalars` for the arguments."""
    device = steps[0].device
    hypers = [hyper_of(group) for group in param_groups]
    table = vector([value for hyper in hypers for value in hyper], device).view(len(hypers), -1)
    h = Hyper(*table[constant(tuple(groups), device, torch.int64)].unbind(1))
    kept = torch.stack([b.to(device) for b in bias2])
    one = torch.ones_like(kept)
    bias1, newest = one, one
    betas = tuple((float(hypers[g].beta1), float(hypers[g].beta2)) for g in groups)
    taken = torch.stack([s.to(device) for s in steps])
    if request.bias_correction:
        bias1, newest = (1.0 - _powers(betas, taken + 1)).unbind(1)
    fresh = constant(tuple(refreshed), device, torch.bool)
    common = vector((request.product_scale, request.grad_scale, request.skip), device)
    on_device = Request(*(value * one for value in common.unbind()))  # type: ignore[arg-type]
    weight, before = one, one
    if any(refreshed):
        counts = refreshes_before(taken + 1, request.interval)
        powers = (_powers(betas, torch.clamp(r, min=1))[:, 1] for r in (counts + 1, counts))
        weight, before = (torch.where(fresh, 1.0 - power, one) for power in powers)
    row = formulas(h, bias1, torch.where(fresh, newest, kept), kept, weight, before, on_device)
    return DeviceScalars(torch.stack(row, dim=1), [hypers[g].power for g in groups])
