"""Memory: the peak of training steps as torch's allocator saw it, and what there is."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from time import time_ns

import torch
from torch.profiler import ProfilerActivity, profile
from training import Step, Steps

MIB = 2**20


def watched(build: Callable[[], Steps]) -> tuple[Steps, dict[str, float]]:
    """Builds the steps of a method and runs each once.

    Returns:
        The steps, and MiB of the method's tensors alive at the highest point of each: weights, state, gradients,
        activations, graphs.
    """
    gc.collect()
    if torch.get_default_device().type == "cuda":
        before = torch.cuda.memory_allocated()
        steps = build()
        return steps, {kind: (_cuda_peak(run) - before) / MIB for kind, run in steps.items()}
    spans = {}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        steps = build()
        for kind, run in steps.items():
            begin = time_ns()
            run()
            spans[kind] = (begin, time_ns())
    return steps, {kind: _peak(profiler, *span) / MIB for kind, span in spans.items()}


def available() -> float:
    """Bytes of memory that are free, as far as the system says."""
    if torch.get_default_device().type == "cuda":
        return torch.cuda.mem_get_info()[0]
    listed = Path("/proc/meminfo")
    lines = listed.read_text(encoding="ascii").splitlines() if listed.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else math.inf


def _cuda_peak(run: Step) -> int:
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated()


def _peak(profiler: profile, begin: int, end: int) -> int:
    """The most bytes alive between two times, of those that were allocated since the profiler started."""
    alive, highest = 0, 0
    changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for change in sorted(changes, key=lambda event: event.start_ns()):
        alive += change.nbytes()
        if begin <= change.start_ns() <= end:
            highest = max(highest, alive)
    return highest
