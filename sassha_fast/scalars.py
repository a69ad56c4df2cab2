"""Scalars of the update: computed once per cohort in double and rounded once, so that all backends see the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "Request",
    "StepScalars",
    "cohort_scalars",
    "curvature_factor",
    "integer_power",
    "least_curvature",
    "step_scalars",
]


Scalar: TypeAlias = Any  # a float, or with ``capturable`` a 0-d tensor


class StepScalars(NamedTuple):
    """What the update needs beside tensors. The fields are the columns of ``StepScalars`` in ``csrc/params.h``.

    With ``capturable`` all but ``power`` are tensors.
    """

    decay: Scalar
    beta1: Scalar
    one_minus_beta1: Scalar
    beta2: Scalar
    one_minus_beta2: Scalar
    bias2: Scalar
    bias2_kept: Scalar
    eps: Scalar
    step_size: Scalar
    power: float
    product_scale: Scalar = 1.0
    grad_scale: Scalar = 1.0
    clip: Scalar = math.inf
    skip: Scalar = 0.0
    floor: Scalar = 0.0


@dataclass(frozen=True)
class Request:
    """What one update is asked for, beside hyperparameters and state.

    Attributes:
        product_scale: Factor that makes of a product the mean of z⊙Hz over the probes.
        grad_scale: Factor that makes of ``p.grad`` the gradient to descend along: clipping over loss scale.
        skip: Not 0 where gradients have overflowed: the update then only restores.
        bias_correction: False replaces both corrections by 1.
    """

    product_scale: float = 1.0
    grad_scale: Scalar = 1.0
    skip: Scalar = 0.0
    bias_correction: bool = True


def integer_power(base: float, exponent: int) -> float:
    """``base ** exponent`` by repeated squaring.

    Only multiplications, always in the same order: the result has the same bits in Python, C++ and on a device, and
    a resumed run needs nothing but the step count to find it again. A library's ``pow`` promises neither.
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def least_curvature(group: Mapping[str, Any]) -> float:
    """The least value of D/(1 − β2^t) in a denominator: none where ``hessian_floor`` is None."""
    floor = group.get("hessian_floor", 0.0)
    return -math.inf if floor is None else float(floor) / curvature_factor(group)


def curvature_factor(group: Mapping[str, Any]) -> float:
    """γ of Sophia, whose update is clip(m / max(γD, ε), 1): here (1/γ) clip(m / max(D, ε/γ), γ), which is the same."""
    return float(group.get("clip_threshold", 1.0))


def step_scalars(group: Mapping[str, Any], step: int, bias2: float, *, refresh: bool, request: Request) -> StepScalars:
    """Scalars of parameters that share a group, a step count and a curvature correction.

    Args:
        group: Their ``param_groups`` entry.
        step: The number t of the step to take, counted from 1.
        bias2: 1 − β2^t of their last refresh, 0 before the first.
        refresh: Whether this step refreshes their curvature.
        request: What is common to all parameters.
    """
    lr, gamma = float(group["lr"]), curvature_factor(group)
    beta1, beta2 = group["betas"]
    clip = group.get("clip_update")
    bias1, refreshed_bias2 = 1.0, 1.0
    if request.bias_correction:
        bias1, refreshed_bias2 = 1.0 - integer_power(beta1, step), 1.0 - integer_power(beta2, step)
    return StepScalars(
        decay=1.0 - lr * float(group["weight_decay"]),
        beta1=beta1,
        one_minus_beta1=-(1.0 - beta1) if group["maximize"] else 1.0 - beta1,
        beta2=beta2,
        one_minus_beta2=1.0 - beta2,
        bias2=refreshed_bias2 if refresh else bias2,
        bias2_kept=bias2,
        eps=float(group["eps"]),
        step_size=lr / (bias1 * gamma),
        power=float(group["hessian_power"]),
        product_scale=request.product_scale,
        grad_scale=request.grad_scale,
        clip=math.inf if clip is None else clip * (bias1 * gamma),
        skip=request.skip,
        floor=least_curvature(group),
    )


def cohort_scalars(
    param_groups: Sequence[Mapping[str, Any]],
    groups: list[int],
    spans: Mapping[int, slice],
    steps: list[int],
    bias2: list[float],
    refreshed: list[bool],
    request: Request,
) -> tuple[list[StepScalars], list[int]]:
    """Sorts parameters into cohorts that share a group, a step count, a correction and whether they are refreshed.

    Args:
        param_groups: All parameter groups.
        groups: Group of each parameter, ascending.
        spans: The slice of the parameters that each group takes.
        steps: Steps that each parameter has taken.
        bias2: 1 − β2^t of each parameter's last refresh.
        refreshed: Whether this step refreshes it.
        request: What is common to all parameters.

    Returns:
        The scalars of each cohort, and the cohort of each parameter.
    """

    def scalars_of(group: int, step: int, bias2: float, refresh: bool) -> StepScalars:
        return step_scalars(param_groups[group], step + 1, bias2, refresh=refresh, request=request)

    if all(_alike(column[span]) for span in spans.values() for column in (steps, bias2, refreshed)):
        # The usual case: a group is a cohort. Groups without gradients get scalars that nobody reads.
        firsts = [spans.get(g, slice(0, 1)).start for g in range(len(param_groups))]
        return [scalars_of(g, steps[i], bias2[i], refreshed[i]) for g, i in enumerate(firsts)], groups
    numbers: dict[tuple[int, int, float, bool], int] = {}
    keys = zip(groups, steps, bias2, refreshed, strict=True)
    cohorts = [numbers.setdefault(key, len(numbers)) for key in keys]
    return [scalars_of(*key) for key in numbers], cohorts


def _alike(values: list[Any]) -> bool:
    return values.count(values[0]) == len(values)
