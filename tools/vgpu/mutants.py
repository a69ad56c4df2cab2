"""``make mutants-vgpu``: mistakes that only a device can show, one at a time, and tests that must notice each.

Every mutant is a change of one place in a copy of the Python sources, so nothing is compiled again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the package vgpu, not its modules

from vgpu.environment import Environment

DEVICE_TESTS = "tests/kernels/test_cuda_device.py"
NOT_RUN = (2, 3, 4, 5)  # exit codes of pytest that say nothing about the tests
# Every tensor is an allocation of its own then, so that bounds are exact.
EXACT = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}


class Mutant(NamedTuple):
    """One change: ``new`` in place of ``old``, which a file of sassha_fast has once.

    Attributes:
        what: What is wrong with it.
        file: The file that is changed.
        old: What it has.
        new: What it gets.
        tests: Arguments of pytest.
        variables: Environment variables of the tests.
        said: What the virtual GPU has to say of it. Where it is empty, wrong numbers are enough.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    variables: dict[str, str] = {}  # noqa: RUF012  # read only
    said: str = ""


MUTANTS = (
    Mutant(
        "host code touches device memory: it reads the first word of the table on the device",
        "_passes/cuda.py",
        "        there = self.mirrors.find(self.table)\n",
        "        import ctypes\n\n"
        "        there = self.mirrors.find(self.table)\n"
        "        if ctypes.c_int64.from_address(there.data_ptr()).value == 0:\n"
        "            return\n",
        (DEVICE_TESTS, "-k", "current_stream"),
        said="host code touches device address",
    ),
    Mutant(
        "a pinned buffer is written again before the queued copy has read it: one for all copies of a size",
        "_passes/upload.py",
        "            pinned = values.pin_memory()\n",
        "            kind = f'{values.dtype} {tuple(values.shape)}'\n"
        "            pinned = self.__dict__.setdefault(kind, values.pin_memory()).copy_(values)\n",
        ("tests/kernels/test_parity.py", "-k", "plain and cuda and float32"),
    ),
    Mutant(
        "a row of the table is one element too long",
        "_passes/cuda.py",
        "        there = self.mirrors.find(self.table)\n",
        "        from .layout import NUMEL\n\n"
        "        longer = self.table.clone()\n"
        "        longer[:, NUMEL] += 1\n"
        "        there = self.mirrors.find(longer)\n",
        (DEVICE_TESTS, "-k", "current_stream"),
        EXACT,
        said="beyond the end of allocation",
    ),
    Mutant(
        "a launch on the wrong stream: the default one, whichever is current",
        "_passes/cuda.py",
        "        self.operator(op)(there, *args, chunks=self.chunks, counts=self.counts)\n",
        "        with torch.cuda.stream(torch.cuda.default_stream()):\n"
        "            self.operator(op)(there, *args, chunks=self.chunks, counts=self.counts)\n",
        (DEVICE_TESTS, "-k", "current_stream"),
    ),
)


def mutate(mutant: Mutant, folder: Path) -> None:
    """Changes one place of a copy of the sources."""
    path = folder / "sassha_fast" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        sys.exit(f"mutants: {mutant.file} has {text.count(mutant.old)} times {mutant.old!r}; the list is out of date")
    path.write_text(text.replace(mutant.old, mutant.new))


def run_tests(environment: Environment, folder: Path, mutant: Mutant) -> subprocess.CompletedProcess[str]:
    """Runs the tests of a mutant in a copy."""
    variables = {**environment.variables(), **mutant.variables}
    variables["PYTHONPATH"] = f"{folder}{os.pathsep}{folder / 'tools'}"
    command = ["python", "-m", "pytest", "-x", "-q", "-p", "vgpu.plugin", "-p", "no:cacheprovider", "--device", "cuda"]
    done = subprocess.run(
        [str(environment.bin / command[0]), *command[1:], *mutant.tests],
        cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800,
    )  # fmt: skip
    if done.returncode in NOT_RUN:
        sys.exit(f"{done.stdout}\nmutants: the tests did not run")
    return done


def reason(output: str) -> str:
    """The first line that tells why tests failed."""
    lines = [line.strip() for line in output.splitlines()]
    for sign in ("VGPU ERROR", "E  ", "FAILED"):
        for line in lines:
            if line.startswith(sign):
                return line.removeprefix("E").strip()
    return lines[-1] if lines else "nothing was said"


def main() -> None:
    """Runs those whose description contains an argument, or all."""
    chosen = [m for m in MUTANTS if not sys.argv[1:] or any(word in m.what for word in sys.argv[1:])]
    environment = Environment.from_variables()
    environment.prepare()
    survivors = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "project"
        shutil.copytree(environment.source, folder, ignore=shutil.ignore_patterns("build", ".git"))
        (folder / "build").symlink_to(environment.source / "build")
        before = {(m.tests, tuple(m.variables.items())): m for m in chosen}
        for mutant in before.values():
            done = run_tests(environment, folder, mutant)
            if done.returncode:
                sys.exit(f"{done.stdout}\nmutants: the tests fail before anything is broken")
        for mutant in chosen:
            begin = time.monotonic()
            path = folder / "sassha_fast" / mutant.file
            original = path.read_text()
            mutate(mutant, folder)
            done = run_tests(environment, folder, mutant)
            path.write_text(original)
            killed = done.returncode != 0 and mutant.said in done.stdout
            verdict = "killed" if killed else "SURVIVED" if done.returncode == 0 else "MISSED"  # by another mistake
            survivors += [] if killed else [mutant.what]
            print(f"{verdict:<9} {mutant.what} ({mutant.file}, {time.monotonic() - begin:.0f} s)", flush=True)
            print(f"          {reason(done.stdout)}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    if survivors:
        sys.exit(f"mutants: the tests do not notice: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
