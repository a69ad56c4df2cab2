"""Fixtures of all tests."""

import os
from collections.abc import Iterator

import pytest
import torch

# Kernels are made for the interpreter or for a GPU when they are imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

from sassha_fast import ops


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
    _quicken_interpreter()
    # Kernels make infinities and NaN on purpose; numpy, which interprets them, would warn.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    # The authors' loop needs create_graph=True; the optimizer detaches the gradients, which breaks the cycle.
    config.addinivalue_line("filterwarnings", "ignore:Using backward:UserWarning")
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
