"""Clipping of the gradient at x + ε and of the preconditioned update, and steps that are skipped."""

import pytest
import torch
from test_amp import overflowing, scaled_calls, scaled_closure
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from training import (
    BACKENDS,
    assert_same_bits,
    assert_same_state,
    closure_of,
    make_loss,
    make_net,
    snapshot,
    state_of,
    three_calls,
)

from sassha_fast import SASSHA

OPTIONS = {"lr": 0.05, "rho": 0.05, "lazy_hessian": 4}


def trained(steps, backend="auto", dtype=torch.float64, closure=False, by_hand=None, **options):
    net = make_net(dtype)
    opt = SASSHA(net.parameters(), backend=backend, **OPTIONS, **options)
    loss = make_loss(net, dtype)
    for _ in range(steps):
        if by_hand is not None:
            three_calls(opt, loss, before_step=lambda: clip_grad_norm_(net.parameters(), by_hand))
        elif closure:
            opt.step(closure_of(opt, loss))
        else:
            three_calls(opt, loss)
    return net, opt


@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_max_grad_norm_equals_clipping_between_the_calls(backend, hvp):
    """Up to the factor, which is rounded to float32: 6e-8 relative in float64, and it enters m alone."""
    expected, _ = trained(9, backend, by_hand=0.1, hvp=hvp)
    found, opt = trained(9, backend, closure=True, max_grad_norm=0.1, hvp=hvp)
    free, _ = trained(9, backend, closure=True, hvp=hvp)
    assert opt.stats.descent_norm.item() > 0.1
    for a, b, c in zip(snapshot(found), snapshot(expected), snapshot(free), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        assert (c - b).norm() > 1e-2 * b.norm()


def test_curvature_does_not_see_the_clipping():
    clipped, opt = trained(1, max_grad_norm=1e-3)
    _, free = trained(1)
    for p, q in zip(opt.state.values(), free.state.values(), strict=True):
        assert_same_bits([p["exp_hessian_diag"]], [q["exp_hessian_diag"]])
    assert opt.state[clipped[0].weight]["exp_avg"].norm() < free.state[next(iter(free.state))]["exp_avg"].norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_norm_below_the_bound_changes_no_bit(backend):
    found, _ = trained(6, backend, torch.float32, max_grad_norm=1e6, clip_update=1e9)
    expected, _ = trained(6, backend, torch.float32)
    assert_same_bits(snapshot(found), snapshot(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_clipped_training_equals_the_reference_bit_for_bit(backend, dtype):
    options = {"max_grad_norm": 0.1, "clip_update": 0.5, "skip_nonfinite": True, "dtype": dtype}
    found, opt = trained(12, backend, **options)
    expected, oracle = trained(12, "reference", **options)
    assert_same_bits(snapshot(found), snapshot(expected))
    assert_same_state(state_of(opt), state_of(oracle))


@pytest.mark.parametrize("backend", BACKENDS)
def test_clip_update_bounds_every_element_of_the_update(backend):
    net, opt = trained(3, backend, torch.float32, clip_update=0.15)
    before = snapshot(net)
    three_calls(opt, make_loss(net))
    moved = torch.cat([(p - q).abs().flatten() / OPTIONS["lr"] for p, q in zip(snapshot(net), before, strict=True)])
    assert moved.max() <= 0.15 * (1 + 1e-3)
    assert (moved > 0.149).sum() > 10
    assert (moved < 0.14).sum() > 10


@pytest.mark.parametrize("closure", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_is_not_finite_skips_the_step(backend, closure):
    net, opt = trained(2, backend, torch.float32, skip_nonfinite=True)
    before, state = snapshot(net), state_of(opt)
    loss = overflowing(make_loss(net), 2)
    if closure:
        opt.step(closure_of(opt, loss))
    else:
        three_calls(opt, loss)
    assert_same_bits(snapshot(net), before)
    assert_same_state(state_of(opt), state)
    assert opt.stats.skipped_steps == 1
    three_calls(opt, make_loss(net))
    assert opt.state[net[0].weight]["step"] == 3


def test_a_loss_scale_is_taken_out_before_clipping():
    expected, _ = trained(6, dtype=torch.float32, closure=True, max_grad_norm=0.1)
    for way in ("closure", "calls"):
        net = make_net()
        opt = SASSHA(net.parameters(), **OPTIONS, max_grad_norm=0.1)
        scaler, loss = GradScaler("cpu", init_scale=256.0, growth_interval=10**6), make_loss(net)
        for _ in range(6):
            if way == "closure":
                scaled_closure(opt, loss, scaler)
            else:
                scaled_calls(opt, loss, scaler)
        for a, b in zip(snapshot(net), snapshot(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
