"""When the curvature is refreshed, and from which products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._parallel.reducer import Reducer
from .._passes.accessors import used_here
from .._passes.plan import Plan
from .._passes.reference import Products
from .._passes.shards import local
from ..reference import compute_dtype
from ..stats import Stats
from .options import Options
from .params import Grads, Parameters
from .products import FiniteDifferences, are_rounded, exact_products, probe_length, probe_scale


@dataclass(frozen=True)
class Curvature:
    """Products for the coming update.

    Attributes:
        products: By position among all parameters; None if the step is no refresh.
        scale: Factor that makes of them means over the probes; a 0-d tensor where only a device knows it.
        loss_scale: What the loss was multiplied by in the pass that gave them, if that is known; a tensor likewise.
        coarse: Whether a product of exactly 0 only says that it was too small to be seen.
        seen: By position, of products of another batch than the gradients': elements that it has anything to tell of.
    """

    products: Products | None = None
    scale: float | Tensor = 1.0
    loss_scale: float | Tensor | None = None
    coarse: bool = False
    seen: Grads | None = None

    def unscaled(self, loss_scale: float | Tensor) -> Curvature:
        """Products of the loss itself."""
        scale, by = self.scale, loss_scale
        used_here(factor for factor in (scale, by) if isinstance(factor, Tensor))
        # Tensors divide the same everywhere; of a number a GPU takes the reciprocal first.
        if isinstance(scale, Tensor):
            by = by.to(scale) if isinstance(by, Tensor) else torch.full_like(scale, by)
        elif isinstance(by, Tensor):
            scale = torch.full_like(by, scale, dtype=torch.float64)
        return replace(self, scale=scale / by, loss_scale=None)

    def plus(self, other: Curvature) -> Curvature:
        """The sum of products of two micro-batches, where both have some."""
        if self.products is None or other.products is None:
            return self if other.products is None else other
        values = [
            b if a is None else a if b is None else a + b
            for a, b in zip(self.products.values, other.products.values, strict=True)
        ]
        kinds = [max(pair) for pair in zip(self.products.kinds, other.products.kinds, strict=True)]
        return replace(other, products=Products(values, kinds), coarse=self.coarse or other.coarse)


def _times(value: Tensor, scale: float | Tensor) -> Tensor:
    """A product with a factor of another precision, rounded once."""
    exact = compute_dtype(value.dtype)
    return (value.to(exact) * torch.as_tensor(scale, dtype=exact, device=value.device)).to(value.dtype)


class Refresh:
    """The refresh of one step: what is due, and the products that it takes.

    Attributes:
        scheduled: Whether it is time for a refresh of all parameters. All processes agree on it.
        probes: The finite differences at hand, once the first probe was taken.
    """

    def __init__(
        self, params: Parameters, options: Options, stats: Stats, clock: int, *, has_curvature: bool, parallel: bool
    ) -> None:
        """Asks the clock. A descent without curvature is never refreshed."""
        self.scheduled = has_curvature and clock % options.lazy_hessian == 0
        self._has_curvature = has_curvature
        self.probes: FiniteDifferences | None = None
        self._params, self._options, self._stats, self._parallel = params, options, stats, parallel
        self._draw = clock * options.n_samples
        self._weight_norm: Tensor | None = None  # ‖x‖ of the parameters that are probed

    def missing(self, plan: Plan) -> list[bool]:
        """Which parameters need a product though no refresh is scheduled: they have no curvature yet.

        Several processes have to agree on refreshes, so there they wait for the next scheduled one.
        """
        if self._parallel or not self._has_curvature:
            return [False] * len(plan.params)
        return self._params.without_curvature(plan)

    def is_due(self, plan: Plan | None) -> bool:
        """Whether this step refreshes curvature, once it is known which parameters take part."""
        if self.scheduled or plan is None or plan.has_curvature:
            return self.scheduled
        return any(self.missing(plan))

    # ---- exact products -----------------------------------------------------------------------------------------

    def exact(self, plan: Plan | None, grads: Sequence[Tensor], caller: str, probe_recipe: str) -> Curvature:
        """Products from the graph of the gradients, if some are due. Raises if a scheduled refresh has no graph."""
        options = self._options
        if plan is None:
            return Curvature()
        if not options.exact:  # probes need the ascent's backup to come back from
            if self.scheduled:
                raise RuntimeError(
                    f"{options.caller}.{caller}: this step refreshes the curvature by finite differences, which need "
                    f"{probe_recipe}"
                )
            return Curvature()
        due = [True] * len(grads) if self.scheduled else self.missing(plan)
        if not any(due):
            return Curvature()
        wanted = [i for i, is_wanted in enumerate(due) if is_wanted]
        self._refuse_bare(plan, grads, wanted, caller)
        coarse = are_rounded([plan.params[i] for i in wanted], [grads[i] for i in wanted])
        found = exact_products(
            plan,
            grads,
            due,
            n_samples=options.n_samples,
            seed=options.seed,
            draw=self._draw,
            elements=self._params.elements,
            signed=self._parallel,
            caller=f"{options.caller}.{caller}",
        )
        if found is not None:
            products, scale = found
            return Curvature(products.spread(plan.positions, len(self._params.all)), scale, coarse=coarse)
        if self.scheduled and plan.sharded:
            raise RuntimeError(
                f"{options.caller}.{caller}: gradients of sharded parameters (FSDP2) have no graph, which exact "
                f"products need; construct {options.caller} with hvp='finite_difference'"
            )
        if self.scheduled:
            raise RuntimeError(
                f"{options.caller}.{caller}: this step refreshes the curvature, but no gradient has a graph to "
                "differentiate. Run the last backward pass as loss.backward(create_graph=opt.hessian_due)"
            )
        self._stats.skipped_refreshes += 1  # who came late waits for the next scheduled refresh
        return Curvature()

    def _refuse_bare(self, plan: Plan, grads: Sequence[Tensor], wanted: list[int], caller: str) -> None:
        """Raises if gradients beside others with a graph have none, and are not 0: it would pass for curvature 0.

        And where a parameter was frozen after the pass that its graph is of, which torch does not differentiate.
        """
        frozen = [plan.names[i] for i in wanted if grads[i].requires_grad and not plan.params[i].requires_grad]
        if frozen:
            who = frozen[0] + (f" and {len(frozen) - 1} more" if len(frozen) > 1 else "")
            raise RuntimeError(
                f"{self._options.caller}.{caller}: {who} was frozen after the backward pass of a refresh, "
                "so there is no product of it; freeze parameters after step(), or before the first backward pass"
            )
        bare = [i for i in wanted if not grads[i].requires_grad]
        if not bare or len(bare) == len(wanted):
            return
        device = plan.params[bare[0]].device
        is_there = torch.stack([local(grads[i]).any().to(device) for i in bare]).tolist()  # a device is asked once
        names = [plan.names[i] for i, there in zip(bare, is_there, strict=True) if there]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RuntimeError(
                f"{self._options.caller}.{caller}: the gradient of {names[0]}{more} has no graph, so its curvature is "
                "unknown. Checkpoint activations with use_reentrant=False, run every backward pass of the step with "
                "create_graph=opt.hessian_due, or use hvp='finite_difference'. A parameter in which the loss is linear "
                "has no curvature: leave it to another optimizer"
            )

    # ---- finite differences -------------------------------------------------------------------------------------

    def measure(self, plan: Plan) -> None:
        """Takes ‖x‖, which the length of a probe depends on, as long as the parameters hold x."""
        if not self._options.exact and self.is_due(plan):
            self._weight_norm = plan.weight_norm()

    def probe(self, plan: Plan) -> None:
        """Moves the weights to the next probe. Gradients at the present point are taken before."""
        options, probes = self._options, self.probes
        if probes is None:
            if self._weight_norm is None:  # due only since: somebody has dropped state
                self._weight_norm = plan.weight_norm()
            used_here((self._weight_norm,))  # of the ascent, which ran on another stream maybe
            probes = self.probes = FiniteDifferences(
                plan,
                self._params.take_grads(),
                h=probe_length(self._weight_norm, sum(plan.numels)),
                n_samples=options.n_samples,
                central=options.hvp == "central_difference",
                seed=options.seed,
                draw=self._draw,
                caller=options.caller,
            )
        else:
            probes.collect(self._params.take_grads())
        probes.advance()

    def from_probes(self, plan: Plan | None, closing_call: str, *, fused: bool) -> Curvature:
        """The products of the probes that were taken; gives ∇f(x+ε) back to the parameters.

        ``fused`` leaves differences to the update. That needs ∇f(x+ε) to stay as it is until then.
        """
        params, name = self._params, self._options.caller
        probes, self.probes = self.probes, None
        if probes is None or probes.done < probes.needed:
            if probes is not None:
                params.set_grads(probes.second_pass)
            elif not self.scheduled:
                self._stats.skipped_refreshes += 1
                return Curvature()
            raise RuntimeError(
                f"{name}.{closing_call}: this step refreshes the curvature by finite differences, but "
                f"{0 if probes is None else probes.done} of {self._options.gradients_per_refresh} probes were taken; "
                f"run `for _ in range(opt.probes_due): opt.probe_weights(); loss().backward()` before {closing_call}()"
            )
        last = params.take_grads()
        params.set_grads(probes.second_pass)
        probes.collect(last)
        products = probes.products(fused=fused and not self._parallel)
        assert plan is not None
        if not self.scheduled:
            keep = [value if late else None for value, late in zip(products.values, self.missing(plan), strict=True)]
            products = Products(keep, products.kinds)
        scale = probes.scale
        if self._parallel:  # h depends on the parameters that took part, which may differ between processes
            products = Products.signed([None if v is None else _times(v, scale) for v in products.values])
            scale = 1.0
        return Curvature(products.spread(plan.positions, len(params.all)), scale, coarse=True)

    # ---- several processes --------------------------------------------------------------------------------------

    def reduced(self, curvature: Curvature, reducer: Reducer, early: object) -> Curvature:
        """Gradients and products of all processes together. Both are those of this process before."""
        params, options = self._params, self._options
        products: list[Tensor | None] | None = None
        if self.scheduled:
            none: Grads = [None] * len(params.all)
            products = list(none if curvature.products is None else curvature.products.values)
        mean = options.grad_reduce == "mean"
        coarse, seen = reducer.reduce(
            params.all,
            products,
            mean=mean,
            coarse=curvature.coarse,
            seen=curvature.seen,
            early=early,  # type: ignore[arg-type]
        )
        if products is None:
            return Curvature()
        scale = probe_scale(params.elements) / options.n_samples if options.exact else 1.0
        return replace(curvature, products=Products.signed(products), scale=scale, coarse=coarse, seen=seen)
