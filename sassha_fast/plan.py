"""What is kept between steps: the passes over the parameters that have gradients, as long as nothing moved.

Work per tensor in Python is what a small-tensor step costs, so everything here that runs every step is a ``map`` over
C functions.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from operator import is_, itemgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from . import backends
from .accessors import address, ranged
from .capturable import DeviceScalars
from .hutchinson import exact_products
from .passes import Members, Passes, Product, Stepped
from .scalars import StepScalars
from .sharding import group_of, is_sharded, local, shard_of
from .state import EXP_AVG, HESSIAN, WEIGHT
from .variant import Variant

__all__ = ["Plan"]

T = TypeVar("T")


class Plan:
    """Passes over a fixed list of parameters, one set for each device they are on and kind of ascent they take."""

    def __init__(
        self,
        params: list[Tensor],
        indices: list[int],
        groups: list[int],
        n_groups: int,
        names: list[str],
        backend: str,
        variant: Variant,
    ) -> None:
        """Binds the backend of each device to its parameters."""
        self.params = params
        self.names = names
        self.groups = groups
        self.n_groups = n_groups
        self.variant = variant
        self.ranks = list(range(len(params)))
        # Parameters come group by group: the slice that each group takes of every list.
        starts = [bisect_left(groups, g) for g in range(n_groups + 1)]
        self.spans = {g: slice(starts[g], starts[g + 1]) for g in range(n_groups) if starts[g] < starts[g + 1]}
        self.sharded = any(map(is_sharded, params))
        self.process_group = group_of(params)  # that shares the shards, if there are any
        self.addresses = self._addresses(params)
        shards = list(map(shard_of, params)) if self.sharded else ()
        weights = [local(p.data) for p in params]
        members = Members(weights, indices, groups, n_groups, names, shards)
        # One part for each device, among shards for each number of processes that hold the same elements, and for
        # parameters that ASAM's scaling covers and that it does not.
        kinds: dict[tuple[torch.device, int, bool], list[int]] = {}
        everyone = dist.get_world_size(self.process_group) if self.sharded else 1
        for i, weight in enumerate(weights):
            shard = members.shard(i)
            replicas = everyone if shard is None else shard.replicas
            kinds.setdefault((weight.device, replicas, variant.scales_by_weight(weight.dim())), []).append(i)
        self.replicas = [replicas for _, replicas, _ in kinds]
        self.adaptive = [adaptive for _, _, adaptive in kinds]
        self.parts: list[tuple[Passes, list[int]]] = [
            (backends.choose(backend, device)(members.take(positions) if len(kinds) > 1 else members), positions)
            for (device, _, _), positions in kinds.items()
        ]
        self.draws = [torch.zeros(1, dtype=torch.int64, device=device) for device, _, _ in kinds]
        self.places = {i: (passes, j) for passes, positions in self.parts for j, i in enumerate(positions)}
        self.has_curvature = False  # every parameter has some; once true, it stays true
        self.states: list[dict[str, Any]] = []
        self.state_addresses: list[list[int]] = []

    def is_current(self) -> bool:
        """Whether the parameters still lie where they lay: ``p.data = ...`` and ``model.to()`` move them."""
        return self._addresses(self.params) == self.addresses

    def _addresses(self, tensors: list[Tensor]) -> list[int]:
        return list(map(address, map(local, tensors) if self.sharded else tensors))

    def _split_tensors(self, tensors: list[Tensor], positions: list[int]) -> list[Tensor]:
        """The local parts of the tensors at ``positions``."""
        return self._split(list(map(local, tensors)) if self.sharded else tensors, positions)

    def _over_shards(self, value: Tensor) -> Tensor:
        """The sum over the processes that share the shards."""
        if self.sharded:
            dist.all_reduce(value, group=self.process_group)
        return value

    def _split(self, values: Sequence[T], positions: list[int]) -> list[T]:
        if len(self.parts) == 1:
            return values if isinstance(values, list) else list(values)
        return [values[i] for i in positions]

    def bind_grads(self, grads: list[Tensor], *, overwrite: bool = False) -> None:
        """Hands the gradients to the passes, which check them; ``overwrite`` says that an ascent follows."""
        for passes, positions in self.parts:
            passes.bind_grads(self._split_tensors(grads, positions), overwrite=overwrite)

    def bind_state(self, states: list[dict[str, Any]]) -> None:
        """Hands m and D, and x where it lives apart, to the passes, unless they have them already."""
        keys = (EXP_AVG, HESSIAN, WEIGHT) if self.variant.apart else (EXP_AVG, HESSIAN)
        tensors = [list(map(itemgetter(key), states)) for key in keys]
        addresses = [self._addresses(column) for column in tensors]
        if len(self.states) == len(states) and all(map(is_, states, self.states)) and addresses == self.state_addresses:
            return
        for passes, positions in self.parts:
            passes.bind_state(*(self._split_tensors(column, positions) for column in tensors))
        self.states, self.state_addresses = states, addresses

    @ranged("norm")
    def square_sums(self, *, of_ascent: bool) -> Tensor:
        """Squared gradient norm per group, on the first parameter's device, weighed as ``of_ascent`` asks for."""
        flags = self.adaptive if of_ascent else [False] * len(self.parts)
        sums = [passes.square_sums(adaptive=adaptive) for (passes, _), adaptive in zip(self.parts, flags, strict=True)]
        return self._total(sums)

    def _total(self, sums: Sequence[Tensor]) -> Tensor:
        """The sum over parts and over shards, on the first parameter's device."""
        total = sums[0] / self.replicas[0] if self.sharded else sums[0]
        for other, replicas in zip(sums[1:], self.replicas[1:], strict=True):
            total = total + other.to(total.device) / replicas
        return self._over_shards(total)

    @ranged("perturb")
    def perturb(self, scales: Tensor, *, take_grads: bool | Sequence[bool], seed: int) -> None:
        """Moves every parameter to x + ε."""
        for (passes, positions), adaptive, draw in zip(self.parts, self.adaptive, self.draws, strict=True):
            here = scales.to(draw.device)
            taken = take_grads if isinstance(take_grads, bool) else self._split(take_grads, positions)
            passes.perturb(here, adaptive=adaptive, take_grads=taken, seed=seed, draw=draw)

    @ranged("momentum_ascent")
    def momentum_ascent(self, scales: Tensor, seed: int) -> None:
        """Writes x + ε into every parameter, from x that lives apart and from the momentum."""
        for (passes, _), adaptive, draw in zip(self.parts, self.adaptive, self.draws, strict=True):
            passes.momentum_ascent(scales.to(draw.device), adaptive=adaptive, seed=seed, draw=draw)

    def settle(self) -> None:
        """Writes x, which lives apart, into every parameter."""
        for passes, _ in self.parts:
            passes.settle()

    @ranged("gap_sums")
    def gap_sums(self, firsts: list[Tensor]) -> Tensor:
        """‖g‖², g·g̃ and ‖g̃‖² of the gradients of the first pass and the bound ones."""
        for passes, positions in self.parts:
            passes.bind_firsts(self._split_tensors(firsts, positions))
        return self._total([passes.gap_sums() for passes, _ in self.parts])

    @ranged("decompose")
    def decompose(self, scales: Tensor) -> None:
        """Makes GSAM's descent of the bound gradients, in place."""
        for (passes, _), draw in zip(self.parts, self.draws, strict=True):
            passes.decompose(scales.to(draw.device))

    def count_draw(self, draw: int | Tensor) -> None:
        """Sets the number of the draw of rounding noise, in memory of every device."""
        for number in self.draws:
            number.copy_(draw) if isinstance(draw, Tensor) else number.fill_(draw)

    @ranged("restore")
    def restore(self) -> None:
        """Puts x back, also where a parameter was given other memory in the meantime."""
        if self.is_current():
            for passes, _ in self.parts:
                passes.restore()
            return
        for passes, positions in self.parts:
            for i, backup in zip(positions, passes.drop_backups(), strict=True):
                local(self.params[i].data).copy_(backup)

    @ranged("probe")
    def probe(self, h: float, seed: int, draw: int) -> None:
        """Adds h·z to every parameter."""
        for passes, _ in self.parts:
            passes.probe(h, seed, draw)

    def weight_norm(self) -> float:
        """‖x‖ over all parameters."""
        parts = zip(self.parts, self.replicas, strict=True)
        total = sum(passes.weight_square_sum() / replicas for (passes, _), replicas in parts)
        if self.sharded:
            total = float(self._over_shards(torch.tensor(total, dtype=torch.float64, device=self.draws[0].device)))
        return math.sqrt(total)

    @ranged("products")
    def exact_products(
        self, grads: Sequence[Tensor], due: Sequence[bool], **options: Any
    ) -> tuple[list[Product | None], float] | None:
        """Hessian-vector products of the parameters that are due with their factor, or None without a graph.

        All devices are differentiated in one call, as their graph is one.
        """
        return exact_products(self, self.params, grads, due, **options)

    def rademacher(self, positions: Sequence[int], seed: int, draw: int) -> list[Tensor]:
        """Signs z for the parameters at ``positions``."""
        if len(self.parts) == 1:
            return self.parts[0][0].rademacher(positions, seed, draw)
        wanted, signs = set(positions), dict[int, Tensor]()
        for passes, members in self.parts:
            local = [j for j, i in enumerate(members) if i in wanted]
            drawn = passes.rademacher(local, seed, draw)
            signs.update((members[j], z) for j, z in zip(local, drawn, strict=True))
        return [signs[i] for i in positions]

    def signs_in_registers(self, position: int) -> bool:
        """Whether the update can draw the signs of this parameter's product again itself."""
        passes, local = self.places[position]
        return passes.signs_in_registers(local)

    @ranged("step")
    def step(
        self,
        scalars: Sequence[StepScalars],
        cohorts: list[int],
        products: Sequence[Product | None] | None,
        seed: int,
        draw: int,
        *,
        restore: bool = False,
        stochastic: bool = False,
    ) -> Stepped:
        """Updates every parameter. Returns what it found on its way."""
        found = []
        for (passes, positions), adaptive, number in zip(self.parts, self.adaptive, self.draws, strict=True):
            if isinstance(scalars, DeviceScalars) and len(self.parts) > 1:
                scalars = DeviceScalars(scalars.table.to(number.device), scalars.powers)
            mine = None if products is None else self._split(products, positions)
            theirs = self._split(cohorts, positions)
            stepped = passes.step(
                *(scalars, theirs, mine, seed, draw),
                restore=restore,
                noise_draw=number if stochastic else None,
                sample=self.variant.sample,
                adaptive=adaptive,
            )
            found.append(stepped)
        if len(found) == 1 and not self.sharded:
            return found[0]
        squares = [stepped.square_sums for stepped in found if stepped.square_sums is not None]
        tallies = self._tallies([stepped.tallies for stepped in found]) if products is not None else None
        return Stepped(tallies, self._total(squares) if squares else None)

    def _tallies(self, tallies: Sequence[Tensor | None]) -> Tensor:
        """Those of all parts and shards, in the order of the parameters."""
        combined = torch.empty(len(self.params), 3, dtype=torch.float64, device=self.draws[0].device)
        for (_, positions), tally, replicas in zip(self.parts, tallies, self.replicas, strict=True):
            assert tally is not None
            combined[positions] = tally.to(combined.device) / replicas
        return self._over_shards(combined)
