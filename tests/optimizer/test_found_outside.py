"""What code of other people found: memory, scales, hooks, interrupts and copies that nobody here had thought of."""

import contextlib
import copy
import functools
import sys

import pytest
import torch
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training import assert_same_bits, closure_of, make_loss, make_net, snapshot

import sassha_fast
from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, SophiaH

PLAIN = ("cpu", "foreach", "reference")


def batch():
    torch.manual_seed(0)
    return torch.randn(8, 4), torch.randint(0, 2, (8,))


def classifier():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


# ---- loss scales --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [SASSHA, lambda params, **kw: SAM(params, torch.optim.SGD, **kw)])
def test_gradients_unscaled_before_the_ascent_are_refused_and_x_is_back(make):
    net, (x, y) = classifier(), batch()
    opt, scaler = make(net.parameters(), lr=0.05, rho=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = snapshot(net)
    scaler.scale(F.cross_entropy(net(x), y)).backward()
    scaler.unscale_(opt)
    opt.perturb_weights()
    scaler.scale(F.cross_entropy(net(x), y)).backward(create_graph=opt.hessian_due)
    with pytest.raises(RuntimeError, match=r"unscaled the gradients of the first pass.*after unperturb\(\)"):
        opt.unperturb(scaler=scaler)
    assert all(map(torch.equal, snapshot(net), before))


@pytest.mark.parametrize("make", [SASSHA, lambda params, **kw: SAM(params, torch.optim.SGD, **kw)])
def test_gradients_unscaled_before_the_ascent_are_refused_by_a_step_that_was_told_of_no_scaler_before(make):
    net, (x, y) = classifier(), batch()
    opt, scaler = make(net.parameters(), lr=0.05, rho=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loop(unscale_when):
        scaler.scale(F.cross_entropy(net(x), y)).backward()
        if unscale_when == "too early":
            scaler.unscale_(opt)
        opt.perturb_weights()
        is_refresh = opt.hessian_due
        scaler.scale(F.cross_entropy(net(x), y)).backward(create_graph=is_refresh)
        if unscale_when == "early":
            scaler.unscale_(opt)
        opt.unperturb(scaler=scaler) if is_refresh else opt.unperturb()
        if unscale_when == "late":
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    for unscale_when in ("never", "early", "late"):
        loop(unscale_when)
    before = snapshot(net)
    with pytest.raises(RuntimeError, match=r"\.step: GradScaler has unscaled the gradients of the first pass"):
        loop("too early")
    assert all(map(torch.equal, snapshot(net), before))


def test_gradients_unscaled_before_unperturb_are_taken_as_they_are():
    found = []
    for unscale_first in (True, False):
        net, (x, y) = classifier(), batch()
        opt, scaler = SASSHA(net.parameters(), lr=0.05, rho=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(F.cross_entropy(net(x), y)).backward()
        opt.perturb_weights()
        scaler.scale(F.cross_entropy(net(x), y)).backward(create_graph=opt.hessian_due)
        if unscale_first:
            scaler.unscale_(opt)
            opt.unperturb(scaler=scaler)
        else:
            opt.unperturb(scaler=scaler)
            scaler.unscale_(opt)
        scaler.step(opt)
        found.append(snapshot(net))
    assert all(map(torch.equal, *found))


def test_a_global_hook_that_raises_leaves_nothing_of_a_scaler():
    net, (x, y) = classifier(), batch()
    opt, scaler = SophiaH(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def refuse(*_):
        raise ValueError("not now")

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        scaler.scale(F.cross_entropy(net(x), y)).backward(create_graph=True)
        with pytest.raises(ValueError, match="not now"):
            scaler.step(opt)
    finally:
        handle.remove()
    assert not {"grad_scale", "found_inf"} & set(vars(opt))


# ---- gradients in memory of somebody else -------------------------------------------------------------------------


def by_numpy(p, buffer):
    buffer.copy_(2 * p.detach())
    p.grad = torch.from_numpy(buffer.numpy())


def by_view(p, buffer):
    buffer.copy_(2 * p.detach())
    p.grad = buffer.view(3)


@pytest.mark.parametrize("fill", [by_numpy, by_view])
@pytest.mark.parametrize("options", [{}, {"hvp": "finite_difference"}])
def test_gradients_in_memory_that_is_used_again_are_equal_on_all_backends(fill, options):
    pytest.importorskip("numpy")
    found = []
    for backend in PLAIN:
        p, buffer = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0])), torch.zeros(3)
        arguments = {"lr": 0.1, "rho": 0.05, "backend": backend, **options}
        opt = SASSHA([p], **arguments) if options else SAM([p], torch.optim.SGD, **arguments)

        def closure(p=p, buffer=buffer):
            fill(p, buffer)
            return float((p.detach() ** 2).sum())

        for _ in range(3):
            opt.step(closure)
        found.append(p.detach().clone())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])
    assert (found[0] < torch.tensor([1.0, 2.0, 3.0])).all()  # it went down


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("begins", [0, 1, 2])
@pytest.mark.parametrize("fill", [by_numpy, by_view])
def test_gradients_may_become_views_of_the_users_memory_at_any_step(fill, begins, backend):
    pytest.importorskip("numpy")
    p, buffer = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0])), torch.zeros(3)
    opt = SASSHA([p], lr=0.1, rho=0.05, backend=backend)
    for t in range(4):
        (p**2).sum().backward()
        if t >= begins:
            fill(p, buffer)
        x = p.detach().clone()
        opt.perturb_weights()
        assert not torch.equal(p, x)
        buffer.zero_()
        (p**2).sum().backward(create_graph=opt.hessian_due)
        opt.unperturb()
        assert torch.equal(p, x)
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("look", [torch.Tensor.detach, lambda g: g.view(-1), lambda g: g.numpy()])
def test_a_view_that_somebody_keeps_of_a_gradient_goes_on_showing_the_gradient(look, backend):
    pytest.importorskip("numpy")
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    opt = SASSHA([p], lr=0.1, rho=0.05, backend=backend)
    for t in range(3):
        (p**2).sum().backward()
        kept, expected = look(p.grad) if t else None, p.grad.tolist()
        opt.perturb_weights()
        assert kept is None or kept.tolist() == expected
        (p**2).sum().backward(create_graph=opt.hessian_due)
        opt.unperturb()
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("backend", PLAIN)
def test_two_gradients_may_become_views_of_one_tensor_at_any_step(backend):
    params = [torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]) * i) for i in (1, 2)]
    opt = SASSHA(params, lr=0.1, rho=0.05, backend=backend)
    for t in range(3):
        sum((p**3).sum() for p in params).backward()
        if t > 0:
            mean = (params[0].grad + params[1].grad) / 2
            for p in params:
                p.grad = mean.view(3)
            del mean
        before = [p.detach().clone() for p in params]
        opt.perturb_weights()
        sum((p**3).sum() for p in params).backward(create_graph=opt.hessian_due)
        opt.unperturb()
        assert all(map(torch.equal, params, before))
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("backend", PLAIN)
def test_a_gradient_that_is_the_parameter_itself_does_not_lose_x(backend):
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    opt = SAM([p], torch.optim.SGD, lr=0.1, rho=0.05, backend=backend)
    p.grad = p.data
    opt.perturb_weights()
    assert (p.data > torch.tensor([1.0, 2.0, 3.0])).all()
    p.grad = p.data.clone()
    opt.unperturb()
    assert p.tolist() == [1.0, 2.0, 3.0]


# ---- interrupts ---------------------------------------------------------------------------------------------------


def interrupted_in(name, work):
    """Raises KeyboardInterrupt at the first line of a function, and tells whether it came."""
    came = []

    def local(frame, event, argument):
        sys.settrace(None)
        came.append(1)
        raise KeyboardInterrupt

    sys.settrace(lambda frame, event, argument: local if frame.f_code.co_name == name else None)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        sys.settrace(None)
    assert came


@pytest.mark.parametrize("backend", PLAIN)
def test_an_interrupt_after_gradients_were_let_go_finishes_the_step(backend):
    net, other = make_net(), make_net()
    opt, expected = (SASSHA(n.parameters(), lr=0.05, rho=0.05, backend=backend) for n in (net, other))
    interrupted_in("write_schedules", lambda: opt.step(closure_of(opt, make_loss(net))))
    expected.step(closure_of(expected, make_loss(other)))
    for _ in range(2):
        assert all(map(torch.equal, snapshot(net), snapshot(other)))
        assert [e["step"] for e in opt.state.values()] == [e["step"] for e in expected.state.values()]
        opt.step(closure_of(opt, make_loss(net)))
        expected.step(closure_of(expected, make_loss(other)))


def test_an_interrupt_as_a_graph_is_asked_for_leaves_torch_as_it_was():
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.01, rho=0.05)
    seen = []

    def trace(frame, event, argument):
        manager = frame.f_locals.get("cm")
        is_ours = frame.f_code is contextlib.ExitStack._push_cm_exit.__code__
        if is_ours and type(manager).__name__ == "CreateGraph":
            sys.settrace(None)
            seen.append(1)
            raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            opt.step(closure_of(opt, make_loss(net)))
    finally:
        sys.settrace(None)
    assert seen
    assert torch._C._len_torch_function_stack() == 0
    w = torch.ones(2, requires_grad=True)
    (w**3).sum().backward()
    assert not w.grad.requires_grad


@pytest.mark.parametrize("line", range(0, 24, 3))
def test_suggest_puts_all_back_if_it_is_interrupted_on_the_way_back(line):
    net, (x, y) = classifier(), batch()
    before, count = snapshot(net), [0]

    def closure():
        net.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    def local(frame, event, argument):
        count[0] += event == "line"
        if count[0] == line + 1:
            sys.settrace(None)
            raise KeyboardInterrupt
        return local

    sys.settrace(lambda frame, event, argument: local if frame.f_code.co_name == "put_back" else None)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            sassha_fast.suggest(net, closure, steps=1)
    finally:
        sys.settrace(None)
    assert all(map(torch.equal, snapshot(net), before))
    assert all(p.grad is None for p in net.parameters())


# ---- M-SASSHA -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["checkpoint", "copy"])
def test_weights_set_right_after_a_checkpoint_or_a_copy_are_not_lost_in_silence(way):
    net = make_net()
    opt = MSASSHA(net.parameters(), lr=0.05, rho=0.05)
    for _ in range(3):
        opt.step(closure_of(opt, make_loss(net)))
    if way == "copy":
        other, another = copy.deepcopy((net, opt))
    else:
        other = make_net()
        another = MSASSHA(other.parameters(), lr=0.05, rho=0.05)
        another.load_state_dict(copy.deepcopy(opt.state_dict()))
    other.load_state_dict(net.state_dict())  # x + ε again, as in a checkpoint of both
    another.step(closure_of(another, make_loss(other)))
    opt.step(closure_of(opt, make_loss(net)))
    assert all(map(torch.equal, snapshot(net), snapshot(other)))
    if way == "copy":
        other, another = copy.deepcopy((net, opt))
    else:
        another.load_state_dict(copy.deepcopy(opt.state_dict()))
    with torch.no_grad():
        next(other.parameters()).fill_(7.0)
    with pytest.raises(RuntimeError, match="changed in place while holding"):
        another.step(closure_of(another, make_loss(other)))


# ---- closures and classes of others -------------------------------------------------------------------------------


def test_a_closure_may_return_a_sum_that_it_fills_again():
    net, (x, y) = classifier(), batch()
    opt, total = SASSHA(net.parameters(), lr=0.01, rho=0.5), torch.zeros(())
    expected = F.cross_entropy(net(x), y).item()

    def closure():
        opt.zero_grad()
        total.zero_()
        for i in range(2):
            loss = F.cross_entropy(net(x[i::2]), y[i::2]) / 2
            loss.backward()
            total.add_(loss.detach())
        return total

    assert opt.step(closure).item() == pytest.approx(expected, rel=1e-5)
    assert opt.stats.ascent_gap > 0


@pytest.mark.parametrize("arguments", [{"retain_graph": False}, (None, False, False)])
def test_a_closure_may_say_that_it_keeps_no_graph(arguments):
    net = make_net()
    loss, opt = make_loss(net), SASSHA(net.parameters(), lr=0.01, rho=0.05)

    def backward(value):
        value.backward(**arguments) if isinstance(arguments, dict) else value.backward(*arguments)

    opt.step(closure_of(opt, loss, backward))
    assert opt.stats.refreshes == 1


class Wrapped(SASSHA):
    """Somebody's class that keeps the signature of ours."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.extra = 3

    @functools.wraps(SASSHA.step)
    def step(self, *args, **kwargs):
        assert self.extra == 3
        return super().step(*args, **kwargs)


def test_hooks_run_once_around_a_step_that_wraps_ours():
    net, seen = make_net(), []
    opt = Wrapped(net.parameters(), lr=0.01)
    opt.register_step_pre_hook(lambda *_: seen.append("before"))
    opt.register_step_post_hook(lambda *_: seen.append("after"))
    opt.step(closure_of(opt, make_loss(net)))
    assert seen == ["before", "after"]


def test_suggest_takes_an_optimizer_of_a_class_with_fields_of_its_own():
    net = make_net()
    opt = Wrapped(net.parameters(), lr=0.01, rho=0.05)
    opt.attach(net)
    assert sassha_fast.suggest(opt, closure_of(opt, make_loss(net)), steps=2).lr > 0


def test_suggest_puts_back_buffers_that_a_forward_pass_replaces():
    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 2)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
            return self.linear(x)

    net, (x, y) = Mean(), batch()
    kept = net.mean

    def closure():
        net.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss

    sassha_fast.suggest(net, closure, steps=2)
    assert net.mean is kept
    assert not net.mean.any()


def test_a_group_without_parameters_is_no_work():
    opt = SASSHA([{"params": []}], lr=0.1)
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("at", ["x", "x + eps"])
def test_a_gradient_that_a_graph_has_saved_stays_what_it_was(at, backend):
    p, weights = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 12)), torch.ones(12, requires_grad=True)
    opt = GSASSHA([p], lr=0.1, rho=0.5, alpha=0.0 if at == "x" else 0.7, backend=backend)
    opt.step(closure_of(opt, lambda: (p**4).sum()))
    opt.zero_grad()
    (p**4).sum().backward()
    if at == "x + eps":
        opt.perturb_weights()
        (p**4).sum().backward()
    kept, saved = p.grad.clone(), (weights * p.grad).sum()
    opt.perturb_weights() if at == "x" else opt.unperturb()
    saved.backward()
    assert_same_bits([weights.grad], [kept])
