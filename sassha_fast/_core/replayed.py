"""Random numbers of passes that see one network: those at x + ε draw what those at x drew."""

from __future__ import annotations

from .contexts import RandomState
from .params import Parameters


class ReplayedPasses:
    """The passes of one step in a hand-written loop.

    Attributes:
        is_running: Whether one of them runs.
    """

    def __init__(self) -> None:
        """Remembers none yet."""
        self.is_running = False
        self._states: list[RandomState] = []  # before each of the passes at x
        self._count = 0  # of passes after the ascent
        self._is_zeroed = False  # whether gradients were zeroed since the last pass at x

    def remember(self, params: Parameters) -> None:
        """Before a pass at x. One that begins without gradients is the first: those before it were given up."""
        if self._is_zeroed or not params.have_grads():  # by whomever they were zeroed
            self._states, self._is_zeroed = [], False
        self._states.append(RandomState(p.device for p in params.all))

    def replay(self) -> None:
        """Before a pass after the ascent: goes back to what the pass of this number at x began with."""
        if self._states:
            self._states[self._count % len(self._states)].restore()
            self._count += 1

    def note_zero_grad(self) -> None:
        """The next pass begins anew, unless the gradients were zeroed within a pass."""
        self._is_zeroed = not self.is_running
