"""The global norm of the gradients, which every ascent begins with: all backends, torch's own, and a loop."""

from functools import partial

import pytest
import torch
from kernels import BACKENDS, EagerPasses, tensors
from races import COPY, EAGER, ROOFLINE, race
from settings import slug
from shapes import MODELS

ROUNDS = {"gpt": 20, "resnet20": 60, "small": 15}


def total_norm(shapes):
    return partial(torch.nn.utils.get_total_norm, tensors(shapes, 1), foreach=True)


CONTENDERS = {
    **{name: lambda shapes, make=make: make(shapes).norm for name, make in BACKENDS.items()},
    "get_total_norm": total_norm,
    EAGER: lambda shapes: EagerPasses(shapes).norm,
}


@pytest.fixture(scope="module", params=MODELS)
def raced(request, settings):
    return race("norm", request.param, settings, CONTENDERS, ROUNDS[request.param])


@pytest.mark.parametrize("contender", [*CONTENDERS, ROOFLINE, COPY], ids=slug)
def test_norm(contender, raced, record, say):
    raced.tell(contender, record, say)
