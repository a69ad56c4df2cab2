"""What goes on around a step, with compact state in the kernels of GPUs: the same bits as the reference."""

import pytest
import torch
from cases import DEVICE
from sim import SimPasses
from test_amp import overflowing, scaled_calls, scaled_closure
from torch.amp import GradScaler
from training import assert_same_bits, assert_same_state, closure_of, make_loss, make_net, snapshot, state_of

from sassha_fast import MSASSHA, SASSHA, backends

OPTIONS = {"lr": 0.05, "rho": 0.05, "lazy_hessian": 2, "weight_decay": 0.01, "full_precision_below": 0}
SETTINGS = {
    "float32": (torch.float32, {"state_bits": 8}),
    "smallest": (torch.bfloat16, {"state_bits": 8, "master_weight_bits": 24}),
    "exact": (torch.float16, {"state_bits": 16, "master_weight_bits": 32}),
}
CLIPPED = {"max_grad_norm": 0.1, "clip_update": 0.7, "maximize": True}
STEPS = 4
BAD_CALL = 4  # of the loss: the pass at x + ε of the second step, which is an ordinary one


@pytest.fixture(params=["cuda_sim" if DEVICE == "cpu" else "cuda", "triton"])
def backend(request, monkeypatch):
    """Backends of GPUs: on a CPU the simulator of CUDA is one that an optimizer can be built with."""
    if request.param == "triton":
        pytest.importorskip("triton")
    elif request.param == "cuda_sim":
        made = backends.Backend("cuda_sim", "the CUDA kernels on the CPU", lambda: SimPasses, lambda device: None)
        monkeypatch.setitem(backends._REGISTRY, "cuda_sim", made)
    return request.param


def by_closure(opt, loss, scaler):
    del scaler
    opt.step(closure_of(opt, loss))


def trained(setting, backend, way=by_closure, kind=SASSHA, bad_call=None, **options):
    """Weights, state and the optimizer after a few steps, two of them refreshes."""
    dtype, stored = SETTINGS[setting]
    net = make_net(dtype)
    opt = kind(net.parameters(), backend=backend, **OPTIONS, **stored, **options)
    loss = make_loss(net, dtype)
    loss = loss if bad_call is None else overflowing(loss, bad_call)
    scaler = GradScaler(DEVICE, init_scale=1024.0)
    for _ in range(STEPS):
        way(opt, loss, scaler)
    return snapshot(net), state_of(opt), opt


def assert_equals_the_reference(backend, setting, **options):
    weights, state, opt = trained(setting, backend, **options)
    wanted, wanted_state, other = trained(setting, "reference", **options)
    assert_same_bits(weights, wanted)
    assert_same_state(state, wanted_state)
    assert opt.stats.skipped_steps == other.stats.skipped_steps
    small = [entry["exp_avg"].dtype for entry in state[::2]]
    assert set(small) == {torch.int8 if SETTINGS[setting][1]["state_bits"] == 8 else torch.bfloat16}
    return weights, opt


@pytest.mark.parametrize(("setting", "kind"), [*((setting, SASSHA) for setting in SETTINGS), ("smallest", MSASSHA)])
def test_capturable_clipped_and_maximized(backend, setting, kind):
    weights, _ = assert_equals_the_reference(backend, setting, kind=kind, capturable=True, **CLIPPED)
    assert_same_bits(weights, trained(setting, "reference", kind=kind, **CLIPPED)[0])


@pytest.mark.parametrize(("setting", "clip"), [("float32", False), ("smallest", True), ("exact", False)])
def test_a_grad_scaler_whose_scale_overflows_once(backend, setting, clip):
    def way(*args):
        scaled_calls(*args, clip=clip)

    _, opt = assert_equals_the_reference(backend, setting, way=way, bad_call=BAD_CALL)
    assert opt.stats.skipped_steps == 1


def test_a_grad_scaler_in_a_closure(backend):
    options = {"way": scaled_closure, "hvp": "finite_difference", "bad_call": BAD_CALL + 1}  # after a probe
    _, opt = assert_equals_the_reference(backend, "smallest", **options)
    assert opt.stats.skipped_steps == 1


@pytest.mark.parametrize(("setting", "capturable"), [("float32", False), ("smallest", True), ("exact", False)])
def test_a_gradient_that_is_not_finite_is_skipped(backend, setting, capturable):
    options = {"skip_nonfinite": True, "capturable": capturable, "bad_call": BAD_CALL}
    _, opt = assert_equals_the_reference(backend, setting, **options)
    assert opt.stats.skipped_steps == 1


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_skipped_step_leaves_codes_scales_and_corrections_alone(backend, setting):
    dtype, stored = SETTINGS[setting]
    net = make_net(dtype)
    opt = SASSHA(net.parameters(), backend=backend, skip_nonfinite=True, **OPTIONS, **stored)
    loss = make_loss(net, dtype)
    opt.step(closure_of(opt, loss))
    before, state = snapshot(net), state_of(opt)
    opt.step(closure_of(opt, overflowing(loss, 2)))
    assert_same_bits(snapshot(net), before)
    assert_same_state(state_of(opt), state)
