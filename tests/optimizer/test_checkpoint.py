"""A resumed run is the uninterrupted run, bit for bit."""

import copy
import io
import pickle

import pytest
import torch
from training import (
    BACKENDS,
    DEVICE,
    assert_same_bits,
    assert_same_state,
    closure_of,
    make_loss,
    make_net,
    same_bits,
    snapshot,
    state_of,
    three_calls,
    train,
)

from sassha_fast import GSASSHA, MSASSHA, SASSHA, AdaHessian, SophiaH, schedules

OPTIONS = {"lr": 0.03, "rho": 0.05, "lazy_hessian": 4, "n_samples": 2, "weight_decay": 0.01}


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(saved_after, backend, dtype, **options):
    """Trains, saves, and goes on with a new model and optimizer."""
    net = make_net(dtype)
    opt = SASSHA(net.parameters(), backend=backend, **OPTIONS, **options)
    train(net, opt, saved_after, dtype)
    saved = through_file({"net": net.state_dict(), "opt": opt.state_dict()})
    net = make_net(dtype, seed=99)
    opt = SASSHA(net.parameters(), backend=backend, **OPTIONS, **options)
    net.load_state_dict(saved["net"])
    opt.load_state_dict(saved["opt"])
    train(net, opt, 13 - saved_after, dtype)
    return net, opt


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("saved_after", [4, 5, 7], ids=["before_a_refresh", "after_a_refresh", "between_refreshes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_interrupted_and_resumed_equals_uninterrupted(backend, saved_after, dtype):
    net = make_net(dtype)
    opt = SASSHA(net.parameters(), backend=backend, **OPTIONS)
    train(net, opt, 13, dtype)
    other_net, other_opt = resumed(saved_after, backend, dtype)
    assert_same_bits(snapshot(other_net), snapshot(net))
    assert_same_state(state_of(other_opt), state_of(opt))


def test_schedules_resume_where_they_stood():
    options = {
        "hessian_power_scheduler": schedules.Cosine(13, 0.5, 1.0),
        "rho_scheduler": schedules.Linear(13, 0.0, 0.2),
    }
    net = make_net()
    opt = SASSHA(net.parameters(), **OPTIONS, **options)
    train(net, opt, 13)
    other_net, _ = resumed(6, "auto", torch.float32, **options)
    assert_same_bits(snapshot(other_net), snapshot(net))


def test_loaded_state_of_bfloat16_parameters_stays_float32_and_keeps_its_bits():
    net = make_net(torch.bfloat16)
    opt = SASSHA(net.parameters(), **OPTIONS)
    train(net, opt, 3, torch.bfloat16)
    other = SASSHA(make_net(torch.bfloat16).parameters(), **OPTIONS)
    other.load_state_dict(through_file(opt.state_dict()))
    assert_same_state(state_of(other), state_of(opt))
    assert all(entry["exp_hessian_diag"].dtype == torch.float32 for entry in state_of(other))


def test_loaded_state_does_not_share_memory_with_the_checkpoint():
    net = make_net()
    opt = SASSHA(net.parameters(), **OPTIONS)
    train(net, opt, 2)
    saved = opt.state_dict()
    kept = saved["state"][0]["exp_avg"].clone()
    other_net = make_net()
    other = SASSHA(other_net.parameters(), **OPTIONS)
    other.load_state_dict(saved)
    train(other_net, other, 2)
    assert same_bits(saved["state"][0]["exp_avg"], kept)


def through_pickle(pair):
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize("clone", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"])
def test_a_copy_of_model_and_optimizer_trains_on_alike(clone):
    net = make_net()
    opt = SASSHA(net.parameters(), hvp_point="upstream", seed=5, **OPTIONS)
    train(net, opt, 6)
    other_net, other = clone((net, opt))
    assert other.param_groups[0]["params"][0] is next(iter(other_net.parameters()))
    train(net, opt, 7)
    train(other_net, other, 7)
    assert_same_bits(snapshot(other_net), snapshot(net))
    assert_same_state(state_of(other), state_of(opt))


FAMILY = (SASSHA, GSASSHA, MSASSHA, AdaHessian, SophiaH)


def trained(method, steps=3, **options):
    net = make_net()
    opt = method(net.parameters(), lr=0.01, **options)
    loss = make_loss(net)
    for _ in range(steps):
        opt.step(closure_of(opt, loss))
    return net, opt


@pytest.mark.parametrize("clone", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("method", FAMILY)
def test_a_copy_takes_a_whole_checkpoint_as_its_first_call(method, clone):
    net, opt = trained(method)
    other_net, other = clone((net, opt))
    saved = copy.deepcopy((net.state_dict(), opt.state_dict()))
    for _ in range(2):
        opt.step(closure_of(opt, make_loss(net)))
    later = copy.deepcopy((net.state_dict(), opt.state_dict()))
    other.load_state_dict(saved[1])
    assert len(other.state) == len(list(net.parameters()))
    for _ in range(2):
        other.step(closure_of(other, make_loss(other_net)))
    assert_same_bits(snapshot(other_net), snapshot(net))
    assert_same_state(state_of(other), state_of(opt))
    last_net, last = clone((other_net, other))
    last_net.load_state_dict(later[0])
    last.load_state_dict(later[1])
    assert_same_state(state_of(last), state_of(opt))


@pytest.mark.parametrize("clone", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"])
def test_a_copy_of_compact_state_takes_a_whole_checkpoint_as_its_first_call(clone):
    net = make_net(torch.bfloat16)
    options = {"state_bits": 8, "master_weight_bits": 24, "full_precision_below": 0}
    opt = SASSHA(net.parameters(), **OPTIONS, **options)
    train(net, opt, 3, torch.bfloat16)
    _, other = clone((net, opt))
    other.load_state_dict(opt.state_dict())
    assert_same_state(state_of(other), state_of(opt))


@pytest.mark.parametrize("clone", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("method", FAMILY)
def test_every_call_knows_the_parameters_of_a_copy(method, clone):
    net, opt = trained(method)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    saved, due, probes = opt.state_dict(), opt.hessian_due, opt.probes_due

    def copied():
        return clone((net, opt))[1]

    for given in (copied().state_dict(), copied().full_state_dict()):
        assert given["state"].keys() == saved["state"].keys()
        for index, entry in saved["state"].items():
            assert torch.equal(given["state"][index]["exp_hessian_diag"], entry["exp_hessian_diag"])
    assert (copied().hessian_due, copied().probes_due) == (due, probes)
    other_net, other = clone((net, opt))
    assert len(other.master_weights(other_net)) == len(list(net.parameters()))
    other_net, other = clone((net, opt))
    other.zero_grad()
    assert all(p.grad is None for p in other_net.parameters())
    other = copied()
    other.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device=DEVICE))]})
    assert len(other.state) == len(saved["state"])
    assert [len(group["params"]) for group in other.state_dict()["param_groups"]] == [len(saved["state"]), 1]


@pytest.mark.parametrize("method", FAMILY)
def test_a_checkpoint_loads_whole_after_groups_were_added_to_a_loaded_optimizer(method):
    def in_two_groups():
        net = make_net()
        opt = method(net[:3].parameters(), lr=0.01)
        return net, opt, net[3:].parameters()

    net, opt, rest = in_two_groups()
    opt.step(closure_of(opt, make_loss(net)))
    first = copy.deepcopy(opt.state_dict())
    opt.add_param_group({"params": rest})
    opt.zero_grad()
    for _ in range(2):
        opt.step(closure_of(opt, make_loss(net)))
    whole = copy.deepcopy(opt.state_dict())

    _, other, rest = in_two_groups()
    other.load_state_dict(first)
    other.add_param_group({"params": rest})
    other.load_state_dict(whole)
    assert_same_state(state_of(other), state_of(opt))


def upstream_checkpoint(opt, power=0.5):
    """What the authors' optimizer would have saved at this point."""
    saved = copy.deepcopy(opt.state_dict())
    for entry in saved["state"].values():
        entry["hessian step"] = entry.pop("hessian_step")
        entry["bias_correction2"] = entry["bias_correction2"] ** power
        entry["e_w"] = torch.zeros_like(entry["exp_avg"])
    for group in saved["param_groups"]:
        for key in ("hessian_power", "maximize", "power_step", "rho_step"):
            del group[key]
    return saved


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_checkpoints_of_the_authors_optimizer_load(power):
    options = {**OPTIONS, "hessian_power": power, "eps": 1e-2}
    net = make_net()
    opt = SASSHA(net.parameters(), **options)
    train(net, opt, 6)
    other_net = copy.deepcopy(net)
    other = SASSHA(other_net.parameters(), **options)
    other.load_state_dict(upstream_checkpoint(opt, power))
    assert_same_state(state_of(other), state_of(opt))
    train(net, opt, 5)
    train(other_net, other, 5)
    assert_same_bits(snapshot(other_net), snapshot(net))


def test_a_clock_that_the_authors_script_resets_forces_a_refresh():
    net = make_net()
    opt = SASSHA(net.parameters(), **OPTIONS)
    train(net, opt, 2)
    assert not opt.hessian_due
    for p in opt.get_params():
        opt.state[p]["hessian step"] = 0
    assert opt.hessian_due
    assert all("hessian step" not in entry for entry in state_of(opt))
    fresh = SASSHA(make_net().parameters(), **OPTIONS)
    for p in fresh.get_params():
        fresh.state[p]["hessian step"] = 0
    assert fresh.hessian_due


def test_checkpoint_with_a_reset_clock_still_gives_the_correction_back():
    net = make_net()
    opt = SASSHA(net.parameters(), **OPTIONS)
    train(net, opt, 6)
    saved = upstream_checkpoint(opt)
    for entry in saved["state"].values():
        entry["hessian step"] = 0
    other = SASSHA(make_net().parameters(), **OPTIONS)
    other.load_state_dict(saved)
    for a, b in zip(state_of(other), state_of(opt), strict=True):
        assert a["bias_correction2"] == pytest.approx(b["bias_correction2"], rel=1e-12)


def test_a_step_with_lr_zero_and_nothing_else_creates_state_and_moves_nothing():
    """torch.distributed.checkpoint primes optimizers this way."""
    net = make_net()
    before = snapshot(net)
    opt = SASSHA(net.parameters(), lr=0.0)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    assert_same_bits(snapshot(net), before)
    assert all(entry["step"] == 0 for entry in state_of(opt))


def test_a_warm_up_that_starts_at_lr_zero_is_a_step_like_any_other():
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.0, rho=0.1)
    three_calls(opt, make_loss(net))
    assert all(entry["step"] == 1 and entry["exp_avg"].any() for entry in state_of(opt))


def good_checkpoint():
    net = make_net()
    opt = SASSHA(net.parameters(), **OPTIONS)
    train(net, opt, 2)
    return opt.state_dict()


def without(mapping, key):
    return {k: v for k, v in mapping.items() if k != key}


def damaged_checkpoints():
    good = good_checkpoint()
    first = good["state"][0]
    adamw_net = make_net()
    adamw = torch.optim.AdamW(adamw_net.parameters())
    make_loss(adamw_net)().backward()
    adamw.step()
    return {
        "no_groups": ({"state": {}}, "param_groups"),
        "not_a_dict": ([1, 2], "list"),
        "truncated_entry": ({**good, "state": {**good["state"], 0: without(first, "exp_avg")}}, "exp_avg"),
        "missing_parameters": ({**good, "param_groups": [{**good["param_groups"][0], "params": [0]}]}, "groups of"),
        "other_shape": (
            {**good, "state": {**good["state"], 0: {**first, "exp_avg": torch.zeros(3)}}},
            r"shape \(40, 12\)",
        ),
        "adamw": (adamw.state_dict(), "perturb_eps"),
        "bad_number": ({**good, "param_groups": [{**good["param_groups"][0], "lr": float("nan")}]}, "lr is nan"),
        "stray_entry": ({**good, "state": {**good["state"], 77: first}}, "77"),
    }


@pytest.mark.parametrize("kind", list(damaged_checkpoints()))
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(kind):
    saved, message = damaged_checkpoints()[kind]
    net = make_net()
    opt = SASSHA(net.parameters(), **OPTIONS)
    train(net, opt, 3)
    weights, state = snapshot(net), state_of(opt)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(saved)
    assert_same_bits(snapshot(net), weights)
    assert_same_state(state_of(opt), state)
    three_calls(opt, make_loss(net))
