"""Descents: division by the curvature, in one fused pass, or a step of somebody else's optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import is_not, itemgetter

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from .. import reference
from .._passes.accessors import used_here
from .._passes.layout import PROBE_GRADIENT, SIGNED_PRODUCT, TALLY_WORDS, DeviceScalars, Scalars, StepScalars
from .._passes.plan import Plan
from .._passes.reference import Products, tally
from .._passes.shards import local
from .._passes.upload import is_capturing
from ..reference import is_unseen
from ..stats import Stats
from .amp import Amp
from .compact import curvature as known_curvature
from .curvature import Curvature
from .device_scalars import device_scalars
from .keys import BIAS2, COMPACT_KEYS, HESSIAN_STEP, STEP
from .options import Options
from .outcome import Outcome, Refreshed
from .params import Parameters
from .products import filter_means, without_zeros
from .scalars import Request, cohort_scalars
from .state import state_tensors
from .step import Descent, Step

BIAS2_COLUMN, BIAS2_KEPT_COLUMN = map(StepScalars._fields.index, ("bias2", "bias2_kept"))


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
            step.schedules.write_schedules()
            stats.skipped_steps += 1
            return
        step.parts.ascent.prepare_update(step, plan)
        update = _Update(step, plan, curvature, grad_scale, skip)
        if step.moved is not plan and not options.variant.x_in_state:
            step.come_back()  # other parameters had gradients in the first pass, or there was no ascent
        if isinstance(skip, Tensor):  # now that nothing is left to be refused
            stats.count_skipped(skip)
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
        params, options, groups = step.parts.params, step.parts.options, step.schedules.groups_of_update()
        self.step, self.plan, self.skip = step, plan, skip
        # Within a capture nothing can be asked of the device; what it brought is then told by replayed().
        self.is_captured = is_capturing(plan.params[0].device)
        before = None if self.is_captured else params.outcome
        self.retry_clock = None if before is None else before.retry_clock  # what it brought is needed now
        if before is not None:
            params.without_curvature(plan)  # which the plan remembers, if there is none
        self.states = params.states(plan, options)
        plan.bind_state(self.states, state_tensors(x_in_state=options.variant.x_in_state), COMPACT_KEYS)
        self.coarse = curvature.coarse
        self.given = curvature.products
        if self.given is not None and len(plan.positions) < len(params.all):
            self.given = self.given.take(plan.positions)
        n = len(self.states)
        refreshed = [False] * n if self.given is None else list(map(is_not, self.given.values, repeat(None)))
        try:
            self.steps, bias2 = list(map(itemgetter(STEP), self.states)), list(map(itemgetter(BIAS2), self.states))
        except KeyError:
            plan.refuse_missing(self.states, (STEP, BIAS2))
        if isinstance(curvature.scale, Tensor):
            used_here((curvature.scale,))  # of a call on another stream, maybe, and dropped after this one
        request = Request(curvature.scale, grad_scale, skip, options.bias_correction, options.lazy_hessian)
        self.scalars: Scalars
        if options.capturable:
            self.scalars = device_scalars(groups, plan.groups, self.steps, bias2, refreshed, request, plan.constants)
            self.cohorts = plan.ranks
        else:
            self.scalars, self.cohorts = cohort_scalars(
                groups, plan.groups, plan.spans, self.steps, bias2, refreshed, request
            )
        if options.stochastic_rounding or plan.rounds_state:
            plan.count_draw(step.noise_draw(plan))
        self.draw = step.clock * options.n_samples
        self.zero_is_seen = options.unseen == "zero"
        self.grads: list[Tensor] = []
        if self.given is not None:
            self.grads = [p.grad for p in plan.params if p.grad is not None]
            if plan.sharded:
                self.grads = list(map(local, self.grads))
        # Of products before they were completed or averaged, by position: their tally, and elements not seen.
        self.tallies: dict[int, tuple[Tensor, Tensor]] = {}
        self.shown: Tensor | None = None  # whether another batch has shown anything of any parameter
        products = self.given
        if products is not None and curvature.seen is not None and not self.zero_is_seen:
            seen = [curvature.seen[i] for i in plan.positions]
            self.shown = self._has_shown(seen)
            products = self._completed(products, seen, self.shown, options)
        if products is not None and options.variant.by_filter:
            products = self._averaged_over_filters(products, options.seed)
        if products is not None and curvature.coarse:
            products = without_zeros(products, self.grads, zero_is_seen=self.zero_is_seen)
        self.products = products
        stats = step.parts.stats
        self.trace_before, self.share_before = stats.trace, stats.negative_share
        self.counts_before = (0, 0, 0)
        if products is not None:  # no other step asks, as a device may have to be waited for
            self.counts_before = (stats.refreshes, stats.partial_refreshes, stats.skipped_refreshes)
        self.outcome: Outcome | None = None  # what a refresh brought, once it is known
        self.is_known = False
        self.next_steps: tuple[Tensor, ...] = ()
        if options.capturable:
            if isinstance(skip, Tensor):
                self.next_steps = torch._foreach_add(self.steps, [(skip == 0).to(torch.int64)] * n)
            else:
                self.next_steps = torch._foreach_add(self.steps, 1)

    def _signed(self, products: Products, positions: Iterable[int], seed: int) -> dict[int, Tensor]:
        """z⊙Hz of those parameters that have a product. The signs of all are drawn at once."""
        found = {i: value for i in positions if (value := products.values[i]) is not None}
        bare = [i for i in found if products.kinds[i] != SIGNED_PRODUCT]
        if bare:
            signs = self.plan.rademacher(bare, seed, self.draw)
            found.update(zip(bare, torch._foreach_mul([found[i] for i in bare], signs), strict=True))
        return found

    def _has_shown(self, seen: Sequence[Tensor | None]) -> Tensor:
        """Whether a batch had anything to tell of any parameter, in any shard."""
        rows = torch.zeros(len(seen), 1, dtype=torch.float64, device=self.plan.params[0].device)
        for i, mask in enumerate(seen):
            if mask is not None:
                rows[i] = mask.any()
        return self.plan.over_shards(rows).sum() > 0

    def _completed(
        self, products: Products, seen: Sequence[Tensor | None], shown: Tensor, options: Options
    ) -> Products:
        """Products of another batch than the gradients', with what is known in place of what it did not show.

        A batch that showed nothing at all, as one without rows, is no refresh. Its products are NaN then, as if they
        were lost: D keeps its weight, and the refresh is due again.
        """
        found, sample = Products(list(products.values), list(products.kinds)), options.variant.sample
        masks = {i: mask for i, mask in enumerate(seen) if mask is not None}
        for i, h in self._signed(products, masks, options.seed).items():
            mask = masks[i]
            d, row = known_curvature(self.states[i]), self.scalars[self.cohorts[i]]
            d, s = local(d), reference.scalar_tensors(row, d.dtype, h.device)
            # The mean over a shard would depend on how the parameter is cut: there, what is unknown waits.
            mean = torch.full_like(s.kept, torch.nan)
            if not self.plan.sharded:
                mean = reference.mean_sample(h.to(d.dtype), mask, s, sample)
            whole = reference.completed(d, h, self.grads[i], mask, s, sample, mean)
            whole = whole.masked_fill_(~shown.to(whole.device), torch.nan)
            found.values[i], found.kinds[i] = torch.empty_like(h).copy_(whole), SIGNED_PRODUCT
            own = tally(h, row, mask.to(h.dtype), zero_is_seen=False)
            self.tallies[i] = own, (~mask & torch.isfinite(whole)).sum(dtype=torch.float64)
        return found

    def _averaged_over_filters(self, products: Products, seed: int) -> Products:
        """Products with those of convolutions replaced by means over their filters."""
        found = Products(list(products.values), list(products.kinds))
        filters = [i for i, param in enumerate(self.plan.params) if param.dim() == 4]
        for i, h in self._signed(products, filters, seed).items():
            if i not in self.tallies:
                own = tally(h, self.scalars[self.cohorts[i]], self.grads[i], zero_is_seen=self.zero_is_seen)
                unseen = is_unseen(h, self.grads[i], zero_is_seen=self.zero_is_seen)
                self.tallies[i] = own, unseen.sum(dtype=torch.float64)
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
        if not self.is_known:  # gradients and products, which it takes, are let go below
            self.outcome = None if found.tallies is None else self._outcome(found.tallies)
            self.is_known = True
        outcome = self.outcome
        parts.ascent.follow_update(self.step, self.plan, self.states, found)
        if self.given is not None:
            used_here(self.given.values)
        self.plan.end_step()
        self.step.schedules.write_schedules()
        next_clock = self.step.clock + 1
        if self.retry_clock is not None and not self.step.refresh.scheduled:
            next_clock = self.retry_clock  # a scheduled refresh that failed, unnoticed until now, is due again
        if outcome is not None and not outcome.is_late:
            retry = outcome.retry_clock
            next_clock = next_clock if retry is None else retry
            outcome = None
        if not self.is_captured:
            parts.params.outcome = outcome
        if options.capturable:
            self._count_on_device(next_clock)
            return
        for entry, count in zip(self.states, self.steps, strict=True):
            entry[STEP], entry[HESSIAN_STEP] = count + 1, next_clock

    def _count_on_device(self, next_clock: int) -> None:
        """Advances step counts on the device, and the clock here."""
        torch._foreach_copy_(self.steps, self.next_steps)
        if self.is_captured:
            return  # nothing happens now; replayed() tells when it does
        for entry in self.states:
            entry[HESSIAN_STEP] = next_clock

    # ---- refreshes ----------------------------------------------------------------------------------------------

    def _outcome(self, tallies: Tensor) -> Outcome:
        """What a refresh brought; on a device, nothing is read of it."""
        assert self.given is not None
        values, plan, stats = self.given.values, self.plan, self.step.parts.stats
        skip = self.skip.to(tallies.device) if isinstance(self.skip, Tensor) else tallies.new_zeros(())
        unseen = self._fill_unseen(tallies, skip)
        if self.tallies:
            rows = torch.zeros(len(values), TALLY_WORDS + 1, dtype=torch.float64, device=tallies.device)
            for i, (own, left_out) in self.tallies.items():
                rows[i, :TALLY_WORDS], rows[i, TALLY_WORDS] = own, left_out
            rows = plan.over_shards(rows)
            for i in self.tallies:
                tallies[i], unseen[i] = rows[i, :TALLY_WORDS], rows[i, TALLY_WORDS]
        rounded, ask = torch.zeros_like(unseen), None
        if self.coarse and tallies.device.type == "cpu":
            ask = self._all_rounded  # which is asked of few
        elif self.coarse:
            flags = [tallies.new_zeros(()) if v is None else self._is_rounded(i) for i, v in enumerate(values)]
            rounded = torch.stack(flags).to(tallies)
        rows = torch.stack((tallies[:, 2], unseen, rounded), dim=1)
        self._write_stats(tallies, skip)
        on_device = self.step.parts.options.capturable
        if on_device:
            self._correct_on_device(rows, skip)
        bias2 = [0.0 if on_device else self.scalars[cohort].bias2 for cohort in range(len(self.scalars))]
        corrections = [None if v is None else bias2[c] for v, c in zip(values, self.cohorts, strict=True)]
        refreshed = Refreshed(self.states, plan.numels, corrections, self.step.clock, self.step.refresh.scheduled)
        report = torch.cat((rows.flatten(), skip.reshape(1)))
        return Outcome(refreshed, report, stats, self.counts_before, on_device=on_device, rounded=ask)

    def _fill_unseen(self, tallies: Tensor, skip: Tensor) -> Tensor:
        """Gives elements that no refresh has seen yet the mean curvature of their parameter, if it has one.

        A token that comes for the first time then takes a step like the others. From then on the mean is its D, with
        which later samples are averaged.

        Returns:
            How many elements of each parameter the refresh did not see.
        """
        if self.zero_is_seen:
            return torch.zeros_like(tallies[:, 0])
        sums = self.plan.unseen_sums()
        if isinstance(self.skip, Tensor):  # only the device knows whether anything has happened
            sums = torch.where(skip == 0, sums, torch.zeros_like(sums))
        self.plan.fill_unseen(sums)
        return sums[:, 0]

    def _write_stats(self, tallies: Tensor, skip: Tensor) -> None:
        """Trace and share of negative curvature; those of the last refresh stay if this one saw nothing."""
        stats = self.step.parts.stats
        total = tallies[:, 2].sum()
        stays = (skip != 0) | (total == 0)
        trace, share = tallies[:, 0].sum(), tallies[:, 1].sum() / torch.clamp(total, min=1.0)
        before = self.trace_before, self.share_before
        used_here(before)  # of another stream, if the last refresh ran there, and dropped here
        stats.trace, stats.negative_share = (
            torch.where(stays, old.to(new), new) for old, new in zip(before, (trace, share), strict=True)
        )

    def _correct_on_device(self, rows: Tensor, skip: Tensor) -> None:
        """Writes 1 − β2^t of those that have a new curvature, in place: a captured step reads it there."""
        assert isinstance(self.scalars, DeviceScalars)
        assert self.given is not None
        seen, unseen, rounded = rows.unbind(1)
        sizes = self.plan.constants.constant(self.plan.numels, rows.device, name="sizes")
        lost = sizes - seen - unseen > 0
        if self.coarse and rows.device.type == "cpu":
            flags = [v is not None and self._all_rounded(i) for i, v in enumerate(self.given.values)]
            rounded = torch.tensor(flags, dtype=rows.dtype, device="cpu")
        good = (skip == 0) & ((seen > 0) | ~lost | (rounded != 0))
        table = self.scalars.table
        newest = torch.where(good, table[:, BIAS2_COLUMN], table[:, BIAS2_KEPT_COLUMN])
        targets = [entry[BIAS2] for entry in self.states]
        torch._foreach_copy_(targets, list(newest.unbind()))

    def _all_rounded(self, i: int) -> bool:
        """Whether products of a parameter without a finite element were lost to rounding."""
        assert self.given is not None
        return self.given.values[i] is not None and bool(self._is_rounded(i))

    def _is_rounded(self, i: int) -> Tensor:
        """The same on the device. Shards have to agree, so they say yes."""
        assert self.given is not None
        value = self.given.values[i]
        assert value is not None
        finite = value.new_ones((), dtype=torch.bool)
        if not self.plan.sharded:
            finite = value.isfinite().all()
            if self.given.kinds[i] == PROBE_GRADIENT:  # the product is the difference of two gradients
                finite = finite & self.grads[i].isfinite().all()
        return finite if self.shown is None else finite & self.shown.to(value.device)  # nothing was, if none were taken


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
            grads = step.parts.params.resolve_grads(plan)  # torch's multi-tensor operators can't write to others
            if isinstance(grad_scale, Tensor) or grad_scale != 1.0:
                torch._foreach_mul_(grads, grad_scale)
            assert self.base is not None
            self.base.step()
        step.schedules.write_schedules()
        for group in step.parts.params.groups:
            group["ascents"] = step.clock + 1
