"""Descents: division by the curvature, in one fused pass, or a step of somebody else's optimizer."""

from __future__ import annotations

from itertools import repeat
from operator import is_not, itemgetter

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from .._passes.layout import PROBE_GRADIENT, SIGNED_PRODUCT, Scalars
from .._passes.plan import Plan
from .._passes.reference import Products, tally
from .._passes.shards import local
from ..reference import is_unknown
from ..stats import Stats
from .curvature import Curvature
from .device_scalars import device_scalars
from .keys import BIAS2, HESSIAN, HESSIAN_STEP, STEP
from .options import Options
from .params import Parameters
from .products import filter_means, without_zeros
from .scalars import Request, cohort_scalars
from .state import state_tensors
from .step import Amp, Descent, Step


class Preconditioned(Descent):
    """x ← x(1−ηλ) − η m̄/(D̄+eps)."""

    has_curvature = True

    @override
    def clock(self, params: Parameters) -> int:
        return params.clock()

    @override
    def update(self, step: Step, plan: Plan, curvature: Curvature, amp: Amp) -> None:
        options, stats = step.parts.options, step.parts.stats
        grad_scale, skip = _limits(options, stats, plan, amp)
        if not isinstance(skip, Tensor) and skip:
            step.come_back()
            step.write_schedules()
            stats.skipped_steps += 1
            return
        step.parts.ascent.prepare_update(step)
        update = _Update(step, plan, curvature, grad_scale, skip)
        if step.moved is not plan and not options.variant.x_in_state:
            step.come_back()  # other parameters had gradients in the first pass, or there was no ascent
        plan.begin_step()
        step.pending = update
        update.finish()


class _Update:
    """An update with everything that it needs. Up to its kernel nothing has changed; after it there is no way back.

    Whatever :meth:`finish` changes it sets to a value that is known before, so that it may be called again after an
    interrupt.
    """

    def __init__(
        self, step: Step, plan: Plan, curvature: Curvature, grad_scale: float | Tensor, skip: float | Tensor
    ) -> None:
        """Computes scalars and prepares products."""
        params, options, groups = step.parts.params, step.parts.options, step.groups_of_update()
        self.step, self.plan, self.skip = step, plan, skip
        self.states = params.states(plan, options)
        plan.bind_state(self.states, state_tensors(x_in_state=options.variant.x_in_state))
        self.coarse = curvature.coarse
        self.given = curvature.products
        if self.given is not None and len(plan.positions) < len(params.all):
            self.given = self.given.take(plan.positions)
        n = len(self.states)
        refreshed = [False] * n if self.given is None else list(map(is_not, self.given.values, repeat(None)))
        self.steps, bias2 = list(map(itemgetter(STEP), self.states)), list(map(itemgetter(BIAS2), self.states))
        request = Request(curvature.scale, grad_scale, skip, options.bias_correction, options.lazy_hessian)
        self.scalars: Scalars
        if options.capturable:
            self.scalars = device_scalars(groups, plan.groups, self.steps, bias2, refreshed, request)
            self.cohorts = plan.ranks
        else:
            self.scalars, self.cohorts = cohort_scalars(
                groups, plan.groups, plan.spans, self.steps, bias2, refreshed, request
            )
        if options.stochastic_rounding:
            plan.count_draw(step.noise_draw(plan))
        self.draw = step.clock * options.n_samples
        self.zero_is_seen = options.unseen == "zero"
        self.grads: list[Tensor] = []
        if self.given is not None:
            self.grads = [p.grad for p in plan.params if p.grad is not None]
            if plan.sharded:
                self.grads = list(map(local, self.grads))
        self.tallies: dict[int, Tensor] = {}  # of products before they were averaged over filters, by position
        products = self.given
        if products is not None and options.variant.by_filter:
            products = self._averaged_over_filters(products, options.seed)
        if products is not None and curvature.coarse:
            products = without_zeros(products, self.grads, zero_is_seen=self.zero_is_seen)
        self.products = products
        self.stats_before = (step.parts.stats.refreshes, step.parts.stats.partial_refreshes)
        self.skipped_before = step.parts.stats.skipped_refreshes
        self.next_steps: tuple[Tensor, ...] = ()
        if options.capturable:
            if isinstance(skip, Tensor):
                self.next_steps = torch._foreach_add(self.steps, [(skip == 0).to(torch.int64)] * n)
            else:
                self.next_steps = torch._foreach_add(self.steps, 1)

    def _averaged_over_filters(self, products: Products, seed: int) -> Products:
        """Products with those of convolutions replaced by means over their filters."""
        found = Products(list(products.values), list(products.kinds))
        for i, value in enumerate(products.values):
            if value is None or self.plan.params[i].dim() != 4:
                continue
            h = value if products.kinds[i] == SIGNED_PRODUCT else value * self.plan.rademacher([i], seed, self.draw)[0]
            row = self.scalars[self.cohorts[i]]
            self.tallies[i] = tally(h, row, self.grads[i], zero_is_seen=self.zero_is_seen)
            found.values[i], found.kinds[i] = filter_means(h), SIGNED_PRODUCT
        return found

    @property
    def has_run(self) -> bool:
        """Whether a kernel has changed anything."""
        return self.plan.step_has_run

    def finish(self) -> None:
        """Runs what has not run yet, and takes down what came of it."""
        options, parts = self.step.parts.options, self.step.parts
        self.plan.step(
            *(self.scalars, self.cohorts, self.products, options.seed, self.draw),
            restore=self.step.moved is self.plan and not options.variant.x_in_state,
            stochastic=options.stochastic_rounding,
            zero_is_seen=self.zero_is_seen,
        )
        found = self.plan.found()
        parts.ascent.follow_update(self.step, self.plan, self.states, found)
        self.step.write_schedules()
        next_clock = self.step.clock + 1
        if found.tallies is not None and not self._record_refresh(found.tallies) and self.step.refresh.scheduled:
            next_clock = self.step.clock  # a scheduled refresh that failed is still due
        if options.capturable:
            self._count_on_device(next_clock)
            return
        for entry, count in zip(self.states, self.steps, strict=True):
            entry[STEP], entry[HESSIAN_STEP] = count + 1, next_clock

    def _count_on_device(self, next_clock: int) -> None:
        """Advances step counts on the device, and the clock here."""
        torch._foreach_copy_(self.steps, self.next_steps)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # nothing happens now; replayed() tells when it does
        for entry in self.states:
            entry[HESSIAN_STEP] = next_clock

    def _record_refresh(self, tallies: Tensor) -> bool:
        """Takes over what a refresh brought. Returns whether it brought anything, or there was nothing to bring.

        If every product of a parameter rounds to zero, it counts as refreshed; if they overflow, it is tried again.
        """
        assert self.given is not None
        stats, values = self.step.parts.stats, self.given.values
        for i, own in self.tallies.items():
            tallies[i] = own
        if isinstance(self.skip, Tensor) and bool(self.skip):  # gradients overflowed: nothing has happened
            stats.skipped_refreshes = self.skipped_before + 1
            return False
        seen = tallies[:, 2].tolist()
        lost = self._fill_unseen(seen)
        bias2 = [self.scalars[cohort].bias2 for cohort in range(len(self.scalars))]
        on_device = self.step.parts.options.capturable
        for i, (entry, value, cohort) in enumerate(zip(self.states, values, self.cohorts, strict=True)):
            if value is None:
                continue
            if seen[i] or not lost.get(i) or self._all_rounded(value):
                if on_device:
                    entry[BIAS2].copy_(bias2[cohort])  # in place: a captured step reads it there
                else:
                    entry[BIAS2] = bias2[cohort]
        total = sum(seen)
        if total == 0 and any(lost.values()):
            stats.skipped_refreshes = self.skipped_before + 1
            return False
        refreshes, partial = self.stats_before
        stats.refreshes, stats.partial_refreshes = refreshes + 1, partial + any(lost.values())
        stats.trace = tallies[:, 0].sum()
        stats.negative_share = tallies[:, 1].sum() / max(total, 1.0)
        return True

    def _fill_unseen(self, seen: list[float]) -> dict[int, float]:
        """Gives elements that no refresh has seen yet the mean curvature of their parameter, if it has one.

        A token that comes for the first time then takes a step like the others. From then on the mean is its D, with
        which later samples are averaged.

        Args:
            seen: How many elements of each parameter were seen.

        Returns:
            How many elements of parameters were lost to overflow or to rounding, by position, where any were not seen.
        """
        assert self.given is not None
        values, kinds, plan = *self.given, self.plan
        places = [i for i, v in enumerate(values) if v is not None and seen[i] < plan.numels[i]]
        if not places or self.zero_is_seen:
            return {i: plan.numels[i] - seen[i] for i in places}
        curvatures = [local(self.states[i][HESSIAN]) for i in places]
        masks, counts = [], []
        for i, d in zip(places, curvatures, strict=True):
            nothing = self.grads[i] if kinds[i] == PROBE_GRADIENT else 0.0
            unseen, unknown = (local(values[i]) == nothing) & (self.grads[i] == 0), is_unknown(d)  # type: ignore[arg-type]
            masks.append(unseen & unknown)
            known = torch.where(unknown, 0.0, d).to(torch.float64).sum()
            counts.append(torch.stack([t.double() for t in (unseen.sum(), known, (~unknown).sum())]))
        totals = plan.over_shards_of(places, counts).tolist()
        for d, mask, (_, total, number) in zip(curvatures, masks, totals, strict=True):
            if number:
                d.copy_(torch.where(mask, torch.full_like(d, total / number), d))
        return {i: plan.numels[i] - seen[i] - unseen for i, (unseen, _, _) in zip(places, totals, strict=True)}

    def _all_rounded(self, value: Tensor) -> bool:
        """Whether products without a finite element were lost to rounding. Shards have to agree, so they say yes."""
        return self.coarse and (self.plan.sharded or bool(value.isfinite().all()))


def _limits(options: Options, stats: Stats, plan: Plan, amp: Amp) -> tuple[float | Tensor, float | Tensor]:
    """The factor of the gradient at x + ε, and whether to skip the step. One norm serves clipping and checking."""
    loss_scale, overflow, check_finite = amp.loss_scale, amp.overflow, amp.check_finite or options.skip_nonfinite
    unscale: float | Tensor = 1.0
    if loss_scale is not None:
        unscale = 1.0 / loss_scale.double() if options.capturable else 1.0 / float(loss_scale)
    if not options.capturable and float(overflow):
        return unscale, 1.0
    factor = unscale
    skip = overflow.double().reshape(()) if isinstance(overflow, Tensor) and options.capturable else 0.0
    if options.max_grad_norm is not None or check_finite:
        norm = stats.descent_norm = plan.square_sums(of_ascent=False).sum().sqrt() * unscale
        if check_finite:
            broken = torch.isfinite(norm).logical_not().double()
            if not options.capturable:
                skip = float(broken)
            else:
                skip = torch.maximum(broken, skip) if isinstance(skip, Tensor) else broken
        if options.max_grad_norm is not None:
            # Rounded to float32, which hides the order of summation; see reference.ascent_scales.
            factor = torch.clamp(options.max_grad_norm / (norm + 1e-6), max=1.0).float().double() * unscale
    if isinstance(skip, Tensor):
        stats.count_skipped(skip)
    if isinstance(factor, Tensor) and factor.device.type == "cpu" and not options.capturable:
        factor = float(factor)
    return factor, skip


class Delegated(Descent):
    """A step of another optimizer from x, with the gradients at x + ε.

    Attributes:
        base: That optimizer. Its parameter groups and state are those of ours.
    """

    has_curvature = False

    def __init__(self, base: Optimizer | None = None) -> None:
        """Takes the optimizer, or none if it is to be set before the first step."""
        self.base = base

    @override
    def clock(self, params: Parameters) -> int:
        return int(params.groups[0]["ascents"])

    @override
    def update(self, step: Step, plan: Plan, curvature: Curvature, amp: Amp) -> None:
        options, stats = step.parts.options, step.parts.stats
        grad_scale, skip = _limits(options, stats, plan, amp)
        step.come_back()
        if skip:
            stats.skipped_steps += 1
        else:
            if isinstance(grad_scale, Tensor) or grad_scale != 1.0:
                torch._foreach_mul_([p.grad for p in plan.params if p.grad is not None], grad_scale)
            assert self.base is not None
            self.base.step()
        step.write_schedules()
        for group in step.parts.params.groups:
            group["ascents"] = step.clock + 1
