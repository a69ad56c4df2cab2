"""Pictures, read back from their artists."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import closure_of, make_loss, make_net

from sassha_fast import SASSHA, extras
from sassha_fast.log import StatsLog, read_log
from sassha_fast.plots import plot_curve, plot_density, plot_log, plot_surface
from sassha_fast.sharpness import Curve, Sharpness, SpectralDensity, Surface

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
from matplotlib.figure import Figure


@pytest.fixture(scope="module")
def sharpness():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return Sharpness(net, F.cross_entropy, [(torch.randn(12, 4).double(), torch.randint(0, 3, (12,)))])


def points(line):
    return list(line.get_xdata()), list(line.get_ydata())


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def grid_of(*values):
    losses = torch.tensor(values, dtype=torch.float64)
    return Surface(torch.linspace(-1, 1, len(losses)).double(), losses, torch.eye(2), "eigenvectors")


def test_a_curve_is_drawn_through_its_points(sharpness):
    curve = sharpness.curve("gradient", points=7)
    figure = plot_curve(curve)
    (ax,) = figure.axes
    (line,) = ax.lines
    assert points(line) == (curve.steps.tolist(), curve.losses.tolist())
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("distance along the gradient", "loss")
    assert ax.get_legend() is None


def test_several_curves_share_axes_under_their_names_in_different_colours(sharpness):
    runs = {"AdamW": sharpness.curve("random", points=3), "SASSHA": sharpness.curve("gradient", points=5)}
    ax = Figure().add_subplot()
    assert plot_curve(runs, ax, log=True) is ax.figure
    assert [points(line)[1] for line in ax.lines] == [run.losses.tolist() for run in runs.values()]
    assert legend(ax) == ["AdamW", "SASSHA"]
    assert len({line.get_color() for line in ax.lines}) == 2
    assert ax.get_xlabel() == "step"  # as the directions differ
    assert ax.get_yscale() == "log"


def test_many_runs_can_be_told_apart():
    curve = Curve(torch.arange(3.0), torch.arange(3.0), torch.zeros(1), "given")
    (ax,) = plot_curve({str(i): curve for i in range(20)}).axes
    assert len({(line.get_color(), line.get_linestyle()) for line in ax.lines}) == 20


def test_contours_of_a_surface_span_its_losses_and_the_weights_are_marked(sharpness):
    surface = sharpness.surface("eigenvectors", points=5)
    figure = plot_surface(surface, levels=8)
    ax, bar = figure.axes
    filled, lines = ax.collections
    expected = torch.linspace(float(surface.losses.min()), float(surface.losses.max()), 8).double().tolist()
    assert list(filled.levels) == pytest.approx(expected)
    assert list(lines.levels) == list(filled.levels)
    assert points(ax.lines[0]) == ([0.0], [0.0])
    assert ax.get_xlabel() == "distance along the eigenvector of λ₁"
    assert ax.get_ylabel() == "distance along the eigenvector of λ₂"
    assert bar.get_ylabel() == "loss"


def test_the_first_direction_of_a_surface_is_the_horizontal_one():
    steps = torch.linspace(-1, 1, 5).double()
    surface = Surface(steps, steps[:, None].expand(5, 5) + 2.0, torch.eye(2), "given")  # rises along the first alone
    ax = plot_surface(surface, levels=5).axes[0]
    inner = ax.collections[1].get_paths()[2].vertices  # the level 2
    assert inner[:, 0] == pytest.approx(0.0)
    assert inner[:, 1].min() == -1
    assert inner[:, 1].max() == 1


def test_levels_on_a_logarithmic_scale_have_even_ratios():
    filled = plot_surface(grid_of([1.0, 10.0], [100.0, 1000.0]), levels=4, log=True).axes[0].collections[0]
    assert list(filled.levels) == pytest.approx([1.0, 10.0, 100.0, 1000.0])


def test_flat_surfaces_and_losses_that_are_not_finite_are_drawn(tmp_path):
    for surface in (grid_of([2.0, 2.0], [2.0, 2.0]), grid_of([0.0, 0.0], [0.0, 0.0])):
        plot_surface(surface).savefig(tmp_path / "flat.png")
    figure = plot_surface(grid_of([1.0, 2.0, 1.0], [3.0, 1.0, math.nan], [2.0, math.inf, 1.0]))
    assert max(figure.axes[0].collections[0].levels) == 3.0
    figure.savefig(tmp_path / "holes.png")


def test_surfaces_that_can_not_be_drawn_are_refused():
    with pytest.raises(ValueError, match=r"no loss is finite; measure a surface of smaller radius"):
        plot_surface(grid_of([math.nan, math.inf], [math.nan, math.nan]))
    with pytest.raises(ValueError, match=r"the least loss is -1, which has no logarithm; pass log=False"):
        plot_surface(grid_of([-1.0, 1.0], [1.0, 1.0]), log=True)
    with pytest.raises(ValueError, match="levels is 1, expected an integer of at least 2"):
        plot_surface(grid_of([0.0, 1.0], [1.0, 1.0]), levels=1)


def test_densities_are_drawn_on_a_logarithmic_axis_with_the_largest_eigenvalue_marked(sharpness):
    density = sharpness.spectral_density(20)
    (ax,) = plot_density({"SASSHA": density}).axes
    curve, mark = ax.lines
    assert points(curve) == (density.grid.tolist(), density.density.tolist())
    assert set(mark.get_xdata()) == {density.largest}
    assert density.largest == pytest.approx(sharpness.eigenvalues()[0], rel=1e-3)
    assert ax.get_yscale() == "log"
    assert legend(ax) == [f"SASSHA, λmax = {density.largest:.3g}"]
    assert ax.get_ylim()[0] < density.resolution < float(density.density.max()) < ax.get_ylim()[1]
    (ax,) = plot_density(density).axes
    assert legend(ax) == [f"λmax = {density.largest:.3g}"]
    (ax,) = plot_density(density, mark=False).axes
    assert len(ax.lines) == 1
    assert ax.get_legend() is None


def test_the_eigenvalue_of_largest_magnitude_is_marked_whatever_its_sign():
    grid, shares = torch.linspace(-4.0, 2.0, 50), torch.full((3,), 1 / 3)
    saddle = SpectralDensity(grid, torch.ones(50), torch.tensor([-3.0, 0.5, 1.0]), shares, sigma=0.1, size=3)
    (ax,) = plot_density({"early": saddle}).axes
    assert set(ax.lines[1].get_xdata()) == {-3.0}
    assert legend(ax) == ["early, λmin = -3"]
    (ax,) = plot_density(saddle).axes
    assert legend(ax) == ["λmin = -3"]


def test_the_plot_of_a_log_has_three_panels_with_traces_on_refreshes_only(tmp_path):
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.02, rho=0.1, lazy_hessian=3)
    closure = closure_of(opt, make_loss(net))
    with StatsLog(opt, tmp_path / "run.csv") as log:
        for _ in range(7):
            opt.step(closure)
        figure = log.plot(tmp_path / "run.png")
    found = read_log(tmp_path / "run.csv")
    assert [ax.get_ylabel() for ax in figure.axes] == ["loss", "sharpness gap", "Hessian trace, estimated"]
    losses, gaps, traces = (points(ax.lines[0]) for ax in figure.axes)
    measured = figure.axes[1].lines[1]
    assert points(measured) == (found["step"], found["ascent_gap"])
    assert measured.get_linestyle() == ":"
    assert measured.get_color() == figure.axes[1].lines[0].get_color()
    assert legend(figure.axes[1]) == ["predicted ρ‖g‖", "measured f(x + ε) − f(x)"]
    assert losses == (found["step"], found["loss"])
    assert gaps == (found["step"], found["predicted_gap"])
    assert traces == ([0, 3, 6], [found["trace"][i] for i in (0, 3, 6)])
    assert figure.axes[-1].get_xlabel() == "step"
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_logs_of_several_runs_share_panels_and_empty_panels_are_left_out():
    nan = math.nan
    adamw = {"step": [0, 1], "loss": [2.0, 1.0], "predicted_gap": [nan, nan], "trace": [nan, nan]}
    sassha = {"step": [0, 1], "loss": [2.0, 1.5], "predicted_gap": [0.3, 0.2], "trace": [nan, nan]}
    top, bottom = plot_log({"AdamW": adamw, "SASSHA": sassha}).axes
    assert legend(top) == ["AdamW", "SASSHA"]
    assert legend(bottom) == ["SASSHA, predicted ρ‖g‖"]
    (measured,) = plot_log({"step": [0, 1], "loss": [nan, nan], "ascent_gap": [0.1, nan]}).axes  # of another log
    assert legend(measured) == ["measured f(x + ε) − f(x)"]
    assert points(measured.lines[0]) == ([0], [0.1])
    assert top.lines[1].get_color() == bottom.lines[0].get_color()
    with pytest.raises(ValueError, match="no run has a loss or a statistic"):
        plot_log({**adamw, "loss": [nan, nan]})
    with pytest.raises(ValueError, match="there is no run to draw"):
        plot_log({})


def test_what_can_not_be_drawn_is_named(sharpness):
    curve = sharpness.curve("gradient", points=2)
    with pytest.raises(TypeError, match="plot_curve: the run 'SAM' is a list, expected a Curve"):
        plot_curve({"SASSHA": curve, "SAM": [1, 2]})
    with pytest.raises(TypeError, match="plot_density: data is a Curve, expected a SpectralDensity"):
        plot_density(curve)
    with pytest.raises(TypeError, match="plot_surface: surface is a dict, expected a Surface; draw one at a time"):
        plot_surface({"SASSHA": grid_of([0.0, 1.0], [1.0, 1.0])})
    with pytest.raises(ValueError, match="plot_density: there is no run to draw"):
        plot_density({})


def test_matplotlib_is_imported_by_drawing_only_and_the_error_without_it_names_the_remedy():
    code = """
import sys, torch
import sassha_fast.log, sassha_fast.plots, sassha_fast.sharpness as s
print(any(m.split('.')[0] in ('matplotlib', 'scipy') for m in sys.modules))
sys.modules['matplotlib'] = None
try:
    sassha_fast.plots.plot_curve(s.Curve(torch.zeros(2), torch.zeros(2), torch.zeros(1), 'given'))
except ImportError as error:
    print(error)
"""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    imported, message = done.stdout.splitlines()
    assert imported == "False"
    assert "plot_curve needs matplotlib" in message
    assert "pip install matplotlib" in message


def test_an_extra_is_the_module_itself():
    assert extras.extra("math", "test") is math
    with pytest.raises(ImportError, match="test needs no_such_package"):
        extras.extra("no_such_package.part", "test")
