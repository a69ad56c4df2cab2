"""``python -m tools.matrix``: runs every cell that has no good result yet, one after the other."""

from __future__ import annotations

import argparse
import sys
import time

from . import page
from .cells import all_cells
from .environment import HOME, Environment, build_wheel
from .run import keep, read_results, try_cell


def main() -> int:
    """Runs the cells and writes the page; 0 if all are good."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="+", default=[""], metavar="TEXT", help="only cells with one of these in name")
    parser.add_argument("--again", action="store_true", help="also run cells that have a good result")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page from the results")
    chosen = parser.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    cells = [cell for cell in all_cells() if any(text in cell.name for text in chosen.cells)]
    wheel = None if chosen.page else build_wheel()
    last = None
    for cell in cells if wheel is not None else ():
        known = read_results().get(cell.name)
        if known is not None and known.good and known.wheel == wheel.name and not chosen.again:
            continue
        if last not in (None, cell.torch):
            Environment.forget_packages()
        last, begin = cell.torch, time.monotonic()
        print(f"matrix: {cell.name}", flush=True)
        outcome = try_cell(cell, wheel)
        keep(cell.name, outcome)
        print(f"matrix: {page.said(outcome)} ({time.monotonic() - begin:.0f} s)", flush=True)
        for failure in outcome.failures:
            print(f"matrix:   {failure}", flush=True)
    if wheel is not None:
        Environment.forget_packages()
    results = read_results()
    page.write(results)
    bad = [cell.name for cell in cells if cell.name not in results or not results[cell.name].good]
    if bad:
        print(f"matrix: not good: {'; '.join(bad)}; {HOME / 'pytest.log'} has what pytest said", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
