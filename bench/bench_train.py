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


@pytest.mark.parametrize("model", MODELS)
def test_g_sassha_against_sassha(model, record, say):
    """Neighbours in rounds of their own: what is to be seen is smaller than what a minute does to the machine."""
    kinds = {"ordinary": INTERVAL - 1, "exact": 1}  # of a cycle of steps
    names = [f"{method}_{kind}" for kind in kinds for method in ("sassha", "gsassha")]
    found = interleave({name: stopwatch(build(model, name)) for name in names}, 4 * ROUNDS[model], warmup=2)
    ratios = {kind: ratio(found[f"gsassha_{kind}"], found[f"sassha_{kind}"]) for kind in kinds}
    time = {kind: n * found[f"sassha_{kind}"].median for kind, n in kinds.items()}
    cost = sum(ratios[kind] * time[kind] for kind in kinds) / sum(time.values())
    record(found["gsassha_ordinary"], model=model, ratio_to_sassha=cost)
    parts = ", ".join(f"{kind} {value:5.3f}" for kind, value in ratios.items())
    say(f"{model:<9} g-sassha: {cost:5.3f} x sassha (target 1.02): {parts}")


@pytest.mark.parametrize("model", MODELS)
def test_peak_memory(model, benchmark, say):
    peaks = {name: peak(model, name) for name in STEPS_OF[model]}
    benchmark.extra_info.update(model=model, **{f"mib_{name}": value for name, value in peaks.items()})
    benchmark.pedantic(lambda: None, rounds=1)
    listed = ", ".join(f"{name} {value:.0f}" for name, value in peaks.items())
    say(f"{model:<9} peak MiB of a step: {listed}")
