"""Every pass of a backend by itself, beside a copy: time, bytes per parameter and the bandwidth reached."""

from __future__ import annotations

from collections.abc import Callable

from . import device
from .result import LEFT_OUT, Failure, Result, Table
from .settings import Settings

PASSES = (
    "norm", "perturb", "step", "ordinary", "refresh_step", "restore", "probe", "rademacher",
    "momentum_ascent", "step_in_state", "gap_sums", "decompose",
)  # fmt: skip
COPY, COPIES = "copy of one tensor", "copy of all tensors"
ROUNDS = 30
# Of memory per parameter while all passes of a backend and both copies are timed.
BYTES = 48
LEGEND = (
    "Bytes are those that the algorithm can't do without. `ordinary` is norm, perturb and step, an ordinary step of a "
    "closure. The share is the speed of the copy of one tensor that took turns with the passes: 100 % is as fast as "
    "this card copies."
)

Runs = dict[str, Callable[[], object]]


def shapes_that_fit(settings: Settings) -> list[tuple[int, ...]]:
    """Those of GPT-2 small, or of a smaller GPT where memory is short; tiny ones in a trial."""
    import shapes
    from memory import available

    if settings.trial:
        return shapes.gpt(width=32, layers=1, tokens=300)
    large = shapes.gpt(width=768, layers=12)
    return large if available() > BYTES * shapes.count(large) else shapes.gpt()


def copies(shapes: list[tuple[int, ...]]) -> Runs:
    """What the card can do: one copy of as many numbers, and torch's copy of a list of tensors."""
    import torch
    from kernels import tensors
    from shapes import count

    here, there = torch.zeros(count(shapes)), torch.ones(count(shapes))
    many, others = tensors(shapes, 0), tensors(shapes, 1)
    return {COPY: lambda: here.copy_(there), COPIES: lambda: torch._foreach_copy_(many, others)}


def working(runs: Runs, where: str) -> tuple[Runs, list[Failure]]:
    """Those that run, and why the others do not."""
    from measure import seconds_of

    good, failures = {}, []
    for name, run in runs.items():
        try:
            seconds_of(run)  # which waits for the device
            good[name] = run
        except Exception as error:
            failures.append(Failure.of(f"{where}: {name}", error))
    return good, failures


def run(settings: Settings, backend: str) -> Result:
    """The passes of one backend."""
    device.prepare(settings)
    from kernels import Kernels
    from measure import interleave, ratio, stopwatch
    from races import bytes_of
    from shapes import count

    shapes = shapes_that_fit(settings)
    made = Kernels(shapes, backend)
    runs = copies(shapes) | {name: getattr(made, name) for name in PASSES}
    good, failures = working(runs, f"passes of {backend}")
    rounds = 1 if settings.trial else ROUNDS
    found = interleave({name: stopwatch(each) for name, each in good.items()}, rounds)
    table = Table(["pass", "bytes per parameter", "µs", "GB/s", "share of the copy"])
    for name, measured in found.items():
        size = bytes_of(name) if name in PASSES else 8
        cells = [LEFT_OUT] * 3
        if not settings.trial:
            speed = size * count(shapes) / measured.median / 1e9
            share = ratio(found[COPY].scaled(size / 8), measured).median
            cells = [f"{measured.median * 1e6:,.1f}", f"{speed:,.0f}", f"{share:.0%}"]
        table.add(name, size, *cells)
    note = f"float32, {count(shapes):,} parameters in {len(shapes)} tensors, medians of {rounds} rounds in turns."
    return Result([note], [table], [LEGEND], failures)
