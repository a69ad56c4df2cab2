"""Measures of sharpness against a dense Hessian."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import assert_same_bits, snapshot

from sassha_fast.sharpness import Sharpness, SharpnessReport

pytest.importorskip("scipy", reason="scipy is not installed")


def make(norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 12), nn.BatchNorm1d(12)] if norm else [nn.Linear(6, 12)]
    net = nn.Sequential(*layers, nn.Tanh(), nn.Linear(12, 4)).double()
    data = [(torch.randn(n, 6).double(), torch.randint(0, 4, (n,))) for n in (20, 30, 10)]  # uneven on purpose
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(60):  # towards a minimum, where one measures
        x, y = data[step % 3]
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    return net, data


def dense(net, data):
    """The Hessian of the mean loss over all examples at once."""
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    params = dict(net.named_parameters())
    sizes = [p.numel() for p in params.values()]

    def loss(flat):
        parts = {name: part.view_as(p) for (name, p), part in zip(params.items(), flat.split(sizes), strict=True)}
        return F.cross_entropy(torch.func.functional_call(net, parts, (x,)), y)

    flat = torch.cat([p.detach().reshape(-1) for p in params.values()])
    return torch.autograd.functional.hessian(loss, flat), loss, flat


@pytest.fixture(scope="module")
def measured():
    net, data = make()
    hessian, loss, flat = dense(net, data)
    return Sharpness(net, F.cross_entropy, data), hessian, loss, flat


def test_products_are_those_of_the_mean_over_examples_of_uneven_batches(measured):
    sharpness, hessian, _, _ = measured
    v = torch.randn(sharpness.size).double()
    torch.testing.assert_close(sharpness.product(v), hessian @ v)


def test_eigenvalues_are_within_a_per_cent_of_the_dense_ones(measured):
    sharpness, hessian, _, _ = measured
    expected = torch.linalg.eigvalsh(hessian).flip(0)[:3].tolist()
    assert sharpness.eigenvalues(3) == pytest.approx(expected, rel=0.01)


def test_the_trace_is_within_a_per_cent_of_the_dense_one(measured):
    sharpness, hessian, _, _ = measured
    expected = float(hessian.trace())
    assert sharpness.trace(120) == pytest.approx(expected, rel=0.01)
    assert sharpness.trace(sharpness.size) == pytest.approx(expected, rel=1e-9)


def test_the_spectral_density_has_the_moments_of_the_spectrum(measured):
    sharpness, hessian, _, _ = measured
    grid, density = sharpness.spectral_density(60, probes=8)
    step = float(grid[1] - grid[0])
    assert float(density.sum()) * step == pytest.approx(1.0, abs=0.01)
    mean = float((grid * density).sum()) * step
    assert mean == pytest.approx(float(hessian.trace()) / sharpness.size, rel=0.15)  # the noise of eight probes
    assert grid.min() <= torch.linalg.eigvalsh(hessian).min()
    assert grid.max() >= torch.linalg.eigvalsh(hessian).max()


def test_gaps_are_differences_of_the_loss(measured):
    sharpness, _, loss, flat = measured
    assert sharpness.loss() == pytest.approx(float(loss(flat)), rel=1e-12)
    gradient = torch.autograd.functional.jacobian(loss, flat)
    torch.testing.assert_close(sharpness.gradient(), gradient)
    expected = loss(flat + 0.1 * gradient / gradient.norm()) - loss(flat)
    assert sharpness.gradient_gap(0.1) == pytest.approx(float(expected), rel=1e-9)
    # A random step of length ρ adds ρ² tr(H)/2d to second order.
    predicted = 0.1**2 * sharpness.trace(sharpness.size) / (2 * sharpness.size)
    assert sharpness.average_gap(0.1, samples=600) == pytest.approx(predicted, rel=0.5)


def test_the_report_has_every_measure_and_leaves_the_model_as_it_was():
    net, data = make(norm=True)
    before, statistics = snapshot(net), net[1].running_mean.clone()
    report = Sharpness(net, F.cross_entropy, data).report(samples=5)
    assert isinstance(report, SharpnessReport)
    for label in ("loss", "λmax", "trace", "δL_grad", "δL_avg"):
        assert label in str(report)
    assert_same_bits(snapshot(net), before)
    assert torch.equal(net[1].running_mean, statistics)
    assert net.training


def test_weights_return_if_a_measure_fails():
    net, data = make()
    before = snapshot(net)
    sharpness = Sharpness(net, F.cross_entropy, data)
    with pytest.raises(ZeroDivisionError), sharpness.moved(torch.ones(sharpness.size).double()):
        raise ZeroDivisionError
    assert_same_bits(snapshot(net), before)


def test_progress_is_shown(capsys):
    pytest.importorskip("tqdm")
    net, data = make()
    Sharpness(net, F.cross_entropy, data, progress=True).average_gap(samples=3)
    assert "3/3" in capsys.readouterr().err


def test_data_that_runs_out_and_models_without_parameters_are_refused():
    net, data = make()
    with pytest.raises(TypeError, match="runs out after one pass"):
        Sharpness(net, F.cross_entropy, iter(data))
    with pytest.raises(ValueError, match="data has no batch"):
        Sharpness(net, F.cross_entropy, []).loss()
    with pytest.raises(ValueError, match="no parameter"):
        Sharpness(nn.Tanh(), F.cross_entropy, data)
