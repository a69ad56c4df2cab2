"""Passes that no other file times, on a GPU beside a copy: `pytest bench --device cuda` on a machine with one.

The other files run there too, by the same clock, with the backends of the device.
"""

import pytest
import torch
from kernels import WITH_KERNELS
from races import COPY, race
from settings import slug

PASSES = ("momentum_ascent", "gap_sums", "decompose", "step_in_state")
ROUNDS = 50
pytestmark = pytest.mark.skipif(torch.get_default_device().type != "cuda", reason="needs a GPU and --device cuda")


@pytest.fixture(scope="module", params=PASSES)
def raced(request, settings):
    contenders = {
        name: lambda shapes, make=make: getattr(make(shapes), request.param) for name, make in WITH_KERNELS.items()
    }
    return race(request.param, "gpt", settings, contenders, ROUNDS)


@pytest.mark.parametrize("contender", [*WITH_KERNELS, COPY], ids=slug)
def test_pass(contender, raced, record, say):
    raced.tell(contender, record, say)
