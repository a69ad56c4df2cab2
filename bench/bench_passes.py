"""Each kernel against a loop without arithmetic that moves the same bytes, on GPT shapes."""

import pytest
from contenders import Floors, Kernels, adamw
from measure import interleave, ratio, stopwatch
from shapes import count, gpt

from sassha_fast import traffic

TIMED = ("norm", "perturb", "restore", "step", "refresh_step")
# Bytes per float32 parameter: the reads and writes that the algorithm can't do without.
BYTES = {name: traffic.bytes_per_parameter(name) for name in TIMED}
ROUNDS = 40


@pytest.fixture(scope="module")
def measured():
    kernels, floors = Kernels(gpt()), Floors(gpt())
    contenders = {"copy": stopwatch(floors.copy), "adamw_fused": adamw(gpt(), fused=True)}
    for name in BYTES:
        contenders[name] = stopwatch(getattr(kernels, name))
        contenders[f"floor_{name}"] = stopwatch(getattr(floors, name))
    contenders["ordinary"] = stopwatch(kernels.ordinary)
    return interleave(contenders, ROUNDS)


@pytest.mark.parametrize("name", BYTES)
def test_pass(name, measured, record, say):
    floor = ratio(measured[name], measured[f"floor_{name}"])
    speed = BYTES[name] * count(gpt()) / measured[name].median / 1e9
    record(measured[name], bytes_per_parameter=BYTES[name], ratio_to_floor=floor, gigabytes_per_second=speed)
    say(
        f"gpt, {name:<13} {measured[name].median * 1e3:7.2f} ms  {BYTES[name]:2d} bytes/parameter  {speed:5.1f} GB/s  "
        f"{floor:4.2f} x the loop without arithmetic (target 1.15)"
    )


@pytest.mark.parametrize("name", BYTES)
def test_floor(name, measured, record):
    record(measured[f"floor_{name}"], bytes_per_parameter=BYTES[name])


def test_copy_bandwidth(measured, record, say):
    speed = 8 * count(gpt()) / measured["copy"].median / 1e9
    record(measured["copy"], gigabytes_per_second=speed)
    say(f"gpt, copy          {measured['copy'].median * 1e3:7.2f} ms   8 bytes/parameter  {speed:5.1f} GB/s")


def test_ordinary_step_against_fused_adamw(measured, record, say):
    against = ratio(measured["ordinary"], measured["adamw_fused"])
    record(measured["ordinary"], ratio_to_fused_adamw=against)
    say(f"gpt, norm + perturb + step with restore fused in: {against:4.2f} x fused AdamW (target 1.9)")


def test_refresh_against_ordinary_step(measured, record, say):
    against = ratio(measured["refresh_step"], measured["step"])
    record(measured["refresh_step"], ratio_to_step=against)
    say(f"gpt, refresh step kernel: {against:4.2f} x the ordinary step kernel (target 1.5)")
