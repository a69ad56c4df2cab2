"""Schedules of the radius and of the Hessian power: what they have for the step at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import schedules
from ..checks import check_number
from .options import Options
from .params import Parameters


class ScheduledValues:
    """Values of one step. The groups get them when it is done, so that a step that fails counts for no schedule."""

    def __init__(self, params: Parameters, options: Options, asked: dict[str, tuple[Any, int, float]]) -> None:
        """Has asked for none yet.

        Args:
            params: The parameters, with their groups.
            options: Of the optimizer, the schedules among them.
            asked: By hyperparameter, the schedule that was asked last, for which step, and its answer. An object that
                counts for itself is not asked again for a step that was undone.
        """
        self._params, self._options, self._asked = params, options, asked
        self._radii: Sequence[float | Tensor] | None = None
        self._next: dict[str, Any] = {}  # for the groups

    def radii(self) -> Sequence[float | Tensor]:
        """The radius of every group in this step."""
        if self._radii is None:
            self._radii = self.next_rho()
        return self._radii

    def next_rho(self) -> Sequence[float | Tensor]:
        """The radius of every group; one that is scheduled takes its next value."""
        options = self._options
        radii = [group["rho"] for group in self._params.groups]
        if options.rho_scheduler is not None:
            radii = [self._value("rho", "rho_step", options.rho_scheduler)] * len(radii)
        return radii if options.capturable else list(map(float, radii))

    def groups_of_update(self) -> list[dict[str, Any]]:
        """The parameter groups as the update sees them: a Hessian power that is scheduled takes its next value."""
        groups, schedule = self._params.groups, self._options.hessian_power_scheduler
        if schedule is None:
            return groups
        power = self._value("hessian_power", "power_step", schedule)
        return [{**group, "hessian_power": power} for group in groups]

    def _value(self, key: str, counter: str, schedule: schedules.Schedule | schedules.Stepping) -> float:
        """The next value of a schedule."""
        count = self._params.groups[0][counter]
        last, number, value = self._asked.get(key, (None, 0, 0.0))
        if last is not schedule or number != count or not schedules.is_stepping(schedule):
            given = schedules.next_value(schedule, count)
            check_number(key, given, caller=self._options.caller)
            value = float(given)
            self._asked[key] = schedule, count, value
        self._next |= {key: value, counter: count + 1}
        return value

    def write_schedules(self) -> None:
        """Gives the groups what was scheduled for this step. May be called twice."""
        if self._next:
            for group in self._params.groups:
                group.update(self._next)
