"""Hutchinson's estimate of the Hessian diagonal: E[z ⊙ Hz] with Rademacher probes z."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .passes import Product
from .reference import compute_dtype, finite_difference
from .sharding import local

if TYPE_CHECKING:
    from .plan import Plan

__all__ = [
    "FiniteDifferences",
    "exact_products",
    "filter_means",
    "is_rounded",
    "probe_length",
    "probe_scale",
    "without_zeros",
]


_SHORT = (torch.bfloat16, torch.float16)
_ON_THE_WAY = ("CopyBackward", "AddBackward")  # from where a gradient was computed to ``p.grad``
# In torch's messages: operations without a formula, flash attention among them; compiled code; cuDNN's RNNs.
_NO_DOUBLE_BACKWARD = ("is not implemented", "double backward", "Double backward")


class ProbeSource(Protocol):
    """Draws probes, and knows where the update can draw them again."""

    def rademacher(self, positions: Sequence[int], seed: int, draw: int) -> list[Tensor]:
        """Signs z for the parameters at ``positions``."""

    def signs_in_registers(self, position: int) -> bool:
        """Whether the update can apply the signs of this parameter itself."""


def exact_products(
    source: ProbeSource,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    due: Sequence[bool],
    *,
    n_samples: int,
    seed: int,
    draw: int,
    elements: int,
    signed: bool = False,
) -> tuple[list[Product | None], float] | None:
    """Products with the exact Hessian, by differentiating the gradients once more.

    Probes enter as z·2^−k with ‖z‖ ≈ 2^k, so that the product is of the size of a gradient: with entries of ±1 a
    backward pass in float16 overflows where gradients do not. Powers of two change nothing else.

    Args:
        source: Draws the probes.
        params: Parameters.
        grads: Their gradients, from a backward pass with ``create_graph=True``.
        due: Which of them to refresh.
        n_samples: Number of probes to average over.
        seed: Key of the probes.
        draw: Number of the first probe.
        elements: Of all parameters of the model, whether they take part or not: ‖z‖².
        signed: Whether to sign every product here, and leave none to the update.

    Returns:
        One product per parameter, None where it is not due, and the factor that makes it a mean over probes; or None
        if no gradient has a graph. A parameter whose gradient does not depend on any parameter has a product of zeros.
    """
    positions = [i for i, wanted in enumerate(due) if wanted]
    connected = [i for i in positions if grads[i].requires_grad]
    if not connected:
        return None
    inputs = [params[i] for i in positions]
    length = probe_scale(elements)
    sums: list[Tensor] = []
    signed = signed or n_samples > 1
    for sample in range(n_samples):
        drawn = source.rademacher(positions, seed, draw + sample)
        signs = dict(zip(positions, drawn, strict=True))
        torch._foreach_mul_(drawn, 1.0 / length)
        outputs, probes = [grads[i] for i in connected], [signs[i] for i in connected]
        try:
            with torch.enable_grad():
                differentiated = torch.autograd.grad(
                    outputs,
                    inputs,
                    grad_outputs=probes,
                    retain_graph=sample < n_samples - 1,
                    allow_unused=True,
                    materialize_grads=True,
                )
        except RuntimeError as error:
            if not any(sign in str(error) for sign in _NO_DOUBLE_BACKWARD):
                raise
            raise RuntimeError(
                f"SASSHA: an operation of the model has no double backward, which exact products need: {error}. Put "
                "all passes of a refresh step, unperturb() included, into `with opt.refresh_context():`, or construct "
                "SASSHA with hvp='finite_difference'. sassha_fast.check_model(model, sample) names the modules"
            ) from error
        products = [product.detach() for product in differentiated]
        torch._foreach_mul_(drawn, length)
        if not signed:
            return _place(source, positions, products, signs, len(params)), length
        for j, product in enumerate(products):
            term = product * signs[positions[j]]
            if sample == 0:
                sums.append(term)
            else:
                sums[j] = sums[j] + term
    placed: list[Product | None] = [None] * len(params)
    for i, total in zip(positions, sums, strict=True):
        placed[i] = Product(total, signed=True)
    return placed, length / n_samples


def _place(
    source: ProbeSource, positions: Sequence[int], products: Sequence[Tensor], signs: dict[int, Tensor], n: int
) -> list[Product | None]:
    """Products of one probe, signed here only where the update can't draw the signs again itself."""
    placed: list[Product | None] = [None] * n
    for i, product in zip(positions, products, strict=True):
        if source.signs_in_registers(i):
            placed[i] = Product(product, signed=False)
        else:
            placed[i] = Product(product * signs[i], signed=True)
    return placed


def is_rounded(param: Tensor, grad: Tensor, due: bool = True) -> bool:
    """Whether a gradient was computed in bfloat16 or float16, as its graph tells behind copies, casts and sums."""
    if not due or param.dtype in _SHORT:
        return due
    nodes = [grad.grad_fn] if grad.grad_fn is not None else []
    while nodes:
        if any(metadata.dtype in _SHORT for node in nodes for metadata in node._input_metadata):
            return True
        followed = [node for node in nodes if any(name in node.name() for name in _ON_THE_WAY)]
        nodes = [before for node in followed for before, _ in node.next_functions if before is not None]
    return False


def without_zeros(product: Product | None, param: Tensor) -> Product | None:
    """A coarse product with NaN, which keeps the curvature that is known, in place of 0.

    Of gradients in bfloat16 one product in a thousand is lost to rounding, of their differences one in a hundred. Taken
    for curvatures, these zeros would leave the weights with a denominator of eps, and one of them destroys a network.
    """
    if product is None:
        return None
    nothing = local(param.grad) if product.probed else 0.0  # type: ignore[arg-type]
    return replace(product, value=torch.where(product.value == nothing, torch.nan, product.value))


def filter_means(h: Tensor) -> Tensor:
    """The mean of |h| over each filter of a convolution's weights, in place of each of its elements (AdaHessian)."""
    return torch.empty_like(h).copy_(h.abs().mean(dim=(2, 3), keepdim=True).expand_as(h))


def probe_scale(elements: int) -> float:
    """The power of two nearest to ‖z‖."""
    return float(2.0 ** round(math.log2(max(elements, 1)) / 2))


def probe_length(weight_norm: float, elements: int) -> float:
    """h such that ‖hz‖ is a hundredth of ‖x‖, one number for all parameters, rounded to float32.

    A length per tensor would be another estimator. Weights of zero are probed by a hundredth.
    """
    h = 1e-2 * weight_norm / math.sqrt(max(elements, 1))
    return torch.tensor(h, dtype=torch.float64).to(torch.float32).item() or 1e-2


def _locals(grads: dict[int, Tensor]) -> dict[int, Tensor]:
    return {key: local(g) for key, g in grads.items()}


class FiniteDifferences:
    """Products from gradients at probed weights, one backward pass each: (∇f(x+ε+hz) − ∇f(x+ε)) / h.

    They need no graph, so they work where double backward does not exist. On smooth networks they differ from the
    exact ones by a few per cent, less than the noise of the probe; at the kinks of ReLU they see curvature that
    autograd ignores.

    The weights move in place: x+ε, then x+ε+hz₁, then x+ε+hz₂ and so on. The ascent's backup is the way back to x.
    """

    def __init__(
        self, ascent: Plan, grads: dict[int, Tensor], *, h: float, n_samples: int, central: bool, seed: int, draw: int
    ) -> None:
        """Starts at x + ε.

        Args:
            ascent: The parameters that were perturbed; only these are probed.
            grads: ∇f(x+ε) by id of the parameter.
            h: Length of a probe per element.
            n_samples: Probes to average over.
            central: Two gradients per probe, at x+ε+hz and x+ε−hz, and an error of second order in h.
            seed: Key of the probes.
            draw: Number of the first probe.
        """
        self.ascent, self.grads, self.h = ascent, _locals(grads), h
        self.second_pass = grads
        self.n_samples, self.central, self.seed, self.draw = n_samples, central, seed, draw
        self.offsets = [(i, sign) for i in range(n_samples) for sign in ((1.0, -1.0) if central else (1.0,))]
        self.done = 0
        self.gradients: list[dict[int, Tensor]] = []
        self.sums: dict[int, Tensor] = {}

    def advance(self) -> None:
        """Moves the weights to the next probe."""
        if self.done > 0:
            self._move(-1.0)
        self.done += 1
        self._move(1.0)

    def _move(self, direction: float) -> None:
        sample, sign = self.offsets[self.done - 1]
        self.ascent.probe(direction * sign * self.h, self.seed, self.draw + sample)

    def collect(self, grads: dict[int, Tensor]) -> None:
        """Takes the gradients at the present probe. Parameters that have none there get no product."""
        if not grads:
            raise RuntimeError("SASSHA: no parameter has a gradient at the probe; run backward() after probe_weights()")
        for missing in self.grads.keys() - grads.keys():
            self.grads.pop(missing)
        self.gradients.append(_locals(grads))
        sample, sign = self.offsets[self.done - 1]
        if self.n_samples == 1 or (self.central and sign > 0):
            return
        signs = self.ascent.rademacher(range(len(self.ascent.params)), self.seed, self.draw + sample)
        for p, z in zip(self.ascent.params, signs, strict=True):
            if id(p) in self.grads:
                term = self._difference(p) * z.to(compute_dtype(p.dtype))
                self.sums[id(p)] = self.sums[id(p)] + term if id(p) in self.sums else term
        self.gradients.clear()

    def _difference(self, p: Tensor) -> Tensor:
        """Hz of one parameter, times the distance of its two points, from the gradients collected last."""
        base = self.gradients[-1][id(p)] if self.central else self.grads[id(p)]
        probed = self.gradients[-2 if self.central else -1][id(p)]
        return finite_difference(probed, base)

    @property
    def scale(self) -> float:
        """The factor that makes of the products a mean over probes."""
        return 1.0 / (self.n_samples * (2.0 * self.h if self.central else self.h))

    def products(self, *, fused: bool = True) -> dict[int, Product]:
        """What the update needs, by id of the parameter. ``fused`` leaves the difference to the update where it can:
        its own gradient is then ∇f(x+ε).
        """
        found = {}
        for i, p in enumerate(self.ascent.params):
            if id(p) not in self.grads:
                continue
            if self.n_samples > 1:
                found[id(p)] = Product(self.sums[id(p)].to(p.dtype), signed=True)
            elif fused and not self.central and self.ascent.signs_in_registers(i):
                found[id(p)] = Product(self.gradients[-1][id(p)], signed=False, probed=True)
            else:
                z = self.ascent.rademacher([i], self.seed, self.draw)[0]
                found[id(p)] = Product((self._difference(p) * z.to(compute_dtype(p.dtype))).to(p.dtype), signed=True)
        return found
