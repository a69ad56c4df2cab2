"""Scalars of the update: computed once per cohort in double and rounded once, so that all backends see the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._passes.layout import Scalar, StepScalars


@dataclass(frozen=True)
class Request:
    """What one update is asked for, beside hyperparameters and state.

    Attributes:
        product_scale: Factor that makes of a product the mean of z⊙Hz over the probes.
        grad_scale: Factor that makes of ``p.grad`` the gradient to descend along: clipping over loss scale.
        skip: Not 0 where gradients have overflowed: the update then only restores.
        bias_correction: False replaces both corrections by 1.
        interval: Steps from one refresh to the next.
    """

    product_scale: Scalar = 1.0
    grad_scale: Scalar = 1.0
    skip: Scalar = 0.0
    bias_correction: bool = True
    interval: int = 1


class Hyper(NamedTuple):
    """Hyperparameters as the formulas take them: numbers, or columns of a tensor with an element per parameter.

    Attributes:
        lr: η.
        beta1: Decay of m.
        beta2: Decay of D.
        weight_decay: λ.
        eps: Added to the denominator.
        sign: −1 to maximize.
        clip: Bound of an element of the update, infinite for none.
        floor: Least value of D/(1 − β2^t) in a denominator.
        gamma: γ of Sophia, whose update is clip(m / max(γD, ε), 1). Here it is (1/γ) clip(m / max(D, ε/γ), γ), which
            is the same.
        power: Exponent of the curvature.
    """

    lr: Scalar
    beta1: Scalar
    beta2: Scalar
    weight_decay: Scalar
    eps: Scalar
    sign: Scalar
    clip: Scalar
    floor: Scalar
    gamma: Scalar
    power: Scalar


def hyper_of(group: Mapping[str, Any]) -> Hyper:
    """The hyperparameters of a parameter group. A learning rate that is a tensor stays one."""
    clip, floor, gamma = group.get("clip_update"), group.get("hessian_floor", 0.0), group.get("clip_threshold", 1.0)
    return Hyper(
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        sign=-1.0 if group["maximize"] else 1.0,
        clip=math.inf if clip is None else clip,
        floor=-math.inf if floor is None else float(floor) / float(gamma),
        gamma=float(gamma),
        power=float(group["hessian_power"]),
    )


def formulas(
    h: Hyper,
    bias1: Scalar,
    bias2: Scalar,
    bias2_kept: Scalar,
    weight: Scalar,
    weight_before: Scalar,
    request: Request,
) -> StepScalars:
    """The scalars of an update, of numbers in Python and of tensors on a device alike.

    Args:
        h: Hyperparameters.
        bias1: 1 − β1^t of this step.
        bias2: 1 − β2^t of the newest refresh, this step's included.
        bias2_kept: The same before this step.
        weight: 1 − β2^r after the r refreshes of the parameter so far, this step's included; of no matter elsewhere.
        weight_before: The same before this step, or ``weight`` if this is the first.
        request: What is common to all parameters.
    """
    return StepScalars(
        decay=1.0 - h.lr * h.weight_decay,
        beta1=h.beta1,
        one_minus_beta1=h.sign * (1.0 - h.beta1),
        beta2=h.beta2,
        one_minus_beta2=1.0 - h.beta2,
        bias2=bias2,
        bias2_kept=bias2_kept,
        first=weight,
        kept=weight / weight_before,
        eps=h.eps,
        step_size=h.lr / (bias1 * h.gamma),
        power=h.power,
        product_scale=request.product_scale,
        grad_scale=request.grad_scale,
        clip=h.clip * (bias1 * h.gamma),
        skip=request.skip,
        floor=h.floor,
    )


def integer_power(base: float, exponent: int) -> float:
    """``base ** exponent`` by repeated squaring.

    Only multiplications, always in the same order: the result has the same bits in Python, C++ and on a device, and
    a resumed run needs nothing but the step count to find it again. A library's ``pow`` promises neither.
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base = base * base  # not in place: it may be a tensor of the user's
        exponent >>= 1
    return result


def step_scalars(group: Mapping[str, Any], step: int, bias2: float, *, refresh: bool, request: Request) -> StepScalars:
    """Scalars of parameters that share a group, a step count and a curvature correction.

    Args:
        group: Their ``param_groups`` entry.
        step: The number t of the step to take, counted from 1.
        bias2: 1 − β2^t of their last refresh, 0 before the first.
        refresh: Whether this step refreshes their curvature.
        request: What is common to all parameters.
    """
    h = Hyper(*map(float, hyper_of(group)))  # any of them may be a tensor
    bias1, refreshed = 1.0, 1.0
    if request.bias_correction:
        bias1, refreshed = 1.0 - integer_power(h.beta1, step), 1.0 - integer_power(h.beta2, step)
    if not refresh:
        return formulas(h, bias1, bias2, bias2, 1.0, 1.0, request)
    before = refreshes_before(step, request.interval)
    weight, weight_before = (1.0 - integer_power(h.beta2, max(r, 1)) for r in (before + 1, before))
    return formulas(h, bias1, refreshed, bias2, weight, weight_before, request)


def refreshes_before(step: Any, interval: int) -> Any:
    """Refreshes of a parameter before its step of this number, as if all had come at a fixed interval.

    The true number would be one more in every checkpoint. This one is off by one for a parameter that joined between
    refreshes, and further where some failed or the interval was changed. Only elements that a refresh did not see, or
    sees for the first time, depend on it.
    """
    return (step - 1) // interval


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
    cohort_of: dict[tuple[int, int, float, bool], int] = {}
    keys = zip(groups, steps, bias2, refreshed, strict=True)
    cohorts = [cohort_of.setdefault(key, len(cohort_of)) for key in keys]
    return [scalars_of(*key) for key in cohort_of], cohorts


def _alike(values: list[Any]) -> bool:
    return values.count(values[0]) == len(values)
