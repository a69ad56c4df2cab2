"""capturable=True: the same bits, and ordinary steps that read nothing from the device."""

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode
from training import BACKENDS, assert_same_bits, closure_of, make_loss, make_net, snapshot, three_calls

from sassha_fast import GSASSHA, MSASSHA, SASSHA, AdaHessian
from sassha_fast._core.device_scalars import device_scalars
from sassha_fast._core.scalars import Request, step_scalars
from sassha_fast._passes.layout import DeviceScalars, StepScalars
from sassha_fast._passes.upload import KEPT_CONSTANTS, Constants

OPTIONS = {"lr": 0.05, "rho": 0.05, "lazy_hessian": 4, "weight_decay": 0.01}
CLIPPED = {"max_grad_norm": 0.1, "clip_update": 0.7, "maximize": True}
READS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor was read on the host"
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_is_read(monkeypatch):
    """Fails on everything that would make the host wait for a device."""

    def refuse(self, *args):
        raise AssertionError("a tensor was read on the host")

    with monkeypatch.context() as patch, NoReads():
        for name in READS:
            patch.setattr(torch.Tensor, name, refuse)
        yield


def trained(steps, backend="auto", closure=False, dtype=torch.float32, **options):
    net = make_net(dtype)
    opt = SASSHA(net.parameters(), backend=backend, **{**OPTIONS, **options})
    loss = make_loss(net, dtype)
    for _ in range(steps):
        if closure:
            opt.step(closure_of(opt, loss))
        else:
            three_calls(opt, loss)
    return net, opt


@pytest.mark.parametrize("options", [{}, CLIPPED], ids=["plain", "clipped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("closure", [False, True], ids=["calls", "closure"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_capturable_training_has_the_bits_of_the_other(backend, closure, dtype, options):
    found, opt = trained(10, backend, closure, dtype, capturable=True, **options)
    expected, other = trained(10, backend, closure, dtype, **options)
    assert_same_bits(snapshot(found), snapshot(expected))
    for entry, wanted in zip(opt.state.values(), other.state.values(), strict=True):
        assert entry["step"].item() == wanted["step"] == 10
        assert entry["bias_correction2"].item() == wanted["bias_correction2"]
        assert_same_bits([entry["exp_avg"]], [wanted["exp_avg"]])


def test_capturable_training_in_triton_has_the_bits_of_the_other():
    pytest.importorskip("triton")
    found, opt = trained(5, "triton", True, capturable=True, **CLIPPED)
    expected, _ = trained(5, "cpu", True, **CLIPPED)
    assert_same_bits(snapshot(found), snapshot(expected))
    assert opt.stats.refreshes == 2


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1, "skip_nonfinite": True}], ids=["plain", "clipped"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_ordinary_step_reads_nothing_on_the_host(backend, options, tensors, monkeypatch):
    values = {"lr": torch.tensor(0.05), "rho": torch.tensor(0.05)} if tensors else {}
    net, opt = trained(2, backend, capturable=True, **options, **values)
    loss = make_loss(net)
    loss().backward()
    with nothing_is_read(monkeypatch):
        opt.perturb_weights()
    loss().backward()
    with nothing_is_read(monkeypatch):
        opt.unperturb()
        opt.step()
        opt.zero_grad()
        opt.step(closure_of(opt, loss))
    assert opt.state[net[0].weight]["step"].item() == 4


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", [MSASSHA, GSASSHA, AdaHessian])
def test_ordinary_steps_of_the_family_read_nothing_on_the_host(method, backend, tensors, monkeypatch):
    size = 0.0625  # the same number in float32, in which tensors have it
    options = {"lr": size, "lazy_hessian": 4, **({} if method is AdaHessian else {"rho": size})}
    values = {"lr": torch.tensor(size)} if tensors else {}
    if tensors and method is not AdaHessian:
        values["rho"] = torch.tensor(size)
    runs = []
    for changes in ({}, {**values, "capturable": True}):
        net = make_net()
        opt = method(net.parameters(), backend=backend, **{**options, **changes})
        loss = make_loss(net)
        for _ in range(2):  # the step after a refresh sees that every parameter has curvature
            opt.step(closure_of(opt, loss))
        with nothing_is_read(monkeypatch) if changes else nullcontext():
            opt.step(closure_of(opt, loss))
        runs.append(snapshot(net))
    assert_same_bits(*runs)


def test_the_guard_of_these_tests_notices_a_read(monkeypatch):
    value = torch.ones(1)
    for read in (float, bool, lambda t: t.item(), lambda t: t.tolist()):
        with pytest.raises(AssertionError, match="read on the host"), nothing_is_read(monkeypatch):
            read(value)


def test_without_capturable_a_tensor_radius_is_read_and_the_guard_sees_it(monkeypatch):
    net, opt = trained(2, rho=torch.tensor(0.05))
    make_loss(net)().backward()
    with pytest.raises(AssertionError, match="read on the host"), nothing_is_read(monkeypatch):
        opt.perturb_weights()


@pytest.mark.parametrize("backend", BACKENDS)
def test_overflow_is_handled_on_the_device(backend, monkeypatch):
    net, opt = trained(2, backend, capturable=True)
    before = snapshot(net)
    state = copy.deepcopy([dict(entry) for entry in opt.state.values()])
    scaler, loss = GradScaler("cpu", init_scale=16.0), make_loss(net)
    scaler.scale(loss()).backward()
    opt.perturb_weights()
    (scaler.scale(loss()) * float("inf")).backward()
    opt.unperturb(scaler=scaler)
    opt.grad_scale, opt.found_inf = torch.tensor(16.0), torch.tensor(1.0)  # what GradScaler.step sets
    with nothing_is_read(monkeypatch):
        opt.step()
    del opt.grad_scale, opt.found_inf
    opt.zero_grad()
    assert_same_bits(snapshot(net), before)
    for entry, wanted in zip(opt.state.values(), state, strict=True):
        assert_same_bits([entry["exp_avg"], entry["exp_hessian_diag"]], [wanted["exp_avg"], wanted["exp_hessian_diag"]])
        assert entry["step"].item() == wanted["step"].item() == 2
    assert opt.stats.skipped_steps.item() == 1


def test_skipped_steps_are_counted_on_the_device():
    net, opt = trained(2, capturable=True, skip_nonfinite=True)
    base, calls = make_loss(net), 0

    def loss():
        nonlocal calls
        calls += 1
        return base() * (float("nan") if calls == 2 else 1.0)

    three_calls(opt, loss)
    assert opt.stats.skipped_steps.item() == 1
    assert opt.state[net[0].weight]["step"].item() == 2


def test_a_step_that_is_refused_is_not_counted_as_skipped():
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.1, capturable=True, skip_nonfinite=True)
    closure = closure_of(opt, make_loss(net))
    opt.step(closure)
    before = opt.stats.skipped_steps.clone()
    net.double()  # which the state is not
    loss = make_loss(net, torch.float64)
    with pytest.raises(RuntimeError, match="changed its dtype"):
        opt.step(closure_of(opt, lambda: loss() * torch.inf))
    assert torch.equal(opt.stats.skipped_steps, before)


def test_device_scalars_are_the_host_scalars_bit_for_bit():
    first = {"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.1, "eps": 1e-4, "hessian_power": 0.5}
    second = {"lr": 0.3, "betas": (0.85, 0.95), "weight_decay": 0.0, "eps": 1e-8, "hessian_power": 1.0}
    groups = [{**first, "maximize": False}, {**second, "maximize": True, "clip_update": 0.3}]
    cases = [(0, 0, 0.0, True), (1, 1, 0.25, False), (0, 9_999, 0.75, True), (1, 123_456_789, 1.0, False)]
    members, steps, bias2, refreshed = zip(*cases, strict=True)
    request = Request(product_scale=0.3, grad_scale=0.7, skip=0.0)
    found = device_scalars(
        groups,
        list(members),
        [torch.tensor(t) for t in steps],
        [torch.tensor(b, dtype=torch.float64) for b in bias2],
        list(refreshed),
        request,
        Constants(),
    )
    for i, (group, step, correction, refresh) in enumerate(cases):
        expected = step_scalars(groups[group], step + 1, correction, refresh=refresh, request=request)
        assert found.table[i].tolist() == list(expected)
        assert found[i].power == expected.power
    assert isinstance(found, DeviceScalars)
    assert len(found) == 4
    assert found.table.shape[1] == len(StepScalars._fields)


def test_vectors_mix_numbers_and_tensors():
    device, constants = torch.device("cpu"), Constants()
    assert constants.vector([1.0, torch.tensor(2.0)], device).tolist() == [1.0, 2.0]
    assert constants.constant((1.0, 2.0), device) is constants.constant((1.0, 2.0), device)


def test_constants_that_change_at_every_step_do_not_pile_up():
    device, constants = torch.device("cpu"), Constants()
    kept = constants.constant((7.0,), device)
    for step in range(10 * KEPT_CONSTANTS):
        constants.vector([0.1 / (step + 1), 1.0], device)
        assert constants.constant((7.0,), device) is kept  # which is in use
    assert len(constants) == KEPT_CONSTANTS


def test_checkpoints_move_between_both_forms():
    net, opt = trained(5, capturable=True)
    expected, other = trained(5)
    for source, capturable in ((opt, False), (other, True)):
        fresh = make_net()
        fresh.load_state_dict(expected.state_dict())
        loaded = SASSHA(fresh.parameters(), **OPTIONS, capturable=capturable)
        loaded.load_state_dict(source.state_dict())
        for _ in range(5):
            three_calls(loaded, make_loss(fresh))
        assert_same_bits(snapshot(fresh), snapshot(trained(10)[0]))
    assert_same_bits(snapshot(net), snapshot(expected))


def test_replayed_steps_move_the_clock():
    _, opt = trained(1, capturable=True)
    assert not opt.hessian_due
    opt.replayed(3)
    assert opt.hessian_due
    with pytest.raises(RuntimeError, match="construct SASSHA with capturable=True"):
        trained(1)[1].replayed()
    with pytest.raises(ValueError, match="steps is 0"):
        opt.replayed(0)
