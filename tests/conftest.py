"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest
import torch

from sassha_fast import ops


def pytest_configure(config: pytest.Config) -> None:
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
