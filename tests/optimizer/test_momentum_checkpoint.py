"""Checkpoints and copies of M-SASSHA, taken while the parameters hold x or x + ε."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from test_family import by_hand, make_problem
from test_momentum import options_for, started
from torch import nn
from training import assert_same_bits, assert_same_state, snapshot, state_of

from sassha_fast import MSASSHA
from sassha_fast._core.keys import ASCENT_SCALE, EXP_AVG, HESSIAN, WEIGHT


@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_taken_in_either_state_resumes_bit_for_bit(dtype, evaluating):
    expected, expected_opt = started(23, dtype)
    problem, opt = started(13, dtype)
    if evaluating:
        opt.eval()
    model, state = copy.deepcopy(problem.net.state_dict()), pickle.loads(pickle.dumps(opt.state_dict()))
    other = make_problem(dtype, seed=1)
    new = MSASSHA(other.net.parameters(), **{**options_for(dtype), "rho": 0.7})
    other.net.load_state_dict(model)
    new.load_state_dict(state)
    assert new.evaluating == evaluating
    new.train()
    for _ in range(10):
        by_hand(new, other.loss)
    assert_same_bits(snapshot(other.net), snapshot(expected.net))
    assert_same_state(state_of(new), state_of(expected_opt))


def test_a_refresh_that_a_device_tells_late_to_have_failed_is_due_again_after_a_checkpoint_too():
    _, opt = started(13)
    opt.parts.params.outcome = SimpleNamespace(retry_clock=10)
    saved = opt.state_dict()
    clocks = [entry["hessian_step"] for entry in (*saved["state"].values(), *opt.state.values())]
    assert set(clocks) == {10}
    assert opt.hessian_due


@pytest.mark.parametrize("masters", [None, 24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_the_same_checkpoint_may_follow_the_state_however_small_they_are(dtype, masters):
    """x + ε is rounded at random, also where a place is not a part of the number any more: in subnormal ones."""
    place = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    generator = torch.Generator().manual_seed(0)
    start = (torch.randn(64, 64, generator=generator).double() * 20.0 * place).to(dtype)
    a = torch.randn(64, 64, generator=generator)

    def begun():
        p = nn.Parameter(start.clone())
        opt = MSASSHA([p], lr=0.01 * place, rho=100.0 * place, master_weight_bits=masters, full_precision_below=0)
        return p, opt

    def train(p, opt, steps):
        for _ in range(steps):
            (a * p.float() + 0.5 * p.float() ** 2).sum().backward(create_graph=opt.hessian_due)
            opt.step()
            opt.zero_grad()

    p, opt = begun()
    train(p, opt, 3)
    held, saved = p.detach().clone(), pickle.loads(pickle.dumps(opt.state_dict()))
    train(p, opt, 3)
    other, new = begun()
    new.load_state_dict(saved)
    with torch.no_grad():
        other.copy_(held)  # what model.load_state_dict() does
    train(other, new, 3)
    assert torch.equal(other, p)
    assert held.double().abs().max() < 100.0 * place

    with torch.no_grad():  # another weight is noticed as ever
        new.load_state_dict(saved)
        other[3, 4] += 8.0 * place
    with pytest.raises(RuntimeError, match="changed in place while holding"):
        train(other, new, 1)


def test_loading_writes_what_the_parameters_held_even_if_the_model_was_saved_in_the_other_state():
    problem, opt = started()
    perturbed, state = snapshot(problem.net), opt.state_dict()
    with opt.true_weights():
        model = copy.deepcopy(problem.net.state_dict())
    other = make_problem(torch.float32, seed=1)
    new = MSASSHA(other.net.parameters())
    other.net.load_state_dict(model)
    new.load_state_dict(state)
    assert_same_bits(snapshot(other.net), perturbed)


def test_a_checkpoint_in_evaluation_has_weights_that_were_changed_there():
    problem, opt = started()
    opt.eval()
    with torch.no_grad():
        problem.net[0].bias.fill_(0.25)
    entry = opt.state_dict()["state"][1]
    assert (entry[WEIGHT] == 0.25).all()


def test_checkpoints_of_the_authors_optimizer_load():
    problem, opt = started(13)
    opt.eval()
    theirs = {
        "state": {
            i: {
                "hessian_step": 13,
                "step": 13,
                "grad_momentum": opt.state[p][EXP_AVG].clone(),
                "hess_momentum": opt.state[p][HESSIAN].clone(),
            }
            for i, p in enumerate(problem.net.parameters())
        },
        "param_groups": [
            {
                **{key: opt.param_groups[0][key] for key in ("lr", "betas", "weight_decay", "rho", "eps", "maximize")},
                "norm_factor": [torch.tensor(-opt.state[problem.net[0].weight][ASCENT_SCALE])],
                "params": list(range(6)),
            }
        ],
    }
    other = make_problem(torch.float32, seed=1)
    new = MSASSHA(other.net.parameters())
    other.net.load_state_dict(problem.net.state_dict())
    new.load_state_dict(theirs)
    assert new.evaluating
    for optimizer, net in ((opt, problem), (new, other)):
        optimizer.train()
        for _ in range(9):
            by_hand(optimizer, net.loss)
    assert_same_bits(snapshot(other.net), snapshot(problem.net))


def test_a_checkpoint_of_sassha_is_refused_and_changes_nothing():
    problem, opt = started()
    state = opt.state_dict()
    entries = state["state"].items()
    del_weight = {i: {k: v for k, v in entry.items() if k != WEIGHT} for i, entry in entries}
    before, weights = state_of(opt), snapshot(problem.net)
    with pytest.raises(ValueError, match="lacks \\['weight'\\]"):
        opt.load_state_dict({**state, "state": del_weight})
    assert_same_state(state_of(opt), before)
    assert_same_bits(snapshot(problem.net), weights)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_model_and_optimizer_goes_on_like_the_original(copied):
    problem, opt = started()
    net, other = copied((problem.net, opt))
    x, y = torch.randn(16, 1, 6, 6), torch.randint(0, 3, (16,))
    for model, optimizer in ((problem.net, opt), (net, other)):
        for _ in range(8):
            by_hand(optimizer, lambda model=model: nn.functional.cross_entropy(model(x), y))
    assert_same_bits(snapshot(net), snapshot(problem.net))
    assert_same_state(state_of(other), state_of(opt))
