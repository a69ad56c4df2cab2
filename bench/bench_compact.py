"""State and weights in fewer bits: the three calls on 27 M parameters against float32, and the bytes that they move."""

from functools import partial

import pytest
import torch
from contenders import NEVER, three_calls
from kernels import kernel_backends
from measure import interleave, ratio
from settings import slug
from shapes import count

from sassha_fast import SASSHA, traffic
from sassha_fast.formats import FULL, Format

ROUNDS = 20
FULL_NAME, SMALLEST = "float32", "bfloat16, 24-bit weights, 8-bit state"
# By name: the dtype of the parameters, the options, and how all but small parameters are stored then.
SETTINGS = {
    FULL_NAME: (torch.float32, {}, FULL),
    SMALLEST: (torch.bfloat16, {"state_bits": 8, "master_weight_bits": 24}, Format(8, 8)),
    "bfloat16, 32-bit weights, 16-bit state": (
        torch.bfloat16,
        {"state_bits": 16, "master_weight_bits": 32},
        Format(16, 16),
    ),
    "bfloat16": (torch.bfloat16, {}, FULL),
    "float32, 8-bit state": (torch.float32, {"state_bits": 8}, Format(8)),
    "float32, 16-bit state": (torch.float32, {"state_bits": 16}, Format(16)),
}
TARGETS = {SMALLEST: 0.8}  # of float32's time


@pytest.fixture(scope="module")
def measured(settings):
    shapes = settings.shapes("gpt")
    backend = kernel_backends()[0]
    runs = {
        name: partial(three_calls, make=SASSHA, lazy_hessian=NEVER, backend=backend, dtype=dtype, **options)(shapes)
        for name, (dtype, options, _) in SETTINGS.items()
    }
    return shapes, interleave(runs, settings.rounds(ROUNDS))


@pytest.mark.parametrize("name", SETTINGS, ids=slug)
def test_three_calls(name, measured, record, say):
    shapes, found = measured
    mine, against = found[name], ratio(found[name], found[FULL_NAME])
    dtype, _, stored = SETTINGS[name]
    passes = traffic.METHODS["SASSHA"][0]
    moved = sum(
        traffic.bytes_per_parameter(part, dtype, stored) + traffic.scale_bytes_per_parameter(part, stored)
        for part in passes
    )
    speed = moved * count(shapes) / mine.median / 1e9
    record(
        mine,
        name,
        main=("ratio_to_float32", against),
        model="gpt",
        calls="three calls",
        parameters=count(shapes),
        tensors=len(shapes),
        bytes_per_parameter=moved,
        gigabytes_per_second=speed,
        **({"target": TARGETS[name]} if name in TARGETS else {}),
    )
    target = f"  (target {TARGETS[name]:g})" if name in TARGETS else ""
    say(
        f"gpt      three calls  {name:<38} {mine.median * 1e3:8.3f} ms {moved:6.2f} bytes {speed:6.1f} GB/s  "
        f"{against} float32's time{target}"
    )
