"""What training costs: time in units of one gradient computation (GC) of the same model in the same run, and memory."""

import pytest
from measure import Measured, interleave, ratio, stopwatch
from memory import peak
from models import MODELS
from training import STEPS_OF, build

INTERVAL = 10  # steps from one refresh to the next
ROUNDS = {"resnet20": 9, "gpt": 7}
# What a step of each method is made of, and the target in GC.
METHODS = {
    "sam": ("sam", "sam", None),
    "sassha exact": ("sassha_ordinary", "sassha_exact", 2.35),
    "sassha finite difference": ("sassha_ordinary", "sassha_finite_difference", 2.2),
    "g-sassha exact": ("gsassha_ordinary", "gsassha_exact", None),
    "m-sassha exact": ("msassha_ordinary", "msassha_exact", 1.35),
    "m-sassha finite difference": ("msassha_ordinary", "msassha_finite_difference", 1.2),
    "adahessian, every step": ("adahessian", "adahessian", None),
    "sophia-h": ("sophia_ordinary", "sophia_exact", None),
    "shampoo": ("shampoo", "shampoo", None),
    "eager loop": ("eager_ordinary", "eager_refresh", None),
}


@pytest.fixture(scope="module", params=MODELS)
def measured(request):
    contenders = {name: stopwatch(build(request.param, name)) for name in STEPS_OF[request.param]}
    return request.param, interleave(contenders, ROUNDS[request.param], warmup=1)


@pytest.mark.parametrize("method", METHODS)
def test_cost_of_a_step(method, measured, record, say):
    model, found = measured
    ordinary, refresh, target = METHODS[method]
    if ordinary not in found:
        pytest.skip(f"{method} is not run on {model}")
    gc = found["gradient"]
    parts = [ratio(found[name], gc) for name in (ordinary, refresh)]
    cost = ((INTERVAL - 1) * parts[0] + parts[1]) / INTERVAL
    pairs = zip(found[ordinary].seconds, found[refresh].seconds, strict=True)
    seconds = [((INTERVAL - 1) * a + b) / INTERVAL for a, b in pairs]
    record(Measured(method, seconds), model=model, gc=cost, gc_ordinary=parts[0], gc_refresh=parts[1])
    goal = "" if target is None else f"  (target {target:g})"
    say(
        f"{model:<9} {method:<25} {cost:5.2f} GC a step: ordinary {parts[0]:5.2f}, refresh {parts[1]:5.2f}; "
        f"1 GC is {gc.median * 1e3:.0f} ms{goal}"
    )


# Neighbours in rounds of their own: what is to be seen here is smaller than what a minute does to the machine.


def cycle(parts: dict[str, float]) -> float:
    """The mean over an interval of ordinary steps and a refresh."""
    return ((INTERVAL - 1) * parts["ordinary"] + parts["refresh"]) / INTERVAL


@pytest.mark.parametrize("model", MODELS)
def test_m_sassha_beside_a_gradient(model, record, say):
    names = ("gradient", "msassha_ordinary", "msassha_exact", "msassha_finite_difference")
    found = interleave({name: stopwatch(build(model, name)) for name in names}, 2 * ROUNDS[model], warmup=2)
    costs = {name: ratio(found[name], found["gradient"]) for name in names}
    for kind, target in (("exact", 1.35), ("finite_difference", 1.2)):
        cost = cycle({"ordinary": costs["msassha_ordinary"], "refresh": costs[f"msassha_{kind}"]})
        say(f"{model:<9} m-sassha {kind:<17} {cost:5.3f} GC beside a gradient alone (target {target:g})")
    record(found["msassha_ordinary"], model=model, **{f"gc_{name}": value for name, value in costs.items()})


@pytest.mark.parametrize("model", MODELS)
def test_g_sassha_beside_sassha(model, record, say):
    names = [f"{method}_{kind}" for kind in ("ordinary", "exact") for method in ("sassha", "gsassha")]
    found = interleave({name: stopwatch(build(model, name)) for name in names}, 2 * ROUNDS[model], warmup=2)
    ratios = [ratio(found[f"gsassha_{kind}"], found[f"sassha_{kind}"]) for kind in ("ordinary", "exact")]
    times = [found[f"sassha_{kind}"].median for kind in ("ordinary", "exact")]
    theirs = cycle({"ordinary": times[0], "refresh": times[1]})
    cost = cycle({"ordinary": ratios[0] * times[0], "refresh": ratios[1] * times[1]}) / theirs
    record(found["gsassha_ordinary"], model=model, ratio_to_sassha=cost)
    say(f"{model:<9} g-sassha: {cost:5.3f} x sassha (target 1.02): ordinary {ratios[0]:5.3f}, refresh {ratios[1]:5.3f}")


@pytest.mark.parametrize("model", MODELS)
def test_peak_memory(model, benchmark, say):
    peaks = {name: peak(model, name) for name in STEPS_OF[model]}
    benchmark.extra_info.update(model=model, **{f"mib_{name}": value for name, value in peaks.items()})
    benchmark.pedantic(lambda: None, rounds=1)
    listed = ", ".join(f"{name} {value:.0f}" for name, value in peaks.items())
    say(f"{model:<9} peak MiB of a step: {listed}")
