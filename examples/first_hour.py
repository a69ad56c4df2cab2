"""The first hundred steps on digits, right and wrong: with the suggested learning rate, and with ten times as much.

Run it with ``python -m examples.first_hour`` (seconds). It prints the suggestion and draws loss, gradient norm and both
gaps of every step to ``build/first_hour/right.png`` and ``wrong.png``; those of docs/adamw.md are made by
``--out docs/first_hour``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.digits import batches, build_model, load_splits
from sassha_fast import SASSHA, Suggestion, suggest
from sassha_fast.log import StatsLog

STEPS = 100
FACTOR = 10  # by which the wrong learning rate is larger
ADAMW_LR = 1e-3
PANELS = {
    "loss": {"loss": ""},
    "gradient norm": {"grad_norm": ""},
    "rise by the ascent": {"predicted_gap": "predicted", "ascent_gap": "measured"},
}

Batch = tuple[Tensor, Tensor]
Log = dict[str, list[float]]


def run_batch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A closure, once it knows its batch."""
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def closures(model: nn.Module, given: list[Batch]) -> list[Callable[[], Tensor]]:
    return [partial(run_batch, model, x, y) for x, y in given]


def data(steps: int) -> list[Batch]:
    """So many training batches of digits."""
    train, _, _ = load_splits(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    return list(islice((batch for _ in range(steps) for batch in batches(train, generator)), steps))


def trained(found: Suggestion, given: list[Batch], factor: float) -> Log:
    """The log of a run at a multiple of the suggested learning rate. One that diverges ends early."""
    torch.manual_seed(0)
    model = build_model()
    opt = SASSHA(model.parameters(), lr=factor * found.lr, rho=found.rho or 0.0, weight_decay=found.weight_decay)
    opt.attach(model)
    with StatsLog(opt) as log:
        for closure in closures(model, given):
            loss = opt.step(closure)
            if not math.isfinite(float(loss)):
                break
        return log.read()


def draw(log: Log, title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 2.6), layout="constrained")
    for ax, (name, columns) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for column, label in columns.items():
            style = "--" if column == "ascent_gap" else "-"
            ax.plot(log["step"], log[column], style, label=label or "_", linewidth=1.3)
        ax.set(xlabel="step", title=name, yscale="log")
        ax.grid(alpha=0.3)
        if any(columns.values()):
            ax.legend()
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.first_hour", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/first_hour"), help="folder of the pictures")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    args = parser.parse_args(given)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, drawn = build_model(), data(args.steps)
    found = suggest(model, closures(model, drawn[:8]), adamw_lr=ADAMW_LR)
    print(found)
    for name, factor in (("right", 1.0), ("wrong", FACTOR)):
        log = trained(found, drawn, factor)
        draw(log, f"learning rate {factor * found.lr:.2g}", args.out / f"{name}.png")
        print(f"{name}: learning rate {factor * found.lr:.2g}, loss {log['loss'][0]:.3f} to {log['loss'][-1]:.3f}")


if __name__ == "__main__":
    main()
