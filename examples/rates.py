"""Suggested learning rates beside the best of a grid, and who follows docs/adamw.md beside AdamW, on four tasks.

AdamW is trained at four learning rates; ``suggest`` is asked with the best of them, for the mean loss and for the sum;
SASSHA is then trained with what it suggests, and at seven learning rates a factor √10 apart around it with all else the
same. Runs are short, from one seed, with a cosine schedule, and judged by their validation loss at the end. Last, the
whole power of a curvature that is new in every step is tried at three learning rates and two radii, beside AdamW at its
four rates, both with a warm-up, and the best of each are trained from two seeds more.

    python -m examples.rates --data ../shared/data

The folder has ``cifar10-jpeg.tar.xz`` and ``tinyshakespeare.txt``. Every run is a line of ``docs/results/rates.jsonl``
and is not repeated; the table of docs/adamw.md is written from what is there (``--report`` runs nothing).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler
from tqdm import tqdm

from examples import digits
from examples.compare import rounded, spread, write
from examples.lib import tasks
from examples.lib.engine import Batch
from examples.lib.networks import VisionTransformer, small_resnet
from examples.lib.trials import cosine, evaluated
from sassha_fast import SASSHA, suggest

ROOT = Path(__file__).resolve().parents[1]
ADAMW_RATES = (1e-3, 10**-2.5, 1e-2, 10**-1.5)
ADAMW_DECAY = 1e-2
GRID = tuple(10 ** (power / 2) for power in range(-5, 2))  # for a mean; for a sum over n rows, nearest to these over √n
ASKED = 8  # batches that a suggestion is made from
POWER_RATES, POWER_RADII = (0.05, 0.1, 0.2), (0.02, 0.05)  # with the whole power of the curvature
WARMUP = 0.15  # share of the steps, beside it
SEEDS = (0, 1, 2)  # of the weights to begin with, where runs are compared with a warm-up
PROMISE = 3.0  # factor within which it is to be of the best

Loss = Callable[[Tensor, Tensor], Tensor]
Build = Callable[..., Optimizer]
Settings = dict[str, float]
Rows = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Trial:
    """A task.

    Attributes:
        title: Row of the table.
        load: Training batches in order, validation batches and the network, from the folder of data.
    """

    title: str
    load: Callable[[Path], tuple[list[Batch], list[Batch], Callable[[], nn.Module]]]


def load_digits(_: Path) -> tuple[list[Batch], list[Batch], Callable[[], nn.Module]]:
    train, validation, _ = digits.load_splits(torch.device("cpu"))
    order = torch.Generator().manual_seed(0)
    return [batch for _ in range(6) for batch in digits.batches(train, order)], [validation], digits.build_model


def load_pictures(
    folder: Path, build: Callable[[], nn.Module], steps: int
) -> tuple[list[Batch], list[Batch], Callable[[], nn.Module]]:
    given = tasks.load_pictures(folder / "cifar10-jpeg.tar.xz", 0.0, 0, batch=64)
    return list(given.data.train(0, 0))[:steps], list(given.data.validation()), build


def load_text(folder: Path) -> tuple[list[Batch], list[Batch], Callable[[], nn.Module]]:
    given = tasks.load_text(folder / "tinyshakespeare.txt", 0.0, 0, size=104_000)
    return list(given.data.train(0, 0))[:100], list(given.data.validation()), given.build


def vit() -> nn.Module:
    return VisionTransformer(10, tasks.SIDE, 4, layers=4, width=64, heads=4)


def resnet20() -> nn.Module:
    return small_resnet(20, 10).to(memory_format=torch.channels_last)


TRIALS = {
    "digits": Trial("digits, CNN, 102 steps", load_digits),
    "vit": Trial("CIFAR-10 at 16 pixels, ViT, 125 steps", partial(load_pictures, build=vit, steps=125)),
    "resnet20": Trial("CIFAR-10 at 16 pixels, ResNet-20, 60 steps", partial(load_pictures, build=resnet20, steps=60)),
    "gpt": Trial("characters, GPT, 100 steps", load_text),
}


def loss_of(model: nn.Module, x: Tensor, y: Tensor, reduction: str) -> Tensor:
    model.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction=reduction)
    loss.backward()
    return loss


class Runs:
    """Runs of one task that have been made or are made now.

    Args:
        name: Of the task.
        folder: Of the data.
        rows: All rows that are there, by their keys.
        path: File that they are added to; None makes no runs.
    """

    def __init__(self, name: str, folder: Path, rows: Rows, path: Path | None) -> None:
        self.name, self.rows, self.path = name, rows, path
        if path is not None:
            self.train, self.validation, self.build = TRIALS[name].load(folder)

    def row(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """A row, from the file or made now."""
        key = f"{self.name} {key}"
        if key not in self.rows and self.path is not None:
            self.rows[key] = rounded({"key": key, **make()})
            with self.path.open("a") as file:
                file.write(json.dumps(self.rows[key]) + "\n")
        return self.rows.get(key)

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build()

    def trained(self, reduction: str, build: Build, *, warmup: float = 0.0, seed: int = 0) -> dict[str, Any]:
        """Validation loss after all batches."""
        model = self.model(seed)
        opt = build(model.parameters())
        if isinstance(opt, SASSHA):
            opt.attach(model)
        schedule: LRScheduler = CosineAnnealingLR(opt, len(self.train))
        if warmup:
            schedule = LambdaLR(opt, partial(cosine, steps=len(self.train), warmup=warmup))
        for x, y in self.train:
            opt.step(partial(loss_of, model, x, y, reduction))
            schedule.step()
        model.eval()
        with torch.no_grad():
            loss, accuracy = evaluated(model, self.validation)
        return {"loss": loss if math.isfinite(loss) else None, "accuracy": accuracy}

    def adamw(self) -> tuple[float, float] | None:
        """AdamW's best learning rate and its loss."""
        found = {}
        for lr in ADAMW_RATES:
            row = self.row(
                f"adamw {lr:.2g}",
                partial(self.trained, "mean", partial(AdamW, lr=lr, weight_decay=ADAMW_DECAY)),
            )
            if row is None:
                return None
            found[lr] = row["loss"] or math.inf
        best = min(found, key=found.__getitem__)
        return best, found[best]

    def suggestion(self, reduction: str, adamw_lr: float) -> dict[str, Any]:
        model = self.model()
        few = [partial(loss_of, model, x, y, reduction) for x, y in self.train[:ASKED]]
        found = suggest(model, few, adamw_lr=adamw_lr, adamw_weight_decay=ADAMW_DECAY)
        return {"lr": found.lr, "rho": found.rho, "weight_decay": found.weight_decay, "halvings": found.halvings}

    def sassha(self, reduction: str, lr: float, found: dict[str, Any]) -> dict[str, Any]:
        """With all but the learning rate as suggested; the share that weight decay takes off in a step too."""
        decay = found["weight_decay"] * found["lr"] / lr
        return self.trained(reduction, partial(SASSHA, lr=lr, rho=found["rho"], weight_decay=decay))

    def best_with_warmup(
        self, name: str, settings: list[Settings], build: Build
    ) -> tuple[Settings, list[float]] | None:
        """The best settings of an optimizer, by its first seed, and the losses of all seeds."""

        def run(given: Settings, seed: int) -> dict[str, Any] | None:
            make = partial(self.trained, "mean", partial(build, **given), warmup=WARMUP, seed=seed)
            return self.row(f"{name} warm {' '.join(f'{v:.2g}' for v in given.values())} seed {seed}", make)

        losses = []
        for given in settings:
            row = run(given, SEEDS[0])
            if row is None:
                return None
            losses.append(row["loss"] or math.inf)
        best = settings[losses.index(min(losses))]
        rows = [run(best, seed) for seed in SEEDS]
        return (best, [row["loss"] or math.inf for row in rows if row]) if all(rows) else None


def grid(reduction: str, rows: int) -> list[float]:
    """Seven learning rates for a mean, or for a sum over so many rows."""
    shift = round(math.log10(rows)) if reduction == "sum" else 0
    return [lr / 10 ** (shift / 2) for lr in GRID]


def compare(runs: Runs, reduction: str, rows: int) -> list[str] | None:
    """A line of the table, if all of its runs are there."""
    best = runs.adamw()
    found = best and runs.row(f"suggest {reduction}", partial(runs.suggestion, reduction, best[0]))
    if not best or not found:
        return None
    followed = runs.row(f"sassha {reduction} suggested", partial(runs.sassha, reduction, found["lr"], found))
    losses = {}
    for lr in grid(reduction, rows):
        row = runs.row(f"sassha {reduction} {lr:.2g}", partial(runs.sassha, reduction, lr, found))
        if row is None:
            return None
        losses[lr] = row["loss"] or math.inf
    top = min(losses, key=losses.__getitem__)
    factor = max(top / found["lr"], found["lr"] / top)
    within = f"{factor:.1f}" + ("" if factor <= PROMISE else ", **too far**")
    columns = [TRIALS[runs.name].title, reduction, f"{best[0]:.2g}", f"{best[1]:.3f}", f"{found['lr']:.2g}"]
    columns += [f"{found['rho']:g}", f"{followed['loss']:.3f}" if followed and followed["loss"] else "lost"]
    return [*columns, f"{top:.2g}", f"{losses[top]:.3f}", within]


def compare_whole_power(runs: Runs) -> list[str] | None:
    """A line of the second table: SASSHA with the whole power of a new curvature beside AdamW."""
    rates = [{"lr": lr} for lr in ADAMW_RATES]
    adamw = runs.best_with_warmup("adamw", rates, partial(AdamW, weight_decay=ADAMW_DECAY))
    places = [{"lr": lr, "rho": rho} for lr in POWER_RATES for rho in POWER_RADII]
    sassha = runs.best_with_warmup("power 1", places, partial(SASSHA, hessian_power=1.0, lazy_hessian=1))
    if not adamw or not sassha:
        return None
    columns = [TRIALS[runs.name].title]
    for given, losses in (adamw, sassha):
        columns += [*(f"{value:.2g}" for value in given.values()), spread(losses, 3)]
    return columns


def second_table(lines: list[list[str]]) -> Iterator[str]:
    yield "| task | AdamW's lr | its loss | lr | ρ | loss |"
    yield "|---" * 6 + "|"
    for columns in lines:
        yield f"| {' | '.join(columns)} |"


def table(lines: list[list[str]]) -> Iterator[str]:
    yield (
        "| task | loss | AdamW's lr | its loss | suggested lr | suggested ρ | loss with these | best lr of the grid | "
        "its loss | factor between them |"
    )
    yield "|---" * 10 + "|"
    for columns in lines:
        yield f"| {' | '.join(columns)} |"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.rates", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="default: %(default)s")
    parser.add_argument("--report", action="store_true", help="run nothing, write the page from what is there")
    args = parser.parse_args(given)
    torch.set_num_threads(1)
    path = ROOT / "docs" / "results" / "rates.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    rows: Rows = {row["key"]: row for row in found}
    lines = []
    for name, reduction in tqdm([(name, kind) for kind in ("mean", "sum") for name in TRIALS], desc="tasks"):
        runs = Runs(name, args.data, rows, None if args.report else path)
        line = compare(runs, reduction, 1024 if name == "gpt" else 64)
        lines += [line] if line else []
    lines.sort(key=lambda line: line[0])
    others = [
        compare_whole_power(Runs(name, args.data, rows, None if args.report else path))
        for name in tqdm(TRIALS, desc="whole power")
    ]
    second = sorted(line for line in others if line)
    print("\n".join([*table(lines), "", *second_table(second)]))
    write(ROOT / "docs" / "adamw.md", "rates", list(table(lines)))
    write(ROOT / "docs" / "adamw.md", "whole power", list(second_table(second)))


if __name__ == "__main__":
    main()
