"""How time grows with the number of parameters, of tensors and of threads: t = a + b·n, fitted to medians."""

from dataclasses import dataclass, field

import pytest
import torch
from contenders import CONTENDERS, OURS
from floors import Floors
from kernels import Kernels, TorchPasses
from measure import Fit, Measured, Timed, fit, interleave, ratio, stopwatch
from memory import available
from settings import slug
from shapes import Shapes, count, even, small

Key = tuple[str, str]  # contender and calls

FUSED, EAGER = ("adamw fused", "step"), ("eager loop", "three calls")
FOREACH, OP = "sassha foreach", "step op"
# Rounds by number of parameters. They lie in a hundred tensors, whatever their number.
PARAMETERS = {10**4: 40, 10**5: 40, 10**6: 15, 10**7: 7, 10**8: 3}
# Rounds by number of tensors, which have 64 elements each.
TENSORS = {1: 60, 10: 60, 100: 60, 1000: 30, 10_000: 12}
QUICK_PARAMETERS, QUICK_TENSORS = 10**6, 10**3
LAST = 10**7  # of those who are slow: at most this many parameters
SLOW = {EAGER, (FOREACH, "three calls"), (FOREACH, OP), ("adamw for-loop", "step")}
BYTES = 140  # of memory per parameter while all that are not slow are timed
TARGETS = {"three calls": 3.0, OP: 1.0}  # microseconds per tensor
THREADS = (1, 2)

OPTIMIZERS = [(name, contender.calls) for name, contender in CONTENDERS.items()]
BY_PARAMETERS = [*OPTIMIZERS, (OURS, OP), (FOREACH, OP)]
BY_TENSORS = [(OURS, "three calls"), (OURS, OP), FUSED]
BY_THREADS = [*BY_TENSORS, ("roofline", OP)]


def build(key: Key, shapes: Shapes) -> Timed:
    contender, calls = key
    if key == ("roofline", OP):
        return Floors(shapes).of("step")
    if calls == OP:
        return stopwatch((TorchPasses(shapes, "foreach") if contender == FOREACH else Kernels(shapes)).step)
    return CONTENDERS[contender].build(shapes)


@dataclass(frozen=True)
class Axis:
    """Series of measurements over one number."""

    name: str
    shapes: dict[int, Shapes] = field(default_factory=dict)
    measured: dict[int, dict[Key, Measured]] = field(default_factory=dict)

    def run(self, size: int, shapes: Shapes, keys: list[Key], rounds: int) -> None:
        self.shapes[size] = shapes
        self.measured[size] = interleave({key: build(key, shapes) for key in keys}, rounds, warmup=1)

    def line(self, key: Key) -> Fit:
        points = {size: found[key].median for size, found in self.measured.items() if key in found}
        return fit(list(points), list(points.values()))

    def is_last(self, size: int, key: Key) -> bool:
        return size == max(n for n, found in self.measured.items() if key in found)

    def tell(self, size, key, record, say, **more):
        """Records a point with the line of its series, and says the line once."""
        found = self.measured.get(size, {})
        if key not in found:
            pytest.skip(f"{key[0]} takes too long or too much memory with {size:,} {self.name}")
        line, shapes, mine = self.line(key), self.shapes[size], found[key]
        if EAGER in found:
            more["speedup_over_eager"] = ratio(found[EAGER], mine).median
        record(
            mine,
            key[0],
            main=("ratio_to_fused_adamw", ratio(mine, found[FUSED])),
            calls=key[1],
            axis=self.name,
            parameters=count(shapes),
            tensors=len(shapes),
            us_per_tensor=mine.median / len(shapes) * 1e6,
            fit_intercept_us=line.intercept * 1e6,
            fit_slope_ns=line.slope * 1e9,
            fit_r2=line.r2,
            **more,
        )
        if self.is_last(size, key):
            target = f" (target {more['target']:g})" if "target" in more else ""
            say(
                f"{self.name:<10} {key[0]:<16} {key[1]:<12} {line.intercept * 1e6:8.1f} µs + {line.slope * 1e9:8.3f} "
                f"ns each (R² {line.r2:.4f}); with {size:,}: {mine.median * 1e3:.3f} ms, "
                f"{mine.median / len(shapes) * 1e6:.2f} µs/tensor{target}"
            )


@pytest.fixture(scope="module")
def by_parameters(settings):
    axis = Axis("parameters")
    for size in settings.sizes(PARAMETERS, QUICK_PARAMETERS):
        shapes = even(size)
        keys = [key for key in BY_PARAMETERS if key[0] not in CONTENDERS or CONTENDERS[key[0]].takes(shapes)]
        if size > LAST:
            keys = [key for key in keys if key not in SLOW]
            if available() < BYTES * size:
                continue
        axis.run(size, shapes, keys, settings.rounds(PARAMETERS[size]))
    return axis


@pytest.mark.parametrize("key", BY_PARAMETERS, ids=lambda key: slug("-".join(key)))
@pytest.mark.parametrize("size", PARAMETERS, ids="{:.0e}".format)
def test_parameters(size, key, by_parameters, record, say):
    by_parameters.tell(size, key, record, say)


@pytest.fixture(scope="module")
def by_tensors(settings):
    axis = Axis("tensors")
    for size in settings.sizes(TENSORS, QUICK_TENSORS):
        axis.run(size, small(size), BY_TENSORS, settings.rounds(TENSORS[size]))
    return axis


@pytest.mark.parametrize("key", BY_TENSORS, ids=lambda key: slug("-".join(key)))
@pytest.mark.parametrize("size", TENSORS, ids=str)
def test_tensors(size, key, by_tensors, record, say):
    target = {"target": TARGETS[key[1]]} if key[0] == OURS else {}
    by_tensors.tell(size, key, record, say, **target)


def on(threads: int, run: Timed) -> Timed:
    def timed() -> float:
        torch.set_num_threads(threads)
        return run()

    return timed


@pytest.fixture(scope="module")
def by_threads(settings):
    if torch.get_default_device().type != "cpu":
        pytest.skip("threads are the CPU's")
    shapes, before = settings.shapes("gpt"), torch.get_num_threads()
    built = {key: build(key, shapes) for key in BY_THREADS}
    runs = {(threads, key): on(threads, run) for key, run in built.items() for threads in THREADS}
    try:
        return shapes, interleave(runs, settings.rounds(12))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("key", BY_THREADS, ids=lambda key: slug("-".join(key)))
@pytest.mark.parametrize("threads", THREADS, ids="threads_{}".format)
def test_threads(threads, key, by_threads, record, say):
    shapes, found = by_threads
    mine, faster = found[threads, key], ratio(found[1, key], found[threads, key])
    record(
        mine,
        key[0],
        main=("speedup_over_one_thread", faster),
        calls=key[1],
        axis="threads",
        threads=threads,
        model="gpt",
        parameters=count(shapes),
        tensors=len(shapes),
        ratio_to_fused_adamw=ratio(mine, found[threads, FUSED]).median,
    )
    if threads > 1:
        say(f"threads    {key[0]:<16} {key[1]:<12} {threads} are {faster} as fast as one, on gpt")
