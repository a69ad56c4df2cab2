"""Whole optimizers on given gradients, without a model: SASSHA beside fused AdamW."""

from __future__ import annotations

from . import device
from .result import LEFT_OUT, Failure, Result, Table
from .settings import Settings

ROUNDS = 20
NAMES = ("sassha cuda", "sassha triton", "sassha cpu", "sassha foreach", "sam", "adamw fused", "adamw foreach")
FUSED = "adamw fused"


def shapes_of(settings: Settings) -> dict[str, list[tuple[int, ...]]]:
    """What is updated, by name."""
    import shapes

    if settings.trial:
        return {"a tiny GPT": shapes.gpt(width=32, layers=1, tokens=300), "20 tensors of 64": shapes.small(20)}
    return {
        "GPT, 4 × 384": shapes.gpt(),
        "ResNet-20": shapes.resnet20(),
        "5,000 tensors of 64": shapes.small(),
    }


def run(settings: Settings) -> Result:
    """The three calls of an ordinary step without its passes through a model, and one call of the others."""
    device.prepare(settings)
    from contenders import CONTENDERS
    from measure import interleave, ratio
    from shapes import count

    result = Result(["Time of the optimizer's own calls on gradients that are there, in turns with fused AdamW."])
    for title, shapes in shapes_of(settings).items():
        runs = {}
        for name in (name for name in NAMES if name in CONTENDERS):
            try:
                timed = CONTENDERS[name].build(shapes)
                timed()
                runs[name] = timed
            except Exception as error:
                result.failures.append(Failure.of(f"{name}, {title}", error))
        found = interleave(runs, 1 if settings.trial else ROUNDS)
        shown = f"{title}: {count(shapes):,} parameters in {len(shapes)} tensors"
        table = Table(["optimizer", "calls", "µs", "times fused AdamW"], title=shown)
        for name, measured in found.items():
            cells = [LEFT_OUT] * 2
            if not settings.trial and FUSED in found:
                cells = [f"{measured.median * 1e6:,.1f}", f"{ratio(measured, found[FUSED]).median:.2f}"]
            table.add(name, CONTENDERS[name].calls, *cells)
        result.tables.append(table)
    return result
