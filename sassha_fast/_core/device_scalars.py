"""Scalars computed on the device, for steps that never wait for it: ``capturable=True``.

Step counts and bias corrections are device tensors, learning rates and radii may be. The formulas are those of
:mod:`sassha_fast._core.scalars`, over columns with an element for every parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._passes.layout import DeviceScalars
from .._passes.upload import Constants
from .scalars import Hyper, Request, formulas, hyper_of, refreshes_before

STEP_BITS = 31  # of a step count


def _squarings(betas: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """β^(2^j) of both betas of each group, for every bit j of a step count: [bits, groups, 2]."""
    rows = [list(betas)]
    for _ in range(STEP_BITS - 1):
        rows.append([(a * a, b * b) for a, b in rows[-1]])
    return rows


class _Powers:
    """β1^t and β2^t of every parameter, multiplied in the order of :func:`scalars.integer_power`."""

    def __init__(self, hypers: Sequence[Hyper], groups: Tensor, constants: Constants) -> None:
        betas = [(float(h.beta1), float(h.beta2)) for h in hypers]
        squarings = constants.constant(_squarings(betas), groups.device, name=("squarings", *betas))
        self._factors = squarings[:, groups]
        self._places = constants.constant(range(STEP_BITS), groups.device, torch.int64).unsqueeze(1)

    def __call__(self, steps: Tensor) -> Tensor:
        bits = (steps.unsqueeze(0) >> self._places) & 1
        factors = torch.where(bits.unsqueeze(-1) == 1, self._factors, torch.ones_like(self._factors))
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
    constants: Constants,
) -> DeviceScalars:
    """One row of scalars per parameter. See :func:`scalars.cohort_scalars` for the arguments.

    ``constants`` are those of the plan, so ``groups`` are always the same there.
    """
    device = steps[0].device
    hypers = [hyper_of(group) for group in param_groups]
    table = constants.vector([value for hyper in hypers for value in hyper], device).view(len(hypers), -1)
    members = constants.constant(groups, device, torch.int64, name="groups")
    h = Hyper(*table[members].unbind(1))
    kept = torch.stack([b.to(device) for b in bias2])
    one = torch.ones_like(kept)
    powers = _Powers(hypers, members, constants)
    taken = torch.stack([s.to(device) for s in steps])
    bias1, newest = (1.0 - powers(taken + 1)).unbind(1) if request.bias_correction else (one, one)
    common = constants.vector((request.product_scale, request.grad_scale, request.skip), device)
    on_device = Request(*(value * one for value in common.unbind()))  # type: ignore[arg-type]
    weight, before = one, one
    if any(refreshed):
        fresh = constants.constant(refreshed, device, torch.bool)
        counts = refreshes_before(taken + 1, request.interval)
        grown = (powers(torch.clamp(r, min=1))[:, 1] for r in (counts + 1, counts))
        weight, before = (torch.where(fresh, 1.0 - power, one) for power in grown)
        newest = torch.where(fresh, newest, kept)
    else:
        newest = kept
    row = formulas(h, bias1, newest, kept, weight, before, on_device)
    return DeviceScalars(torch.stack(row, dim=1), [hypers[g].power for g in groups])
