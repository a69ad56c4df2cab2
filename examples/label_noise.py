"""Eight optimizers on digits of which 20 % and 40 % have wrong labels, as in the paper's section on label noise.

Every optimizer's learning rate is the best of one grid in accuracy on clean validation images, over seeds that are not
those of the comparison. Test accuracy, the trace of the Hessian and its largest eigenvalue at the end are reported as
they come out, in a table that replaces the one in docs/methods.md.

Run it with ``python -m examples.label_noise`` (about half an hour on two cores). Every training run is kept in
``build/label_noise.jsonl``; started again, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH

from .digits import (
    BATCH,
    CLASSES,
    GRID,
    RHO,
    SEARCH_SEEDS,
    TRAIN,
    Split,
    batches,
    build_model,
    evaluate,
    load_splits,
    sharpness,
    spread,
)
from .lib.noise import with_noise

ROOT = Path(__file__).resolve().parents[1]
KEPT, DOCUMENT = ROOT / "build" / "label_noise.jsonl", ROOT / "docs" / "methods.md"
BEGIN, END = "<!-- label noise -->\n", "<!-- end of label noise -->"
NOISE = (0.2, 0.4)
SEEDS = (0, 1, 2)
EPOCHS = 40
DECAY = 1e-3  # of all, decoupled or as an L2 penalty

METHODS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda params, lr: SGD(params, lr, momentum=0.9, weight_decay=DECAY),
    "AdamW": lambda params, lr: AdamW(params, lr, weight_decay=DECAY),
    "SAM": lambda params, lr: SAM(params, SGD, rho=RHO, lr=lr, momentum=0.9, weight_decay=DECAY),
    "AdaHessian": lambda params, lr: AdaHessian(params, lr, weight_decay=DECAY),
    "Sophia-H": lambda params, lr: SophiaH(params, lr, weight_decay=DECAY, lazy_hessian=1, eps=1e-4),
    "SASSHA": lambda params, lr: SASSHA(params, lr=lr, rho=RHO, weight_decay=DECAY),
    "M-SASSHA": lambda params, lr: MSASSHA(params, lr, rho=RHO, weight_decay=DECAY),
    "G-SASSHA": lambda params, lr: GSASSHA(params, lr=lr, rho=RHO, alpha=0.1, weight_decay=DECAY),
}


def train(name: str, lr: float, seed: int, data: Split) -> nn.Module:
    """One network, with the true weights where the optimizer keeps them apart."""
    torch.manual_seed(seed)
    model = build_model()
    opt = METHODS[name](model.parameters(), lr)
    schedule = CosineAnnealingLR(opt, EPOCHS * TRAIN // BATCH)
    order = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for x, y in batches(data, order):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                opt.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            opt.step(closure)
            schedule.step()
    if isinstance(opt, MSASSHA):
        opt.eval()
    return model


Cell = tuple[str, float, float, int]  # method, noise, learning rate, seed


def run(cell: Cell) -> dict[str, Any]:
    """One training run, and what it is judged by."""
    torch.set_num_threads(1)
    name, noise, lr, seed = cell
    data, validation, test = load_splits(torch.device("cpu"))
    data = data[0], with_noise(data[1], noise, CLASSES, seed)
    model = train(name, lr, seed, data)
    result = {"cell": cell, "validation": evaluate(model, validation)[1], "loss": evaluate(model, data)[0]}
    if seed in SEEDS:
        result["test"] = evaluate(model, test)[1]
        measured = sharpness(model, data)
        result["trace"] = measured.trace()
        result["eigenvalue"] = measured.eigenvalues()[0]
    return result


def kept() -> dict[Cell, dict[str, Any]]:
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    return {tuple(result["cell"]): result for result in map(json.loads, lines)}  # type: ignore[misc]


def run_all(cells: list[Cell], jobs: int, title: str) -> dict[Cell, dict[str, Any]]:
    """Runs the cells that were not run before, and keeps each as soon as it is there."""
    found = kept()
    missing = [cell for cell in cells if cell not in found]
    KEPT.parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor(jobs) as pool, KEPT.open("a") as out:
        futures = [pool.submit(run, cell) for cell in missing]
        for future in tqdm(as_completed(futures), desc=title, total=len(missing)):
            result = future.result()
            out.write(json.dumps(result) + "\n")
            out.flush()
            found[tuple(result["cell"])] = result
    return {cell: found[cell] for cell in cells}


def best_rates(found: dict[Cell, dict[str, Any]]) -> dict[tuple[str, float], float]:
    """By validation accuracy; of equal ones, by training loss."""
    best = {}
    for name, noise in product(METHODS, NOISE):
        scores = {
            lr: (
                statistics.fmean(found[name, noise, lr, seed]["validation"] for seed in SEARCH_SEEDS),
                -statistics.fmean(found[name, noise, lr, seed]["loss"] for seed in SEARCH_SEEDS),
            )
            for lr in GRID
        }
        best[name, noise] = max(scores, key=scores.__getitem__)
    return best


def rows(found: dict[Cell, dict[str, Any]], best: dict[tuple[str, float], float]) -> Iterator[str]:
    yield "| label noise | optimizer | lr | test accuracy, % | train loss | trace of the Hessian | λmax |\n"
    yield "|---|---|---|---|---|---|---|\n"
    for noise, name in product(NOISE, METHODS):
        lr = best[name, noise]
        runs = [found[name, noise, lr, seed] for seed in SEEDS]
        columns = [spread([r[key] for r in runs]) for key in ("test", "loss", "trace", "eigenvalue")]
        yield f"| {noise:.0%} | {name} | {lr:g} | {' | '.join(columns)} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.label_noise", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="training runs at once; default: %(default)s")
    args = parser.parse_args()
    grid = [(n, s, lr, seed) for n, s, lr, seed in product(METHODS, NOISE, GRID, SEARCH_SEEDS)]
    best = best_rates(run_all(grid, args.jobs, "learning rates"))
    found = run_all(
        [(n, s, best[n, s], seed) for n, s, seed in product(METHODS, NOISE, SEEDS)], args.jobs, "comparison"
    )
    table = "".join(rows(found, best))
    print(table)
    text = DOCUMENT.read_text()
    head, rest = text.split(BEGIN)
    DOCUMENT.write_text(head + BEGIN + table + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
