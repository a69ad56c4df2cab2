"""The three calls do what the paper and the authors' loop ask of them."""

import ctypes
import gc
import weakref

import pytest
import torch
from torch.func import functional_call, grad, jvp
from training import (
    BACKENDS,
    assert_same_bits,
    make_batch,
    make_loss,
    make_net,
    same_bits,
    snapshot,
    three_calls,
    train,
)

from sassha_fast import SASSHA, reference


def hessian_vector(net, z, dtype):
    """Hz at the network's present weights, by forward over reverse."""
    names = [name for name, _ in net.named_parameters()]
    x, y = make_batch(dtype)

    def loss(params):
        return torch.nn.functional.cross_entropy(functional_call(net, params, (x,)).double(), y)

    params = {name: p.detach() for name, p in net.named_parameters()}
    _, product = jvp(grad(loss), (params,), (dict(zip(names, z, strict=True)),))
    return [product[name] for name in names]


@pytest.mark.parametrize("backend", BACKENDS)
def test_curvature_is_taken_at_the_perturbed_weights(backend):
    dtype = torch.float64
    net = make_net(dtype)
    opt = SASSHA(net.parameters(), lr=1e-3, rho=0.5, betas=(0.9, 0.0), backend=backend)
    loss = make_loss(net, dtype)
    loss().backward()
    opt.perturb_weights()
    z = [reference.rademacher(p, i, 0, 0) for i, p in enumerate(net.parameters())]
    expected = hessian_vector(net, z, dtype)
    loss().backward(create_graph=True)
    opt.unperturb()
    opt.step()
    for p, h in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(opt.state[p]["exp_hessian_diag"], h.abs(), rtol=1e-9, atol=1e-12)


def test_ascent_has_length_rho_along_the_gradient():
    net = make_net(torch.float64)
    opt = SASSHA(net.parameters(), rho=0.3)
    before = snapshot(net)
    make_loss(net, torch.float64)().backward()
    g = torch.cat([p.grad.flatten() for p in net.parameters()])
    opt.perturb_weights()
    eps = torch.cat([(p.detach() - b).flatten() for p, b in zip(net.parameters(), before, strict=True)])
    torch.testing.assert_close(eps, 0.3 * g / g.norm(), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(opt.stats.grad_norm, g.norm())
    torch.testing.assert_close(opt.stats.predicted_gap, 0.3 * g.norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_on_every_step_changes_nothing(backend):
    results = []
    for create_graph in (None, True):
        net = make_net(torch.float64)
        opt = SASSHA(net.parameters(), lr=0.03, rho=0.05, lazy_hessian=3, backend=backend)
        loss = make_loss(net, torch.float64)
        for _ in range(7):
            three_calls(opt, loss, create_graph)
        results.append(snapshot(net))
    assert_same_bits(*results)


def test_refresh_is_due_every_k_steps():
    net = make_net()
    opt = SASSHA(net.parameters(), rho=0.05, lazy_hessian=4)
    loss, due = make_loss(net), []
    for _ in range(9):
        due.append(opt.hessian_due)
        three_calls(opt, loss)
    assert due == [True, False, False, False] * 2 + [True]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_thousand_rounds_of_perturb_and_unperturb_restore_every_bit(backend, dtype):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in (1, 7, 130)]
    before = [p.detach().clone() for p in params]
    opt = SASSHA(params, rho=0.7, backend=backend)
    moved = 0
    for _ in range(1000):
        for p in params:
            p.grad = torch.randn(p.shape).to(dtype)
        opt.perturb_weights()
        moved += not same_bits(params[2], before[2])
        opt.unperturb()
        assert_same_bits([p.detach() for p in params], before)
    assert moved == 1000


def test_memory_of_gradients_holds_the_backup():
    net = make_net()
    opt = SASSHA(net.parameters(), rho=0.1, backend="cpu")
    make_loss(net)().backward()
    before = [p.detach().clone() for p in net.parameters()]
    # Looks at the memory without holding it, which would keep others from taking it.
    places = [(ctypes.c_float * p.numel()).from_address(p.grad.data_ptr()) for p in net.parameters()]
    opt.perturb_weights()
    found = [torch.tensor(list(place)).view(x.shape) for place, x in zip(places, before, strict=True)]
    assert_same_bits(found, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_somebody_holds_is_not_overwritten(backend):
    net = make_net()
    opt = SASSHA(net.parameters(), rho=0.1, backend=backend)
    make_loss(net)().backward()
    held = [p.grad for p in net.parameters()]
    copies = [g.clone() for g in held]
    opt.perturb_weights()
    assert_same_bits(held, copies)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_share_a_buffer_destroy_nothing(backend):
    """In x + pos + typ.unsqueeze(0) autograd gives two parameters one buffer, and neither gradient is a view."""
    torch.manual_seed(0)
    x, pos, typ = params = [torch.nn.Parameter(torch.randn(s)) for s in ((1, 5, 7), (1, 5, 7), (5, 7))]
    before = [p.detach().clone() for p in params]
    opt = SASSHA(params, rho=0.5, backend=backend)
    (x + pos + typ.unsqueeze(0)).sin().sum().backward()
    assert pos.grad.data_ptr() == typ.grad.data_ptr()
    assert not pos.grad._is_view()
    assert not typ.grad._is_view()
    opt.perturb_weights()
    assert not same_bits(x, before[0])
    opt.unperturb()
    assert_same_bits([p.detach() for p in params], before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_are_views_of_one_bucket_survive(backend):
    bucket = torch.randn(30)
    params = [torch.nn.Parameter(torch.randn(10)) for _ in range(3)]
    before = [p.detach().clone() for p in params]
    for i, p in enumerate(params):
        p.grad = bucket[10 * i : 10 * (i + 1)]
    kept = bucket.clone()
    opt = SASSHA(params, rho=0.5, backend=backend)
    opt.perturb_weights()
    assert same_bits(bucket, kept)
    opt.unperturb()
    assert_same_bits([p.detach() for p in params], before)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_the_calls_does_not_touch_the_backup(set_to_none):
    net = make_net()
    before = snapshot(net)
    opt = SASSHA(net.parameters(), rho=0.5)
    make_loss(net)().backward()
    opt.perturb_weights()
    opt.zero_grad(set_to_none=set_to_none)
    opt.unperturb()
    assert_same_bits(snapshot(net), before)


def test_zero_grad_false_keeps_the_first_gradient():
    net = make_net()
    opt = SASSHA(net.parameters(), rho=0.5)
    make_loss(net)().backward()
    grads = [p.grad.clone() for p in net.parameters()]
    opt.perturb_weights(zero_grad=False)
    assert_same_bits([p.grad for p in net.parameters()], grads)


def test_gradients_are_cut_off_their_graph_so_that_nothing_leaks():
    net = make_net()
    opt = SASSHA(net.parameters(), rho=0.05)
    loss = make_loss(net)
    loss().backward()
    opt.perturb_weights()
    second = loss()
    second.backward(create_graph=True)
    graph = weakref.ref(second)
    opt.unperturb()
    assert not any(p.grad.requires_grad for p in net.parameters())
    opt.step()
    gc.disable()
    try:
        del second
        assert graph() is None
    finally:
        gc.enable()


def test_backward_through_moved_weights_is_an_error():
    net = make_net()
    opt = SASSHA(net.parameters(), rho=0.5)
    loss = make_loss(net)
    loss().backward()
    opt.perturb_weights()
    pending = loss()
    opt.unperturb()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pending.backward()


def test_autocast_sees_the_perturbed_weights():
    p = torch.nn.Parameter(torch.ones(4, 4))
    opt = SASSHA([p], rho=1.0)
    x = torch.ones(1, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = torch.nn.functional.linear(x, p)
        first.float().sum().backward()
        opt.perturb_weights()
        assert not torch.equal(torch.nn.functional.linear(x, p), first)
        opt.unperturb()
        assert torch.equal(torch.nn.functional.linear(x, p), first)


def test_weights_given_new_memory_between_the_calls_are_restored_there():
    net = make_net()
    before = snapshot(net)
    opt = SASSHA(net.parameters(), rho=0.5)
    make_loss(net)().backward()
    opt.perturb_weights()
    for p in net.parameters():
        p.data = p.data.clone()
    opt.unperturb()
    assert_same_bits(snapshot(net), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_given_new_memory_between_steps_go_on_as_if_nothing_happened(backend):
    results = []
    for moves in (False, True):
        net = make_net()
        opt = SASSHA(net.parameters(), lr=0.03, rho=0.05, backend=backend)
        train(net, opt, 5)
        if moves:
            for p in net.parameters():
                p.data = p.data.clone()
        train(net, opt, 8)
        results.append(snapshot(net))
    assert_same_bits(*results)


def test_step_without_ascent_equals_rho_zero():
    results = []
    for ascends in (True, False):
        net = make_net()
        opt = SASSHA(net.parameters(), lr=0.03, rho=0.0)
        loss = make_loss(net)
        for _ in range(12):
            if ascends:
                three_calls(opt, loss)
            else:
                loss().backward(create_graph=opt.hessian_due)
                opt.step()
                opt.zero_grad()
        results.append(snapshot(net))
    assert_same_bits(*results)


def test_maximize_climbs_as_minimize_of_the_negative_descends():
    results = []
    for maximize in (True, False):
        net = make_net(torch.float64)
        opt = SASSHA(net.parameters(), lr=0.03, rho=0.05, weight_decay=0.01, maximize=maximize)
        loss = make_loss(net, torch.float64)
        objective = (lambda loss=loss: -loss()) if maximize else loss
        for _ in range(12):
            three_calls(opt, objective)
        results.append(snapshot(net))
    assert_same_bits(*results)
