"""Backend ``foreach``: ``torch._foreach_*``, for any device that has no kernel of ours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .passes import Passes, Product, _tally
from .scalars import StepScalars

__all__ = ["ForeachPasses"]


class ForeachPasses(Passes):
    """Passes with one call per operation and bucket of tensors, in the order of operations of the reference."""

    name = "foreach"

    def perturb(
        self, scales: Tensor, *, adaptive: bool, take_grads: bool | Sequence[bool], seed: int, draw: int
    ) -> None:
        """See :meth:`Passes.perturb`. Reduced precision takes the reference's way, tensor by tensor."""
        members = self.members
        buckets: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
        for i, weight in enumerate(members.weights):
            buckets[members.groups[i], weight.dtype].append(i)
        if any(dtype != reference.compute_dtype(dtype) for _, dtype in buckets):
            super().perturb(scales, adaptive=adaptive, take_grads=take_grads, seed=seed, draw=draw)
            return
        self.backups = [weight.clone() for weight in members.weights]
        for (group, dtype), positions in buckets.items():
            weights = [members.weights[i] for i in positions]
            scale = scales[group].to(dtype)
            eps = torch._foreach_mul([self.grads[i] for i in positions], scale)
            if adaptive:
                torch._foreach_mul_(eps, torch._foreach_mul(weights, weights))
            moved = torch._foreach_add(weights, eps)
            torch._foreach_copy_(weights, [torch.where(scale == 0, w, x) for w, x in zip(weights, moved, strict=True)])
        self.grads = []

    def restore(self) -> None:
        """See :meth:`Passes.restore`."""
        torch._foreach_copy_(self.members.weights, self.backups)
        self.backups = []

    def step(
        self,
        scalars: Sequence[StepScalars],
        cohorts: Sequence[int],
        products: Sequence[Product | None] | None,
        seed: int,
        draw: int,
    ) -> Tensor | None:
        """See :meth:`Passes.step`."""
        members = self.members
        buckets: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
        for i, weight in enumerate(members.weights):
            buckets[cohorts[i], weight.dtype].append(i)
        tallies: list[Tensor] = [torch.empty(0)] * len(members.weights)
        for (cohort, dtype), positions in buckets.items():
            curvatures = None
            if products is not None:
                curvatures = [self._signed(products[i], i, seed, draw) for i in positions]
                for i, h in zip(positions, curvatures, strict=True):
                    tallies[i] = _tally(h, scalars[cohort], members.weights[i])
            self._update(positions, dtype, scalars[cohort], curvatures)
        self.grads = []
        return torch.stack(tallies) if products is not None else None

    def _signed(self, product: Product | None, i: int, seed: int, draw: int) -> Tensor | None:
        if product is None or product.signed:
            return None if product is None else product.value
        return product.value * reference.rademacher(self.members.weights[i], self.members.indices[i], seed, draw)

    def _update(
        self, positions: list[int], dtype: torch.dtype, scalars: StepScalars, curvatures: list[Tensor | None] | None
    ) -> None:
        weights = [self.members.weights[i] for i in positions]
        exp_avgs = [self.exp_avgs[i] for i in positions]
        hessians = [self.hessians[i] for i in positions]
        compute = reference.compute_dtype(dtype)
        s = reference.scalar_tensors(scalars, compute, weights[0].device)
        grads = [self.grads[i].to(compute) for i in positions]

        # m = β1 m + (1−β1) g̃
        torch._foreach_mul_(exp_avgs, s.beta1)
        torch._foreach_add_(exp_avgs, torch._foreach_mul(grads, s.one_minus_beta1))
        # D = β2 D + (1−β2) |Ĥ|
        bias2: list[Tensor] = [s.bias2] * len(weights)
        for j, h in enumerate(curvatures or ()):
            if h is None:
                continue
            h = h.to(compute) / s.samples
            refreshed = torch.isfinite(h)
            d = s.beta2 * hessians[j] + s.one_minus_beta2 * h.abs()
            hessians[j].copy_(torch.where(refreshed, d, hessians[j]))
            bias2[j] = torch.where(refreshed, s.bias2, s.bias2_kept)
        # D̄ + eps
        denoms = (
            [d / b for d, b in zip(hessians, bias2, strict=True)]
            if curvatures
            else torch._foreach_div(hessians, s.bias2)
        )
        if scalars.power == 0.5:
            denoms = [reference.root(d) for d in denoms]  # _foreach_sqrt is not correctly rounded everywhere
        elif scalars.power != 1.0:
            denoms = [d.pow(s.power) for d in denoms]
        torch._foreach_add_(denoms, s.eps)
        # x ← x(1−ηλ) − η m̄ / (D̄ + eps)
        updates = torch._foreach_div(exp_avgs, denoms)
        torch._foreach_mul_(updates, s.step_size)
        moved = torch._foreach_mul([w.to(compute) for w in weights], s.decay)
        torch._foreach_sub_(moved, updates)
        known = [
            torch.where(torch.signbit(d), w, x.to(dtype)) for d, w, x in zip(hessians, weights, moved, strict=True)
        ]
        torch._foreach_copy_(weights, known)
