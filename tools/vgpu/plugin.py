"""``pytest -p vgpu.plugin``: torch's operators on the virtual GPU, and a failure for each of its errors.

``--vgpu-sample k`` runs one test in k, always the same ones; ``--vgpu-offset`` chooses which.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Generator

import pytest

from . import library, operators

operators.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of a sample."""
    group = parser.getgroup("virtual GPU")
    group.addoption("--vgpu-sample", type=int, default=1, metavar="K", help="run one test in K")
    group.addoption("--vgpu-offset", type=int, default=0, metavar="N", help="which of the K, from 0 on")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the sample."""
    every, offset = config.getoption("--vgpu-sample"), config.getoption("--vgpu-offset")
    chosen = [item for item in items if zlib.crc32(item.nodeid.encode()) % every == offset]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen] if every > 1 else [])
    items[:] = chosen


def pytest_sessionstart() -> None:
    """Puts the message about host accesses before pytest's own handler of crashes, which goes on to say where."""
    library.library().vgpu_watch_host_accesses()


def _errors() -> str:
    """Errors of all work that was queued so far. What is queued late would else fail another test."""
    library.flush()
    return "\n".join(f"VGPU ERROR: {error}" for error in library.take_errors())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fails a test, its preparation or its end by the errors that came of it."""
    errors = _errors()
    report = yield
    if not errors:
        return report
    if report.outcome == "failed":
        report.sections.append(("errors of the virtual GPU", errors))
        return report
    report.outcome = "failed"
    report.longrepr = f"{item.nodeid}: errors of the virtual GPU\n{errors}"
    if hasattr(report, "wasxfail"):  # nobody expects an error of the device
        del report.wasxfail
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the session by errors that no test was there for."""
    errors = _errors()
    if errors:
        print(f"\nerrors of the virtual GPU outside of tests\n{errors}", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
