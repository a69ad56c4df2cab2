"""The project's tests on the device, a process for each file: a fault in one takes the others not with it."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

from .device import pytest_options
from .result import Failure, Result, Table, count_of, shorten
from .settings import ROOT, Settings

PATIENCE = 3600  # seconds of one file
LONGEST = 6000  # characters of one failure
PASSED, FAILED = 0, 1  # pytest's exit codes


@dataclass
class Outcome:
    """What came of one file."""

    passed: int = 0
    skipped: int = 0
    failures: list[Failure] = field(default_factory=list)


def pytest(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on the device."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *pytest_options(settings), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=PATIENCE)


def files(settings: Settings) -> list[str]:
    """Files with tests for the device: those that were named, else all that pytest finds, in its order."""
    if not any((ROOT / name).is_dir() for name in settings.chosen_tests):
        return list(settings.chosen_tests)
    done = pytest(settings, "--collect-only", "-q", *settings.chosen_tests)
    found = [match[1] for line in done.stdout.splitlines() if (match := re.match(r"(\S+\.py)(?:::|: \d)", line))]
    if done.returncode != PASSED:
        said = shorten(done.stdout + done.stderr, LONGEST)
        raise RuntimeError(f"no tests were collected, pytest ended with {done.returncode}:\n{said}")
    return list(dict.fromkeys(found))


def read(report: Path) -> Outcome:
    """What pytest wrote about a file, in JUnit's format."""
    found = Outcome()
    for case in ET.parse(report).iter("testcase"):
        wrong = [part for part in case if part.tag in ("failure", "error")]
        if wrong:
            text = "\n".join(part.text or part.get("message") or "" for part in wrong)
            found.failures.append(Failure(f"{case.get('classname')}::{case.get('name')}", shorten(text, LONGEST)))
        elif case.find("skipped") is not None:
            found.skipped += 1
        else:
            found.passed += 1
    return found


def run_file(settings: Settings, name: str) -> Outcome:
    """Runs the tests of a file. A process that does not come to its end is a failure too."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        try:
            done = pytest(settings, name, f"--junitxml={report}")
        except subprocess.TimeoutExpired:
            return Outcome(failures=[Failure(name, f"pytest was stopped after {PATIENCE} s")])
        found = read(report) if report.exists() else Outcome()
    if done.returncode != (FAILED if found.failures else PASSED):
        said = shorten(done.stdout + done.stderr, LONGEST)
        found.failures.append(Failure(name, f"pytest ended with {done.returncode}:\n{said}"))
    return found


def run(settings: Settings) -> Result:
    """The tests by file."""
    result, table = Result(), Table(["file", "passed", "failed", "skipped"])
    total = Outcome()
    for name in files(settings):
        found = run_file(settings, name)
        table.add(f"`{name}`", found.passed, len(found.failures), found.skipped)
        total.passed, total.skipped = total.passed + found.passed, total.skipped + found.skipped
        total.failures += found.failures
    result.tables.append(table)
    command = " ".join(["pytest", *settings.chosen_tests, *pytest_options(settings)])
    sums = f"{total.passed} passed, {len(total.failures)} failed, {total.skipped} skipped"
    result.notes.append(f"`{command}`: {sums} in {count_of(len(table.rows), 'file')}.")
    result.failures = total.failures
    return result
