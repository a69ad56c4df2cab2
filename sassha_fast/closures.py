"""A step from beginning to end: both passes of a closure, the product, and the update that restores as it goes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .contexts import CreateGraph, RandomState, RunningStatistics, frozen_batchnorm, refresh_context

if TYPE_CHECKING:
    from .optimizer import SASSHA, _Curvature

__all__ = ["Closure", "closure_step"]

Closure = Callable[[], "Tensor | float"]


def closure_step(opt: SASSHA, closure: Closure, hessian_closure: Closure | None) -> Tensor | float:
    """All passes of one step. An exception in a closure restores weights, BatchNorm and random numbers."""
    opt._curvature = opt._time = None
    rho = opt._next_rho()
    ascends = any(r != 0.0 for r in rho) or any(isinstance(group["rho"], Tensor) for group in opt.param_groups)
    random = RandomState(p.device for p in opt._parameters())
    statistics = RunningStatistics.of(opt._model) if opt._model is not None else None
    try:
        # On a refresh also the first pass avoids what has no double backward: compiled and eager dropout, say, draw
        # different masks from one seed.
        with refresh_context(opt._model) if opt.hessian_due else nullcontext():
            loss = _run(opt, closure, differentiated=not ascends and hessian_closure is None)
            if ascends:
                opt._ascend(rho, zero_grad=True)
                loss = _descent_pass(opt, closure, random, loss, differentiated=hessian_closure is None)
            _finish(opt, hessian_closure, random)
    except BaseException:
        if opt._ascent is not None:
            ascent, opt._ascent = opt._ascent, None
            ascent.restore()
        random.restore()
        if statistics is not None:
            statistics.restore()
        opt._end_of_step()
        raise
    return loss


def _run(opt: SASSHA, closure: Closure, *, differentiated: bool) -> Tensor | float:
    """One call of a closure, with a graph if the step refreshes and this is the pass to differentiate again."""
    graph = differentiated and opt.hessian_due
    opt._wants_graph = graph
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if graph:
                stack.enter_context(refresh_context(opt._model))
                stack.enter_context(CreateGraph())
            loss = closure()
    finally:
        opt._wants_graph = True
    return loss.detach() if isinstance(loss, Tensor) else loss


def _replayed(opt: SASSHA, closure: Closure, random: RandomState, *, differentiated: bool) -> Tensor | float:
    """A further call of a closure: the random numbers of the first, and BatchNorm statistics left alone."""
    with ExitStack() as stack:
        if opt._model is not None:
            stack.enter_context(frozen_batchnorm(opt._model))
        random.restore()
        return _run(opt, closure, differentiated=differentiated)


def _descent_pass(
    opt: SASSHA, closure: Closure, random: RandomState, first: Tensor | float, *, differentiated: bool
) -> Tensor | float:
    """The pass at x + ε. Returns the loss of the first one, and notes what the ascent added to it."""
    second = _replayed(opt, closure, random, differentiated=differentiated)
    gap = second - first
    opt.stats.ascent_gap = gap.double() if isinstance(gap, Tensor) else torch.tensor(gap, dtype=torch.float64)
    return first


def _finish(opt: SASSHA, hessian_closure: Closure | None, random: RandomState) -> None:
    """Products where they are due, then the update."""
    plan, grads = opt._gather()
    ascent = opt._ascent
    # The update restores as it goes, if it may: the authors' point asks for x before the product, and other parameters
    # may have had gradients in the first pass.
    fused = plan is not None and ascent is plan and opt.hvp_point != "upstream"
    if ascent is not None and not fused and opt.hvp_point == "upstream":
        ascent.restore()
        opt._ascent = None
    if plan is not None:
        plan.bind_grads(grads)
        if hessian_closure is None or not opt.hessian_due:
            curvature = opt._curvature_at(plan, grads, "step")
        else:
            curvature = _curvature_of(opt, hessian_closure, random)
        opt._detach_grads(grads)
    if opt._ascent is not None and not fused:
        opt._ascent.restore()
    opt._ascent = None
    if plan is not None:
        opt._update(plan, curvature.products, restore=fused)
    opt._end_of_step()


def _curvature_of(opt: SASSHA, hessian_closure: Closure, random: RandomState) -> _Curvature:
    """Products from the batch of another closure, which leaves the gradients as they were."""
    params = opt._parameters()
    kept = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        _replayed(opt, hessian_closure, random, differentiated=True)
        plan, grads = opt._gather()
        return opt._curvature_at(plan, grads, "step(hessian_closure=)")
    finally:
        for p, g in zip(params, kept, strict=True):
            p.grad = g
