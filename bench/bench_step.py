"""The three calls of an ordinary step against the eager loop and AdamW, on three kinds of models."""

import pytest
import shapes
from contenders import adamw, eager, sassha
from measure import interleave, ratio

# Shapes, rounds, and the targets: at least this many times the eager loop's speed, at most this share of fused AdamW.
MODELS = {
    "gpt": (shapes.gpt, 20, 6.0, 2.3),
    "resnet20": (shapes.resnet20, 60, 10.0, 1.2),
    "small": (shapes.small, 30, 20.0, 0.6),
}
CONTENDERS = {
    "sassha_cpu": lambda s: sassha(s, "cpu"),
    "adamw_fused": lambda s: adamw(s, fused=True),
    "eager": eager,
    "adamw_foreach": lambda s: adamw(s, foreach=True),
    "adamw_loop": lambda s: adamw(s, foreach=False, fused=False),
    "sassha_foreach": lambda s: sassha(s, "foreach"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    make, rounds, faster, share = MODELS[request.param]
    built = {name: build(make()) for name, build in CONTENDERS.items()}
    return request.param, len(make()), interleave(built, rounds), faster, share


@pytest.mark.parametrize("name", CONTENDERS)
def test_three_calls(name, model, record, say):
    label, tensors, measured, faster, share = model
    seconds = measured[name].median
    over_adamw = ratio(measured[name], measured["adamw_fused"])
    under_eager = ratio(measured["eager"], measured[name])
    record(measured[name], model=label, ratio_to_fused_adamw=over_adamw, speedup_over_eager=under_eager)
    targets = f"  (targets {faster:g} and {share:g})" if name == "sassha_cpu" else ""
    say(
        f"{label:<8} {name:<14} {seconds * 1e3:8.3f} ms {seconds / tensors * 1e6:8.2f} us/tensor  "
        f"{under_eager:5.2f} x the eager loop's speed  {over_adamw:5.2f} x fused AdamW's time{targets}"
    )
