"""One training run of a comparison: a task, an optimizer with its settings, a seed; what came of it as a row of JSON.

Runs are short enough that none is saved halfway: rows of finished ones are kept, and what is missing is run again.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from examples.lib.engine import Batch, Data
from examples.lib.optimizers import build_optimizer
from examples.lib.presets import Settings
from sassha_fast import suggest
from sassha_fast.sharpness import Sharpness

QUARTER = "-quarter"  # of the batch for ascent and products: the end of a method's name
SUGGESTED = "-suggested"  # learning rate and radius by ``suggest``, from AdamW's: likewise
WHOLE = "-whole"  # power of a curvature that is new in every step: likewise
ASKED = 8  # batches that a suggestion is made from
PRODUCT = 2.5  # gradients that an exact product takes beyond the pass whose graph it uses, as bench_train has it
WARMUP = 0.05  # share of the steps in which the learning rate rises


@dataclass(frozen=True)
class Cell:
    """Which run.

    Attributes:
        task: Name of the task.
        noise: Share of wrong training labels.
        method: Name of an optimizer; ``-quarter`` behind it takes ascent and products from a quarter of the batch,
            ``-suggested`` says who chose learning rate and radius, ``-whole`` refreshes in every step and takes the
            whole power of the curvature.
        lr: The learning rate at its highest.
        rho: Radius of the ascent, 0 for methods without.
        seed: Of the initial weights, the batches and the wrong labels.
        epochs: How long.
    """

    task: str
    noise: float
    method: str
    lr: float
    rho: float
    seed: int
    epochs: int


@dataclass(frozen=True)
class Given:
    """The data of a run.

    Attributes:
        data: Training batches, and those of the validation set.
        test: Batches that choose nothing.
        measured: Training batches on which sharpness is measured.
        build: The network.
    """

    data: Data
    test: list[Batch]
    measured: list[Batch]
    build: Callable[[], nn.Module]


@dataclass(frozen=True)
class Task:
    """A comparison.

    Attributes:
        name: Of its page and of its file of results.
        title: Of the plot.
        load: The data, from a path, a share of wrong labels and a seed.
        epochs: Of the comparison.
        grid_epochs: Of the runs that choose.
        decay: Share of a weight that a step takes off at the highest learning rate.
        rates: Learning rates of every method.
        radii: Radii of every method that has one.
        noises: Shares of wrong labels.
        stops_early: Judged where the validation loss is lowest, by the loss; otherwise at the end, by the accuracy.
        every: Epochs from one look at the validation data to the next.
    """

    name: str
    title: str
    load: Callable[[Path, float, int], Given]
    epochs: int
    grid_epochs: int
    decay: float
    rates: dict[str, tuple[float, ...]]
    radii: tuple[float, ...]
    noises: tuple[float, ...] = (0.0,)
    stops_early: bool = False
    every: int = 1


class Trained:
    """A network in training, that counts what it computes.

    Args:
        cell: Which run.
        given: Its data.
        decay: Share of a weight that a step takes off at the highest learning rate.
    """

    def __init__(self, cell: Cell, given: Given, decay: float) -> None:
        torch.manual_seed(cell.seed)
        self.model = given.build()
        settings = Settings(cell.lr, decay, rho=cell.rho)
        name = cell.method.removesuffix(QUARTER).removesuffix(SUGGESTED).removesuffix(WHOLE)
        self.share = 1 / 4 if cell.method.endswith(QUARTER) else 1.0
        more: dict[str, Any] = {}
        if cell.method.endswith(WHOLE):
            settings, more = replace(settings, lazy_hessian=1), {"hessian_power": 1.0}
        self.opt: Optimizer = build_optimizer(name, self.model.parameters(), settings, seed=cell.seed, **more)
        if hasattr(self.opt, "attach"):
            self.opt.attach(self.model)
        self.schedule = LambdaLR(self.opt, partial(cosine, steps=cell.epochs * given.data.steps))
        self.gradients = 0.0  # passes forth and back, each of a whole batch
        self.sums = [0.0, 0.0, 0]  # since the last look: losses, right answers, what was answered

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step, by whatever passes the optimizer asks for."""
        whole = partial(self._closure, x, y, 1.0)
        others: dict[str, Any] = {}
        if self.share < 1:
            rows = math.ceil(self.share * len(x))
            part = partial(self._closure, x[:rows], y[:rows], self.share)
            others = {"ascent_closure": part, "hessian_closure": part}
        if getattr(self.opt, "hessian_due", False):
            self.gradients += PRODUCT * self.share
        self.opt.step(whole, **others)
        self.schedule.step()

    def _closure(self, x: Tensor, y: Tensor, share: float) -> Tensor:
        self.opt.zero_grad()
        logits = self.model(x).flatten(0, -2)
        loss = F.cross_entropy(logits, y.flatten())
        loss.backward()
        self.gradients += share
        if share == 1:  # of the passes of the whole batch, whichever they are: all are near x
            right = (logits.detach().argmax(-1) == y.flatten()).sum().item()
            self.sums = [self.sums[0] + loss.item() * y.numel(), self.sums[1] + right, self.sums[2] + y.numel()]
        return loss

    def true_weights(self) -> AbstractContextManager[Any]:
        """M-SASSHA's parameters hold x + ε between steps; all others hold x."""
        return self.opt.true_weights() if hasattr(self.opt, "true_weights") else nullcontext()

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, float]:
        """Mean loss and accuracy in percent at the true weights."""
        self.model.eval()
        with self.true_weights(), torch.no_grad():
            found = evaluated(self.model, batches)
        self.model.train()
        return found


def cosine(step: int, steps: int, warmup: float = WARMUP) -> float:
    """A short rise, then a fall to zero."""
    rise = max(warmup * steps, 1.0)
    return min((step + 1) / rise, 0.5 * (1 + math.cos(math.pi * step / steps)))


def evaluated(model: nn.Module, batches: Iterable[Batch]) -> tuple[float, float]:
    """Mean loss and accuracy in percent."""
    loss, right, count = 0.0, 0.0, 0
    for x, y in batches:
        logits = model(x).flatten(0, -2)
        loss += F.cross_entropy(logits, y.flatten(), reduction="sum").item()
        right += (logits.argmax(-1) == y.flatten()).sum().item()
        count += y.numel()
    return loss / count, 100 * right / count


def run(task: Task, cell: Cell, path: Path, *, measure: bool) -> dict[str, Any]:
    """Trains a cell.

    Args:
        task: Its task.
        cell: Which run.
        path: Of the data.
        measure: Look at test data and sharpness too, at the end or where the validation loss was lowest.

    Returns:
        The cell; ``curve``, a row for every look; ``best``, the row that the run is judged by, None if the loss was
        never finite; what ``measure`` asks for; seconds of the processor.
    """
    torch.set_num_threads(1)
    begun = time.process_time()
    given = task.load(path, cell.noise, cell.seed)
    trained, curve = Trained(cell, given, task.decay), []
    best: dict[str, float] | None = None
    weights: dict[str, Tensor] = {}
    diverged = False
    for epoch in range(cell.epochs):
        for x, y in given.data.train(epoch, 0):
            trained.step(x, y)
        if (epoch + 1) % task.every:
            continue
        row = look(trained, given, epoch)
        diverged = not math.isfinite(row["train_loss"] + row["loss"])
        if diverged:
            break
        curve.append(row)
        if best is None or not task.stops_early or row["loss"] < best["loss"]:
            best = row
            with trained.true_weights():
                weights = copy.deepcopy(trained.model.state_dict())
    if diverged and not task.stops_early:
        best = None
    result = {**asdict(cell), "diverged": diverged, "curve": curve, "best": best}
    if measure and best is not None:
        result |= looked_at(given, weights)
    return {**result, "seconds": round(time.process_time() - begun, 1)}


def suggested(task: Task, cell: Cell, path: Path) -> dict[str, Any]:
    """What a user of docs/adamw.md is told, who has trained AdamW at the cell's learning rate: ``found``."""
    torch.set_num_threads(1)
    given = task.load(path, cell.noise, cell.seed)
    torch.manual_seed(cell.seed)
    model = given.build()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = flat_loss(model(x), y)
        loss.backward()
        return loss

    few = [partial(loss_of, x, y) for x, y in islice(given.data.train(0, 0), ASKED)]
    found = suggest(model, few, adamw_lr=cell.lr, adamw_weight_decay=task.decay / cell.lr)
    return {**asdict(cell), "found": {"lr": found.lr, "rho": found.rho}}


def look(trained: Trained, given: Given, epoch: int) -> dict[str, float]:
    """The row of an epoch: its own sums, from the last look on."""
    loss, accuracy = trained.evaluate(given.data.validation())
    sums, trained.sums = trained.sums, [0.0, 0.0, 0]
    return {
        "step": (epoch + 1) * given.data.steps,
        "gradients": round(trained.gradients, 3),
        "train_loss": sums[0] / sums[2],
        "train_accuracy": 100 * sums[1] / sums[2],
        "loss": loss,
        "accuracy": accuracy,
    }


def looked_at(given: Given, weights: dict[str, Tensor]) -> dict[str, float]:
    """Loss and accuracy on test and training data, and sharpness, of a network with these weights."""
    model = given.build()
    model.load_state_dict(weights)
    model.eval()
    with torch.no_grad():
        loss, accuracy = evaluated(model, given.test)
        train_loss, train_accuracy = evaluated(model, given.data.train(0, 0))
    sharpness = Sharpness(model, flat_loss, given.measured)
    return {
        "test_loss": loss,
        "test_accuracy": accuracy,
        "train_loss": train_loss,
        "train_accuracy": train_accuracy,
        "eigenvalue": sharpness.eigenvalues(tolerance=2e-2)[0],
        "trace": sharpness.trace(10),
    }


def flat_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())
