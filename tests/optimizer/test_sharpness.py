"""Measures of sharpness against a dense Hessian."""

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import assert_same_bits, snapshot

from sassha_fast.sharpness import Sharpness, SharpnessReport, SpectralDensity

pytest.importorskip("scipy", reason="scipy is not installed")


def settled(net, data):
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(60):  # towards a minimum, where one measures
        x, y = data[step % len(data)]
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    return net, data


def make(norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 12), nn.BatchNorm1d(12)] if norm else [nn.Linear(6, 12)]
    net = nn.Sequential(*layers, nn.Tanh(), nn.Linear(12, 4)).double()
    data = [(torch.randn(n, 6).double(), torch.randint(0, 4, (n,))) for n in (20, 30, 10)]  # uneven on purpose
    return settled(net, data)


def make_convolutional():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), nn.Conv2d(4, 6, 3), nn.GELU(), nn.Flatten(),
        nn.Linear(24, 3),
    ).double()  # fmt: skip
    data = [(torch.randn(n, 1, 8, 8).double(), torch.randint(0, 3, (n,))) for n in (16, 8)]
    return settled(net, data)


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


@pytest.fixture(scope="module", params=[make, make_convolutional], ids=["tanh", "convolutional"])
def measured(request):
    net, data = request.param()
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
    assert sharpness.eigenvalues() == pytest.approx(expected[:1], rel=0.01)


def test_eigenvectors_are_unit_vectors_that_the_hessian_only_stretches(measured):
    sharpness, hessian, _, _ = measured
    values, vectors = sharpness.eigenpairs(3, tolerance=1e-8)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(3).double(), atol=1e-8, rtol=0)
    torch.testing.assert_close(vectors @ hessian, torch.tensor(values)[:, None].double() * vectors, atol=1e-6, rtol=0)
    assert (vectors.amax(dim=1) == vectors.abs().amax(dim=1)).all()  # the sign is settled


def test_all_eigenvalues_can_be_asked_for():
    net = nn.Linear(2, 2).double()
    data = [(torch.randn(9, 2).double(), torch.randint(0, 2, (9,)))]
    hessian, _, _ = dense(net, data)
    values, vectors = Sharpness(net, F.cross_entropy, data).eigenpairs(6)
    assert values == pytest.approx(torch.linalg.eigvalsh(hessian).flip(0).tolist(), abs=1e-12)
    torch.testing.assert_close(vectors.T @ torch.diag(torch.tensor(values).double()) @ vectors, hessian)


def test_with_a_product_for_every_parameter_the_trace_is_the_dense_one(measured):
    sharpness, hessian, _, _ = measured
    assert sharpness.trace(sharpness.size) == pytest.approx(float(hessian.trace()), rel=1e-9)


# Root of the mean square error over 60 seeds: 0.3 % of 337 parameters with 120 products, 2.8 % of 136 with 60.
@pytest.mark.parametrize(("network", "products", "error"), [(make_convolutional, 120, 0.01), (make, 60, 0.08)])
def test_the_trace_from_fewer_products_is_near_the_dense_one_for_every_seed(network, products, error):
    net, data = network()
    expected = float(dense(net, data)[0].trace())
    traces = [Sharpness(net, F.cross_entropy, data, seed=seed).trace(products) for seed in range(3)]
    assert traces == pytest.approx([expected] * 3, rel=error)
    assert len(set(traces)) == 3


def test_the_spectral_density_has_the_moments_of_the_spectrum(measured):
    sharpness, hessian, _, _ = measured
    found = sharpness.spectral_density(30, probes=8)
    grid, density = found
    step, exact = float(grid[1] - grid[0]), torch.linalg.eigvalsh(hessian)
    assert float(density.sum()) * step == pytest.approx(1.0, abs=1e-5)
    assert float(found.weights.sum()) == pytest.approx(1.0, abs=1e-12)
    # Quadrature is exact for polynomials: these are the moments of the very probes, blurred by σ.
    probes = torch.stack(list(sharpness._directions(8, signs=True)))
    first = float((probes @ hessian * probes).mean())
    second = float((probes @ hessian).square().mean())
    assert float((grid * density).sum()) * step == pytest.approx(first, rel=1e-4)
    assert float((grid**2 * density).sum()) * step == pytest.approx(second + found.sigma**2, rel=1e-4)
    assert first == pytest.approx(float(hessian.trace()) / sharpness.size, rel=0.15)  # the noise of eight probes
    assert found.largest == pytest.approx(float(exact.max()), rel=0.01)
    assert grid.min() <= exact.min()
    assert grid.max() >= exact.max()
    assert found.size == len(exact)


def test_the_mean_of_the_spectral_density_tends_to_the_trace_over_the_number_of_parameters():
    sharpness = Sharpness(*(make()[0], F.cross_entropy, [make()[1][0]]))
    found = sharpness.spectral_density(2, probes=800)  # two steps have the first moments exactly
    mean = float((found.weights * found.nodes).sum())
    assert mean == pytest.approx(sharpness.trace(sharpness.size) / sharpness.size, rel=0.03)


def test_the_resolution_is_the_height_of_one_eigenvalue():
    density = SpectralDensity(*torch.zeros(4, 1), sigma=0.5, size=10)
    peak = torch.distributions.Normal(0.0, 0.5).log_prob(torch.tensor(0.0)).exp()
    assert density.resolution == pytest.approx(float(peak) / 10)


def test_a_loss_without_curvature_has_all_eigenvalues_at_zero():
    net = nn.Linear(3, 1)
    sharpness = Sharpness(net, lambda out, y: out.mean(), [(torch.randn(4, 3), torch.zeros(4))])
    grid, density = sharpness.spectral_density()
    assert sharpness.trace() == 0
    assert float(grid[density.argmax()]) == pytest.approx(0.0, abs=0.01)
    assert float(density.sum() * (grid[1] - grid[0])) == pytest.approx(1.0, abs=1e-5)


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


def test_every_measure_shows_its_progress_under_its_name(capsys):
    pytest.importorskip("tqdm")
    net, data = make()
    sharpness = Sharpness(net, F.cross_entropy, data[:1], progress=True)
    for measure, shown in (
        (lambda: sharpness.average_gap(samples=3), ("average gap", "3/3")),
        (lambda: sharpness.trace(9), ("trace", "9/9")),
        (lambda: sharpness.trace(sharpness.size), ("trace", f"{sharpness.size}/{sharpness.size}")),
        (lambda: sharpness.spectral_density(4, probes=2), ("spectral density", "8/8")),
        (lambda: sharpness.eigenvalues(), ("eigenvalues", "it/s")),
        (lambda: sharpness.curve("gradient", points=4), ("curve (gradient)", "4/4")),
        (lambda: sharpness.surface(points=3), ("surface (random)", "9/9")),
    ):
        measure()
        written = capsys.readouterr().err
        for text in shown:
            assert text in written


def test_nothing_is_written_unless_it_is_asked_for(capsys):
    net, data = make()
    Sharpness(net, F.cross_entropy, data[:1]).report(samples=1, products=3)
    assert capsys.readouterr() == ("", "")


def test_without_scipy_or_tqdm_the_error_names_the_remedy(monkeypatch):
    net, data = make()
    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"Sharpness.eigenpairs needs scipy.*pip install scipy"):
        Sharpness(net, F.cross_entropy, data).eigenvalues()
    with pytest.raises(ImportError, match="needs tqdm"):
        Sharpness(net, F.cross_entropy, data, progress=True)


def test_data_is_moved_to_the_model():
    net, data = make()
    seen = []

    def loss(out, y):
        seen.extend((out.device.type, y.device.type))
        return F.cross_entropy(out, y)

    with pytest.raises((RuntimeError, NotImplementedError)):  # no number can be read from this device
        Sharpness(net.to("meta"), loss, data).loss()
    assert set(seen) == {"meta"}
    net, data = make()
    listed = [(x, y.tolist()) for x, y in data]  # what is no tensor stays what it is
    expected = Sharpness(net, F.cross_entropy, data).loss()
    assert Sharpness(net, lambda out, y: F.cross_entropy(out, torch.tensor(y)), listed).loss() == expected


def test_bad_arguments_are_named_with_what_was_expected():
    net, data = make()
    sharpness = Sharpness(net, F.cross_entropy, data)
    for call, message in (
        (lambda: sharpness.eigenvalues(0), "eigenpairs: k is 0, expected an integer of at least 1"),
        (lambda: sharpness.eigenpairs(137), "k is 137, but there are 136 eigenvalues; ask for fewer"),
        (lambda: sharpness.eigenvalues(tolerance=0.0), "tolerance is 0.0, expected a finite number above 0"),
        (lambda: sharpness.trace(0), "trace: products is 0, expected an integer of at least 1"),
        (lambda: sharpness.trace(2.0), "trace: products is 2.0"),
        (lambda: sharpness.spectral_density(0), "spectral_density: steps is 0"),
        (lambda: sharpness.spectral_density(probes=0), "spectral_density: probes is 0"),
        (lambda: sharpness.spectral_density(width=0), "spectral_density: width is 0"),
        (lambda: sharpness.spectral_density(width=0.001), "points is 512, too few .* pass at least 1011"),
        (lambda: sharpness.gradient_gap(0.0), "gradient_gap: rho is 0.0, expected a finite number above 0"),
        (lambda: sharpness.average_gap(-1), "average_gap: rho is -1"),
        (lambda: sharpness.average_gap(samples=0), "average_gap: samples is 0"),
        (lambda: sharpness.report(float("inf")), "report: rho is inf"),
        (lambda: sharpness.report(products=0), "report: products is 0"),
        (lambda: sharpness.product(torch.ones(3)), r"a vector has shape \(3,\), expected \(136,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_data_that_runs_out_and_models_without_parameters_are_refused():
    net, data = make()
    with pytest.raises(TypeError, match="runs out after one pass"):
        Sharpness(net, F.cross_entropy, iter(data))
    with pytest.raises(ValueError, match="data has no batch"):
        Sharpness(net, F.cross_entropy, []).loss()
    with pytest.raises(ValueError, match="no parameter"):
        Sharpness(nn.Tanh(), F.cross_entropy, data)
