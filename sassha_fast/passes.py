"""The passes over one list of parameters, in their plainest form: backend ``reference``.

An object of this class is bound to parameters of one device and lives as long as their addresses stand. Other
backends override the passes that they make faster; what they write has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference
from .scalars import StepScalars
from .sharding import Shard

__all__ = ["Members", "Passes", "Product", "check_grads"]


@dataclass(frozen=True)
class Members:
    """Parallel lists that describe parameters of one device.

    Attributes:
        weights: Their data, without autograd history and without a version counter of its own to move.
        indices: Position of each among all parameters of the optimizer: its stream of random numbers.
        groups: Parameter group of each.
        n_groups: Number of parameter groups of the optimizer.
        names: What to call each in an error.
        shards: Where each lies in its parameter, None if it is the whole of it; empty if all are.
    """

    weights: list[Tensor]
    indices: list[int]
    groups: list[int]
    n_groups: int
    names: list[str]
    shards: Sequence[Shard | None] = ()

    def shard(self, i: int) -> Shard | None:
        """Where member ``i`` lies in its parameter."""
        return self.shards[i] if self.shards else None

    def numbers(self, i: int) -> Tensor | None:
        """Global numbers of the elements of member ``i``, if it is a shard."""
        shard, weight = self.shard(i), self.weights[i]
        return None if shard is None else shard.numbers(tuple(weight.shape), weight.device)

    def take(self, positions: Sequence[int]) -> Members:
        """The members at ``positions``."""
        return Members(
            [self.weights[i] for i in positions],
            [self.indices[i] for i in positions],
            [self.groups[i] for i in positions],
            self.n_groups,
            [self.names[i] for i in positions],
            [self.shards[i] for i in positions] if self.shards else (),
        )


@dataclass(frozen=True)
class Product:
    """A Hessian-vector product of one parameter.

    Attributes:
        value: Hz, or Σ z⊙Hz over the probes where ``signed``, or the gradient at x + ε + hz where ``probed``; up to
            the update's ``product_scale``.
        signed: See ``value``.
        probed: See ``value``.
    """

    value: Tensor
    signed: bool
    probed: bool = False


def check_grads(names: Sequence[str], weights: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Raises unless each gradient has the device, dtype and shape of its parameter and is dense."""
    for name, weight, grad in zip(names, weights, grads, strict=True):
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"SASSHA: the gradient of {name} is sparse ({grad.layout}); SASSHA needs dense ones, "
                "for example nn.Embedding(sparse=False)"
            )
        for what in ("device", "dtype", "shape"):
            found, expected = getattr(grad, what), getattr(weight, what)
            if found != expected:
                raise RuntimeError(
                    f"SASSHA: the gradient of {name} has {what} {_plain(found)}, expected {_plain(expected)} like the "
                    "parameter; it was computed before the parameter changed: call zero_grad() and backward() again"
                )


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value


class Passes:
    """Norm, ascent, restore, probes and update over one list of parameters."""

    name = "reference"

    def __init__(self, members: Members) -> None:
        """Binds the passes to ``members``."""
        self.members = members
        self.grads: list[Tensor] = []
        self.backups: list[Tensor] = []
        self.exp_avgs: list[Tensor] = []
        self.hessians: list[Tensor] = []

    def bind_state(self, exp_avgs: list[Tensor], hessians: list[Tensor]) -> None:
        """Sets m and D of every member."""
        self.exp_avgs, self.hessians = exp_avgs, hessians

    def bind_grads(self, grads: list[Tensor], *, overwrite: bool = False) -> None:
        """Checks and sets the gradients that the coming pass reads; ``overwrite`` says that it may be an ascent."""
        del overwrite  # only a backend that writes into their memory needs to know whose it is
        check_grads(self.members.names, self.members.weights, grads)
        self.grads = grads

    def square_sums(self, *, adaptive: bool) -> Tensor:
        """Squared gradient norm per group, in double; of |x| ⊙ g where ``adaptive``."""
        members = self.members
        sums = torch.zeros(members.n_groups, dtype=torch.float64, device=members.weights[0].device)
        for group, grad, weight in zip(members.groups, self.grads, members.weights, strict=True):
            sums[group] += reference.square_sum(grad, weight if adaptive else None)
        return sums

    def perturb(
        self, scales: Tensor, *, adaptive: bool, take_grads: bool | Sequence[bool], seed: int, draw: Tensor
    ) -> None:
        """Moves the parameters to x + ε and keeps x.

        Args:
            scales: ρ over the norm, float32, per group.
            adaptive: ASAM's ascent.
            take_grads: Gradients nobody else will read, whose memory may hold x from now on: all, none, or each.
            seed: Key of the rounding noise of reduced-precision parameters.
            draw: Draw of that noise, one int64 on the device.
        """
        del take_grads  # memory is no concern here
        self.backups = [weight.clone() for weight in self.members.weights]
        for weight, grad, group, index in zip(
            self.members.weights, self.grads, self.members.groups, self.members.indices, strict=True
        ):
            reduced = weight.dtype != reference.compute_dtype(weight.dtype)
            noise = reference.rounding_noise(weight, index, seed, draw, reference.ASCENT_NOISE) if reduced else None
            weight.copy_(reference.ascend(weight, grad, scales[group], adaptive=adaptive, noise=noise))
        self.grads = []

    def restore(self) -> None:
        """Puts x back, bit for bit."""
        for weight, backup in zip(self.members.weights, self.backups, strict=True):
            weight.copy_(backup)
        self.backups = []

    def drop_backups(self) -> list[Tensor]:
        """Gives up x of every member without writing it back."""
        backups, self.backups = self.backups, []
        return backups

    def rademacher(self, positions: Sequence[int], seed: int, draw: int) -> list[Tensor]:
        """Signs z for the members at ``positions``."""
        weights, indices, numbers = self.members.weights, self.members.indices, self.members.numbers
        return [reference.rademacher(weights[i], indices[i], seed, draw, numbers=numbers(i)) for i in positions]

    def probe(self, h: float, seed: int, draw: int) -> None:
        """Adds h·z to every parameter."""
        for i, (weight, index) in enumerate(zip(self.members.weights, self.members.indices, strict=True)):
            weight.copy_(reference.probe(weight, h, index, seed, draw, self.members.numbers(i)))

    def weight_square_sum(self) -> float:
        """Σ x² over all members, in double."""
        return sum(reference.square_sum(weight).item() for weight in self.members.weights)

    def signs_in_registers(self, position: int) -> bool:
        """Whether :meth:`step` can apply z itself to this member's product."""
        return self.members.shard(position) is None

    def step(
        self,
        scalars: Sequence[StepScalars],
        cohorts: Sequence[int],
        products: Sequence[Product | None] | None,
        seed: int,
        draw: int,
        *,
        restore: bool = False,
        noise_draw: Tensor | None = None,
    ) -> Tensor | None:
        """The update.

        Args:
            scalars: One per cohort.
            cohorts: Cohort of each member.
            products: On a refresh, the product of each member or None where it is not refreshed.
            seed: Key of the signs of unsigned products.
            draw: Draw of those signs.
            restore: Take x from the backups of the ascent, which is undone on the way.
            noise_draw: Draw of the noise that rounds reduced-precision parameters stochastically, one int64 on the
                device; None rounds them to nearest.

        Returns:
            On a refresh a float64 tensor [members, 3]: Σ z⊙Hz over finite elements, how many of them are negative,
            and how many there are.
        """
        if restore:
            self.restore()
        tallies = []
        for i, weight in enumerate(self.members.weights):
            product = products[i] if products is not None else None
            row = scalars[cohorts[i]]
            h = self._signed(product, i, seed, draw)
            noise = self._noise(i, seed, noise_draw)
            x, m, d = reference.step(weight, self.grads[i], self.exp_avgs[i], self.hessians[i], row, h, noise)
            weight.copy_(x)
            self.exp_avgs[i].copy_(m)
            self.hessians[i].copy_(d)
            if products is not None:
                tallies.append(_tally(h, row, weight))
        self.grads = []
        return torch.stack(tallies) if products is not None else None

    def _noise(self, i: int, seed: int, draw: Tensor | None) -> Tensor | None:
        """What the update of one member is rounded with, if at random."""
        weight = self.members.weights[i]
        if draw is None or weight.dtype == reference.compute_dtype(weight.dtype):
            return None
        return reference.rounding_noise(weight, self.members.indices[i], seed, draw, reference.UPDATE_NOISE)

    def _signed(self, product: Product | None, i: int, seed: int, draw: int) -> Tensor | None:
        """z⊙Hz of one member, or the sum of such that is there already."""
        if product is None or product.signed:
            return None if product is None else product.value
        hz = product.value
        if product.probed:
            hz = reference.finite_difference(hz, self.grads[i])
        return hz * reference.rademacher(hz, self.members.indices[i], seed, draw)


def _tally(h: Tensor | None, scalars: StepScalars, weight: Tensor) -> Tensor:
    if h is None:
        return torch.zeros(3, dtype=torch.float64, device=weight.device)
    dtype = reference.compute_dtype(weight.dtype)
    h = h.to(dtype) * reference.scalar_tensors(scalars, dtype, weight.device).product_scale
    finite = torch.isfinite(h)
    counted = torch.where(finite, h, torch.zeros_like(h))
    return torch.stack(
        (
            counted.to(torch.float64).sum(),
            (counted < 0).sum().to(torch.float64),
            finite.sum().to(torch.float64),
        )
    )
