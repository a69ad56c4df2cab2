"""What comes in the middle of a step: checkpoints, changed groups, closures that zero gradients, undone steps."""

import re
import warnings

import pytest
import torch
from torch import nn
from training import assert_same_bits

from sassha_fast import GSASSHA, MSASSHA, SASSHA, AdaHessian, SophiaH

BACKENDS = ("reference", "foreach", "cpu")


def start(method=SASSHA, **options):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(6))
    return p, method(
        [p], **{"lr": 0.05, "lazy_hessian": 2, **({} if method in (AdaHessian, SophiaH) else {"rho": 0.1}), **options}
    )


def loss_of(p):
    return (p**4).sum() + p.sin().sum()


def closure_with(opt, p, act=lambda number: None):
    """A closure that does something in each of its passes, which are counted from 1."""
    count = 0

    def closure():
        nonlocal count
        count += 1
        opt.zero_grad()
        loss = loss_of(p)
        loss.backward()
        act(count)
        return loss

    return closure


# ---- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"hvp": "finite_difference"}, {"capturable": True}, {"state_bits": 8}],
    ids=["exact", "finite differences", "capturable", "8 bits"],
)
@pytest.mark.parametrize("save", ["state_dict", "full_state_dict"])
def test_a_checkpoint_of_msassha_from_within_a_closure_changes_nothing(save, options, backend):
    if options.get("state_bits") and backend == "foreach":
        pytest.skip("one backend without kernels is enough")

    def run(saves):
        p, opt = start(MSASSHA, backend=backend, **options)

        def act(number):
            if saves and number == 1:
                getattr(opt, save)()

        for _ in range(5):
            opt.step(closure_with(opt, p, act))
        opt.eval()
        return p, opt

    (p, opt), (other, saving) = run(False), run(True)
    assert_same_bits([p], [other])
    for key in ("step", "hessian_step", "exp_avg"):
        assert torch.equal(torch.as_tensor(opt.state[p][key]), torch.as_tensor(saving.state[other][key]))
    saving.load_state_dict(saving.state_dict())
    saving.train()
    saving.step(closure_with(saving, other))


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("method", [SASSHA, GSASSHA, MSASSHA, AdaHessian, SophiaH])
def test_loading_within_a_closure_is_refused_and_the_step_undone(method, number):
    p, opt = start(method)
    opt.step(closure_with(opt, p))
    before, saved = snapshot_of(p, opt), opt.state_dict()
    if number == 2 and method not in (SASSHA, GSASSHA):
        number = 1  # they run one pass

    def act(count):
        if count == number:
            opt.load_state_dict(saved)

    with pytest.raises(RuntimeError, match=r"load_state_dict: it was called within a closure"):
        opt.step(closure_with(opt, p, act))
    assert_same_bits(snapshot_of(p, opt), before)
    opt.load_state_dict(saved)


def snapshot_of(p, opt):
    return [p.detach().clone(), opt.state[p]["exp_avg"].clone(), opt.state[p]["exp_hessian_diag"].clone()]


# ---- groups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda opt: opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]}), "add_param_group: it was called"),
        (lambda opt: opt.param_groups.clear(), "a closure has added groups or parameters to param_groups, or taken"),
        (lambda opt: opt.param_groups[0]["params"].append(nn.Parameter(torch.ones(2))), "a closure has added groups"),
        (lambda opt: opt.param_groups[0].update(perturb_eps="a"), "perturb_eps is 'a'"),
        (lambda opt: opt.param_groups[0].pop("rho"), "has no 'rho', which was taken out"),
    ],
    ids=["added group", "cleared", "appended", "wrong value", "taken out"],
)
def test_groups_that_a_closure_changes_are_named_and_x_is_back(change, said, number):
    p, opt = start()
    opt.step(closure_with(opt, p))
    before = p.detach().clone()
    with pytest.raises((RuntimeError, ValueError), match=re.escape(said)):
        opt.step(closure_with(opt, p, lambda count: change(opt) if count == number else None))
    assert_same_bits([p], [before])


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_that_go_between_the_passes_of_gsassha_are_named(backend):
    p, opt = start(GSASSHA, backend=backend)
    before = p.detach().clone()
    loss_of(p).backward()
    opt.perturb_weights()
    opt.param_groups.clear()
    loss_of(p).backward(create_graph=True)
    with pytest.raises(RuntimeError, match="param_groups changed within a step"):
        opt.unperturb()
    assert_same_bits([p], [before])


@pytest.mark.parametrize("method", [SASSHA, GSASSHA, MSASSHA, AdaHessian, SophiaH])
def test_a_hyperparameter_taken_out_before_the_first_step_is_missed(method):
    for key in start(method)[1].param_groups[0]:
        if key == "params":
            continue
        p, opt = start(method)
        del opt.param_groups[0][key]
        before = p.detach().clone()
        if key not in opt.checked_hyperparameters:
            continue
        with pytest.raises(ValueError, match=f"group 0 has no '{key}', which was taken out; give it one"):
            opt.step(closure_with(opt, p))
        assert_same_bits([p], [before])


# ---- lists of closures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refresh", [True, False])
def test_a_list_whose_second_closure_zeroes_gradients_is_refused(refresh):
    p, opt = start()
    if not refresh:
        opt.step(closure_with(opt, p))
    before = p.detach().clone()

    def adds():
        loss = loss_of(p)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"a closure of the list has called zero_grad\(\).*leave zero_grad\(\) out"):
        opt.step([adds, closure_with(opt, p)])
    assert_same_bits([p], [before])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step([closure_with(opt, p), adds, adds])  # nothing was there before the first


def test_a_list_whose_second_closure_zeroes_gradients_by_the_model_is_warned_of():
    p, opt = start()
    opt.step(closure_with(opt, p))

    def adds():
        loss = loss_of(p)
        loss.backward()
        return loss

    def zeroes():
        p.grad = None
        return adds()

    with pytest.warns(
        UserWarning, match="closure 2 of the list has zeroed or replaced the gradient of parameter 0 of group 0"
    ):
        opt.step([adds, zeroes])


@pytest.mark.parametrize(
    ("zero", "name"),
    [
        (lambda net: net.zero_grad(set_to_none=False), "parameter 0 of group 0 and 3 more"),
        (lambda net: net[1].zero_grad(), "parameter 2 of group 0 and 1 more"),
    ],
    ids=["in place", "a part"],
)
def test_a_list_that_loses_gradients_in_place_or_of_a_part_is_warned_of(zero, name):
    net, opt, closure = small_list()
    opt.step([closure(), closure()])  # a refresh takes every part by itself
    with pytest.warns(UserWarning, match=f"closure 2 of the list has zeroed or replaced the gradient of {name}, and"):
        opt.step([closure(), closure(before=lambda: zero(net))])


@pytest.mark.parametrize("method", [SASSHA, MSASSHA, AdaHessian])
def test_lists_that_replace_gradients_by_their_sum_are_not_warned_of(method):
    net, opt, closure = small_list(method)
    kept = []

    def stash():
        kept[:] = [p.grad for p in net.parameters()]
        net.zero_grad()

    def add_back():
        for p, g in zip(net.parameters(), kept, strict=True):
            p.grad = p.grad if g is None else p.grad + g

    def clamp(p):
        p.grad = p.grad.clamp(-1.0, 1.0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            opt.step([closure(), closure(before=stash, after=add_back)])
        hooks = [p.register_post_accumulate_grad_hook(clamp) for p in net.parameters()]
        opt.step([closure(), closure()])
    for hook in hooks:
        hook.remove()


def small_list(method=SASSHA):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    opt = method(net.parameters(), lr=0.01)
    rows = iter(range(100))

    def closure(before=lambda: None, after=lambda: None):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(next(rows)))

        def run():
            before()
            loss = (net(x) - 1.0).square().mean() + net(x).sin().mean()
            loss.backward()
            after()
            return loss

        return run

    return net, opt, closure


# ---- schedules ----------------------------------------------------------------------------------------------------


class Counting:
    """A schedule in the authors' form."""

    def __init__(self):
        self.calls = 0

    def step(self):
        self.calls += 1
        return 0.1 * 0.5**self.calls


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("which", ["rho_scheduler", "hessian_power_scheduler"])
def test_a_schedule_that_counts_for_itself_is_not_asked_again_for_a_step_that_was_undone(which, number):
    class Failed(Exception):
        pass

    def run(fails):
        schedule = Counting()
        p, opt = start(**{which: schedule})

        def act(count):
            if count == number:
                raise Failed

        for _ in range(4):
            if fails:
                with pytest.raises(Failed):
                    opt.step(closure_with(opt, p, act))
            opt.step(closure_with(opt, p))
        return schedule, p

    (schedule, p), (failing, other) = run(False), run(True)
    assert (schedule.calls, failing.calls) == (4, 4)
    assert_same_bits([p], [other])


def test_a_schedule_that_counts_for_itself_is_not_asked_again_after_a_step_that_was_skipped_by_hand():
    schedule = Counting()
    p, opt = start(rho_scheduler=schedule)
    for skip in (True, False):
        loss_of(p).backward()
        opt.perturb_weights()
        loss_of(p).backward(create_graph=True)
        opt.unperturb()
        if not skip:
            opt.step()
        opt.zero_grad()
    assert schedule.calls == 1


@pytest.mark.parametrize("value", [None, "a", True, torch.ones(2), -1.0], ids=repr)
@pytest.mark.parametrize("key", ["rho", "hessian_power"])
def test_schedules_that_return_no_number_are_refused_by_name(key, value):
    p, opt = start(**{f"{key}_scheduler": lambda t: value})
    before = p.detach().clone()
    with pytest.raises(ValueError, match=f"SASSHA: {key} is .*expected a finite number from 0"):
        opt.step(closure_with(opt, p))
    assert_same_bits([p], [before])


# ---- state and memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("key", ["exp_avg", "exp_hessian_diag", "step", "bias_correction2"])
def test_state_from_which_an_entry_was_taken_out_is_named(key, backend):
    p, opt = start(backend=backend)
    opt.step(closure_with(opt, p))
    del opt.state[p][key]
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match=f"the state of parameter 0 of group 0 has no '{key}', which was taken out"):
        opt.step(closure_with(opt, p))
    assert_same_bits([p], [before])


@pytest.mark.parametrize("backend", BACKENDS)
def test_x_comes_back_in_its_own_shape(backend):
    p, opt = start(backend=backend)
    opt.step(closure_with(opt, p))
    before = p.detach().clone()
    loss_of(p).backward()
    opt.perturb_weights()
    p.data, p.grad = p.data[:2].clone(), None
    loss_of(p).backward()
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 changed by p.data = ... while holding x \+ ε"):
        opt.unperturb()
    assert_same_bits([p], [before])
    opt.zero_grad()
    opt.step(closure_with(opt, p))
