"""What only a GPU can show: `pytest tests --device cuda`. Everywhere else these tests are skipped."""

import pytest
import torch
from cases import DEVICE
from training import assert_same_bits, make_loss, make_net, snapshot, three_calls

from sassha_fast import SASSHA, backends

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and --device cuda")


def test_auto_takes_the_cuda_kernels():
    assert backends.choose("auto", torch.device("cuda:0")).name == "cuda"


def test_an_ordinary_step_reads_nothing_from_the_device():
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.03, rho=0.05, lazy_hessian=100, backend="cuda")
    loss = make_loss(net)
    three_calls(opt, loss)
    for _ in range(2):
        loss().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            opt.perturb_weights(zero_grad=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        loss().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            opt.unperturb()
            opt.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        opt.zero_grad()


def test_a_captured_step_equals_an_eager_one_bit_for_bit():
    def prepared():
        net = make_net()
        opt = SASSHA(net.parameters(), lr=0.03, rho=0.05, lazy_hessian=1000, capturable=True, backend="cuda")
        loss = make_loss(net)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                three_calls(opt, loss)
        torch.cuda.current_stream().wait_stream(stream)
        return net, opt, loss

    def body(opt, loss):
        loss().backward()
        opt.perturb_weights(zero_grad=True)
        loss().backward()
        opt.unperturb()
        opt.step()
        opt.zero_grad()

    eager, opt, loss = prepared()
    for _ in range(4):
        body(opt, loss)
    captured, opt, loss = prepared()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body(opt, loss)
    for _ in range(4):
        graph.replay()
    opt.replayed(4)
    assert_same_bits(snapshot(captured), snapshot(eager))


def test_kernels_run_on_the_current_stream():
    """A kernel on another stream would not wait for the gradients of this one, which come late."""

    def trained(stream):
        net = make_net()
        opt = SASSHA(net.parameters(), lr=0.03, rho=0.05, lazy_hessian=3, backend="cuda")
        loss = make_loss(net)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(5):
                torch.cuda._sleep(5_000_000)
                three_calls(opt, loss)
        torch.cuda.current_stream().wait_stream(stream)
        return snapshot(net)

    assert_same_bits(trained(torch.cuda.Stream()), trained(torch.cuda.current_stream()))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parameters_of_two_devices_are_updated_on_their_own():
    first = torch.nn.Parameter(torch.randn(1000, device="cuda:0"))
    second = torch.nn.Parameter(first.detach().to("cuda:1"))
    opt = SASSHA([first, second], lr=0.1, rho=0.0, backend="cuda", n_samples=1)
    for p in (first, second):
        (p**4).sum().backward(create_graph=True)
    opt.step()
    assert (first.cpu() != second.cpu()).sum() == 0
