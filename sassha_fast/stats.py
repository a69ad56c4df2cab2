"""What the last step saw, at no extra cost: the fused passes have the numbers at hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Stats"]


def _unknown() -> Tensor:
    return torch.tensor(float("nan"), dtype=torch.float64)


@dataclass
class Stats:
    """Numbers of the most recent step and refresh. Tensors live on the parameters' device; reading one synchronises.

    Attributes:
        grad_norm: ‖g‖ of the first gradient (‖|x|⊙g‖ with ``adaptive``).
        predicted_gap: ε·g, the first-order prediction of the loss increase that the ascent causes: ρ‖g‖.
        ascent_gap: The increase that was seen. Only closures know it: NaN after the three calls.
        trace: Σ z⊙Hz of the last refresh, an estimate of the trace of the Hessian.
        negative_share: Share of elements of z⊙Hz below zero.
        refreshes: Refreshes that succeeded.
        partial_refreshes: Those among them in which some products were not finite.
        skipped_refreshes: Refreshes in which no product was finite, or that had no graph.
    """

    grad_norm: Tensor = field(default_factory=_unknown)
    predicted_gap: Tensor = field(default_factory=_unknown)
    ascent_gap: Tensor = field(default_factory=_unknown)
    trace: Tensor = field(default_factory=_unknown)
    negative_share: Tensor = field(default_factory=_unknown)
    refreshes: int = 0
    partial_refreshes: int = 0
    skipped_refreshes: int = 0
