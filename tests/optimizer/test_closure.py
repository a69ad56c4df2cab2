"""``step(closure)`` does in one call what the three calls do, on every kind of model."""

from contextlib import nullcontext

import pytest
import torch
import zoo
from torch.utils.weak import TensorWeakRef
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
from sassha_fast._core.contexts import CreateGraph, RandomState, RunningStatistics, frozen_batchnorm, refresh_context

OPTIONS = {"lr": 0.02, "rho": 0.05, "weight_decay": 0.01, "lazy_hessian": 4, "n_samples": 2}


def buffers(model):
    return [b.clone() for b in model.buffers()]


def by_hand(opt, model, loss_fn):
    """The three calls with everything that a closure does by itself."""
    with opt.refresh_context() if opt.hessian_due else nullcontext():
        with opt.replay_rng():
            first = loss_fn()
            first.backward()
        opt.perturb_weights()
        with opt.replay_rng(), opt.frozen_batchnorm(model):
            loss_fn().backward(create_graph=opt.hessian_due)
        opt.unperturb()  # inside: activation checkpointing runs the forward pass again here
    opt.step()
    opt.zero_grad()
    return first.item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", zoo.MODELS)
def test_closure_equals_the_three_calls_bit_for_bit(name, backend):
    results = []
    for with_closure in (False, True):
        model, loss_fn = zoo.make(name)
        opt = SASSHA(model.parameters(), backend=backend, **OPTIONS)
        opt.attach(model)
        torch.manual_seed(3)
        losses = []
        for _ in range(6):
            if with_closure:
                losses.append(opt.step(closure_of(opt, loss_fn)).item())
            else:
                losses.append(by_hand(opt, model, loss_fn))
        results.append((snapshot(model), buffers(model), state_of(opt), losses, torch.get_rng_state()))
    three, one = results
    assert_same_bits(one[0], three[0])
    assert_same_state(one[2], three[2])
    assert all(map(torch.equal, one[1], three[1]))
    assert one[3] == three[3]
    assert torch.equal(one[4], three[4])


def test_closure_at_the_upstream_point_equals_the_three_calls():
    results = []
    for with_closure in (False, True):
        net = make_net(torch.float64)
        opt = SASSHA(net.parameters(), hvp_point="upstream", **OPTIONS)
        loss = make_loss(net, torch.float64)
        for _ in range(6):
            opt.step(closure_of(opt, loss)) if with_closure else three_calls(opt, loss)
        results.append(snapshot(net))
    assert_same_bits(*results)


def test_explicit_backward_equals_the_plain_one():
    results = []
    for explicit in (False, True):
        net = make_net()
        opt = SASSHA(net.parameters(), **OPTIONS)
        closure = closure_of(opt, make_loss(net), opt.backward if explicit else torch.Tensor.backward)
        for _ in range(6):
            opt.step(closure)
        results.append(snapshot(net))
    assert_same_bits(*results)


def test_no_gradient_keeps_its_graph_after_a_step():
    net = make_net()
    opt = SASSHA(net.parameters(), **OPTIONS)
    opt.step(closure_of(opt, make_loss(net)))
    assert not any(p.grad.requires_grad for p in net.parameters())


@pytest.mark.parametrize(("rho", "calls"), [(0.0, 1), (0.1, 2), (torch.tensor(0.0), 2)], ids=str)
def test_a_step_without_ascent_costs_one_gradient(rho, calls):
    net = make_net()
    opt = SASSHA(net.parameters(), **{**OPTIONS, "rho": rho})
    count = 0

    def closure():
        nonlocal count
        count += 1
        return closure_of(opt, make_loss(net))()

    opt.step(closure)
    assert count == calls
    assert opt.stats.refreshes == 1


def test_a_step_with_rho_zero_equals_the_three_calls_with_rho_zero():
    results = []
    for with_closure in (False, True):
        net = make_net()
        opt = SASSHA(net.parameters(), **{**OPTIONS, "rho": 0.0})
        loss = make_loss(net)
        for _ in range(6):
            opt.step(closure_of(opt, loss)) if with_closure else three_calls(opt, loss)
        results.append(snapshot(net))
    assert_same_bits(*results)


def test_the_first_loss_is_returned_and_the_gap_is_noted():
    net = make_net(torch.float64)
    opt = SASSHA(net.parameters(), **{**OPTIONS, "rho": 0.3})
    loss = make_loss(net, torch.float64)
    first = loss().item()
    assert opt.step(closure_of(opt, loss)).item() == first
    gap, predicted = opt.stats.ascent_gap.item(), opt.stats.predicted_gap.item()
    assert gap > 0
    assert gap == pytest.approx(predicted, rel=0.5)


def test_hessian_closure_gives_the_curvature_and_closure_the_gradient():
    net = make_net(torch.float64)
    opt = SASSHA(net.parameters(), lr=1e-3, rho=0.0, betas=(0.0, 0.0))
    main, other = make_loss(net, torch.float64, seed=1), make_loss(net, torch.float64, seed=2)
    expected = SASSHA((p := make_net(torch.float64)).parameters(), lr=1e-3, rho=0.0, betas=(0.0, 0.0))
    make_loss(p, torch.float64, seed=2)().backward(create_graph=True)
    expected.step()
    main().backward()
    gradient = [p.grad.clone() for p in net.parameters()]
    opt.step(closure_of(opt, main), hessian_closure=closure_of(opt, other))
    found = state_of(opt)
    assert_same_bits([e["exp_hessian_diag"] for e in found], [e["exp_hessian_diag"] for e in state_of(expected)])
    assert_same_bits([e["exp_avg"] for e in found], gradient)


@pytest.mark.parametrize("fails_at", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_in_the_closure_leaves_everything_as_it_was(fails_at, backend):
    model, loss_fn = zoo.make("cnn_with_batchnorm")
    opt = SASSHA(model.parameters(), backend=backend, rho_scheduler=lambda step: 0.05 + step, **OPTIONS)
    opt.attach(model)
    opt.step(closure_of(opt, loss_fn))
    before = snapshot(model), buffers(model), state_of(opt), torch.get_rng_state()
    assert (opt.param_groups[0]["rho"], opt.param_groups[0]["rho_step"]) == (0.05, 1)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        torch.rand(3)
        loss = closure_of(opt, loss_fn)()
        if calls == fails_at:
            raise ZeroDivisionError
        return loss

    with pytest.raises(ZeroDivisionError):
        opt.step(closure)
    assert_same_bits(snapshot(model), before[0])
    assert all(map(torch.equal, buffers(model), before[1]))
    assert_same_state(state_of(opt), before[2])
    assert torch.equal(torch.get_rng_state(), before[3])
    assert (opt.param_groups[0]["rho"], opt.param_groups[0]["rho_step"]) == (0.05, 1)
    opt.step(closure_of(opt, loss_fn))


def test_autocast_sees_the_restored_weights_after_an_exception():
    p = torch.nn.Parameter(torch.ones(4, 4))
    opt = SASSHA([p], rho=1.0)
    x = torch.ones(1, 4)
    outputs = []

    def closure():
        opt.zero_grad()
        outputs.append(torch.nn.functional.linear(x, p))
        outputs[-1].float().square().sum().backward()
        if len(outputs) == 2:
            raise ZeroDivisionError
        return outputs[-1].sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ZeroDivisionError):
            opt.step(closure)
        assert not torch.equal(outputs[1], outputs[0])
        assert torch.equal(torch.nn.functional.linear(x, p), outputs[0])


def test_dropout_draws_one_mask_per_step():
    model, loss_fn = zoo.make("transformer_with_dropout")
    opt = SASSHA(model.parameters(), **OPTIONS)
    drawn = []

    def closure():
        drawn.append(torch.get_rng_state())
        return closure_of(opt, loss_fn)()

    opt.step(closure)
    opt.step(closure)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])


@pytest.mark.parametrize(
    "norm",
    [
        torch.nn.BatchNorm1d(3),
        torch.nn.BatchNorm1d(3, momentum=None),
        torch.nn.SyncBatchNorm(3),
        torch.nn.InstanceNorm1d(3, track_running_stats=True),
    ],
    ids=lambda norm: f"{type(norm).__name__}-{norm.momentum}",
)
def test_frozen_batchnorm_uses_the_batch_and_keeps_its_statistics(norm):
    x, before = torch.randn(5, 3, 7), buffers(norm)
    with frozen_batchnorm(norm):
        frozen = norm(x)
    assert all(map(torch.equal, buffers(norm), before))
    assert torch.equal(norm(x), frozen)
    assert not torch.equal(norm.running_mean, before[0])


def test_running_statistics_and_random_state_go_back():
    norm = torch.nn.BatchNorm1d(3)
    before, saved = buffers(norm), RunningStatistics.of(norm)
    norm(torch.randn(5, 3))
    saved.restore()
    assert all(map(torch.equal, buffers(norm), before))
    state = RandomState([torch.device("cpu")])
    first = torch.rand(3)
    state.restore()
    assert torch.equal(torch.rand(3), first)


def test_attention_has_a_double_backward_in_the_refresh_context():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with refresh_context():
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q).sum()
    (g,) = torch.autograd.grad(out, q, create_graph=True)
    assert torch.autograd.grad(g.square().sum(), q)[0].any()


def test_create_graph_mode_reaches_plain_backward():
    p = torch.nn.Parameter(torch.ones(3))
    with CreateGraph():
        (p**3).sum().backward()
    assert p.grad.requires_grad
    p.grad = None


def test_frozen_batchnorm_without_a_model_says_what_to_do():
    with pytest.raises(ValueError, match=r"pass it, or call attach\(model\)"):
        SASSHA(make_net().parameters()).frozen_batchnorm()


@pytest.mark.parametrize("to_none", [True, False])
def test_a_closure_that_zeroes_gradients_is_not_warned_of_and_one_that_adds_to_them_is(to_none):
    net = make_net()
    opt = SASSHA(net.parameters(), **OPTIONS)
    loss = make_loss(net)

    def zeroing():
        opt.zero_grad(set_to_none=to_none)
        value = loss()
        value.backward()
        return value

    def adding():
        value = loss()
        value.backward()
        return value

    for _ in range(3):
        opt.step(zeroing)
    with pytest.warns(UserWarning, match="the closure added to gradients that were there before"):
        opt.step(adding)
    opt.zero_grad()
    opt.step(adding)  # nothing was there
    opt.step([adding, adding])  # and here the optimizer zeroes


def test_gradients_that_a_closure_zeroes_are_gone_while_it_computes_new_ones():
    net = make_net()
    opt = SASSHA(net.parameters(), **OPTIONS)
    loss = make_loss(net)
    opt.step(closure_of(opt, loss))
    old = [TensorWeakRef(p.grad) for p in net.parameters()]

    def closure():
        opt.zero_grad()
        assert not any(grad() is not None for grad in old)
        value = loss()
        value.backward()
        return value

    opt.step(closure)
