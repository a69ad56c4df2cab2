"""The card, its driver, clocks and the versions of everything."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

from . import device
from .result import Result, Table
from .settings import ROOT, Settings

# What nvidia-smi is asked for, and how the page calls it.
ASKED = {
    "driver_version": "driver",
    "clocks.sm": "clock of the multiprocessors, now",
    "clocks.max.sm": "at most",
    "clocks.mem": "clock of the memory, now",
    "clocks.max.mem": "at most",
    "power.limit": "power limit",
    "temperature.gpu": "temperature in °C",
    "persistence_mode": "persistence mode",
}
PATIENCE = 60  # seconds


def said_by(*command: str) -> str:
    """What a program prints, or nothing where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def card(table: Table) -> None:
    """Adds what torch knows of the GPU."""
    import torch

    about = torch.cuda.get_device_properties(0)
    table.add("card", about.name)
    table.add("compute capability", f"{about.major}.{about.minor}")
    table.add("memory", f"{about.total_memory / 2**30:.1f} GiB")
    table.add("multiprocessors", about.multi_processor_count)
    table.add("cards in this machine", torch.cuda.device_count())


def clocks(table: Table) -> None:
    """Adds what nvidia-smi knows, if it is there."""
    said = said_by("nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader", "--id=0")
    if not said:
        table.add("driver and clocks", "nvidia-smi is not here")
        return
    for name, value in zip(ASKED.values(), said.splitlines()[0].split(","), strict=False):
        table.add(name, value.strip())


def packages(table: Table) -> None:
    """Adds versions."""
    import torch

    for name in ("torch", "triton", "sassha_fast"):
        try:
            table.add(name, version(name))
        except PackageNotFoundError:
            table.add(name, "not installed as a package")
    table.add("CUDA of torch", torch.version.cuda or "none")
    table.add("cuDNN", torch.backends.cudnn.version() or "none")
    compilers = [line for line in said_by("nvcc", "--version").splitlines() if "release" in line]
    table.add("nvcc", compilers[0] if compilers else "not here")
    table.add("Python", platform.python_version())
    table.add("system", platform.platform())
    changed = " with changes" if said_by("git", "status", "--porcelain", "--untracked-files=no") else ""
    table.add("commit", (said_by("git", "rev-parse", "--short=12", "HEAD") or "not known") + changed)


def run(settings: Settings) -> Result:
    """Everything that a reader has to know about the machine."""
    device.prepare(settings)
    from sassha_fast import backends

    table = Table(["", ""])
    if settings.device == "cuda":
        card(table)
        clocks(table)
    packages(table)
    return Result(tables=[table], legend=["Backends:", f"```text\n{backends.report().strip()}\n```"])
