"""Products from gradients at probed weights."""

import pytest
import torch
import zoo
from training import (
    BACKENDS,
    assert_same_bits,
    assert_same_state,
    closure_of,
    make_loss,
    make_net,
    same_bits,
    snapshot,
    state_of,
    three_calls,
)

from sassha_fast import SASSHA, reference

OPTIONS = {"lr": 0.02, "rho": 0.05, "weight_decay": 0.01, "lazy_hessian": 4}
SCHEMES = ("finite_difference", "central_difference")


def run(backend, dtype, steps=10, **options):
    net = make_net(dtype)
    opt = SASSHA(net.parameters(), backend=backend, **{**OPTIONS, **options})
    loss = make_loss(net, dtype)
    for _ in range(steps):
        three_calls(opt, loss)
    return net, opt


@pytest.mark.parametrize("n_samples", [1, 2])
@pytest.mark.parametrize("hvp", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["foreach", "cpu"])
def test_backends_equal_the_reference_bit_for_bit(backend, dtype, hvp, n_samples):
    expected, expected_opt = run("reference", dtype, hvp=hvp, n_samples=n_samples)
    found, found_opt = run(backend, dtype, hvp=hvp, n_samples=n_samples)
    assert_same_bits(snapshot(found), snapshot(expected))
    assert_same_state(state_of(found_opt), state_of(expected_opt))
    assert found_opt.stats.refreshes == 3


@pytest.mark.parametrize(("hvp", "bound"), [("finite_difference", 0.05), ("central_difference", 0.005)])
@pytest.mark.parametrize("name", zoo.SMOOTH)
def test_products_on_smooth_networks_are_close_to_the_exact_ones(name, hvp, bound):
    curvatures = []
    for scheme in ("exact", hvp):
        model, loss_fn = zoo.make(name)
        opt = SASSHA(model.parameters(), lr=1e-3, rho=0.05, betas=(0.9, 0.0), hvp=scheme)
        opt.attach(model)
        torch.manual_seed(5)
        opt.step(closure_of(opt, loss_fn))
        curvatures.append(torch.cat([entry["exp_hessian_diag"].flatten() for entry in state_of(opt)]))
    exact, found = curvatures
    assert (found - exact).norm() <= bound * exact.norm()


@pytest.mark.parametrize("hvp", SCHEMES)
@pytest.mark.parametrize("rho", [0.0, 0.05])
@pytest.mark.parametrize("backend", BACKENDS)
def test_closure_equals_the_calls_by_hand(backend, rho, hvp):
    expected, expected_opt = run(backend, torch.float64, hvp=hvp, rho=rho)
    net = make_net(torch.float64)
    opt = SASSHA(net.parameters(), backend=backend, **{**OPTIONS, "hvp": hvp, "rho": rho})
    closure = closure_of(opt, make_loss(net, torch.float64))
    for _ in range(10):
        opt.step(closure)
    assert_same_bits(snapshot(net), snapshot(expected))
    assert_same_state(state_of(opt), state_of(expected_opt))


@pytest.mark.parametrize(
    ("hvp", "n_samples", "expected"), [("exact", 2, 2), ("finite_difference", 1, 3), ("central_difference", 2, 6)]
)
def test_a_refresh_costs_its_probes_and_an_ordinary_step_nothing_more(hvp, n_samples, expected):
    net = make_net()
    opt = SASSHA(net.parameters(), **OPTIONS, hvp=hvp, n_samples=n_samples)
    closure = closure_of(opt, make_loss(net))
    calls = 0

    def counted():
        nonlocal calls
        calls += 1
        return closure()

    opt.step(counted)
    assert calls == expected
    opt.step(counted)
    assert calls == expected + 2


def test_the_probe_has_the_stated_length_and_leaves_the_second_gradient():
    net = make_net(torch.float64)
    opt = SASSHA(net.parameters(), rho=0.1, hvp="finite_difference")
    x = torch.cat([p.detach().flatten() for p in net.parameters()])
    loss = make_loss(net, torch.float64)
    loss().backward()
    opt.perturb_weights()
    ascended = torch.cat([p.detach().flatten() for p in net.parameters()])
    loss().backward()
    second = [p.grad.clone() for p in net.parameters()]
    assert opt.probes_due == 1
    opt.probe_weights()
    moved = torch.cat([p.detach().flatten() for p in net.parameters()]) - ascended
    z = torch.cat([reference.rademacher(p, i, 0, 0).flatten() for i, p in enumerate(net.parameters())])
    torch.testing.assert_close(moved, 0.01 * x.norm() / len(x) ** 0.5 * z, rtol=1e-6, atol=1e-12)
    loss().backward()
    opt.unperturb()
    assert same_bits(torch.cat([p.detach().flatten() for p in net.parameters()]), x)
    assert_same_bits([p.grad for p in net.parameters()], second)


def test_hessian_closure_gives_the_differences():
    found = []
    for hvp in ("exact", "central_difference"):
        net = make_net(torch.float64)
        opt = SASSHA(net.parameters(), lr=1e-3, rho=0.1, betas=(0.0, 0.0), hvp=hvp)
        main, other = make_loss(net, torch.float64, seed=1), make_loss(net, torch.float64, seed=2)
        opt.step(closure_of(opt, main), hessian_closure=closure_of(opt, other))
        found.append([entry["exp_hessian_diag"] for entry in state_of(opt)])
        gradients = [entry["exp_avg"] for entry in state_of(opt)]
        if hvp == "exact":
            expected = gradients
    assert_same_bits(gradients, expected)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=1e-3)


def at_the_second_gradient():
    net = make_net()
    before = snapshot(net)
    opt = SASSHA(net.parameters(), rho=0.1, hvp="finite_difference")
    loss = make_loss(net)
    loss().backward()
    opt.perturb_weights()
    loss().backward()
    return net, opt, before


@pytest.mark.filterwarnings("ignore:.*rho is .* but the weights were not perturbed")
def test_missing_probes_are_named_after_the_weights_are_back():
    net, opt, before = at_the_second_gradient()
    with pytest.raises(RuntimeError, match="0 of 1 probes were taken"):
        opt.unperturb()
    assert_same_bits(snapshot(net), before)
    with pytest.raises(RuntimeError, match="no probe is due"):
        opt.probe_weights()
    with pytest.raises(RuntimeError, match=r"need perturb_weights\(\)"):
        opt.step()
    assert not opt.state


def test_a_probe_without_a_backward_pass_is_named_after_the_weights_are_back():
    net, opt, before = at_the_second_gradient()
    second = [p.grad.clone() for p in net.parameters()]
    opt.probe_weights()
    with pytest.raises(RuntimeError, match=r"run backward\(\) after probe_weights"):
        opt.unperturb()
    assert_same_bits(snapshot(net), before)
    assert_same_bits([p.grad for p in net.parameters()], second)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_overflowed_is_no_product_that_was_lost_to_rounding(backend):
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.1, rho=0.05, hvp="finite_difference", backend=backend)
    base, calls = make_loss(net), 0

    def loss():
        nonlocal calls
        calls += 1
        return base() * (torch.inf if calls == 2 else 1.0)  # at x + ε; the probe's gradient is finite

    opt.step(closure_of(opt, loss))
    assert opt.stats.skipped_refreshes == 1
    assert all(entry["bias_correction2"] == 0 for entry in opt.state.values())
    assert opt.hessian_due


def test_the_upstream_point_is_refused():
    with pytest.raises(ValueError, match="has no hvp_point='upstream'"):
        SASSHA(make_net().parameters(), hvp="finite_difference", hvp_point="upstream")


def test_flash_attention_needs_no_care_with_finite_differences():
    model, loss_fn = zoo.make("transformer_with_dropout", torch.float32)
    opt = SASSHA(model.parameters(), **OPTIONS, hvp="finite_difference")
    opt.attach(model)
    losses = [opt.step(closure_of(opt, loss_fn)).item() for _ in range(12)]
    assert losses[-1] < losses[0]
