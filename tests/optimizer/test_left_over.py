"""Nothing is left over of a step that somebody skipped, or that an exception ended."""

import copy
import sys

import pytest
import torch
from test_kept_tensors import loss_of, make_net, step
from training import assert_same_bits, snapshot

from sassha_fast import GSASSHA, MSASSHA, SASSHA, AdaHessian, SophiaH
from sassha_fast._core import step as step_module


@pytest.mark.parametrize("op", ["_foreach_div", "_foreach_sub_", "_foreach_copy_"])
@pytest.mark.parametrize("method", [SASSHA, AdaHessian, MSASSHA])
def test_foreach_an_exception_within_the_update_leaves_weights_and_state(method, op, monkeypatch):
    net = make_net()
    opt = method(net.parameters(), lr=0.05, backend="foreach", lazy_hessian=1)
    step(opt, net)
    loss_of(net).backward(create_graph=True)
    before, state = snapshot(net), copy.deepcopy(opt.state_dict()["state"])

    def out_of_memory(*args, **kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch, op, out_of_memory)
        with pytest.raises(MemoryError):
            opt.step()
    assert_same_bits(snapshot(net), before)
    now = opt.state_dict()["state"]
    for i, entry in state.items():
        for key in ("exp_avg", "exp_hessian_diag"):
            assert_same_bits([now[i][key]], [entry[key]])


@pytest.mark.parametrize("method", [AdaHessian, SophiaH, MSASSHA])
def test_a_step_whose_gradients_were_zeroed_by_the_model_is_given_up(method):
    net = make_net()
    opt = method(net.parameters(), lr=0.05, lazy_hessian=10)
    step(opt, net)
    loss_of(net).backward()
    opt.take_products()
    skipped = opt._current()
    assert not skipped.is_stale
    net.zero_grad()
    loss_of(net).backward()
    assert skipped.is_stale
    opt.step()
    assert opt._current() is None


def test_gradients_that_were_replaced_by_others_of_the_same_pass_are_those_of_the_step():
    found = []
    for replaces in (False, True):
        net = make_net()
        opt = AdaHessian(net.parameters(), lr=0.05)
        for _ in range(2):
            loss_of(net).backward(create_graph=opt.hessian_due)
            opt.take_products()
            for p in net.parameters():
                if replaces:
                    p.grad = p.grad * 0.5
                else:
                    p.grad.mul_(0.5)
            opt.step()
            opt.zero_grad()
        found.append(snapshot(net))
    assert_same_bits(*found)


@pytest.mark.parametrize("method", [SASSHA, GSASSHA, MSASSHA, AdaHessian, SophiaH])
def test_gradients_that_were_replaced_are_those_of_the_step_whatever_autograd_did_in_between(method):
    found = []
    for between in (None, "metric", "another model"):
        net, other = make_net(), make_net()
        climbs = issubclass(method, SASSHA)
        opt = method(net.parameters(), lr=0.05, lazy_hessian=2, **({"rho": 0.05} if climbs else {}))
        for _ in range(4):
            loss_of(net).backward(create_graph=opt.hessian_due and not climbs)
            if climbs:
                opt.perturb_weights()
                loss_of(net).backward(create_graph=opt.hessian_due)
                opt.unperturb()
            else:
                opt.take_products()
            if between == "metric":
                loss_of(net).mul(2)
            elif between is not None:
                loss_of(other).backward()
            for p in net.parameters():
                p.grad = p.grad.clamp(-0.01, 0.01)
            assert not opt._current().is_stale
            opt.step()
            opt.zero_grad()
        found.append(snapshot(net))
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])


def test_a_new_pass_that_reaches_other_parameters_is_noticed():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    opt = AdaHessian(params, lr=0.05, lazy_hessian=10)
    for _ in range(2):
        sum((p**3).sum() for p in params).backward(create_graph=opt.hessian_due)
        opt.take_products()
        skipped = opt._current()
        for p in params:
            p.grad = None
        (params[1] ** 3).sum().backward(create_graph=opt.hessian_due)
        assert skipped.is_stale
        opt.step()
        opt.zero_grad()


def test_nothing_stays_at_the_parameters_after_a_step_that_was_taken_or_given_up():
    net = make_net()
    opt = AdaHessian(net.parameters(), lr=0.05, lazy_hessian=10)
    for _ in range(2):
        loss_of(net).backward(create_graph=opt.hessian_due)
        opt.take_products()
        copy.deepcopy(net)
        opt.step()
        assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
        opt.zero_grad()
        loss_of(net).backward(create_graph=opt.hessian_due)
        opt.take_products()
        opt.zero_grad()
        assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_that_raises_leaves_nothing_of_a_call_of_gradscaler(register):
    net = make_net()
    opt = AdaHessian(net.parameters(), lr=0.05, lazy_hessian=100)
    step(opt, net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def hook(*args):
        raise KeyboardInterrupt

    getattr(opt, register)(hook)
    scaler.scale(loss_of(net)).backward()
    with pytest.raises(KeyboardInterrupt):
        scaler.step(opt)
    assert not hasattr(opt, "grad_scale")
    assert not hasattr(opt, "found_inf")


@pytest.mark.parametrize("options", [{"alpha": 0.1}, {"hvp": "finite_difference", "alpha": 0.0}])
def test_gradients_that_were_unscaled_before_they_are_compared_are_refused(options):
    net = make_net()
    opt = GSASSHA(net.parameters(), lr=0.05, rho=0.05, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = snapshot(net)
    scaler.scale(loss_of(net)).backward()
    opt.perturb_weights()
    scaler.scale(loss_of(net)).backward(create_graph=opt.hvp == "exact")
    for _ in range(opt.probes_due):
        opt.probe_weights()
        scaler.scale(loss_of(net)).backward()
    scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match=r"call scaler.unscale_\(opt\) after unperturb\(\)"):
        opt.unperturb(scaler=scaler)
    assert_same_bits(snapshot(net), before)


def test_a_step_that_no_closure_drives_any_more_blocks_no_call():
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.05, rho=0.1)
    kept = []

    def closure():
        opt.zero_grad()
        loss = loss_of(net)
        loss.backward()
        kept[:] = [opt._step]
        return loss

    opt.step(closure)
    left = type(kept[0])(opt.parts, driven=True)  # as two interrupts leave it
    opt._step = left
    opt.step(closure)
    assert kept[0] is not left


@pytest.mark.parametrize("call", ["take_products", "step"])
def test_an_interrupt_at_any_line_leaves_nothing_at_the_parameters(call):
    net, source, stopped = make_net(), step_module.__file__, set()

    def tracer(frame, event, arg):
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and line[0] == source and line not in stopped:
            stopped.add(line)
            sys.settrace(None)
            raise KeyboardInterrupt
        return tracer

    theirs = []
    net[0].weight.register_post_accumulate_grad_hook(theirs.append)
    for _ in range(1000):
        opt = AdaHessian(net.parameters(), lr=0.05)
        loss_of(net).backward(create_graph=True)
        if call == "step":
            opt.take_products()
        before = len(stopped)
        sys.settrace(tracer)
        try:
            getattr(opt, call)()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        opt.zero_grad()
        hooks = [len(p._post_accumulate_grad_hooks or ()) for p in net.parameters()]
        assert hooks == [1, *[0] * (len(hooks) - 1)], max(stopped)
        if len(stopped) == before:
            break
    assert len(stopped) > 20
    loss_of(net).backward()
    assert theirs


def test_nothing_stays_at_the_parameters_after_a_step_that_another_call_gave_up():
    net = make_net()
    opt = AdaHessian(net.parameters(), lr=0.05)
    loss_of(net).backward(create_graph=True)
    opt.take_products()
    opt.load_state_dict(opt.state_dict())
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
