"""How everything is timed: contenders take turns in one run, and medians are compared.

Machines are shared and their clocks and neighbours change from second to second. Two contenders timed one after the
other differ by that; two that alternate see the same machine, so their ratio is what can be trusted.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch

Timed = Callable[[], float]


@dataclass(frozen=True)
class Measured:
    """Seconds of every round of one contender."""

    name: str
    seconds: list[float]

    @property
    def median(self) -> float:
        return median(self.seconds)

    def scaled(self, factor: float) -> Measured:
        return Measured(self.name, [factor * s for s in self.seconds])


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles over rounds of a quotient of two times."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} x ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Fit:
    """A line through measured points, and the share of their variance that it explains."""

    intercept: float
    slope: float
    r2: float


def keep_freed_memory() -> None:
    """Lets the C library keep what is given back to it, as allocators of GPUs do.

    Large tensors are mapped one by one otherwise, and who happens to free or touch them first would be charged for the
    kernel's work on every page: more than the passes take themselves.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX: map nothing
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: and give nothing back


def seconds_of(run: Callable[[], object]) -> float:
    """Seconds that ``run`` takes, by the device's own clock where it is a GPU."""
    if torch.get_default_device().type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def stopwatch(run: Callable[[], object]) -> Timed:
    """Times the whole of ``run``."""
    return lambda: seconds_of(run)


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


def spread(values: Sequence[float]) -> Ratio:
    """Median and quartiles, interpolated between the values."""
    if len(values) == 1:
        return Ratio(values[0], values[0], values[0])
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Ratio(middle, low, high)


def ratio(a: Measured, b: Measured) -> Ratio:
    """a's time over b's in the same round."""
    return spread([x / y for x, y in zip(a.seconds, b.seconds, strict=True)])


def together(name: str, weights: Sequence[float], parts: Sequence[Measured]) -> Measured:
    """The weighted sum of several contenders' times in the same round."""
    rows = zip(*(part.seconds for part in parts), strict=True)
    return Measured(name, [sum(w * s for w, s in zip(weights, row, strict=True)) for row in rows])


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """The line t = intercept + slope·n with the least sum of squared relative errors.

    Sizes span decades. Absolute errors of the largest would drown the intercept, which the smallest alone show.
    """
    weights = [1.0 / t**2 for t in seconds]
    total = sum(weights)
    mean_n = sum(w * n for w, n in zip(weights, sizes, strict=True)) / total
    mean_t = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    points = list(zip(weights, sizes, seconds, strict=True))
    slope = sum(w * (n - mean_n) * (t - mean_t) for w, n, t in points) / sum(
        w * (n - mean_n) ** 2 for w, n, _ in points
    )
    intercept = mean_t - slope * mean_n
    left = sum(w * (t - intercept - slope * n) ** 2 for w, n, t in points)
    around = sum(w * (t - mean_t) ** 2 for w, _, t in points)
    return Fit(intercept, slope, 1.0 - left / around if around else 1.0)
