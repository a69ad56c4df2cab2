"""Plots: bars with quartiles, pairs of bars, and curves. Each is an SVG in the page and a PNG beside it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from .markup import data_uri, digits

# Okabe and Ito's palette, which people with colour-blindness can tell apart; grey is for those we compare with.
OURS, PAPER, OTHERS, INK, FAINT = "#0072B2", "#D55E00", "#A9B1B8", "#1F2933", "#D9DEE3"
CURVES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "osD^vP"
WIDTH = 4.0  # inches: text of 9 points is still readable when a phone shows it at 330 pixels
WORDS = 24  # letters of a label beside which another fits
GROUND = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # of numbers that a line would cross
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # matplotlib brings it along, so plots are the same everywhere
    "font.size": 9,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "sassha_fast",  # the same data give the same file
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@dataclass(frozen=True)
class Bar:
    """A value with its quartiles, and what the paper or a second measurement says beside it."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    ours: bool = True
    paper: float | None = None


@dataclass(frozen=True)
class Curve:
    """Points of one contender."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True)
class Target:
    """A line to compare with."""

    label: str
    value: float


class Plots:
    """Draws into a folder and hands out addresses for the page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def bars(
        self,
        name: str,
        bars: Sequence[Bar],
        xlabel: str,
        *,
        targets: Sequence[Target] = (),
        paper: str = "",
        origin: float = 0.0,
        show: Callable[[float], str] = digits,
    ) -> str:
        """Horizontal bars with their values; diamonds are the paper's.

        An origin other than zero makes the axis logarithmic, with bars to both sides of it.
        """

        def draw(axes: Axes) -> None:
            places = range(len(bars))
            values = [bar.value for bar in bars]
            colours = [OURS if bar.ours else OTHERS for bar in bars]
            axes.barh(places, [value - origin for value in values], 0.62, left=origin, color=colours, zorder=2)
            ends = [max(value, origin) for value in values]
            for place, bar in enumerate(bars):
                if bar.low is not None and bar.high is not None:
                    axes.plot([bar.low, bar.high], [place, place], color=INK, linewidth=1.2, zorder=3)
                    ends[place] = max(ends[place], bar.high)
                if bar.paper is not None:
                    axes.plot(bar.paper, place, "D", markersize=6, color=PAPER, markeredgecolor="white", zorder=4)
                    ends[place] = max(ends[place], bar.paper * 1.02)
            reach = max([*ends, *(target.value for target in targets)])
            if origin:
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(_plain)
                axes.set_xlim(min([*values, origin]) / 1.3, reach * 2)
            else:
                axes.set_xlim(0, reach * 1.2)
            for place, bar in enumerate(bars):
                at = ends[place] * 1.06 if origin else ends[place] + 0.02 * reach
                axes.text(at, place, show(bar.value), va="center", fontsize=8, zorder=5, bbox=GROUND)
            self._targets(axes, targets, vertical=True)
            _rows(axes, [bar.label for bar in bars], xlabel)
            if any(bar.paper is not None for bar in bars):
                axes.plot([], [], "D", markersize=6, color=PAPER, markeredgecolor="white", label=paper)

        return self._save(name, 0.95 + 0.29 * len(bars), draw)

    def pairs(self, name: str, labels: Sequence[str], series: dict[str, Sequence[float | None]], xlabel: str) -> str:
        """Two horizontal bars for each label; None leaves a bar out."""

        def draw(axes: Axes) -> None:
            reach = max(value for values in series.values() for value in values if value is not None)
            for number, (label, values) in enumerate(series.items()):
                shift = (number - (len(series) - 1) / 2) * 0.36
                drawn = [(place + shift, value) for place, value in enumerate(values) if value is not None]
                colour = (OTHERS, OURS)[number % 2]
                axes.barh([y for y, _ in drawn], [v for _, v in drawn], 0.34, color=colour, label=label, zorder=2)
                for y, value in drawn:
                    axes.text(value + 0.02 * reach, y, digits(value), va="center", fontsize=7.5)
            axes.set_xlim(0, reach * 1.2)
            _rows(axes, labels, xlabel)

        return self._save(name, 0.95 + 0.42 * len(labels), draw)

    def curves(
        self,
        name: str,
        curves: Sequence[Curve],
        xlabel: str,
        ylabel: str,
        *,
        targets: Sequence[Target] = (),
        dashes: str = "",
    ) -> str:
        """Curves with both axes logarithmic: a colour for each label, ``dashes`` says what a dashed line is."""

        def draw(axes: Axes) -> None:
            numbers: dict[str, int] = {}
            for curve in curves:
                number = numbers.setdefault(curve.label, len(numbers)) % len(CURVES)
                colour = CURVES[number]
                shape = {"marker": MARKERS[number], "markersize": 4, "linewidth": 1.4}
                line = {"linestyle": "--", "markerfacecolor": "white"} if curve.dashed else {}
                axes.plot(curve.x, curve.y, color=colour, **shape, **line)
            for label, number in numbers.items():
                axes.plot([], [], color=CURVES[number % len(CURVES)], marker=MARKERS[number % len(CURVES)], label=label)
            if dashes and any(curve.dashed for curve in curves):
                axes.plot([], [], color=INK, linestyle="--", linewidth=1.2, label=dashes)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(_plain)
            self._targets(axes, targets, vertical=False)
            axes.grid(color=FAINT, linewidth=0.6, which="major")
            axes.set_axisbelow(True)
            axes.set_xlabel(xlabel)
            axes.set_ylabel(ylabel)

        labels = {curve.label for curve in curves}
        rows = len(labels) if max(map(len, labels)) > WORDS else (len(labels) + len(targets)) // 2
        return self._save(name, 3.2 + 0.18 * rows, draw)

    def _targets(self, axes: Axes, targets: Sequence[Target], *, vertical: bool) -> None:
        for number, target in enumerate(targets):
            line = axes.axvline if vertical else axes.axhline
            line(target.value, color=INK, linewidth=1, linestyle=(":", "-.")[number % 2], label=target.label, zorder=1)

    def _save(self, name: str, height: float, draw: Callable[[Axes], None]) -> str:
        """Draws, writes the PNG, and returns the SVG as an address."""
        with rc_context(STYLE):
            figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
            axes = figure.add_subplot()
            draw(axes)
            handles, labels = axes.get_legend_handles_labels()
            if handles:
                wide = max(len(label) for label in labels) > WORDS
                figure.legend(handles, labels, loc="outside upper center", ncols=1 if wide else 2, columnspacing=1.2)
            file = re.sub(r"[^a-z0-9]+", "_", name.lower()) + ".png"  # a name may have a model's in it
            figure.savefig(self.folder / file, dpi=160)
            figure.set_layout_engine("none")  # the places are found; finding them again takes as long as drawing
            vector = io.BytesIO()
            figure.savefig(vector, format="svg", metadata={"Date": None})
        return data_uri(vector.getvalue(), "image/svg+xml")


def _rows(axes: Axes, labels: Sequence[str], xlabel: str) -> None:
    """The first label on top, and no more lines than the eye needs."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(xlabel)


@FuncFormatter
def _plain(value: float, _: int) -> str:
    """A power of ten in figures."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
