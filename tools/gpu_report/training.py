"""Whole training steps in bfloat16 autocast: time, gradients' worth and memory of SASSHA beside AdamW and SGD."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import device
from .result import LEFT_OUT, Failure, Result, Table
from .settings import Settings

if TYPE_CHECKING:
    from .models import Task

ROUNDS, INTERVAL = 10, 10  # turns, and steps from one refresh to the next
GRADIENT = "gradient"
METHODS = ("sgd", "adamw fused", "sassha", "m-sassha")
LEGEND = (
    "GC is a step's cost in gradient computations of the same model, which took turns with it; the mean is over ten "
    "steps of which one refreshes the curvature. Peak memory is what torch's allocator handed out at the highest point "
    "of a step: weights, state, gradients, activations. bfloat16 autocast, float32 weights."
)

Steps = dict[str, Callable[[], object]]


@dataclass
class Measured:
    """What came of one method: times and peaks in MiB by kind of step."""

    seconds: dict[str, object] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


def sgd(model: object, loss: Callable[[], object]) -> Steps:
    """A gradient and fused SGD with momentum."""
    import torch
    from training import LR, ORDINARY

    opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, fused=True)

    def step() -> None:
        opt.zero_grad()
        loss().backward()
        opt.step()

    return {ORDINARY: step}


def build(task: Task, method: str, batch: int, compiler: Callable | None) -> Steps:
    """The kinds of steps of a method, past its first one, which makes state; and a gradient alone."""
    import torch
    from training import FORWARD, ORDINARY, gradient
    from training import METHODS as KNOWN

    torch.manual_seed(0)
    model = task.make()
    plain = task.loss(compiler(model) if compiler else model, batch)

    def loss() -> torch.Tensor:
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return plain()

    steps = (KNOWN | {"sgd": sgd})[method](model, loss)
    steps[FORWARD if FORWARD in steps else ORDINARY]()
    return {GRADIENT: gradient(model, loss)[ORDINARY], **steps}


def forget() -> None:
    """Gives memory back between models."""
    import torch

    gc.collect()
    if torch.get_default_device().type == "cuda":
        torch.cuda.empty_cache()


def batch_that_fits(task: Task) -> int:
    """The largest batch on which a step with exact products runs, which needs most memory; else the smallest."""
    import torch
    from training import EXACT

    for batch in task.batches:
        try:
            build(task, "sassha", batch, None)[EXACT]()
            return batch
        except torch.OutOfMemoryError:
            pass
        finally:
            forget()
    return task.batches[-1]


def compiler_for(task: Task, settings: Settings, batch: int) -> tuple[Callable | None, str]:
    """What compiles the model, if that works, and a sentence about it."""
    import functools

    import torch

    if not settings.compiled:
        return None, "Not compiled, as --no-compile asks."
    backend = "aot_eager" if settings.trial else "inductor"
    compiler = functools.partial(torch.compile, backend=backend)
    try:
        build(task, "sgd", batch, compiler)[GRADIENT]()
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        return None, f"**Not compiled**: `torch.compile` failed with {type(error).__name__}: {said[0]}"
    finally:
        forget()
    return compiler, f"Compiled by `torch.compile` ({backend}); exact products run eagerly on refreshes."


def peak(run: Callable[[], object]) -> float:
    """MiB at the highest point of a step; only the GPU's allocator keeps them."""
    import torch

    if torch.get_default_device().type != "cuda":
        run()
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() / 2**20


def measure(task: Task, method: str, batch: int, compiler: Callable | None, rounds: int) -> Measured:
    """All kinds of steps of a method in turns."""
    from measure import interleave, stopwatch

    found, steps = Measured(), build(task, method, batch, compiler)
    for kind, step in list(steps.items()):
        try:
            found.peaks[kind] = peak(step)
        except Exception as error:
            found.failures.append(Failure.of(f"{task.title}, {method}, {kind}", error))
            del steps[kind]
    found.seconds = interleave({kind: stopwatch(step) for kind, step in steps.items()}, rounds)
    return found


def add_rows(table: Table, method: str, found: Measured, trial: bool) -> None:
    """A row for every way of products, or one if the method has none."""
    from measure import ratio, together
    from training import ORDINARY

    refreshes = [kind for kind in found.seconds if kind not in (GRADIENT, ORDINARY)]
    for refresh in refreshes or [ORDINARY]:
        if not {GRADIENT, ORDINARY} <= found.seconds.keys():
            continue
        one, ordinary, special = (found.seconds[kind] for kind in (GRADIENT, ORDINARY, refresh))
        mean = together(method, [(INTERVAL - 1) / INTERVAL, 1 / INTERVAL], [ordinary, special])
        times = [f"{m.median * 1e3:.2f}" for m in (ordinary, special)]
        costs = [f"{ratio(m, one).median:.2f}" for m in (ordinary, special, mean)]
        peaks = [f"{found.peaks[kind]:,.1f}" if found.peaks[kind] else LEFT_OUT for kind in (ORDINARY, refresh)]
        cells = [LEFT_OUT] * 5 + peaks if trial else [*times, *costs, *peaks]
        if not refreshes:
            cells[1] = cells[3] = cells[6] = ""
        table.add(method, refresh if refreshes else "", *cells)


def run(settings: Settings, model: str) -> Result:
    """The methods on one model, one after the other; the memory of one is given back before the next."""
    device.prepare(settings)
    from .models import TASKS

    task = TASKS[model](settings.trial)
    batch = batch_that_fits(task)
    compiler, said = compiler_for(task, settings, batch)
    header = ["method", "products", "ms, ordinary", "ms, refresh", "GC, ordinary", "GC, refresh", "GC, mean"]
    table = Table([*header, "MiB, ordinary", "MiB, refresh"])
    parameters = sum(p.numel() for p in task.make().parameters())
    result = Result([f"{task.title}, {parameters:,} parameters, {batch} {task.unit}. {said}"], [table], [LEGEND])
    for method in METHODS:
        try:
            found = measure(task, method, batch, compiler, 1 if settings.trial else ROUNDS)
            add_rows(table, method, found, settings.trial)
            result.failures += found.failures
        except Exception as error:
            result.failures.append(Failure.of(f"{task.title}, {method}", error))
        forget()
    return result
