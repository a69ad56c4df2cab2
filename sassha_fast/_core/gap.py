"""GSAM's surrogate gap: the gradient to descend along, made of those of two passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from .._passes.accessors import IDLE_USES, address, used_here, uses
from .._passes.shards import local
from .options import Options
from .params import Grads, Parameters, owned


def decomposes(params: Parameters, options: Options) -> bool:
    """Whether descent gradients are made of two passes. With α = 0 everywhere there is nothing to do."""
    return options.variant.gap and any(group["alpha"] for group in params.groups)


def kept_gradients(positions: Sequence[int], grads: Sequence[Tensor], length: int, *, alone: bool) -> Grads:
    """Gradients of the first pass by position among all parameters; copies, unless they are left ``alone``."""
    kept: list[Tensor | None] = [None] * length
    for i, g in zip(positions, grads, strict=True):
        kept[i] = owned(g) if alone else g.detach().clone()
    return kept


def decompose(params: Parameters, options: Options, firsts: Grads) -> None:
    """Makes g̃ − α g⊥ of the gradients g̃, where ``firsts`` are those of the first pass."""
    _own_grads(params)
    plan, grads = params.gather(options)
    if plan is None:
        return
    plan.bind_grads(grads)
    kept = [firsts[i] for i in plan.positions]
    sums = plan.gap_sums([torch.zeros_like(g) if f is None else f for f, g in zip(kept, grads, strict=True)])
    alpha = plan.constants.vector([group["alpha"] for group in params.groups], sums.device)
    used_here(None if f is None else local(f) for f in kept)
    plan.decompose(reference.gap_scales(sums, alpha))


def _own_grads(params: Parameters) -> None:
    """Copies gradients that share memory with others: what is written into one must not change another."""
    seen: set[int] = set()
    for p in params.all:
        if p.grad is None:
            continue
        here = address(local(p.grad))
        is_saved = uses(p.grad) > IDLE_USES  # by a graph, say, which would not notice
        mine = owned(p.grad)
        p.grad = mine.clone() if here in seen or is_saved else mine
        seen.add(here)
