"""The registry, its report, schedules and stats."""

import math
import os
import re
import subprocess
import sys

import pytest
import torch
from training import make_loss, make_net, three_calls

import sassha_fast
from sassha_fast import SASSHA, Stats, backends, schedules


def test_auto_takes_the_kernels_on_the_cpu_and_foreach_elsewhere():
    assert backends.choose("auto", torch.device("cpu")).name == "cpu"
    assert backends.choose("auto", torch.device("meta")).name == "foreach"


def test_available_names_what_runs():
    assert backends.names() == ["cpu", "cuda", "triton", "foreach", "reference"]
    assert backends.available("cpu") == ["cpu", "triton", "foreach", "reference"]
    assert backends.available("meta") == ["foreach", "reference"]


def test_fused_takes_the_kernels_of_the_device():
    assert backends.choose("fused", torch.device("cpu")).name == "cpu"
    with pytest.raises(RuntimeError, match="backend 'cpu' can't run parameters on meta"):
        backends.choose("fused", torch.device("meta"))


def test_cuda_says_why_it_does_not_run(monkeypatch):
    with pytest.raises(RuntimeError, match="its kernels run on CUDA devices, not on cpu"):
        backends.choose("cuda", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for backend in ("cuda", "fused"):
        with pytest.raises(RuntimeError, match=r"torch finds no CUDA device|was built without CUDA"):
            backends.choose(backend, torch.device("cuda:0"))
    assert backends.choose("auto", torch.device("cuda:0")).name == "foreach"
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key: False)
    with pytest.raises(RuntimeError, match=r"was built without CUDA; build it again with SASSHA_CUDA=1"):
        backends.choose("cuda", torch.device("cuda:0"))


BUILT_WITH_13 = {"built": 13000, "runtime": 13020, "driver": 13020, "least": 75}


@pytest.mark.parametrize(
    ("changed", "capability", "expected"),
    [
        ({}, (8, 0), None),
        ({"built": 12080}, (8, 0), None),
        ({"runtime": 13000, "driver": 13000}, (12, 0), None),
        ({"runtime": 0, "driver": 0}, (8, 0), None),
        ({"runtime": 12080}, (8, 0), "was built with CUDA 13.0, but torch has CUDA 12.8; use a wheel or an nvcc of"),
        ({"driver": 12090}, (8, 0), "built with CUDA 13.0, but the driver knows CUDA 12.9; use a wheel or an nvcc of"),
        ({}, (7, 0), "code for GPUs from sm_75 on, and this one is sm_70; build it again with SASSHA_CUDA_ARCHS=70"),
    ],
)
def test_kernels_that_do_not_fit_torch_driver_or_gpu_are_refused_in_one_sentence(
    changed, capability, expected, monkeypatch
):
    versions = backends.library.CudaVersions(**{**BUILT_WITH_13, **changed})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key: True)
    monkeypatch.setattr(backends.library, "cuda_versions", lambda: versions)
    if expected is None:
        assert backends.choose("cuda", torch.device("cuda:0")).name == "cuda"
        assert backends.choose("auto", torch.device("cuda:0")).name == "cuda"
    else:
        with pytest.raises(RuntimeError, match=re.escape(expected)):
            backends.choose("cuda", torch.device("cuda:0"))
        assert expected in backends.report()
        assert backends.choose("auto", torch.device("cuda:0")).name == "foreach"


def test_where_library_and_driver_do_not_fit_auto_goes_on_to_triton():
    code = """
import torch
from sassha_fast import backends
assert backends.library.load() is None
torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda: (8, 0)
torch._C._dispatch_has_kernel_for_dispatch_key = lambda op, key: True
backends.library.cuda_versions = lambda: backends.library.CudaVersions(13000, 13000, 12080, 75)
print(backends.choose("auto", torch.device("cuda:0")).name)
print(backends.report())
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    chosen, *report = done.stdout.splitlines()
    assert chosen == "triton"
    assert any("but the driver knows CUDA 12.8" in line for line in report)
    assert "'triton' on GPUs" in report[-1]


def test_report_names_every_backend_and_its_state():
    text = backends.report()
    assert sassha_fast.__version__ in text
    for name in backends.names():
        assert name in text
    assert torch.ops.sassha_fast.cpu_isa() in text


def test_module_prints_the_report():
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "sassha_fast"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == backends.report()


def test_a_library_that_was_not_built_is_said_so(monkeypatch, tmp_path):
    monkeypatch.setattr(backends.library, "LIBRARY", tmp_path / "_native.so")
    backends.library.load.cache_clear()
    try:
        assert backends.available("cpu") == ["triton", "foreach", "reference"]
        assert backends.choose("auto", torch.device("cpu")).name == "foreach"
        with pytest.raises(RuntimeError, match="was not built; run `make build`"):
            backends.choose("cpu", torch.device("cpu"))
    finally:
        monkeypatch.undo()
        backends.library.load.cache_clear()
        assert backends.library.load() is None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "auto"),
        ({"foreach": True}, "foreach"),
        ({"fused": True}, "fused"),
        ({"foreach": False, "fused": False}, "reference"),
        ({"foreach": False}, "auto"),
    ],
)
def test_torchs_flags_are_aliases(flags, expected):
    assert backends.resolve("auto", **flags) == expected
    assert SASSHA(make_net().parameters(), **flags).backend == expected
    assert SASSHA(make_net().parameters(), backend=expected).backend == expected


def test_schedules_run_from_start_to_end_and_stay_there():
    for kind in (schedules.Linear, schedules.Cosine):
        values = [kind(4, 0.5, 1.0)(t) for t in (0, 2, 4, 9)]
        assert values == pytest.approx([0.5, 0.75, 1.0, 1.0])
        with pytest.raises(ValueError, match="total_steps is 0"):
            kind(0, 0.5, 1.0)
    assert schedules.Cosine(4, 0.5, 1.0)(1) == pytest.approx(0.5 + 0.5 * (1 - math.cos(math.pi / 4)) / 2)
    assert schedules.Constant(0.7)(123) == 0.7


def test_power_may_follow_the_learning_rate():
    opt = SASSHA(make_net().parameters(), lr=0.1)
    power = schedules.ProportionalToLR(opt, max_lr=0.1, min_lr=0.0, max_value=1.0, min_value=0.5)
    assert power(0) == 0.5
    opt.param_groups[0]["lr"] = 0.05
    assert power(0) == 0.75
    with pytest.raises(ValueError, match=r"max_lr is 0\.1, expected more than min_lr=0\.2"):
        schedules.ProportionalToLR(opt, max_lr=0.1, min_lr=0.2, max_value=1.0, min_value=0.5)


def test_next_value_asks_functions_and_stepping_objects():
    class Stepping:
        def step(self):
            return 3

    assert schedules.next_value(schedules.Linear(2, 0.0, 1.0), 1) == 0.5
    assert schedules.next_value(Stepping(), 1) == 3.0
    schedules.check_schedule("x", Stepping())
    with pytest.raises(TypeError, match="x is 'soon'"):
        schedules.check_schedule("x", "soon")


def test_stats_are_unknown_before_the_first_step_and_tensors_after_it():
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.01, rho=0.05)
    assert isinstance(opt.stats, Stats)
    assert math.isnan(opt.stats.grad_norm)
    three_calls(opt, make_loss(net))
    assert opt.stats.grad_norm > 0
    assert opt.stats.trace.dtype == torch.float64
    assert math.isnan(opt.stats.ascent_gap)
    assert (opt.stats.refreshes, opt.stats.skipped_refreshes, opt.stats.partial_refreshes) == (1, 0, 0)
