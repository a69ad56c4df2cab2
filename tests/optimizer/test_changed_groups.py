"""Hyperparameters that are written into ``param_groups`` after construction are held to what constructors take."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD
from training import assert_same_bits, assert_same_state, snapshot

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH
from sassha_fast._core import options

FAMILY = (SASSHA, GSASSHA, MSASSHA, AdaHessian, SophiaH)
BAD = [
    ("lr", None),
    ("lr", "x"),
    ("lr", -1.0),
    ("lr", math.nan),
    ("lr", torch.tensor(math.nan)),
    ("betas", (0.9,)),
    ("betas", None),
    ("betas", (0.9, 1.0)),
    ("weight_decay", math.nan),
    ("hessian_power", math.nan),
    ("rho", math.nan),
    ("rho", None),
    ("perturb_eps", None),
    ("eps", "x"),
    ("maximize", 2),
    ("sign", 0),
    ("alpha", -1.0),
    ("clip_threshold", 0.0),
]
CASES = [(method, key, value) for method in FAMILY for key, value in BAD]
CASES += [(SAM, key, value) for key, value in BAD if key in ("rho", "perturb_eps", "alpha")]


def make(method, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    base = {"base_optimizer": SGD, "lr": 0.05} if method is SAM else {"lr": 0.05}
    opt = method([{"params": net[0].parameters()}, {"params": net[2].parameters()}], **base, **options)
    return net, opt


def closure_for(net, opt):
    x = torch.linspace(-1.0, 1.0, 15).view(5, 3)

    def closure():
        opt.zero_grad()
        loss = net(x).square().sum()
        opt.backward(loss)
        return loss

    return closure


def state_of(net, opt):
    return [copy.deepcopy(dict(opt.state.get(p, {}))) for p in net.parameters()]


@pytest.mark.filterwarnings("ignore:.*the weights were not perturbed")
@pytest.mark.parametrize("way", ["closure", "calls"])
@pytest.mark.parametrize(("method", "key", "value"), CASES)
def test_a_bad_value_is_refused_by_name_and_group_before_anything_changes(method, key, value, way):
    net, opt = make(method)
    if key not in opt.defaults:
        pytest.skip(f"{method.__name__} has no {key}")
    closure = closure_for(net, opt)
    opt.step(closure)
    good, calls = opt.param_groups[1][key], [0]

    def counted():
        calls[0] += 1
        return closure()

    if way == "calls":
        closure()
    before, state = snapshot(net), state_of(net, opt)
    opt.param_groups[1][key] = value
    names = ["step", *(["perturb_weights"] if way == "calls" and method in (SASSHA, GSASSHA, SAM) else [])]
    for name in names:
        with pytest.raises(ValueError, match=rf"^{method.__name__}: group 1: {key}.* is .*, expected"):
            getattr(opt, name)(*([counted] if way == "closure" else []))
    assert calls == [0]
    assert_same_bits(snapshot(net), before)
    assert_same_state(state_of(net, opt), state)
    opt.state_dict()
    opt.param_groups[1][key] = good
    opt.step(closure)
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("method", FAMILY)
def test_a_value_that_a_closure_writes_is_refused_too_and_nothing_moves(method):
    net, opt = make(method)
    closure = closure_for(net, opt)
    opt.step(closure)
    before, state = snapshot(net), state_of(net, opt)

    def writing():
        opt.param_groups[0]["betas"] = (0.9,)
        return closure()

    with pytest.raises(ValueError, match=rf"^{method.__name__}: group 0: betas is \(0.9,\), expected two numbers"):
        opt.step(writing)
    assert_same_bits(snapshot(net), before)
    assert_same_state(state_of(net, opt), state)


def test_alpha_is_looked_at_again_before_the_descent_is_made_of_two_gradients():
    net, opt = make(GSASSHA, rho=0.1)
    closure = closure_for(net, opt)
    opt.step(closure)
    closure()
    before = snapshot(net)
    opt.perturb_weights()
    closure()
    opt.param_groups[0]["alpha"] = None
    with pytest.raises(ValueError, match=r"^GSASSHA: group 0: alpha is None"):
        opt.unperturb()
    assert_same_bits(snapshot(net), before)


def test_values_that_change_in_place_are_looked_at_again():
    net, opt = make(SASSHA, rho=0.0)
    closure = closure_for(net, opt)
    lr, betas = torch.tensor(0.05), [0.9, 0.999]
    opt.param_groups[0].update(lr=lr, betas=betas)
    opt.step(closure)
    lr.fill_(math.inf)
    with pytest.raises(ValueError, match=r"^SASSHA: group 0: lr is tensor"):
        opt.step(closure)
    lr.fill_(0.05)
    betas[1] = 1.0
    with pytest.raises(
        ValueError, match=r"^SASSHA: group 0: betas\[1\] is 1.0, expected a finite number from 0 below 1"
    ):
        opt.step(closure)
    betas[1] = 0.99
    opt.step(closure)


def test_a_hyperparameter_that_was_taken_out_is_missed_by_name():
    net, opt = make(SASSHA, rho=0.0)
    closure = closure_for(net, opt)
    opt.step(closure)
    del opt.param_groups[1]["eps"]
    with pytest.raises(ValueError, match=r"^SASSHA: group 1 has no 'eps'"):
        opt.step(closure)


def test_a_schedule_that_ends_a_rounding_error_below_0_ends_at_0():
    net, opt = make(SASSHA, rho=0.0, lazy_hessian=100)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 0.3, 0.0, 3)
    closure = closure_for(net, opt)
    for _ in range(3):
        opt.step(closure)
        schedule.step()
    opt.step(closure)
    assert -1e-15 < opt.param_groups[0]["lr"] < 0.0
    saved = opt.state_dict()
    make(SASSHA, rho=0.0, lazy_hessian=100)[1].load_state_dict(saved)


@pytest.mark.parametrize("backend", ["cpu", "foreach", "reference"])
def test_a_learning_rate_beyond_float32_is_infinite_on_every_backend(backend):
    model = nn.Linear(3, 2)
    opt = SASSHA(model.parameters(), lr=0.1, rho=0.05, backend=backend)
    x = torch.ones(4, 3)

    def closure():
        opt.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    opt.param_groups[0]["lr"] = 1e300
    opt.step(closure)
    assert not any(p.isfinite().any() for p in model.parameters())


def test_values_that_stay_are_not_checked_again(monkeypatch):
    net, opt = make(SASSHA, rho=0.05)
    closure = closure_for(net, opt)
    opt.step(closure)
    looked = []
    for key, (default, check) in options.HYPERPARAMETERS.items():

        def noting(*given, key=key, check=check):
            looked.append(key)
            check(*given)

        monkeypatch.setitem(options.HYPERPARAMETERS, key, (default, noting))
    opt.step(closure)
    assert looked == []
    opt.param_groups[1]["lr"] = 0.04
    opt.step(closure)
    assert looked == ["lr"]


# ---- parameters that come, go and change places within a step -----------------------------------------------------


def swap(opt, spare):
    first, second = (group["params"] for group in opt.param_groups)
    first[0], second[0] = second[0], first[0]


def take_out(opt, spare):
    opt.param_groups[0]["params"].pop(0)


def put_in(opt, spare):
    opt.param_groups[0]["params"].append(spare)


def move(opt, spare):
    """To the next group, which leaves the order as it is."""
    first, second = (group["params"] for group in opt.param_groups)
    second.insert(0, first.pop())


def up_to_the_step(net, opt, spare):
    def loss():
        x = torch.linspace(-1.0, 1.0, 15).view(5, 3)
        return net(x).square().mean() + (spare**2).sum()

    climbs = isinstance(opt, SASSHA)
    loss().backward(create_graph=opt.hessian_due and not climbs)
    if climbs:
        opt.perturb_weights()
        loss().backward(create_graph=opt.hessian_due)
        opt.unperturb()
    else:
        opt.take_products()


@pytest.mark.parametrize("edit", [swap, take_out, put_in])
@pytest.mark.parametrize("method", FAMILY)
def test_products_are_not_given_to_parameters_that_took_others_places(method, edit):
    net, opt = make(method, lazy_hessian=2)
    spare = nn.Parameter(torch.ones(2))
    up_to_the_step(net, opt, spare)
    edit(opt, spare)
    before = snapshot(net)
    message = rf"^{method.__name__}\.step: param_groups changed within a step, .*zero_grad"
    with pytest.raises(RuntimeError, match=message):
        opt.step()
    assert_same_bits(snapshot(net), before)
    assert not any(opt.state.values())
    for _ in range(2):
        net.zero_grad()
        spare.grad = None
        up_to_the_step(net, opt, spare)
        opt.step()
    net.zero_grad()
    spare.grad = None
    up_to_the_step(net, opt, spare)  # of the refresh after, which ends as a step begun with these groups does
    opt.step()


@pytest.mark.parametrize("method", FAMILY)
def test_a_parameter_that_changes_its_group_within_a_step_takes_its_product_with_it(method):
    found = []
    for edits in (False, True):
        net, opt = make(method)
        spare = nn.Parameter(torch.ones(2))
        up_to_the_step(net, opt, spare)
        if edits:
            move(opt, spare)
        opt.step()
        found.append(snapshot(net))
    assert_same_bits(*found)
