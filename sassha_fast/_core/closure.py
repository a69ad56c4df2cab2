"""A step from beginning to end: the order of its phases, and one way back from all exceptions."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.utils.weak import TensorWeakRef

from .._parallel.reducer import seen_in
from .._passes.accessors import grad
from .amp import NO_AMP, Amp
from .contexts import (
    CreateGraph,
    MakesContext,
    RandomState,
    RunningStatistics,
    frozen_batchnorm,
    refresh_contexts,
    within,
)
from .curvature import Curvature
from .guards import LostSums, warn_of_lightning, watched_statistics
from .params import Parameters
from .step import Step

Closure = Callable[[], "Tensor | float"]
NOTHING: AbstractContextManager[Any] = nullcontext()  # around a pass that nothing is done with


# ---- micro-batches ----------------------------------------------------------------------------------------------


class ProductSum:
    """Exact products of several micro-batches, each taken right after its pass: there is never more than one graph.

    Attributes:
        curvature: The sum.
    """

    def __init__(self, step: Step) -> None:
        """Begins with nothing."""
        self.curvature = Curvature()
        self._step = step

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Around a backward pass with a graph: adds its products, and its gradients to those that are there."""
        params = self._step.parts.params
        before = params.take_grads()
        yield
        with torch.no_grad():
            self.curvature = self.curvature.plus(self._step.exact_products("step"))
            pairs = zip(before, params.take_grads(), strict=True)
            params.set_grads([b if a is None else a if b is None else a + b for a, b in pairs])


class Accumulated:
    """Closures of several micro-batches as one: gradients and products are summed over them.

    Each runs forward and backward passes of its own part of the loss and leaves zeroing gradients to the optimizer.
    """

    def __init__(self, closures: Sequence[Closure], *, zero_nothing: bool = False) -> None:
        """Takes the closures, and whether it is an error if one of them zeroes gradients."""
        self.closures, self._zero_nothing = closures, zero_nothing

    def __call__(self, step: Step, around_last: AbstractContextManager[Any] = NOTHING) -> Tensor | float:
        """All micro-batches in one pass; gradients add up in ``p.grad``, and the last one completes them."""
        step.parts.params.clear_grads()
        return self.passes(self.closures, step, around_last)

    def passes(
        self, closures: Sequence[Closure], step: Step, around_last: AbstractContextManager[Any]
    ) -> Tensor | float:
        """Runs these closures. Returns the sum of their losses."""
        total: Tensor | float = 0.0
        for number, closure in enumerate(closures, start=1):
            with around_last if number == len(closures) else NOTHING, self._watching(step, number):
                total = total + _detached(closure())
        return total

    @contextmanager
    def _watching(self, step: Step, number: int) -> Iterator[None]:
        """Around a closure of a list, counted from 1: notices if it zeroes the gradients of those before it."""
        if not self._zero_nothing or number == 1:
            yield
            return
        watch = None if step.parts.has_watched_list else LostSums(step.parts.params)
        try:
            step.accumulates = True
            yield
        finally:
            step.accumulates = False
            if watch is not None:
                watch.stop()
        if watch is not None and watch.sums:
            step.parts.has_watched_list = True
            watch.warn(step, number)

    def differentiate(self, step: Step) -> Tensor | float:
        """All micro-batches in one pass that also takes the products of the step."""
        step.parts.params.clear_grads()
        return self.differentiated(self.closures, step, ProductSum(step))

    def differentiated(self, closures: Sequence[Closure], step: Step, products: ProductSum) -> Tensor | float:
        """Runs these closures and adds their products to those that are there."""
        total: Tensor | float = 0.0
        for number, closure in enumerate(closures, start=1):
            with products.adding(), self._watching(step, number):
                total = total + _detached(closure())
        step.curvature = products.curvature
        return total


class Checked:
    """A function of the user's, whose loss is checked.

    Attributes:
        function: The function.
    """

    def __init__(self, function: Closure, call: str) -> None:
        """Takes the function, and what errors call the argument."""
        self.function, self._call = function, call

    def __call__(self) -> Tensor | float:
        """Calls it."""
        loss = self.function()
        if is_loss(loss):
            return loss
        found = _short(loss)
        if isinstance(loss, Tensor) and loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}"
        raise TypeError(
            f"{self._call} returned {found}, expected the loss, one number: a closure takes no arguments, runs the "
            "forward pass and loss.backward(), and ends with `return loss`"
        )


def as_closure(
    closure: Closure | Accumulated | Sequence[Closure], *, caller: str, name: str = "closure"
) -> Checked | Accumulated:
    """A function that returns a loss, or several as one. ``name`` is what errors call the argument."""
    if isinstance(closure, Accumulated):
        return closure
    if callable(closure):
        return Checked(closure, f"{caller}.step: {name}")
    if isinstance(closure, Sequence) and closure and all(map(callable, closure)):
        parts = [Checked(part, f"{caller}.step: {name}[{i}]") for i, part in enumerate(closure)]
        return Accumulated(parts, zero_nothing=True)
    raise TypeError(
        f"{caller}.step: {name} is {_short(closure)}, expected a function without arguments that zeroes gradients, "
        "runs the forward pass and loss.backward(), and returns the loss; or a list of functions, one for each "
        "micro-batch, that zero nothing"
    )


def is_loss(loss: Any) -> bool:
    """Whether it is one real number. Its value is left alone, as it may be on a device; comparisons are no losses."""
    if isinstance(loss, Tensor):
        return loss.numel() == 1 and loss.dtype != torch.bool and not loss.is_complex()
    return isinstance(loss, Real) and not isinstance(loss, bool)


def _short(value: object) -> str:
    """A value in an error message: a batch, say, would fill the screen."""
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _detached(loss: Tensor | float) -> Tensor | float:
    """A loss by itself. One without a graph may be a sum that the closure keeps and fills again in the next pass."""
    if not isinstance(loss, Tensor):
        return loss
    return loss.detach() if loss.requires_grad else loss.clone()


# ---- the order of a step ----------------------------------------------------------------------------------------


def run(
    step: Step,
    closure: Closure | Accumulated,
    hessian_closure: Closure | Accumulated | None = None,
    *,
    ascent_closure: Closure | Accumulated | None = None,
    scaler: GradScaler | None = None,
    unscale: Callable[[], Amp] | None = None,
) -> Tensor | float:
    """All passes of one step.

    An exception in a closure, or anywhere else, puts weights, BatchNorm and random numbers back.

    Args:
        step: The step, which has just begun.
        closure: Computes the gradients.
        hessian_closure: Computes gradients for the products of a refresh.
        ascent_closure: Computes the gradients that the ascent follows, if there is one.
        scaler: Scales the losses of the closures.
        unscale: Takes its scale out of the gradients, or says what is left in them.

    Returns:
        The loss of the first pass of ``closure``.
    """
    looks = step.parts.reducer.model is None and not step.parts.has_looked
    step.parts.has_looked = True
    if looks and isinstance(closure, Checked):
        warn_of_lightning(step, closure.function)
    closures = _Closures(closure, ascent_closure, hessian_closure)
    return _guarded(step, lambda random: _in_order(step, closures, random, scaler, unscale), watch=looks)


def run_shadow(step: Step) -> None:
    """The same step in a process that has no data: from the gradients of the others alone."""

    def no_data() -> float:
        step.parts.params.clear_grads()
        return 0.0

    step.is_shadow = True
    _guarded(step, lambda random: _in_order(step, _Closures(no_data), random, None, None))
    step.parts.params.clear_grads()


def is_running(step: Step) -> bool:
    """Whether this thread is within the passes of a step. Its flag does not tell after a second interrupt."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _guarded.__code__ and frame.f_locals.get("step") is step:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _guarded(step: Step, passes: Callable[[RandomState], Tensor | float], *, watch: bool = False) -> Tensor | float:
    model = step.parts.reducer.model
    random = RandomState(step.parts.params.devices())
    statistics = RunningStatistics.of(model) if model is not None else None
    try:
        # On a refresh also the first pass avoids what has no double backward: compiled and eager dropout, say, draw
        # different masks from one seed.
        contexts = refresh_contexts(model) if step.differentiates else []
        if watch:
            contexts.append(partial(watched_statistics, step))
        return within(contexts, lambda: passes(random))
    except BaseException:
        step.is_broken = True
        try:
            step.roll_back()
        finally:  # a second interrupt does not keep the rest from coming back
            if step.is_undone:
                try:
                    random.restore()
                finally:
                    if statistics is not None:
                        statistics.restore()
        raise


class _Closures(NamedTuple):
    """What the passes of a step call: ``main`` gives the gradient to descend along, and the rest where it is alone."""

    main: Closure | Accumulated
    ascent: Closure | Accumulated | None = None
    hessian: Closure | Accumulated | None = None


def _in_order(
    step: Step,
    closures: _Closures,
    random: RandomState,
    scaler: GradScaler | None,
    unscale: Callable[[], Amp] | None,
) -> Tensor | float:
    """The order of a step. Hand-written loops follow it call by call, with their own passes in between."""
    params, options, stats = step.parts.params, step.parts.options, step.parts.stats
    ascends = step.parts.ascent.needs_pass(step)
    # What is reduced after a pass is sent while it runs: the ascent's gradients if all processes climb together, and
    # the descent's, unless they are taken apart before.
    send_descent = options.perturb_sync or not step.decomposes
    send_first = options.perturb_sync if ascends else send_descent
    own = closures.hessian is None  # the descent's pass gives the products

    before = _a_gradient(params)
    loss: Tensor | float | None = None
    if ascends and closures.ascent is not None:  # its loss is of another batch, so there is nothing to compare it with
        _replayed(step, closures.ascent, random, differentiate=False, send=send_first, is_descent=False)
    else:
        loss = _pass(step, closures.main, differentiate=own and not ascends, send=send_first, is_descent=not ascends)
    _warn_of_sums(params, before, options.caller)
    probes = not options.exact and step.hessian_due  # which need a way back, if of an ascent of length 0
    if (ascends or probes) and (options.perturb_sync or not step.is_shadow):  # without data there is no own ascent
        if not (step.parallel and options.perturb_sync):  # else those of other processes may do
            _check_gradients(step, "ascent_closure" if ascends and closures.ascent is not None else "closure")
        step.climb(zero_grad=ascends)
    if loss is None:  # the first pass of the batch whose BatchNorm statistics are to be kept
        random.restore()
        loss = _pass(step, closures.main, differentiate=own, send=send_descent)
        stats.ascent_gap = torch.tensor(math.nan, dtype=torch.float64, device="cpu")
    elif ascends:
        second = _replayed(step, closures.main, random, differentiate=own, send=send_descent)
        gap = second - loss
        stats.ascent_gap = (
            gap.double() if isinstance(gap, Tensor) else torch.tensor(gap, dtype=torch.float64, device="cpu")
        )
    curvature = None
    if closures.hessian is not None and step.hessian_due:
        curvature = _products_of(step, closures.hessian, random)
    elif step.probes_due and not step.is_shadow:
        _probe(step, closures.main, random)
    if options.hvp_point == "upstream":  # asks for x before the product, which the graph must not notice
        step.come_back(tell_autograd=False)
    fused = scaler is None and not (options.variant.gap or options.variant.by_filter)
    gathered = step.collect("step", scaler=scaler, curvature=curvature, fused=fused)
    amp = NO_AMP
    if unscale is not None:
        amp = unscale()  # in place, so the passes see it
        step.unscale_products(amp.loss_scale)
    step.update(gathered, amp)
    return loss


def _pass(
    step: Step, closure: Closure | Accumulated, *, differentiate: bool, send: bool = False, is_descent: bool = True
) -> Tensor | float:
    """One call of a closure.

    Args:
        step: The step at hand.
        closure: What to call.
        differentiate: Whether the products of a refresh come from this pass, which then has a graph.
        send: Whether its gradients are reduced next.
        is_descent: Whether a refresh reduces them together with products.
    """
    reducer, params, options = step.parts.reducer, step.parts.params, step.parts.options
    graph = differentiate and step.differentiates
    step.wants_graph = graph
    contexts: list[MakesContext] = [
        torch.enable_grad,
        partial(reducer.unsynced, params.all, options.reduce_grads),
    ]
    early = NOTHING
    if send and step.parallel and not (is_descent and step.refresh.scheduled):
        step.early = reducer.early()
        early = step.early or NOTHING
    if graph:
        contexts += [*refresh_contexts(reducer.model), CreateGraph]
    if not isinstance(closure, Accumulated):
        loss = within([*contexts, lambda: early], closure)
    elif graph:
        loss = within(contexts, lambda: closure.differentiate(step))
    else:
        loss = within(contexts, lambda: closure(step, early))
    step.wants_graph = True
    return _detached(loss)


def _replayed(
    step: Step,
    closure: Closure | Accumulated,
    random: RandomState,
    *,
    differentiate: bool,
    send: bool = False,
    is_descent: bool = True,
) -> Tensor | float:
    """A call of a closure with the random numbers that the step began with. BatchNorm statistics are left alone."""
    model = step.parts.reducer.model
    random.restore()
    contexts = [] if model is None else [partial(frozen_batchnorm, model)]
    return within(contexts, lambda: _pass(step, closure, differentiate=differentiate, send=send, is_descent=is_descent))


def _check_gradients(step: Step, name: str) -> None:
    """Raises if a pass has left no gradients. ``name`` is the argument of ``step`` that it has called."""
    if not step.parts.params.have_grads():
        raise RuntimeError(
            f"{step.parts.options.caller}.step: no parameter has a gradient after {name}; call loss.backward() in it, "
            "for a loss of the model whose parameters the optimizer has"
        )


def _probe(step: Step, closure: Closure | Accumulated, random: RandomState) -> None:
    """Runs a closure at every probe that is due."""
    for _ in range(step.probes_due):
        step.probe()
        _replayed(step, closure, random, differentiate=False)


def _products_of(step: Step, closure: Closure | Accumulated, random: RandomState) -> Curvature:
    """Products from the batch of another closure, which leave the gradients as they were."""
    params = step.parts.params
    kept = params.take_grads()
    _replayed(step, closure, random, differentiate=step.parts.options.exact)
    if not step.parallel:
        _check_gradients(step, "hessian_closure")
    if step.parts.options.exact:
        found = step.curvature  # of several micro-batches
        if found is None:
            with torch.no_grad():
                found = step.exact_products("step(hessian_closure=)")
    else:
        _probe(step, closure, random)
        found = step.refresh.from_probes(step.moved, step.parts.ascent.closing_call, fused=False)
    if found.products is not None:
        with torch.no_grad():
            found = replace(found, seen=seen_in(found.products.values, list(map(grad, params.all))))
    params.set_grads(kept)
    return found


# ---- a closure that adds ----------------------------------------------------------------------------------------


def _a_gradient(params: Parameters) -> tuple[Tensor, TensorWeakRef, int] | None:
    """A parameter that has a gradient, with it, which may go, and its version."""
    for p in params.all:
        if p.grad is not None:
            return p, TensorWeakRef(p.grad), p.grad._version
    return None


def _warn_of_sums(params: Parameters, before: tuple[Tensor, TensorWeakRef, int] | None, caller: str) -> None:
    """Warns of a first pass that added to a gradient of earlier passes: a single write, and none that zeroed it."""
    if before is None:
        return
    p, grad, version = before
    if p.grad is not None and p.grad is grad() and p.grad._version == version + 1:
        warnings.warn(
            f"{caller}.step: the closure added to gradients that were there before, and passes at x + ε and "
            "products of the Hessian will be those of the closure alone; zero gradients in the closure, or pass one "
            "closure for each micro-batch (in Lightning, callbacks=[SasshaCallback()] does that)",
            stacklevel=2,
        )
