"""What state and weights in fewer bits cost in quality: SASSHA from the same seeds in float32 and in compact formats.

Three tasks: the 8x8 handwritten digits that scikit-learn ships, the small CIFAR-10 of ``examples.compare``, and a small
GPT on the characters of a text file. Every finished run is a line of ``docs/results/compact.jsonl`` and is not made
again; one that was stopped goes on from its last checkpoint in ``build/compact``. At the end a table and a plot of
docs/compact.md are made.

The codes of D are compared as well: the float code of the library, and a linear code of √D, which only exists here.

    python -m examples.compact digits
    python -m examples.compact cifar10 --data cifar-10-python.tar.gz
    python -m examples.compact text --data tinyshakespeare.txt
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler
from tqdm import tqdm

from examples.compare import ROOT, rounded, spread, write
from examples.lib import tasks
from examples.lib.curves import COLOURS, figure
from examples.lib.engine import Batch
from examples.lib.networks import language_model
from examples.lib.text import load
from examples.lib.trials import cosine
from sassha_fast import SASSHA, cast_model, formats

RESULTS = ROOT / "docs" / "results" / "compact.jsonl"
CHECKPOINTS = ROOT / "build" / "compact"
PAGE = ROOT / "docs" / "compact.md"
SAVE_EVERY = 250  # steps between checkpoints
MEASURE = 20  # points of a curve

# ---- the other code of D -----------------------------------------------------------------------------------------


def encode_linear(
    values: Tensor, noise: Tensor | int = formats.NEAREST, *, signed: bool = False
) -> tuple[Tensor, Tensor]:
    """8-bit codes of √D in 254 equal steps up to the largest of the group, whose D is the scale.

    The largest may be rounded down, so encoding what was decoded is not exact: a run that was stopped is another one.
    """
    assert not signed
    pad = torch.nn.functional.pad(values, (0, -values.numel() % formats.GROUP)).view(-1, formats.GROUP)
    top = pad.amax(1)
    bits = (top.view(torch.int32) + 0xFFFF) & -0x10000  # rounded up, so that nothing is above it
    scales = bits.view(torch.float32)
    s = scales.repeat_interleave(formats.GROUP)[: values.numel()]
    u = torch.where(s > 0, torch.sqrt(values / s), 0.0)
    steps = torch.floor(254.0 * u + noise / 65536.0).clamp(1, 254)
    nothing = torch.where(torch.signbit(values), 0.0, 1.0)
    return torch.where(values == 0, nothing, steps + 1).to(torch.uint8), scales.to(torch.bfloat16)


def linear_of(codes: Tensor, scales: Tensor, *, signed: bool = False) -> Tensor:
    """D of such codes; −0 where none is known."""
    assert not signed
    s = scales.to(torch.float32).repeat_interleave(formats.GROUP)[: codes.numel()]
    c = codes.to(torch.float32)
    value = s * ((c - 1.0) / 254.0) ** 2
    return torch.where(codes == 0, -torch.zeros_like(value), value)


@contextmanager
def linear_code() -> Iterator[None]:
    """Within it, the reference stores D in the linear code of √D."""
    before = formats.encode_curvature, formats.curvature_of
    formats.encode_curvature, formats.curvature_of = encode_linear, linear_of
    try:
        yield
    finally:
        formats.encode_curvature, formats.curvature_of = before


# ---- settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """How weights and state are stored.

    Attributes:
        dtype: Of weights and gradients.
        options: Of the optimizer.
        code: The code of D.
    """

    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    code: Callable[[], AbstractContextManager[None]] = nullcontext


SETTINGS = {
    "float32": Setting(),
    "16-bit state": Setting(options={"state_bits": 16}),
    "8-bit state": Setting(options={"state_bits": 8}),
    "8-bit state, linear √D": Setting(options={"state_bits": 8, "backend": "reference"}, code=linear_code),
    "bfloat16, 24-bit masters, 8-bit state": Setting(torch.bfloat16, {"state_bits": 8, "master_weight_bits": 24}),
    "bfloat16 alone": Setting(torch.bfloat16),
}

# ---- tasks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        name: Of files.
        title: Of the plot.
        steps: How many.
        model: Makes the network, in float32.
        batch: The batch of a step of a seed.
        held_out: Batches of the test set.
        options: Of SASSHA.
        schedule: Of the learning rate, over so many steps.
        seeds: How many, if nobody says.
    """

    name: str
    title: str
    steps: int
    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    held_out: Callable[[], Iterator[Batch]]
    options: dict[str, Any]
    schedule: Callable[[Optimizer, int], LRScheduler] = CosineAnnealingLR
    seeds: int = 3


def digits(args: argparse.Namespace) -> Task:
    from examples.digits import BATCH, TRAIN, build_model, load_splits

    train, _, test = load_splits(torch.device("cpu"))
    epoch = TRAIN // BATCH
    steps = args.steps or 20 * epoch

    def batch(seed: int, step: int) -> Batch:
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed((seed << 12) + step // epoch))
        chosen = order.split(BATCH)[step % epoch]
        return train[0][chosen], train[1][chosen]

    options = {"lr": 0.1, "weight_decay": 1e-3, "rho": 0.1}
    return Task("digits", "Digits", steps, build_model, batch, lambda: iter([test]), options, seeds=5)


def cifar10(args: argparse.Namespace) -> Task:
    """SASSHA's row of docs/cifar10.md, with the settings that were chosen there."""
    given = cache(lambda seed: tasks.load_pictures(args.data, 0.0, seed))
    epoch = given(0).data.steps
    steps = args.steps or tasks.TASKS["cifar10"].epochs * epoch

    @cache
    def epoch_of(seed: int, number: int) -> list[Batch]:
        return list(given(seed).data.train(number, 0))

    def batch(seed: int, step: int) -> Batch:
        if step % epoch == 0:
            epoch_of.cache_clear()
        return epoch_of(seed, step // epoch)[step % epoch]

    lr = 0.3
    options = {"lr": lr, "weight_decay": tasks.TASKS["cifar10"].decay / lr, "rho": 0.05}
    title = tasks.TASKS["cifar10"].title
    return Task("cifar10", title, steps, given(0).build, batch, lambda: iter(given(0).test), options, warmed_up)


def warmed_up(opt: Optimizer, steps: int) -> LRScheduler:
    return LambdaLR(opt, partial(cosine, steps=steps))


def text(args: argparse.Namespace) -> Task:
    words = load(args.data, None, "chars", 0)
    length, size, steps = 64, 8, args.steps or 1500

    def sequences(tokens: Tensor, starts: Tensor) -> Batch:
        whole = tokens[starts[:, None] + torch.arange(length + 1)]
        return whole[:, :-1], whole[:, 1:]

    def batch(seed: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed((seed << 16) + step)
        return sequences(words.train, torch.randint(len(words.train) - length, (size,), generator=generator))

    def held_out() -> Iterator[Batch]:
        for part in torch.arange(0, 400 * length, length).split(50):
            yield sequences(words.validation, part)

    model = partial(language_model, "char-gpt", len(words.vocabulary))
    options = {"lr": 0.1, "weight_decay": 1e-4, "rho": 0.01}
    return Task("text", "Character GPT", steps, model, batch, held_out, options)


TASKS = {"digits": digits, "cifar10": cifar10, "text": text}

# ---- one run ------------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, dtype: torch.dtype, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean loss and share of right answers."""
    x, y = batch
    logits = model(x.to(dtype) if x.is_floating_point() else x).float().flatten(0, -2)
    return F.cross_entropy(logits, y.flatten()), (logits.argmax(-1) == y.flatten()).double().mean()


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, dtype: torch.dtype) -> tuple[float, float]:
    """Mean loss, and accuracy in percent."""
    model.eval()
    found = [(len(batch[0]), *map(float, loss_of(model, dtype, batch))) for batch in task.held_out()]
    model.train()
    rows = math.fsum(n for n, _, _ in found)
    return math.fsum(n * loss for n, loss, _ in found) / rows, 100.0 * math.fsum(n * a for n, _, a in found) / rows


def train(task: Task, setting: Setting, seed: int, kept: Path) -> list[list[float]]:
    """A run from its last checkpoint, or from its beginning.

    Returns:
        Its curve: steps, training loss since the point before, test loss and accuracy.
    """
    torch.manual_seed(seed)
    model = cast_model(task.model(), setting.dtype)
    opt = SASSHA(model.parameters(), **task.options, **setting.options, seed=seed)
    opt.attach(model)
    schedule = task.schedule(opt, task.steps)
    done, total, curve = 0, 0.0, []
    if kept.exists():
        saved = torch.load(kept)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        schedule.load_state_dict(saved["schedule"])
        done, total, curve = saved["run"]
    every = max(task.steps // MEASURE, 1)
    for step in tqdm(range(done, task.steps), desc=kept.stem, mininterval=10.0, initial=done, total=task.steps):
        batch = task.batch(seed, step)

        def closure(batch: Batch = batch) -> Tensor:
            opt.zero_grad()
            loss, _ = loss_of(model, setting.dtype, batch)
            loss.backward()
            return loss

        total += float(opt.step(closure))
        schedule.step()
        if (step + 1) % every == 0:
            curve.append([step + 1, total / every, *evaluate(model, task, setting.dtype)])
            total = 0.0
        if (step + 1) % SAVE_EVERY == 0:
            parts = {"model": model.state_dict(), "opt": opt.state_dict(), "schedule": schedule.state_dict()}
            torch.save({**parts, "run": (step + 1, total, curve)}, kept)
    kept.unlink(missing_ok=True)
    return curve


# ---- table and plot -----------------------------------------------------------------------------------------------

Curves = dict[str, list[list[list[float]]]]  # by setting, of every seed


def table(curves: Curves) -> Iterator[str]:
    """In Markdown: training loss at the end, loss and accuracy on data held out."""
    yield "| stored | seeds | training loss | test loss | accuracy, % |"
    yield "|---|---|---|---|---|"
    for name, seeds in curves.items():
        train_loss, loss, accuracy = ([curve[-1][i] for curve in seeds] for i in (1, 2, 3))
        yield f"| {name} | {len(seeds)} | {spread(train_loss, 4)} | {spread(loss, 4)} | {spread(accuracy, 2)} |"


def draw(curves: Curves, path: Path, title: str) -> None:
    """Means over seeds of all settings in one plot."""
    made, axes = figure(2)
    for axis, (column, label) in zip(axes[0], ((1, "training loss"), (2, "test loss")), strict=True):
        for colour, (name, seeds) in zip(COLOURS, curves.items(), strict=False):
            rows = list(zip(*seeds, strict=True))
            axis.plot(
                [same[0][0] for same in rows],
                [math.fsum(point[column] for point in same) / len(same) for same in rows],
                label=name,
                color=colour,
                linestyle="-" if name == "float32" else "--",
            )
        axis.set(xlabel="step", ylabel=label, yscale="log")
    axes[0, 1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    made.suptitle(title)
    made.savefig(path)


class Results:
    """Curves of finished runs, in a file that grows by a line for each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        self.curves = {tuple(row["run"]): row["curve"] for row in rows}

    def curve(self, run: tuple[str, str, int, int], make: Callable[[], list[list[float]]]) -> list[list[float]]:
        """That of a run (task, setting, seed, steps), from the file or made now."""
        if run not in self.curves:
            self.curves[run] = rounded(make())
            with self.path.open("a") as file:
                file.write(json.dumps({"run": run, "curve": self.curves[run]}) + "\n")
        return self.curves[run]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.compact", description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--data", type=Path, help="archive of CIFAR-10, or text file")
    parser.add_argument("--seeds", type=int, help="how many; default: 5 of digits, 3 of the others")
    parser.add_argument("--steps", type=int, default=0, help="default: 340 of digits, 744 of cifar10, 1500 of text")
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), help="settings to train")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of finished runs; default: %(default)s")
    parser.add_argument("--page", type=Path, default=PAGE, help="where table and plot go; default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    args = parser.parse_args()
    if args.task != "digits" and args.data is None:
        parser.error(f"{args.task} needs --data, the path of its data")
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    task = TASKS[args.task](args)
    CHECKPOINTS.mkdir(parents=True, exist_ok=True)
    results = Results(args.results)
    curves: Curves = {name: [] for name in args.only}
    for seed in range(args.seeds or task.seeds):
        for number, name in enumerate(SETTINGS):
            if name in curves:
                kept = CHECKPOINTS / f"{task.name}-{number}-{seed}-{task.steps}.pt"
                with SETTINGS[name].code():
                    make = partial(train, task, SETTINGS[name], seed, kept)
                    curves[name].append(results.curve((task.name, name, seed, task.steps), make))
    lines = list(table(curves))
    print("\n".join(lines))
    write(args.page, task.name, lines)
    draw(curves, args.page.with_name(f"{args.page.stem}-{task.name}.png"), task.title)


if __name__ == "__main__":
    main()
