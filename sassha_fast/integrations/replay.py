"""What the adapters of all frameworks share: passes that are run again, true weights in checkpoints, numbers to log."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from ..base import SecondOrder
from ..contexts import RandomState, frozen_batchnorm
from ..momentum import MSASSHA
from ..stats import Stats

__all__ = ["MicroBatch", "Replay", "TrueWeights", "numbers"]

Run = Callable[[], "Tensor | float | None"]


class MicroBatch:
    """Forward and backward pass of one micro-batch, as a closure of ``opt.step``."""

    def __init__(self, replay: Replay, again: Run) -> None:
        """Remembers the random numbers, so call it right before the framework runs the micro-batch."""
        self.replay, self.again = replay, again
        self.first: Run | None = None  # how the framework runs it, if that is left to the optimizer
        self.loss: Tensor | float | None = None  # of the framework's run
        self.reusable = False
        self.random = replay.random_state()

    def run_first(self, run: Run) -> None:
        """Leaves the framework's run to the optimizer, whose step begins now."""
        self.first, self.random = run, self.replay.random_state()

    def __call__(self) -> Tensor | float:
        """The loss; its gradient is added to ``p.grad``. The framework's own run counts as the first one."""
        opt, replay = self.replay.opt, self.replay
        reusable, self.reusable = self.reusable, False
        if reusable and self.loss is not None and not opt._wants_graph:
            replay.give_back()
            return self.loss
        replay.kept = {}
        self.random.restore()
        run, self.first = self.first or self.again, None
        repeated = opt._model is not None and self.loss is not None
        with frozen_batchnorm(opt._model) if repeated else nullcontext():  # type: ignore[arg-type]
            loss = run()
        if loss is None:
            raise RuntimeError(
                f"{opt._name}.step: the training step of a micro-batch returned None instead of a loss, and a step "
                "that has begun can't be skipped; leave such batches out of the DataLoader, or return output.sum() * 0"
            )
        return loss


class Replay:
    """The micro-batches of one step, collected as a framework runs them, and run again by the optimizer.

    A framework runs every micro-batch once and then asks for a step. Its gradients are those of the first pass; at
    x + ε and at probes the optimizer runs all micro-batches again, each with its random numbers.

    Attributes:
        opt: The optimizer.
        parts: What was collected since the last step.
        kept: Gradients of the framework's passes, between the beginning of a step and its first pass.
    """

    def __init__(self, opt: SecondOrder) -> None:
        """Collects for an optimizer."""
        self.opt = opt
        self.parts: list[MicroBatch] = []
        self.kept: dict[int, Tensor] = {}

    def random_state(self) -> RandomState:
        """The present random numbers."""
        return RandomState(p.device for p in self.opt._parameters())

    def begin(self, again: Run) -> None:
        """Call it before the framework runs a micro-batch; ``again`` does the same once more."""
        self.parts.append(MicroBatch(self, again))

    def ran(self, loss: Tensor | float | None) -> None:
        """Call it after that with the loss, None if there was none."""
        if loss is None:
            self.parts.pop()
        else:
            self.parts[-1].loss = loss.detach() if isinstance(loss, Tensor) else loss

    def closures(self, *, reuse: bool) -> list[MicroBatch]:
        """The closures of the step that is about to begin.

        Args:
            reuse: Whether the gradients that are there may serve as the first pass. Passes outside of
                ``opt.refresh_context()`` can't serve an exact refresh: their attention may draw other dropout masks.
        """
        parts, self.parts = self.parts, []
        self.kept = self.opt._take_grads() if reuse else {}
        for part in parts:
            part.reusable = reuse
        return parts

    def give_back(self) -> None:
        """Gives the parameters the gradients of the framework's passes, once."""
        kept, self.kept = self.kept, {}
        if kept:
            self.opt._set_grads(kept)


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
