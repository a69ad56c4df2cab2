"""What a step asks of the device: kernels, copies and waits, at few and at many tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import device
from .result import LEFT_OUT, Result, Table
from .settings import Settings

if TYPE_CHECKING:
    from torch.profiler import profile

TENSORS, TRIAL_TENSORS = (10, 1000), (10, 100)
SIZE, WARM = 64, 2  # elements of a tensor; steps before one is counted
LAUNCHES, COPIES, WAITS = "launches", ("host to device", "device to host", "on the device"), "waits"
RANGE = "counted step"
LEGEND = (
    "One step of `SASSHA.step(closure)` in steady state, on tensors of 64 elements whose loss is a sum of "
    "squares. Launches of the passes through the model are counted by themselves and taken off; copies and waits are "
    "those of the whole step."
)

Run = Callable[[], object]


# ---- counting ----------------------------------------------------------------------------------------------------


def on_virtual_gpu(run: Run) -> Counter[str]:
    """By the virtual GPU's own counters; a call of torch's operators counts as one launch."""
    before = Counter(device.virtual_counters())
    run()
    found: Counter[str] = Counter()
    directions = dict(zip(("H2D", "D2H", "D2D"), COPIES, strict=True))
    for name, number in (Counter(device.virtual_counters()) - before).items():
        words = name.split()
        if name in ("launch", "torch", "graph_launch"):
            found[LAUNCHES] += number
        elif words[0] == "memcpy" and words[-1] != "bytes":
            found[directions.get(words[1], words[1])] += number
        elif name.startswith(("sync:", "implicit_sync:")):
            found[WAITS] += number
    return found


def on_gpu(run: Run) -> Counter[str]:
    """By the calls of CUDA's runtime and driver that the profiler sees."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(RANGE):
            run()
        torch.cuda.synchronize()  # not in the range, so not counted
    return from_profile(profiler)


def from_profile(profiler: profile) -> Counter[str]:
    """Counts what lies within the range; copies by what the device did, the rest by what the host called."""
    events = list(profiler.events())
    inside = next(event.time_range for event in events if event.name == RANGE)
    directions = {"Memcpy HtoD": COPIES[0], "Memcpy DtoH": COPIES[1], "Memcpy DtoD": COPIES[2]}
    found: Counter[str] = Counter()
    for event in events:
        if event.name[:11] in directions:  # on the device's own time, and nothing else ran
            found[directions[event.name[:11]]] += 1
        elif inside.start <= event.time_range.start <= inside.end:
            if event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cuGraphLaunch")):
                found[LAUNCHES] += 1
            elif event.name.startswith("cu") and event.name.endswith("Synchronize"):
                found[WAITS] += 1
    if not found[LAUNCHES]:
        raise RuntimeError(
            "the profiler saw no launch of a kernel; it may lack the permission for NVIDIA's counters "
            "(NVreg_RestrictProfilingToAdminUsers) or libcupti"
        )
    return found


def counter_for(settings: Settings) -> Callable[[Run], Counter[str]] | None:
    """How to count on the device; a CPU has nothing to count."""
    if settings.device == "cpu":
        return None
    return on_virtual_gpu if settings.virtual else on_gpu


# ---- what is counted ---------------------------------------------------------------------------------------------


def passes_of(kind: str, params: list, loss: Run) -> Run:
    """The passes through the model that a kind of step needs, without an optimizer."""
    import torch
    from training import EXACT, FORWARD

    probes = [torch.ones_like(p) for p in params]

    def gradient(graph: bool = False) -> None:
        for p in params:
            p.grad = None
        loss().backward(create_graph=graph)

    def run() -> None:
        gradient()
        gradient(graph=kind == EXACT)
        if kind == EXACT:
            torch.autograd.grad([p.grad for p in params], params, probes)
        if kind == FORWARD:
            gradient()
        for p in params:
            p.grad = None

    return run


def count_kinds(tensors: int, backend: str, count: Callable[[Run], Counter[str]] | None) -> dict[str, list[Counter]]:
    """For every kind of step what the whole takes, and its passes alone."""
    from functools import partial

    import torch
    from torch import nn
    from training import EXACT, FORWARD, ORDINARY, family

    from sassha_fast import SASSHA

    model = nn.ParameterList(nn.Parameter(torch.randn(SIZE)) for _ in range(tensors))
    params = list(model.parameters())

    def loss() -> torch.Tensor:
        return torch.stack([torch.dot(p, p) for p in params]).sum()

    kinds, found = (ORDINARY, FORWARD, EXACT), {}
    steps = family(model, loss, partial(SASSHA, backend=backend), kinds, rho=0.05)
    steps[EXACT]()
    for kind in kinds:
        passes = passes_of(kind, params, loss)
        for run in [steps[kind]] * WARM if count else [steps[kind], passes]:
            run()
        found[kind] = [count(steps[kind]), count(passes)] if count else []
    return found


def run(settings: Settings, backend: str) -> Result:
    """Ordinary steps and refreshes of one backend."""
    device.prepare(settings)
    import warnings

    # The passes that are counted alone keep torch's cycle between parameters and gradients until they are cleared.
    warnings.filterwarnings("ignore", message="Using backward")
    count = counter_for(settings)
    table = Table(["step", "tensors", "launches of the optimizer", "of the passes", *COPIES, WAITS])
    for tensors in TRIAL_TENSORS if settings.device == "cpu" else TENSORS:
        for kind, counted in count_kinds(tensors, backend, count).items():
            shown = kind if kind == "ordinary" else f"refresh, {kind}"
            if not counted:
                table.add(shown, tensors, *[LEFT_OUT] * (len(table.header) - 2))
                continue
            step, passes = counted
            alone = step[LAUNCHES] - passes[LAUNCHES]
            table.add(shown, tensors, alone, passes[LAUNCHES], *(step[name] for name in (*COPIES, WAITS)))
    by = {None: "A CPU has none.", on_gpu: "Counted by torch.profiler."}.get(count, "Counted by the virtual GPU.")
    return Result(tables=[table], legend=[f"{LEGEND} {by}"])
