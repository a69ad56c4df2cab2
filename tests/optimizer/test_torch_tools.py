"""Tools of torch around an optimizer: schedulers, averaged weights, profiler, copies, other processes."""

import copy
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from training import BACKENDS, assert_same_bits, closure_of, make_loss, make_net, snapshot, three_calls, train

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH

FAMILY = {
    "sassha": lambda params: SASSHA(params, lr=0.03, rho=0.05, lazy_hessian=3),
    "g-sassha": lambda params: GSASSHA(params, lr=0.03, rho=0.05, lazy_hessian=3),
    "m-sassha": lambda params: MSASSHA(params, lr=0.03, rho=0.05, lazy_hessian=3),
    "adahessian": lambda params: AdaHessian(params, lr=0.03, lazy_hessian=3),
    "sophia-h": lambda params: SophiaH(params, lr=0.003, lazy_hessian=3),
    "sam": lambda params: SAM(params, torch.optim.SGD, rho=0.05, lr=0.03, momentum=0.9),
}


def steps(net, opt, count):
    closure = closure_of(opt, make_loss(net))
    for _ in range(count):
        opt.step(closure)


def shown(net, opt):
    """The true weights, also where they lie apart."""
    if hasattr(opt, "true_weights"):
        with opt.true_weights():
            return snapshot(net)
    return snapshot(net)


# ---- schedulers --------------------------------------------------------------------------------------------------


def test_cosine_schedule_ends_where_nothing_moves():
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.03, rho=0.05)
    schedule = CosineAnnealingLR(opt, 4)
    loss = make_loss(net)
    moved = []
    for _ in range(5):
        before = snapshot(net)
        three_calls(opt, loss)
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, snapshot(net), strict=True)))
        schedule.step()
    assert moved == [True, True, True, True, False]


def test_reduce_on_plateau_lowers_the_rate_of_every_group():
    net = make_net()
    groups = [{"params": [p]} for p in net.parameters()]
    opt = SASSHA(groups, lr=0.04, rho=0.05)
    schedule = ReduceLROnPlateau(opt, factor=0.5, patience=0)
    three_calls(opt, make_loss(net))
    for _ in range(2):
        schedule.step(1.0)
    assert {group["lr"] for group in opt.param_groups} == {0.02}


# ---- averaged weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["swa", "ema"])
@pytest.mark.parametrize("method", FAMILY)
def test_averages_are_those_of_the_true_weights(method, kind):
    net = make_net()
    opt = FAMILY[method](net.parameters())
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5) if kind == "ema" else None)
    rates = SWALR(opt, swa_lr=0.01, anneal_epochs=2)
    expected = None
    for turn in range(3):
        steps(net, opt, 1)
        rates.step()
        weights = shown(net, opt)
        if hasattr(opt, "true_weights"):
            with opt.true_weights():
                average.update_parameters(net)
        else:
            average.update_parameters(net)
        if expected is None:
            expected = weights
        else:
            share = 0.5 if kind == "ema" else 1 / (turn + 1)
            expected = [old + (new - old) * share for old, new in zip(expected, weights, strict=True)]
    for found, wanted in zip(average.module.parameters(), expected, strict=True):
        torch.testing.assert_close(found, wanted)


# ---- names -------------------------------------------------------------------------------------------------------


def test_named_parameters_are_named_in_errors():
    net = make_net()
    opt = SASSHA(net.named_parameters(), lr=0.03)
    name, param = next(iter(net.named_parameters()))
    param.grad = torch.zeros_like(param).to_sparse()
    with pytest.raises(RuntimeError, match=rf"gradient of .*{name}.* is sparse"):
        opt.step()


def test_named_parameters_are_named_where_they_are_refused():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"MSASSHA: 'body\.weight' is torch\.complex64"):
        MSASSHA([("body.weight", weight)])
    opt, other = (SASSHA([("body.weight", torch.nn.Parameter(torch.ones(n)))], rho=0.05) for n in (3, 4))
    for optimizer in (opt, other):
        optimizer.step(closure_of(optimizer, lambda p=optimizer.param_groups[0]["params"][0]: (p**4).sum()))
    with pytest.raises(
        ValueError, match=r"SASSHA.load_state_dict: 'exp_avg' of 'body.weight' is a tensor of .*shape \(4,\)"
    ):
        opt.load_state_dict(other.state_dict())


# ---- hooks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", FAMILY)
def test_hooks_run_around_steps_and_checkpoints(method):
    net = make_net()
    opt, seen = FAMILY[method](net.parameters()), []
    opt.register_step_pre_hook(lambda *_: seen.append("before step"))
    opt.register_step_post_hook(lambda *_: seen.append("after step"))
    opt.register_state_dict_pre_hook(lambda _: seen.append("before saving"))
    opt.register_state_dict_post_hook(lambda _, saved: {"packed": saved, "note": "mine"})
    steps(net, opt, 2)
    assert seen == ["before step", "after step"] * 2
    saved = copy.deepcopy(opt.state_dict())
    assert seen[4:] == ["before saving"]
    assert saved["note"] == "mine"

    other_net = make_net()
    other = FAMILY[method](other_net.parameters())
    with pytest.raises(ValueError, match=r"load_state_dict: found \['note', 'packed'\], expected a dict with 'state'"):
        other.load_state_dict(saved)
    found = []
    other.register_load_state_dict_pre_hook(lambda _, given: given["packed"])
    other.register_load_state_dict_post_hook(lambda loaded: found.append(len(loaded.state)))
    other.load_state_dict(saved)
    assert found == [len(opt.state)]
    with torch.no_grad():
        for p, q in zip(other_net.parameters(), net.parameters(), strict=True):
            p.copy_(q)
    if isinstance(other, MSASSHA):
        other.load_state_dict(saved)  # which writes x + ε
    steps(net, opt, 3)
    steps(other_net, other, 3)
    assert_same_bits(shown(other_net, other), shown(net, opt))


class OwnStep(SASSHA):
    """A user's class with a step around ours."""

    def step(self, *args, **kwargs):
        return super().step(*args, **kwargs)


@pytest.mark.parametrize("method", [SASSHA, OwnStep])
@pytest.mark.parametrize("scope", ["own", "global"])
def test_hooks_run_once_around_a_step_whoever_registers_them(method, scope):
    net, seen = make_net(), []
    SASSHA(make_net().parameters())
    opt = method(net.parameters(), lr=0.01, rho=0.05)
    handles = []
    if scope == "own":
        handles += [opt.register_step_pre_hook(lambda *_: seen.append("before"))]
        handles += [opt.register_step_post_hook(lambda *_: seen.append("after"))]
    else:
        handles += [register_optimizer_step_pre_hook(lambda *_: seen.append("before"))]
        handles += [register_optimizer_step_post_hook(lambda *_: seen.append("after"))]
    try:
        steps(net, opt, 2)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["before", "after"] * 2
    steps(net, opt, 1)
    assert seen == ["before", "after"] * 2


def test_the_profiler_shows_the_ranges_that_torch_gives_every_optimizer():
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.01)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as found:
        steps(net, opt, 1)
        opt.zero_grad()
    names = {event.name for event in found.events()}
    assert {"Optimizer.step#SASSHA.step", "Optimizer.zero_grad#SASSHA.zero_grad"} <= names


# ---- profiler ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_profiler_shows_every_pass_by_name(backend):
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.03, rho=0.05, backend=backend, lazy_hessian=2)
    loss = make_loss(net)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        for _ in range(2):
            three_calls(opt, loss)
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("SASSHA.")}
    assert counts == {
        "SASSHA.norm": 2,
        "SASSHA.perturb": 2,
        "SASSHA.products": 1,  # one of the two steps refreshes
        "SASSHA.restore": 2,
        "SASSHA.step": 2,
        "SASSHA.unseen": 2,  # sums of what the refresh did not see, and what it gets
    }


def test_what_is_profiled_has_the_same_bits():
    plain, profiled = make_net(), make_net()
    train(plain, SASSHA(plain.parameters(), lr=0.03, rho=0.05), 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        train(profiled, SASSHA(profiled.parameters(), lr=0.03, rho=0.05), 4)
    assert_same_bits(snapshot(profiled), snapshot(plain))


# ---- copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("method", FAMILY)
def test_a_copy_of_network_and_optimizer_goes_on_alike_and_apart(method, copied):
    net = make_net()
    opt = FAMILY[method](net.parameters())
    steps(net, opt, 4)
    other_net, other_opt = copied((net, opt))
    before = snapshot(other_net)
    steps(net, opt, 3)
    assert_same_bits(snapshot(other_net), before)
    steps(other_net, other_opt, 3)
    assert_same_bits(shown(other_net, other_opt), shown(net, opt))


# ---- other processes ---------------------------------------------------------------------------------------------


def trained_elsewhere(rank, net, opt, count):
    """In a process of its own, on weights in shared memory."""
    torch.set_num_threads(1)
    steps(net, opt, count)


def test_a_spawned_process_trains_shared_weights_to_the_same_bits():
    here, there = make_net(), make_net()
    steps(here, SASSHA(here.parameters(), lr=0.03, rho=0.05, lazy_hessian=3), 4)
    there.share_memory()
    opt = SASSHA(there.parameters(), lr=0.03, rho=0.05, lazy_hessian=3)
    torch.multiprocessing.spawn(trained_elsewhere, args=(there, opt, 4), nprocs=1)
    assert_same_bits(snapshot(there), snapshot(here))
