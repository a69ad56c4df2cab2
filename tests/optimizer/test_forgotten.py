"""What a loop forgot is said: a backward pass, a graph, and products that another call has given up."""

import copy
import warnings

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from training import assert_same_bits, closure_of, make_loss, make_net, snapshot, three_calls

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH

METHODS = {
    "SASSHA": lambda p, **given: SASSHA(p, rho=0.05, **given),
    "no_radius": lambda p, **given: SASSHA(p, rho=0.0, **given),
    **{cls.__name__: cls for cls in (GSASSHA, MSASSHA, AdaHessian, SophiaH)},
    "SAM": lambda p, **given: SAM(p, SGD, **given),
    "SAM_no_radius": lambda p, **given: SAM(p, SGD, rho=0.0, **given),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_closure_without_a_backward_pass_is_told(method):
    net = make_net()
    opt, loss = METHODS[method](net.parameters(), lr=0.01), make_loss(net)
    before = snapshot(net)
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        opt.step(loss)
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        opt.step([loss, loss])
    assert_same_bits(snapshot(net), before)
    assert not any(opt.state.values())
    opt.step(closure_of(opt, loss))


@pytest.mark.parametrize("method", [MSASSHA, AdaHessian, SophiaH])
def test_a_first_step_of_lr_0_without_a_graph_is_told(method):
    net = make_net()
    opt = method(net.parameters(), lr=0.0)
    make_loss(net)().backward()
    with pytest.raises(RuntimeError, match="no gradient has a graph to differentiate"):
        opt.step()


# ---- products that were given up ----------------------------------------------------------------------------------


def add_group(opt):
    opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


def load(opt):
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


CALLS = {"add_param_group": add_group, "load_state_dict": load}


def two_passes(opt, loss):
    """All of a step but its end."""
    loss().backward()
    opt.perturb_weights()
    loss().backward(create_graph=opt.hessian_due)
    opt.unperturb()


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_gives_up_products_is_named_and_the_step_can_begin_again(call):
    net = make_net()
    opt, loss = SASSHA(net.parameters(), lr=0.01, rho=0.05), make_loss(net)
    two_passes(opt, loss)
    CALLS[call](opt)
    before = snapshot(net)
    for _ in range(2):  # and no word of rho
        with pytest.raises(RuntimeError, match=rf"^SASSHA\.step: {call}\(\) came between unperturb\(\) and step\(\)"):
            opt.step()
    assert_same_bits(snapshot(net), before)
    opt.zero_grad()
    three_calls(opt, loss)
    assert all(opt.state[p]["step"] == 1 for p in net.parameters())


@pytest.mark.parametrize("call", CALLS)
def test_between_refreshes_nothing_is_lost_by_such_a_call(call):
    nets = make_net(), make_net()
    for net, other in zip(nets, (None, CALLS[call]), strict=True):
        opt, loss = SASSHA(net.parameters(), lr=0.01, rho=0.05, lazy_hessian=2), make_loss(net)
        three_calls(opt, loss)
        two_passes(opt, loss)
        if other is not None:
            other(opt)
        opt.step()
    assert_same_bits(snapshot(nets[0]), snapshot(nets[1]))


@pytest.mark.parametrize("call", CALLS)
def test_a_new_pass_with_a_graph_after_such_a_call_is_a_step_of_its_own(call):
    net = make_net()
    opt, loss = AdaHessian(net.parameters(), lr=0.01), make_loss(net)
    loss().backward(create_graph=True)
    opt.take_products()
    CALLS[call](opt)
    net.zero_grad()
    loss().backward(create_graph=True)
    opt.step()
    assert all(opt.state[p]["step"] == 1 for p in net.parameters())


# ---- where a warning points ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_without_its_ascent_is_warned_of_at_the_line_that_took_it(scheduled):
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.01, rho=0.05)
    if scheduled:
        StepLR(opt, 2)  # which wraps step()
    make_loss(net)().backward(create_graph=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        opt.step()
    assert [w.filename for w in seen if "rho is 0.05" in str(w.message)] == [__file__]
