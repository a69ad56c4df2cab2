"""What only a GPU can show, or the virtual one: `pytest tests --device cuda`. Elsewhere these tests are skipped."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from cases import DEVICE
from training import assert_same_bits, closure_of, make_loss, make_net, snapshot, three_calls

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, backends

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and --device cuda")

BACKENDS = ("cuda", "triton")
METHODS = (SASSHA, MSASSHA, GSASSHA)
OPTIONS = {"lr": 0.03, "rho": 0.05}


@contextmanager
def no_waiting():
    """Fails on everything in torch that would make the host wait for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says on first use that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def watched_step(opt, loss):
    """One step in which the optimizer's calls may not wait."""
    if not isinstance(opt, MSASSHA):
        loss().backward()
        with no_waiting():
            opt.perturb_weights()
    loss().backward(create_graph=opt.hessian_due)
    with no_waiting():
        if not isinstance(opt, MSASSHA):
            opt.unperturb()
        opt.step()
        opt.zero_grad()


def mirrors_of(opt):
    """The tables that the plans of an optimizer keep on the device."""
    return [passes.mirrors for plan in opt.parts.params._plans.values() for passes, _ in plan.parts]


def test_the_guard_of_these_tests_notices_a_wait():
    value = torch.ones(1)
    with pytest.raises(RuntimeError), no_waiting():
        value.item()
    assert torch.cuda.get_sync_debug_mode() == 0


def test_auto_takes_the_cuda_kernels():
    assert backends.choose("auto", torch.device("cuda:0")).name == "cuda"


@pytest.mark.parametrize("capturable", [False, True], ids=["eager", "capturable"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_step_waits_for_the_device(backend, method, capturable):
    net = make_net()
    opt = method(net.parameters(), **OPTIONS, lazy_hessian=2, backend=backend, capturable=capturable)
    loss = make_loss(net)
    for _ in range(3):  # the plan, the first refresh and what came of it
        opt.step(closure_of(opt, loss))
        torch.cuda.synchronize()  # so that what a refresh brought is there when the next update asks
    for _ in range(4):
        watched_step(opt, loss)
        torch.cuda.synchronize()
    assert opt.stats.refreshes == 4


@pytest.mark.parametrize("way", ["calls", "closure"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_that_are_on_the_device_are_not_copied_again(backend, method, way):
    net = make_net()
    opt = method(net.parameters(), **OPTIONS, lazy_hessian=100, backend=backend)
    loss = make_loss(net)

    def step():
        if way == "closure":
            opt.step(closure_of(opt, loss))
        elif method is MSASSHA:
            loss().backward(create_graph=opt.hessian_due)
            opt.step()
            opt.zero_grad()
        else:
            three_calls(opt, loss)

    for _ in range(14):  # until torch's allocator has settled
        step()
    before = sum(mirrors.uploads for mirrors in mirrors_of(opt))
    for _ in range(3):
        step()
    assert sum(mirrors.uploads for mirrors in mirrors_of(opt)) == before > 0


# ---- refreshes whose outcome is known late ----------------------------------------------------------------------


@pytest.mark.parametrize("capturable", [False, True], ids=["eager", "capturable"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refresh_that_failed_is_known_one_step_later(backend, capturable):
    def trained(fails):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(300))
        opt = SASSHA([p], **OPTIONS, lazy_hessian=3, backend=backend, capturable=capturable)
        due = []
        for step in range(7):
            due.append(opt.hessian_due)
            (p**4).sum().backward()
            opt.perturb_weights()
            (p**4).sum().backward(create_graph=opt.hessian_due)
            if step == 3 and fails:  # its derivative is infinite
                p.grad.register_hook(lambda grad: grad * torch.inf)
            opt.unperturb()
            opt.step()
            opt.zero_grad()
        return p, opt, due

    _, opt, due = trained(fails=False)
    assert due == [True, False, False, True, False, False, True]
    assert opt.stats.refreshes == 3
    _, opt, due = trained(fails=True)
    assert due == [True, False, False, True, False, True, False]
    assert (opt.stats.refreshes, opt.stats.skipped_refreshes) == (2, 1)


# ---- captured graphs --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_graphs_of_several_optimizers_equal_eager_steps(backend):
    """Graphs of one step, of another learning rate and of two steps, without an eager step between the captures."""
    rates = (0.03, 0.01)

    def runs():
        return [prepared(SASSHA, backend, lr=torch.tensor(rates[0]), lazy_hessian=7) for _ in range(2)]

    def set_rate(opt, rate):
        opt.param_groups[0]["lr"].fill_(rate)

    eager, replayed = runs(), runs()
    graphs = []
    for _, opt, loss in replayed:
        graphs.append([captured(opt, loss), captured(opt, loss), captured(opt, loss, steps=2)])
    plan = [(0, 0), (1, 1), (2, 0), (0, 1)]  # which graph, with which rate
    done = [3, 3]
    while max(done) < 50:
        for run in range(2):
            graph, rate = plan[(done[run] + run) % len(plan)]
            steps = 2 if graph == 2 else 1
            (_, opt, loss), (_, other, other_loss) = eager[run], replayed[run]
            set_rate(opt, rates[rate])
            set_rate(other, rates[rate])
            if opt.hessian_due:
                refresh(opt, loss)
                refresh(other, other_loss)
                done[run] += 1
                continue
            if (done[run] + 1) % 7 == 0:  # two steps would reach the next refresh
                graph, steps = 0, 1
            for _ in range(steps):
                body(opt, loss)
            graphs[run][graph].replay()
            other.replayed(steps)
            done[run] += steps
    for (net, _, _), (other, _, _) in zip(eager, replayed, strict=True):
        assert_same_bits(snapshot(other), snapshot(net))


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


# ---- streams and devices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_run_on_the_current_stream(backend):
    """A kernel on another stream would not wait for the gradients of this one, which come late."""

    def trained(stream):
        net = make_net()
        opt = SASSHA(net.parameters(), **OPTIONS, lazy_hessian=3, backend=backend)
        loss = make_loss(net)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(5):
                torch.cuda._sleep(5_000_000)
                three_calls(opt, loss)
        torch.cuda.current_stream().wait_stream(stream)
        return snapshot(net)

    assert_same_bits(trained(torch.cuda.Stream()), trained(torch.cuda.current_stream()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_of_gradients_from_another_stream_is_not_handed_out_too_early(backend):
    """The optimizer drops the first gradients on its stream; theirs must not reuse them before it has read x back."""

    def trained(passes, steps):
        torch.manual_seed(0)
        net = make_net()
        opt = SASSHA(net.parameters(), **OPTIONS, lazy_hessian=100, backend=backend)
        loss = make_loss(net)
        three_calls(opt, loss)
        torch.cuda.synchronize()
        for _ in range(4):
            for call in (opt.perturb_weights, lambda: (opt.unperturb(), opt.step())):
                passes.wait_stream(steps)
                with torch.cuda.stream(passes):
                    loss().backward()
                steps.wait_stream(passes)
                with torch.cuda.stream(steps):
                    torch.cuda._sleep(5_000_000)
                    call()
                if passes is not steps:
                    with torch.cuda.stream(passes):  # does not wait for the other stream, and takes what is free
                        for p in net.parameters():
                            torch.full_like(p, float("nan"))
            passes.wait_stream(steps)
            opt.zero_grad()  # gradients of the second pass are the caller's, as with any optimizer
        torch.cuda.synchronize()
        return snapshot(net)

    current = torch.cuda.current_stream()
    assert_same_bits(trained(torch.cuda.Stream(), torch.cuda.Stream()), trained(current, current))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parameters_of_two_devices_are_updated_on_their_own():
    first = torch.nn.Parameter(torch.randn(1000, device="cuda:0"))
    second = torch.nn.Parameter(first.detach().to("cuda:1"))
    opt = SASSHA([first, second], lr=0.1, rho=0.0, backend="cuda", n_samples=1)
    for p in (first, second):
        (p**4).sum().backward(create_graph=True)
    opt.step()
    assert (first.cpu() != second.cpu()).sum() == 0
