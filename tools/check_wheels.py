"""``make check-wheels``: every wheel of dist/ loads where torch's own do, holds what it should, and gets its tag.

auditwheel compares the symbols of the library with the policy manylinux_2_28: glibc 2.28, and the C++ library of GCC 8.
What is torch's (libtorch, libc10) stays outside; libgomp is reached through torch alone, so that there is one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from tools.document import ROOT

POLICY = "manylinux_2_28"
TORCHS = ("libtorch.so", "libtorch_cpu.so", "libc10.so")
MOST_WITHOUT_CUDA = 4_000_000  # bytes of a wheel without CUDA


class WheelError(RuntimeError):
    """What is wrong with a wheel."""


def contents(wheel: Path) -> None:
    """Refuses a wheel without its library, or one without CUDA that is too large."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        if "sassha_fast/_native.so" not in names:
            raise WheelError(f"{wheel.name} has no sassha_fast/_native.so; build it without SASSHA_NATIVE=0")
        cuda = b".nv_fatbin" in archive.read("sassha_fast/_native.so")
    if not cuda and wheel.stat().st_size > MOST_WITHOUT_CUDA:
        raise WheelError(f"{wheel.name} has no CUDA and {wheel.stat().st_size:,} bytes, expected {MOST_WITHOUT_CUDA:,}")


def newest_policy(said: str) -> tuple[int, int]:
    """The oldest glibc that auditwheel's words allow."""
    found = re.findall(r"manylinux_(\d+)_(\d+)_", said)
    if not found:
        raise WheelError(f"auditwheel names no policy:\n{said}")
    return max((int(major), int(minor)) for major, minor in found)


def check(wheel: Path) -> Path:
    """Checks a wheel and gives it the policy's tag; returns where it is then."""
    contents(wheel)
    command = [sys.executable, "-m", "auditwheel"]
    shown = subprocess.run([*command, "show", wheel], capture_output=True, text=True, check=True).stdout
    allowed = tuple(map(int, POLICY.split("_")[1:]))
    if (found := newest_policy(" ".join(shown.split()))) > allowed:
        raise WheelError(f"{wheel.name} needs glibc {found[0]}.{found[1]}, and {POLICY} has an older one:\n{shown}")
    if POLICY in wheel.name:
        return wheel
    arch = wheel.stem.rpartition("linux_")[2]
    options = ["--plat", f"{POLICY}_{arch}", "--only-plat", "--wheel-dir", wheel.parent]
    outside = [word for name in TORCHS for word in ("--exclude", name)]
    done = subprocess.run([*command, "repair", *options, *outside, wheel], capture_output=True, text=True)
    if done.returncode:
        raise WheelError(f"auditwheel repair {wheel.name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    tagged = wheel.with_name(wheel.name.replace(f"-linux_{arch}", f"-{POLICY}_{arch}"))
    if not tagged.exists():
        raise WheelError(f"auditwheel repair did not write {tagged.name}:\n{done.stdout}{done.stderr}")
    wheel.unlink()
    return tagged


def main() -> int:
    """Checks all wheels; 1 if one is wrong or there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    wheels = sorted(parser.parse_args().dist.glob("*.whl"))
    if not wheels:
        print("check-wheels: dist/ has no wheel; run `make wheel`", file=sys.stderr)
        return 1
    for wheel in wheels:
        try:
            tagged = check(wheel)
        except WheelError as error:
            print(f"check-wheels: {error}", file=sys.stderr)
            return 1
        print(f"check-wheels: {tagged.name}, {tagged.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
