"""Scalars computed on the device, for steps that never wait for it: ``capturable=True``.

Step counts and bias corrections are device tensors, learning rates and radii may be. The numbers are the ones of
:mod:`sassha_fast.scalars`, operation by operation, with a cohort for every parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .scalars import Request, StepScalars, curvature_factor, least_curvature

__all__ = ["DeviceScalars", "constant", "device_scalars", "vector"]

STEP_BITS = 31  # of a step count
_COLUMNS = ("lr", "beta1", "beta2", "weight_decay", "eps", "sign", "clip", "floor", "gamma")


class DeviceScalars(Sequence[StepScalars]):
    """Rows of scalars in one float64 tensor on the device. Only the Hessian power is known to the host."""

    def __init__(self, table: Tensor, powers: list[float]) -> None:
        """Takes one row per cohort, with the columns of :class:`StepScalars`, and the power of each."""
        self.table, self.powers = table, powers

    def __len__(self) -> int:
        """Number of cohorts."""
        return len(self.powers)

    def __getitem__(self, cohort: Any) -> StepScalars:  # type: ignore[override]
        """The scalars of one cohort, as 0-d tensors."""
        row: tuple[Any, ...] = self.table[cohort].unbind()
        return StepScalars(*row)._replace(power=self.powers[cohort])


@lru_cache(maxsize=64)
def constant(values: tuple[Any, ...], device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor of constants, copied to the device once: under capture there is no copying from the host."""
    return torch.tensor(values, dtype=dtype, device=device)


def vector(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Numbers and 0-d tensors as one float64 tensor on the device."""
    if not any(isinstance(v, Tensor) for v in values):
        return constant(tuple(values), device)
    parts = [
        v.reshape(()).to(device, torch.float64) if isinstance(v, Tensor) else constant((v,), device)[0] for v in values
    ]
    return torch.stack(parts)


@lru_cache(maxsize=8)
def _squarings(betas: tuple[tuple[float, float], ...], device: torch.device) -> Tensor:
    """β^(2^j) of both betas of each parameter, for every bit j of a step count: [bits, parameters, 2]."""
    rows = [betas]
    for _ in range(STEP_BITS - 1):
        rows.append(tuple((a * a, b * b) for a, b in rows[-1]))
    return torch.tensor(rows, dtype=torch.float64, device=device)


def _powers(betas: tuple[tuple[float, float], ...], steps: Tensor) -> Tensor:
    """β1^t and β2^t of every parameter, multiplied in the order of :func:`sassha_fast.scalars.integer_power`."""
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
    """One row of scalars per parameter. See :func:`sassha_fast.scalars.cohort_scalars` for the arguments."""
    device = steps[0].device
    values: list[float | Tensor] = []
    for group in param_groups:
        beta1, beta2 = group["betas"]
        clip = group.get("clip_update")
        sign, bound = -1.0 if group["maximize"] else 1.0, math.inf if clip is None else clip
        values += [group["lr"], beta1, beta2, group["weight_decay"], group["eps"], sign, bound]
        values += [least_curvature(group), curvature_factor(group)]
    hyper = vector(values, device).view(len(param_groups), len(_COLUMNS))
    columns = hyper[constant(tuple(groups), device, torch.int64)].unbind(1)
    lr, beta1, beta2, weight_decay, eps, signs, bounds, floors, gamma = columns
    kept = torch.stack([b.to(device) for b in bias2])
    one = torch.ones_like(lr)
    bias1, refreshed_bias2 = one, one
    if request.bias_correction:
        betas = tuple(param_groups[g]["betas"] for g in groups)
        bias1, refreshed_bias2 = (1.0 - _powers(betas, torch.stack([s.to(device) for s in steps]) + 1)).unbind(1)
    fresh = constant(tuple(refreshed), device, torch.bool)
    powers = [float(param_groups[g]["hessian_power"]) for g in groups]
    common = vector((request.product_scale, request.grad_scale, request.skip), device)
    row = StepScalars(
        decay=1.0 - lr * weight_decay,
        beta1=beta1,
        one_minus_beta1=signs * (1.0 - beta1),
        beta2=beta2,
        one_minus_beta2=1.0 - beta2,
        bias2=torch.where(fresh, refreshed_bias2, kept),
        bias2_kept=kept,
        eps=eps,
        step_size=lr / (bias1 * gamma),
        power=constant(tuple(powers), device),  # type: ignore[arg-type]
        product_scale=common[0] * one,
        grad_scale=common[1] * one,
        clip=bounds * (bias1 * gamma),
        skip=common[2] * one,
        floor=floors,
    )
    return DeviceScalars(torch.stack(row, dim=1), powers)  # type: ignore[arg-type]
