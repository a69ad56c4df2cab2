"""Six optimizers side by side to the end of training, on CIFAR-10 and on tiny Shakespeare.

    python -m examples.compare cifar10 --data cifar-10-python.tar.gz
    python -m examples.compare shakespeare --data tinyshakespeare.txt

Every optimizer is trained at three learning rates and then, at the best of them, with another radius ρ if it has one,
all from one seed. What is best on validation data is trained from three other seeds, and reported on test data that had
no part in the choice. SASSHA is trained once more as ``suggest`` has it, asked with AdamW's best learning rate. Tasks
are those of ``examples/lib/tasks.py``. Every finished run is a line of ``docs/results/<task>.jsonl`` and is not
repeated; started again, the comparison goes on where it stopped. It writes tables and plot of docs/<task>.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.lib import tasks
from examples.lib.curves import draw_comparison
from examples.lib.optimizers import TITLES
from examples.lib.trials import QUARTER, SUGGESTED, WHOLE, Cell, Task, run, suggested

ROOT = Path(__file__).resolve().parents[1]
GRID_SEED = 100
SEEDS = (0, 1, 2)
WITHOUT_RADIUS = ("sgd", "adamw")
Row = dict[str, Any]

# ---- runs --------------------------------------------------------------------------------------------------------


class Results:
    """Rows of finished runs, in a file that grows by a line for each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines]
        self.rows: dict[Cell, Row] = {Cell(**{f.name: row[f.name] for f in fields(Cell)}): row for row in rows}

    def add(self, cell: Cell, row: Row) -> None:
        row = self.rows[cell] = rounded(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def fill(self, task: Task, data: Path, cells: list[Cell], jobs: int, title: str, *, measure: bool) -> None:
        """Runs those cells that are missing, ``jobs`` at once, each on a thread of its own, in their order."""
        missing = [cell for cell in cells if cell not in self.rows]
        with ProcessPoolExecutor(jobs) as pool:
            futures = {pool.submit(run, task, cell, data, measure=measure): cell for cell in missing}
            for future in tqdm(as_completed(futures), desc=title, total=len(missing), disable=not missing):
                self.add(futures[future], future.result())


def rounded(value: Any) -> Any:
    """Numbers to six digits, in whatever they are held by."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def rates(task: Task) -> dict[str, list[Cell]]:
    """The runs that choose learning rates, at the first radius, by method."""
    return {
        method: [_search(task, method, lr, 0.0 if method in WITHOUT_RADIUS else task.radii[0]) for lr in given]
        for method, given in task.rates.items()
    }


def radii(task: Task, results: Results) -> dict[str, list[Cell]]:
    """The runs that choose radii at the best learning rate, for those methods whose rates have all been tried."""
    complete = {m: cells for m, cells in rates(task).items() if all(cell in results.rows for cell in cells)}
    best = {m: max(cells, key=lambda cell: score(task, results.rows[cell])) for m, cells in complete.items()}
    return {
        method: [cell] if method in WITHOUT_RADIUS else [_search(task, method, cell.lr, rho) for rho in task.radii]
        for method, cell in best.items()
    }


def _search(task: Task, method: str, lr: float, rho: float) -> Cell:
    return Cell(task.name, 0.0, method, lr, rho, GRID_SEED, task.grid_epochs)


def score(task: Task, row: Row) -> float:
    """Higher is better."""
    if row["best"] is None:
        return float("-inf")
    return float(-row["best"]["loss"] if task.stops_early else row["best"]["accuracy"])


def chosen(task: Task, results: Results) -> dict[str, Cell]:
    """The best cell of every method that has been searched to the end; of equal ones the first."""
    complete = {m: cells for m, cells in radii(task, results).items() if all(cell in results.rows for cell in cells)}
    return {m: max(cells, key=lambda cell: score(task, results.rows[cell])) for m, cells in complete.items()}


def question(task: Task, best: dict[str, Cell], noise: float) -> Cell | None:
    """What a suggestion is asked with: AdamW's best learning rate, and labels as they are."""
    if not {"adamw", "sassha"} <= set(best):
        return None
    return Cell(task.name, noise, "suggestion", best["adamw"].lr, 0.0, GRID_SEED, 0)


def settings(task: Task, results: Results, noise: float) -> dict[str, Cell]:
    """By method, a cell with the learning rate and radius that it is compared with."""
    best, found = chosen(task, results), {}
    asked = question(task, best, noise)
    for method, cell in best.items():
        found[method] = cell
        if method == "sassha" and asked in results.rows:
            found[method + SUGGESTED] = replace(cell, **results.rows[asked]["found"])
    return found


def comparison(task: Task, best: dict[str, Cell], noise: float) -> dict[str, list[Cell]]:
    """The runs that are reported, by method."""
    return {
        method: [Cell(task.name, noise, method, cell.lr, cell.rho, seed, task.epochs) for seed in SEEDS]
        for method, cell in best.items()
    }


def by_seed(cells: dict[str, list[Cell]]) -> list[Cell]:
    """All methods from the first seed, then from the next: a comparison that is stopped has some of each."""
    return [cell for same in zip(*cells.values(), strict=True) for cell in same]


# ---- page --------------------------------------------------------------------------------------------------------


def title_of(method: str) -> str:
    for suffix, words in ((QUARTER, " from quarters"), (SUGGESTED, " as suggested"), (WHOLE, ", whole power, k = 1")):
        if method.endswith(suffix):
            return TITLES[method.removesuffix(suffix)] + words
    return TITLES[method]


def spread(values: list[float], digits: int) -> str:
    """Mean and standard deviation over seeds."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


COLUMNS = {
    "test accuracy, %": ("test_accuracy", 2),
    "test loss": ("test_loss", 3),
    "training accuracy, %": ("train_accuracy", 2),
    "λmax": ("eigenvalue", 1),
    "trace": ("trace", 0),
}


def table(task: Task, results: Results, noise: float) -> list[str]:
    """Lines of the table of one share of wrong labels, from what has been run."""
    lines, missing = [], []
    for method, cells in comparison(task, settings(task, results, noise), noise).items():
        rows = [results.rows[cell] for cell in cells if cell in results.rows]
        if rows:
            radius = f"{cells[0].rho:g}" if cells[0].rho else ""
            lines.append(f"| {' | '.join([title_of(method), f'{cells[0].lr:g}', radius, *measures(rows)])} |")
        if len(rows) < len(cells):
            missing.append(f"{title_of(method)} ({len(cells) - len(rows)})")
    if not lines:
        return ["Nothing of this has been run yet; `make compare` runs what is missing."]
    head = f"| optimizer | lr | ρ | GC a step | GC in all | {' | '.join(COLUMNS)} | seeds |"
    rest = ["", f"Runs that are missing: {', '.join(missing)}; `make compare` runs them."] if missing else []
    return [head, "|---" * (len(COLUMNS) + 6) + "|", *lines, *rest]


def measures(rows: list[Row]) -> list[str]:
    """The columns of one method's runs; those that diverged are counted as lost."""
    done = [row for row in rows if row["best"] is not None]
    lost = f"{len(rows) - len(done)} lost" if len(done) < len(rows) else ""
    if not done:
        return [""] * (len(COLUMNS) + 2) + [lost]
    cost = statistics.fmean(row["best"]["gradients"] / row["best"]["step"] for row in done)
    whole = statistics.fmean(row["best"]["gradients"] for row in done)
    values = [spread([row[key] for row in done], digits) for key, digits in COLUMNS.values()]
    return [f"{cost:.2f}", f"{whole:.0f}", *values, ", ".join(filter(None, [str(len(done)), lost]))]


def grid_table(task: Task, results: Results) -> Iterator[str]:
    """What the choice was made from."""
    kind = "loss" if task.stops_early else "accuracy"
    best = chosen(task, results)
    yield f"| optimizer | lr, ρ: validation {kind} |"
    yield "|---|---|"
    second = radii(task, results)
    for method, cells in rates(task).items():
        found = []
        for cell in dict.fromkeys([*cells, *second.get(method, [])]):
            if row := results.rows.get(cell):
                place = f"{cell.lr:g}" + (f", {cell.rho:g}" if cell.rho else "")
                value = f"{row['best'][kind]:.4g}" if row["best"] else "lost"
                found.append(f"**{place}: {value}**" if best.get(method) == cell else f"{place}: {value}")
        if found:
            yield f"| {title_of(method)} | {'; '.join(found)} |"


def write(page: Path, name: str, lines: list[str]) -> None:
    """Puts lines into their place in a page."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    head, rest = page.read_text().split(begin)
    page.write_text(head + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1])


def report(task: Task, results: Results) -> None:
    """Tables and plot of the page, from what has been run."""
    page = ROOT / "docs" / f"{task.name}.md"
    for noise in task.noises:
        lines = table(task, results, noise)
        print("\n".join([f"{noise:.0%} wrong labels", *lines, ""]))
        write(page, f"table {noise:.0%}", lines)
    write(page, "grid", list(grid_table(task, results)))
    curves = {}
    for method, cells in comparison(task, settings(task, results, 0.0), 0.0).items():
        found = [results.rows[cell]["curve"] for cell in cells if cell in results.rows]
        if whole := [curve for curve in found if len(curve) == task.epochs // task.every]:
            curves[title_of(method)] = whole
    draw_comparison(curves, page.with_suffix(".png"), task.title)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.compare", description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=list(tasks.TASKS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once; default: %(default)s")
    parser.add_argument("--noise", type=float, help="compare with this share of wrong labels alone")
    parser.add_argument("--seed", type=int, choices=SEEDS, help="compare from this seed alone")
    parser.add_argument("--method", help="compare this optimizer alone, such as sassha-quarter")
    parser.add_argument("--report", action="store_true", help="run nothing, write the page from what is there")
    args = parser.parse_args()
    task = tasks.TASKS[args.task]
    results = Results(ROOT / "docs" / "results" / f"{task.name}.jsonl")
    if not args.report:
        for search in (rates, lambda task: radii(task, results)):
            cells = [cell for same in search(task).values() for cell in same]
            results.fill(task, args.data, cells, args.jobs, "search", measure=False)
        for noise in task.noises if args.noise is None else (args.noise,):
            asked = question(task, chosen(task, results), noise)
            if asked is not None and asked not in results.rows:
                results.add(asked, suggested(task, asked, args.data))
            cells = by_seed(comparison(task, settings(task, results, noise), noise))
            cells = [c for c in cells if args.seed in (None, c.seed) and args.method in (None, c.method)]
            results.fill(task, args.data, cells, args.jobs, f"{noise:.0%} wrong labels", measure=True)
    report(task, Results(results.path))  # other processes may have added to it


if __name__ == "__main__":
    main()
