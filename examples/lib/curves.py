"""Plots of training runs: loss and accuracy over epochs, of one run or of several beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#7f7f7f", "#000000")  # Okabe and Ito's


def figure(columns: int, rows: int = 1) -> tuple[Any, Any]:
    """A figure to be saved, and its axes. No window is opened."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(f"examples: {error}; pip install matplotlib") from error
    made = Figure(figsize=(4.5 * columns, 3.2 * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(made)
    axes = made.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return made, axes


def draw_run(rows: list[dict[str, float]], path: Path, title: str) -> None:
    """Loss and accuracy of one run, on training and validation data."""
    made, axes = figure(2)
    epochs = [row["epoch"] for row in rows]
    for axis, name in zip(axes[0], ("loss", "accuracy"), strict=True):
        for key, label, colour in ((f"train_{name}", "training", COLOURS[1]), (name, "validation", COLOURS[0])):
            axis.plot(
                epochs, [row[key] for row in rows], label=label, color=colour, marker="." if len(rows) < 30 else ""
            )
        axis.set(xlabel="epoch", ylabel=name if name == "loss" else f"{name}, %")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].legend(frameon=False)
    made.suptitle(title)
    made.savefig(path)


def draw_comparison(runs: dict[str, list[list[dict[str, float]]]], path: Path, title: str) -> None:
    """Means over seeds of several optimizers against steps, and below against gradients that were computed."""
    made, axes = figure(3, 2)
    panels = (("train_loss", "training loss"), ("loss", "validation loss"), ("accuracy", "validation accuracy, %"))
    scales = (("step", "steps"), ("gradients", "gradient computations (GC)"))
    for line, (against, below) in zip(axes, scales, strict=True):
        for axis, (key, label) in zip(line, panels, strict=True):
            for colour, (name, seeds) in zip(COLOURS, runs.items(), strict=False):
                means = [sum(row[key] for row in same) / len(same) for same in zip(*seeds, strict=True)]
                axis.plot([row[against] for row in seeds[0]], means, label=name, color=colour, marker=".")
            axis.set(xlabel=below, ylabel=label)
            if key == "train_loss":
                axis.set_yscale("log")
    if runs:
        axes[0, 2].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    made.suptitle(title)
    made.savefig(path)
