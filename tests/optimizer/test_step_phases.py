"""A step is one thing: nothing of one that was skipped reaches the next, and no call comes out of turn."""

import copy
import pickle

import processes
import pytest
import test_old_checkpoint as old
import torch
import torch.distributed as dist
from replicas import OPTIONS, part_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW
from training import assert_same_bits, assert_same_state, make_loss, make_net, snapshot, state_of

from sassha_fast import MSASSHA, SAM, SASSHA

SETTINGS = {"lr": 0.03, "rho": 0.05, "lazy_hessian": 3}
HVP = ["exact", "finite_difference"]


def backward(opt, loss):
    loss().backward(create_graph=opt.hvp == "exact" and opt.hessian_due)
    for _ in range(opt.probes_due):
        opt.probe_weights()
        loss().backward()


def by_calls(opt, loss):
    if not isinstance(opt, MSASSHA):
        loss().backward()
        opt.perturb_weights()
    backward(opt, loss)
    if not isinstance(opt, MSASSHA):
        opt.unperturb()
    opt.step()
    opt.zero_grad()


# ---- skipped steps ------------------------------------------------------------------------------------------------


def assert_skipping_changes_nothing(method, options, skipped, following, steps=3):
    """Two runs, one of which begins a step with another batch and skips it, are equal after the next step."""
    runs = []
    for skips in (False, True):
        net = make_net(torch.float64)
        opt = method(net.parameters(), **{**SETTINGS, **options})
        loss = make_loss(net, torch.float64)
        for _ in range(steps):
            by_calls(opt, loss)
        assert opt.hessian_due
        if skips:
            skipped(opt, make_loss(net, torch.float64, seed=99))
        following(opt, loss)
        runs.append((snapshot(net), state_of(opt)))
    assert_same_state(runs[1][1], runs[0][1])
    assert_same_bits(runs[1][0], runs[0][0])


@pytest.mark.parametrize("hvp", HVP)
def test_products_of_a_step_that_was_skipped_are_not_those_of_the_next(hvp):
    def skipped(opt, loss):
        backward(opt, loss)
        opt.take_products()
        opt.zero_grad()

    assert_skipping_changes_nothing(MSASSHA, {"hvp": hvp}, skipped, by_calls)


@pytest.mark.parametrize("rho", [0.0, 0.05])
@pytest.mark.filterwarnings("ignore:SASSHA.step. rho is")
def test_a_step_without_ascent_after_one_that_was_skipped_takes_its_own_products(rho):
    def skipped(opt, loss):
        loss().backward()
        opt.perturb_weights()
        backward(opt, loss)
        opt.unperturb()
        opt.zero_grad()

    def following(opt, loss):
        loss().backward(create_graph=True)
        opt.step()
        opt.zero_grad()

    assert_skipping_changes_nothing(SASSHA, {"rho": rho}, skipped, following)


@pytest.mark.parametrize("hvp", HVP)
def test_a_whole_step_after_one_that_was_skipped_takes_its_own_products(hvp):
    def skipped(opt, loss):
        loss().backward()
        opt.perturb_weights()
        backward(opt, loss)
        opt.unperturb()
        opt.zero_grad()

    assert_skipping_changes_nothing(SASSHA, {"hvp": hvp}, skipped, by_calls)


def draws_of(skip):
    """Random numbers of a pass that is skipped, and of the first pass of the next step."""
    net = make_net()
    opt, loss = SASSHA(net.parameters(), **SETTINGS), make_loss(net)
    with opt.replay_rng():
        first = torch.rand(3)
        loss().backward()
    skip(opt, loss)
    with opt.replay_rng():
        return first, torch.rand(3)


def skip_before_the_ascent(opt, loss):
    opt.zero_grad()


def skip_after_the_restoring(opt, loss):
    opt.perturb_weights()
    with opt.replay_rng():
        torch.rand(3)
        loss().backward(create_graph=True)
    opt.unperturb()
    opt.zero_grad()


@pytest.mark.parametrize("skip", [skip_before_the_ascent, skip_after_the_restoring])
def test_random_numbers_of_a_step_that_was_skipped_are_not_replayed(skip):
    first, following = draws_of(skip)
    torch.manual_seed(0)
    make_net()  # which draws some
    expected = [torch.rand(3), torch.rand(3)]
    assert_same_bits([first, following], expected)


def test_gradients_zeroed_on_the_way_do_not_end_a_step():
    def zero_between(opt, loss):
        opt.perturb_weights(zero_grad=False)
        opt.zero_grad()

    first, second = draws_of(zero_between)
    assert_same_bits([first], [second])


# ---- SAM ----------------------------------------------------------------------------------------------------------

BASES = {SGD: {"lr": 0.1, "momentum": 0.9}, AdamW: {"lr": 0.01}}
OWN_KEYS = {"rho", "perturb_eps", "alpha", "rho_step", "ascents"}  # the last two count


def made_sam(base=SGD, net=None):
    return SAM((net or make_net()).parameters(), base, rho=0.05, **BASES[base])


@pytest.mark.parametrize("base", BASES)
def test_hyperparameters_of_sam_are_those_of_its_base_and_of_the_ascent(base):
    net = make_net()
    opt, plain = made_sam(base, net), base(net.parameters(), **BASES[base])
    for mine, theirs in ((opt.param_groups[0], plain.param_groups[0]), (opt.defaults, plain.defaults)):
        assert set(mine) - set(theirs) <= OWN_KEYS
        assert set(theirs) <= set(mine)


def test_one_cycle_scheduler_cycles_the_momentum_of_sgd_in_sam():
    net = make_net()
    opt, loss = made_sam(net=net), make_loss(net)
    plain = SGD(make_net().parameters(), **BASES[SGD])
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=12) for o in (opt, plain)]
    seen = []
    for _ in range(11):
        by_calls(opt, loss)
        plain.step()
        for schedule in schedules:
            schedule.step()
        assert "betas" not in opt.param_groups[0]
        assert opt.param_groups[0]["momentum"] == plain.param_groups[0]["momentum"]
        seen.append(opt.base_optimizer.param_groups[0]["momentum"])
    assert len(set(seen)) > 5


def test_a_checkpoint_with_hyperparameters_that_sam_does_not_have_loads_without_them():
    saved = old.saved_by_0_1_0()["SAM"]["opt"]
    assert "betas" in saved["param_groups"][0]
    _, opt = old.build("SAM")
    opt.load_state_dict(saved)
    plain = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).param_groups[0]
    for group, before in zip(opt.param_groups, saved["param_groups"], strict=True):
        assert set(group) - set(plain) <= OWN_KEYS
        assert {key: group[key] for key in ("lr", "momentum", "rho", "alpha", "ascents")} == {
            key: before[key] for key in ("lr", "momentum", "rho", "alpha", "ascents")
        }


# ---- several processes --------------------------------------------------------------------------------------------


def skipped_in_two_processes():
    """M-SASSHA by hand: every process takes products, all skip the step, and go on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net(torch.float64)
    model, opt = DDP(net), MSASSHA(net.parameters(), **{**OPTIONS, "lazy_hessian": 2})
    opt.attach(model)
    loss = part_loss(model, torch.float64, rank, size)
    for t in range(6):
        with model.no_sync():
            loss().backward(create_graph=opt.hessian_due)
        if t in (2, 4):
            opt.take_products()
        else:
            opt.step()
        opt.zero_grad()
    return {"params": snapshot(net), "state": state_of(opt)}


def sent_by_sam(**options):
    """How many bytes of collectives begin while each backward pass of the third step runs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net(torch.float64)
    model = DDP(net)
    opt = SAM(net.parameters(), SGD, lr=0.1, momentum=0.9, **options)
    opt.attach(model)
    loss = part_loss(model, torch.float64, rank, size)
    running, sent, original = False, [], dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        if running:
            sent[-1] += tensor.numel() * tensor.element_size()
        return original(tensor, *args, **kwargs)

    def closure():
        nonlocal running
        opt.zero_grad()
        value = loss()
        sent.append(0)
        running = True
        value.backward()
        running = False
        return value

    dist.all_reduce = all_reduce
    try:
        for _ in range(3):
            sent.clear()
            opt.step(closure)
    finally:
        dist.all_reduce = original
    size_of_all = sum(p.numel() * p.element_size() for p in net.parameters())
    return {"params": snapshot(net), "sent": [bytes_ / size_of_all for bytes_ in sent]}


SCENARIOS = {
    "skipped": skipped_in_two_processes,
    "sam": sent_by_sam,
    "sam_sync": lambda: sent_by_sam(perturb_sync=True),
    "gsam": lambda: sent_by_sam(alpha=0.2),
}


def work(folder):
    torch.save({name: scenario() for name, scenario in SCENARIOS.items()}, folder / f"{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phases")
    processes.start(2, work, folder)
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return {name: [rank[name] for rank in ranks] for name in SCENARIOS}


def test_replicas_stay_equal_when_all_skip_a_step_after_its_products(two):
    first, second = two["skipped"]
    assert_same_bits(second["params"], first["params"])
    assert_same_state(second["state"], first["state"])


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("sam", [0.0, 1.0]),  # the ascent's gradients stay here
        ("sam_sync", [1.0, 1.0]),
        ("gsam", [0.0, 0.0]),  # the descent's are decomposed first
    ],
)
def test_gradients_of_sam_travel_while_the_backward_pass_runs(two, name, passes):
    first, second = two[name]
    assert first["sent"] == second["sent"] == passes
    assert_same_bits(second["params"], first["params"])


# ---- calls out of turn --------------------------------------------------------------------------------------------


def phases(opt, loss):
    """One step, with a name for every point at which a user may call something wrong."""
    yield "nothing"
    loss().backward()
    yield "first pass"
    if not isinstance(opt, MSASSHA):
        opt.perturb_weights()
        yield "perturbed"
        loss().backward(create_graph=opt.hvp == "exact" and opt.hessian_due)
        yield "second pass"
    for _ in range(opt.probes_due):
        opt.probe_weights()
        yield "at a probe"
        loss().backward()
    if opt.probes_due:
        yield "probes taken"
    if not isinstance(opt, MSASSHA):
        opt.unperturb()
        yield "restored"
    opt.step()
    opt.zero_grad()


def never():
    raise AssertionError("the closure was called")


CALLS = {
    "perturb_weights": lambda opt: opt.perturb_weights(),
    "unperturb": lambda opt: opt.unperturb(),
    "probe_weights": lambda opt: opt.probe_weights(),
    "step": lambda opt: opt.step(),
    "step(closure)": lambda opt: opt.step(never),
    "eval": lambda opt: opt.eval(),
    "state_dict": lambda opt: opt.state_dict(),
    "load_state_dict": lambda opt: opt.load_state_dict(opt.saved),
    "add_param_group": lambda opt: opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]}),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
}
COPIES = ("state_dict", "load_state_dict", "add_param_group", "pickle", "deepcopy")
METHODS = {
    "SASSHA": (SASSHA, SETTINGS),
    "SASSHA, differences": (SASSHA, {**SETTINGS, "hvp": "finite_difference", "n_samples": 2}),
    "MSASSHA, differences": (MSASSHA, {**SETTINGS, "hvp": "finite_difference", "n_samples": 2}),
    "SAM": (SAM, {"base_optimizer": SGD, "lr": 0.1, "momentum": 0.9}),
}
CLIMBING = {
    "nothing": ("unperturb", "probe_weights", "perturb_weights"),
    "first pass": ("unperturb", "probe_weights"),
    "perturbed": ("perturb_weights", "step", "step(closure)", "probe_weights", *COPIES),
    "second pass": ("perturb_weights", "step", "step(closure)", *COPIES),
    "restored": ("unperturb", "probe_weights"),
}
PROBING = {
    "at a probe": ("perturb_weights", "probe_weights", "step", "step(closure)", *COPIES),
    "probes taken": ("perturb_weights", "probe_weights", "step", "step(closure)", *COPIES),
}
WRONG = {
    "SASSHA": {**CLIMBING, "second pass": (*CLIMBING["second pass"], "probe_weights")},
    "SASSHA, differences": {**CLIMBING, **PROBING},
    "MSASSHA, differences": {
        "nothing": ("probe_weights",),
        "at a probe": ("probe_weights", "step(closure)", "eval", *COPIES),
        "probes taken": ("probe_weights", "step(closure)", "eval", *COPIES),
    },
    "SAM": {**CLIMBING, "second pass": (*CLIMBING["second pass"], "probe_weights")},
}
OUT_OF_TURN = [(name, phase, call) for name, wrong in WRONG.items() for phase, calls in wrong.items() for call in calls]


def grads_of(net):
    return [torch.empty(0) if p.grad is None else p.grad.detach().clone() for p in net.parameters()]


def prepared(name):
    """A run whose next step refreshes, with a checkpoint."""
    net, (method, options) = make_net(), METHODS[name]
    opt = method(net.parameters(), **options)
    for _ in range(3):
        by_calls(opt, make_loss(net))
    opt.saved = copy.deepcopy(opt.state_dict())
    return net, opt, make_loss(net, seed=2)


@pytest.mark.parametrize(("name", "phase", "call"), OUT_OF_TURN, ids=[", ".join(row) for row in OUT_OF_TURN])
def test_a_call_out_of_turn_is_refused_and_the_step_can_be_completed(name, phase, call):
    expected, opt, loss = prepared(name)
    for _ in phases(opt, loss):
        pass
    expected_state = state_of(opt)
    net, opt, loss = prepared(name)
    refused = False
    for here in phases(opt, loss):
        if here == phase and not refused:
            refused = True
            before = snapshot(net), grads_of(net), state_of(opt)
            with pytest.raises(RuntimeError, match=rf"^{type(opt).__name__}[.:].*(call|run|need|there is no) "):
                CALLS[call](opt)
            assert_same_bits(snapshot(net), before[0])
            assert_same_bits(grads_of(net), before[1])
            assert_same_state(state_of(opt), before[2])
            assert len(opt.param_groups) == 1
            assert torch.is_grad_enabled()
    assert refused
    assert_same_bits(snapshot(net), snapshot(expected))
    assert_same_state(state_of(opt), expected_state)
