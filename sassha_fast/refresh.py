"""When the curvature is refreshed, and from which products: the part of the optimizer that knows the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, compress, repeat
from operator import contains, is_, is_not, itemgetter
from typing import Any

from torch import Tensor

from .accessors import grad, no_grad, set_grad, version, weights_moved
from .checks import parameter_name
from .contexts import CreateGraph
from .distributed import Reducing
from .hutchinson import FiniteDifferences, is_rounded, probe_length
from .passes import Product
from .plan import Plan
from .sharding import local
from .state import BIAS2, HESSIAN_STEP, UPSTREAM_CLOCK, adopt_clock
from .stats import Stats
from .variant import Variant

__all__ = ["Curvature", "Refreshing", "owned"]


@dataclass(frozen=True)
class Curvature:
    """Products for the coming update.

    Attributes:
        products: By id of the parameter; None if the step is no refresh.
        scale: Factor that makes of them means over the probes.
        loss_scale: What the loss was multiplied by in the pass that gave them, if that is known.
        coarse: Whether a product of exactly 0 only says that it was too small to be seen.
    """

    products: dict[int, Product] | None
    scale: float = 1.0
    loss_scale: float | None = None
    coarse: bool = False

    def unscaled(self, loss_scale: float) -> Curvature:
        """Products of the loss itself."""
        return replace(self, scale=self.scale / loss_scale, loss_scale=None)


def owned(gradient: Tensor) -> Tensor:
    """A gradient that the next backward pass can't overwrite: views of DDP's buckets are copied."""
    here = local(gradient)
    alone = here.untyped_storage().nbytes() == here.numel() * here.element_size()
    return gradient.detach() if alone else gradient.detach().clone()


class Refreshing(Reducing):
    """An optimizer with plans, a refresh clock and products. :class:`sassha_fast.SASSHA` adds the steps."""

    variant: Variant
    lazy_hessian: int
    n_samples: int
    seed: int
    hvp: str
    backend: str
    stats: Stats
    _flat: list[Tensor]
    _plans: dict[tuple[bool, ...] | None, Plan]
    _ascent: Plan | None
    _time: int | None  # the clock, from perturb_weights to the end of the step
    _wants_graph: bool  # whether the running pass of a closure is the one that is differentiated again
    _probe: FiniteDifferences | None
    _is_reduced: bool  # whether the gradients of the coming update come from all processes
    _versions: list[int]  # of the perturbed weights when they were moved last
    _weight_norm: float  # ‖x‖ of the ascent's parameters, on refreshes by finite differences

    # What errors tell to call: what takes the products of a hand-written loop, and what probes need.
    _collector = "unperturb"
    _probe_recipe = "perturb_weights() (rho may be 0), probe_weights() and unperturb() before step()"

    # ---- parameters and gradients -------------------------------------------------------------------------------

    def _parameters(self) -> list[Tensor]:
        """All parameters in order. A change of the groups' lists, by whomever, drops what was kept about them."""
        lists = [group["params"] for group in self.param_groups]
        if sum(map(len, lists)) != len(self._flat) or not all(map(is_, chain.from_iterable(lists), self._flat)):
            self._flat = list(chain.from_iterable(lists))
            self._plans.clear()
        return self._flat

    def _gather(self) -> tuple[Plan | None, list[Tensor]]:
        """The plan for the parameters that have gradients, and these gradients."""
        params = self._parameters()
        grads = list(map(grad, params))
        if all(map(is_not, grads, repeat(None))):
            key = None
        else:
            key = tuple(map(is_not, grads, repeat(None)))
            if not any(key):
                return None, []
            grads = list(compress(grads, key))
        return self._plan(key), grads  # type: ignore[return-value]

    def _plan(self, key: tuple[bool, ...] | None) -> Plan:
        """The plan for the parameters that ``key`` marks; None marks all."""
        plan = self._plans.get(key)
        if plan is None or not plan.is_current():
            if len(self._plans) >= 8:  # a model whose set of gradients keeps changing
                self._plans.clear()
            plan = self._plans[key] = self._new_plan(key)
        return plan

    def _new_plan(self, key: tuple[bool, ...] | None) -> Plan:
        params, groups, names = self._flat, list[int](), list[str]()
        for g, group in enumerate(self.param_groups):
            given = group.get("param_names")
            for i in range(len(group["params"])):
                groups.append(g)
                names.append(parameter_name(g, i, given[i] if given else None))
        indices = list(range(len(params)))
        if key is not None:
            params, indices, groups, names = (list(compress(c, key)) for c in (params, indices, groups, names))  # type: ignore[assignment]
        return Plan(params, indices, groups, len(self.param_groups), names, self.backend, self.variant)

    # ---- refresh ------------------------------------------------------------------------------------------------

    @property
    def hessian_due(self) -> bool:
        """Whether the coming step refreshes the curvature. With exact products its second pass needs a graph.

        True every ``lazy_hessian`` steps until a refresh has succeeded, and, once ``perturb_weights`` has shown which
        parameters take part, also if one of them has no curvature yet (in one process; several keep to the schedule).
        """
        if self._scheduled:
            return True
        ascent = self._ascent
        return ascent is not None and not ascent.has_curvature and any(self._without_curvature(ascent))

    @property
    def probes_due(self) -> int:
        """How many times ``probe_weights()`` and a backward pass have to follow the second one, in this step."""
        if self.hvp == "exact" or not self.hessian_due:
            return 0
        return self.n_samples * (2 if self.hvp == "central_difference" else 1)

    @property
    def _scheduled(self) -> bool:
        """Whether it is time for a refresh of all parameters. All processes agree on it."""
        return self._clock() % self.lazy_hessian == 0

    def _clock(self) -> int:
        """Steps since the start, not counting steps whose refresh failed. It lives in the parameters' state."""
        if self._time is not None:
            return self._time
        entries = self.state.values()
        if any(map(contains, entries, repeat(UPSTREAM_CLOCK))):
            for entry in entries:
                if UPSTREAM_CLOCK in entry:
                    adopt_clock(entry)
        try:
            return max(map(itemgetter(HESSIAN_STEP), entries), default=0)
        except KeyError:  # entries without state, as after an adopted clock
            return max((entry.get(HESSIAN_STEP, 0) for entry in entries), default=0)

    def _without_curvature(self, plan: Plan) -> list[bool]:
        """Which parameters have no curvature."""
        if plan.has_curvature or self._parallel:  # processes must agree on refreshes, so latecomers wait for the next
            return [False] * len(plan.params)
        missing = [not entry or not entry.get(BIAS2) for entry in map(self.state.get, plan.params)]
        plan.has_curvature = not any(missing)
        return missing

    def _curvature_at(self, plan: Plan | None, grads: Sequence[Tensor], caller: str) -> Curvature:
        """Products at the present weights, if a refresh is due. Raises if a scheduled one has no graph."""
        if plan is None:
            return Curvature(None)
        clock = self._clock()
        scheduled = self._scheduled
        if self.hvp != "exact":  # probes need the ascent's backup to come back from
            if scheduled:
                raise RuntimeError(
                    f"{self._name}.{caller}: this step refreshes the curvature by finite differences, which need "
                    f"{self._probe_recipe}"
                )
            return Curvature(None)
        due = [True] * len(grads) if scheduled else self._without_curvature(plan)
        if not any(due):
            return Curvature(None)
        coarse = any(map(is_rounded, plan.params, grads, due))
        found = plan.exact_products(
            grads,
            due,
            n_samples=self.n_samples,
            seed=self.seed,
            draw=clock * self.n_samples,
            elements=sum(p.numel() for p in self._flat),
            signed=self._parallel,
        )
        if found is not None:
            products, scale = found
            pairs = zip(plan.params, products, strict=True)
            known = {id(p): product for p, product in pairs if product is not None}
            return Curvature(known, scale, coarse=coarse)
        if scheduled and plan.sharded:
            raise RuntimeError(
                f"{self._name}.{caller}: gradients of sharded parameters (FSDP2) have no graph, which exact products "
                f"need; construct {self._name} with hvp='finite_difference'"
            )
        if scheduled:
            raise RuntimeError(
                f"{self._name}.{caller}: this step refreshes the curvature, but no gradient has a graph to "
                "differentiate. Run the last backward pass as loss.backward(create_graph=opt.hessian_due)"
            )
        self.stats.skipped_refreshes += 1  # a latecomer waits for the next scheduled refresh
        return Curvature(None)

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()``, with a graph where the coming step needs one. For closures and hand-written loops."""
        due = self.hvp == "exact" and self.hessian_due and self._wants_graph
        with CreateGraph() if due else nullcontext():
            loss.backward()  # type: ignore[no-untyped-call]

    # ---- finite differences -------------------------------------------------------------------------------------

    @no_grad
    def probe_weights(self) -> None:
        """Moves the weights to the next finite-difference probe; the gradients there complete the product.

        Call it, and a backward pass after it, ``probes_due`` times between the second backward pass and
        :meth:`unperturb`, which puts the gradients of the second pass back.
        """
        if self._ascent is None or not self.probes_due:
            raise RuntimeError(
                f"{self._name}.probe_weights: no probe is due (hvp={self.hvp!r}, hessian_due={self.hessian_due}, "
                f"weights perturbed: {self._ascent is not None}); call it probes_due times after perturb_weights()"
            )
        probe = self._probe
        if probe is None:
            elements = sum(p.numel() for p in self._ascent.params)
            probe = self._probe = FiniteDifferences(
                self._ascent,
                self._take_grads(),
                h=probe_length(self._weight_norm, elements),
                n_samples=self.n_samples,
                central=self.hvp == "central_difference",
                seed=self.seed,
                draw=self._clock() * self.n_samples,
            )
        elif probe.done == len(probe.offsets):
            raise RuntimeError(
                f"{self._name}.probe_weights: all {probe.done} probes were taken; call {self._collector}()"
            )
        else:
            probe.collect(self._take_grads())
        probe.advance()
        self._moved(self._ascent)

    def _take_grads(self) -> dict[int, Tensor]:
        """The gradients by id of their parameter, which is left without one."""
        plan, grads = self._gather()
        if plan is None:
            return {}
        taken = {id(p): owned(g) for p, g in zip(plan.params, grads, strict=True)}
        any(map(set_grad, self._flat, repeat(None)))
        return taken

    def _set_grads(self, grads: Mapping[int, Tensor]) -> None:
        """Gives every parameter the gradient under its id, or none."""
        for p in self._parameters():
            p.grad = grads.get(id(p))

    def _moved(self, ascent: Plan) -> None:
        """Tells autograd and autocast that the perturbed weights moved, and remembers that it was us."""
        weights_moved(ascent.params)
        if ascent.sharded:
            self._reshard()
        self._versions = list(map(version, ascent.params))

    def _check_untouched(self, caller: str) -> None:
        """Raises if anybody else changed the perturbed weights in place: the way back to x would lose it."""
        changed = self._changed(self._ascent)
        if changed is not None:
            raise RuntimeError(
                f"{self._name}.{caller}: {changed} changed in place while holding x + ε, and going back loses that; "
                "move the line that changes weights to after step(). The weights are x again"
            )

    def _changed(self, plan: Plan | None) -> str | None:
        """Which parameters of a plan changed since we moved them last, None if none did."""
        if plan is None or list(map(version, plan.params)) == self._versions:
            return None
        rows = zip(plan.names, plan.params, self._versions, strict=True)
        names = [name for name, p, before in rows if p._version != before]
        return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")

    def _undo_ascent(self, *, tell_autograd: bool = True) -> None:
        """Puts x back, if the weights are perturbed."""
        ascent, self._ascent = self._ascent, None
        if ascent is not None:
            ascent.restore()
            if tell_autograd:
                weights_moved(ascent.params)
            if ascent.sharded:
                self._reshard()

    def _probed_curvature(self, *, fused: bool) -> Curvature:
        """The products of the probes that were taken; gives ∇f(x+ε) back to the parameters.

        ``fused`` leaves differences to the update. That needs ∇f(x+ε) to stay as it is until then.
        """
        probe, self._probe = self._probe, None
        if probe is None or probe.done < len(probe.offsets):
            if probe is not None:
                self._set_grads(probe.second_pass)
            if not self._scheduled and probe is None:
                self.stats.skipped_refreshes += 1
                return Curvature(None)
            raise RuntimeError(
                f"{self._name}.{self._collector}: this step refreshes the curvature by finite differences, but "
                f"{0 if probe is None else probe.done} of {self.probes_due} probes were taken; run `for _ in "
                f"range(opt.probes_due): opt.probe_weights(); loss().backward()` before {self._collector}()"
            )
        last = self._take_grads()
        self._set_grads(probe.second_pass)
        probe.collect(last)
        products = self._due_only(probe.products(fused=fused and not self._parallel))
        if self._parallel:  # h depends on the parameters that took part, which may differ between processes
            products = {key: replace(p, value=p.value * probe.scale) for key, p in products.items()}
            return Curvature(products, coarse=True)
        return Curvature(products, probe.scale, coarse=True)

    # ---- several processes --------------------------------------------------------------------------------------

    def _reduced(self, curvature: Curvature) -> Curvature:
        """Gradients and products of all processes together, where they are local."""
        self._is_reduced = True
        if not self._parallel or not self._grads_are_local(self._parameters()):
            return curvature
        values = {key: product.value for key, product in (curvature.products or {}).items()}
        products = values if self._scheduled else None
        coarse = self._reduce([p for p in self._parameters() if p.requires_grad], products, curvature.coarse)
        if products is None:
            return Curvature(None)
        together = {key: Product(value, signed=True) for key, value in products.items()}
        return replace(curvature, products=together, coarse=coarse)

    def _due_only(self, products: dict[int, Product]) -> dict[int, Product]:
        if self._scheduled or self._ascent is None:
            return products
        missing = zip(self._ascent.params, self._without_curvature(self._ascent), strict=True)
        return {id(p): products[id(p)] for p, is_missing in missing if is_missing and id(p) in products}

    def _record_refresh(
        self,
        plan: Plan,
        states: list[dict[str, Any]],
        products: Sequence[Product | None],
        bias2: list[Any],
        tallies: Tensor,
        coarse: bool,
    ) -> bool:
        """Takes over what a refresh brought. Returns whether any product was finite.

        A parameter whose products were all lost to rounding had its turn; one whose products overflowed has not.
        """

        def had_turn(product: Product) -> bool:
            return coarse and (plan.sharded or bool(product.value.isfinite().all()))  # shards have to agree

        finite = tallies[:, 2].tolist()
        sizes = [p.numel() for p in plan.params]
        elements = sum(size for size, product in zip(sizes, products, strict=True) if product is not None)
        for entry, product, count, correction, size in zip(states, products, finite, bias2, sizes, strict=True):
            if product is not None and (count or size == 0 or had_turn(product)):
                if isinstance(entry[BIAS2], Tensor):
                    entry[BIAS2].copy_(correction)  # in place: a captured step reads it there
                else:
                    entry[BIAS2] = correction
        total = sum(finite)
        if total == 0 and elements > 0:
            self.stats.skipped_refreshes += 1
            return False
        self.stats.refreshes += 1
        self.stats.partial_refreshes += total < elements
        self.stats.trace = tallies[:, 0].sum()
        self.stats.negative_share = tallies[:, 1].sum() / max(total, 1.0)
        return True
