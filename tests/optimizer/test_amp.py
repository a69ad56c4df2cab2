"""Autocast and GradScaler."""

import pytest
import torch
from compact_runs import METHODS, SEVEN
from torch.amp import GradScaler
from training import (
    BACKENDS,
    assert_same_bits,
    assert_same_state,
    closure_of,
    make_batch,
    make_loss,
    make_net,
    snapshot,
    state_of,
    three_calls,
)

from sassha_fast import GSASSHA, SASSHA

OPTIONS = {"lr": 0.02, "rho": 0.05, "lazy_hessian": 4}
SCALE = 1024.0


def scaled_calls(opt, loss, scaler, *, clip=False, tell=True):
    scaler.scale(loss()).backward()
    opt.perturb_weights()
    scaler.scale(loss()).backward(create_graph=opt.hvp == "exact" and opt.hessian_due)
    for _ in range(opt.probes_due):
        opt.probe_weights()
        scaler.scale(loss()).backward()
    opt.unperturb(scaler=scaler if tell else None)
    if clip:
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_([p for g in opt.param_groups for p in g["params"]], 1e9)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()


def scaling(opt, loss, scaler):
    """A closure whose loss is scaled."""
    return closure_of(opt, loss, lambda value: scaler.scale(value).backward())


def scaled_closure(opt, loss, scaler):
    opt.step(scaling(opt, loss, scaler), scaler=scaler)
    scaler.update()


def trained(way, backend="auto", steps=9, **options):
    net = make_net()
    opt = SASSHA(net.parameters(), backend=backend, **OPTIONS, **options)
    loss = make_loss(net)
    scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=10**6)
    for _ in range(steps):
        way(opt, loss, scaler)
    return net, opt


def plain(opt, loss, scaler):
    del scaler
    opt.step(closure_of(opt, loss))


WAYS = {
    "three_calls": scaled_calls,
    "unscaled_for_clipping": lambda *args: scaled_calls(*args, clip=True),
    "scale_from_the_scaler_alone": lambda *args: scaled_calls(*args, tell=False),
    "closure": scaled_closure,
}


@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_scale_leaves_no_trace(way, backend, hvp):
    """Powers of two scale exactly, so what remains is perturb_eps beside a larger norm: below the last bit of ε."""
    expected, expected_opt = trained(plain, backend, hvp=hvp)
    found, opt = trained(WAYS[way], backend, hvp=hvp)
    for a, b in zip(snapshot(found), snapshot(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert opt.stats.trace.item() == pytest.approx(expected_opt.stats.trace.item(), rel=1e-4)
    assert opt.stats.refreshes == expected_opt.stats.refreshes
    if way != "scale_from_the_scaler_alone":
        assert opt.stats.predicted_gap.item() == pytest.approx(expected_opt.stats.predicted_gap.item(), rel=1e-4)


def overflowing(base, bad_call):
    calls = 0

    def loss():
        nonlocal calls
        calls += 1
        return base() * (float("inf") if calls == bad_call else 1.0)

    return loss


@pytest.mark.parametrize("way", ["three_calls", "closure"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_overflow_at_the_perturbed_weights_changes_nothing_and_training_goes_on(way, backend):
    net = make_net()
    opt = SASSHA(net.parameters(), backend=backend, **OPTIONS)
    base = make_loss(net)
    scaler = GradScaler("cpu", init_scale=SCALE)
    WAYS[way](opt, base, scaler)
    before, state = snapshot(net), state_of(opt)
    WAYS[way](opt, overflowing(base, 2), scaler)
    assert_same_bits(snapshot(net), before)
    assert_same_state(state_of(opt), state)
    assert opt.stats.skipped_steps == 1
    assert scaler.get_scale() == SCALE / 2
    WAYS[way](opt, base, scaler)
    assert opt.state[net[0].weight]["step"] == 2


@pytest.mark.parametrize("way", ["three_calls", "closure"])
def test_overflow_before_the_ascent_leaves_a_step_without_ascent(way):
    net = make_net()
    opt = SASSHA(net.parameters(), **OPTIONS)
    WAYS[way](opt, overflowing(make_loss(net), 1), GradScaler("cpu", init_scale=SCALE))
    assert not opt.stats.scales.any()
    assert opt.state[net[0].weight]["step"] == 1
    assert all(torch.isfinite(p).all() for p in net.parameters())


def test_a_refresh_whose_scale_is_unknown_is_refused():
    net = make_net()
    before = snapshot(net)
    opt = SASSHA(net.parameters(), **OPTIONS)
    with pytest.raises(RuntimeError, match=r"call unperturb\(scaler=scaler\)"):
        scaled_calls(opt, make_loss(net), GradScaler("cpu", init_scale=SCALE), clip=True, tell=False)
    assert_same_bits(snapshot(net), before)


def test_a_scaler_without_a_closure_is_refused():
    with pytest.raises(TypeError, match="in a hand-written loop"):
        SASSHA(make_net().parameters()).step(scaler=GradScaler("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_around_the_whole_step_trains(dtype):
    net = make_net()
    x, y = make_batch()
    opt = SASSHA(net.parameters(), **OPTIONS)
    with torch.autocast("cpu", dtype=dtype):
        losses = [three_calls(opt, lambda: torch.nn.functional.cross_entropy(net(x).float(), y)) for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]


# ---- weights in float16 -------------------------------------------------------------------------------------------


def half(method, backend, **options):
    net = make_net(torch.float16)
    kind, given = METHODS[method]
    options = {**given, "lazy_hessian": 4, "full_precision_below": 0, "backend": backend, **options}
    return net, kind(net.parameters(), **options)


def three_scaled(opt, loss, scaler):
    """The calls of a hand-written loop, of methods with and without an ascent of their own."""
    if isinstance(opt, (SASSHA, GSASSHA)):
        scaled_calls(opt, loss, scaler)
        return
    scaler.scale(loss()).backward(create_graph=opt.hessian_due)
    opt.take_products(scaler=scaler)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()


@pytest.mark.parametrize("options", [{}, SEVEN.options, {"capturable": True}, {"max_grad_norm": 0.05}], ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closure_of_float16_weights_has_the_bits_of_the_calls(backend, method, options):
    found = []
    for way in (scaled_closure, three_scaled):
        net, opt = half(method, backend, **options)
        scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=3)
        loss = make_loss(net, torch.float16)
        for _ in range(7):
            way(opt, loss, scaler)
        assert scaler.get_scale() > SCALE
        found.append((snapshot(net), state_of(opt)))
    assert_same_bits(found[0][0], found[1][0])
    assert_same_state(found[0][1], found[1][1])
    assert any(not torch.equal(p, q) for p, q in zip(found[0][0], make_net(torch.float16).parameters(), strict=True))


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_overflow_of_float16_gradients_in_a_closure_skips_the_step(backend, capturable):
    net, opt = half("SASSHA", backend, capturable=capturable, **SEVEN.options)
    scaler = GradScaler("cpu", init_scale=SCALE)
    base = make_loss(net, torch.float16)
    scaled_closure(opt, base, scaler)
    weights, state = snapshot(net), state_of(opt)
    scaled_closure(opt, overflowing(base, 2), scaler)
    assert_same_bits(snapshot(net), weights)
    found = state_of(opt)
    if capturable:  # which step was skipped is known on the device alone, so the host's clock goes on
        for entry, before in zip(found, state, strict=True):
            entry["hessian_step"] = before["hessian_step"]
    assert_same_state(found, state)
    assert int(opt.stats.skipped_steps) == 1
    assert scaler.get_scale() == SCALE / 2
    scaled_closure(opt, base, scaler)
    assert any(not torch.equal(p, q) for p, q in zip(snapshot(net), weights, strict=True))


def test_one_float16_parameter_among_others_is_enough():
    net = make_net()
    net[4].half()
    opt = SASSHA(net.parameters(), **OPTIONS)
    x, y = make_batch()
    scaler = GradScaler("cpu", init_scale=SCALE)
    scaled_closure(opt, lambda: torch.nn.functional.cross_entropy(net[4](net[:4](x).half()).float(), y), scaler)
    assert all(bool(opt.state[p]["exp_avg"].any()) for p in net.parameters())


def test_a_second_step_of_float16_weights_before_the_scalers_update_is_refused():
    net, opt = half("SASSHA", "auto")
    scaler = GradScaler("cpu", init_scale=SCALE)
    closure = scaling(opt, make_loss(net, torch.float16), scaler)
    opt.step(closure, scaler=scaler)
    weights = snapshot(net)
    with pytest.raises(RuntimeError, match=r"SASSHA.step: the scaler has served a step .* scaler.update\(\) after"):
        opt.step(closure, scaler=scaler)
    assert_same_bits(snapshot(net), weights)
    scaler.update()
    opt.step(closure, scaler=scaler)
