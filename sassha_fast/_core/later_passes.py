"""Noticing backward passes between the last call of a step and its update."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.weak import TensorWeakRef


class LaterPasses:
    """Notices a backward pass that gives parameters new gradients in place of those that they have now.

    Of gradients that are others one can't see who made them: a backward pass, or somebody who clips by
    ``p.grad = p.grad.clamp(...)``. So torch tells of every pass into two of the parameters, which most passes reach.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        """Takes parameters that have a gradient."""
        self._before = [(p, TensorWeakRef(p.grad)) for p in params if p.grad is not None]
        self._reached: set[int] = set()
        self._hooks: list[tuple[Tensor, OrderedDict[Any, Any], bool]] = []  # where ours are, and whether alone

    def listen(self) -> None:
        """Begins, until :meth:`stop`. What an interrupt leaves here is known before, so that this finds it."""
        note = partial(_note, self._reached)
        for p, _ in self._before:
            if not p.requires_grad:
                continue
            hooks: Any = p._post_accumulate_grad_hooks
            if hooks is None:  # what torch does too, in a fifth of the time
                hooks = OrderedDict(((self, note),))  # torch's keys are numbers
                self._hooks.append((p, hooks, True))
                p._post_accumulate_grad_hooks = hooks
            else:
                self._hooks.append((p, hooks, False))
                hooks[self] = note

    def stop(self) -> None:
        """Leaves nothing at the parameters. May be called twice."""
        for p, hooks, alone in self._hooks:
            hooks.pop(self, None)
            if alone and not hooks and p._post_accumulate_grad_hooks is hooks:
                p._post_accumulate_grad_hooks = None  # type: ignore[assignment]

    @property
    def began_anew(self) -> bool:
        """Whether a parameter has a gradient of a later pass. One that was added to is the same tensor."""
        return any(id(p) in self._reached and p.grad is not before() for p, before in self._before)

    @property
    def are_zeroed(self) -> bool:
        """Whether none of the parameters has a gradient any more."""
        return all(p.grad is None for p, _ in self._before)


def _note(reached: set[int], param: Tensor) -> None:
    reached.add(id(param))
