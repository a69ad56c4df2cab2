"""The parts of a report. Each runs in a process of its own: after a fault on a GPU nothing in that process works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .result import Failure, Result, shorten
from .settings import ROOT, Settings

PATIENCE = 3 * 3600  # seconds of one part
LAST_WORDS = 6000  # characters of what a process printed before it died


@dataclass(frozen=True)
class Part:
    """A section of the page.

    Attributes:
        title: Its heading.
        module: Whose ``run(settings, **options)`` gives a ``Result``.
        options: Arguments, which are text.
    """

    title: str
    module: str
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """A part that was run."""

    part: Part
    result: Result
    seconds: float


def all_parts(settings: Settings) -> dict[str, Part]:
    """The parts by the names that ``--parts`` takes, in the order of the page."""
    here = __package__
    passes = {
        f"passes-{name}": Part(f"Passes, backend {name}", f"{here}.passes", {"backend": name})
        for name in settings.backends
    }
    counts = {
        f"counts-{name}": Part(f"Launches, copies and waits, backend {name}", f"{here}.counts", {"backend": name})
        for name in settings.backends
    }
    return {
        "machine": Part("Machine", f"{here}.machine"),
        "tests": Part("Tests", f"{here}.device_tests"),
        **passes,
        "optimizers": Part("Optimizers without a model", f"{here}.optimizers"),
        "gpt2": Part("Training steps: GPT-2 small", f"{here}.training", {"model": "gpt2"}),
        "resnet50": Part("Training steps: ResNet-50", f"{here}.training", {"model": "resnet50"}),
        **counts,
    }


def run(part: Part, settings: Settings, patience: float = PATIENCE) -> Done:
    """Runs a part. Whatever happens to its process is a failure in the result."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        options = [f"{name}={value}" for name, value in part.options.items()]
        command = [sys.executable, "-m", f"{__package__}.process", part.module, settings.to_json(), str(out), *options]
        ended, said = _talk(command, patience)
        result = Result.read(out) if out.exists() else Result()
    if ended:
        result.failures.append(Failure(part.title, f"{ended} It said:\n\n{shorten(said, LAST_WORDS)}"))
    return Done(part, result, time.monotonic() - start)


def _talk(command: list[str], patience: float) -> tuple[str, str]:
    """Runs a command: how it ended, if not well, and what it printed."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that the processes it starts can be ended with it
    )
    try:
        said, _ = process.communicate(timeout=patience)
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"The process was stopped after {patience:.0f} s.", said
    if process.returncode < 0:
        return f"The process died of {signal.Signals(-process.returncode).name}.", said
    return f"The process ended with {process.returncode}." if process.returncode else "", said
