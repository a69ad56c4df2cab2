"""Wrong labels, on purpose."""

from __future__ import annotations

import torch
from torch import Tensor


def with_noise(labels: Tensor, share: float, classes: int, seed: int) -> Tensor:
    """The labels with this share of them, drawn at random, replaced by one of the wrong ones."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(labels), generator=generator) < share
    shift = torch.randint(1, classes, wrong.shape, generator=generator) * wrong
    return (labels + shift.to(labels.device)) % classes
