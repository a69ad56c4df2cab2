"""What belongs to the user stays what it is: hyperparameters, weights loaded over x + ε, memory given by ``p.data``."""

import collections
import copy

import pytest
import torch
from torch import nn
from training import assert_same_bits, snapshot

from sassha_fast import MSASSHA, SASSHA, AdaHessian, SophiaH

BACKENDS = ("reference", "foreach", "cpu")
INPUTS = torch.linspace(-1.0, 1.0, 64).view(16, 4)


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def loss_of(net):
    return net(INPUTS).square().mean() + net(INPUTS).sin().mean()


def step(opt, net):
    loss_of(net).backward(create_graph=opt.hessian_due)
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("capturable", [False, True])
def test_hyperparameters_that_are_tensors_are_not_changed_by_steps(capturable):
    net = make_net()
    given = {"lr": torch.tensor(0.05), "rho": torch.tensor(0.1), "weight_decay": torch.tensor(0.01)}
    betas, eps = (torch.tensor(0.9), torch.tensor(0.999)), torch.tensor(1e-8)
    kept = copy.deepcopy((given, betas, eps))
    opt = SASSHA(net.parameters(), **given, betas=betas, eps=eps, capturable=capturable)
    for _ in range(3):

        def closure():
            opt.zero_grad()
            loss = loss_of(net)
            loss.backward()
            return loss

        opt.step(closure)
    assert (given, betas, eps) == kept


def test_betas_that_are_tensors_give_the_steps_of_their_values():
    found = []
    for kind in (float, torch.tensor):
        net = make_net()
        opt = AdaHessian(net.parameters(), lr=0.05, betas=(kind(0.5), kind(0.75)))
        for _ in range(4):
            step(opt, net)
        found.append(snapshot(net))
    assert_same_bits(*found)


# ---- M-SASSHA: weights that somebody else wrote over x + ε --------------------------------------------------------


def started(**options):
    net = make_net()
    opt = MSASSHA(net.parameters(), lr=0.05, rho=0.5, **options)
    initial = copy.deepcopy((net.state_dict(), opt.state_dict()))
    for _ in range(3):
        step(opt, net)
    return net, opt, initial


def true_weights(net, opt):
    with opt.true_weights():
        return snapshot(net)


def test_a_checkpoint_without_state_keeps_weights_that_were_loaded_before_it():
    net, opt, (weights, state) = started()
    net.load_state_dict(weights)
    opt.load_state_dict(state)
    assert_same_bits(snapshot(net), list(weights.values()))


def test_a_checkpoint_without_state_shows_x_where_no_weights_were_loaded():
    net, opt, (weights, state) = started()
    x = true_weights(net, opt)
    net[0].load_state_dict({key[2:]: weights[key] for key in ("0.weight", "0.bias")})
    opt.load_state_dict(state)
    assert_same_bits(snapshot(net), [*list(weights.values())[:2], *x[2:]])


def test_a_checkpoint_that_is_refused_leaves_loaded_weights_and_the_step_still_refuses_them():
    net, opt, (weights, state) = started()
    net[0].load_state_dict({key[2:]: weights[key] for key in ("0.weight", "0.bias")})
    before = snapshot(net)
    state["param_groups"][0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr"):
        opt.load_state_dict(state)
    assert_same_bits(snapshot(net), before)
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 and 1 more changed in place while holding"):
        step(opt, net)


@pytest.mark.parametrize(
    "reset", [lambda opt: setattr(opt, "state", collections.defaultdict(dict)), lambda opt: opt.state.clear()]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_was_dropped_by_hand_does_not_take_x_with_it(backend, reset):
    net, opt, _ = started(backend=backend)
    x = true_weights(net, opt)
    reset(opt)
    opt.eval()
    assert_same_bits(snapshot(net), x)
    opt.train()


def test_a_step_after_the_state_was_dropped_goes_on_from_x():
    net, opt, _ = started()
    x = true_weights(net, opt)
    opt.state = collections.defaultdict(dict)
    opt.param_groups[0]["lr"] = 1e-30  # a step that moves nothing
    step(opt, net)
    torch.testing.assert_close(true_weights(net, opt), x, rtol=0, atol=1e-12)


def test_weights_that_were_loaded_before_the_state_was_dropped_are_the_new_x():
    net, opt, (weights, _) = started()
    net.load_state_dict(weights)
    opt.state = collections.defaultdict(dict)
    opt.eval()
    assert_same_bits(snapshot(net), list(weights.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_x_plus_eps_is_derived_bit_for_bit_under_another_default_dtype(dtype):
    net, opt, _ = started()
    before = snapshot(net)
    torch.set_default_dtype(dtype)
    try:
        opt.eval()
        opt.train()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_bits(snapshot(net), before)


# ---- p.data = ... -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_memory_while_at_x_plus_eps_is_refused_and_holds_x(backend):
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.05, rho=0.1, backend=backend)
    before = snapshot(net)
    loss_of(net).backward()
    opt.perturb_weights()
    net[0].bias.data = torch.zeros(6)
    loss_of(net).backward(create_graph=True)
    with pytest.raises(RuntimeError, match=r"parameter 1 of group 0 changed by p.data = ... while holding x \+ ε"):
        opt.unperturb()
    assert_same_bits(snapshot(net), before)


def test_a_closure_that_gives_a_parameter_other_values_by_its_data_is_refused():
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.05, rho=0.1)
    before, passes = snapshot(net), []

    def closure():
        opt.zero_grad()
        loss = loss_of(net)
        loss.backward()
        passes.append(loss)
        if len(passes) == 2:  # at x + ε
            net[0].bias.data = net[0].bias.data + 1
        return loss

    with pytest.raises(RuntimeError, match=r"changed by p\.data"):
        opt.step(closure)
    assert_same_bits(snapshot(net), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_values_by_p_data_between_steps_of_msassha_are_refused(backend):
    net, opt, _ = started(backend=backend)
    net[0].bias.data = torch.zeros(6)
    with pytest.raises(RuntimeError, match=r"parameter 1 of group 0 changed in place while holding x \+ ε"):
        step(opt, net)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_values_elsewhere_between_steps_of_msassha_are_no_change(dtype):
    found = []
    for moves in (False, True):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(5, 3).to(dtype))
        opt = MSASSHA([p], lr=0.05, rho=0.5)
        for _ in range(3):
            (p.float() ** 4).sum().backward(create_graph=opt.hessian_due)
            if moves:
                p.data = p.data.clone()
            opt.step()
            opt.zero_grad()
        found.append(p)
    assert_same_bits(found[:1], found[1:])


# ---- a first step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [AdaHessian, SophiaH, MSASSHA])
def test_a_first_step_with_a_learning_rate_of_0_counts_after_take_products_too(method):
    found = []
    for takes in (False, True):
        net = make_net()
        opt = method(net.parameters(), lr=0.0)
        for lr in (0.0, 0.01, 0.02):
            opt.param_groups[0]["lr"] = lr
            loss_of(net).backward(create_graph=opt.hessian_due)
            if takes:
                opt.take_products()
            opt.step()
            opt.zero_grad()
        found.append([*snapshot(net), *(torch.tensor(opt.state[p]["step"]) for p in net.parameters())])
    assert_same_bits(*found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_was_frozen_with_a_gradient_of_zeros_has_a_product_of_zeros(backend):
    net = make_net()
    opt = AdaHessian(net.parameters(), lr=0.05, backend=backend)
    step(opt, net)
    loss_of(net).backward()
    opt.zero_grad(set_to_none=False)
    net[0].weight.requires_grad_(False)
    known = opt.state[net[0].weight]["exp_hessian_diag"].clone()
    other = opt.state[net[2].weight]["exp_hessian_diag"].clone()
    loss_of(net).backward(create_graph=True)
    opt.step()
    ratio = opt.state[net[0].weight]["exp_hessian_diag"] / known
    torch.testing.assert_close(ratio, torch.full_like(ratio, (1 - 0.999**2) / (1 - 0.999)), rtol=1e-5, atol=0)
    assert not torch.equal(opt.state[net[2].weight]["exp_hessian_diag"], other)


@pytest.mark.parametrize("call", ["take_products", "step"])
def test_a_layer_that_is_frozen_between_the_pass_of_a_refresh_and_its_products_is_named(call):
    net = make_net()
    opt = AdaHessian(net.named_parameters(), lr=0.05)
    before = snapshot(net)
    loss_of(net).backward(create_graph=True)
    net[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=f"AdaHessian.{call}: '0.weight' was frozen after the backward pass"):
        getattr(opt, call)()
    assert_same_bits(snapshot(net), before)
    opt.zero_grad()
    step(opt, net)
