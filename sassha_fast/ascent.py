"""Optimizers that climb before they descend: the calls of a step that takes gradient and curvature at x + ε."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Join

from . import reference
from .accessors import IDLE_REFCOUNT, address, no_grad, requires_grad, set_grad
from .base import SecondOrder
from .refresh import Curvature, owned
from .sharding import local

__all__ = ["Climbing"]


class Climbing(SecondOrder):
    """An optimizer with the calls ``perturb_weights`` and ``unperturb``. Where ρ is 0 they may be left out."""

    _firsts: dict[int, Tensor]  # gradients of the first pass by id, where the descent is taken apart by them

    def _reset(self) -> None:
        super()._reset()
        self._firsts = {}

    def _check_ready(self) -> None:
        if self._ascent is not None:
            raise RuntimeError(f"{self._name}.step: the weights are still perturbed; call unperturb() first")

    @no_grad
    def perturb_weights(self, zero_grad: bool = True) -> None:
        """Climbs to x + ε from the gradients of the first backward pass.

        Args:
            zero_grad: Drop these gradients afterwards. Their memory then holds x until :meth:`unperturb`.
        """
        if self._ascent is not None:
            raise RuntimeError(
                f"{self._name}.perturb_weights: the weights are perturbed already; call unperturb() first"
            )
        Join.notify_join_context(self)
        self._ascend(self._next_rho(), zero_grad=zero_grad)

    def _next_radii(self) -> Sequence[float | Tensor]:
        return self._next_rho()

    def _needs_ascent(self, rho: Sequence[float | Tensor]) -> bool:
        # A tensor is not read: it may be on a device, and 0 only now.
        return any(isinstance(group["rho"], Tensor) for group in self.param_groups) or any(r != 0.0 for r in rho)

    def _ascend(self, rho: Sequence[float | Tensor], *, zero_grad: bool) -> None:
        self._curvature = self._time = None
        self._is_reduced = False
        if self.perturb_sync and self._parallel and self._grads_are_local(self._parameters()):
            self._reduce([p for p in self._parameters() if p.requires_grad], None)
        plan, grads = self._gather()
        if plan is None:
            raise RuntimeError(f"{self._name}.perturb_weights: no parameter has a gradient; run loss.backward() first")
        self._firsts = {}
        idle: bool | list[bool] = zero_grad
        if any(map(requires_grad, grads)):
            grads, idle = [g.detach() for g in grads], False
        elif zero_grad and max(map(sys.getrefcount, grads)) > IDLE_REFCOUNT:
            idle = [count <= IDLE_REFCOUNT for count in map(sys.getrefcount, grads)]
        if self._decomposes:  # both g and x are needed later, so x can't take the memory of g
            pairs, idle = zip(plan.params, grads, strict=True), False
            self._firsts = {id(p): owned(g) if zero_grad else g.detach().clone() for p, g in pairs}
        plan.bind_grads(grads, overwrite=True)
        self._time = self._clock()
        square_sums = plan.square_sums(of_ascent=True)
        signed = [-r if group["maximize"] else r for r, group in zip(rho, self.param_groups, strict=True)]
        offsets = [group["perturb_eps"] for group in self.param_groups]
        scales = reference.ascent_scales(square_sums, signed, offsets, on_device=self.capturable)
        if self.hvp != "exact" and (self._scheduled or any(self._without_curvature(plan))):
            self._weight_norm = plan.weight_norm()
        plan.count_draw(self._draw(plan))
        plan.perturb(scales, take_grads=idle, seed=self.seed)
        self._ascent, self._ascended = plan, True
        self.stats.square_sums, self.stats.scales = square_sums, scales
        self._moved(plan)
        if zero_grad:
            any(map(set_grad, self._flat, repeat(None)))  # for all p: p.grad = None

    @no_grad
    def unperturb(self, scaler: GradScaler | None = None) -> None:
        """Restores x, bit for bit; on a refresh, first takes the Hessian-vector products at x + ε.

        It always restores. If a refresh is due and the gradients have no graph it raises afterwards.

        Args:
            scaler: The ``torch.amp.GradScaler`` that scaled the losses, whose scale the products carry too.
        """
        if self._ascent is None:
            raise RuntimeError(f"{self._name}.unperturb: the weights are not perturbed; call perturb_weights() first")
        upstream = self.hvp_point == "upstream"
        try:
            if upstream:
                self._check_untouched("unperturb")
            else:
                self._take_products(scaler)
            if scaler is not None:
                self.stats.divide_by(scaler)
        finally:  # upstream, the graph is still to be used, with weights that it did not see
            self._undo_ascent(tell_autograd=not upstream)

    # ---- surrogate gap ------------------------------------------------------------------------------------------

    @property
    def _decomposes(self) -> bool:
        """Whether descent gradients are made of two passes. With α = 0 everywhere there is nothing to do."""
        return self.variant.gap and any(group["alpha"] for group in self.param_groups)

    def _with_descent(self, curvature: Curvature) -> Curvature:
        """See :meth:`SecondOrder._with_descent`. Gradients of one process are decomposed before they are reduced.

        That is what GSAM does, and it sends nothing more. After a climb along the gradient of all processes, both
        gradients are those of all, as in one process.
        """
        if not self.perturb_sync:
            self._decompose()
        curvature = self._reduced(curvature)
        if self.perturb_sync:
            self._decompose()
        return curvature

    def _decompose(self) -> None:
        """Makes g̃ − α g⊥ of the gradients, if the ascent has kept g."""
        firsts, self._firsts = self._firsts, {}
        if not firsts:
            return
        self._own_grads()
        plan, grads = self._gather()
        if plan is None:
            return
        plan.bind_grads(grads)
        kept = [firsts.get(id(p)) for p in plan.params]
        sums = plan.gap_sums([torch.zeros_like(g) if f is None else f for f, g in zip(kept, grads, strict=True)])
        plan.decompose(reference.gap_scales(sums, [group["alpha"] for group in self.param_groups]))

    def _own_grads(self) -> None:
        """Copies gradients that share memory with others: what is written into one must not change another."""
        seen: set[int] = set()
        for p in self._parameters():
            if p.grad is None:
                continue
            here: Any = address(local(p.grad))
            mine = owned(p.grad)
            p.grad = mine.clone() if here in seen else mine
            seen.add(here)

    def _end_of_step(self) -> None:
        super()._end_of_step()
        self._firsts = {}
