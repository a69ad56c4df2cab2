"""Schedules of the Hessian power and of ρ.

A schedule is a function of the step number, from 0 on. The optimizer counts the steps in its ``param_groups``, so a
checkpoint resumes a schedule where it stood. The authors' scheduler objects, which count for themselves and answer to
``step()``, are accepted in the same places.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Constant", "Cosine", "Linear", "ProportionalToLR", "Schedule", "Stepping", "check_schedule", "next_value"]

Schedule = Callable[[int], float]


class Stepping(Protocol):
    """A scheduler in the authors' form: each call of ``step`` returns the next value."""

    def step(self) -> float:
        """The next value."""


@dataclass(frozen=True)
class Constant:
    """The same value at every step."""

    value: float

    def __call__(self, t: int) -> float:
        """The value at step ``t``."""
        return self.value


@dataclass(frozen=True)
class Linear:
    """From ``start`` to ``end`` in ``total_steps``, in a straight line; ``end`` from then on."""

    total_steps: int
    start: float
    end: float

    def __post_init__(self) -> None:
        """Checks the number of steps."""
        if self.total_steps < 1:
            raise ValueError(f"Linear: total_steps is {self.total_steps}, expected at least 1")

    def __call__(self, t: int) -> float:
        """The value at step ``t``."""
        return self.start + (self.end - self.start) * min(t / self.total_steps, 1.0)


@dataclass(frozen=True)
class Cosine:
    """From ``start`` to ``end`` in ``total_steps``, along half a cosine; ``end`` from then on."""

    total_steps: int
    start: float
    end: float

    def __post_init__(self) -> None:
        """Checks the number of steps."""
        if self.total_steps < 1:
            raise ValueError(f"Cosine: total_steps is {self.total_steps}, expected at least 1")

    def __call__(self, t: int) -> float:
        """The value at step ``t``."""
        share = (1.0 - math.cos(math.pi * min(t / self.total_steps, 1.0))) / 2.0
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True)
class ProportionalToLR:
    """Moves from ``min_value`` to ``max_value`` as the learning rate falls from ``max_lr`` to ``min_lr``.

    Args:
        optimizer: Whose first group's learning rate is followed.
        max_lr: The learning rate at which the value is ``min_value``.
        min_lr: The learning rate at which it is ``max_value``.
        max_value: See ``min_lr``.
        min_value: See ``max_lr``.
    """

    optimizer: Any
    max_lr: float
    min_lr: float
    max_value: float
    min_value: float

    def __post_init__(self) -> None:
        """Checks the range."""
        if self.max_lr <= self.min_lr:
            raise ValueError(f"ProportionalToLR: max_lr is {self.max_lr}, expected more than min_lr={self.min_lr}")

    def __call__(self, t: int) -> float:
        """The value at the optimizer's present learning rate."""
        lr = float(self.optimizer.param_groups[0]["lr"])
        return self.max_value - (self.max_value - self.min_value) * (lr - self.min_lr) / (self.max_lr - self.min_lr)


def check_schedule(name: str, schedule: object, *, caller: str = "SASSHA") -> None:
    """Raises TypeError unless ``schedule`` is None, a function of the step number or an object with ``step()``."""
    if schedule is None or is_stepping(schedule) or callable(schedule):
        return
    raise TypeError(
        f"{caller}: {name} is {schedule!r}, expected None, a function of the step number (sassha_fast.schedules) or an "
        "object with step(); the second positional argument of SASSHA is the scheduler: pass lr=, rho= and "
        "hessian_power= by keyword"
    )


def next_value(schedule: Schedule | Stepping, t: int) -> float:
    """The value of a schedule at step ``t``, as it gives it; an object with ``step()`` counts for itself."""
    return schedule.step() if is_stepping(schedule) else schedule(t)  # type: ignore[operator, union-attr]


def is_stepping(schedule: object) -> bool:
    """Whether a schedule counts for itself, so that it can't be asked twice for one step."""
    return callable(getattr(schedule, "step", None))
