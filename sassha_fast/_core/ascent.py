"""Ascents: along the gradient of a pass of its own, along the momentum of the last step, or none."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from .._passes.accessors import (
    IDLE_REFCOUNT,
    IDLE_USES,
    are_own,
    is_own,
    requires_grad,
    used_here,
    uses,
    version,
    weights_moved,
)
from .._passes.plan import Plan
from .._passes.reference import Stepped
from .._passes.shards import local
from ..checks import user_level
from ..reference import ascend, compute_dtype
from . import compact
from .gap import kept_gradients
from .keys import ASCENT_DRAW, ASCENT_SCALE, COMPACT_KEYS, CORRECTION, WEIGHT
from .state import new_state, state_tensors
from .step import Ascent, Parts, Step, changed_since, some_of


class GradientAscent(Ascent):
    """ε = ρ g/‖g‖, where g is the gradient at x. x is kept in the memory of g, or beside it."""

    closing_call = "unperturb"
    probe_recipe = "perturb_weights() (rho may be 0), probe_weights() and unperturb() before step()"

    @override
    def needs_pass(self, step: Step) -> bool:
        radii = step.schedules.radii()
        # A tensor is not read: it may be on a device, and 0 only now.
        return any(isinstance(group["rho"], Tensor) for group in step.parts.params.groups) or any(
            radius != 0.0 for radius in radii
        )

    @override
    def warn_if_left_out(self, step: Step) -> None:
        parts = step.parts
        options, radii = parts.options, [group["rho"] for group in parts.params.groups]
        found = [rho for rho in radii if isinstance(rho, Tensor) or rho != 0.0]  # a tensor is not read here either
        if parts.has_warned or (not found and options.rho_scheduler is None):
            return
        parts.has_warned = True
        rho = found[0] if found and not isinstance(found[0], Tensor) else "not 0"
        warnings.warn(
            f"{options.caller}.step: rho is {rho}, but the weights were not perturbed, so this is a step with rho = 0. "
            "Use opt.step(closure), or a first backward pass and opt.perturb_weights(), the second backward pass and "
            "opt.unperturb() before opt.step(); or construct it with rho=0",
            stacklevel=user_level(),  # the line that called step()
        )

    @override
    def climb(self, step: Step, plan: Plan, grads: list[Tensor], *, zero_grad: bool) -> None:
        parts, groups = step.parts, step.parts.params.groups
        idle: bool | list[bool] = zero_grad  # gradients that nobody else reads: their memory may hold x
        if any(map(requires_grad, grads)):
            grads, idle = [g.detach() for g in grads], False
        elif zero_grad and (max(map(sys.getrefcount, grads)) > IDLE_REFCOUNT or max(map(uses, grads)) > IDLE_USES):
            counts = zip(map(sys.getrefcount, grads), map(uses, grads), strict=True)
            idle = [names <= IDLE_REFCOUNT and held <= IDLE_USES for names, held in counts]
        if idle is not False:
            here = list(map(local, grads)) if plan.sharded else grads
            if not are_own(here):  # as autograd's are; who sets some by hand may begin with it at any step
                own = list(map(is_own, here))
                idle = own if idle is True else [a and b for a, b in zip(idle, own, strict=True)]
        if step.decomposes:  # both g and x are needed later
            idle = False
            step.firsts = kept_gradients(plan.positions, grads, len(parts.params.all), alone=zero_grad)
        if plan.has_corrections:  # which the ascent starts from
            plan.bind_state(parts.params.states(plan, parts.options), state_tensors(x_in_state=False), COMPACT_KEYS)
        plan.bind_grads(grads, overwrite=True)
        square_sums = plan.square_sums(of_ascent=True)
        pairs = zip(step.schedules.radii(), groups, strict=True)
        signed = [-radius if group.get("maximize") else radius for radius, group in pairs]
        offsets = [group["perturb_eps"] for group in groups]
        scales = plan.ascent_scales(square_sums, signed, offsets, on_device=parts.options.capturable)
        step.refresh.measure(plan)
        plan.count_draw(step.noise_draw(plan))
        step.moved = plan  # from here on there is something to come back from, if the kernel runs
        plan.perturb(scales, take_grads=idle, seed=parts.options.seed)
        step.note_move(plan)
        if zero_grad:
            used_here(map(local, grads) if plan.sharded else grads)
            parts.params.clear_grads()
        parts.stats.square_sums, parts.stats.scales = square_sums, scales

    @override
    def come_back(self, step: Step, plan: Plan, *, tell_autograd: bool) -> str | None:
        replaced = plan.restore()
        if tell_autograd:
            step.parts.weights_moved(plan)
        elif plan.sharded:
            step.parts.reducer.reshard()
        return some_of(replaced)


class NoAscent(GradientAscent):
    """None: gradient and curvature are those at x. Finite differences need the way back of an ascent of length 0."""

    closing_call = "take_products"
    probe_recipe = "perturb_weights(), which has no length here, probe_weights() and take_products() before step()"

    @override
    def needs_pass(self, step: Step) -> bool:
        return False

    @override
    def warn_if_left_out(self, step: Step) -> None:
        pass


class MomentumAscent(Ascent):
    """ε = ±ρ m/‖m‖ of the last step. The parameters hold x + ε from one step to the next, and x is in state.

    Nothing is ever subtracted again: the update works on x, and the parameter is derived from it.
    """

    closing_call = "take_products"
    probe_recipe = "probe_weights() and a backward pass, probes_due times, before step()"

    def __init__(self) -> None:
        """Has moved nothing yet."""
        self._held: tuple[Plan, list[int]] | None = None  # what the last step moved, if nothing was since
        self._loaded: list[tuple[Tensor, int]] = []  # parameters that came with a checkpoint or a copy, and versions
        self._scale_signs: list[float | Tensor] = []  # of the update at hand
        self._offsets: list[float] = []

    @override
    def needs_pass(self, step: Step) -> bool:
        return False

    @override
    def climb(self, step: Step, plan: Plan, grads: list[Tensor], *, zero_grad: bool) -> None:
        """Prepares the way back from probes, which is to derive x + ε again."""
        parts = step.parts
        plan.bind_grads(grads)  # names a gradient that does not fit, before anything is made of it
        plan.bind_state(parts.params.states(plan, parts.options), state_tensors(x_in_state=True), COMPACT_KEYS)
        step.refresh.measure(plan)
        step.moved = plan
        step.note_move(plan)

    @override
    def come_back(self, step: Step, plan: Plan, *, tell_autograd: bool) -> str | None:
        self.derive(step.parts, plan.params)
        return None

    @override
    def prepare_update(self, step: Step, plan: Plan) -> None:
        self.refuse_evaluating(step.parts, "step")
        if self._held is not None and self._held[0] is not plan:
            self._refuse_replaced(step.parts, self._held[0])
        pairs = zip(step.schedules.next_rho(), step.parts.params.groups, strict=True)
        self._scale_signs = [rho * group["sign"] for rho, group in pairs]
        self._offsets = [group["perturb_eps"] for group in step.parts.params.groups]

    @override
    def follow_update(self, step: Step, plan: Plan, states: list[dict[str, Any]], found: Stepped) -> None:
        """ε of the next step, from m and ‖m‖, which the update has added up."""
        parts = step.parts
        square_sums = found.square_sums
        assert square_sums is not None
        on_device = parts.options.capturable
        scales = plan.ascent_scales(square_sums, self._scale_signs, self._offsets, on_device=on_device)
        draw = step.noise_draw(plan)
        plan.count_draw(draw)
        plan.momentum_ascent(scales, parts.options.seed)
        if on_device:  # in place: a captured step writes it there at every replay
            assert isinstance(draw, Tensor)
            groups = plan.constants.constant(plan.groups, scales.device, torch.int64, name="groups")
            torch._foreach_copy_([entry[ASCENT_SCALE] for entry in states], list(scales[groups].unbind()))
            torch._foreach_copy_([entry[ASCENT_DRAW] for entry in states], [draw] * len(states))
        else:
            values: Sequence[Any] = scales.tolist() if scales.device.type == "cpu" else scales.unbind()
            for entry, group in zip(states, plan.groups, strict=True):
                entry[ASCENT_SCALE], entry[ASCENT_DRAW] = values[group], draw
        step.moved = None  # probes, if there were any, are overwritten
        step.parts.weights_moved(plan)
        self._hold(plan)
        parts.stats.square_sums, parts.stats.scales = square_sums, scales

    def refuse_evaluating(self, parts: Parts, caller: str) -> None:
        """Raises if the parameters hold x: whatever is measured then is not measured at x + ε."""
        if any(group["evaluating"] for group in parts.params.groups):
            name = parts.options.caller
            raise RuntimeError(
                f"{name}.{caller}: the parameters hold the true weights since eval(), so gradients are not those at "
                "x + ε; call opt.train() before the forward pass"
            )

    def _hold(self, plan: Plan | None) -> None:
        self._held, self._loaded = None if plan is None else (plan, list(map(version, plan.params))), []

    def remember(self, parts: Parts) -> None:
        """After a checkpoint or a copy: the parameters hold x + ε of what is in state."""
        self._loaded = [(p, p._version) for p in self.kept(parts)]

    def changed(self, parts: Parts) -> str | None:
        """Which parameters were changed by others while they held x + ε, None if none were.

        Right after a checkpoint, weights that were saved with it may be loaded over x + ε: the same values.
        """
        if self._loaded:
            names = dict(zip(map(id, parts.params.all), parts.params.names(), strict=True))
            moved = [p for p, before in self._loaded if p._version != before]
            return some_of([names[id(p)] for p in moved if id(p) in names and not self._is_derived(parts, p)])
        return None if self._held is None else changed_since(*self._held)

    def refuse_changed(self, parts: Parts, changed: str) -> NoReturn:
        """Raises: an update of x would lose what others made of x + ε."""
        raise RuntimeError(
            f"{parts.options.caller}.step: {changed} changed in place while holding x + ε, and the update of "
            "x would lose that; change weights within `with opt.true_weights():`. opt.eval() goes back to x now"
        )

    def _refuse_replaced(self, parts: Parts, plan: Plan) -> None:
        """Raises if a parameter was given other values by ``p.data =``. ``model.to()`` gives it the same elsewhere."""
        for i in plan.replaced():
            if not self._is_derived(parts, plan.params[i]):
                self.refuse_changed(parts, plan.names[i])

    def _is_derived(self, parts: Parts, p: Tensor) -> bool:
        """Whether a parameter holds x + ε of what is in state, as far as its dtype tells, or can't be compared."""
        entry = parts.params.state.get(p)
        if not entry or p.shape != entry[WEIGHT].shape or p.dtype != entry[WEIGHT].dtype:
            return True  # another error names a parameter of another kind
        x, m = local(entry[WEIGHT]), local(compact.momentum(entry))
        exact = compute_dtype(x.dtype)
        scale = torch.as_tensor(entry[ASCENT_SCALE], dtype=exact, device=x.device)
        adaptive = parts.options.variant.scales_by_weight(p.dim())
        wanted = ascend(local(compact.weight(p, entry)), m, scale, adaptive=adaptive)
        rounding, place = 0.0, 0.0
        if x.dtype != exact:  # rounded at random by up to a place, of subnormal numbers by up to the least of all
            kind = torch.finfo(x.dtype)
            rounding, place = 2.0 * kind.eps, kind.smallest_normal * kind.eps
        return torch.allclose(local(p.data).to(wanted), wanted, rtol=rounding, atol=place, equal_nan=True)

    # ---- which weights the parameters hold ----------------------------------------------------------------------

    def untouched(self, parts: Parts) -> list[Tensor]:
        """Parameters whose x is in state and that hold x + ε, as far as is known: nobody else changed them."""
        plan, versions = self._held or (None, [])
        changed = set() if plan is None else _changed(plan.params, versions)
        return [p for p in self.kept(parts) if id(p) not in changed]

    def recover(self, parts: Parts) -> None:
        """If somebody dropped the state, and x with it: begins anew from x, or from what others made of x + ε."""
        if self._held is None:
            return
        (plan, versions), state = self._held, parts.params.state
        if len(state) >= len(plan.params) and all(map(state.get, (plan.params[0], plan.params[-1]))):
            return
        changed, replaced = _changed(plan.params, versions), set(plan.replaced())
        for i, (p, x) in enumerate(zip(plan.params, plan.xs, strict=True)):
            if not state.get(p):
                entry = state[p] = new_state(p, plan.formats[i], on_device=parts.options.capturable, x_in_state=True)
                if id(p) not in changed and i not in replaced:
                    local(entry[WEIGHT]).copy_(local(x))
        self._hold(plan)

    def kept(self, parts: Parts) -> list[Tensor]:
        """Parameters whose x is in state."""
        state = parts.params.state
        return [p for p in parts.params.all if WEIGHT in state.get(p, ())]

    def show_x(self, parts: Parts, chosen: Iterable[Tensor] | None = None) -> None:
        """Writes x into the parameters, or into those that are chosen."""
        plan = parts.params.plan_of(self.kept(parts) if chosen is None else list(chosen), parts.options)
        self._hold(None)
        if plan is not None:
            states = parts.params.states(plan, parts.options)
            if any(_moved_elements(p, entry[WEIGHT]) for p, entry in zip(plan.params, states, strict=True)):
                # Kernels refuse it, and what repairs it, load_state_dict, comes here first.
                here = [local(p.data) for p in plan.params]
                torch._foreach_copy_(here, [local(entry[WEIGHT]) for entry in states])
            else:
                plan.bind_state(states, state_tensors(x_in_state=True), COMPACT_KEYS)
                plan.show_x()
            parts.weights_moved(plan)

    def watch(self, parts: Parts, untouched: Sequence[Tensor] | None = None) -> None:
        """Notices from now on if anybody else changes the parameters, which hold x + ε; others than these are changed
        already.
        """
        self._hold(parts.params.plan_of(self.kept(parts), parts.options))
        if self._held is not None and untouched is not None:
            plan, versions = self._held
            known = set(map(id, untouched))
            self._held = plan, [v if id(p) in known else -1 for p, v in zip(plan.params, versions, strict=True)]

    def adopt(self, parts: Parts) -> None:
        """Makes what the parameters hold the new x."""
        for p in self.kept(parts):
            entry = parts.params.state[p]
            x = local(entry[WEIGHT])
            if CORRECTION in entry:  # belongs to the x that it was made for
                local(entry[CORRECTION]).masked_fill_(x != local(p.data), 0)
            x.copy_(local(p.data))

    def put_back(self, parts: Parts) -> None:
        """Writes x into the parameters that may have been derived from it; those of another kind were not."""
        kept = self.kept(parts)
        for p in kept:
            x = parts.params.state[p][WEIGHT]
            if (x.dtype, x.shape, x.device) == (p.dtype, p.shape, p.device):
                local(p.data).copy_(local(x))
        weights_moved(kept)

    def derive(self, parts: Parts, chosen: Iterable[Tensor] | None = None) -> None:
        """Writes x + ε into parameters again, each with the ε of its own last step."""
        params, options = parts.params, parts.options
        buckets: list[tuple[dict[int, Any], Any, list[Tensor]]] = []  # scales by group, draw, parameters
        groups = {id(p): g for g, group in enumerate(params.groups) for p in group["params"]}
        members = self.kept(parts) if chosen is None else list(chosen)
        columns = [[params.state[p][key] for p in members] for key in (ASCENT_SCALE, ASCENT_DRAW)]
        if options.capturable:  # each has its own there, so that only reading tells which are the same
            columns = [_on_host(column) for column in columns]
        for p, scale, draw in zip(members, *columns, strict=True):
            group = groups[id(p)]
            for scales, number, others in buckets:
                if _same(number, draw) and _same(scales.setdefault(group, scale), scale):
                    others.append(p)
                    break
            else:
                buckets.append(({group: scale}, draw, [p]))
        self._hold(None)
        for scales, draw, others in buckets:
            plan = params.plan_of(others, options)
            assert plan is not None
            plan.bind_state(params.states(plan, options), state_tensors(x_in_state=True), COMPACT_KEYS)
            plan.count_draw(draw)
            device = plan.draws[0].device
            numbers = [scales.get(g, 0.0) for g in range(plan.n_groups)]
            used_here(number for number in numbers if isinstance(number, Tensor))  # the next step replaces them
            values = [torch.as_tensor(number, dtype=torch.float32, device=device) for number in numbers]
            plan.momentum_ascent(torch.stack(values), options.seed)
            parts.weights_moved(plan)


def _moved_elements(param: Tensor, x: Tensor) -> bool:
    """Whether a parameter has its elements in another order than x in state has, and is the same otherwise."""
    return param.stride() != x.stride() and param.shape == x.shape and param.dtype == x.dtype


def _changed(params: Sequence[Tensor], versions: Sequence[int]) -> set[int]:
    """The ``id`` of those whose version is another."""
    return {id(p) for p, before in zip(params, versions, strict=True) if p._version != before}


def _on_host(values: list[Tensor]) -> list[Any]:
    """Numbers of a device, read at once."""
    return torch.stack([value.to(values[0].device) for value in values]).tolist() if values else []


def _same(a: Any, b: Any) -> bool:
    """Equality of numbers, without reading those on a device: a tensor is equal to itself."""
    return a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b
