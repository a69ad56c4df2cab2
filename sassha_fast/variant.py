"""The family of methods as points on independent axes, fixed when an optimizer is built.

Numbers that may differ between parameter groups or change while training (ρ, the Hessian power, the least curvature,
the bound of the update) are hyperparameters. What is left are the choices below. Passes are asked for one of them at a
time and never learn the name of a method.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

__all__ = ["ADAHESSIAN", "G_SASSHA", "M_SASSHA", "SASSHA_", "SOPHIA_H", "Ascent", "Sample", "Variant"]


class Ascent(Enum):
    """Where ε points to."""

    NONE = "none"  # there is none: gradient and curvature at x
    GRADIENT = "gradient"  # the gradient at x, from a pass of its own
    MOMENTUM = "momentum"  # the momentum of the last step, at no cost


class Sample(IntEnum):
    """What a product h = z⊙Hz adds to the average D. The numbers are those of ``Sample`` in ``csrc/params.h``."""

    ABS = 0  # |h|
    SIGNED = 1  # h
    SQUARE = 2  # h²


@dataclass(frozen=True)
class Variant:
    """One method.

    Attributes:
        ascent: Where ε points to.
        adaptive: ASAM's scaling of ε by the weights: steps of a scale-invariant size.
        adaptive_bias: Whether it covers parameters of one dimension too: biases, and the weights of norms.
        gap: Descend along GSAM's decomposition of the gradient, which also lowers the surrogate gap.
        sample: What a product adds to D.
        by_filter: Average |h| over each filter of a convolution before (AdaHessian's spatial averaging).
    """

    ascent: Ascent = Ascent.GRADIENT
    adaptive: bool = False
    adaptive_bias: bool = True
    gap: bool = False
    sample: Sample = Sample.ABS
    by_filter: bool = False

    def scales_by_weight(self, dimensions: int) -> bool:
        """Whether ε of a parameter of so many dimensions is scaled by its weights."""
        return self.adaptive and (self.adaptive_bias or dimensions > 1)

    @property
    def x_in_state(self) -> bool:
        """Whether x is kept in state, and the parameter holds x + ε from one step to the next."""
        return self.ascent is Ascent.MOMENTUM


SASSHA_ = Variant()
M_SASSHA = Variant(ascent=Ascent.MOMENTUM)
G_SASSHA = Variant(gap=True)
ADAHESSIAN = Variant(ascent=Ascent.NONE, sample=Sample.SQUARE, by_filter=True)
SOPHIA_H = Variant(ascent=Ascent.NONE, sample=Sample.SIGNED)
