"""Hutchinson's estimate of the Hessian diagonal: E[z ⊙ Hz] with Rademacher probes z."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, methodcaller

import torch
from torch import Tensor

from .._passes.accessors import is_neg, ranged, resolved, used_here
from .._passes.layout import PROBE_GRADIENT, SIGNED_PRODUCT
from .._passes.plan import Plan
from .._passes.reference import Products
from .._passes.shards import local
from ..reference import compute_dtype, finite_difference
from .params import Grads

_SHORT = (torch.bfloat16, torch.float16)
_ON_THE_WAY = ("CopyBackward", "AddBackward")  # from where a gradient was computed to ``p.grad``
# In torch's messages: operations without a formula, flash attention among them; compiled code; cuDNN's RNNs.
_NO_DOUBLE_BACKWARD = ("is not implemented", "double backward", "Double backward")

_SPENT = "backward through the graph a second time"


@ranged("products")
def exact_products(
    plan: Plan,
    grads: Sequence[Tensor],
    due: Sequence[bool],
    *,
    n_samples: int,
    seed: int,
    draw: int,
    elements: int,
    signed: bool = False,
    caller: str = "SASSHA.unperturb",
) -> tuple[Products, float] | None:
    """Products with the exact Hessian, by differentiating the gradients once more.

    Probes enter as z·2^−k with ‖z‖ ≈ 2^k, so that the product is of the size of a gradient: with entries of ±1 a
    backward pass in float16 overflows where gradients do not. Powers of two change nothing else. All devices are
    differentiated in one call, as their graph is one.

    Args:
        plan: The parameters.
        grads: Their gradients, from a backward pass with ``create_graph=True``.
        due: Which of them to refresh.
        n_samples: Number of probes to average over.
        seed: Key of the probes.
        draw: Number of the first probe.
        elements: Of all parameters of the model, whether they take part or not: ‖z‖².
        signed: Whether to sign every product here, and leave none to the update.
        caller: The call, in errors.

    Returns:
        The products of the plan's parameters, and the factor that makes them means over probes; or None if no gradient
        has a graph. One without a graph, which is 0, has a product of zeros.
    """
    positions = [i for i, wanted in enumerate(due) if wanted]
    connected = [j for j, i in enumerate(positions) if grads[i].requires_grad]
    if not connected:
        return None
    inputs, outputs = [plan.params[i] for i in positions], [grads[positions[j]] for j in connected]
    # Of a parameter that was frozen after it had gradients, nothing can be differentiated. Its gradient is 0.
    frozen = [] if len(connected) == len(inputs) else [j for j, p in enumerate(inputs) if not p.requires_grad]
    length = probe_scale(elements)
    sums: list[Tensor] = []
    for sample in range(n_samples):
        signs = plan.rademacher(positions, seed, draw + sample)
        torch._foreach_mul_(signs, 1.0 / length)
        last = sample == n_samples - 1
        probes = [signs[j] for j in connected]
        free = [p for j, p in enumerate(inputs) if j not in frozen] if frozen else inputs
        products = _differentiated(outputs, free, probes, retain_graph=not last, caller=caller)
        for j in frozen:
            products.insert(j, torch.zeros_like(inputs[j]))
        if any(map(is_neg, products)):
            products = list(map(resolved, products))
        torch._foreach_mul_(signs, length)
        if n_samples == 1 and not signed:
            return _unsigned(plan, positions, products, signs), length
        terms = torch._foreach_mul(products, signs)
        sums = list(torch._foreach_add(sums, terms)) if sums else list(terms)
    return Products.signed(sums).spread(positions, len(plan.params)), length / n_samples


def _differentiated(
    outputs: list[Tensor], inputs: list[Tensor], probes: list[Tensor], *, retain_graph: bool, caller: str
) -> list[Tensor]:
    try:
        with torch.enable_grad():
            return list(
                torch.autograd.grad(
                    outputs,
                    inputs,
                    grad_outputs=probes,
                    retain_graph=retain_graph,
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
    except RuntimeError as error:
        if _SPENT in str(error):
            raise RuntimeError(
                f"{caller}: the graph of the gradients is used up, so there are no second products from it: another "
                "optimizer has taken its products of the same backward pass, or somebody has differentiated it. Give "
                "one optimizer all parameters, in groups with their own hyperparameters, run a backward pass for each "
                "optimizer, or construct them with hvp='finite_difference'"
            ) from error
        if not any(sign in str(error) for sign in _NO_DOUBLE_BACKWARD):
            raise
        raise RuntimeError(
            f"{caller}: an operation of the model has no double backward, which exact products need: {error}. Put all "
            "passes of a refresh step and this call into `with opt.refresh_context():`, or construct the optimizer "
            "with hvp='finite_difference'. sassha_fast.check_model(model, sample) names the modules"
        ) from error


def _unsigned(plan: Plan, positions: list[int], products: list[Tensor], signs: list[Tensor]) -> Products:
    """Products of one probe, signed here only where the update can't draw the signs again itself."""
    kinds = [0] * len(positions)
    for j, i in enumerate(positions):
        if not plan.signs_in_registers[i]:
            products[j] = products[j] * signs[j]
            kinds[j] = SIGNED_PRODUCT
    return Products(products, kinds).spread(positions, len(plan.params))  # type: ignore[arg-type]


def are_rounded(params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether any gradient was computed in bfloat16 or float16, as its graph tells behind copies, casts and sums."""
    if any(p.dtype in _SHORT for p in params):
        return True
    nodes = [g.grad_fn for g in grads if g.grad_fn is not None]
    while nodes:
        inputs = chain.from_iterable(map(attrgetter("_input_metadata"), nodes))
        if not set(map(attrgetter("dtype"), inputs)).isdisjoint(_SHORT):
            return True
        names = list(map(methodcaller("name"), nodes))
        followed = [
            node for node, name in zip(nodes, names, strict=True) if _ON_THE_WAY[0] in name or _ON_THE_WAY[1] in name
        ]
        edges = chain.from_iterable(map(attrgetter("next_functions"), followed))
        nodes = [before for before, _ in edges if before is not None]
    return False


def without_zeros(products: Products, grads: Sequence[Tensor], *, zero_is_seen: bool) -> Products:
    """Coarse products with NaN, which keeps the curvature that is known, in place of 0.

    Of gradients in bfloat16 one product in a thousand is lost to rounding, of their differences one in a hundred. Taken
    for curvatures, these zeros would leave the weights with a denominator of eps, and one of them destroys a network.
    """
    values: list[Tensor | None] = []
    for value, kind, grad in zip(products.values, products.kinds, grads, strict=True):
        if value is None:
            values.append(None)
            continue
        nothing = local(grad) if kind == PROBE_GRADIENT else 0.0
        lost = value == nothing
        if not zero_is_seen:  # without a gradient there was nothing to lose
            lost &= local(grad) != 0
        values.append(torch.where(lost, torch.nan, value))
    return Products(values, products.kinds)


def filter_means(h: Tensor) -> Tensor:
    """The mean of |h| over each filter of a convolution's weights, in place of each of its elements (AdaHessian)."""
    return torch.empty_like(h).copy_(h.abs().mean(dim=(2, 3), keepdim=True).expand_as(h))


def probe_scale(elements: int) -> float:
    """The power of two nearest to ‖z‖."""
    return float(2.0 ** round(math.log2(max(elements, 1)) / 2))


def probe_length(weight_norm: Tensor, elements: int) -> Tensor:
    """h such that ‖hz‖ is a hundredth of ‖x‖, one number for all parameters, rounded to float32.

    A length per tensor would be another estimator. Weights of zero are probed by a hundredth. Everything stays where
    the norm is, so that nobody waits for a device.
    """
    # A tensor divides the same everywhere; a number is made a reciprocal first on a GPU.
    length = torch.full_like(weight_norm, math.sqrt(max(elements, 1)))
    h = (1e-2 * weight_norm / length).to(torch.float32).to(torch.float64)
    return h.masked_fill(h == 0, 1e-2)


class FiniteDifferences:
    """Products from gradients at probed weights, one backward pass each: (∇f(x+ε+hz) − ∇f(x+ε)) / h.

    They need no graph, so they work where double backward does not exist. On smooth networks they differ from the
    exact ones by a few per cent, less than the noise of the probe; at the kinks of ReLU they see curvature that
    autograd ignores.

    The weights move in place: x+ε, then x+ε+hz₁, then x+ε+hz₂ and so on. The ascent's backup is the way back to x.

    Attributes:
        second_pass: ∇f(x+ε) by position among all parameters.
        done: Probes that the weights were moved to.
        needed: Probes that there are.
    """

    def __init__(
        self,
        plan: Plan,
        second_pass: Grads,
        *,
        h: Tensor,
        n_samples: int,
        central: bool,
        seed: int,
        draw: int,
        caller: str = "SASSHA",
    ) -> None:
        """Starts at x + ε.

        Args:
            plan: The parameters that were perturbed; only these are probed.
            second_pass: ∇f(x+ε) by position among all parameters.
            h: Length of a probe per element, a 0-d float64 tensor.
            n_samples: Probes to average over.
            central: Two gradients per probe, at x+ε+hz and x+ε−hz, and an error of second order in h.
            seed: Key of the probes.
            draw: Number of the first probe.
            caller: What errors call the optimizer.
        """
        self._caller = caller
        self.second_pass = second_pass
        self.done = 0
        self._offsets = [(i, sign) for i in range(n_samples) for sign in ((1.0, -1.0) if central else (1.0,))]
        self.needed = len(self._offsets)
        self._plan, self._h, self._n_samples, self._central = plan, h, n_samples, central
        self._seed, self._draw = seed, draw
        self._base = self._of_plan(second_pass)
        self._gradients: list[list[Tensor | None]] = []
        self._sums: list[Tensor | None] = [None] * len(plan.params)

    def _of_plan(self, grads: Grads) -> list[Tensor | None]:
        found = [grads[i] for i in self._plan.positions]
        return [None if g is None else local(g) for g in found]

    def advance(self) -> None:
        """Moves the weights to the next probe."""
        if self.done > 0:
            self._move(-1.0)
        self.done += 1
        self._move(1.0)

    def _move(self, direction: float) -> None:
        sample, sign = self._offsets[self.done - 1]
        used_here((self._h,))  # which the first probe made, on another stream maybe, as below
        self._plan.probe(self._h if direction == sign else -self._h, self._seed, self._draw + sample)

    def collect(self, grads: Grads) -> None:
        """Takes the gradients at the present probe. Parameters that have none there get no product."""
        if not any(g is not None for g in grads):
            raise RuntimeError(
                f"{self._caller}: no parameter has a gradient at the probe; run backward() after probe_weights()"
            )
        here = self._of_plan(grads)
        self._base = [None if g is None else base for base, g in zip(self._base, here, strict=True)]
        self._gradients.append(here)
        used_here(chain(*self._gradients, self._base, self._sums))  # all but the last of calls on other streams, maybe
        sample, sign = self._offsets[self.done - 1]
        if self._n_samples == 1 or (self._central and sign > 0):
            return
        for i, term in self._signed_differences(self._plan.ranks, self._draw + sample):
            before = self._sums[i]
            self._sums[i] = term if before is None else before + term
        self._gradients.clear()

    def _signed_differences(self, positions: Sequence[int], draw: int) -> Iterator[tuple[int, Tensor]]:
        """z⊙Hz of those that have it, times the distance of their two points, from the gradients collected last."""
        bases = self._gradients[-1] if self._central else self._base
        probed = self._gradients[-2 if self._central else -1]
        for i, z in zip(positions, self._plan.rademacher(positions, self._seed, draw), strict=True):
            here, there = bases[i], probed[i]
            if self._base[i] is not None and here is not None and there is not None:
                yield i, finite_difference(there, here) * z.to(compute_dtype(there.dtype))

    @property
    def scale(self) -> float | Tensor:
        """The factor that makes of the products a mean over probes. On a device it stays there."""
        used_here((self._h,))
        scale = (self._n_samples * (2.0 * self._h if self._central else self._h)).reciprocal()
        return scale.item() if scale.device.type == "cpu" else scale

    def products(self, *, fused: bool = True) -> Products:
        """What the update needs, of the plan's parameters. ``fused`` leaves differences to the update where it can:
        its own gradient is then ∇f(x+ε).
        """
        plan = self._plan
        found = Products([None] * len(plan.params), [SIGNED_PRODUCT] * len(plan.params))
        totals, fused = self._sums, fused and self._n_samples == 1 and not self._central
        if self._n_samples == 1:
            totals = [None] * len(plan.params)
            here = [i for i in plan.ranks if not (fused and plan.signs_in_registers[i]) and self._base[i] is not None]
            for i, term in self._signed_differences(here, self._draw) if here else ():
                totals[i] = term
        for i, p in enumerate(plan.params):
            if self._base[i] is None:
                continue
            total = totals[i]
            if fused and plan.signs_in_registers[i]:
                found.values[i], found.kinds[i] = self._gradients[-1][i], PROBE_GRADIENT
            else:
                found.values[i] = None if total is None else total.to(p.dtype)
        return found
