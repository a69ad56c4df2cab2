"""``torch.set_default_device`` is for the user's tensors: ours lie where the parameters are."""

import ast
import copy
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils._device import _device_constructors
from training import (
    assert_same_bits,
    assert_same_state,
    closure_of,
    make_loss,
    make_net,
    same_bits,
    snapshot,
    state_of,
    three_calls,
)

import sassha_fast
from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH, check_model
from sassha_fast.log import StatsLog, read_log
from sassha_fast.sharpness import Sharpness

BACKENDS = ("reference", "foreach", "cpu", "triton")
METHODS = {
    "SASSHA": (SASSHA, {"rho": 0.1, "adaptive": True}),
    "GSASSHA": (GSASSHA, {"rho": 0.1, "alpha": 0.2}),
    "MSASSHA": (MSASSHA, {"rho": 0.1}),
    "AdaHessian": (AdaHessian, {}),
    "SophiaH": (SophiaH, {}),
}
PRODUCTS = {
    "exact": {},
    "probes": {"n_samples": 2},
    "finite_difference": {"hvp": "finite_difference"},
    "central_difference": {"hvp": "central_difference", "n_samples": 2},
    "capturable": {"capturable": True},
    "limited": {"max_grad_norm": 0.1, "skip_nonfinite": True, "unseen": "zero"},
    "rounded": {"stochastic_rounding": True},
}


@contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def one_call(opt, loss):
    """A hand-written step of a method without an ascent of its own."""
    loss().backward(create_graph=opt.hvp == "exact" and opt.hessian_due)
    if opt.probes_due and not isinstance(opt, MSASSHA):
        opt.perturb_weights(zero_grad=False)
    for _ in range(opt.probes_due):
        opt.probe_weights()
        loss().backward()
    opt.take_products()
    opt.step()
    opt.zero_grad()


def trained(method, device, dtype=torch.float32, **options):
    """Parameters and state after closures, micro-batches, calls and a checkpoint, with this default device."""
    net = make_net(dtype)
    loss = make_loss(net, dtype)
    with default_device(device):
        opt = method(net.parameters(), lr=0.01, **options)
        calls = three_calls if isinstance(opt, (SASSHA, SAM)) else one_call
        opt.step(closure_of(opt, loss))
        calls(opt, loss)
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        calls(opt, loss)
        opt.step([lambda: backward(loss() / 2)] * 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        opt.step(closure_of(opt, loss, lambda value: scaler.scale(value).backward()), scaler=scaler)
        if isinstance(opt, MSASSHA):
            opt.eval()
            opt.train()
        norm = opt.stats.grad_norm
    return snapshot(net), state_of(opt), norm


def backward(value):
    value.backward()
    return value


def assert_same_run(method, **options):
    expected, found = (trained(method, device, **options) for device in (None, "meta"))
    assert_same_bits(found[0], expected[0])
    assert_same_state(found[1], expected[1])
    assert str(found[2]) == str(expected[2])


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", BACKENDS[:3])
def test_training_is_the_same_with_a_default_device_of_meta(backend, method, products):
    cls, options = METHODS[method]
    assert_same_run(cls, backend=backend, lazy_hessian=2, **options, **PRODUCTS[products])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_the_same_too(dtype, method):
    cls, options = METHODS[method]
    for backend in BACKENDS[:3]:
        assert_same_run(cls, backend=backend, dtype=dtype, lazy_hessian=2, **options)


@pytest.mark.parametrize("method", ["GSASSHA", "MSASSHA"])
def test_interpreted_kernels_are_the_same_too(method):
    cls, options = METHODS[method]
    assert_same_run(cls, backend="triton", lazy_hessian=2, **options)


@pytest.mark.parametrize("backend", BACKENDS[:3])
def test_sam_is_the_same_too(backend):
    assert_same_run(lambda p, **given: SAM(p, SGD, **given), backend=backend, rho=0.1, alpha=0.1, momentum=0.9)


def measured(device, path):
    """What the tools beside the optimizers find."""
    net = make_net()
    loss, x = make_loss(net), torch.ones(4, 12)
    batch = torch.randn(32, 12, generator=torch.Generator().manual_seed(3)), torch.arange(32) % 3
    with default_device(device):
        opt = SASSHA(net.parameters(), lr=0.01, rho=0.1)
        with StatsLog(opt, path):
            for _ in range(2):
                opt.step(closure_of(opt, loss))
        check_model(net, x)
        sharpness = Sharpness(net, nn.functional.cross_entropy, [batch])
        numbers = [
            sharpness.eigenpairs(2)[0],
            sharpness.trace(3),
            sharpness.average_gap(0.1),
            sharpness.gradient_gap(0.1),
        ]
        numbers += [sharpness.curve(points=3).losses, sharpness.surface(points=3).losses]
    return [torch.as_tensor(value, dtype=torch.float64) for value in numbers], read_log(path)


def test_logs_and_measures_of_sharpness_are_the_same_too(tmp_path):
    (expected, rows), (found, others) = measured(None, tmp_path / "a.csv"), measured("meta", tmp_path / "b.csv")
    for one, other in zip(expected, found, strict=True):
        assert same_bits(one, other)
    assert str(rows) == str(others)


def makes_a_tensor(node):
    """Whether a call in a source is one of torch's that the default device is for: ``torch.zeros`` and the like."""
    called = node.func if isinstance(node, ast.Call) else None
    if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name) or called.value.id != "torch":
        return False
    makers = {maker.__name__ for maker in _device_constructors()}
    return called.attr in makers - {"load"}


def test_every_tensor_that_the_package_makes_names_its_device():
    found, unnamed = 0, []
    for path in sorted(Path(sassha_fast.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if makes_a_tensor(node):
                found += 1
                if not any(keyword.arg in ("device", None) for keyword in node.keywords):
                    unnamed.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert found > 50
    assert not unnamed, "\n".join(unnamed)
