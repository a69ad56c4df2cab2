"""What the adapters of all frameworks share: passes that are run again, true weights in checkpoints, numbers to log."""

from __future__ import annotations

import math
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from .._core.closure import NOTHING, Accumulated, ProductSum
from .._core.contexts import CreateGraph, RandomState, frozen_batchnorm
from .._core.optimizer import FusedOptimizer
from .._core.params import Grads
from .._core.step import Step
from .._passes.accessors import is_changed, noted
from ..checks import user_level
from ..msassha import MSASSHA
from ..stats import Stats
from ..variant import Ascent

__all__ = ["MicroBatch", "Replay", "Replayed", "TrueWeights", "numbers"]

RunShare = Callable[[float], "Tensor | float | None"]  # on a share of the micro-batch; 1 is all of it


class MicroBatch:
    """Forward and backward pass of one micro-batch, as a closure of ``opt.step``.

    Attributes:
        share: Of the micro-batch, which the framework's run takes.
    """

    def __init__(self, opt: FusedOptimizer, again: RunShare, share: float = 1.0) -> None:
        """Remembers the random numbers, so call it right before the framework runs the micro-batch."""
        self.opt, self.run, self.share = opt, again, share
        self.first: RunShare | None = None  # how the framework runs it, if that is left to the optimizer
        self.loss: Tensor | float | None = None  # of the framework's run
        self.random = random_state(opt)
        self.grads: list[tuple[Tensor, int] | None] = []  # that this run left, with their versions

    def note_random(self) -> None:
        """The framework's run begins right now, and not before, as hooks that draw random numbers came in between."""
        self.random = random_state(self.opt)

    def note_grads(self) -> None:
        """Takes down the gradients that there are."""
        self.grads = [noted(p.grad) for p in self.opt.parts.params.all]

    def check_grads(self, caller: str, hook: str) -> None:
        """Raises if somebody has changed gradients since they were taken down, and they are those of an ascent."""
        pairs = list(zip(self.opt.parts.params.all, self.grads, strict=False))
        self.grads = []
        if climbs(self.opt) and any(is_changed(p.grad, before) for p, before in pairs):
            raise RuntimeError(
                f"{caller}: {hook} changed gradients, which are those of the ascent of {type(self.opt).__name__} and "
                "not those that it descends along; clip by max_grad_norm= of the optimizer, and leave changes of "
                "gradients out of the hook"
            )

    def run_first(self, run: RunShare) -> None:
        """Leaves the framework's run to the optimizer, whose step begins now."""
        self.first, self.random = run, random_state(self.opt)

    def __call__(self) -> Tensor | float:
        """The loss; its gradient is added to ``p.grad``."""
        model = self.opt.model
        self.random.restore()
        has_run = model is not None and self.loss is not None
        with frozen_batchnorm(model) if has_run else nullcontext():  # type: ignore[arg-type]
            return self.run_share(self.share)

    def run_share(self, share: float) -> Tensor | float:
        """The loss of a share of it, with the random numbers at hand; its gradient is added to ``p.grad``."""
        run, self.first = self.first or self.run, None
        loss = run(share)
        if loss is None:
            raise RuntimeError(
                f"{type(self.opt).__name__}.step: the training step of a micro-batch returned None instead of a loss, "
                "and a step that has begun can't be skipped; leave such batches out of the DataLoader, or return "
                "output.sum() * 0"
            )
        return loss


class Replayed(Accumulated):
    """The micro-batches of one step. Those that the framework has run are not run again in the first pass.

    Attributes:
        grads: Gradients of the framework's runs, until the first pass; None if there was none.
        products: Their products, if they had graphs.
    """

    closures: Sequence[MicroBatch]

    def __init__(self, parts: Sequence[MicroBatch], grads: Grads | None, products: ProductSum | None) -> None:
        """Takes what a framework has done of the step already."""
        super().__init__(parts)
        self.grads, self.products = grads, products

    @override
    def __call__(self, step: Step, around_last: AbstractContextManager[Any] = NOTHING) -> Tensor | float:
        grads, _ = self._begun()
        if grads is None:
            return super().__call__(step, around_last)
        step.parts.params.set_grads(grads)
        return self._known + self.passes(self._left, step, around_last)

    @override
    def differentiate(self, step: Step) -> Tensor | float:
        grads, products = self._begun()
        if grads is None or products is None:
            return super().differentiate(step)
        step.parts.params.set_grads(grads)
        return self._known + self.differentiated(self._left, step, products)

    @property
    def _known(self) -> Tensor | float:
        """The losses of the framework's runs."""
        return sum((part.loss for part in self.closures if part.loss is not None), start=0.0)

    @property
    def _left(self) -> list[MicroBatch]:
        """What the framework left to the optimizer."""
        return [part for part in self.closures if part.loss is None]

    def _begun(self) -> tuple[Grads | None, ProductSum | None]:
        """What the framework's runs gave, once."""
        given = self.grads, self.products
        self.grads = self.products = None
        return given


class Replay:
    """The micro-batches of one step, collected as a framework runs them, and run again by the optimizer.

    A framework runs every micro-batch once and then asks for a step. Its gradients are those of the first pass; at
    x + ε and at probes the optimizer runs all micro-batches again, each with its random numbers.

    With ``ascent_share`` the framework runs a share of every micro-batch, which is all that the ascent sees. Whole
    micro-batches are run at x + ε alone.

    Attributes:
        opt: The optimizer.
        parts: What was collected since the last step.
        products: Of methods whose first pass is the only one, on refreshes by exact products.
    """

    def __init__(
        self, opt: FusedOptimizer, ascent_share: float | None = None, hessian_share: float | None = None
    ) -> None:
        """Collects for an optimizer."""
        self.opt = opt
        self._ascent_share = ascent_share
        self._hessian_share = None if hessian_share == 1.0 else hessian_share  # products come from the step's own pass
        self.clear()

    def clear(self) -> None:
        """Forgets what was collected."""
        self.parts: list[MicroBatch] = []
        self.products: ProductSum | None = None

    @property
    def first_share(self) -> float:
        """The share of every micro-batch that the framework has to run."""
        return self._ascent_share if self._ascent_share is not None and climbs(self.opt) else 1.0

    def begin(self, again: RunShare) -> MicroBatch:
        """Call it before the framework runs its share of a micro-batch; ``again`` runs any share of it once more."""
        self.parts.append(MicroBatch(self.opt, again, self.first_share))
        return self.parts[-1]

    def unsynced(self) -> AbstractContextManager[Any]:
        """For the framework's passes: DDP leaves gradients alone."""
        parts = self.opt.parts
        return parts.reducer.unsynced(parts.params.all, parts.options.reduce_grads)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """For the framework's forward pass: on exact refreshes, all passes of a step have to see one network.

        Where it runs a share, BatchNorm statistics are left to the pass of the whole batch.
        """
        model = self.opt.model
        with ExitStack() as stack:
            if self._differentiates:
                stack.enter_context(self.opt.refresh_context())
            if self.parts and self.parts[-1].share < 1.0 and model is not None:
                stack.enter_context(frozen_batchnorm(model))
            yield

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        """For the framework's backward pass: where no other follows, it is the one to differentiate again."""
        apart = self._hessian_share is not None or self.opt.variant.ascent is Ascent.GRADIENT
        if not self._differentiates or apart:
            yield
            return
        self.products = self.products or ProductSum(Step(self.opt.parts))
        with self.products.adding(), CreateGraph():
            yield

    def ran(self, loss: Tensor | float | None) -> None:
        """Call it after that with the loss, None if there was none."""
        if loss is None:
            self.parts.pop()
        else:
            self.parts[-1].loss = loss.detach() if isinstance(loss, Tensor) else loss

    def closures(self) -> tuple[Accumulated, dict[str, Accumulated]]:
        """The closures of the step that is about to begin: of the descent, and by the name of their argument others."""
        parts = self.parts
        has_run = any(part.loss is not None for part in parts)
        grads = self.opt.parts.params.take_grads() if has_run else None
        closures: Accumulated = Replayed(parts, grads, self.products)
        others: dict[str, Accumulated] = {}
        if any(part.share < 1.0 for part in parts):
            closures, others["ascent_closure"] = _in_turn(parts, 1.0), closures
        if self._hessian_share is not None and self.opt.parts.descent.has_curvature:
            others["hessian_closure"] = _in_turn(parts, self._hessian_share)
        self.clear()
        return closures, others

    @property
    def _differentiates(self) -> bool:
        return self.opt.hvp == "exact" and self.opt.hessian_due


def climbs(opt: FusedOptimizer) -> bool:
    """Whether an optimizer takes a gradient for the sake of its ascent alone."""
    radii = [group["rho"] for group in opt.param_groups] if "rho" in opt.defaults else []
    moves = opt.rho_scheduler is not None or any(isinstance(r, Tensor) or r != 0.0 for r in radii)
    return moves and opt.variant.ascent is Ascent.GRADIENT


class Batch:
    """What a training step is given, for every time that it is run again.

    A step may take out of its containers what it likes, as these are copied. A tensor that it changes stays changed at
    x + ε, which is warned of: where twice is once, as for labels that are masked, nothing is wrong with that.
    """

    def __init__(self, given: Any, caller: str) -> None:
        """Takes the arguments before the first run."""
        self._given, self._caller = copied_containers(given), caller
        self._versions = [(tensor, tensor._version) for tensor in _tensors_in(self._given)]

    def again(self) -> Any:
        """The same arguments once more."""
        if any(tensor._version != version for tensor, version in self._versions):
            self._versions = []
            warnings.warn(
                f"{self._caller}: training_step changed a tensor of its batch in place, and at x + ε it runs on what "
                "the batch has become; let it change a copy, as by batch.clone(), unless a second time changes nothing",
                stacklevel=user_level(),
            )
        return copied_containers(self._given)


def copied_containers(value: Any) -> Any:
    """Dicts, lists and tuples anew, with the very tensors that are in them."""
    if isinstance(value, UserDict):  # as of tokenizers
        new = copy(value)
        new.data = copied_containers(dict(value.data))
        return new
    return tree_map(lambda leaf: copied_containers(leaf) if isinstance(leaf, UserDict) else leaf, value)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, UserDict):
            yield from _tensors_in(leaf.data)
        elif isinstance(leaf, Tensor) and not leaf.is_inference():  # which have no version
            yield leaf


def _in_turn(parts: Sequence[MicroBatch], share: float) -> Accumulated:
    """Passes over a share of all micro-batches. Random numbers are those of the first run and go on from there."""

    def closure(number: int, part: MicroBatch) -> Tensor | float:
        if number == 0:
            part.random.restore()
        return part.run_share(share)

    return Accumulated([partial(closure, number, part) for number, part in enumerate(parts)])


def random_state(opt: FusedOptimizer) -> RandomState:
    """The present random numbers of an optimizer's devices."""
    return RandomState(opt.parts.params.devices())


class TrueWeights:
    """Lets a model's ``state_dict`` show the true weights of M-SASSHA, and ``load_state_dict`` write them.

    Both then leave the optimizer as after ``opt.eval()``. Copies of the model are not concerned.
    """

    def __init__(self, opt: MSASSHA | None = None, model: nn.Module | None = None) -> None:
        """Hooks into the model until :meth:`close`."""
        self.opt = None if opt is None else weakref.ref(opt)
        self.handles: list[Any] = []
        if model is not None:
            self.handles = [
                model.register_state_dict_pre_hook(self),  # type: ignore[no-untyped-call]
                model.register_load_state_dict_pre_hook(self),  # type: ignore[no-untyped-call]
            ]

    def __call__(self, *_: Any) -> None:
        """The hook."""
        opt = None if self.opt is None else self.opt()
        if opt is not None:
            opt.eval()

    def __deepcopy__(self, memo: Any) -> TrueWeights:
        """For copies of the model: a hook that does nothing."""
        return TrueWeights()

    def __reduce__(self) -> tuple[type[TrueWeights], tuple[()]]:
        """For pickled models: a hook that does nothing."""
        return TrueWeights, ()

    def close(self) -> None:
        """Lets go of the model."""
        for handle in self.handles:
            handle.remove()
        self.handles = []


def numbers(stats: Stats, prefix: str = "sassha/") -> dict[str, float]:
    """Statistics as plain numbers for a logger, without those that are not known. Reading them waits for the device."""
    tensors = ("grad_norm", "predicted_gap", "ascent_gap", "trace", "negative_share", "descent_norm")
    counts = ("refreshes", "partial_refreshes", "skipped_refreshes", "skipped_steps")
    found = {prefix + name: float(getattr(stats, name)) for name in (*tensors, *counts)}
    return {name: value for name, value in found.items() if math.isfinite(value)}
