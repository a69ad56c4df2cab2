"""What is kept between steps: the passes over the parameters that have gradients, as long as nothing moved.

Work per tensor in Python is what a small-tensor step costs, so everything here that runs every step is a ``map`` over
C functions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import reference
from ..checks import give_memory, lacks_memory, refuse_cast
from ..formats import Format, mantissa_of
from ..variant import Variant
from .accessors import address, numel, ranged, stream_of, used_here
from .layout import DeviceScalars, Scalars
from .reference import Members, Passes, Products, Stepped
from .shards import group_of, is_sharded, local, shard_of
from .upload import Constants

T = TypeVar("T")


def _are_same(tensors: list[Tensor], others: list[Tensor]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(tensors) == len(others) and all(map(is_, tensors, others))


def _columns_of(stored: Format) -> tuple[bool, bool, bool]:
    """Whether a format has corrections, scales of m and scales of D."""
    return stored.correction_bits > 0, stored.state_bits == 8, stored.state_bits == 8


class Plan:
    """Passes over a fixed list of parameters.

    They come in parts: one for each device, for each number of processes that hold the same elements of a shard, for
    parameters that ASAM's scaling covers and that it does not, for each format that they are stored in, and for those
    whose memory the kernels can't take, which go the reference's way.

    Attributes:
        params: The parameters.
        positions: Where each stands among all parameters of the optimizer.
        groups: Parameter group of each.
        spans: The slice that each group takes of every list: parameters come group by group.
        has_curvature: Whether every parameter has some. Once true, it stays true.
        states: State that is bound to the passes.
        signs_in_registers: Of each parameter, whether the update can draw the signs of its product itself.
        constants: Numbers of the host on the devices.
        formats: How each parameter and its state are stored.
        is_compact: Whether any parameter has corrections or scales beside it.
        has_corrections: Whether any has a correction.
        rounds_state: Whether any state is rounded at random.
        sees_negatives: Whether all passes take gradients with torch's negative bit for their values.
    """

    def __init__(
        self,
        params: list[Tensor],
        positions: list[int],
        groups: list[int],
        n_groups: int,
        names: list[str],
        variant: Variant,
        passes_on: Callable[[torch.device], type[Passes]],
        caller: str,
        formats: list[Format],
    ) -> None:
        """Binds the passes of each device to its parameters."""
        self.params = params
        self.positions = positions
        self.names, self.caller = names, caller
        self.formats = formats
        self.groups = groups
        self.n_groups = n_groups
        self.variant = variant
        self.ranks = list(range(len(params)))
        starts = [bisect_left(groups, g) for g in range(n_groups + 1)]
        self.spans = {g: slice(starts[g], starts[g + 1]) for g in range(n_groups) if starts[g] < starts[g + 1]}
        self.sharded = any(map(is_sharded, params))
        self.process_group = group_of(params, caller)  # that shares the shards, if there are any
        shards = list(map(shard_of, params)) if self.sharded else ()
        weights = [local(p.data) for p in params]
        members = Members(weights, positions, groups, n_groups, names, shards, caller)
        kinds: dict[tuple[torch.device, int, bool, type[Passes], Format], list[int]] = {}
        everyone = dist.get_world_size(self.process_group) if self.sharded else 1
        for i, weight in enumerate(weights):
            shard = members.shard(i)
            replicas = everyone if shard is None else shard.replicas
            passes = passes_on(weight.device)
            chosen = passes if passes.takes(weight, formats[i]) else Passes
            key = (weight.device, replicas, variant.scales_by_weight(weight.dim()), chosen, formats[i])
            kinds.setdefault(key, []).append(i)
        self.replicas = [replicas for _, replicas, _, _, _ in kinds]
        self.adaptive = [adaptive for _, _, adaptive, _, _ in kinds]
        self.parts: list[tuple[Passes, list[int]]] = [
            (chosen(replace(members.take(places) if len(kinds) > 1 else members, format=stored)), places)
            for (_, _, _, chosen, stored), places in kinds.items()
        ]
        self.draws = [torch.zeros(1, dtype=torch.int64, device=device) for device, _, _, _, _ in kinds]
        self.is_compact = any(map(any, map(_columns_of, formats)))
        self.has_corrections = any(stored.correction_bits > 0 for stored in formats)
        self.rounds_state = any(stored.state_bits < 32 for stored in formats)
        self.sees_negatives = all(passes.sees_negatives for passes, _ in self.parts)
        self.numels = [p.numel() for p in params]
        self.signs_in_registers = [False] * len(params)
        for part, places in self.parts:
            for j, i in enumerate(places):
                self.signs_in_registers[i] = part.signs_in_registers(j)
        self.has_curvature = False
        self.constants = Constants()
        self.states: list[dict[str, Any]] = []
        self._no_columns: list[tuple[list[Tensor] | None, ...]] = [(None, None, None)] * len(self.parts)
        self._state_places: list[list[int]] = []
        self._state_tensors: list[list[Tensor]] = []
        self._counts = [0] * len(self.parts)  # updates of each part before the one at hand
        self._devices = list(dict.fromkeys(device for device, *_ in kinds if device.type == "cuda"))
        self._streams = list(map(stream_of, self._devices))  # that took the last call

    def is_current(self, *, in_form: bool = True) -> bool:
        """Whether the parameters still are where and what they were. ``p.data = ...`` and ``model.to()`` change that.

        Args:
            in_form: Whether to look at size, dtype and order of elements too, not only at addresses. Once a step is
                enough: between the calls of one, the same memory does not change its form.
        """
        here = self._local(self.params)
        if len(self.parts) == 1:
            return self.parts[0][0].holds(here, in_form=in_form)
        return all(passes.holds(self._split(here, positions), in_form=in_form) for passes, positions in self.parts)

    def replaced(self) -> list[int]:
        """Positions of parameters that are not where they were, since ``p.data = ...``."""
        here = self._local(self.params)
        pairs = [pair for passes, at in self.parts for pair in zip(at, passes.members.weights, strict=True)]
        return sorted(i for i, was in pairs if (address(was), numel(was)) != (address(here[i]), numel(here[i])))

    def _local(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(map(local, tensors)) if self.sharded else tensors

    def _split_tensors(self, tensors: list[Tensor], positions: list[int]) -> list[Tensor]:
        """The local parts of the tensors at ``positions``."""
        return self._split(self._local(tensors), positions)

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
        self._begin_call()
        for passes, positions in self.parts:
            passes.bind_grads(self._split_tensors(grads, positions), overwrite=overwrite)

    def bind_state(
        self, states: list[dict[str, Any]], keys: Sequence[str], compact_keys: Sequence[str] = ("", "", "", "")
    ) -> None:
        """Hands state to the passes, if it is new.

        Args:
            states: Of every parameter.
            keys: Of m, D, and x where it is kept there.
            compact_keys: Of the correction, the scales of m and those of D, which some formats have, and of the bits of
                mantissa that the correction follows on.
        """
        self._begin_call()
        try:
            tensors = [list(map(itemgetter(key), states)) for key in keys]
        except KeyError:
            self.refuse_missing(states, keys)
        compact = self._no_columns
        if self.is_compact:
            compact = self._compact_columns(states, compact_keys)
            tensors += [column for columns in compact for column in columns if column is not None]
        # Nobody but us makes these tensors, so the same one at the same address is as large as it was.
        places = [list(map(address, self._local(column))) for column in tensors]
        if places == self._state_places and all(map(_are_same, tensors, self._state_tensors)):
            self.states = states
            return
        for number, (key, column) in enumerate(zip(keys, tensors, strict=False)):
            self._check_state(key, column, number)
        self._check_compact(states, compact_keys)
        for (passes, positions), columns in zip(self.parts, compact, strict=True):
            passes.bind_state(*(self._split_tensors(column, positions) for column in tensors[: len(keys)]))
            passes.bind_compact(*(None if column is None else self._local(column) for column in columns))
        self.states, self._state_places, self._state_tensors = states, places, tensors

    def refuse_missing(self, states: list[dict[str, Any]], keys: Sequence[str]) -> NoReturn:
        """Raises for state from which somebody has taken an entry out."""
        rows = zip(self.names, states, strict=True)
        name, key = next((name, key) for name, state in rows for key in keys if key not in state)
        raise RuntimeError(
            f"{self.caller}: the state of {name} has no {key!r}, which was taken out; put it back, or delete all of "
            "opt.state[p] to begin anew"
        )

    def _compact_columns(
        self, states: list[dict[str, Any]], keys: Sequence[str]
    ) -> list[tuple[list[Tensor] | None, ...]]:
        """Of each part, corrections and scales of its parameters, None where its format has none."""
        found: list[tuple[list[Tensor] | None, ...]] = []
        for passes, positions in self.parts:
            pairs = zip(keys, _columns_of(passes.members.format), strict=False)
            try:
                found.append(tuple([states[i][key] for i in positions] if there else None for key, there in pairs))
            except KeyError:
                self._check_compact(states, keys)
                raise
        return found

    @property
    def xs(self) -> list[Tensor]:
        """x of every parameter, where it is kept in state: the tensors that were bound last."""
        return self._state_tensors[2]

    def _begin_call(self) -> None:
        for passes, _ in self.parts:
            passes.begin_call()
        streams = list(map(stream_of, self._devices))
        if streams != self._streams:
            # Memory that was made on another stream: it must not be handed out there before this one is done with it.
            used_here([*self.draws, *self.constants.kept(), *chain.from_iterable(p.kept() for p, _ in self.parts)])
            self._streams = streams

    def _check_state(self, key: str, tensors: list[Tensor], number: int) -> None:
        """Raises if a tensor of m (0), D (1) or x (2) does not fit its parameter."""
        rows = zip(self.names, self.params, tensors, self.formats, strict=True)
        for name, param, tensor, stored in rows:
            expected = param.dtype if number == 2 else stored.dtypes(param.dtype)[number]
            if tensor.dtype != expected:
                found = f"{key!r} is {tensor.dtype}, expected {expected}"
                refuse_cast(name, param, found, caller=self.caller)
            if lacks_memory(local(tensor)):
                raise RuntimeError(
                    f"{self.caller}: {key!r} of {name} has lost its memory, as somebody has resized its storage; bring "
                    "its values back before calls of the optimizer"
                )
            if tensor.shape != param.shape:
                raise RuntimeError(
                    f"{self.caller}: {name} has shape {tuple(param.shape)}, but its {key!r} has {tuple(tensor.shape)}: "
                    "the parameter was replaced after its first step. Construct a new optimizer for it, or delete "
                    "opt.state[p] to begin anew"
                )

    def _check_compact(self, states: list[dict[str, Any]], keys: Sequence[str]) -> None:
        """Raises if the state of a parameter has a correction or scales that its format has not, or lacks them."""
        for name, param, state, stored in zip(self.names, self.params, states, self.formats, strict=True):
            for key, wanted in zip(keys, _columns_of(stored), strict=False):
                if (key in state) != wanted:
                    found = f"state {'lacks' if wanted else 'has a'} {key!r}"
                    refuse_cast(name, param, found, caller=self.caller)
            if stored.correction_bits and state.get(keys[3], mantissa_of(param.dtype)) != mantissa_of(param.dtype):
                found = f"{keys[0]!r} is of a dtype with {state[keys[3]]} bits of mantissa"
                refuse_cast(name, param, found, caller=self.caller)

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

    def ascent_scales(
        self, square_sums: Tensor, radii: Sequence[float | Tensor], offsets: Sequence[float], *, on_device: bool
    ) -> Tensor:
        """ρ over the norm per group; see :func:`reference.ascent_scales`."""
        if square_sums.device.type == "cpu" and not on_device:
            return reference.ascent_scales(square_sums, radii, offsets)
        there = (self.constants.vector(values, square_sums.device) for values in (radii, offsets))
        return reference.ascent_scales(square_sums, *there)

    @ranged("perturb")
    def perturb(self, scales: Tensor, *, take_grads: bool | Sequence[bool], seed: int) -> None:
        """Moves every parameter to x + ε."""
        for (passes, positions), adaptive, draw in zip(self.parts, self.adaptive, self.draws, strict=True):
            here = scales.to(draw.device)
            taken = take_grads if isinstance(take_grads, bool) else self._split(take_grads, positions)
            passes.perturb(here, adaptive=adaptive, take_grads=taken, seed=seed, draw=draw)

    @ranged("momentum_ascent")
    def momentum_ascent(self, scales: Tensor, seed: int) -> None:
        """Writes x + ε into every parameter, from x in state and from the momentum."""
        for (passes, _), adaptive, draw in zip(self.parts, self.adaptive, self.draws, strict=True):
            passes.momentum_ascent(scales.to(draw.device), adaptive=adaptive, seed=seed, draw=draw)

    def show_x(self) -> None:
        """Writes x, which is kept in state, into every parameter."""
        for passes, _ in self.parts:
            passes.show_x()

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

    @property
    def x_in_backup(self) -> bool:
        """Whether parameters hold x + ε of an ascent."""
        return any(passes.x_in_backup for passes, _ in self.parts)

    def forget_backups(self) -> None:
        """Gives up x of every parameter, which is not where an ascent would have put it."""
        for passes, _ in self.parts:
            passes.forget_backups()

    def _differs(self, i: int) -> bool:
        """Whether a parameter in new memory holds anything else than the memory that it had."""
        now = local(self.params[i].data)
        if lacks_memory(now):
            return True
        before = next(passes.members.weights[at.index(i)] for passes, at in self.parts if i in at)
        return now.shape != before.shape or not torch.equal(now.to(before), before)

    @ranged("restore")
    def restore(self) -> list[str]:
        """Puts x back where an ascent has moved it, also if a parameter was given other memory in the meantime.

        Returns:
            The names of such parameters whose values changed with it.
        """
        self._begin_call()
        current = self.is_current(in_form=False)
        others = [] if current or not self.x_in_backup else [self.names[i] for i in self.replaced() if self._differs(i)]
        for passes, positions in self.parts:
            if current or not passes.x_in_backup:
                passes.restore()
                continue
            for i, backup in zip(positions, passes.backups, strict=True):
                here = local(self.params[i].data)
                if here.shape != backup.shape and not self.sharded:
                    self.params[i].data = backup.detach().clone().to(here.device, here.dtype)  # x has its own shape
                    continue
                give_memory(here)
                here.copy_(backup)
            passes.forget_backups()
        return others

    @ranged("probe")
    def probe(self, h: Tensor, seed: int, draw: int) -> None:
        """Adds h·z to every parameter; h is a 0-d float64 tensor."""
        self._begin_call()
        if not self.is_current(in_form=False):
            lost = [name for name, p in zip(self.names, self.params, strict=True) if lacks_memory(local(p.data))]
            name = (lost or [self.names[i] for i in self.replaced()])[0]
            how = "has lost its memory, as somebody has resized its storage" if lost else "was changed by p.data = ..."
            raise RuntimeError(
                f"{self.caller}: a probe would not move {name}, which {how}; move the line that does so to after step()"
            )
        for (passes, _), number in zip(self.parts, self.draws, strict=True):
            passes.probe(h.to(number.device), seed, draw)

    def weight_norm(self) -> Tensor:
        """‖x‖ over all parameters, on the first one's device."""
        return self._total([passes.weight_square_sum() for passes, _ in self.parts]).sqrt()

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

    @ranged("step")
    def step(
        self,
        scalars: Scalars,
        cohorts: list[int],
        products: Products | None,
        seed: int,
        draw: int,
        *,
        restore: bool = False,
        stochastic: bool = False,
        zero_is_seen: bool = False,
    ) -> None:
        """Updates every parameter. Parts that an interrupted call has updated already are left alone."""
        columns = zip(self.parts, self.adaptive, self.draws, self._counts, strict=True)
        for (passes, positions), adaptive, number, count in columns:
            if passes.updates > count:
                continue
            if isinstance(scalars, DeviceScalars) and len(self.parts) > 1:
                scalars = DeviceScalars(scalars.table.to(number.device), scalars.powers)
            mine = products if products is None or len(self.parts) == 1 else products.take(positions)
            passes.step(
                *(scalars, self._split(cohorts, positions), mine, seed, draw),
                restore=restore,
                noise_draw=number if stochastic else None,
                state_draw=number if passes.members.format.state_bits < 32 else None,
                sample=self.variant.sample,
                zero_is_seen=zero_is_seen,
                adaptive=adaptive,
            )

    @ranged("unseen")
    def unseen_sums(self) -> Tensor:
        """After a refresh: what it did not see of every parameter, over all parts and shards."""
        sums = [passes.unseen_sums() for passes, _ in self.parts]
        return sums[0] if len(self.parts) == 1 and not self.sharded else self._rows(sums)

    @ranged("unseen")
    def fill_unseen(self, sums: Tensor) -> None:
        """Gives elements that no refresh has seen yet the mean curvature of the others of their parameter."""
        for (passes, positions), draw in zip(self.parts, self.draws, strict=True):
            passes.fill_unseen(sums if len(self.parts) == 1 else sums[positions].to(draw.device))

    def end_step(self) -> None:
        """Lets go of the gradients and products of an update."""
        for passes, _ in self.parts:
            passes.end_step()

    @property
    def step_has_run(self) -> bool:
        """Whether any part has run the update at hand."""
        return any(passes.updates > count for (passes, _), count in zip(self.parts, self._counts, strict=True))

    def begin_step(self) -> None:
        """Lets the next call of :meth:`step` be another update."""
        self._counts = [passes.updates for passes, _ in self.parts]

    def found(self) -> Stepped:
        """What the last update found on its way, over all parts and shards."""
        if len(self.parts) == 1 and not self.sharded:
            return self.parts[0][0].found
        found = [passes.found for passes, _ in self.parts]
        squares = [part.square_sums for part in found if part.square_sums is not None]
        tallies = [part.tallies for part in found if part.tallies is not None]
        return Stepped(self._rows(tallies) if tallies else None, self._total(squares) if squares else None)

    def _rows(self, rows: Sequence[Tensor]) -> Tensor:
        """Those of all parts and shards, in the order of the parameters."""
        combined = torch.empty(len(self.params), rows[0].shape[1], dtype=torch.float64, device=self.draws[0].device)
        for (_, positions), part in zip(self.parts, rows, strict=True):
            combined[positions] = part.to(combined.device)
        return self.over_shards(combined)

    def over_shards(self, rows: Tensor) -> Tensor:
        """Numbers of every parameter, summed over its shards. Takes the memory of ``rows``, if there are any."""
        if self.sharded:
            for (_, positions), replicas in zip(self.parts, self.replicas, strict=True):
                rows[positions] /= replicas
        return self._over_shards(rows)
