"""Loss along lines and planes against exact values, with weights that return."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import assert_same_bits, snapshot

from sassha_fast.sharpness import Curve, Sharpness, Surface

pytest.importorskip("scipy", reason="scipy is not installed")


class Quadratic(nn.Module):
    """Gives its weights; with the loss below L(w) = ½ wᵀAw + bᵀw."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.w = nn.Parameter(torch.randn(3, 2, generator=generator, dtype=torch.float64))
        self.v = nn.Parameter(torch.randn(2, generator=generator, dtype=torch.float64))
        root = torch.randn(8, 8, generator=generator, dtype=torch.float64)
        self.matrix = root @ root.T + torch.diag(torch.arange(8.0).double())
        self.b = torch.randn(8, generator=generator, dtype=torch.float64)

    def forward(self, x):
        flat = torch.cat([self.w.reshape(-1), self.v])
        return (0.5 * flat @ self.matrix @ flat + self.b @ flat).expand(len(x))


def make():
    model = Quadratic()
    sharpness = Sharpness(model, lambda out, y: out.mean(), [(torch.zeros(2), torch.zeros(2))] * 2)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return sharpness, model.matrix, model.matrix @ flat + model.b


@pytest.mark.parametrize("kind", ["random", "gradient", "eigenvector", "given"])
def test_the_curve_of_a_quadratic_is_a_parabola_with_its_coefficients(kind):
    sharpness, hessian, gradient = make()
    given = torch.arange(1.0, 9.0).double()
    curve = sharpness.curve(given if kind == "given" else kind, radius=0.7, points=9)
    assert isinstance(curve, Curve)
    assert curve.kind == kind
    t, d = curve.steps, curve.direction
    expected = 0.5 * t**2 * (d @ hessian @ d) + t * (gradient @ d) + sharpness.loss()
    torch.testing.assert_close(curve.losses, expected, rtol=1e-12, atol=1e-12)
    assert t[0] == -0.7
    assert t[-1] == 0.7
    assert t[4] == 0
    assert curve.losses[4] == sharpness.loss()  # bit for bit: nothing was added


@pytest.mark.parametrize("kind", ["random", "eigenvectors", "given"])
def test_the_surface_of_a_quadratic_is_a_paraboloid_with_its_coefficients(kind):
    sharpness, hessian, gradient = make()
    given = torch.eye(8, dtype=torch.float64)[2], torch.ones(8, dtype=torch.float64)
    surface = sharpness.surface(given if kind == "given" else kind, radius=0.5, points=5)
    assert isinstance(surface, Surface)
    assert surface.kind == kind
    for i, s in enumerate(surface.steps):
        for j, t in enumerate(surface.steps):
            d = s * surface.directions[0] + t * surface.directions[1]
            expected = 0.5 * d @ hessian @ d + gradient @ d + sharpness.loss()
            assert float(surface.losses[i, j]) == pytest.approx(float(expected), rel=1e-12, abs=1e-12)


def test_directions_are_those_that_they_are_called():
    sharpness, hessian, gradient = make()
    values, vectors = torch.linalg.eigh(hessian)
    torch.testing.assert_close(sharpness.curve("gradient", points=2).direction, gradient / gradient.norm())
    top = sharpness.curve("eigenvector", points=2).direction
    assert float((top @ vectors[:, -1]).abs()) == pytest.approx(1.0, abs=1e-5)
    plane = sharpness.surface("eigenvectors", points=2).directions
    assert float((plane[1] @ vectors[:, -2]).abs()) == pytest.approx(1.0, abs=1e-5)
    curvature = float(plane[1] @ hessian @ plane[1])
    assert curvature == pytest.approx(float(values[-2]), rel=1e-5)


def test_a_normalised_direction_has_the_norm_of_every_filter_and_leaves_vectors_alone():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4))
    with torch.no_grad():
        net[3].weight[1] = 0.0
    sharpness = Sharpness(net, F.cross_entropy, [(torch.randn(2, 2, 4, 4), torch.tensor([0, 1]))])
    drawn = torch.randn(sharpness.size)
    parts = sharpness._shaped(sharpness.filter_normalised(drawn))
    for p, part, before in zip(net.parameters(), parts, sharpness._shaped(drawn), strict=True):
        if p.dim() == 1:
            assert not part.any()
            continue
        torch.testing.assert_close(part.flatten(1).norm(dim=1), p.detach().flatten(1).norm(dim=1))
        kept = p.detach().flatten(1).norm(dim=1) > 0
        cosine = F.cosine_similarity(part.flatten(1)[kept], before.flatten(1)[kept])
        torch.testing.assert_close(cosine, torch.ones_like(cosine))
    found = sharpness.curve("random", points=2).direction
    torch.testing.assert_close(found, sharpness.filter_normalised(found))
    first, second = sharpness.surface("random", points=2).directions
    assert torch.equal(first, found)
    assert abs(float(F.cosine_similarity(first, second, dim=0))) < 0.5


@pytest.mark.parametrize("measure", ["curve", "surface"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_weights_return_bit_for_bit_also_from_the_middle_of_a_measure(measure, error):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = [(torch.randn(5, 3), torch.randint(0, 2, (5,))) for _ in range(2)]
    before, calls, places = snapshot(net), 0, []

    def failing(out, y):
        nonlocal calls
        calls += 1
        places.append(float(net[0].weight.detach().sum()))
        if calls == 6:
            raise error
        return F.cross_entropy(out, y)

    sharpness = Sharpness(net, failing, data)
    with pytest.raises(error):
        getattr(sharpness, measure)(points=4)
    assert places[-1] != float(before[0].sum())  # it was elsewhere
    assert_same_bits(snapshot(net), before)
    calls = 10
    getattr(sharpness, measure)(points=3)
    assert_same_bits(snapshot(net), before)


def test_bad_arguments_are_named_with_their_remedy():
    sharpness, _, _ = make()
    for call, message in (
        (lambda: sharpness.curve(radius=0), "curve: radius is 0, expected a finite number above 0"),
        (lambda: sharpness.curve(points=1), "curve: points is 1, expected an integer of at least 2"),
        (lambda: sharpness.curve("hessian"), "curve: direction is 'hessian', expected 'random', 'gradient'"),
        (lambda: sharpness.curve(torch.ones(3)), r"a vector has shape \(3,\), expected \(8,\)"),
        (lambda: sharpness.surface(radius=float("nan")), "surface: radius is nan"),
        (lambda: sharpness.surface(points=2.5), "surface: points is 2.5"),
        (lambda: sharpness.surface("gradient"), "surface: directions is 'gradient', expected 'random', 'eigenvectors'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_directions_that_do_not_exist_are_refused():
    flat = nn.Linear(3, 1)
    nn.init.zeros_(flat.weight)
    nn.init.zeros_(flat.bias)
    sharpness = Sharpness(flat, F.mse_loss, [(torch.randn(4, 3), torch.zeros(4, 1))])
    with pytest.raises(ValueError, match="normalised by filters is 0"):
        sharpness.curve("random")
    with pytest.raises(ValueError, match=r"curve: the gradient has norm 0.0.*another direction"):
        sharpness.curve("gradient")
    with pytest.raises(ValueError, match=r"gradient_gap: the gradient has norm 0.0"):
        sharpness.gradient_gap()
