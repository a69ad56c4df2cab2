"""Benchmarks in pytest-benchmark's format, from rounds in which the contenders took turns.

``--quick`` shows that everything runs: one round, sizes up to a million. ``--device cuda`` times the same on a GPU, by
its own clock. What a script needs to draw a report stands in ``extra_info``, so that it reads no names:

| key | where | meaning |
|---|---|---|
| bench | all | the file's word: norm, perturb, step, compact, hvp, train, scaling, cuda |
| contender | all | "sassha cpu" (cuda, triton, foreach, reference), "eager loop", "sam", "adahessian", "sophia-h", |
| | | "shampoo", "adamw fused" (foreach, for-loop), "roofline", "copy", "get_total_norm", "bernoulli" |
| | train | these, "gradient", "sassha exact" (finite difference), "sassha quarter" (of the batch, for ascent and |
| | | products), "g-sassha exact", "m-sassha exact" (finite difference), "suggest" |
| | compact | how parameters and state are stored: "float32", "bfloat16, 24-bit weights, 8-bit state", ... |
| | hvp | these, "exact", "finite difference", "central difference" |
| threads, device | all | torch's number of threads, and "cpu" or "cuda" |
| model | not on axes | "gpt", "resnet20", "small" |
| parameters, tensors | on shapes | their numbers |
| pass | passes alone | "norm", "perturb", "restore", "step", "refresh_step", "ordinary" (three of them), "probe", |
| | | "rademacher"; in cuda more |
| calls | optimizers | "three calls", "step" (one call), "step op" (the kernel alone) |
| bytes_per_parameter | passes alone | what the algorithm reads and writes |
| gigabytes_per_second | passes alone | these bytes over the time |
| share_of_roofline | passes alone | time of a loop that moves the same bytes over ours: 1 is best |
| ratio_to_fused_adamw | optimizers, "ordinary" | our time over that of AdamW(fused=True) |
| ratio_to_float32 | compact | time over that of float32 |
| speedup_over_eager | where one runs | time of the loop over tensors over ours |
| ratio_name | with a main ratio | "share_of_roofline", "ratio_to_fused_adamw", "ratio_to_float32", |
| | | "speedup_over_eager" or "speedup_over_one_thread" |
| ratio, ratio_low, ratio_high | with a main ratio | its median and quartiles over rounds |
| ratio_to_step | refresh_step | its time over that of the ordinary step's kernel |
| gc, gc_low, gc_high | train | cost of a step in gradient computations, refreshed every ten steps, and quartiles |
| | hvp | what a refresh adds to an ordinary step |
| gc_ordinary, gc_refresh | train, hvp | cost of an ordinary step, and of one that refreshes |
| gc_once, steps | train, suggest | cost of one suggestion, and its steps on trial |
| ratio_to_sassha | train, g-sassha | its cost over that of SASSHA |
| mib_ordinary, mib_refresh | train | peak of live tensors in MiB |
| axis | scaling | what varies in the series of this contender and its calls: "parameters", "tensors", "threads" |
| fit_intercept_us, fit_slope_ns, fit_r2 | scaling | t = intercept + slope·n of the series, the same at all points |
| us_per_tensor | step, scaling | microseconds over the number of tensors |
| target | where there is one | of gc in train, ratio_to_fused_adamw in step, ratio_to_float32 in compact, |
| | | us_per_tensor on the axis of tensors |
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from measure import Measured, Ratio, keep_freed_memory
from settings import Settings

REPORT: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    with suppress(ValueError):  # the tests have the same option
        parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="what to time")
    parser.addoption("--quick", action="store_true", help="benchmarks: least rounds and small sizes, to see them run")


def pytest_configure(config: pytest.Config) -> None:
    keep_freed_memory()
    config.addinivalue_line("python_files", "bench_*.py")
    # The eager loop keeps torch's cycle between parameters and gradients; the benchmark ends before it matters.
    config.addinivalue_line("filterwarnings", "ignore:Using backward:UserWarning")
    warnings.filterwarnings("ignore", message="Using backward")
    # ReLU networks are timed with finite differences too, whatever that does to their curvature.
    config.addinivalue_line("filterwarnings", "ignore:[A-Za-z]+.attach:UserWarning")
    if config.getoption("--device") == "cuda" and torch.cuda.is_available():
        torch.set_default_device("cuda")  # before the files are imported, which list the backends of this device


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") == "cpu" or torch.cuda.is_available():
        return
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason="--device cuda, but torch finds no GPU"))


def pytest_benchmark_update_machine_info(machine_info: dict[str, object]) -> None:
    """Notes what a report says about the machine and pytest-benchmark does not."""
    from bench.report.head import here

    machine_info.update(here())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REPORT:
        terminalreporter.section(f"{torch.get_num_threads()} threads, medians of interleaved rounds")
        for line in REPORT:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def settings(pytestconfig: pytest.Config) -> Settings:
    return Settings(pytestconfig.getoption("--quick"))


@pytest.fixture
def say() -> Callable[[str], None]:
    """Adds a line to the summary at the end."""
    return REPORT.append


class Replay:
    """A clock that runs through recorded durations, so that pytest-benchmark keeps statistics of rounds it did not run.

    pytest-benchmark times one contender after the other. Taking turns is what makes ratios mean something on a
    shared machine, so the rounds are run before and replayed here.
    """

    def __init__(self, seconds: list[float]) -> None:
        self.times = [0.0]
        for taken in seconds:
            self.times += [self.times[-1], self.times[-1] + taken]
        self.times = self.times[1:]
        self.position = 0

    def __call__(self) -> float:
        now = self.times[min(self.position, len(self.times) - 1)]
        self.position += 1
        return now


@pytest.fixture
def record(benchmark, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Stores one contender's rounds as this test's benchmark; see above for the keys of ``extra``."""

    def store(measured: Measured, contender: str, *, main: tuple[str, Ratio] | None = None, **extra: object) -> None:
        if main is not None:
            name, found = main
            extra |= {"ratio_name": name, "ratio": found.median, "ratio_low": found.low, "ratio_high": found.high}
            extra[name] = found.median
        common = {
            "bench": request.module.__name__.removeprefix("bench_"),
            "contender": contender,
            "threads": torch.get_num_threads(),
            "device": torch.get_default_device().type,
        }
        benchmark.extra_info.update({**common, **extra})
        benchmark._timer = Replay(measured.seconds)
        benchmark.pedantic(lambda: None, rounds=len(measured.seconds), iterations=1)

    return store
