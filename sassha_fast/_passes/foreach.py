"""Backend ``foreach``: ``torch._foreach_*``, for any device that has no kernel of ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from .. import reference
from ..formats import FULL
from ..variant import Sample
from .layout import UPDATES, X_IN_BACKUP, Scalars, StepScalars
from .reference import Passes, Products, Stepped, tally

CACHED_ELEMENTS = 1 << 18


class ForeachPasses(Passes):
    """Passes with one call per operation and bucket of tensors, in the order of operations of the reference.

    An update is many calls, which work on copies. What they found is written in one, as the reference does.
    """

    name = "foreach"

    @override
    def perturb(
        self, scales: Tensor, *, adaptive: bool, take_grads: bool | Sequence[bool], seed: int, draw: Tensor
    ) -> None:
        members = self.members
        if self._goes_one_by_one():
            super().perturb(scales, adaptive=adaptive, take_grads=take_grads, seed=seed, draw=draw)
            return
        self.backups = [weight.clone() for weight in members.weights]
        self._words[X_IN_BACKUP] = 1
        for group, dtype, (weights, grads) in self._batches(members.groups, members.weights, self.grads):
            torch._foreach_copy_(weights, _ascended(weights, grads, scales[group].to(dtype), adaptive))
        self.grads = []

    @override
    def restore(self) -> None:
        if self.x_in_backup:
            torch._foreach_copy_(self.members.weights, self.backups)
        self.forget_backups()

    @override
    def step(
        self,
        scalars: Scalars,
        cohorts: Sequence[int],
        products: Products | None,
        seed: int,
        draw: int,
        *,
        restore: bool = False,
        noise_draw: Tensor | None = None,
        state_draw: Tensor | None = None,
        sample: Sample = Sample.ABS,
        zero_is_seen: bool = False,
        adaptive: bool = False,
    ) -> Stepped:
        if self.members.format != FULL:
            return super().step(
                *(scalars, cohorts, products, seed, draw),
                restore=restore,
                noise_draw=noise_draw,
                state_draw=state_draw,
                sample=sample,
                zero_is_seen=zero_is_seen,
                adaptive=adaptive,
            )
        if restore:
            self.restore()
        curvatures: Sequence[Tensor | None] = [None] * len(cohorts)
        tallies = None
        if products is not None:
            curvatures = [self._signed(products, i, seed, draw) for i in range(len(cohorts))]
            rows = zip(curvatures, cohorts, self.grads, strict=True)
            tallies = torch.stack([tally(h, scalars[c], g, zero_is_seen=zero_is_seen) for h, c, g in rows])
        noise = [self._noise(i, seed, noise_draw, reference.UPDATE_NOISE) for i in range(len(cohorts))]
        skips = any(isinstance(scalars[cohort].skip, Tensor) or scalars[cohort].skip for cohort in set(cohorts))
        xs, moments = [x.clone() for x in self.updated], [m.clone() for m in self.exp_avgs]
        pairs = list(zip(self.hessians, curvatures, strict=True))
        hessians = [d.clone() if skips or h is not None else d for d, h in pairs]  # others are read alone
        for cohort, dtype, batch in self._batches(cohorts, xs, self.grads, moments, hessians, curvatures, noise):
            _update(scalars[cohort], sample, zero_is_seen, dtype, *batch)
        self.products = products
        sums = None if self.xs is None else self._momentum_sums(moments, xs, adaptive)
        self.found = Stepped(tallies, sums)
        fresh = [(d, new) for d, new in zip(self.hessians, hessians, strict=True) if d is not new]
        targets = [*self.updated, *self.exp_avgs, *(d for d, _ in fresh)]
        self._write(targets, [*xs, *moments, *(new for _, new in fresh)], UPDATES, self.updates + 1)
        return self.found

    @override
    def momentum_ascent(self, scales: Tensor, *, adaptive: bool, seed: int, draw: Tensor) -> None:
        members, xs = self.members, self.xs
        if xs is None or self._goes_one_by_one():
            super().momentum_ascent(scales, adaptive=adaptive, seed=seed, draw=draw)
            return
        for group, dtype, (weights, x, moments) in self._batches(members.groups, members.weights, xs, self.exp_avgs):
            torch._foreach_copy_(weights, _ascended(x, moments, scales[group].to(dtype), adaptive))

    @override
    def decompose(self, scales: Tensor) -> None:
        for group, dtype, (grads, firsts) in self._batches(self.members.groups, self.grads, self.firsts):
            compute = reference.compute_dtype(dtype)
            alpha, share = scales[group].to(compute)
            seconds = [g.to(compute) for g in grads]
            along = torch._foreach_mul(seconds, share)
            orthogonal = torch._foreach_sub([g.to(compute) for g in firsts], along)
            torch._foreach_mul_(orthogonal, alpha)
            taken = torch._foreach_sub(seconds, orthogonal)
            pairs = zip(grads, taken, strict=True)
            torch._foreach_copy_(grads, [torch.where(alpha == 0, g, new.to(dtype)) for g, new in pairs])
        self.firsts = []

    def _goes_one_by_one(self) -> bool:
        """Whether a parameter is rounded at random or stored in fewer bits, which the reference does one by one."""
        dtypes = {weight.dtype for weight in self.members.weights}
        return self.members.format != FULL or any(dtype != reference.compute_dtype(dtype) for dtype in dtypes)

    def _batches(
        self, kinds: Sequence[int], *columns: Sequence[Tensor | None]
    ) -> Iterator[tuple[int, torch.dtype, list[list[Any]]]]:
        """The columns again, in parts that share a kind and a dtype.

        On a CPU the parts are small enough for their temporary tensors to stay in its cache, and large tensors are
        cut; elsewhere there are as few parts as possible.
        """
        limit = CACHED_ELEMENTS if self.members.weights[0].device.type == "cpu" else 1 << 62
        batches: dict[tuple[int, torch.dtype], list[tuple[Tensor | None, ...]]] = {}
        filled: dict[tuple[int, torch.dtype], int] = {}
        for i, weight in enumerate(self.members.weights):
            key = (kinds[i], weight.dtype)
            for row in _cut([column[i] for column in columns], weight.numel(), limit):
                size = row[0].numel()  # type: ignore[union-attr]
                if key in batches and filled[key] + size > limit:
                    yield *key, [list(column) for column in zip(*batches.pop(key), strict=True)]
                    filled[key] = 0
                batches.setdefault(key, []).append(row)
                filled[key] = filled.get(key, 0) + size
        for key, rows in batches.items():
            yield *key, [list(column) for column in zip(*rows, strict=True)]


def _cut(tensors: list[Tensor | None], size: int, limit: int) -> list[tuple[Tensor | None, ...]]:
    """One parameter's tensors, as flat parts of at most ``limit`` elements where they lie in logical order."""
    if size <= limit or not all(t is None or t.is_contiguous() for t in tensors):
        return [tuple(tensors)]
    n_parts = -(-size // limit)
    parts = [[None] * n_parts if t is None else torch.split(t.view(-1), limit) for t in tensors]
    return list(zip(*parts, strict=True))


def _ascended(weights: list[Tensor], directions: list[Tensor], scale: Tensor, adaptive: bool) -> list[Tensor]:
    """x + ε as :func:`reference.ascend` computes it."""
    eps = torch._foreach_mul(directions, scale)
    if adaptive:
        torch._foreach_mul_(eps, torch._foreach_mul(weights, weights))
    moved = torch._foreach_add(weights, eps)
    return [torch.where(scale == 0, w, x) for w, x in zip(weights, moved, strict=True)]


def _update(
    scalars: StepScalars,
    sample: Sample,
    zero_is_seen: bool,
    dtype: torch.dtype,
    weights: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    hessians: list[Tensor],
    curvatures: list[Tensor | None],
    noise: list[Tensor | None],
) -> None:
    """The update of tensors that share scalars and a dtype; see :func:`reference.step`."""
    compute = reference.compute_dtype(dtype)
    s = reference.scalar_tensors(scalars, compute, weights[0].device)

    if isinstance(scalars.skip, Tensor) or scalars.skip:
        _skippable_update(scalars, sample, zero_is_seen, weights, grads, exp_avgs, hessians, curvatures, noise)
        return

    # m = β1 m + (1−β1) g̃
    descent = torch._foreach_mul([g.to(compute) for g in grads], s.grad_scale)
    torch._foreach_mul_(descent, s.one_minus_beta1)
    torch._foreach_mul_(exp_avgs, s.beta1)
    torch._foreach_add_(exp_avgs, descent)
    # D = β2 D + (1−β2) |Ĥ|
    bias2: list[Tensor] = [s.bias2] * len(weights)
    for i, h in enumerate(curvatures):
        if h is None:
            continue
        sampled = reference.sampled(h.to(compute) * s.product_scale, sample)
        unseen, finite = reference.is_unseen(h, grads[i], zero_is_seen=zero_is_seen), torch.isfinite(sampled)
        d = reference.refreshed(hessians[i], sampled, unseen, s)
        hessians[i].copy_(torch.where(finite, d, hessians[i]))
        bias2[i] = torch.where(finite, s.bias2, s.bias2_kept)
    # D̄ + eps
    denoms = [d / b for d, b in zip(hessians, bias2, strict=True)]
    if isinstance(scalars.floor, Tensor) or sample is Sample.SIGNED or scalars.floor != 0.0:
        denoms = [torch.where(d < s.floor, s.floor, d) for d in denoms]
    if scalars.power == 0.5:
        denoms = [reference.root(d) for d in denoms]  # _foreach_sqrt is not correctly rounded everywhere
    elif scalars.power != 1.0:
        denoms = [d.pow(s.power) for d in denoms]
    torch._foreach_add_(denoms, s.eps)
    # x ← x(1−ηλ) − η m̄ / (D̄ + eps)
    updates = torch._foreach_div(exp_avgs, denoms)
    if isinstance(scalars.clip, Tensor) or scalars.clip != math.inf:
        updates = tuple(torch.clamp(update, -s.clip, s.clip) for update in updates)
    torch._foreach_mul_(updates, s.step_size)
    moved = torch._foreach_mul([w.to(compute) for w in weights], s.decay)
    torch._foreach_sub_(moved, updates)
    rounded = [
        x.to(dtype) if n is None else reference.stochastic_round(x, dtype, n) for x, n in zip(moved, noise, strict=True)
    ]
    known = [torch.where(reference.is_unknown(d), w, x) for d, w, x in zip(hessians, weights, rounded, strict=True)]
    torch._foreach_copy_(weights, known)


def _skippable_update(scalars: StepScalars, sample: Sample, zero_is_seen: bool, *columns: list[Any]) -> None:
    """The update where only the device knows whether it is to be skipped: tensor by tensor."""
    for weight, grad, exp_avg, hessian, curvature, noise in zip(*columns, strict=True):
        tensors = (weight, grad, exp_avg, hessian)
        results = reference.step(*tensors, scalars, curvature, noise, sample, zero_is_seen=zero_is_seen)
        torch._foreach_copy_([weight, exp_avg, hessian], list(results))
