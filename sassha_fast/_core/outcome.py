"""What a refresh brought. A CPU knows it at once, a device when it has come that far: nobody waits for that.

The step after a refresh is taken as if it had succeeded, but for its update, which needs to know: by then the device
has the passes of a whole step to work on. So a refresh that failed is known one step later, at the same step in every
run and in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from ..stats import Stats
from .keys import BIAS2

WORDS = 3  # of every parameter: elements that were seen, that were not, and whether all were lost to rounding


@dataclass
class Refreshed:
    """The parameters of a refresh, by position in its plan.

    Attributes:
        states: State of each.
        sizes: Elements of each, over all shards.
        corrections: 1 − β2^t of this refresh, None for those without a product. With ``capturable`` the device has it.
        clock: Of the step.
        scheduled: Whether all parameters were to be refreshed.
    """

    states: list[dict[str, Any]]
    sizes: list[int]
    corrections: Sequence[float | None]
    clock: int
    scheduled: bool


def sent(report: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A report in host memory, and from a GPU the event after which it is there."""
    if report.device.type != "cuda":
        return report.cpu(), None
    there = torch.empty(report.shape, dtype=report.dtype, device="cpu", pin_memory=True)
    there.copy_(report, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(report.device))
    return there, event


class Outcome:
    """The outcome of one refresh.

    Attributes:
        refreshed: What was refreshed.
        on_device: Whether the state has what came of it already, as far as it is there.
    """

    def __init__(
        self,
        refreshed: Refreshed,
        report: Tensor,
        stats: Stats,
        counts: tuple[int, int, int],
        *,
        on_device: bool,
        rounded: Callable[[int], bool] | None = None,
    ) -> None:
        """Sends for the report.

        Args:
            refreshed: What was refreshed.
            report: ``WORDS`` numbers of every parameter, and last whether the step was skipped.
            stats: Whose counts of refreshes it changes.
            counts: What they were before: those that succeeded, in part, and not at all.
            on_device: Whether bias corrections were written on the device.
            rounded: Says of a parameter, if the report does not, whether its products were all lost to rounding.
        """
        self.refreshed, self.on_device = refreshed, on_device
        self._rounded, self._stats = rounded, stats
        self._counts_before = counts
        self._has_brought: bool | None = None
        wanted = map(is_not, refreshed.corrections, repeat(None))
        self._good = set(map(id, compress(refreshed.states, wanted)))  # states that have curvature, or so it is hoped
        self._report, self._event = sent(report)
        if self._event is not None:
            stats.late = self.read

    @property
    def is_late(self) -> bool:
        """Whether a device had to be asked."""
        return self._event is not None

    @property
    def is_known(self) -> bool:
        """Whether it was looked at."""
        return self._has_brought is not None

    def has_curvature(self, entry: dict[str, Any]) -> bool:
        """Whether a parameter with this state has curvature since, as far as is known, or else is hoped."""
        return id(entry) in self._good

    @property
    def retry_clock(self) -> int | None:
        """The clock to go back to, so that a scheduled refresh that failed is due again; None if it has succeeded."""
        failed = not self.read() and self.refreshed.scheduled
        return self.refreshed.clock if failed else None

    def read(self) -> bool:
        """Takes over what the refresh brought. Returns whether it brought anything, or there was nothing to bring.

        If every product of a parameter rounds to zero, it counts as refreshed; if they overflow, it is tried again.
        """
        if self._has_brought is None:
            if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
                self._event.synchronize()
            *numbers, skipped = self._report.tolist()
            rows = [numbers[i : i + WORDS] for i in range(0, len(numbers), WORDS)]
            if skipped:
                self._good.clear()
            self._has_brought = not skipped and self._take_over(rows)
            refreshes, partial, failed = self._counts_before
            if not self._has_brought:
                self._stats.skipped_refreshes = failed + 1
            else:
                self._stats.refreshes = refreshes + 1
                self._stats.partial_refreshes = partial + self._is_partial
            if self._stats.late == self.read:
                self._stats.late = None
        return self._has_brought

    def _take_over(self, rows: list[list[float]]) -> bool:
        """Writes corrections of those that have a new curvature. Returns whether any have, or have lost none."""
        refreshed, total, self._is_partial = self.refreshed, 0.0, False
        columns = zip(refreshed.states, refreshed.sizes, refreshed.corrections, rows, strict=True)
        for i, (entry, size, correction, (seen, unseen, rounded)) in enumerate(columns):
            if correction is None:
                continue
            total += seen
            lost = size - seen - unseen > 0
            self._is_partial |= lost
            if not (seen or not lost or rounded or (self._rounded is not None and self._rounded(i))):
                self._good.discard(id(entry))
            elif not self.on_device:
                entry[BIAS2] = correction
        return total > 0 or not self._is_partial
