"""Steps in CUDA graphs, on a GPU or the virtual one: `pytest tests --device cuda`. Elsewhere these are skipped."""

import copy

import pytest
import torch
from cases import DEVICE
from training import assert_same_bits, closure_of, make_loss, make_net, snapshot

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and --device cuda")

BACKENDS = ("cuda", "triton")
METHODS = (SASSHA, MSASSHA, GSASSHA)
OPTIONS = {"lr": 0.03, "rho": 0.05}


def body(opt, loss):
    """An ordinary step of hand-written calls."""
    if not isinstance(opt, MSASSHA):
        loss().backward()
        opt.perturb_weights(zero_grad=True)
    loss().backward()
    if not isinstance(opt, MSASSHA):
        opt.unperturb()
    opt.step()
    opt.zero_grad()


def refresh(opt, loss):
    assert opt.hessian_due
    opt.step(closure_of(opt, loss))
    opt.zero_grad()


def prepared(method, backend, **options):
    """A network after a refresh and two ordinary steps on a stream of their own, as captures need it."""
    torch.manual_seed(0)
    net = make_net()
    opt = method(net.parameters(), **{**OPTIONS, "lazy_hessian": 1000, **options}, capturable=True, backend=backend)
    loss = make_loss(net)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        refresh(opt, loss)
        body(opt, loss)
        body(opt, loss)
    torch.cuda.current_stream().wait_stream(stream)
    return net, opt, loss


def captured(opt, loss, steps=1):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            body(opt, loss)
    return graph


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}], ids=["plain", "clipped"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_step_equals_an_eager_one_bit_for_bit(backend, method, options):
    eager, opt, loss = prepared(method, backend, **options)
    for _ in range(4):
        body(opt, loss)
    net, opt, loss = prepared(method, backend, **options)
    graph = captured(opt, loss)
    for _ in range(4):
        graph.replay()
    opt.replayed(4)
    assert_same_bits(snapshot(net), snapshot(eager))


UNUSUAL = {
    "channels last": lambda: torch.randn(8, 4, 3, 3).bfloat16().to(memory_format=torch.channels_last),
    "gaps": lambda: torch.randn(20, 40)[:, ::2],
    "8 bits": lambda: torch.randn(80, 80),
    "24 bits": lambda: torch.randn(80, 80).bfloat16(),
}
STORED = {"8 bits": {"state_bits": 8}, "24 bits": {"master_weight_bits": 24}}


@pytest.mark.parametrize("method", [SASSHA, MSASSHA])
@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("backend", ["cuda", "triton", "foreach", "reference"])
def test_parameters_that_no_kernel_takes_are_captured_too(backend, kind, method):
    found = []
    for replays in (False, True):
        torch.manual_seed(0)
        p = torch.nn.Parameter(UNUSUAL[kind]())
        opt = method([p], **OPTIONS, lazy_hessian=1000, capturable=True, backend=backend, **STORED.get(kind, {}))

        def loss(p=p):  # of elementwise operations alone: sums may differ in their last bits
            return ((p * p) * (p * p)).sum()

        opt.step(closure_of(opt, loss))
        opt.zero_grad()
        for _ in range(2):
            body(opt, loss)
        if replays:
            graph = captured(opt, loss)
        for _ in range(3):
            if replays:
                graph.replay()
                opt.replayed()
            else:
                body(opt, loss)
        found.append([p.detach().clone()])
    assert_same_bits(*found)


class Replayed:
    """An optimizer with three graphs beside one whose steps are all eager: of a step, of one with another learning
    rate, and of two steps. All are captured without an eager step between them.
    """

    def __init__(self, method, backend):
        self.rates = [torch.tensor(0.03), torch.tensor(0.01)]
        self.eager = prepared(method, backend, lr=self.rates[0], lazy_hessian=7)
        self.other = prepared(method, backend, lr=self.rates[0], lazy_hessian=7)
        self.graphs = []
        for rate, steps in ((0, 1), (1, 1), (0, 2)):
            self.set_rate(rate)
            self.graphs.append((captured(*self.other[1:], steps=steps), rate, steps))
        self.done = 3

    def set_rate(self, rate):
        """Another tensor, which a graph goes on reading whichever the optimizer has later."""
        for _, opt, _ in (self.eager, self.other):
            opt.param_groups[0]["lr"] = self.rates[rate]

    def go_on(self, choice):
        """A refresh, if it is time, or the steps of a graph."""
        (_, opt, loss), (_, other, other_loss) = self.eager, self.other
        assert opt.hessian_due == other.hessian_due == (self.done % 7 == 0)
        if opt.hessian_due:
            refresh(opt, loss)
            refresh(other, other_loss)
            self.done += 1
            return
        # Two steps at once must not pass the next refresh by.
        graph, rate, steps = self.graphs[0 if choice == 2 and (self.done + 1) % 7 == 0 else choice]
        self.set_rate(rate)
        for _ in range(steps):
            body(opt, loss)
        self.set_rate(1 - rate)  # of no matter to the graph
        graph.replay()
        other.replayed(steps)
        self.done += steps


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_graphs_of_several_optimizers_equal_eager_steps(backend):
    runs = [Replayed(method, backend) for method in (SASSHA, MSASSHA)]
    while min(run.done for run in runs) < 50:
        for number, run in enumerate(runs):
            run.go_on((run.done + number) % 3)
    for run in runs:
        assert_same_bits(snapshot(run.other[0]), snapshot(run.eager[0]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_reads_what_a_schedule_makes_of_its_learning_rate(backend):
    found = []
    for replays in (False, True):
        net, opt, loss = prepared(SASSHA, backend, lr=torch.tensor(0.03))
        schedule = torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5)
        graph = captured(opt, loss)
        for _ in range(5):
            if replays:
                graph.replay()
                opt.replayed()
            else:
                body(opt, loss)
            schedule.step()
        found.append(snapshot(net))
        assert opt.param_groups[0]["lr"].item() == pytest.approx(0.0075)
    assert_same_bits(*found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs_read_no_memory_that_was_given_back(backend):
    """Plans are dropped, constants evicted and memory filled with something else between capture and replay."""
    net, opt, loss = prepared(SASSHA, backend)
    eager, other, other_loss = prepared(SASSHA, backend)
    graph = captured(opt, loss)
    before = [p.detach().clone() for p in net.parameters()]
    state = {key: [entry[key].clone() for entry in opt.state.values()] for key in ("exp_avg", "step")}
    for i in range(100):
        opt.param_groups[0]["lr"] = 0.001 * (i + 1)
        body(opt, loss)
    opt.parts.params.drop_plans()
    with torch.no_grad():
        torch._foreach_copy_(list(net.parameters()), before)
        for key, tensors in state.items():
            torch._foreach_copy_([entry[key] for entry in opt.state.values()], tensors)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    filled = [torch.full((n,), float("nan")) for n in (64, 512, 4096, 1 << 16) for _ in range(64)]
    graph.replay()
    body(other, other_loss)
    assert_same_bits(snapshot(net), snapshot(eager))
    del filled


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (SASSHA, {"capturable": False}, "construct SASSHA with capturable=True"),
        (SASSHA, {"lazy_hessian": 1}, "capture ordinary steps"),
    ],
    ids=["not capturable", "a refresh"],
)
def test_a_capture_that_would_go_wrong_is_refused(method, options, message):
    net = make_net()
    opt = method(net.parameters(), **{**OPTIONS, "lazy_hessian": 100, "capturable": True, **options}, backend="cuda")
    loss = make_loss(net)
    for _ in range(2):
        opt.step(closure_of(opt, loss))
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(graph):
        opt.perturb_weights()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_of_parameters_without_an_eager_step_before_is_refused():
    net = make_net()
    opt = SASSHA(net.parameters(), **OPTIONS, lazy_hessian=100, capturable=True, backend="cuda")
    opt.step(closure_of(opt, make_loss(net)))
    opt.zero_grad()
    next(net.parameters()).grad = torch.zeros_like(next(net.parameters()))
    refused = pytest.raises(RuntimeError, match="run one outside of the capture first")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        opt.perturb_weights()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_sam_is_not_captured():
    net = make_net()
    opt = SAM(net.parameters(), torch.optim.SGD, lr=0.1, backend="cuda")
    opt.step(closure_of(opt, make_loss(net)))
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    refused = pytest.raises(RuntimeError, match="capture the passes without it")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        opt.perturb_weights()


# ---- refreshes and captures -------------------------------------------------------------------------------------


def refresh_now(opt, loss, fails=False):
    """A refresh before its time; one that fails finds no finite product."""
    for entry in opt.state.values():
        entry["hessian_step"] = 1000
    assert opt.hessian_due
    if not fails:
        refresh(opt, loss)
        return
    loss().backward()
    opt.perturb_weights()
    loss().backward(create_graph=True)
    for p in opt.param_groups[0]["params"]:
        p.grad.register_hook(lambda grad: grad * torch.inf)
    opt.unperturb()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_capture_may_follow_a_refresh_whose_outcome_nobody_has_asked_for(backend, method):
    eager, opt, loss = prepared(method, backend)
    net, other, other_loss = prepared(method, backend)
    refresh_now(opt, loss)
    refresh_now(other, other_loss)
    graph = captured(other, other_loss)
    for _ in range(3):
        body(opt, loss)
        graph.replay()
        other.replayed()
    assert_same_bits(snapshot(net), snapshot(eager))
    assert other.stats.refreshes == opt.stats.refreshes == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refresh_that_failed_is_known_after_one_replay_too(backend):
    eager, opt, loss = prepared(SASSHA, backend)
    net, other, other_loss = prepared(SASSHA, backend)
    graph = captured(other, other_loss)
    refresh_now(opt, loss, fails=True)
    refresh_now(other, other_loss, fails=True)
    due = []
    for _ in range(4):
        due.append((opt.hessian_due, other.hessian_due))
        if opt.hessian_due:
            refresh(opt, loss)
        else:
            body(opt, loss)
        if other.hessian_due:
            refresh(other, other_loss)
        else:
            graph.replay()
            other.replayed()
    assert due == [(False, False), (True, True), (False, False), (False, False)]
    assert_same_bits(snapshot(net), snapshot(eager))
    assert other.stats.skipped_refreshes == opt.stats.skipped_refreshes == 1


def test_a_capture_with_parameters_without_curvature_is_refused():
    net, opt, loss = prepared(SASSHA, "cuda")
    opt.state[net[0].weight]["bias_correction2"].zero_()  # as a refresh leaves it that was lost to overflow
    for plan in opt.parts.params._plans.values():
        plan.has_curvature = False
    before = snapshot(net)
    with pytest.raises(RuntimeError, match="left parameters without curvature"):
        captured(opt, loss)
    opt.zero_grad()
    assert_same_bits(snapshot(net), before)


# ---- what a capture leaves behind -------------------------------------------------------------------------------


@pytest.mark.parametrize("replays", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_capture_changes_nothing_that_x_plus_eps_is_derived_from(backend, replays):
    """M-SASSHA: the length of ε is that of the last replay, whatever was captured since."""
    eager, opt, loss = prepared(MSASSHA, backend)
    net, other, other_loss = prepared(MSASSHA, backend)
    graph, _ = captured(other, other_loss), captured(other, other_loss)
    for _ in range(replays):
        body(opt, loss)
        graph.replay()
        other.replayed()
    assert str(other.state_dict()) == str(opt.state_dict())
    for each in (opt, other):
        each.eval()
        each.train()
    assert_same_bits(snapshot(net), snapshot(eager))
    copied = copy.deepcopy((net, other))
    for _, each, its_loss in ((eager, opt, loss), (*copied, make_loss(copied[0]))):
        body(each, its_loss)
    assert_same_bits(snapshot(copied[0]), snapshot(eager))


def seen(opt):
    """What the last step saw."""
    stats = opt.stats
    return [stats.grad_norm, stats.predicted_gap, stats.scales, stats.descent_norm, stats.trace, stats.negative_share]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_stats_are_those_of_the_last_step_whichever_graph_it_was_of(backend, method):
    rates = [torch.tensor(0.03), torch.tensor(0.3)]
    _, opt, loss = prepared(method, backend, max_grad_norm=0.1)
    _, other, other_loss = prepared(method, backend, max_grad_norm=0.1)
    before, graphs = [number.clone() for number in seen(other)], []
    for rate, steps in ((rates[0], 1), (rates[1], 1), (rates[0], 2)):
        other.param_groups[0]["lr"] = rate
        graphs.append((captured(other, other_loss, steps), rate, steps))
    assert_same_bits(seen(other), before)  # nothing has happened yet
    for choice in (0, 1, None, 0, 2, 1):
        graph, rate, steps = (None, rates[0], 1) if choice is None else graphs[choice]
        for each in (opt, other):
            each.param_groups[0]["lr"] = rate
        for _ in range(steps):
            body(opt, loss)
        if graph is None:
            body(other, other_loss)
        else:
            graph.replay()
            other.replayed(steps)
        assert_same_bits(seen(other), seen(opt))


class Interrupted(Exception):
    """By the user, within a capture."""


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("method", [SASSHA, GSASSHA])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_in_a_capture_leaves_the_weights_alone(backend, method, calls):
    """Nothing of the calls before it has happened, so there is nothing to come back from."""
    eager, opt, loss = prepared(method, backend)
    net, other, other_loss = prepared(method, backend)
    before = snapshot(net)

    def interrupted():
        other_loss().backward()
        other.perturb_weights()
        other_loss().backward()
        if calls == 2:
            other.unperturb()
        raise Interrupted

    with pytest.raises(Interrupted), torch.cuda.graph(torch.cuda.CUDAGraph()):
        interrupted()
    with pytest.raises(RuntimeError, match="the weights are not perturbed"):
        other.unperturb()
    other.zero_grad()
    assert_same_bits(snapshot(net), before)
    graph = captured(other, other_loss)
    for replays in (False, True):
        body(opt, loss)
        if replays:
            graph.replay()
            other.replayed()
        else:
            body(other, other_loss)
    assert_same_bits(snapshot(net), snapshot(eager))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_in_a_captured_closure_leaves_the_weights_alone(backend):
    eager, opt, loss = prepared(SASSHA, backend)
    net, other, other_loss = prepared(SASSHA, backend)
    calls = []

    def closure():
        other.zero_grad()
        value = other_loss()
        value.backward()
        calls.append(None)  # not the loss, whose graph belongs to the stream of the capture
        if len(calls) == 2:
            raise Interrupted
        return value

    with pytest.raises(Interrupted), torch.cuda.graph(torch.cuda.CUDAGraph()):
        other.step(closure)
    other.zero_grad()
    body(opt, loss)
    body(other, other_loss)
    assert_same_bits(snapshot(net), snapshot(eager))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": torch.tensor(0.03, device="cpu")}, "lr of group 0 is a tensor on cpu.*make it on cuda:0"),
        ({"betas": (torch.tensor(0.9), torch.tensor(0.999))}, "betas of group 0 is a tensor.*give a number"),
    ],
    ids=["lr", "betas"],
)
def test_hyperparameters_that_a_replay_can_not_read_are_refused(options, message):
    _, opt, loss = prepared(SASSHA, "cuda", **options)
    with pytest.raises(RuntimeError, match=message):
        captured(opt, loss)
