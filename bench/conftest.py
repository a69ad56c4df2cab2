"""Benchmarks in pytest-benchmark's format, from rounds in which the contenders took turns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from measure import Measured

REPORT: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    with suppress(ValueError):  # the tests have the same option
        parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="what to time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device = config.getoption("--device")
    for item in items:
        here = Path(item.path).parent == Path(__file__).parent
        if here and (Path(item.path).stem == "bench_cuda") != (device == "cuda"):
            item.add_marker(pytest.mark.skip(reason=f"--device {device}"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("python_files", "bench_*.py")
    # The eager loop keeps torch's cycle between parameters and gradients; the benchmark ends before it matters.
    config.addinivalue_line("filterwarnings", "ignore:Using backward:UserWarning")
    warnings.filterwarnings("ignore", message="Using backward")
    # ReLU networks are timed with finite differences too, whatever that does to their curvature.
    config.addinivalue_line("filterwarnings", "ignore:[A-Za-z]+.attach:UserWarning")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REPORT:
        terminalreporter.section(f"{torch.get_num_threads()} threads, medians of interleaved rounds")
        for line in REPORT:
            terminalreporter.write_line(line)


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
def record(benchmark) -> Callable[..., None]:
    """Stores one contender's rounds as this test's benchmark."""

    def store(measured: Measured, **extra: object) -> None:
        benchmark._timer = Replay(measured.seconds)
        benchmark.extra_info.update(extra)
        benchmark.pedantic(lambda: None, rounds=len(measured.seconds), iterations=1)

    return store
