"""The update: scalars of every cohort, clipping, what is skipped, and what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_, is_not, itemgetter
from typing import Any

import torch
from torch import Tensor

from . import schedules
from .accessors import no_grad, weights_moved
from .capturable import device_scalars
from .checks import check_count, check_number
from .hutchinson import filter_means, probe_scale, without_zeros
from .passes import Product, Stepped, tally
from .plan import Plan
from .refresh import Curvature, Refreshing
from .scalars import Request, StepScalars, cohort_scalars
from .sharding import local
from .state import BIAS2, HESSIAN_STEP, STEP, new_state

__all__ = ["Updating"]


class Updating(Refreshing):
    """An optimizer that knows how to descend. :class:`sassha_fast.SASSHA` adds the phases of a step."""

    bias_correction: bool
    max_grad_norm: float | None
    skip_nonfinite: bool
    stochastic_rounding: bool
    capturable: bool
    hessian_power_scheduler: schedules.Schedule | schedules.Stepping | None
    rho_scheduler: schedules.Schedule | schedules.Stepping | None
    _curvature: Curvature | None
    _ascended: bool  # whether perturb_weights was called since the last step

    def _states(self, plan: Plan) -> list[dict[str, Any]]:
        """State of every parameter of the plan, created where it is missing."""
        if 0 < len(plan.states) == len(self.state) and all(map(is_, plan.states, self.state.values())):
            return plan.states  # the very entries of last time, found without hashing a parameter
        states = list(map(self.state.get, plan.params))
        for i, p in enumerate(plan.params):
            if not states[i]:
                self.state[p] = states[i] = new_state(p, on_device=self.capturable, apart=self.variant.apart)
        return states  # type: ignore[return-value]

    def _update(
        self,
        plan: Plan,
        curvature: Curvature,
        *,
        restore: bool = False,
        loss_scale: Tensor | None = None,
        overflow: float | Tensor = 0.0,
        check_finite: bool = False,
    ) -> None:
        """The update.

        Args:
            plan: Parameters, with their gradients bound.
            curvature: Products, on a refresh.
            restore: Take x from the backups of the plan's ascent, which is undone on the way.
            loss_scale: What the gradients still have to be divided by.
            overflow: Not 0 if gradients are known to have overflowed.
            check_finite: Find out whether they have.
        """
        grad_scale, skip = self._descent_limits(plan, loss_scale, overflow, check_finite or self.skip_nonfinite)
        if not isinstance(skip, Tensor) and skip:
            self._undo_ascent()
            self.stats.skipped_steps += 1
            return
        clock, found = self._clock(), curvature.products
        self._next_power()
        states = self._states(plan)
        plan.bind_state(states)
        products = None if found is None else [found.get(id(p)) for p in plan.params]
        refreshed = [False] * len(states) if products is None else list(map(is_not, products, repeat(None)))
        steps, bias2 = list(map(itemgetter(STEP), states)), list(map(itemgetter(BIAS2), states))
        request = Request(curvature.scale, grad_scale, skip, self.bias_correction)
        scalars: Sequence[StepScalars]
        if self.capturable:
            scalars, cohorts = (
                device_scalars(self.param_groups, plan.groups, steps, bias2, refreshed, request),
                plan.ranks,
            )
        else:
            scalars, cohorts = cohort_scalars(
                self.param_groups, plan.groups, plan.spans, steps, bias2, refreshed, request
            )
        if self.stochastic_rounding:
            plan.count_draw(self._draw(plan))
        if restore:
            self._ascent = None
        draw, stochastic = clock * self.n_samples, self.stochastic_rounding
        averaged = self._average_filters(plan, products, scalars, cohorts, draw)
        given = products
        if products is not None and curvature.coarse:
            products = list(map(without_zeros, products, plan.params))
        stepped = plan.step(scalars, cohorts, products, self.seed, draw, restore=restore, stochastic=stochastic)
        self._settle(plan, states, stepped)
        next_clock = clock + 1
        if given is not None and stepped.tallies is not None:
            for i, tally in averaged.items():
                stepped.tallies[i] = tally
            succeeded = self._record_refresh(
                plan, states, given, [scalars[c].bias2 for c in cohorts], stepped.tallies, curvature.coarse
            )
            if not succeeded and self._scheduled:
                next_clock = clock  # a scheduled refresh that failed is still due
        self._count_step(states, steps, next_clock, skip)

    def _settle(self, plan: Plan, states: list[dict[str, Any]], stepped: Stepped) -> None:
        """Tells everybody that an update has moved the weights."""
        weights_moved(plan.params)
        if plan.sharded:
            self._reshard()

    def _average_filters(
        self,
        plan: Plan,
        products: list[Product | None] | None,
        scalars: Sequence[StepScalars],
        cohorts: Sequence[int],
        draw: int,
    ) -> dict[int, Tensor]:
        """Replaces products of convolutions by means over their filters, if the method does that.

        Returns:
            Tallies of the products as they were, by position.
        """
        tallies: dict[int, Tensor] = {}
        if products is None or not self.variant.by_filter:
            return tallies
        for i, product in enumerate(products):
            if product is None or plan.params[i].dim() != 4:
                continue
            h = product.value
            if not product.signed:
                h = h * plan.rademacher([i], self.seed, draw)[0]
            tallies[i] = tally(h, scalars[cohorts[i]], local(plan.params[i]))
            products[i] = Product(filter_means(h), signed=True)
        return tallies

    def _count_step(
        self, states: list[dict[str, Any]], steps: list[Any], next_clock: int, skip: float | Tensor
    ) -> None:
        """Advances step counts, on the device if they live there, and the clock."""
        if self.capturable:
            if isinstance(skip, Tensor):
                torch._foreach_add_(steps, [(skip == 0).to(torch.int64)] * len(steps))
            else:
                torch._foreach_add_(steps, 1)
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return  # nothing happens now; replayed() tells when it does
            for entry in states:
                entry[HESSIAN_STEP] = next_clock
            return
        for entry in states:
            entry[STEP] += 1
            entry[HESSIAN_STEP] = next_clock

    def _descent_limits(
        self, plan: Plan, loss_scale: Tensor | None, overflow: float | Tensor, check_finite: bool
    ) -> tuple[float | Tensor, float | Tensor]:
        """The factor of the gradient at x + ε, and whether to skip the step. One norm serves clipping and checking."""
        unscale: float | Tensor = 1.0
        if loss_scale is not None:
            unscale = 1.0 / loss_scale.double() if self.capturable else 1.0 / float(loss_scale)
        if not self.capturable and float(overflow):
            return unscale, 1.0
        factor = unscale
        skip = overflow.double().reshape(()) if isinstance(overflow, Tensor) and self.capturable else 0.0
        if self.max_grad_norm is not None or check_finite:
            norm = self.stats.descent_norm = plan.square_sums(of_ascent=False).sum().sqrt() * unscale
            if check_finite:
                broken = torch.isfinite(norm).logical_not().double()
                if not self.capturable:
                    skip = float(broken)
                else:
                    skip = torch.maximum(broken, skip) if isinstance(skip, Tensor) else broken
            if self.max_grad_norm is not None:
                # Rounded to float32, which hides the order of summation; see reference.ascent_scales.
                factor = torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0).float().double() * unscale
        if isinstance(skip, Tensor):
            self.stats.count_skipped(skip)
        if isinstance(factor, Tensor) and factor.device.type == "cpu" and not self.capturable:
            factor = float(factor)
        return factor, skip

    def _draw(self, plan: Plan) -> int | Tensor:
        """Number of the step's draw of rounding noise. With ``capturable`` it is the step count on the device."""
        if not self.capturable:
            return self._clock()
        entry = self.state.get(plan.params[0])
        return entry[STEP] if entry else 0

    def replayed(self, steps: int = 1) -> None:
        """Tells the refresh clock that a CUDA graph of an ordinary step was replayed, which Python can't see."""
        check_count("steps", steps, caller=f"{self._name}.replayed")
        if not self.capturable:
            raise RuntimeError(
                f"{self._name}.replayed: steps are counted on the host; construct {self._name} with capturable=True"
            )
        clock = self._clock() + steps
        for entry in self.state.values():
            entry[HESSIAN_STEP] = clock

    @no_grad
    def _shadow_step(self) -> None:
        """A step from the gradients of other processes alone; see :meth:`join_hook`."""
        params = [p for p in self._parameters() if p.requires_grad]
        self._set_grads({})
        if not self.variant.apart:
            self._next_rho()
        if self.perturb_sync:
            self._reduce(params, None)
            self._set_grads({})
        products: dict[int, Tensor] | None = {} if self._scheduled else None
        coarse = self._reduce(params, products)
        plan, grads = self._gather()
        if plan is not None:
            plan.bind_grads(grads)
            found = None if products is None else {key: Product(h, signed=True) for key, h in products.items()}
            self._update(plan, Curvature(found, self._product_scale(), coarse=coarse))
        self._set_grads({})
        self._end_of_step()

    def _product_scale(self) -> float:
        """The factor of products that other processes computed."""
        elements = sum(p.numel() for p in self._flat)
        return probe_scale(elements) / self.n_samples if self.hvp == "exact" else 1.0

    def _end_of_step(self) -> None:
        self._curvature = self._time = self._random = self._probe = self._early = None
        self._ascended = self._is_reduced = False

    # ---- schedules ----------------------------------------------------------------------------------------------

    @property
    def hessian_power_t(self) -> float:
        """The Hessian power in use, of the first group."""
        return float(self.param_groups[0]["hessian_power"])

    def _next_power(self) -> None:
        if self.hessian_power_scheduler is not None:
            self._schedule("hessian_power", "power_step", self.hessian_power_scheduler)

    def _next_rho(self) -> Sequence[float | Tensor]:
        if self.rho_scheduler is not None:
            self._schedule("rho", "rho_step", self.rho_scheduler)
        radii = [group["rho"] for group in self.param_groups]
        return radii if self.capturable else list(map(float, radii))

    def _schedule(self, key: str, counter: str, schedule: schedules.Schedule | schedules.Stepping) -> None:
        value = schedules.next_value(schedule, self.param_groups[0][counter])
        check_number(key, value, caller=self._name)
        for group in self.param_groups:
            group[key] = value
            group[counter] += 1
