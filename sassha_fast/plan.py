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
from torch import Tensor

from . import backends
from .accessors import address
from .capturable import DeviceScalars
from .hutchinson import exact_products
from .passes import Members, Passes, Product
from .scalars import StepScalars
from .state import EXP_AVG, HESSIAN

__all__ = ["Plan"]

T = TypeVar("T")


class Plan:
    """Passes over a fixed list of parameters, one set for each device they are on."""

    def __init__(
        self,
        params: list[Tensor],
        indices: list[int],
        groups: list[int],
        n_groups: int,
        names: list[str],
        backend: str,
    ) -> None:
        """Binds the backend of each device to its parameters."""
        self.params = params
        self.names = names
        self.groups = groups
        self.ranks = list(range(len(params)))
        # Parameters come group by group: the slice that each group takes of every list.
        starts = [bisect_left(groups, g) for g in range(n_groups + 1)]
        self.spans = {g: slice(starts[g], starts[g + 1]) for g in range(n_groups) if starts[g] < starts[g + 1]}
        self.addresses = list(map(address, params))
        members = Members([p.data for p in params], indices, groups, n_groups, names)
        by_device: dict[torch.device, list[int]] = {}
        for i, p in enumerate(params):
            by_device.setdefault(p.device, []).append(i)
        self.parts: list[tuple[Passes, list[int]]] = [
            (backends.choose(backend, device)(members.take(positions) if len(by_device) > 1 else members), positions)
            for device, positions in by_device.items()
        ]
        self.draws = [torch.zeros(1, dtype=torch.int64, device=device) for device in by_device]
        self.places = {i: (passes, j) for passes, positions in self.parts for j, i in enumerate(positions)}
        self.has_curvature = False  # every parameter has some; once true, it stays true
        self.states: list[dict[str, Any]] = []
        self.state_addresses: list[list[int]] = []

    def is_current(self) -> bool:
        """Whether the parameters still lie where they lay: ``p.data = ...`` and ``model.to()`` move them."""
        return list(map(address, self.params)) == self.addresses

    def _split(self, values: Sequence[T], positions: list[int]) -> list[T]:
        if len(self.parts) == 1:
            return values if isinstance(values, list) else list(values)
        return [values[i] for i in positions]

    def bind_grads(self, grads: list[Tensor], *, overwrite: bool = False) -> None:
        """Hands the gradients to the passes, which check them; ``overwrite`` says that an ascent follows."""
        for passes, positions in self.parts:
            passes.bind_grads(self._split(grads, positions), overwrite=overwrite)

    def bind_state(self, states: list[dict[str, Any]]) -> None:
        """Hands m and D to the passes, unless they have them already."""
        tensors = [list(map(itemgetter(key), states)) for key in (EXP_AVG, HESSIAN)]
        addresses = [list(map(address, column)) for column in tensors]
        if len(self.states) == len(states) and all(map(is_, states, self.states)) and addresses == self.state_addresses:
            return
        for passes, positions in self.parts:
            passes.bind_state(*(self._split(column, positions) for column in tensors))
        self.states, self.state_addresses = states, addresses

    def square_sums(self, *, adaptive: bool) -> Tensor:
        """Squared gradient norm per group, on the first parameter's device."""
        sums = [passes.square_sums(adaptive=adaptive) for passes, _ in self.parts]
        total = sums[0]
        for other in sums[1:]:
            total = total + other.to(total.device)
        return total

    def perturb(self, scales: Tensor, *, adaptive: bool, take_grads: bool | Sequence[bool], seed: int) -> None:
        """Moves every parameter to x + ε."""
        for (passes, positions), draw in zip(self.parts, self.draws, strict=True):
            here = scales.to(passes.members.weights[0].device)
            taken = take_grads if isinstance(take_grads, bool) else self._split(take_grads, positions)
            passes.perturb(here, adaptive=adaptive, take_grads=taken, seed=seed, draw=draw)

    def count_draw(self, draw: int | Tensor) -> None:
        """Sets the number of the draw of rounding noise, in memory of every device."""
        for number in self.draws:
            number.copy_(draw) if isinstance(draw, Tensor) else number.fill_(draw)

    def restore(self) -> None:
        """Puts x back, also where a parameter was given other memory in the meantime."""
        if self.is_current():
            for passes, _ in self.parts:
                passes.restore()
            return
        for passes, positions in self.parts:
            for i, backup in zip(positions, passes.drop_backups(), strict=True):
                self.params[i].data.copy_(backup)

    def probe(self, h: float, seed: int, draw: int) -> None:
        """Adds h·z to every parameter."""
        for passes, _ in self.parts:
            passes.probe(h, seed, draw)

    def weight_norm(self) -> float:
        """‖x‖ over all parameters."""
        return math.sqrt(sum(passes.weight_square_sum() for passes, _ in self.parts))

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
    ) -> Tensor | None:
        """Updates every parameter. On a refresh, returns what each one's products looked like (see ``Passes.step``)."""
        tallies = []
        for (passes, positions), number in zip(self.parts, self.draws, strict=True):
            if isinstance(scalars, DeviceScalars) and len(self.parts) > 1:
                scalars = DeviceScalars(scalars.table.to(number.device), scalars.powers)
            mine = None if products is None else self._split(products, positions)
            theirs, noise = self._split(cohorts, positions), number if stochastic else None
            tallies.append(passes.step(scalars, theirs, mine, seed, draw, restore=restore, noise_draw=noise))
        if products is None:
            return None
        if len(tallies) == 1:
            return tallies[0]
        combined = torch.empty(len(self.params), 3, dtype=torch.float64)
        for (_, positions), tally in zip(self.parts, tallies, strict=True):
            assert tally is not None
            combined[positions] = tally.cpu()
        return combined
