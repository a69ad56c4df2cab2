"""Fixtures of all tests."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

# Triton's kernels are made for the interpreter or for a GPU when they are imported, so long before options are parsed.
ON_GPU = "--device cuda" in " ".join(sys.argv).replace("=", " ")
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from watchdog import Watchdog  # noqa: E402

from sassha_fast._passes import library as ops  # noqa: E402

# What holds on any device. The other modules are about the CPU, the simulator, or what no device changes.
ON_ANY_DEVICE = {
    "test_norm",
    "test_perturb",
    "test_probe",
    "test_step",
    "test_x_in_state",
    "test_gap",
    "test_unseen_passes",
    "test_compact_passes",
    "test_compact_backends",
    "test_compact_kernels",
    "test_philox",
    "test_parity",
    "test_cuda_device",
    "test_cuda_graphs",
    "test_cuda_counts",
}


# Files that take longest, in this order. Workers of pytest-xdist take files as they come, so these come first.
LONGEST = (
    "test_distributed",
    "test_interrupts",
    "test_step",
    "test_cuda",
    "test_family",
    "test_distributed_checkpoint",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    with suppress(ValueError):  # the benchmarks have the same option
        parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where the kernels under test run")


def _device(config: pytest.Config) -> str:
    """Where the kernels under test run. Without a GPU everything is collected as for the CPU, and skipped."""
    return "cuda" if config.getoption("--device") == "cuda" and torch.cuda.is_available() else "cpu"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    here = Path(__file__).parent in collection_path.parents and collection_path.suffix == ".py"
    return True if here and _device(config) == "cuda" and collection_path.stem not in ON_ANY_DEVICE else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
    if config.getoption("--device") == "cpu":
        return
    for item in items:
        if _device(config) == "cpu":
            item.add_marker(pytest.mark.skip(reason="--device cuda, but torch finds no GPU"))
        elif item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason="about the CPU kernels"))


def _quicken_interpreter() -> None:
    """Halves the time of kernels in Triton's interpreter.

    It patches ``triton.language`` anew whenever a kernel calls a function. The launch has done that for the functions
    of this package, and what it does for a function of Triton's own library stays from the first call on.
    """
    from triton.runtime.interpreter import InterpretedFunction

    call, patched = InterpretedFunction.__call__, set()

    def quick_call(self, *args, **kwargs):
        module = self.fn.__module__
        if module in patched or module.startswith("sassha_fast."):
            return self.rewrite()(*args, **kwargs)
        patched.add(module)
        return call(self, *args, **kwargs)

    InterpretedFunction.__call__ = quick_call


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu: about the CPU kernels alone; skipped with --device cuda")
    os.environ["SASSHA_TEST_DEVICE"] = _device(config)  # before the modules of tests are imported
    if _device(config) == "cuda":
        torch.set_default_device("cuda")
    if not ON_GPU:
        _quicken_interpreter()
        config.pluginmanager.register(Watchdog())
    # A shell starts what it puts into the background with SIGINT ignored, and Python leaves it at that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Kernels make infinities and NaN on purpose; numpy, which interprets them, would warn.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    # Its older versions take arrays of one element for numbers, which numpy 2.3 and before only warn of.
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:triton.runtime.interpreter")
    # Of torch.compile on Python 3.13.0, about its own speed.
    config.addinivalue_line("filterwarnings", "ignore:Guards may run slower:RuntimeWarning")
    # The authors' loop needs create_graph=True; the optimizer detaches the gradients, which breaks the cycle.
    config.addinivalue_line("filterwarnings", "ignore:Using backward:UserWarning")
    # Of cudaMallocAsync, where a test drops a graph, or a capture in which an exception was raised.
    config.addinivalue_line("filterwarnings", "ignore:Attempting uncaptured free of a captured:UserWarning")
    config.addinivalue_line("filterwarnings", "ignore:freeAsync.. was called on an uncaptured:UserWarning")
    # Waking a second thread costs more than these small tensors; the tests of thread counts ask for two.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """Undoes ``torch.set_num_threads`` after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def native_ops() -> object:
    """The operators of the native library; a library that can't be loaded is a failure, not a skip."""
    reason = ops.load()
    assert reason is None, reason
    return torch.ops.sassha_fast
