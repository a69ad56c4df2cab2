"""The picture and the page of the demo: how three optimizers got where they are, and how flat it is there."""

from __future__ import annotations

import base64
import statistics
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from examples.lib.curves import COLOURS, figure
from sassha_fast.sharpness import Curve

TITLE = "SASSHA beside AdamW and SAM"
PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
  :root { color-scheme: light dark; }
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
  .wide { overflow-x: auto; }
  img { width: 100%; min-width: 44rem; background: white; border-radius: 6px; }
  table { border-collapse: collapse; margin: 1.5rem 0; font-variant-numeric: tabular-nums; }
  th, td { padding: .3rem .8rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }
  th:first-child, td:first-child { text-align: left; }
  p.notes { font-size: .9rem; opacity: .8; }
</style>
<h1>$title</h1>
<p>$what. Everything on this page was measured by <code>make demo</code>.</p>
<div class="wide"><img src="data:image/png;base64,$picture" alt="Training loss, validation accuracy, loss around the
minimum and trace of the Hessian, of each optimizer"></div>
<div class="wide"><table>$rows</table></div>
<p class="notes">$notes</p>
</html>
""")


@dataclass(frozen=True)
class Story:
    """What is told, by optimizer.

    Attributes:
        what: A sentence about data, network and length.
        table: Header and rows.
        notes: What the columns mean.
        losses: Training loss of every epoch, for every seed.
        accuracies: Validation accuracy in percent, likewise.
        curves: Training loss along a random direction from the end of a run.
        traces: Trace of the Hessian at the end, for every seed.
    """

    what: str
    table: list[list[str]]
    notes: str
    losses: dict[str, list[list[float]]]
    accuracies: dict[str, list[list[float]]]
    curves: dict[str, Curve]
    traces: dict[str, list[float]]


def draw(story: Story, path: Path) -> None:
    """Four panels: two of the way, two of the place."""
    made, axes = figure(2, 2)
    looks = dict(zip(story.losses, COLOURS, strict=False))
    for axis, runs, label in (
        (axes[0, 0], story.losses, "training loss"),
        (axes[0, 1], story.accuracies, "validation accuracy, %"),
    ):
        for name, seeds in runs.items():
            means = [statistics.fmean(same) for same in zip(*seeds, strict=True)]
            axis.plot(range(1, len(means) + 1), means, color=looks[name], label=name)
        axis.set(xlabel="epoch", ylabel=label)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set_yscale("log")
    axes[0, 0].legend(frameon=False)
    best = max(value for runs in story.accuracies.values() for seed in runs for value in seed)
    axes[0, 1].set_ylim(max(0.0, best - 20), min(100.0, best + 1))  # the first epochs would hide the rest
    for name, curve in story.curves.items():
        axes[1, 0].plot(curve.steps.tolist(), curve.losses.tolist(), color=looks[name])
    axes[1, 0].set(xlabel="step along a random direction, in norms of the filters", ylabel="training loss")
    axes[1, 0].set_yscale("log")
    for i, (name, traces) in enumerate(story.traces.items()):
        axes[1, 1].plot([i] * len(traces), traces, "o", color=looks[name], markersize=5)
        axes[1, 1].hlines(statistics.fmean(traces), i - 0.25, i + 0.25, color=looks[name], linewidth=3)
    axes[1, 1].set_xticks(range(len(story.traces)), list(story.traces))
    axes[1, 1].set_xlim(-0.5, len(story.traces) - 0.5)
    axes[1, 1].set(ylabel="Hessian trace: sharpness at the end", yscale="log")
    made.savefig(path)


def tell(story: Story, folder: Path) -> tuple[Path, Path]:
    """Writes picture and page. Returns where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    picture, page = folder / "digits.png", folder / "index.html"
    draw(story, picture)
    rows = [
        "<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in row) + "</tr>"
        for cell, row in zip(("th", *["td"] * len(story.table)), story.table, strict=False)
    ]
    encoded = base64.b64encode(picture.read_bytes()).decode()
    values = {"what": escape(story.what), "rows": "\n".join(rows), "notes": escape(story.notes)}
    page.write_text(PAGE.substitute(title=TITLE, picture=encoded, **values), encoding="utf-8")
    return picture, page.resolve()
