"""Hutchinson's estimate of the Hessian diagonal: E[z ⊙ Hz] with Rademacher probes z."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .passes import Product

__all__ = ["exact_products"]


class ProbeSource(Protocol):
    """Draws probes, and knows where the update can draw them again."""

    def rademacher(self, positions: Sequence[int], seed: int, draw: int) -> list[Tensor]:
        """Signs z for the parameters at ``positions``."""

    def signs_in_registers(self, position: int) -> bool:
        """Whether the update can apply the signs of this parameter itself."""


def exact_products(
    source: ProbeSource,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    due: Sequence[bool],
    *,
    n_samples: int,
    seed: int,
    draw: int,
) -> list[Product | None] | None:
    """Products with the exact Hessian, by differentiating the gradients once more.

    Args:
        source: Draws the probes.
        params: Parameters.
        grads: Their gradients, from a backward pass with ``create_graph=True``.
        due: Which of them to refresh.
        n_samples: Number of probes to average over.
        seed: Key of the probes.
        draw: Number of the first probe.

    Returns:
        One product per parameter, None where it is not due; or None if no gradient has a graph. A parameter whose
        gradient does not depend on any parameter has a product of zeros.
    """
    positions = [i for i, wanted in enumerate(due) if wanted]
    connected = [i for i in positions if grads[i].requires_grad]
    if not connected:
        return None
    inputs = [params[i] for i in positions]
    sums: list[Tensor] = []
    signed = n_samples > 1
    for sample in range(n_samples):
        signs = dict(zip(positions, source.rademacher(positions, seed, draw + sample), strict=True))
        with torch.enable_grad():
            differentiated = torch.autograd.grad(
                [grads[i] for i in connected],
                inputs,
                grad_outputs=[signs[i] for i in connected],
                retain_graph=sample < n_samples - 1,
                allow_unused=True,
                materialize_grads=True,
            )
        products = [product.detach() for product in differentiated]
        if not signed:
            return _place(source, positions, products, signs, len(params))
        for j, product in enumerate(products):
            term = product * signs[positions[j]]
            if sample == 0:
                sums.append(term)
            else:
                sums[j] = sums[j] + term
    placed: list[Product | None] = [None] * len(params)
    for i, total in zip(positions, sums, strict=True):
        placed[i] = Product(total, signed=True)
    return placed


def _place(
    source: ProbeSource, positions: Sequence[int], products: Sequence[Tensor], signs: dict[int, Tensor], n: int
) -> list[Product | None]:
    """Products of one probe, signed here only where the update can't draw the signs again itself."""
    placed: list[Product | None] = [None] * n
    for i, product in zip(positions, products, strict=True):
        if source.signs_in_registers(i):
            placed[i] = Product(product, signed=False)
        else:
            placed[i] = Product(product * signs[i], signed=True)
    return placed
