"""Ends a worker whose test never ends, with the stacks of its threads: a hang is then a failure with a place."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = 900  # of one test, with what its module prepares; a busy machine takes minutes for that


def children(process: int) -> list[int]:
    """All processes that a process has started, and theirs."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    found = [int(child) for task in tasks for child in task.read_text().split()]
    return [*found, *(grandchild for child in found for grandchild in children(child))]


class Watchdog:
    """A plugin of pytest that counts the seconds of every test.

    They are counted one by one: a machine that stands still for a while, as virtual ones do, adds a single one.
    """

    def __init__(self, seconds: int = SECONDS) -> None:
        """Begins to watch."""
        self.limit, self.seconds, self.test = seconds, 0, ""
        # Pytest's own stderr is replaced while a test runs.
        self.errors = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")
        threading.Thread(target=self.watch, name="watchdog", daemon=True).start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Around a test; slow ones may take what they need."""
        self.seconds, self.test = 0, "" if item.get_closest_marker("slow") else item.nodeid
        try:
            return (yield)
        finally:
            self.test = ""

    def watch(self) -> None:
        """Counts, and ends the process when a test has taken too long."""
        while not (self.test and self.seconds >= self.limit):
            time.sleep(1)
            self.seconds += 1
        print(f"\n{self.test} does not end; its threads are at", file=self.errors, flush=True)
        faulthandler.dump_traceback(self.errors)
        for child in children(os.getpid()):  # which would keep the output open
            os.kill(child, signal.SIGKILL)
        os._exit(70)
