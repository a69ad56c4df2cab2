"""What state and weights in fewer bits cost in quality: SASSHA from the same seeds in float32 and in compact formats.

Two tasks: the 8x8 handwritten digits that scikit-learn ships, and a small GPT on the characters of a text file. Every
run is kept in ``build/compact``, so a program that was stopped goes on where it was. At the end a table and a plot are
made.

The codes of D are compared as well: the float code of the library, and a linear code of √D, which only exists here.

Run it with ``python -m examples.compact digits`` or ``python -m examples.compact text --data tinyshakespeare.txt``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

from examples.lib.curves import COLOURS, figure
from examples.lib.networks import language_model
from examples.lib.text import load
from sassha_fast import SASSHA, cast_model, formats

SAVE_EVERY = 250  # steps between checkpoints
MEASURE = 20  # points of a curve

# ---- the other code of D -----------------------------------------------------------------------------------------


def encode_linear(
    values: Tensor, noise: Tensor | int = formats.NEAREST, *, signed: bool = False
) -> tuple[Tensor, Tensor]:
    """8-bit codes of √D in 254 equal steps up to the largest of the group, whose D is the scale."""
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
    """

    name: str
    title: str
    steps: int
    model: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    held_out: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    options: dict[str, Any]


def digits(args: argparse.Namespace) -> Task:
    from examples.digits import BATCH, TRAIN, build_model, load_splits

    train, _, test = load_splits(torch.device("cpu"))
    epoch = TRAIN // BATCH
    steps = args.steps or 20 * epoch

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed((seed << 12) + step // epoch))
        chosen = order.split(BATCH)[step % epoch]
        return train[0][chosen], train[1][chosen]

    options = {"lr": 0.1, "weight_decay": 1e-3, "rho": 0.1}
    return Task("digits", "Digits", steps, build_model, batch, lambda: iter([test]), options)


def text(args: argparse.Namespace) -> Task:
    words = load(args.data, None, "chars", 0)
    length, size, steps = 64, 8, args.steps or 1500

    def sequences(tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        whole = tokens[starts[:, None] + torch.arange(length + 1)]
        return whole[:, :-1], whole[:, 1:]

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed((seed << 16) + step)
        return sequences(words.train, torch.randint(len(words.train) - length, (size,), generator=generator))

    def held_out() -> Iterator[tuple[Tensor, Tensor]]:
        for part in torch.arange(0, 400 * length, length).split(50):
            yield sequences(words.validation, part)

    model = partial(language_model, "char-gpt", len(words.vocabulary))
    options = {"lr": 0.1, "weight_decay": 1e-4, "rho": 0.01}
    return Task("text", "Character GPT", steps, model, batch, held_out, options)


TASKS = {"digits": digits, "text": text}

# ---- one run ------------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, dtype: torch.dtype, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean loss and share of right answers."""
    x, y = batch
    logits = model(x.to(dtype) if x.is_floating_point() else x).float().flatten(0, -2)
    return F.cross_entropy(logits, y.flatten()), (logits.argmax(-1) == y.flatten()).double().mean()


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, dtype: torch.dtype) -> tuple[float, float]:
    """Mean loss, and accuracy in percent."""
    found = torch.tensor([[float(v) for v in loss_of(model, dtype, batch)] for batch in task.held_out()])
    return float(found[:, 0].mean()), 100.0 * float(found[:, 1].mean())


def train(task: Task, setting: Setting, seed: int, path: Path) -> dict[str, Any]:
    """A run from its last checkpoint, or from its beginning, to its end, which is written to ``path``."""
    torch.manual_seed(seed)
    model = cast_model(task.model(), setting.dtype)
    opt = SASSHA(model.parameters(), **task.options, **setting.options, seed=seed)
    schedule = CosineAnnealingLR(opt, task.steps)
    run: dict[str, Any] = {"step": 0, "sum": 0.0, "curve": []}
    kept = path.with_suffix(".pt")
    if kept.exists():
        saved = torch.load(kept)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        schedule.load_state_dict(saved["schedule"])
        run = saved["run"]
    every = max(task.steps // MEASURE, 1)
    for step in tqdm(range(run["step"], task.steps), desc=path.stem, mininterval=10.0, initial=run["step"]):
        batch = task.batch(seed, step)

        def closure(batch: tuple[Tensor, Tensor] = batch) -> Tensor:
            opt.zero_grad()
            loss, _ = loss_of(model, setting.dtype, batch)
            loss.backward()
            return loss

        run["sum"] += float(opt.step(closure))
        schedule.step()
        run["step"] = step + 1
        if (step + 1) % every == 0:
            run["curve"].append([step + 1, run["sum"] / every, *evaluate(model, task, setting.dtype)])
            run["sum"] = 0.0
        if (step + 1) % SAVE_EVERY == 0:
            torch.save(
                {"model": model.state_dict(), "opt": opt.state_dict(), "schedule": schedule.state_dict(), "run": run},
                kept,
            )
    path.write_text(json.dumps(run))
    kept.unlink(missing_ok=True)
    return run


# ---- table and plot -----------------------------------------------------------------------------------------------


def spread(values: list[float], digits: int) -> str:
    """Mean and standard deviation over seeds."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """In Markdown: training loss at the end, loss and accuracy on data held out."""
    lines = ["| stored | seeds | training loss | test loss | accuracy, % |", "|---|---|---|---|---|"]
    for name, seeds in runs.items():
        train_loss, loss, accuracy = ([run["curve"][-1][i] for run in seeds] for i in (1, 2, 3))
        lines.append(f"| {name} | {len(seeds)} | {spread(train_loss, 4)} | {spread(loss, 4)} | {spread(accuracy, 2)} |")
    return "\n".join(lines)


def draw(runs: dict[str, list[dict[str, Any]]], path: Path, title: str) -> None:
    """Means over seeds of all settings in one plot."""
    made, axes = figure(2)
    for axis, (column, label) in zip(axes[0], ((1, "training loss"), (2, "test loss")), strict=True):
        for colour, (name, seeds) in zip(COLOURS, runs.items(), strict=False):
            rows = list(zip(*(run["curve"] for run in seeds), strict=True))
            axis.plot(
                [same[0][0] for same in rows],
                [statistics.fmean(point[column] for point in same) for same in rows],
                label=name,
                color=colour,
                linestyle="-" if name == "float32" else "--",
            )
        axis.set(xlabel="step", ylabel=label, yscale="log")
    axes[0, 1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    made.suptitle(title)
    made.savefig(path)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.compact", description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--data", type=Path, help="text file, for the task text")
    parser.add_argument("--seeds", type=int, default=None, help="how many; default: 5 of digits, 3 of text")
    parser.add_argument("--steps", type=int, default=0, help="default: 340 of digits, 1500 of text")
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), help="settings to train")
    parser.add_argument("--out", type=Path, default=Path("build/compact"), help="folder of runs, table and plot")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    args = parser.parse_args()
    if args.task == "text" and args.data is None:
        parser.error("text needs --data, a text file")
    args.seeds = args.seeds or {"digits": 5, "text": 3}[args.task]
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    task = TASKS[args.task](args)
    args.out.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.only}
    for seed in range(args.seeds):
        for number, (name, setting) in enumerate(SETTINGS.items()):
            if name not in runs:
                continue
            path = args.out / f"{task.name}-{number}-{seed}-{task.steps}.json"
            if path.exists():
                runs[name].append(json.loads(path.read_text()))
                continue
            with setting.code():
                runs[name].append(train(task, setting, seed, path))
    print(table(runs))
    picture = args.out / f"compact-{task.name}.png"
    draw(runs, picture, task.title)
    print(f"\nPlot: {picture}", file=sys.stderr)


if __name__ == "__main__":
    main()
