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
        # Hooks are held by their parameter, in C++, where the garbage collector doesn't see a cycle.
        self._before = [(TensorWeakRef(p), TensorWeakRef(p.grad)) for p in params if p.grad is not None]
        self._reached: set[int] = set()
        self._hooks: list[tuple[TensorWeakRef, OrderedDict[Any, Any], bool]] = []  # where ours are, and whether alone

    def listen(self) -> None:
        """Begins, until :meth:`stop`. What an interrupt leaves here is known before, so that this finds it."""
        note = partial(_note, self._reached)
        for known, _ in self._before:
            p = known()
            if p is None or not p.requires_grad:
                continue
            hooks: Any = p._post_accumulate_grad_hooks
            if hooks is None:  # what torch does too, in a fifth of the time
                hooks = OrderedDict(((self, note),))  # torch's keys are numbers
                self._hooks.append((known, hooks, True))
                p._post_accumulate_grad_hooks = hooks
            else:
                self._hooks.append((known, hooks, False))
                hooks[self] = note

    def stop(self) -> None:
        """Leaves nothing at the parameters. May be called twice."""
        for known, hooks, alone in self._hooks:
            hooks.pop(self, None)
            p = known()
            if p is not None and alone and not hooks and p._post_accumulate_grad_hooks is hooks:
                p._post_accumulate_grad_hooks = None

    @property
    def began_anew(self) -> bool:
        """Whether a parameter has a gradient of a later pass. One that was added to is the same tensor."""
        pairs = [(p, before) for known, before in self._before if (p := known()) is not None]
        return any(id(p) in self._reached and p.grad is not before() for p, before in pairs)

    @property
    def are_zeroed(self) -> bool:
        """Whether none of the parameters has a gradient any more."""
        return all(p is None or p.grad is None for p in (known() for known, _ in self._before))


def _note(reached: set[int], param: Tensor) -> None:
    reached.add(id(param))
