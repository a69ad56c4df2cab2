"""The ascent to x + ε and the way back to x: all backends against the loop in the authors' style."""

from itertools import product
from operator import attrgetter

import pytest
from kernels import BACKENDS, EagerPasses
from races import COPY, EAGER, ROOFLINE, race
from settings import slug
from shapes import MODELS

ROUNDS = {"gpt": 15, "resnet20": 60, "small": 12}
MAKERS = {**BACKENDS, EAGER: EagerPasses}


def contenders(name):
    return {contender: lambda shapes, make=make: attrgetter(name)(make(shapes)) for contender, make in MAKERS.items()}


@pytest.fixture(scope="module", params=product(MODELS, ("perturb", "restore")), ids="-".join)
def raced(request, settings):
    model, name = request.param
    return race(name, model, settings, contenders(name), ROUNDS[model])


@pytest.mark.parametrize("contender", [*MAKERS, ROOFLINE, COPY], ids=slug)
def test_pass(contender, raced, record, say):
    raced.tell(contender, record, say)
