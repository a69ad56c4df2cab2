"""What happens where curvature is missing, zero or not finite, and what the probes estimate."""

import pytest
import torch
from tolerances import SIGMAS
from torch.func import functional_call, hessian
from training import BACKENDS, assert_same_bits, make_loss, make_net, same_bits, snapshot, three_calls

from sassha_fast import SASSHA, reference
from sassha_fast._core.scalars import integer_power
from sassha_fast._passes import library

NAN, INF = float("nan"), float("inf")


class Poison(torch.autograd.Function):
    """x, with a gradient that is fine and a second derivative that is ``bad`` at the chosen elements."""

    @staticmethod
    def forward(ctx, x, bad):
        ctx.save_for_backward(x, bad)
        return 0.5 * x * x

    @staticmethod
    def backward(ctx, g):
        x, bad = ctx.saved_tensors
        return PoisonedProduct.apply(g, x, bad), None


class PoisonedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g, x, bad):
        ctx.save_for_backward(g, bad)
        return g * x

    @staticmethod
    def backward(ctx, gg):
        g, bad = ctx.saved_tensors
        return None, gg * (g + bad), None


def poisoned_step(opt, p, bad):
    three_calls(opt, lambda: Poison.apply(p, bad).sum())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_no_weight_moves_while_the_first_refresh_fails(backend, bad):
    p = torch.nn.Parameter(torch.randn(200))
    before = p.detach().clone()
    opt = SASSHA([p], lr=0.1, rho=0.1, weight_decay=0.1, lazy_hessian=10, backend=backend)
    for _ in range(3):
        assert opt.hessian_due
        poisoned_step(opt, p, torch.full((200,), bad))
        assert same_bits(p, before)
    assert opt.stats.skipped_refreshes == 3
    poisoned_step(opt, p, torch.zeros(200))
    assert not same_bits(p, before)
    assert torch.isfinite(p).all()
    assert not opt.hessian_due
    assert opt.stats.refreshes == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_elements_without_curvature_stay_while_their_neighbours_move(backend):
    p = torch.nn.Parameter(torch.rand(300) + 1.0)
    before = p.detach().clone()
    bad = torch.zeros(300)
    bad[::7] = NAN
    opt = SASSHA([p], lr=0.1, rho=0.1, weight_decay=0.1, lazy_hessian=3, backend=backend)
    for _ in range(2):
        poisoned_step(opt, p, bad)
        assert same_bits(p[::7], before[::7])
    assert (p != before).sum() == 300 - len(before[::7])
    assert opt.stats.partial_refreshes == 1
    poisoned_step(opt, p, torch.zeros(300))
    poisoned_step(opt, p, torch.zeros(300))  # the next scheduled refresh reaches the rest
    assert (p != before).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lost_refresh_keeps_curvature_and_its_correction(backend):
    p = torch.nn.Parameter(torch.rand(300) + 1.0)
    opt = SASSHA([p], lr=0.01, rho=0.1, lazy_hessian=1, backend=backend)
    poisoned_step(opt, p, torch.zeros(300))
    kept = {k: opt.state[p][k] for k in ("bias_correction2", "hessian_step")}
    d = opt.state[p]["exp_hessian_diag"].clone()
    poisoned_step(opt, p, torch.full((300,), INF))
    assert same_bits(opt.state[p]["exp_hessian_diag"], d)
    assert {k: opt.state[p][k] for k in kept} == kept
    assert opt.state[p]["step"] == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_whose_first_gradient_comes_between_refreshes_waits_for_its_curvature(backend):
    early, late = (torch.nn.Parameter(torch.rand(50) + 1.0) for _ in range(2))
    opt = SASSHA([early, late], lr=0.05, rho=0.1, lazy_hessian=10, backend=backend)
    for _ in range(4):
        three_calls(opt, lambda: (early**4).sum())
    before = late.detach().clone()

    def both():
        return (early**4).sum() + (late**4).sum()

    both().backward()
    opt.perturb_weights()
    assert opt.hessian_due
    both().backward()  # no graph: this loop looked too early
    opt.unperturb()
    opt.step()
    opt.zero_grad()
    assert same_bits(late, before)
    assert torch.isfinite(early).all()

    kept = opt.state[early]["exp_hessian_diag"].clone()
    three_calls(opt, both)  # asks hessian_due after perturb_weights, so late gets its curvature, and late alone
    assert not same_bits(late, before)
    assert torch.isfinite(late).all()
    assert same_bits(opt.state[early]["exp_hessian_diag"], kept)
    three_calls(opt, both, create_graph=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_latecomer_whose_products_fail_does_not_stop_the_clock_of_the_others(backend):
    early, late = (torch.nn.Parameter(torch.rand(50) + 1.0) for _ in range(2))
    opt = SASSHA([early, late], lr=0.01, rho=0.1, lazy_hessian=3, backend=backend)
    three_calls(opt, lambda: (early**4).sum())
    for _ in range(3):
        three_calls(opt, lambda: (early**4).sum() + Poison.apply(late, torch.full((50,), NAN)).sum())
    assert opt.state[early]["hessian_step"] == 4
    assert opt.state[early]["bias_correction2"] == 1.0 - integer_power(0.999, 4)
    assert opt.state[late]["bias_correction2"] == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_in_which_the_loss_is_linear_has_zero_curvature_and_moves_by_eps(backend):
    linear, curved = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))
    opt = SASSHA([linear, curved], lr=0.5, rho=0.1, eps=0.25, backend=backend)
    slope = torch.arange(1.0, 6.0)
    # Its gradient has a graph, which leads nowhere.
    three_calls(opt, lambda: ((slope + 0.0 * curved) * linear).sum() + (curved**2).sum())
    assert same_bits(opt.state[linear]["exp_hessian_diag"], torch.zeros(5))
    torch.testing.assert_close(linear.detach(), 1.0 - 0.5 * slope / 0.25)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_is_not_finite_gives_no_ascent(backend):
    net = make_net()
    before = snapshot(net)
    opt = SASSHA(net.parameters(), rho=0.5, backend=backend)
    make_loss(net)().backward()
    net[0].weight.grad[0, 0] = INF
    opt.perturb_weights()
    assert_same_bits(snapshot(net), before)


def test_tallies_agree_between_backends():
    seen = []
    for backend in BACKENDS:
        net = make_net(torch.float64)
        opt = SASSHA(net.parameters(), lr=0.01, rho=0.05, backend=backend)
        three_calls(opt, make_loss(net, torch.float64))
        seen.append((opt.stats.trace.item(), opt.stats.negative_share.item(), opt.stats.refreshes))
    assert seen[0] == pytest.approx(seen[1], rel=1e-12)
    assert seen[0] == pytest.approx(seen[2], rel=1e-12)
    assert 0 < seen[0][1] < 1


def test_mean_of_z_hz_over_4000_draws_is_the_hessian_diagonal():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
    x, y = torch.randn(16, 3, dtype=torch.float64), torch.randn(16, 2, dtype=torch.float64)
    names, params = zip(*net.named_parameters(), strict=True)
    sizes = [p.numel() for p in params]

    def loss(flat):
        parts = [part.reshape(p.shape) for part, p in zip(flat.split(sizes), params, strict=True)]
        return ((functional_call(net, dict(zip(names, parts, strict=True)), (x,)) - y) ** 2).mean()

    matrix = hessian(loss)(torch.cat([p.detach().flatten() for p in params]))
    draws = 4000
    library.load()
    probes = torch.empty(draws, sum(sizes), dtype=torch.float64)
    for draw in range(draws):
        views = list(probes[draw].split(sizes))
        torch.ops.sassha_fast.rademacher_(views, list(range(len(views))), 7, draw)
    assert same_bits(probes[9].split(sizes)[2], reference.rademacher(params[2], 2, 7, 9).flatten())
    samples = probes * (probes @ matrix)
    error = (samples.mean(0) - matrix.diag()).abs()
    sigma = samples.std(0) / draws**0.5
    assert (error <= SIGMAS * sigma + 1e-12).all()
    assert (sigma > 0).any()


def test_n_samples_averages_the_probes():
    net = make_net(torch.float64)
    opt = SASSHA(net.parameters(), lr=1e-3, n_samples=2, betas=(0.9, 0.0))
    make_loss(net, torch.float64)().backward(create_graph=True)
    params = list(net.parameters())
    grads = [p.grad for p in params]
    signed = []
    for draw in (0, 1):
        z = [reference.rademacher(p, i, 0, draw) for i, p in enumerate(params)]
        hz = torch.autograd.grad(grads, params, z, retain_graph=True)
        signed.append([h * s for h, s in zip(hz, z, strict=True)])
    opt.step()
    for p, first, second in zip(params, *signed, strict=True):
        assert same_bits(opt.state[p]["exp_hessian_diag"], ((first + second) / 2).abs())
