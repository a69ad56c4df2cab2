"""What a refresh of the curvature costs: products with the Hessian, and the signs that probe it."""

from itertools import product

import pytest
import torch
from kernels import WITH_KERNELS, WITHOUT_KERNELS, EagerPasses, tensors
from measure import interleave, ratio, stopwatch, together
from models import MODELS
from races import EAGER, ROOFLINE, race
from settings import slug
from training import CENTRAL, EXACT, FORWARD, ORDINARY, build

ROUNDS = 4
PROBE_ROUNDS = {"gpt": 10, "resnet20": 40}
PRODUCTS = (EXACT, FORWARD, CENTRAL)


@pytest.fixture(scope="module", params=MODELS)
def refreshed(request, settings):
    steps = {"gradient": build(request.param, "gradient")[ORDINARY], **build(request.param, "products")}
    timed = {kind: stopwatch(run) for kind, run in steps.items()}
    return request.param, interleave(timed, settings.rounds(ROUNDS), warmup=1)


@pytest.mark.parametrize("kind", PRODUCTS, ids=slug)
def test_refresh(kind, refreshed, record, say):
    """Steps of one gradient, with and without a product where the weights are: the difference is the product's."""
    model, found = refreshed
    gc = found["gradient"]
    added = ratio(together(kind, (1, -1), (found[kind], found[ORDINARY])), gc)
    ordinary, whole = ratio(found[ORDINARY], gc).median, ratio(found[kind], gc).median
    record(
        found[kind],
        kind,
        model=model,
        gc=added.median,
        gc_low=added.low,
        gc_high=added.high,
        gc_ordinary=ordinary,
        gc_refresh=whole,
    )
    say(
        f"{model:<8} refresh, {kind:<19} adds {added.median:5.2f} GC ({added.low:.2f} to {added.high:.2f}) "
        f"to a step of {ordinary:.2f}; 1 GC is {gc.median * 1e3:.0f} ms"
    )


def bernoulli(shapes):
    """Signs in torch with the fewest operations on one tensor at a time."""
    outs = tensors(shapes, 0)
    return lambda: [torch.empty_like(t).bernoulli_(0.5).mul_(2.0).sub_(1.0) for t in outs]


def contenders(name, model):
    """Signs from Philox in plain torch take seconds on the larger model."""
    makers = {**WITH_KERNELS, **(WITHOUT_KERNELS if model == "resnet20" else {})}
    found = {contender: lambda shapes, make=make: getattr(make(shapes), name) for contender, make in makers.items()}
    if name == "rademacher":
        found |= {EAGER: lambda shapes: EagerPasses(shapes).rademacher, "bernoulli": bernoulli}
    return found


@pytest.fixture(scope="module", params=product(PROBE_ROUNDS, ("rademacher", "probe")), ids="-".join)
def raced(request, settings):
    model, name = request.param
    return race(name, model, settings, contenders(name, model), PROBE_ROUNDS[model])


@pytest.mark.parametrize("contender", [*WITH_KERNELS, *WITHOUT_KERNELS, EAGER, "bernoulli", ROOFLINE], ids=slug)
def test_signs(contender, raced, record, say):
    """New signs (the eager loop takes them from ``torch.randint``), and weights moved along signs never stored."""
    raced.tell(contender, record, say)
