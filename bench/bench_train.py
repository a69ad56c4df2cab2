"""What training costs: time in units of one gradient computation (GC) of the same model in the same run, and memory."""

from functools import partial

import pytest
from measure import interleave, ratio, stopwatch, together
from memory import watched
from models import MODELS
from settings import slug
from training import EXACT, FORWARD, METHODS, ORDINARY, TRIED, asking, build, runs

INTERVAL = 10  # steps from one refresh to the next
ROUNDS = {"resnet20": 6, "gpt": 5}
# Ordinary step, refresh step (of Shampoo: of its preconditioners) and the target in GC. AdaHessian refreshes always.
COSTS = {
    "gradient": (("gradient", ORDINARY), ("gradient", ORDINARY), None),
    "adamw fused": (("adamw fused", ORDINARY), ("adamw fused", ORDINARY), None),
    "sam": (("sam", ORDINARY), ("sam", ORDINARY), None),
    "sassha exact": (("sassha", ORDINARY), ("sassha", EXACT), 2.35),
    "sassha finite difference": (("sassha", ORDINARY), ("sassha", FORWARD), 2.2),
    "sassha quarter": (("sassha quarter", ORDINARY), ("sassha quarter", EXACT), 1.45),
    "g-sassha exact": (("g-sassha", ORDINARY), ("g-sassha", EXACT), None),
    "m-sassha exact": (("m-sassha", ORDINARY), ("m-sassha", EXACT), 1.35),
    "m-sassha finite difference": (("m-sassha", ORDINARY), ("m-sassha", FORWARD), 1.2),
    "adahessian": (("adahessian", EXACT), ("adahessian", EXACT), None),
    "sophia-h": (("sophia-h", ORDINARY), ("sophia-h", EXACT), None),
    "shampoo": (("shampoo", ORDINARY), ("shampoo", EXACT), None),
    "eager loop": (("eager loop", ORDINARY), ("eager loop", EXACT), None),
}
# The turns of a round. Near relatives are neighbours: they differ by less than a minute does to the machine.
ORDER = [
    ("adamw fused", ORDINARY), ("gradient", ORDINARY),
    ("m-sassha", ORDINARY), ("m-sassha", FORWARD), ("m-sassha", EXACT),
    ("sassha quarter", ORDINARY), ("sassha quarter", EXACT),
    ("sophia-h", ORDINARY), ("sophia-h", EXACT), ("shampoo", ORDINARY), ("shampoo", EXACT),
    ("sam", ORDINARY), ("sassha", ORDINARY), ("g-sassha", ORDINARY), ("sassha", EXACT), ("g-sassha", EXACT),
    ("sassha", FORWARD), ("adahessian", EXACT), ("eager loop", ORDINARY), ("eager loop", EXACT),
]  # fmt: skip
GC = ("gradient", ORDINARY)


@pytest.fixture(scope="module", params=MODELS)
def trained(request, settings):
    """Every step is built once: watched for its memory, which warms it up, then timed in turns."""
    model = request.param
    steps, peaks = {}, {}
    for method in METHODS:
        if any(method == turn[0] for turn in ORDER) and runs(method, model):
            found, mib = watched(partial(build, model, method))
            steps |= {(method, kind): stopwatch(run) for kind, run in found.items()}
            peaks |= {(method, kind): value for kind, value in mib.items()}
    turns = {turn: steps[turn] for turn in ORDER if turn in steps}
    return model, interleave(turns, settings.rounds(ROUNDS[model]), warmup=0), peaks


def step_of(found, method):
    """The mean step of a cycle of ordinary steps and one refresh."""
    ordinary, refresh, _ = COSTS[method]
    weights = [(INTERVAL - 1) / INTERVAL, 1 / INTERVAL]
    return together(method, weights, [found[ordinary], found[refresh]])


@pytest.mark.parametrize("method", COSTS, ids=slug)
def test_step(method, trained, record, say):
    model, found, peaks = trained
    ordinary, refresh, target = COSTS[method]
    if ordinary not in found:
        pytest.skip(f"{method} does not train {model}")
    mean = step_of(found, method)
    cost = ratio(mean, found[GC])
    parts = [ratio(found[turn], found[GC]).median for turn in (ordinary, refresh)]
    extra = {} if target is None else {"target": target}
    note = "" if target is None else f"  (target {target:g})"
    if method == "g-sassha exact":
        beside = ratio(mean, step_of(found, "sassha exact"))
        extra = {"ratio_to_sassha": beside.median}
        note = f"; {beside} sassha (target 1.02)"
    record(
        mean,
        method,
        model=model,
        gc=cost.median,
        gc_low=cost.low,
        gc_high=cost.high,
        gc_ordinary=parts[0],
        gc_refresh=parts[1],
        mib_ordinary=peaks[ordinary],
        mib_refresh=peaks[refresh],
        **extra,
    )
    say(
        f"{model:<8} {method:<26} {cost.median:5.2f} GC ({cost.low:.2f} to {cost.high:.2f}): ordinary {parts[0]:5.2f}, "
        f"refresh {parts[1]:5.2f}; peak MiB {peaks[ordinary]:.0f} / {peaks[refresh]:.0f}; "
        f"1 GC is {found[GC].median * 1e3:.0f} ms{note}"
    )


@pytest.mark.parametrize("model", MODELS)
def test_suggestion(model, record, say):
    """What it costs to ask for hyperparameters, once before training, with a quarter of the usual steps on trial."""
    turns = {
        "gradient": stopwatch(build(model, "gradient")[ORDINARY]),
        "suggest": stopwatch(asking(*MODELS[model]())[ORDINARY]),
    }
    found = interleave(turns, 1, warmup=0)
    cost = ratio(found["suggest"], found["gradient"]).median
    record(found["suggest"], "suggest", model=model, gc_once=cost, steps=TRIED)
    say(f"{model:<8} suggest, {TRIED} steps on trial: {cost:5.0f} GC, once")
