"""Peak memory of one training step, as torch's allocator saw it."""

from __future__ import annotations

from time import time_ns

from torch.profiler import ProfilerActivity, profile
from training import build


def peak(model: str, step: str) -> float:
    """MiB of tensors alive at the highest point of a step: weights, state, gradients, activations, graphs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run = build(model, step)
        run()
        begin = time_ns()
        run()
    alive, highest = 0, 0
    changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for change in sorted(changes, key=lambda event: event.start_ns()):
        alive += change.nbytes()
        if change.start_ns() >= begin:
            highest = max(highest, alive)
    return highest / 2**20
