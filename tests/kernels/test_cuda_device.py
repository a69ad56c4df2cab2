"""What only a GPU can show, or the virtual one: `pytest tests --device cuda`. Elsewhere these tests are skipped."""

import gc
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from cases import DEVICE
from training import assert_same_bits, closure_of, make_loss, make_net, snapshot, three_calls

from sassha_fast import GSASSHA, MSASSHA, SASSHA, backends

try:
    import vgpu
except ImportError:
    vgpu = None

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and --device cuda")

BACKENDS = ("cuda", "triton")
METHODS = (SASSHA, MSASSHA, GSASSHA)
OPTIONS = {"lr": 0.03, "rho": 0.05}
MOST_STEPS_TO_SETTLE = 40  # until torch's allocator hands out the same memory at every step; mostly 5 to 18


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


@pytest.mark.parametrize("options", [{}, {"hvp": "finite_difference"}], ids=["exact", "differences"])
@pytest.mark.parametrize("tell", [True, False], ids=["told", "found"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_capturable_step_with_a_loss_scale_waits_for_the_device(backend, tell, options):
    found = []
    for name in (backend, "reference"):
        net = make_net()
        opt = SASSHA(net.parameters(), **OPTIONS, lazy_hessian=2, backend=name, capturable=True, **options)
        loss, scaler = make_loss(net), torch.amp.GradScaler("cuda", init_scale=1024.0)
        for number in range(6):
            watched = no_waiting if number > 2 and name == backend else nullcontext
            scaler.scale(loss()).backward()
            with watched():
                opt.perturb_weights()
            scaler.scale(loss()).backward(create_graph=opt.hessian_due and opt.hvp == "exact")
            for _ in range(opt.probes_due):
                with watched():
                    opt.probe_weights()
                scaler.scale(loss()).backward()
            with watched():
                opt.unperturb(scaler=scaler if tell else None)
                scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            torch.cuda.synchronize()  # so that what a refresh brought is there when the next update asks
        assert opt.stats.refreshes == 3
        found.append(snapshot(net))
    assert_same_bits(*found)


ASYNC = "backend:cudaMallocAsync"
EXCHANGE = """
import sys, warnings
if "vgpu" in sys.argv:
    from vgpu import operators
    operators.install()
import torch
from sassha_fast import SASSHA
warnings.filterwarnings("error", message=".*record_stream")
assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
p = torch.nn.Parameter(torch.ones(300, device="cuda"))
opt = SASSHA([p], lr=0.01, rho=0.05, lazy_hessian=2)
for _ in range(3):
    (p * p * p * p).sum().backward()
    opt.perturb_weights()
    (p * p * p * p).sum().backward(create_graph=opt.hessian_due)
    opt.unperturb()
    opt.step()
    opt.zero_grad()
"""


def test_no_other_allocator_warns_of_the_streams_that_it_is_told():
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": ASYNC}
    command = [sys.executable, "-c", EXCHANGE, *(["vgpu"] if vgpu and vgpu.is_running() else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(ASYNC in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""), reason="addresses do not recur there")
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

    uploads = []
    for _ in range(MOST_STEPS_TO_SETTLE):
        step()
        uploads.append(sum(mirrors.uploads for mirrors in mirrors_of(opt)))
        if uploads[-1] == uploads[-4:][0] and len(uploads) > 3:
            break
    assert uploads[-4] == uploads[-1] > 0, uploads  # none in three steps


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


def on_two_streams(first, then, junk):
    """Calls on one stream, and then on the current one, which is late; the first hands out what is free meanwhile.

    Nothing but the optimizer tells the first stream's allocator what the current one still reads.
    """
    early, here = torch.cuda.Stream(), torch.cuda.current_stream()
    early.wait_stream(here)
    with torch.cuda.stream(early):
        first()
    here.wait_stream(early)
    torch.cuda.synchronize()
    torch.cuda._sleep(10_000_000)
    then()
    with torch.cuda.stream(early):
        filled = [torch.full(n, -77.0, dtype=dtype) for n, dtype in junk for _ in range(50)]
    early.synchronize()
    torch.cuda.synchronize()
    del filled


def on_one_stream(first, then, junk):
    first()
    then()


@pytest.mark.parametrize("capturable", [False, True], ids=["eager", "capturable"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_eval_and_train_on_another_stream_than_the_steps_find_the_length_of_the_ascent(backend, capturable):
    """M-SASSHA keeps it from step to step; the next step replaces it, while train() may still have to read it."""

    def trained(run):
        p = torch.nn.Parameter(torch.linspace(0.5, 1.5, 300))
        opt = MSASSHA([p], lr=0.01, rho=0.3, lazy_hessian=100, backend=backend, capturable=capturable)

        def step():
            (p * p * p * p).sum().backward(create_graph=opt.hessian_due)
            opt.step()
            opt.zero_grad()

        run(lambda: [step() for _ in range(3)], lambda: (opt.eval(), opt.train(), step()), [((1,), torch.float32)])
        return [p.detach().cpu()]

    assert_same_bits(trained(on_two_streams), trained(on_one_stream))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refresh_that_failed_on_another_stream_keeps_the_numbers_of_the_last(backend):
    def trained(run):
        p = torch.nn.Parameter(torch.linspace(0.5, 1.5, 300))
        opt = SASSHA([p], lr=0.01, rho=0.05, lazy_hessian=2, backend=backend)

        def step(fails=False):
            (p * p * p * p).sum().backward()
            opt.perturb_weights()
            (p * p * p * p).sum().backward(create_graph=opt.hessian_due)
            if fails:
                p.grad.register_hook(lambda grad: grad * torch.inf)
            opt.unperturb()
            opt.step()
            opt.zero_grad()

        run(lambda: (step(), step()), lambda: step(fails=True), [((), torch.float64)])
        assert opt.stats.skipped_refreshes == 1
        return [opt.stats.trace.cpu(), opt.stats.negative_share.cpu()]

    assert_same_bits(trained(on_two_streams), trained(on_one_stream))


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_an_ascent_are_divided_by_a_loss_scale_on_another_stream(backend):
    def trained(run):
        p = torch.nn.Parameter(torch.linspace(0.5, 1.5, 300))
        opt = SASSHA([p], lr=0.01, rho=0.05, lazy_hessian=100, backend=backend)
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
        opt.step(closure_of(opt, lambda: (p * p * p * p).sum()))
        opt.zero_grad()

        def passed():
            scaler.scale((p * p * p * p).sum()).backward()

        def descend():
            opt.unperturb(scaler=scaler)
            opt.step()

        run(
            lambda: (passed(), opt.perturb_weights(), passed()), descend, [((1,), torch.float32), ((1,), torch.float64)]
        )
        return [opt.stats.square_sums.cpu(), opt.stats.scales.cpu()]

    torch.testing.assert_close(trained(on_two_streams), trained(on_one_stream), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("hvp", ["finite_difference", "central_difference"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_probes_on_another_stream_than_the_last_call_are_all_read(backend, hvp):
    def trained(run):
        p = torch.nn.Parameter(torch.linspace(0.5, 1.5, 5000))
        opt = SASSHA([p], lr=0.01, rho=0.05, lazy_hessian=1, hvp=hvp, n_samples=2, backend=backend)

        def passed():
            (p * p * p * p).sum().backward()

        opt.step(closure_of(opt, lambda: (p * p * p * p).sum()))  # makes state, for which it waits
        opt.zero_grad()

        def climb():
            passed()
            opt.perturb_weights()
            passed()
            for _ in range(opt.probes_due):
                opt.probe_weights()
                passed()

        run(climb, lambda: (opt.unperturb(), opt.step()), [((5000,), torch.float32)])
        return [p.detach().cpu()]

    assert_same_bits(trained(on_two_streams), trained(on_one_stream))


@pytest.mark.parametrize("order", [("cpu", "cuda"), ("cuda", "cpu")], ids=["host first", "device first"])
@pytest.mark.parametrize("method", METHODS)
def test_parameters_of_host_and_device_are_updated_as_in_one_place(method, order):
    def trained(devices):
        params = [torch.nn.Parameter(torch.linspace(0.5, 1.5, 300, device="cpu").to(device)) for device in devices]
        opt = method(params, **OPTIONS, lazy_hessian=2)
        for _ in range(4):
            opt.step(closure_of(opt, lambda: sum((p**4).sum().to("cpu") for p in params)))
        return [p.detach().cpu() for p in params], opt.stats.refreshes

    (found, refreshes), (expected, wanted) = trained(order), trained(("cpu", "cpu"))
    assert refreshes == wanted == 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parameters_of_two_devices_are_updated_on_their_own():
    first = torch.nn.Parameter(torch.randn(1000, device="cuda:0"))
    second = torch.nn.Parameter(first.detach().to("cuda:1"))
    opt = SASSHA([first, second], lr=0.1, rho=0.0, backend="cuda", n_samples=1)
    for p in (first, second):
        (p**4).sum().backward(create_graph=True)
    opt.step()
    assert (first.cpu() != second.cpu()).sum() == 0


@pytest.mark.skipif(vgpu is None or not vgpu.is_running(), reason="about the virtual GPU")
def test_an_operation_of_the_virtual_gpu_may_queue_another():
    """As Python's garbage collector does, which may run within one: the stream is busy, but with nobody else's work."""

    class Late:
        def __init__(self):
            self.itself, self.filled = self, torch.empty(8)

        def __del__(self):
            self.filled.zero_()
            done.append(self.filled)

    done, before = [], gc.get_threshold()
    vgpu.set_lazy(False)
    try:
        for threshold in range(5, 60):
            gc.set_threshold(threshold)
            for _ in range(8):
                Late()
                x = torch.ones(8) * 1.0
        gc.set_threshold(*before)
        gc.collect()
    finally:
        gc.set_threshold(*before)
        vgpu.set_lazy(os.environ.get("VGPU_POLICY") != "eager")
    torch.cuda.synchronize()
    assert torch.stack([x, *done]).unique().tolist() == [0.0, 1.0]
