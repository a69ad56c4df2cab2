"""A test that never ends is a failure that says where."""

import os
import subprocess
import sys
import time
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "support"
HANGING = """
import subprocess, threading
import pytest

def test_waits_for_a_process():
    subprocess.run(["sleep", "1000"])

@pytest.mark.slow
def test_takes_its_time():
    threading.Event().wait(4)

def test_waits_for_ever():
    threading.Event().wait()
"""
PLUGIN = """
from watchdog import Watchdog

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: as in the project")
    config.pluginmanager.register(Watchdog(2))
"""


def run(folder, *arguments):
    (folder / "test_hanging.py").write_text(HANGING)
    (folder / "conftest.py").write_text(PLUGIN)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    paths = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**environment, "PYTHONPATH": paths})


def test_a_test_that_waits_for_ever_ends_with_its_stack(tmp_path):
    done = run(tmp_path, "-k", "for_ever or its_time")
    assert done.returncode == 70, done.stdout + done.stderr
    assert "test_waits_for_ever does not end; its threads are at" in done.stderr
    assert "in test_waits_for_ever" in done.stderr
    assert "test_takes_its_time" not in done.stderr


def test_a_worker_that_is_ended_is_a_failed_test_and_its_processes_are_gone(tmp_path):
    begin = time.monotonic()
    done = run(tmp_path, "-n", "1", "-k", "for_a_process")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_waits_for_a_process" in done.stdout
    assert "1 failed" in done.stdout
    assert time.monotonic() - begin < 900  # the pipes are closed, which its `sleep` had open as well
