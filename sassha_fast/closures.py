"""A step from beginning to end: both passes of a closure, the product, and the update that restores as it goes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Join
from torch.utils.weak import TensorWeakRef

from .accessors import no_grad
from .contexts import CreateGraph, RandomState, RunningStatistics, frozen_batchnorm, refresh_context
from .refresh import Curvature

if TYPE_CHECKING:
    from .base import SecondOrder

__all__ = ["NOTHING", "Accumulated", "Closure", "ProductSum", "closure_step"]

Closure = Callable[[], "Tensor | float"]
NOTHING: AbstractContextManager[Any] = nullcontext()  # around a pass that nothing is done with


class ProductSum:
    """Exact products of several micro-batches, each taken right after its pass: there is never more than one graph.

    Attributes:
        curvature: The sum.
    """

    def __init__(self, opt: SecondOrder) -> None:
        """Begins with nothing."""
        self.opt, self.curvature = opt, Curvature({})

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Around a backward pass with a graph: adds its products, and its gradients to those that are there."""
        before = self.opt._take_grads()
        yield
        self._add()
        with torch.no_grad():
            now = self.opt._take_grads()
            sums = {key: before[key] + g if key in before else g for key, g in now.items()}
        self.opt._set_grads({**before, **sums})

    @no_grad
    def _add(self) -> None:
        plan, grads = self.opt._gather()
        found = self.opt._curvature_at(plan, grads, "step")
        if found.products is None:  # no parameter of this micro-batch needed one
            return
        known = self.curvature.products or {}
        sums = {
            key: replace(product, value=known[key].value + product.value) if key in known else product
            for key, product in found.products.items()
        }
        self.curvature = replace(found, products={**known, **sums}, coarse=self.curvature.coarse or found.coarse)


class Accumulated:
    """Closures of several micro-batches as one: gradients and products are summed over them.

    Each runs forward and backward passes of its own part of the loss and leaves zeroing gradients to the optimizer.
    """

    def __init__(self, opt: SecondOrder, closures: Sequence[Closure]) -> None:
        """Binds the closures to their optimizer."""
        if not closures or not all(map(callable, closures)):
            raise TypeError(
                f"{opt._name}.step: closure is {closures!r}, expected a function or a sequence of functions"
            )
        self.opt, self.closures = opt, closures

    def __call__(self, around_last: AbstractContextManager[Any] = NOTHING) -> Tensor | float:
        """All micro-batches in one pass; gradients add up in ``p.grad``, and the last one completes them."""
        self.opt._set_grads({})
        return self._passes(self.closures, around_last)

    def _passes(self, closures: Sequence[Closure], around_last: AbstractContextManager[Any]) -> Tensor | float:
        total: Tensor | float = 0.0
        for number, closure in enumerate(closures, start=1):
            with around_last if number == len(closures) else NOTHING:
                total = total + _detached(closure())
        return total

    def differentiate(self) -> Tensor | float:
        """The same with products."""
        self.opt._set_grads({})
        return self._differentiated(self.closures, ProductSum(self.opt))

    def _differentiated(self, closures: Sequence[Closure], products: ProductSum) -> Tensor | float:
        total: Tensor | float = 0.0
        for closure in closures:
            with products.adding():
                total = total + _detached(closure())
        self.opt._curvature = products.curvature
        return total


def _detached(loss: Tensor | float) -> Tensor | float:
    return loss.detach() if isinstance(loss, Tensor) else loss


def closure_step(
    opt: SecondOrder,
    closure: Closure | Sequence[Closure],
    hessian_closure: Closure | Sequence[Closure] | None,
    scaler: GradScaler | None = None,
) -> Tensor | float:
    """All passes of one step. An exception in a closure restores weights, BatchNorm and random numbers."""
    first = _as_closure(opt, closure)
    other = None if hessian_closure is None else _as_closure(opt, hessian_closure)
    opt._curvature = opt._time = None
    opt._is_reduced = False
    Join.notify_join_context(opt)
    schedule = [(group["rho"], group["rho_step"]) for group in opt.param_groups]
    rho = opt._next_radii()
    random = RandomState(p.device for p in opt._parameters())
    statistics = RunningStatistics.of(opt._model) if opt._model is not None else None
    try:
        # On a refresh also the first pass avoids what has no double backward: compiled and eager dropout, say, draw
        # different masks from one seed.
        with refresh_context(opt._model) if opt.hvp == "exact" and opt.hessian_due else nullcontext():
            return _all_passes(opt, rho, first, other, random, scaler)
    except BaseException:
        opt._undo_ascent()
        random.restore()
        if statistics is not None:
            statistics.restore()
        for group, (radius, count) in zip(opt.param_groups, schedule, strict=True):
            group["rho"], group["rho_step"] = radius, count
        opt._end_of_step()
        raise


def _as_closure(opt: SecondOrder, closure: Closure | Sequence[Closure]) -> Closure:
    return closure if callable(closure) else Accumulated(opt, closure)


def _all_passes(
    opt: SecondOrder,
    rho: Sequence[float | Tensor],
    closure: Closure,
    hessian_closure: Closure | None,
    random: RandomState,
    scaler: GradScaler | None,
) -> Tensor | float:
    ascends = opt._needs_ascent(rho)
    graph = hessian_closure is None  # the descent pass is the one to differentiate again
    # What is reduced after a pass is sent while it runs: the ascent's gradients if all processes climb together, and
    # the descent's, unless they are taken apart before.
    descends = not opt.variant.gap or opt.perturb_sync
    first_is_sent = opt.perturb_sync if ascends else descends
    before = _a_gradient(opt)
    loss = _run(opt, closure, differentiated=graph and not ascends, sent=first_is_sent, descent=not ascends)
    _warn_of_sums(opt, before)
    if ascends or (opt.hvp != "exact" and opt.hessian_due):  # a probe needs the way back of an ascent, if of length 0
        opt._ascend(rho, zero_grad=ascends)
    if ascends:
        second = _replayed(opt, closure, random, differentiated=graph, sent=descends)
        gap = second - loss
        opt.stats.ascent_gap = gap.double() if isinstance(gap, Tensor) else torch.tensor(gap, dtype=torch.float64)
    curvature = None
    if opt.probes_due:
        curvature = _probed(opt, closure, hessian_closure, random, fused=scaler is None)
    elif hessian_closure is not None and opt.hessian_due:
        curvature = _differentiated(opt, hessian_closure, random)
    _finish(opt, curvature, scaler)
    return loss


def _a_gradient(opt: SecondOrder) -> tuple[Tensor, TensorWeakRef, int] | None:
    """A parameter that has a gradient, with it, which may go, and its version."""
    for p in opt._parameters():
        if p.grad is not None:
            return p, TensorWeakRef(p.grad), p.grad._version
    return None


def _warn_of_sums(opt: SecondOrder, before: tuple[Tensor, TensorWeakRef, int] | None) -> None:
    """Warns of a first pass that added to a gradient of earlier passes: a single write, and none that zeroed it."""
    if before is None:
        return
    p, grad, version = before
    if p.grad is not None and p.grad is grad() and p.grad._version == version + 1:
        warnings.warn(
            f"{opt._name}.step: the closure added to gradients that were there before, and passes at x + ε and "
            "products of the Hessian will be those of the closure alone; zero gradients in the closure, or pass one "
            "closure for each micro-batch (in Lightning, callbacks=[SasshaCallback()] does that)",
            stacklevel=2,
        )


def _run(
    opt: SecondOrder, closure: Closure, *, differentiated: bool, sent: bool = False, descent: bool = True
) -> Tensor | float:
    """One call of a closure, with a graph if the step refreshes and this is the pass to differentiate again.

    Its gradients are reduced next if they are ``sent``; a refresh reduces those of the ``descent`` with products.
    """
    graph = differentiated and opt.hvp == "exact" and opt.hessian_due
    opt._wants_graph = graph
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(opt._unsynced())
            early = opt._reducing_early(refresh=descent and opt._scheduled) if sent else NOTHING
            if graph:
                stack.enter_context(refresh_context(opt._model))
                stack.enter_context(CreateGraph())
            if isinstance(closure, Accumulated):
                loss = closure.differentiate() if graph else closure(early)
            else:
                with early:
                    loss = closure()
    finally:
        opt._wants_graph = True
    return _detached(loss)


def _replayed(
    opt: SecondOrder, closure: Closure, random: RandomState, *, differentiated: bool, sent: bool = False
) -> Tensor | float:
    """A further call of a closure: the random numbers of the first, and BatchNorm statistics left alone."""
    with ExitStack() as stack:
        if opt._model is not None:
            stack.enter_context(frozen_batchnorm(opt._model))
        random.restore()
        return _run(opt, closure, differentiated=differentiated, sent=sent)


def _probed(
    opt: SecondOrder, closure: Closure, hessian_closure: Closure | None, random: RandomState, *, fused: bool
) -> Curvature:
    """Products by finite differences, which leave the gradients as they were."""
    if hessian_closure is None:
        return _take_probes(opt, closure, random, fused=fused)
    kept = opt._take_grads()
    _replayed(opt, hessian_closure, random, differentiated=False)
    curvature = _take_probes(opt, hessian_closure, random, fused=False)
    opt._set_grads(kept)
    return curvature


def _take_probes(opt: SecondOrder, closure: Closure, random: RandomState, *, fused: bool) -> Curvature:
    for _ in range(opt.probes_due):
        opt.probe_weights()
        _replayed(opt, closure, random, differentiated=False)
    return opt._probed_curvature(fused=fused and opt._fuses_differences)


def _differentiated(opt: SecondOrder, hessian_closure: Closure, random: RandomState) -> Curvature:
    """Exact products from the batch of another closure, which leave the gradients as they were."""
    kept = opt._take_grads()
    try:
        _replayed(opt, hessian_closure, random, differentiated=True)
        if opt._curvature is not None:  # summed over micro-batches
            return opt._curvature
        plan, grads = opt._gather()
        return opt._curvature_at(plan, grads, "step(hessian_closure=)")
    finally:
        opt._set_grads(kept)


def _finish(opt: SecondOrder, curvature: Curvature | None, scaler: GradScaler | None) -> None:
    """The update, from x + ε or from x."""
    if opt.hvp_point == "upstream":  # the authors' point asks for x before the product, which the graph must not notice
        opt._undo_ascent(tell_autograd=False)
    opt._check_untouched("step")
    plan, grads = opt._gather()
    if curvature is None:
        curvature = opt._curvature or opt._curvature_at(plan, grads, "step")
    opt._detach_grads(grads)
    curvature = opt._with_descent(curvature)
    if opt._parallel or opt.variant.gap:
        plan, grads = opt._gather()
    if plan is None:
        opt._undo_ascent()
        opt._end_of_step()
        return
    plan.bind_grads(grads)
    if scaler is not None:
        scaler.unscale_(opt)  # in place, so the passes see it
        if curvature.products is not None:
            curvature = curvature.unscaled(scaler.get_scale())
        opt.stats.divide_by(scaler)
    fused = opt._ascent is plan and not opt.variant.apart
    if not fused:  # other parameters had gradients in the first pass, or there was no ascent
        opt._undo_ascent()
    opt._update(plan, curvature, restore=fused, check_finite=scaler is not None)
    opt._end_of_step()
