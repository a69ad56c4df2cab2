"""What ascent and products from a part of the batch do to training, on digits of which 20 % have wrong labels.

Every variant is trained from the same seeds to the end. Then the first steps, in which gradients grow most, are run at
several learning rates up to such that leap with the whole batch too, and leaps are counted. The loss of the whole batch
is looked at before every step, at x, so that variants can be compared: the loss that ``step`` returns is taken at x + ε
where the ascent has a batch of its own.

Run it with ``python -m examples.cheaper`` (ten minutes). Every run is a line of ``docs/results/cheaper.jsonl`` and is
not repeated; the tables of docs/cheaper.md are written from what is there (``--report`` runs nothing).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

from examples.compare import rounded, spread, write
from examples.digits import BATCH, CLASSES, RHO, TRAIN, Split, batches, build_model, evaluate, load_splits, sharpness
from examples.lib.noise import with_noise
from sassha_fast import SASSHA

ROOT = Path(__file__).resolve().parents[1]
NOISE, EPOCHS, DECAY = 0.2, 20, 1e-3
STEPS = EPOCHS * TRAIN // BATCH
RATE = 0.06
SEEDS = tuple(range(8))
EARLY_RATES = (0.06, 0.12, 0.18, 0.24)
EARLY_STEPS = 80
LEAP = 1.0  # by how much the loss has to rise above that of guessing
LARGE = 1e30
GUESSING = math.log(CLASSES)


@dataclass(frozen=True)
class Variant:
    """How a step is made cheaper.

    Attributes:
        title: Row of the table.
        ascent: Share of the batch for the ascent.
        products: Share for the products.
        rho: Radius of the ascent.
        clip_ascent: Elements of the ascent's gradient are cut at so many times their root mean square.
        clip: Norm at which the gradient of the descent is cut.
    """

    title: str
    ascent: float = 1.0
    products: float = 1.0
    rho: float = RHO
    clip_ascent: float | None = None
    clip: float | None = None


VARIANTS = {
    "whole": Variant("whole batch"),
    "quarter": Variant("quarter for both", 1 / 4, 1 / 4),
    "ascent": Variant("quarter for the ascent", 1 / 4),
    "products": Variant("quarter for the products", 1.0, 1 / 4),
    "half": Variant("half for both", 1 / 2, 1 / 2),
    "radius": Variant("quarter for both, ρ halved", 1 / 4, 1 / 4, rho=RHO / 2),
    "whole-radius": Variant("whole batch, ρ halved", rho=RHO / 2),
    "clipped": Variant("quarter for both, elements of ε clipped", 1 / 4, 1 / 4, clip_ascent=2.0),
    "norm": Variant("quarter for both, `max_grad_norm=1`", 1 / 4, 1 / 4, clip=1.0),
}


class Passes:
    """Closures of a network's batches.

    Args:
        model: The network.
        opt: Its optimizer.
        clip: Elements of gradients are cut at so many times their root mean square.
    """

    def __init__(self, model: nn.Module, opt: SASSHA, clip: float | None = None) -> None:
        self.model, self.opt, self.clip = model, opt, clip

    def __call__(self, x: Tensor, y: Tensor, share: float, *, clipped: bool = False) -> Tensor:
        rows = math.ceil(share * len(x))
        self.opt.zero_grad()
        loss = F.cross_entropy(self.model(x[:rows]), y[:rows])
        loss.backward()
        if clipped and self.clip is not None:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            size = torch.cat([g.flatten() for g in grads]).square().mean().sqrt().item()
            for g in grads:
                g.clamp_(-self.clip * size, self.clip * size)
        return loss


def step(run: Passes, variant: Variant, x: Tensor, y: Tensor) -> None:
    """A step with whatever the variant takes from a part."""
    others: dict[str, Any] = {}
    if variant.ascent < 1:
        others["ascent_closure"] = partial(run, x, y, variant.ascent, clipped=True)
    if variant.products < 1:
        others["hessian_closure"] = partial(run, x, y, variant.products)
    run.opt.step(partial(run, x, y, 1.0), **others)


Key = tuple[str, float, int, int]  # variant, learning rate, seed, steps


def train(variant: Variant, key: Key, splits: tuple[Split, Split, Split]) -> dict[str, Any]:
    """One run: the largest loss at x on its way, and where it arrived, if it ran to the end."""
    name, lr, seed, steps = key
    data = splits[0][0], with_noise(splits[0][1], NOISE, CLASSES, seed)
    torch.manual_seed(seed)
    model = build_model()
    opt = SASSHA(model.parameters(), lr=lr, rho=variant.rho, weight_decay=DECAY, max_grad_norm=variant.clip)
    opt.attach(model)
    schedule = CosineAnnealingLR(opt, STEPS)
    run, order = Passes(model, opt, variant.clip_ascent), torch.Generator().manual_seed(seed)
    losses, cosines = [], []
    endless = (batch for _ in range(EPOCHS) for batch in batches(data, order))
    for number, (x, y) in enumerate(islice(endless, steps)):
        with torch.no_grad():
            loss = F.cross_entropy(model(x), y).item()
            losses.append(loss if loss < LARGE else LARGE)  # not a number is no smaller
        if number % (TRAIN // BATCH) == 0:
            cosines.append(alignment(run, x, y, number))
        step(run, variant, x, y)
        schedule.step()
    highest = max(range(len(losses)), key=losses.__getitem__)
    row = {"variant": name, "lr": lr, "seed": seed, "steps": steps, "highest": losses[highest]}
    if steps < STEPS:
        return {**row, "at": highest}
    measured = sharpness(model, data)
    ends = {"test": evaluate(model, splits[2])[1], "loss": evaluate(model, data)[0], "trace": measured.trace(6)}
    return {**row, "at": highest, **ends, "cosines": cosines}


def alignment(run: Passes, x: Tensor, y: Tensor, number: int) -> list[float]:
    """Step, cosine of the gradients of a quarter and of the batch, and their norms, at x."""
    found = []
    for share in (1 / 4, 1.0):
        run(x, y, share)
        found.append(torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None]))
    run.opt.zero_grad()
    small, whole = found
    return [number, F.cosine_similarity(small, whole, dim=0).item(), small.norm().item(), whole.norm().item()]


def key_of(row: dict[str, Any]) -> Key:
    return row["variant"], row["lr"], row["seed"], row["steps"]


def table(rows: dict[Key, dict[str, Any]]) -> Iterator[str]:
    """Runs to the end, from what has been run."""
    yield "| ascent and products | test accuracy, % | worst | training loss | trace | highest loss at x | seeds |"
    yield "|---|---|---|---|---|---|---|"
    for name, variant in VARIANTS.items():
        runs = [rows[key] for seed in SEEDS if (key := (name, RATE, seed, STEPS)) in rows]
        if runs:
            tests = [row["test"] for row in runs]
            columns = [variant.title, spread(tests, 1), f"{min(tests):.1f}", spread([r["loss"] for r in runs], 2)]
            columns += [spread([r["trace"] for r in runs], 0), f"{max(r['highest'] for r in runs):.2f}", str(len(runs))]
            yield f"| {' | '.join(columns)} |"


def leaps(rows: dict[Key, dict[str, Any]]) -> Iterator[str]:
    """How many of the first steps leapt, from what has been run."""
    yield f"| ascent and products | {' | '.join(f'lr {lr:g}' for lr in EARLY_RATES)} |"
    yield "|---" * (len(EARLY_RATES) + 1) + "|"
    for name, variant in VARIANTS.items():
        columns = [variant.title]
        for lr in EARLY_RATES:
            runs = [rows[key] for seed in SEEDS if (key := (name, lr, seed, EARLY_STEPS)) in rows]
            leapt = sum(row["highest"] > GUESSING + LEAP for row in runs)
            columns.append(f"{leapt} of {len(runs)}" if runs else "")
        if any(columns[1:]):
            yield f"| {' | '.join(columns)} |"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.cheaper", description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="run nothing, write the page from what is there")
    args = parser.parse_args(given)
    torch.set_num_threads(1)
    path = ROOT / "docs" / "results" / "cheaper.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {key_of(row): row for row in map(json.loads, lines)}
    early: list[Key] = [(n, lr, seed, EARLY_STEPS) for seed in SEEDS for lr in EARLY_RATES for n in VARIANTS]
    whole: list[Key] = [(n, RATE, seed, STEPS) for seed in SEEDS for n in VARIANTS]
    missing = [] if args.report else [key for key in (*early, *whole) if key not in rows]
    splits = load_splits(torch.device("cpu"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for key in tqdm(missing, desc="runs", disable=not missing):
            rows[key] = rounded(train(VARIANTS[key[0]], key, splits))
            file.write(json.dumps(rows[key]) + "\n")
            file.flush()
    for name, made in (("digits", table(rows)), ("leaps", leaps(rows))):
        found = list(made)
        print("\n".join([*found, ""]))
        write(ROOT / "docs" / "cheaper.md", name, found)


if __name__ == "__main__":
    main()
