"""``python -m bench.report [--json build/bench.json] [--out build/report]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .records import ReportError, read

try:
    from .page import write
except ImportError as error:
    sys.exit(f"bench.report: {error}; pip install matplotlib")


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page and its plots."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description="the benchmarks as one page")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), help="what `make bench` wrote")
    parser.add_argument("--out", type=Path, default=Path("build/report"), help="folder of index.html and the plots")
    chosen = parser.parse_args(arguments)
    try:
        run = read(chosen.json)
    except ReportError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"bench.report: {write(run, chosen.out)}, {len(run.records)} benchmarks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
