"""How everything is timed: contenders take turns in one run, and medians are compared.

Machines are shared and their clocks and neighbours change from second to second. Two contenders timed one after the
other differ by that; two that alternate see the same machine, so their ratio is what can be trusted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

Timed = Callable[[], float]


@dataclass(frozen=True)
class Measured:
    """Seconds of every round of one contender."""

    name: str
    seconds: list[float]

    @property
    def median(self) -> float:
        return median(self.seconds)


def stopwatch(run: Callable[[], object]) -> Timed:
    """Times the whole of ``run``."""

    def timed() -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    return timed


def interleave(contenders: dict[str, Timed], rounds: int, warmup: int = 2) -> dict[str, Measured]:
    """Lets the contenders take turns, each returning the seconds it took."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.disable()  # as timeit does: a collection would be charged to whoever happens to trigger it
    try:
        for turn in range(warmup + rounds):
            for name, run in contenders.items():
                taken = run()
                if turn >= warmup:
                    seconds[name].append(taken)
    finally:
        gc.enable()
    return {name: Measured(name, taken) for name, taken in seconds.items()}


def ratio(a: Measured, b: Measured) -> float:
    """Median over rounds of a's time over b's in the same round."""
    return median(x / y for x, y in zip(a.seconds, b.seconds, strict=True))
