"""Runs the tests in an environment, and keeps what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from .cells import Cell
from .environment import HOME, Environment, run

RESULTS = HOME / "results.json"
PATIENCE = 3 * 3600  # seconds of one cell
VERSIONS = """
import json, platform, torch
from importlib.metadata import version, PackageNotFoundError
import sassha_fast
from sassha_fast._passes import library
assert "site-packages" in sassha_fast.__file__, sassha_fast.__file__
found = {"torch": torch.__version__, "CUDA": torch.version.cuda, "Python": platform.python_version()}
for name in ("lightning", "transformers", "accelerate", "triton"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
found["library"] = library.load()
print(json.dumps(found))
"""


@dataclass
class Outcome:
    """What came of one cell."""

    wheel: str
    date: str
    versions: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def good(self) -> bool:
        """Whether everything passed, and something did."""
        return not self.error and not self.failures and self.passed > 0


def read_report(report: Path, outcome: Outcome) -> None:
    """Counts what pytest wrote in JUnit's format."""
    for case in ET.parse(report).iter("testcase"):
        if any(part.tag in ("failure", "error") for part in case):
            outcome.failures.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            outcome.skipped += 1
        else:
            outcome.passed += 1


def try_cell(cell: Cell, wheel: Path) -> Outcome:
    """Makes the environment of a cell, runs its tests and removes it."""
    outcome = Outcome(wheel.name, datetime.now(timezone.utc).date().isoformat())
    environment = Environment(cell)
    try:
        environment.make(wheel)
        environment.copy_project()
        project, report = environment.project, environment.project / "report.xml"
        outcome.versions = json.loads(run(environment.python, "-c", VERSIONS, cwd=HOME))
        command = [environment.python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", "--tb=short"]
        with (HOME / "pytest.log").open("a") as log:
            log.write(f"\n==== {cell.name}\n")
            log.flush()
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            options = {"cwd": project, "env": variables, "stdout": log, "stderr": log, "timeout": PATIENCE}
            done = subprocess.run([*map(str, command), *cell.tests], **options)  # type: ignore[call-overload]
        read_report(report, outcome)
        if done.returncode not in (0, 1):
            outcome.error = f"pytest ended with {done.returncode}"
    except (RuntimeError, OSError, subprocess.TimeoutExpired, ET.ParseError) as error:
        outcome.error = str(error)
    finally:
        environment.remove()
    return outcome


def read_results() -> dict[str, Outcome]:
    """Results so far, by the names of cells."""
    if not RESULTS.exists():
        return {}
    return {name: Outcome(**found) for name, found in json.loads(RESULTS.read_text()).items()}


def keep(name: str, outcome: Outcome) -> None:
    """Adds a result to those that are kept."""
    results = read_results() | {name: outcome}
    RESULTS.write_text(json.dumps({name: asdict(found) for name, found in results.items()}, indent=1))
