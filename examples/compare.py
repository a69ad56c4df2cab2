"""Eight optimizers side by side on CIFAR-10 and on tiny Shakespeare: accuracy, sharpness, seconds per step.

    python -m examples.compare cifar10 --data cifar-10-python.tar.gz
    python -m examples.compare shakespeare --data tinyshakespeare.txt

Every optimizer is trained at every learning rate of one grid from the first seed; the rate with the best validation
accuracy is trained from the other seeds too, and reported on examples that had no part in the choice. The rest comes
from the presets. Every run is a folder below ``build/compare`` and is not repeated; started again, the comparison goes
on where it stopped. It writes the table and the plot of docs/cifar10.md or docs/shakespeare.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from examples import gpt, image, text
from examples.curves import draw_comparison
from examples.engine import Batch, Run
from examples.networks import LANGUAGE, PICTURES
from examples.optimizers import TITLES
from sassha_fast.sharpness import Sharpness

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (0, 1)
GRID = (0.003, 0.01, 0.05, 0.2)
CYCLE = 10  # steps from one refresh to the next: a round of timing has one
ROUNDS = 3
Cell = tuple[str, float, int]  # optimizer, learning rate, seed


@dataclass(frozen=True)
class Task:
    """A comparison.

    Attributes:
        title: Of the plot.
        parse: Arguments of its example.
        prepare: A run from them.
        held_out: Batches that choose nothing, and training batches to measure sharpness on.
        options: Given to all runs.
        methods: Names of optimizers, and options of their own.
    """

    title: str
    parse: Callable[[list[str]], argparse.Namespace]
    prepare: Callable[[argparse.Namespace], Run]
    held_out: Callable[[argparse.Namespace], tuple[Iterable[Batch], list[Batch]]]
    options: str
    methods: dict[str, str]


def pictures_apart(args: argparse.Namespace) -> tuple[Iterable[Batch], list[Batch]]:
    """Test pictures beyond those that choose the rate, and training pictures as they are."""
    whole = image.parse_args(
        ["--data", str(args.data), "--cache", str(args.cache), "--train-size", str(args.train_size)]
    )
    train, test, _ = image.load(whole, PICTURES["resnet20"][0])
    rest = image.subset(test, len(test.labels))  # in the order in which the first ones were taken
    indices = list(torch.arange(args.validation_size, len(rest.labels)).split(250))
    few = [torch.arange(64)]
    return image.pictures.batches(rest, indices, 32, None, 0, 0), list(
        image.pictures.batches(train, few, 32, None, 0, 0)
    )


def plays_apart(args: argparse.Namespace) -> tuple[Iterable[Batch], list[Batch]]:
    """The text behind the sequences that choose the rate, and the beginning of the training text."""
    read = text.load(args.data, None, args.tokens, args.vocabulary)
    length = LANGUAGE["char-gpt"][3]
    rest = text.Text(read.train, read.validation[args.validation_size * length :], read.vocabulary)
    return text.batches(rest, length, 16, 0, 0).validation(), list(text.batches(read, length, 16, 0, 0).train(0, 0))[:1]


TASKS = {
    "cifar10": Task(
        "CIFAR-10: 8,000 training pictures, ResNet-20, 4 epochs",
        image.parse_args,
        image.prepare,
        pictures_apart,
        "--preset cifar10-resnet20 --train-size 8000 --validation-size 2000 --batch 128 --epochs 4 --schedule cosine "
        "--weight-decay 5e-4 --rho 0.05 --amp",
        {
            "sgd": "",
            "adamw": "",
            "sam": "",
            "adahessian": "",
            "sophia-h": "--lazy-hessian 10",
            "sassha": "",
            "m-sassha": "",
            "g-sassha": "",
        },
    ),
    "shakespeare": Task(
        "Tiny Shakespeare: 125,000 characters, GPT of 3 layers of width 64, 4 epochs",
        gpt.parse_args,
        gpt.prepare,
        plays_apart,
        "--preset char-gpt --train-size 125000 --validation-size 400 --batch 16 --epochs 4",
        {
            "sgd": "",
            "adamw": "",
            "sam-adamw": "",
            "adahessian": "",
            "sophia-h": "--lazy-hessian 10",
            "sassha": "",
            "m-sassha": "",
            "g-sassha": "",
        },
    ),
}

# ---- runs --------------------------------------------------------------------------------------------------------


def arguments(task: str, data: Path, cell: Cell) -> argparse.Namespace:
    """What the example's command line would be."""
    name, lr, seed = cell
    chosen = TASKS[task]
    out = ROOT / "build" / "compare" / task / f"{name}-lr{lr:g}-seed{seed}"
    own = ("--data", str(data), "--optimizer", name, "--lr", str(lr), "--seed", str(seed), "--out", str(out))
    shared = f"{chosen.options} {chosen.methods[name]} --quiet --save-every 50"
    return chosen.parse([*own, *shared.split()])


def trained(task: str, data: Path, cell: Cell) -> list[dict[str, float]]:
    """Trains one cell, or what is left of it."""
    torch.set_num_threads(1)
    run = TASKS[task].prepare(arguments(task, data, cell))
    run.resume()
    return run.train()


def measured(task: str, data: Path, cell: Cell) -> dict[str, float]:
    """A trained network on examples that chose nothing, and its sharpness on training examples."""
    torch.set_num_threads(1)
    args = arguments(task, data, cell)
    kept = args.out / "measured.json"
    if not kept.exists():
        run = TASKS[task].prepare(args)
        run.resume()
        unseen, training = TASKS[task].held_out(args)
        model = run.net.eval()
        with run.true_weights():
            loss, accuracy = evaluated(model, unseen)
            sharpness = Sharpness(model, flat_loss, training)
            values = {"eigenvalue": sharpness.eigenvalues(tolerance=1e-2)[0], "trace": sharpness.trace(24)}
        kept.write_text(json.dumps({"loss": loss, "accuracy": accuracy, **values}))
    result: dict[str, float] = json.loads(kept.read_text())
    return result


def flat_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


@torch.no_grad()
def evaluated(model: nn.Module, batches: Iterable[Batch]) -> tuple[float, float]:
    """Mean loss and accuracy in percent."""
    loss = right = count = 0.0
    for x, y in batches:
        logits = model(x)
        loss += flat_loss(logits, y).item() * y.numel()
        right += (logits.argmax(-1) == y).sum().item()
        count += y.numel()
    return loss / count, 100 * right / count


def run_all(
    work: Callable[..., Any], task: str, data: Path, cells: list[Cell], jobs: int, title: str
) -> dict[Cell, Any]:
    """All cells, ``jobs`` at once, each on a thread of its own."""
    with ProcessPoolExecutor(jobs) as pool:
        futures = {pool.submit(work, task, data, cell): cell for cell in cells}
        return {futures[f]: f.result() for f in tqdm(as_completed(futures), desc=title, total=len(cells))}


def seconds_per_step(task: str, data: Path, best: dict[str, float]) -> dict[str, float]:
    """Of every optimizer: rounds of ten steps in turn, in one process, medians over rounds."""
    kept = ROOT / "build" / "compare" / task / "seconds.json"
    if not kept.exists():
        runs = {}
        for name, lr in best.items():
            args = arguments(task, data, (name, lr, SEEDS[0]))
            args.out = args.out.with_name("timing")
            runs[name] = TASKS[task].prepare(args)
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for _ in tqdm(range(ROUNDS), desc="seconds per step"):
            for name, run in runs.items():
                batches: Iterator[Batch] = run.data.train(0, 0)
                begun = time.perf_counter()
                for _, (x, y) in zip(range(CYCLE), batches, strict=False):
                    run._step(x, y)
                taken[name].append((time.perf_counter() - begun) / CYCLE)
        kept.write_text(json.dumps({name: statistics.median(times) for name, times in taken.items()}))
    result: dict[str, float] = json.loads(kept.read_text())
    return result


# ---- table -------------------------------------------------------------------------------------------------------


def spread(values: list[float], digits: int) -> str:
    """The mean, and half the range of two values."""
    return f"{statistics.fmean(values):.{digits}f} ± {(max(values) - min(values)) / 2:.{digits}f}"


def table(task: str, best: dict[str, float], found: dict[Cell, dict[str, float]], seconds: dict[str, float]) -> str:
    lines = [
        "| optimizer | lr | accuracy, % | loss | seconds per step | against SGD | λmax | trace |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, lr in best.items():
        runs = [found[name, lr, seed] for seed in SEEDS]
        columns = [spread([r[key] for r in runs], digits) for key, digits in (("accuracy", 2), ("loss", 3))]
        columns += [f"{seconds[name]:.3f}", f"{seconds[name] / seconds['sgd']:.2f} ×"]
        columns += [spread([r[key] for r in runs], 1) for key in ("eigenvalue", "trace")]
        lines.append(f"| {TITLES[name]} | {lr:g} | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def write(task: str, text_: str) -> None:
    """Puts the table into its place in the page."""
    page = ROOT / "docs" / f"{task}.md"
    begin, end = "<!-- table: begin -->\n", "<!-- table: end -->"
    head, rest = page.read_text().split(begin)
    page.write_text(head + begin + text_ + end + rest.split(end)[1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.compare", description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once; default: %(default)s")
    args = parser.parse_args()
    task, methods = args.task, TASKS[args.task].methods
    grid = [(name, lr, SEEDS[0]) for name, lr in product(methods, GRID)]
    rows = run_all(trained, task, args.data, grid, args.jobs, "learning rates")
    best = {name: max(GRID, key=lambda lr: (rows[name, lr, SEEDS[0]][-1]["accuracy"], -lr)) for name in methods}
    final = [(name, best[name], seed) for name, seed in product(methods, SEEDS)]
    rows |= run_all(trained, task, args.data, final, args.jobs, "other seeds")
    found = run_all(measured, task, args.data, final, args.jobs, "sharpness")
    made = table(task, best, found, seconds_per_step(task, args.data, best))
    print(made)
    write(task, made)
    curves = {TITLES[name]: [rows[name, best[name], seed] for seed in SEEDS] for name in methods}
    draw_comparison(curves, ROOT / "docs" / f"{task}.png", TASKS[task].title)


if __name__ == "__main__":
    main()
