"""``python -m tools.gpu_report``: runs all parts and writes the page. ``make gpu-report`` sets up what it needs."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from . import device, page
from .parts import all_parts, run
from .result import count_of
from .settings import ROOT, Settings

NOTHING_DONE = 2  # exit code: no GPU, or a wrong command line


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_report",
        description="Tests and measures sassha_fast on this machine's GPU and writes one page in Markdown. "
        "The exit code is 0 if everything passed, 1 if something failed, 2 if there is no GPU.",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is a trial without figures")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-report", help="folder of the page")
    parser.add_argument("--tests", nargs="+", default=(), metavar="FILE", help="tests to run instead of all")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="parts to run instead of all")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out of the training steps")
    return parser.parse_args(given)


def settings_of(asked: argparse.Namespace) -> Settings | str:
    """What to report on, or why there is nothing."""
    given = {"tests": tuple(asked.tests), "compiled": not asked.no_compile}
    if asked.device == "cpu":
        return Settings("cpu", "the CPU, a trial", **given)
    found = device.find()
    return found.reason if found.name is None else Settings("cuda", found.name, found.virtual, **given)


def main(given: Sequence[str] | None = None) -> int:
    """Runs the parts one after the other. The page is written anew after each, in case the machine goes down."""
    asked = arguments(given)
    settings = settings_of(asked)
    if isinstance(settings, str):
        print(f"gpu-report: {settings}", file=sys.stderr)
        return NOTHING_DONE
    known = all_parts(settings)
    unknown = set(asked.parts or ()) - known.keys()
    if unknown:
        print(f"gpu-report: --parts has {sorted(unknown)}, expected some of {list(known)}", file=sys.stderr)
        return NOTHING_DONE
    asked.out.mkdir(parents=True, exist_ok=True)
    target, done = asked.out / "index.md", []
    command = shlex.join(["python", "-m", "tools.gpu_report", *(sys.argv[1:] if given is None else given)])
    for name in asked.parts or known:
        done.append(run(known[name], settings))
        failed = count_of(len(done[-1].result.failures), "failure")
        print(f"gpu-report: {name}: {failed}, {done[-1].seconds:.0f} s", flush=True)
        target.write_text(page.write(settings, done, command), encoding="utf-8")
    print(f"gpu-report: {target}")
    return int(any(part.result.failures for part in done))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the part that is running
    sys.exit(main())
