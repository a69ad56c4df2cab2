"""The step at hand: everything about it, and nothing that outlives it.

A step is made by the first call that belongs to it and ends with the last one, or with an exception. Where x lies is
known before anything moves, and forgotten only after it is back. So there is a way back from every line: an exception
leaves the weights at x with the state that belongs to it, or, once the update has run, at the next x with its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.utils.weak import TensorWeakRef

from .._parallel.collectives import EarlyReduction
from .._parallel.reducer import Reducer
from .._passes.accessors import grad, requires_grad, used_here, version, weights_moved
from .._passes.plan import Plan
from .._passes.reference import Stepped
from .._passes.upload import is_capturing
from ..stats import Stats
from .amp import NO_AMP, Amp, kept_scale, scale_of
from .capture import check_capture
from .curvature import Curvature, Refresh
from .gap import decompose, decomposes
from .keys import STEP
from .later_passes import LaterPasses
from .options import CheckedGroups, Options
from .params import Grads, Parameters
from .replayed import ReplayedPasses
from .scheduled import ScheduledValues

Gathered: TypeAlias = "tuple[Plan | None, list[Tensor]]"

P = ParamSpec("P")
R = TypeVar("R")


class Phase(Enum):
    """How far a step has come."""

    BEGUN = "at x"  # the gradient to descend along is not complete
    CLIMBED = "at x + ε"  # the second pass is to come, or has run
    PROBING = "at a probe"  # around x + ε
    COLLECTED = "at x, with gradients and products complete"
    ENDED = "over"


class Pending(Protocol):
    """An update that is under way."""

    @property
    def has_run(self) -> bool:
        """Whether a kernel has changed anything: there is no way back then, only on."""

    def finish(self) -> None:
        """Does what is left to do. What is done already is not done again."""


class Ascent(ABC):
    """Where gradient and curvature of a step are taken, and the way back from there.

    Attributes:
        closing_call: The call of hand-written loops that takes products and makes gradients complete.
        probe_recipe: What such a loop has to call for finite differences.
    """

    closing_call: str
    probe_recipe: str

    @abstractmethod
    def needs_pass(self, step: Step) -> bool:
        """Whether a closure is called at x first, for the sake of the ascent alone."""

    @abstractmethod
    def climb(self, step: Step, plan: Plan, grads: list[Tensor], *, zero_grad: bool) -> None:
        """Moves the weights to x + ε, or only prepares the way back from probes."""

    @abstractmethod
    def come_back(self, step: Step, plan: Plan, *, tell_autograd: bool) -> str | None:
        """Undoes :meth:`climb` and probes, as far as they came.

        Returns:
            Which parameters had been given other memory, None if none had.
        """

    def prepare_update(self, step: Step, plan: Plan) -> None:
        """Before an update: finds out what :meth:`follow_update` needs, once."""
        del step, plan  # an ascent along the gradient needs nothing

    def warn_if_left_out(self, step: Step) -> None:
        """Warns, once, of an update without :meth:`climb` before it, unless that is as it should be."""
        del step

    def follow_update(self, step: Step, plan: Plan, states: list[dict[str, Any]], found: Stepped) -> None:
        """After an update: tells everybody that the weights moved. May be called twice."""
        step.parts.weights_moved(plan)


class Descent(ABC):
    """How a step makes the next x of its gradients and products.

    Attributes:
        has_curvature: Whether it takes products at all.
    """

    has_curvature: bool

    @abstractmethod
    def clock(self, params: Parameters) -> int:
        """Steps since the start, not counting steps whose refresh failed."""

    @abstractmethod
    def update(self, step: Step, plan: Plan, curvature: Curvature, amp: Amp) -> None:
        """The update, from gradients that are bound to the plan, and products of the loss itself on a refresh."""


@dataclass
class Parts:
    """What an optimizer is made of. Steps work with these; adapters of frameworks may."""

    options: Options
    params: Parameters
    reducer: Reducer
    ascent: Ascent
    descent: Descent
    stats: Stats
    checked: CheckedGroups
    has_warned: bool = False  # of a step without its ascent
    has_watched_list: bool = False  # for gradients that closures of a list lose
    has_looked: bool = False  # for what a first closure shows: a model that is not attached
    later_passes: LaterPasses | None = None  # listens on behalf of the last step that was collected
    asked_schedules: dict[str, tuple[Any, int, float]] = field(default_factory=dict)  # what they answered last
    given_up_by: str | None = None  # the call that made an optimizer forget a step whose gradients were complete

    def check_groups(self) -> None:
        """Raises ValueError unless the hyperparameters of all groups are good."""
        self.checked.check(self.params.groups, capturable=self.options.capturable)

    def stop_listening(self) -> None:
        """Ends what listens for later passes."""
        if self.later_passes is not None:
            self.later_passes.stop()
            self.later_passes = None

    def weights_moved(self, plan: Plan) -> None:
        """Tells autograd, autocast and FSDP2 that weights moved."""
        weights_moved(plan.params)
        if plan.sharded:
            self.reducer.reshard()


def changed_since(plan: Plan, versions: Sequence[int]) -> str | None:
    """Which parameters of a plan changed since they had these versions, None if none did."""
    if list(map(version, plan.params)) == versions:
        return None
    rows = zip(plan.names, plan.params, versions, strict=True)
    names = [name for name, p, before in rows if p._version != before]
    return some_of(names)


def some_of(names: Sequence[str]) -> str | None:
    """Names for an error, None if there are none."""
    if not names:
        return None
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _undone_on_error(method: Callable[Concatenate[Step, P], R]) -> Callable[Concatenate[Step, P], R]:
    """Ends the step if an exception leaves the method."""

    @wraps(method)
    def guarded(self: Step, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self.is_broken = True
            self.roll_back()
            raise

    return guarded  # type: ignore[return-value]


class Step:
    """One step. Its methods are its phases; ``closure.run`` has their order.

    Attributes:
        parts: What the optimizer is made of.
        driven: Whether a closure drives it, so that calls of ``zero_grad`` are part of it.
        phase: How far it has come.
        climbed: Whether there was an ascent, back or not.
        clock: Steps since the start.
        parallel: Whether gradients are, or may have to be, reduced over processes.
        refresh: When the curvature is refreshed, and from what.
        moved: Parameters that were moved away from where the step began and are not back yet.
        firsts: Gradients of the first pass by position, where the descent is made of both.
        early: What was sent to other processes while the pass at hand ran.
        curvature: Products, once they are taken.
        pending: The update, once it is prepared.
        schedules: What schedules have for it.
        randoms: Random numbers of its passes, in hand-written loops that replay them.
        wants_graph: Whether the pass at hand may be the one that is differentiated again.
        accumulates: Whether a closure of a list runs that is not the first of them.
        is_broken: Whether an exception has left it, which another one may keep from being rolled back.
        is_undone: Whether an exception has ended it before its update.
        is_shadow: Whether this process has no data, and takes part in the steps of the others alone.
        is_captured: Whether a call of it was captured in a CUDA graph.
    """

    def __init__(self, parts: Parts, *, driven: bool = False) -> None:
        """Asks, once, for the clock, for other processes, and whether this step refreshes the curvature."""
        params, options = parts.params, parts.options
        self.parts = parts
        self.driven = driven
        self.phase = Phase.BEGUN
        self.climbed = False
        self.clock = parts.descent.clock(params)
        self.parallel = parts.reducer.is_needed(params.all, options.reduce_grads)
        self.refresh = Refresh(
            *(params, options, parts.stats, self.clock),
            has_curvature=parts.descent.has_curvature,
            parallel=self.parallel,
        )
        self.moved: Plan | None = None
        self.firsts: Grads | None = None
        self.early: EarlyReduction | None = None
        self.curvature: Curvature | None = None
        self.pending: Pending | None = None
        self.schedules = ScheduledValues(params, options, parts.asked_schedules)
        self.randoms: ReplayedPasses | None = None
        self.wants_graph = True
        self.accumulates = False
        self.is_shadow = False
        self.is_captured = False
        self._edition = params.edition  # of the parameters that positions are those of
        self.is_broken = False
        self.is_undone = False
        self._zeroes = False  # whether the ascent may have taken the memory of gradients
        self._is_reduced = False  # whether the gradients come from all processes
        self._collected: tuple[Tensor, TensorWeakRef, int] | None = None  # a parameter, its gradient, and the version
        self._later_passes: LaterPasses | None = None  # than the one whose gradients were collected
        self._knows_scaler = False
        self._versions: list[int] = []  # of the moved parameters when they were moved last
        self._stats_before: dict[str, Tensor] | None = None  # numbers of the step before one that is captured

    # ---- questions ----------------------------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """Whether the weights are, or after an exception on the way back may be, not where the step began."""
        return self.moved is not None and self.phase is not Phase.ENDED

    @property
    def is_void(self) -> bool:
        """Whether nothing of it has happened: its capture ended, by an exception say, before the step did."""
        return self.is_captured and not is_capturing(self.parts.params.all[0].device)

    @property
    def hessian_due(self) -> bool:
        """Whether the step refreshes curvature, as far as is known by now."""
        return self.refresh.is_due(self.moved)

    @property
    def has_new_graph(self) -> bool:
        """Whether a backward pass has run since products were taken, which cut the gradients off their graph."""
        taken = self.curvature is not None and self.curvature.products is not None
        if not taken or self.phase is not Phase.COLLECTED or self._edition != self.parts.params.edition:
            return False  # a parameter that came since was not cut off
        return self.parts.params.have_graphs()

    @property
    def is_stale(self) -> bool:
        """Whether the gradients at hand are not those that were collected: somebody skipped the step by hand.

        Who only replaces gradients, by clipped ones say, runs no backward pass into these parameters before.
        """
        if self.has_new_graph:
            return True
        later = self._later_passes
        if self.phase is not Phase.COLLECTED or later is None:
            return False
        return later.began_anew or (later.are_zeroed and self.parts.params.have_grads())

    @property
    def was_unscaled_before(self) -> bool:
        """Of gradients that a scaler has unscaled: whether it did before they were collected, unseen."""
        if self._collected is None or self._knows_scaler:
            return False
        p, collected, number = self._collected
        return p.grad is not None and p.grad is collected() and version(p.grad) == number

    @property
    def probes_due(self) -> int:
        """Gradients at probes that the step takes."""
        return self.parts.options.gradients_per_refresh if self.hessian_due else 0

    def _grows_beyond_first(self) -> bool:
        """Whether the gradients at hand are longer than those of the first pass: by a loss scale, say."""
        parts = self.parts
        grads = [g.detach() for g in map(grad, parts.params.all) if g is not None]
        plan = self.moved or parts.params.gather(parts.options)[0]
        if not self.climbed or plan is None or plan.sharded or parts.options.variant.adaptive:
            return False
        squares = torch.stack(torch._foreach_norm(grads)).double().square().sum()
        return bool(squares > parts.stats.square_sums.sum().to(squares.device))

    def refuse_spent_scaler(self, caller: str) -> None:
        """Raises if it was the first pass that a scaler has unscaled, where it has unscaled one."""
        if self._grows_beyond_first():
            self.roll_back()
            raise RuntimeError(
                f"{self.parts.options.caller}.{caller}: GradScaler has unscaled the gradients of the first pass, and "
                "does so once a step, so those of the last pass would keep their loss scale; call scaler.unscale_(opt) "
                "after unperturb(), and leave it out before perturb_weights(), where the scale is of no matter"
            )

    @property
    def differentiates(self) -> bool:
        """Whether one of its backward passes has to make a graph."""
        return self.parts.options.exact and self.hessian_due

    @property
    def decomposes(self) -> bool:
        """Whether its descent is made of the gradients of two passes."""
        return decomposes(self.parts.params, self.parts.options)

    def noise_draw(self, plan: Plan) -> int | Tensor:
        """Number of the step's draw of rounding noise. With ``capturable`` it is the step count on the device."""
        if not self.parts.options.capturable:
            return self.clock
        entry = self.parts.params.state.get(plan.params[0])
        return entry[STEP] if entry else 0

    # ---- random numbers -----------------------------------------------------------------------------------------

    def replay_random(self) -> ReplayedPasses:
        """Before a pass: remembers the random numbers of those before the ascent, and goes back to them afterwards."""
        if self.randoms is None:
            self.randoms = ReplayedPasses()
        if self.is_away:
            self.randoms.replay()
        else:
            self.randoms.remember(self.parts.params)
        return self.randoms

    @property
    def has_only_begun(self) -> bool:
        """Whether nothing is known of it but the random numbers of its first passes."""
        return self.phase is Phase.BEGUN and not self.driven and not self.climbed and self.randoms is not None

    # ---- phases -------------------------------------------------------------------------------------------------

    @_undone_on_error
    def climb(self, *, zero_grad: bool, caller: str = "perturb_weights") -> None:
        """Moves the weights to x + ε, from the gradients of the first pass."""
        params, options = self.parts.params, self.parts.options
        self._check_groups()
        self._check_capture(caller)
        if options.perturb_sync and self._grads_are_local():
            self.parts.reducer.reduce(params.all, None, mean=options.grad_reduce == "mean", early=self._take_early())
        plan, grads = params.gather(options)
        if plan is None:
            raise RuntimeError(f"{options.caller}.{caller}: no parameter has a gradient; run loss.backward() first")
        self._zeroes = zero_grad
        self.parts.ascent.climb(self, plan, grads, zero_grad=zero_grad)
        self.climbed = True
        self.phase = Phase.CLIMBED

    def check_probe(self) -> None:
        """Raises if all probes were taken, or if no backward pass has run since the weights moved last."""
        probes, name = self.refresh.probes, self.parts.options.caller
        if probes is not None and probes.done == probes.needed:
            raise RuntimeError(
                f"{name}.probe_weights: all {probes.done} probes were taken; call {self.parts.ascent.closing_call}()"
            )
        if not self.parts.params.have_grads():
            raise RuntimeError(
                f"{name}.probe_weights: no parameter has a gradient at the present weights; run loss.backward() first"
            )

    @_undone_on_error
    def probe(self) -> None:
        """Moves the weights to the next probe."""
        assert self.moved is not None
        self.refresh.probe(self.moved)
        self.phase = Phase.PROBING
        self.note_move(self.moved)

    @_undone_on_error
    def collect(
        self,
        caller: str,
        *,
        scaler: GradScaler | None = None,
        curvature: Curvature | None = None,
        fused: bool = False,
        is_unscaled: bool = False,
    ) -> Gathered | None:
        """Takes the products of a refresh at the present weights, and makes the gradients those to descend along.

        Args:
            caller: The public call.
            scaler: Scaled the losses.
            curvature: Products that are taken already.
            fused: Leave differences to the update, where that can be.
            is_unscaled: Whether the scaler has unscaled the gradients at hand.

        Returns:
            The gradients and their plan, for :meth:`update`, if they were looked up and are still the same.
        """
        self.check_untouched(caller)
        self._check_positions(caller)
        if is_unscaled and (self.firsts is not None or self.refresh.probes is not None):
            raise RuntimeError(
                f"{self.parts.options.caller}.{caller}: GradScaler has unscaled the gradients of the last pass, but "
                f"not those of the passes before, which they are compared with; call "
                f"scaler.unscale_(opt) after {caller}()"
            )
        gathered: Gathered | None = None
        found = curvature or self.curvature
        if found is None:
            found, gathered = self._take_products(caller, fused=fused)
        if found.products is not None or self.firsts is not None or self.parallel:
            self.parts.params.detach_grads()
            gathered = None
        sync = self.parts.options.perturb_sync
        if not sync:  # as GSAM does, and it sends nothing more
            self._decompose()
        if not self._is_reduced and self._grads_are_local():
            found = self.refresh.reduced(found, self.parts.reducer, self._take_early())
        self._is_reduced = True
        if sync:  # both gradients are those of all processes, as in one process
            self._decompose()
        self._knows_scaler = scaler is not None
        if scaler is not None and scaler.is_enabled():
            if found.products is not None:
                found = replace(found, loss_scale=scale_of(scaler))
            used_here((self.parts.stats.square_sums, self.parts.stats.scales))  # which the quotients replace
            self.parts.stats.divide_by(scaler)
        self.curvature = found
        if not self.driven:
            first = next((p for p in self.parts.params.all if p.grad is not None), None)
            if first is not None and first.grad is not None:
                self._collected = first, TensorWeakRef(first.grad), version(first.grad)
                if caller != "step":  # which goes on to the update at once
                    last = next(p for p in reversed(self.parts.params.all) if p.grad is not None)
                    self._stop_listening()
                    watched = [first] if last is first else [first, last]
                    self._later_passes = self.parts.later_passes = LaterPasses(watched)
                    self._later_passes.listen()
        if not self.is_away:
            self.phase = Phase.COLLECTED
        return gathered

    def unscale_products(self, left: Tensor | None = None) -> None:
        """Takes the loss scale out of the products; ``left`` is what GradScaler left in the gradients."""
        found = self.curvature
        if found is None or found.products is None:
            return
        known = found.loss_scale
        if not isinstance(known, Tensor):
            known = known or (None if left is None else kept_scale(left))
        if known is None:
            name = self.parts.options.caller
            raise RuntimeError(
                f"{name}.step: GradScaler has unscaled the gradients, but the products of this refresh still "
                f"carry a loss scale that is not known here; call {self.parts.ascent.closing_call}(scaler=scaler)"
            )
        self.curvature = found.unscaled(known)

    @_undone_on_error
    def come_back(self, *, tell_autograd: bool = True) -> None:
        """Goes back to where the step began, if the weights are not there."""
        replaced = self._come_back(tell_autograd=tell_autograd)
        if replaced is not None:
            raise RuntimeError(
                f"{self.parts.options.caller}: {replaced} changed by p.data = ... while holding x + ε, and "
                "going back loses that; move the line that changes weights to after step(). The weights are "
                "x again"
            )
        self.phase = Phase.BEGUN if self.curvature is None else Phase.COLLECTED

    @_undone_on_error
    def update(self, gathered: Gathered | None = None, amp: Amp = NO_AMP) -> None:
        """The next x, from gradients and products that were collected. ``gathered`` is what :meth:`collect` gave."""
        params, curvature = self.parts.params, self.curvature
        assert curvature is not None
        self._check_capture("step")
        self._check_positions("step")
        self._check_groups()
        plan, grads = gathered or params.gather(self.parts.options, again=self.climbed)
        if plan is None:  # nothing to descend along
            if self.driven and not (self.parallel or self.is_shadow):
                name = self.parts.options.caller
                raise RuntimeError(
                    f"{name}.step: no parameter has a gradient after the closure; call loss.backward() in it, and pass "
                    "the optimizer the parameters of this very model"
                )
            self._come_back()
            self.schedules.write_schedules()
        else:
            if any(map(requires_grad, grads)):  # the graph of a pass that no product was taken of
                grads = params.detach_grads()
            plan.bind_grads(grads)
            self.parts.descent.update(self, plan, curvature, amp)
            plan.end_step()  # also where nothing took the gradients, as of a step that was skipped
            if self._stats_before is not None:
                stats, written = self.parts.stats, self.parts.stats.tensors()
                stats.end_capture(self._stats_before)
                plan.constants.keep([*written, *stats.tensors(), *stats.replayed.values()])
        self.phase = Phase.ENDED
        self.pending = None  # which knows its step: together they would wait for the garbage collector
        self._stop_listening()

    def roll_back(self) -> None:
        """Ends the step after an exception, if it is not over: undoes it, or finishes an update that has run."""
        if self.phase is Phase.ENDED:
            self._stop_listening()  # which an interrupt may have kept it from
            return
        if self._stats_before is not None:
            self.parts.stats.set_step(self._stats_before)  # whatever was captured has not happened
        self.is_undone = self.pending is None or not self.pending.has_run
        if self.is_undone:
            if self.phase is Phase.BEGUN and self._zeroes and self.moved is not None and self.moved.x_in_backup:
                self.parts.params.clear_grads()  # those of the first pass, whose memory may hold x
            self._come_back()
        elif self.pending is not None:
            self.pending.finish()
        self.phase = Phase.ENDED
        self._stop_listening()

    def _stop_listening(self) -> None:
        """Ends what listens for later passes, of this step or of one that was left open."""
        self.parts.stop_listening()

    def forget(self) -> None:
        """Ends a step of which nothing has happened: the weights are x, and what would be their backup is not."""
        if self.moved is not None:
            self.moved.forget_backups()
        self.moved, self.phase = None, Phase.ENDED

    # ---- moving weights -----------------------------------------------------------------------------------------

    def note_move(self, plan: Plan) -> None:
        """Tells everybody that the weights moved, and remembers that it was us."""
        self.parts.weights_moved(plan)
        self._versions = list(map(version, plan.params))

    def _come_back(self, *, tell_autograd: bool = True) -> str | None:
        """Returns which parameters had been given other memory."""
        replaced = None
        if self.moved is not None:
            replaced = self.parts.ascent.come_back(self, self.moved, tell_autograd=tell_autograd)
            self.moved = None
        return replaced

    def check_untouched(self, caller: str) -> None:
        """Raises if anybody else changed the moved weights in place: the way back would lose it."""
        changed = None if self.moved is None else changed_since(self.moved, self._versions)
        if changed is not None:
            raise RuntimeError(
                f"{self.parts.options.caller}.{caller}: {changed} changed in place while holding x + ε, and going back "
                "loses that; move the line that changes weights to after step(). The weights are x again"
            )

    def _check_groups(self) -> None:
        """Looks at the groups again where a closure may have written into them."""
        if not self.driven:
            return
        if not self.parts.params.is_followed:
            raise RuntimeError(
                f"{self.parts.options.caller}.step: a closure has added groups or parameters to param_groups, or taken "
                "some out; change param_groups between steps"
            )
        self.parts.check_groups()

    def _check_positions(self, caller: str) -> None:
        """Raises if what was taken belongs to other parameters than those that stand there now."""
        taken = self.curvature is not None and self.curvature.products is not None
        if not (taken or self.firsts or self.refresh.probes):
            return
        if self._edition == self.parts.params.edition and self.parts.params.is_followed:
            return
        what = "products of this refresh" if taken or self.refresh.probes else "gradients of the first pass"
        raise RuntimeError(
            f"{self.parts.options.caller}.{caller}: param_groups changed within a step, after the {what} were taken "
            "for the parameters that were there; change param_groups after step() or before the first backward pass, "
            "and call zero_grad() to begin this step again"
        )

    def _check_capture(self, caller: str) -> None:
        """Raises if a CUDA graph is captured that would not do at every replay what this step does."""
        parts = self.parts
        if not parts.params.all or not is_capturing(parts.params.all[0].device):
            return
        if not self.is_captured:
            self.is_captured, self._stats_before = True, parts.stats.of_step()
        name = f"{parts.options.caller}.{caller}"
        due = parts.options.capturable and self.hessian_due  # which another error would keep from being asked
        check_capture(parts.params, parts.options, name, has_curvature=parts.descent.has_curvature, is_due=due)

    # ---- gradients and products ---------------------------------------------------------------------------------

    def _take_products(self, caller: str, *, fused: bool) -> tuple[Curvature, Gathered | None]:
        parts = self.parts
        if not parts.descent.has_curvature:
            return Curvature(), None
        if self.is_away and not parts.options.exact:
            no_pass = self.refresh.probes is None and not parts.params.have_grads()
            if no_pass or not self.hessian_due:
                return Curvature(), None
            return self.refresh.from_probes(self.moved, parts.ascent.closing_call, fused=fused), None
        if not self.refresh.scheduled and (self.parallel or (self.moved is not None and self.moved.has_curvature)):
            return Curvature(), None
        gathered = plan, grads = parts.params.gather(parts.options)
        if plan is not None and self.refresh.scheduled:
            plan.bind_grads(grads)  # names a gradient that does not fit, before anything is made of it
        return self.refresh.exact(plan, grads, caller, parts.ascent.probe_recipe), gathered

    def exact_products(self, caller: str) -> Curvature:
        """Products from the graph of the gradients at hand, if any are due."""
        plan, grads = self.parts.params.gather(self.parts.options)
        if plan is not None:
            plan.bind_grads(grads)  # as above
        return self.refresh.exact(plan, grads, caller, self.parts.ascent.probe_recipe)

    def _grads_are_local(self) -> bool:
        options = self.parts.options
        return self.parallel and self.parts.reducer.grads_are_local(
            self.parts.params.all, options.reduce_grads, options.grad_reduce
        )

    def _take_early(self) -> EarlyReduction | None:
        early, self.early = self.early, None
        return early

    def _decompose(self) -> None:
        if self.firsts is not None:
            self.parts.check_groups()
            decompose(self.parts.params, self.parts.options, self.firsts)
            self.firsts = None
