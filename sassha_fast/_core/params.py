"""All parameters of an optimizer in order: their gradients, their state, and the plans of passes over them."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from itertools import chain, compress, repeat
from operator import contains, is_, is_not, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .. import backends
from .._passes.accessors import clear_grads, device_of, grad, is_neg, is_own, resolved
from .._passes.layout import DTYPES
from .._passes.plan import Plan
from .._passes.shards import local
from .._passes.upload import is_capturing
from ..checks import check_memory, check_overlap, parameter_name
from .compact import stored_format
from .keys import BIAS2, HESSIAN_STEP
from .options import Options
from .outcome import Outcome
from .state import new_state
from .upstream import UPSTREAM_CLOCK, adopt_clock

Grads = Sequence["Tensor | None"]  # by position among all parameters

MOST_PLANS = 8  # of a model whose set of gradients keeps changing


def owned(gradient: Tensor) -> Tensor:
    """A gradient that the next backward pass can't overwrite: views of DDP's buckets, and of others, are copied."""
    if gradient.layout is not torch.strided:
        return gradient.detach()  # which another error names
    gradient = resolved(gradient)
    here = local(gradient)
    alone = here.untyped_storage().nbytes() == here.numel() * here.element_size() and is_own(here)
    return gradient.detach() if alone else gradient.detach().clone()


class Parameters:
    """The parameters of an optimizer.

    Attributes:
        groups: The optimizer's ``param_groups``.
        state: The optimizer's ``state``.
        all: Every parameter, in the order of the groups.
        elements: Of all parameters together.
        outcome: What the refresh of the last step brought, where a device has yet to tell.
        edition: How many times parameters came, went or changed places: what is known by position goes by one.
    """

    def __init__(self) -> None:
        """Knows none yet."""
        self.groups: list[dict[str, Any]] = []
        self.state: MutableMapping[Tensor, dict[str, Any]] = {}
        self.all: list[Tensor] = []
        self.elements = 0
        self.outcome: Outcome | None = None
        self.edition = 0
        self._sizes: list[int] = []  # of the groups
        self._plans: dict[tuple[bool, ...] | None, Plan] = {}
        self._captured: list[Plan] = []  # whose memory CUDA graphs read, which may be replayed at any time

    def follow(self, groups: list[dict[str, Any]], state: MutableMapping[Tensor, dict[str, Any]]) -> None:
        """Takes over groups and state as they are now. A change of the groups, by whomever, drops the plans."""
        self.groups, self.state = groups, state
        lists = list(map(itemgetter("params"), groups))
        sizes = list(map(len, lists))
        if sizes != self._sizes or not all(map(is_, chain.from_iterable(lists), self.all)):
            found = list(chain.from_iterable(lists))
            self.edition += len(found) != len(self.all) or not all(map(is_, found, self.all))
            self.all, self._sizes = found, sizes
            if any(map(is_lazy, self.all)):
                self._sizes = []  # to look again at the next call: the first forward pass gives them their shapes
            self.elements = sum(p.numel() for p in self.all if not is_lazy(p))
            self.drop_plans()

    @property
    def is_followed(self) -> bool:
        """Whether there are as many groups and parameters as when :meth:`follow` looked last. It asks no parameter."""
        sizes = [len(group["params"]) if "params" in group else -1 for group in self.groups]
        return sizes == self._sizes or (not self._sizes and sum(sizes) == len(self.all))

    def drop_plans(self) -> None:
        """Forgets what is kept between steps."""
        self._plans.clear()

    def devices(self) -> set[torch.device]:
        """Where the parameters are."""
        return set(map(device_of, self.all))

    # ---- gradients ----------------------------------------------------------------------------------------------

    def gather(self, options: Options, *, again: bool = False) -> tuple[Plan | None, list[Tensor]]:
        """The plan for the parameters that have gradients, and these gradients; ``again`` if not first in a step."""
        found = list(map(grad, self.all))
        if not found:
            return None, []
        key = None
        if not all(map(is_not, found, repeat(None))):
            key = tuple(map(is_not, found, repeat(None)))
            if not any(key):
                return None, []
        plan = self.plan(key, options, again=again)
        grads: list[Tensor] = found if key is None else list(compress(found, key))  # type: ignore[assignment,arg-type]
        if not plan.sees_negatives and any(map(is_neg, grads)):
            grads = self.resolve_grads(plan)
        return plan, grads

    @staticmethod
    def resolve_grads(plan: Plan) -> list[Tensor]:
        """Gives parameters gradients whose memory holds their values; see :func:`resolved`."""
        for p in plan.params:
            if p.grad is not None and p.grad.layout is torch.strided:
                p.grad = resolved(p.grad)
        return [p.grad for p in plan.params if p.grad is not None]

    def have_grads(self) -> bool:
        """Whether any parameter has a gradient."""
        return not all(map(is_, map(grad, self.all), repeat(None)))

    def have_graphs(self) -> bool:
        """Whether any gradient can be differentiated again."""
        return any(g is not None and g.requires_grad for g in map(grad, self.all))

    def detach_grads(self) -> list[Tensor]:
        """Cuts gradients off their graph: together with their parameters they are a cycle that would leak.

        Returns:
            The gradients that there are.
        """
        found = []
        for p, g in zip(self.all, map(grad, self.all), strict=True):
            if g is not None:
                if g.requires_grad:
                    g = p.grad = g.detach()
                found.append(g)
        return found

    def take_grads(self) -> list[Tensor | None]:
        """The gradients of all parameters, which are left without one. The next pass can't overwrite them."""
        grads = list(map(grad, self.all))
        taken = [None if g is None else owned(g) for g in grads]
        self.clear_grads()
        return taken

    def set_grads(self, grads: Grads) -> None:
        """Gives every parameter the gradient at its position, or none."""
        for p, g in zip(self.all, grads, strict=True):
            p.grad = g

    def clear_grads(self) -> None:
        """Leaves all parameters without a gradient."""
        clear_grads(self.all)

    # ---- plans --------------------------------------------------------------------------------------------------

    def plan(self, key: tuple[bool, ...] | None, options: Options, *, again: bool = False) -> Plan:
        """The plan for the parameters that ``key`` marks; None marks all."""
        plan, capturing = self._plans.get(key), is_capturing(self.all[0].device)
        if capturing:
            self._check_capture(plan, options)
        if plan is None or not plan.is_current(in_form=not again):
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._new_plan(key, options)
        if capturing and plan not in self._captured:
            self._captured.append(plan)
        return plan

    def _check_capture(self, plan: Plan | None, options: Options) -> None:
        """Raises if there is no plan yet: memory that is filled within a capture holds nothing before a replay."""
        if plan is None or not plan.is_current():
            raise RuntimeError(
                f"{options.caller}: a CUDA graph is being captured, but no step before it had gradients of the same "
                "parameters at the same places; run one outside of the capture first"
            )

    def plan_of(self, params: Sequence[Tensor], options: Options) -> Plan | None:
        """The plan for these parameters, None if there are none."""
        wanted = set(map(id, params))
        key = tuple(id(p) in wanted for p in self.all)
        return self.plan(None if all(key) else key, options) if any(key) else None

    def _new_plan(self, key: tuple[bool, ...] | None, options: Options) -> Plan:
        names = self.names()
        groups = [g for g, group in enumerate(self.groups) for _ in group["params"]]
        columns = (self.all, list(range(len(self.all))), groups, names)
        if key is not None:
            columns = tuple(list(compress(column, key)) for column in columns)  # type: ignore[assignment]
        params, positions, groups, names = columns
        self.check_overlap(options.caller)
        for name, p in zip(names, params, strict=True):
            if p.dtype not in DTYPES:
                raise ValueError(
                    f"{options.caller}: {name} is {p.dtype}, expected torch.float32, torch.float64, torch.bfloat16 or "
                    "torch.float16; train it in one of these, and cast it where it is used"
                )
        return Plan(
            params,
            positions,
            groups,
            len(self.groups),
            names,
            options.variant,
            lambda device: backends.choose(options.backend, device, caller=options.caller),
            options.caller,
            [stored_format(p, options) for p in params],
        )

    def check_overlap(self, caller: str) -> None:
        """Raises ValueError if parameters share memory: by construction, or since somebody set ``p.data``."""
        names, here = self.names(), list(map(local, self.all))
        for name, p in zip(names, here, strict=True):
            check_memory(name, p, caller=caller)
        check_overlap(names, here, caller=caller)

    def names(self) -> list[str]:
        """What errors call each parameter."""
        found = []
        for g, group in enumerate(self.groups):
            given = group.get("param_names")
            found += [parameter_name(g, i, given[i] if given else None) for i in range(len(group["params"]))]
        return found

    # ---- state --------------------------------------------------------------------------------------------------

    def states(self, plan: Plan, options: Options) -> list[dict[str, Any]]:
        """State of every parameter of the plan, created where it is missing."""
        if 0 < len(plan.states) == len(self.state) and all(map(is_, plan.states, self.state.values())):
            return plan.states  # the very entries of last time, found without hashing a parameter
        states = list(map(self.state.get, plan.params))
        for i, p in enumerate(plan.params):
            if not states[i]:
                in_state = options.variant.x_in_state
                stored = plan.formats[i]
                self.state[p] = states[i] = new_state(p, stored, on_device=options.capturable, x_in_state=in_state)
        return states  # type: ignore[return-value]

    def clock(self) -> int:
        """Steps since the start, not counting steps whose refresh failed. It lives in the parameters' state."""
        entries = self.state.values()
        if any(map(contains, entries, repeat(UPSTREAM_CLOCK))):
            for entry in entries:
                if UPSTREAM_CLOCK in entry:
                    adopt_clock(entry)
        try:
            return max(map(itemgetter(HESSIAN_STEP), entries), default=0)
        except KeyError:  # entries without state, as after an adopted clock
            return max((entry.get(HESSIAN_STEP, 0) for entry in entries), default=0)

    def without_curvature(self, plan: Plan) -> list[bool]:
        """Which parameters of a plan have no curvature."""
        if plan.has_curvature:
            return [False] * len(plan.params)
        outcome = self.outcome
        known: list[Any] = []
        for entry in map(self.state.get, plan.params):
            if not entry:
                known.append(False)
            elif outcome is not None and outcome.has_curvature(entry):
                known.append(True)  # or so it is hoped
            else:
                known.append(entry.get(BIAS2))
        tensors = [value for value in known if isinstance(value, Tensor)]
        if tensors:  # with ``capturable``, after loading: read once
            if is_capturing(tensors[0].device):
                raise RuntimeError(
                    f"{plan.caller}: a CUDA graph is being captured, but the last refresh left parameters without "
                    "curvature; run refreshes outside of the capture until they have one"
                )
            values = iter(torch.stack(tensors).tolist())
            known = [next(values) if isinstance(value, Tensor) else value for value in known]
        missing = [not value for value in known]
        plan.has_curvature = not any(missing) and (outcome is None or outcome.is_known)
        return missing

    def learn(self) -> int | None:
        """After a replayed step: takes over what the refresh before it brought.

        Returns:
            The clock to go back to if that was a scheduled one and failed.
        """
        retry = None if self.outcome is None else self.outcome.retry_clock
        if self.outcome is not None:
            for plan in self._plans.values():
                self.without_curvature(plan)  # which the plan remembers, if there is none
        self.outcome = None
        return retry

    def wait_for_refresh(self) -> None:
        """Waits for what the last refresh brought, and has a failed one repeated by the next step."""
        outcome, self.outcome = self.outcome, None
        clock = None if outcome is None else outcome.retry_clock
        if clock is not None:
            for entry in self.state.values():
                entry[HESSIAN_STEP] = clock
