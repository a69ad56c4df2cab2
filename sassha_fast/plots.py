"""Pictures of what :mod:`sassha_fast.sharpness` measures and :mod:`sassha_fast.log` logs.

Every function draws into the axes that it is given, or into a new figure, and returns the figure:
``plot_curve(curve).savefig("curve.png")``. To see a window, pass axes of ``matplotlib.pyplot``. Needs matplotlib
(``pip install matplotlib``), which is imported by the first call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .checks import check_count
from .extras import extra
from .sharpness import Curve, SpectralDensity, Surface

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_curve", "plot_density", "plot_log", "plot_surface"]

Data = TypeVar("Data")
Columns = Mapping[str, Sequence[float]]

# Distinct for colour-blind eyes too, and dark enough for thin lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#A57A00", "#3FA0D6", "#444444")
STYLES = ("-", "--", "-.", ":")

DIRECTIONS = {
    "random": "step along a random direction, in norms of the filters",
    "gradient": "distance along the gradient",
    "eigenvector": "distance along the eigenvector of λmax",
}
PLANES = {
    "random": ("random direction 1, in norms of the filters", "random direction 2, in norms of the filters"),
    "eigenvectors": ("distance along the eigenvector of λ₁", "distance along the eigenvector of λ₂"),
}
# Columns of a log by panel, each with what its line is called where that is not clear. What closures measured is drawn
# beside what was predicted, dotted.
PANELS = {
    "loss": {"loss": ""},
    "sharpness gap": {"predicted_gap": "predicted ρ‖g‖", "ascent_gap": "measured f(x + ε) − f(x)"},
    "Hessian trace, estimated": {"trace": ""},
}
EXTRAS: dict[str, dict[str, Any]] = {"ascent_gap": {"linestyle": ":"}, "trace": {"marker": "o", "markersize": 3.0}}


def _axes(
    ax: Axes | None, caller: str, size: tuple[float, float] = (6.4, 4.2), layout: str = "constrained"
) -> tuple[Figure, Axes]:
    """The axes to draw into and their figure."""
    if ax is None:
        figure = extra("matplotlib.figure", caller).Figure(figsize=size, layout=layout)
        return figure, figure.add_subplot()
    return ax.get_figure(root=True), ax  # type: ignore[return-value]


def _named(data: Any, kind: type[Data], caller: str) -> dict[str, Data]:
    """Runs by name; one without a name has the empty one."""
    runs = dict(data) if isinstance(data, Mapping) else {"": data}
    if not runs:
        raise ValueError(f"{caller}: there is no run to draw; pass a {kind.__name__} or a dict of names and them")
    for name, run in runs.items():
        if not isinstance(run, kind):
            what = f"the run {name!r}" if name else "data"
            raise TypeError(f"{caller}: {what} is a {type(run).__name__}, expected a {kind.__name__}")
    return runs


def _look(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i // len(COLOURS) % len(STYLES)]}


def plot_curve(curves: Curve | Mapping[str, Curve], ax: Axes | None = None, *, log: bool = False) -> Figure:
    """Draws the loss along a line, of one run or of several.

    Args:
        curves: What :meth:`Sharpness.curve` gave, or a dict of names and such.
        ax: Axes to draw into; a new figure if None.
        log: Logarithmic axis of the loss.
    """
    runs = _named(curves, Curve, "plot_curve")
    figure, ax = _axes(ax, "plot_curve")
    for i, (name, curve) in enumerate(runs.items()):
        ax.plot(curve.steps.tolist(), curve.losses.tolist(), label=name or "_", linewidth=1.8, **_look(i))
    kinds = {curve.kind for curve in runs.values()}
    ax.set_xlabel(DIRECTIONS.get(kinds.pop(), "step") if len(kinds) == 1 else "step")
    ax.set_ylabel("loss")
    if log:
        ax.set_yscale("log")
    ax.grid(alpha=0.3)
    if any(runs):
        ax.legend()
    return figure


def plot_surface(surface: Surface, ax: Axes | None = None, *, levels: int = 20, log: bool = False) -> Figure:
    """Draws the loss on a plane as contours, with a cross where the weights are.

    Args:
        surface: What :meth:`Sharpness.surface` gave.
        ax: Axes to draw into; a new figure if None.
        levels: Number of contours.
        log: Contours at even ratios of the loss instead of even distances; needs losses above 0.
    """
    check_count("levels", levels, least=2, caller="plot_surface")
    if not isinstance(surface, Surface):
        raise TypeError(f"plot_surface: surface is a {type(surface).__name__}, expected a Surface; draw one at a time")
    losses = surface.losses
    finite = losses[torch.isfinite(losses)]
    if not len(finite):
        raise ValueError("plot_surface: no loss is finite; measure a surface of smaller radius")
    low, high = float(finite.min()), float(finite.max())
    if log and low <= 0:
        raise ValueError(f"plot_surface: the least loss is {low:g}, which has no logarithm; pass log=False")
    figure, ax = _axes(ax, "plot_surface", (6.0, 4.8), "compressed")  # as the plane is square
    if low == high:  # contours need a range
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    ends = (math.log(low), math.log(high)) if log else (low, high)
    values = torch.linspace(*ends, levels, dtype=torch.float64, device="cpu")
    bounds = (values.exp() if log else values).tolist()
    bounds[0], bounds[-1] = low, high  # rounding must not leave out the extremes
    ma = extra("numpy", "plot_surface").ma
    heights = ma.masked_invalid(losses.T.numpy())  # rows are the vertical axis
    steps = surface.steps.tolist()
    norm = extra("matplotlib.colors", "plot_surface").LogNorm(low, high) if log else None
    filled = ax.contourf(steps, steps, heights, levels=bounds, cmap="viridis", norm=norm)
    ax.contour(steps, steps, heights, levels=bounds, colors="white", linewidths=0.5, alpha=0.6)
    ax.plot([0.0], [0.0], marker="+", color="#D55E00", markersize=12, markeredgewidth=2, linestyle="none")
    horizontal, vertical = PLANES.get(surface.kind, ("step along direction 1", "step along direction 2"))
    ax.set_xlabel(horizontal)
    ax.set_ylabel(vertical)
    ax.set_aspect("equal")
    ax.locator_params(nbins=5)
    shown = bounds[:: max(1, (levels - 1) // 5)]
    bar = figure.colorbar(filled, ax=ax, label="loss", ticks=shown, format="%.3g")
    bar.minorticks_off()
    return figure


def plot_density(
    densities: SpectralDensity | Mapping[str, SpectralDensity], ax: Axes | None = None, *, mark: bool = True
) -> Figure:
    """Draws the density of eigenvalues on a logarithmic axis, of one run or of several.

    Args:
        densities: What :meth:`Sharpness.spectral_density` gave, or a dict of names and such.
        ax: Axes to draw into; a new figure if None.
        mark: Mark the eigenvalue of largest magnitude by a dotted line: λmax, or λmin where that is further from 0.
    """
    runs = _named(densities, SpectralDensity, "plot_density")
    figure, ax = _axes(ax, "plot_density")
    for i, (name, run) in enumerate(runs.items()):
        look = _look(i)
        extreme = float(run.nodes[run.nodes.abs().argmax()])
        largest = f"{'λmin' if extreme < 0 else 'λmax'} = {extreme:.3g}"
        label = f"{name}, {largest}" if name and mark else name or "_"
        ax.plot(run.grid.tolist(), run.density.tolist(), label=label, linewidth=1.5, **look)
        if mark:
            label = "_" if name else largest
            ax.axvline(extreme, color=look["color"], linestyle=":", linewidth=1.5, label=label)
    ax.set_yscale("log")
    lowest = min(run.resolution for run in runs.values())
    highest = max(float(run.density.max()) for run in runs.values())
    ax.set_ylim(0.01 * lowest, 3 * max(highest, lowest))  # a probe may see little of an eigenvalue
    ax.set_xlabel("eigenvalue λ of the Hessian")
    ax.set_ylabel("density")
    ax.grid(alpha=0.3)
    if mark or any(runs):  # above, as peaks and marks are anywhere
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(len(runs), 2), frameon=False)
    return figure


def plot_log(logs: Columns | Mapping[str, Columns]) -> Figure:
    """Draws loss, sharpness gap and trace over the steps, a panel each; what no run has is left out.

    The gap is the predicted one, with that which closures measured beside it as a dotted line.

    Args:
        logs: What :func:`sassha_fast.log.read_log` gave, or a dict of names and such.
    """
    if not logs:
        raise ValueError("plot_log: there is no run to draw; pass what read_log gave or a dict of names and such")
    runs: Mapping[str, Any] = {"": logs} if "step" in logs else logs
    points = {
        column: {name: _known(run["step"], run[column]) for name, run in runs.items() if column in run}
        for columns in PANELS.values()
        for column in columns
    }
    known = {column for column, found in points.items() if any(steps for steps, _ in found.values())}
    panels = {title: columns for title, columns in PANELS.items() if known & columns.keys()}
    if not panels:
        raise ValueError("plot_log: no run has a loss or a statistic; take steps first, and pass losses to note()")
    figure: Figure = extra("matplotlib.figure", "plot_log").Figure(
        figsize=(7.0, 0.6 + 2.0 * len(panels)), layout="constrained"
    )
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (title, columns) in zip(axes, panels.items(), strict=True):
        for column, what in columns.items():
            for i, name in enumerate(runs):
                steps, values = points[column].get(name, ([], []))
                if steps:
                    label = ", ".join(filter(None, (name, what))) or "_"
                    look = {**_look(i), **EXTRAS.get(column, {})}
                    ax.plot(steps, values, label=label, linewidth=1.3, **look)
        ax.set_ylabel(title)
        ax.grid(alpha=0.3)
        if any(runs) or any(columns.values()):
            ax.legend()
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels(axes)
    return figure


def _known(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The points whose value is known."""
    kept = [(step, value) for step, value in zip(steps, values, strict=True) if not math.isnan(value)]
    return [step for step, _ in kept], [value for _, value in kept]
