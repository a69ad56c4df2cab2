"""Passes over a table of addresses that is kept between steps: what all backends with kernels have in common.

Handing a list of tensors to a kernel costs about as much per tensor as updating a small tensor does. So addresses of
parameters and state are written into a table once, and a step passes one list: its gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ..formats import FULL, Format
from ..variant import Sample
from . import layout
from .accessors import address, is_contiguous, numel
from .layout import DeviceScalars, Scalars
from .reference import Members, Passes, Products, Stepped, check_grads


def integers(values: Sequence[int]) -> Tensor:
    """A column of the table, in host memory whatever torch's default device is."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def sign_rows(outs: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
    """A table of contiguous tensors alone, in the column of parameters, with as much as signs need of each."""
    table = torch.zeros(len(outs), layout.ROW_WORDS, dtype=torch.int64, device="cpu")
    for column, values in (
        (layout.PARAM, map(address, outs)),
        (layout.NUMEL, map(numel, outs)),
        (layout.DTYPE, (layout.DTYPES[out.dtype] for out in outs)),
        (layout.INDEX, indices),
    ):
        table[:, column] = integers(list(values))
    return table


def _has_order_of(tensor: Tensor, weight: Tensor) -> bool:
    """Whether the memory of a tensor holds its values, and in the order of a weight's."""
    return tensor.stride() == weight.stride() and not (tensor.is_neg() or tensor._is_zerotensor())


class TablePasses(Passes, ABC):
    """Passes of kernels that take a table, in host memory, with a row for each member.

    A backend provides the methods under "kernels".
    """

    takes_compact = False  # whether there are kernels for all formats
    sees_negatives = True  # by binding, which finds that they do not fit, and costs nothing more

    @override
    @classmethod
    def takes(cls, weight: Tensor, stored: Format = FULL) -> bool:
        """Kernels need elements without gaps, and in logical order where rounding noise is numbered by element."""
        if stored != FULL and not cls.takes_compact:
            return False
        if weight.dtype in (torch.float32, torch.float64):
            return bool(torch.ops.aten.is_non_overlapping_and_dense(weight))
        return weight.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()

    def __init__(self, members: Members) -> None:
        """Writes the table of the members."""
        super().__init__(members)
        self.weights = members.weights
        self.device = members.weights[0].device
        self.all_row_major = all(map(is_contiguous, self.weights))
        self.table = torch.zeros(len(self.weights), layout.ROW_WORDS, dtype=torch.int64, device="cpu")
        self.columns = self.table.unbind(1)
        self.columns[layout.INDEX].copy_(integers(members.indices))
        self.columns[layout.GROUP].copy_(integers(members.groups))
        self.columns[layout.FORMAT].fill_(members.format.code)
        self.bind(layout.PARAM, self.weights)
        # Members whose elements the kernels can number: in logical order, and not a part of their parameter.
        self.numbered = [w.is_contiguous() and members.shard(i) is None for i, w in enumerate(self.weights)]
        self._cohorts: Sequence[int] | None = None
        self._keep: list[Tensor] = []  # whatever the table points to that nobody else holds
        self._shared: int | None = None  # gradients that share memory with others, None if nobody has looked
        self._backs_up_in_grads = False  # whether the table says that x is kept in the memory of the bound gradients
        self._spare: list[Tensor] = []  # memory for x where gradients need theirs, from the first such ascent on
        self._refitted: list[tuple[Tensor, Tensor]] = []  # gradients in another layout, and their copies

    # ---- tensors ------------------------------------------------------------------------------------------------

    @override
    def bind_state(self, exp_avgs: list[Tensor], hessians: list[Tensor], xs: list[Tensor] | None = None) -> None:
        super().bind_state(exp_avgs, hessians, xs)
        self._bind_columns({layout.EXP_AVG: exp_avgs, layout.HESSIAN: hessians, layout.BACKUP: xs})

    @override
    def bind_compact(
        self, corrections: list[Tensor] | None, exp_avg_scales: list[Tensor] | None, hessian_scales: list[Tensor] | None
    ) -> None:
        super().bind_compact(corrections, exp_avg_scales, hessian_scales)
        scales = {layout.EXP_AVG_SCALE: exp_avg_scales, layout.HESSIAN_SCALE: hessian_scales}
        self._bind_columns({layout.CORRECTION: corrections, **scales})

    def _bind_columns(self, columns: Mapping[int, list[Tensor] | None]) -> None:
        """Writes state into columns, those of None excepted."""
        for column, tensors in columns.items():
            misfits, _ = self.bind(column, tensors) if tensors is not None else (0, 0)
            if misfits:
                raise RuntimeError(
                    f"{self.members.caller}: {misfits} tensors of optimizer state do not have the layout of their "
                    "parameters; reload them with load_state_dict, which copies them into place"
                )

    @override
    def bind_firsts(self, firsts: list[Tensor]) -> None:
        self.firsts, _ = self._bind_gradients(layout.FIRST, firsts)

    @override
    def bind_grads(self, grads: list[Tensor], *, overwrite: bool = False) -> None:
        self._backs_up_in_grads = False
        self.grads, self._shared = self._bind_gradients(layout.GRAD, grads)
        if overwrite and self._shared == 0 and self.xs is None:
            # Where x will most likely be kept. The norm then takes the table of the ascent.
            self.columns[layout.BACKUP].copy_(self.columns[layout.GRAD])
            self._backs_up_in_grads = True
        self._refitted = []
        if self.grads is not grads:
            self._refitted = [(g, copy) for g, copy in zip(grads, self.grads, strict=True) if copy is not g]

    def _bind_gradients(self, column: int, grads: list[Tensor]) -> tuple[list[Tensor], int]:
        """Writes gradients into a column; those in another layout than their parameter's are copied into it.

        So are those with torch's negative bit, whose memory holds the opposite of their values.
        """
        misfits, shared = self.bind(column, grads)
        if not misfits:
            return grads, shared
        check_grads(self.members, grads)
        pairs = zip(grads, self.weights, strict=True)
        fitted = [g if _has_order_of(g, w) else torch.empty_like(w).copy_(g) for g, w in pairs]
        _, shared = self.bind(column, fitted)
        return fitted, shared

    def _bind_products(self, products: Products) -> None:
        """Writes products into their column; those in another layout or dtype are copied into the parameter's."""
        flags = self.columns[layout.FLAGS]
        flags.bitwise_and_(~(layout.SIGNED_PRODUCT | layout.PROBE_GRADIENT)).bitwise_or_(integers(products.kinds))
        self._keep = [value for value in products.values if value is not None]
        if len(self._keep) == len(self.weights):
            misfits, _ = self.bind(layout.PRODUCT, self._keep)
            if not misfits:
                return
        self._keep, addresses = [], []
        for value, weight in zip(products.values, self.weights, strict=True):
            if value is not None and not (_has_order_of(value, weight) and value.dtype == weight.dtype):
                value = torch.empty_like(weight).copy_(value)
            addresses.append(0 if value is None else value.data_ptr())
            self._keep.append(value)  # type: ignore[arg-type]
        self.columns[layout.PRODUCT].copy_(integers(addresses))

    @override
    def kept(self) -> list[Tensor]:
        return [*super().kept(), *self._spare]

    def doubles(self, *sizes: int) -> Tensor:
        """Memory for sums, which a kernel fills."""
        return torch.empty(sizes, dtype=torch.float64, device=self.device)

    # ---- passes -------------------------------------------------------------------------------------------------

    @override
    def square_sums(self, *, adaptive: bool) -> Tensor:
        sums = self.doubles(self.members.n_groups)
        self.launch("square_sums", sums, layout.GRAD, adaptive)
        return sums

    @override
    def weight_square_sum(self) -> Tensor:
        sums = self.doubles(self.members.n_groups)
        self.launch("square_sums", sums, layout.PARAM if self.xs is None else layout.BACKUP, False)
        return sums.sum()

    @override
    def perturb(
        self, scales: Tensor, *, adaptive: bool, take_grads: bool | Sequence[bool], seed: int, draw: Tensor
    ) -> None:
        if self._shared == 0 and (take_grads if isinstance(take_grads, bool) else all(take_grads)):
            self.backups = self.grads
            if not self._backs_up_in_grads:
                self.columns[layout.BACKUP].copy_(self.columns[layout.GRAD])
        else:
            self.backups = self._backups(take_grads)
            self.bind(layout.BACKUP, self.backups)
        self.launch("perturb", scales, adaptive, seed, draw, self.journal)
        self.grads = []

    def _backups(self, take_grads: bool | Sequence[bool]) -> list[Tensor]:
        """Memory for x: that of a gradient where it may be taken and is not shared, else new."""
        if take_grads is False:  # kept, as the kernel of an operating system takes its time to find so much
            if not self._spare:
                self._spare = [torch.empty_like(w) for w in self.weights]
            return self._spare
        taken = repeat(True) if isinstance(take_grads, bool) else take_grads
        owned = (self.columns[layout.FLAGS] & layout.OWNS_BUFFER).tolist()
        rows = zip(self.grads, self.weights, taken, owned, strict=False)
        return [g if take and own else torch.empty_like(w) for g, w, take, own in rows]

    @override
    def restore(self) -> None:
        if self.x_in_backup:
            self.launch("restore", self.journal)
        self.backups = []

    @override
    def momentum_ascent(self, scales: Tensor, *, adaptive: bool, seed: int, draw: Tensor) -> None:
        self.launch("momentum_ascent", scales, adaptive, seed, draw)

    @override
    def show_x(self) -> None:
        self.launch("restore", self.journal)

    @override
    def gap_sums(self) -> Tensor:
        sums = self.doubles(layout.GAP_WORDS)
        self.launch("gap_sums", sums)
        return sums

    @override
    def decompose(self, scales: Tensor) -> None:
        self.launch("decompose", scales)
        self.firsts = []
        for given, copy in self._refitted:
            given.copy_(copy)

    @override
    def rademacher(self, positions: Sequence[int], seed: int, draw: int) -> list[Tensor]:
        members = self.members
        if members.shards or not positions:  # shards are numbered by element of the whole parameter
            return super().rademacher(positions, seed, draw)
        chosen = [self.weights[i] for i in positions]
        signs = list(map(torch.empty_like, chosen))
        if not self.all_row_major:
            signs = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in chosen]
        self.draw_signs(signs, [members.indices[i] for i in positions], seed, draw)
        return signs

    @override
    def probe(self, h: Tensor, seed: int, draw: int) -> None:
        if any(self.numbered):
            self.add_signs(h, seed, draw)
        if not all(self.numbered):
            others = [i for i, is_numbered in enumerate(self.numbered) if not is_numbered]
            Passes(self.members.take(others)).probe(h, seed, draw)

    def numbered_members(self) -> tuple[list[Tensor], list[int]]:
        """Members whose elements the kernels can number, and the position of each among all parameters."""
        rows = [i for i, is_numbered in enumerate(self.numbered) if is_numbered]
        return [self.weights[i] for i in rows], [self.members.indices[i] for i in rows]

    @override
    def signs_in_registers(self, position: int) -> bool:
        return self.numbered[position]

    @override
    def step(
        self,
        scalars: Scalars,
        cohorts: Sequence[int],
        products: Products | None,
        seed: int,
        draw: int,
        *,
        restore: bool = False,
        noise_draw: Tensor | None = None,
        state_draw: Tensor | None = None,
        sample: Sample = Sample.ABS,
        zero_is_seen: bool = False,
        adaptive: bool = False,
    ) -> Stepped:
        if cohorts is not self._cohorts and cohorts != self._cohorts:
            self.columns[layout.COHORT].copy_(integers(cohorts))
        self._cohorts = cohorts
        if not restore and self.xs is None:
            self.columns[layout.BACKUP].copy_(self.columns[layout.PARAM])
        tallies = None
        if products is not None:
            self._bind_products(products)
            tallies = self.doubles(len(self.weights), layout.TALLY_WORDS)
        squares = None if self.xs is None else self.doubles(self.members.n_groups)
        self.found = Stepped(tallies, squares)
        table, power = self.scalar_table(scalars), common_power(scalars)
        args = (table, seed, draw, noise_draw, int(sample), zero_is_seen, adaptive)
        self._rounding = seed, state_draw
        self.launch("step", *args, tallies, squares, self.journal, power, state_draw)
        if restore:
            self.backups = []
        return self.found

    @override
    def unseen_sums(self) -> Tensor:
        sums = self.doubles(len(self.weights), layout.UNSEEN_WORDS)
        self.launch("unseen_sums", self.found.tallies, sums)
        return sums

    @override
    def fill_unseen(self, sums: Tensor) -> None:
        self.launch("fill_unseen", sums, *self._rounding)

    @override
    def end_step(self) -> None:
        if self._keep:  # of a refresh
            self.columns[layout.PRODUCT].zero_()
        self.grads, self._keep, self._refitted = [], [], []

    def scalar_table(self, scalars: Scalars) -> Tensor:
        """The scalars as one float64 tensor where the kernels read it, a row per cohort."""
        if isinstance(scalars, DeviceScalars):
            return scalars.table
        flat = torch.frombuffer(array("d", chain.from_iterable(scalars)), dtype=torch.float64)
        return flat.view(len(scalars), -1)

    # ---- kernels ------------------------------------------------------------------------------------------------

    @abstractmethod
    def bind(self, column: int, tensors: Sequence[Tensor]) -> tuple[int, int]:
        """Writes addresses into a column, and with parameters also size, dtype and layout.

        Returns:
            How many tensors do not fit their row in dtype, shape or order of elements, and how many gradients share
            memory with others.
        """

    @abstractmethod
    def launch(self, op: str, *args: Any) -> None:
        """Runs the kernel of a pass over the table. Arguments are those of ``table_<op>`` in ``csrc/table_ops.h``."""

    @abstractmethod
    def draw_signs(self, outs: list[Tensor], indices: list[int], seed: int, draw: int) -> None:
        """Writes signs into contiguous tensors."""

    @abstractmethod
    def add_signs(self, h: Tensor, seed: int, draw: int) -> None:
        """Adds h·z to the members that are numbered."""


def common_power(scalars: Scalars) -> float | None:
    """The Hessian power that all cohorts share, if there is one."""
    powers = scalars.powers if isinstance(scalars, DeviceScalars) else [row.power for row in scalars]
    return powers[0] if powers.count(powers[0]) == len(powers) else None
