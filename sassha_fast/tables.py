"""Passes over a table of addresses that is kept between steps: what all backends with kernels have in common.

Handing a list of tensors to a kernel costs about as much per tensor as updating a small tensor does. So addresses of
parameters and state are written into a table once, and a step passes one list: its gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from itertools import chain, repeat
from typing import TypeVar

import torch
from torch import Tensor

from .accessors import address, is_contiguous
from .capturable import DeviceScalars
from .passes import Members, Passes, Product, Stepped, check_grads
from .scalars import StepScalars
from .variant import Sample

__all__ = ["TablePasses", "fits_kernels"]

# Columns of the table: struct Row in csrc/params.h.
PARAM, GRAD, BACKUP, EXP_AVG, HESSIAN, PRODUCT, FIRST, NUMEL, LAYOUT, DTYPE, INDEX, GROUP, COHORT, FLAGS = range(14)
ROW_WORDS = 14
OWNS_BUFFER, SIGNED_PRODUCT, PROBE_GRADIENT = 1, 2, 4

T = TypeVar("T")


def _numbers(values: Sequence[int]) -> Tensor:
    """A column of the table, in host memory whatever torch's default device is."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def fits_kernels(weight: Tensor) -> bool:
    """Whether the kernels take the tensor as it lies in memory.

    They need its elements without gaps, and in logical order where rounding noise is numbered by element.
    """
    if weight.dtype in (torch.float32, torch.float64):
        return bool(torch.ops.aten.is_non_overlapping_and_dense(weight))
    return weight.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()


class TablePasses(Passes, ABC):
    """Passes of kernels that take a table, in host memory. Members whose memory they can't take go the reference's way.

    A backend provides the methods under "kernels"; the table has a row for each member in ``self.native``, whose
    weights are ``self.weights``.
    """

    def __init__(self, members: Members) -> None:
        """Writes the table of the members that the kernels take."""
        super().__init__(members)
        self.native = [i for i, weight in enumerate(members.weights) if fits_kernels(weight)]
        odd = sorted(set(range(len(members.weights))) - set(self.native))
        self.odd = odd
        self.rest = Passes(members.take(odd)) if odd else None
        own = members.take(self.native)
        self.weights = own.weights
        self.all_row_major = not odd and all(map(is_contiguous, own.weights))
        self.table = torch.zeros(len(self.native), ROW_WORDS, dtype=torch.int64, device="cpu")
        self.columns = self.table.unbind(1)
        self.table[:, INDEX] = _numbers(own.indices)
        self.table[:, GROUP] = _numbers(own.groups)
        self.cohorts: Sequence[int] | None = None
        self.bind(PARAM, own.weights)
        self.keep: list[Tensor] = []  # whatever the table points to that nobody else holds
        self.checked = False
        self.shared = 0
        self.spare: list[Tensor] = []  # memory for x where gradients need theirs, from the first such ascent on
        self.refitted: list[tuple[Tensor, Tensor]] = []  # gradients in another layout, and their copies

    def bind_state(self, exp_avgs: list[Tensor], hessians: list[Tensor], apart: list[Tensor] | None = None) -> None:
        """See :meth:`Passes.bind_state`. State in another layout than its parameter's is rejected."""
        super().bind_state(exp_avgs, hessians, apart)
        for column, tensors in ((EXP_AVG, exp_avgs), (HESSIAN, hessians), (BACKUP, apart)):
            misfits, _ = self.bind(column, self._pick(tensors)) if tensors is not None else (0, 0)
            if misfits:
                raise RuntimeError(
                    f"SASSHA: {misfits} tensors of optimizer state do not have the layout of their parameters; "
                    "reload them with load_state_dict, which copies them into place"
                )
        if self.rest is not None:
            m, d, x = (
                None if column is None else [column[i] for i in self.odd] for column in (exp_avgs, hessians, apart)
            )
            self.rest.bind_state(m or [], d or [], x)

    def bind_firsts(self, firsts: list[Tensor]) -> None:
        """See :meth:`Passes.bind_firsts`. Gradients in another layout are copied into the parameter's."""
        mine = self._pick(firsts)
        misfits, _ = self.bind(FIRST, mine)
        if misfits:
            check_grads(self.members.names, self.members.weights, firsts)
            mine = self._fitted(mine)
            self.bind(FIRST, mine)
        self.firsts = mine
        if self.rest is not None:
            self.rest.bind_firsts([firsts[i] for i in self.odd])

    def bind_grads(self, grads: list[Tensor], *, overwrite: bool = False) -> None:
        """See :meth:`Passes.bind_grads`. Gradients in another layout are copied into the parameter's."""
        if self.checked and not overwrite and self.all_row_major and all(map(is_contiguous, grads)):
            # Nothing to find out about the gradients but where they are, which is cheaper than handing them over.
            addresses = array("q", map(address, grads))
            self.columns[GRAD].copy_(torch.frombuffer(addresses, dtype=torch.int64))
            self.grads, self.refitted = grads, []
            return
        if not self.checked:  # from then on, torch itself lets nothing else become the gradient of these parameters
            check_grads(self.members.names, self.members.weights, grads)
            self.checked = True
        given = mine = self._pick(grads)
        misfits, self.shared = self.bind(GRAD, mine)
        self.refitted = []
        if misfits:
            check_grads(self.members.names, self.members.weights, grads)
            mine = self._fitted(given)
            _, self.shared = self.bind(GRAD, mine)
            self.refitted = [(g, copy) for g, copy in zip(given, mine, strict=True) if copy is not g]
        self.grads = mine
        if self.rest is not None:
            self.rest.bind_grads([grads[i] for i in self.odd])

    def square_sums(self, *, adaptive: bool) -> Tensor:
        """See :meth:`Passes.square_sums`."""
        sums = self.kernel_square_sums(adaptive)
        return sums if self.rest is None else sums + self.rest.square_sums(adaptive=adaptive)

    def perturb(
        self, scales: Tensor, *, adaptive: bool, take_grads: bool | Sequence[bool], seed: int, draw: Tensor
    ) -> None:
        """See :meth:`Passes.perturb`."""
        into_grads = self.shared == 0 and (take_grads if isinstance(take_grads, bool) else all(take_grads))
        if into_grads:
            self.backups = self.grads
            self.columns[BACKUP].copy_(self.columns[GRAD])
        else:
            self.backups = self._backups(take_grads)
            self.bind(BACKUP, self.backups)
        self.kernel_perturb(scales, adaptive, seed, draw)
        self.grads = []
        if self.rest is not None:
            self.rest.perturb(scales, adaptive=adaptive, take_grads=False, seed=seed, draw=draw)

    def _backups(self, take_grads: bool | Sequence[bool]) -> list[Tensor]:
        """Memory for x: that of a gradient where it may be taken and is not shared, else new."""
        if take_grads is False:  # kept, as the kernel of an operating system takes its time to find so much
            if not self.spare:
                self.spare = [torch.empty_like(w) for w in self.weights]
            return self.spare
        taken = repeat(True) if isinstance(take_grads, bool) else self._pick(take_grads)
        owned = (self.table[:, FLAGS] & OWNS_BUFFER).tolist()
        rows = zip(self.grads, self.weights, taken, owned, strict=False)
        return [g if take and own else torch.empty_like(w) for g, w, take, own in rows]

    def restore(self) -> None:
        """See :meth:`Passes.restore`."""
        self.kernel_restore()
        self.backups = []
        if self.rest is not None:
            self.rest.restore()

    def momentum_ascent(self, scales: Tensor, *, adaptive: bool, seed: int, draw: Tensor) -> None:
        """See :meth:`Passes.momentum_ascent`."""
        self.kernel_momentum_ascent(scales, adaptive, seed, draw)
        if self.rest is not None:
            self.rest.momentum_ascent(scales, adaptive=adaptive, seed=seed, draw=draw)

    def settle(self) -> None:
        """See :meth:`Passes.settle`."""
        self.kernel_restore()
        if self.rest is not None:
            self.rest.settle()

    def gap_sums(self) -> Tensor:
        """See :meth:`Passes.gap_sums`."""
        sums = self.kernel_gap_sums()
        return sums if self.rest is None else sums + self.rest.gap_sums()

    def decompose(self, scales: Tensor) -> None:
        """See :meth:`Passes.decompose`."""
        self.kernel_decompose(scales)
        self.firsts = []
        for given, copy in self.refitted:
            given.copy_(copy)
        if self.rest is not None:
            self.rest.decompose(scales)

    def drop_backups(self) -> list[Tensor]:
        """See :meth:`Passes.drop_backups`."""
        backups = dict(zip(self.native, super().drop_backups(), strict=True))
        if self.rest is not None:
            backups.update(zip(self.odd, self.rest.drop_backups(), strict=True))
        return [backups[i] for i in range(len(backups))]

    def rademacher(self, positions: Sequence[int], seed: int, draw: int) -> list[Tensor]:
        """See :meth:`Passes.rademacher`."""
        members = self.members
        shards = any(members.shard(i) is not None for i in positions)
        if shards or not positions:  # shards are numbered by element of the whole parameter
            return super().rademacher(positions, seed, draw)
        signs = [torch.empty_like(members.weights[i], memory_format=torch.contiguous_format) for i in positions]
        self.kernel_rademacher(signs, [members.indices[i] for i in positions], seed, draw)
        return signs

    def probe(self, h: float, seed: int, draw: int) -> None:
        """See :meth:`Passes.probe`."""
        members = self.members
        rows = [i for i in self.native if members.weights[i].is_contiguous() and members.shard(i) is None]
        if rows:
            self.kernel_probe([members.weights[i] for i in rows], [members.indices[i] for i in rows], h, seed, draw)
        others = sorted(set(range(len(members.weights))) - set(rows))
        if others:  # signs are numbered by logical element
            Passes(members.take(others)).probe(h, seed, draw)

    def weight_square_sum(self) -> float:
        """See :meth:`Passes.weight_square_sum`."""
        if self.apart is not None:
            return super().weight_square_sum()
        rest = 0.0 if self.rest is None else self.rest.weight_square_sum()
        return float(self.kernel_weight_square_sum()) + rest if self.native else rest

    def signs_in_registers(self, position: int) -> bool:
        """See :meth:`Passes.signs_in_registers`. Signs are numbered by logical element of the whole parameter."""
        return self.members.weights[position].is_contiguous() and self.members.shard(position) is None

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
        sample: Sample = Sample.ABS,
        adaptive: bool = False,
    ) -> Stepped:
        """See :meth:`Passes.step`."""
        if cohorts is not self.cohorts and cohorts != self.cohorts:
            self.table[:, COHORT] = _numbers(self._pick(cohorts))
        self.cohorts = cohorts
        numbers = self.scalar_table(scalars)
        if not restore and self.apart is None:
            self.columns[BACKUP].copy_(self.columns[PARAM])
        if products is not None:
            self._bind_products(self._pick(products))
        stepped = self._kernel_step(numbers, products is not None, seed, draw, noise_draw, sample, adaptive)
        if products is not None:
            self.table[:, PRODUCT] = 0
        self.grads, self.keep = [], []
        if restore:
            self.backups = []
        if self.rest is None:
            return stepped
        mine = None if products is None else [products[i] for i in self.odd]
        options = {"restore": restore, "noise_draw": noise_draw, "sample": sample, "adaptive": adaptive}
        rest = self.rest.step(scalars, [cohorts[i] for i in self.odd], mine, seed, draw, **options)  # type: ignore[arg-type]
        return self._together(stepped, rest)

    def _kernel_step(
        self,
        scalars: Tensor,
        refresh: bool,
        seed: int,
        draw: int,
        noise_draw: Tensor | None,
        sample: Sample,
        adaptive: bool,
    ) -> Stepped:
        """The update of the table by the kernel that fits."""
        if self.apart is not None:
            if refresh:
                return Stepped(*self.kernel_apart_refresh_step(scalars, adaptive, seed, draw, noise_draw, sample))
            return Stepped(None, self.kernel_apart_step(scalars, adaptive, seed, noise_draw))
        if refresh:
            return Stepped(self.kernel_refresh_step(scalars, seed, draw, noise_draw, sample))
        self.kernel_step(scalars, seed, noise_draw)
        return Stepped()

    def _together(self, table: Stepped, rest: Stepped) -> Stepped:
        """What the kernels and the reference's way found, in the order of the members."""
        tallies, sums = table.tallies, table.square_sums
        if tallies is not None and rest.tallies is not None:
            tallies = torch.zeros(len(self.members.weights), 3, dtype=torch.float64, device=tallies.device)
            tallies[self.native], tallies[self.odd] = table.tallies, rest.tallies  # type: ignore[assignment]
        if sums is not None and rest.square_sums is not None:
            sums = sums + rest.square_sums
        return Stepped(tallies, sums)

    def scalar_table(self, scalars: Sequence[StepScalars]) -> Tensor:
        """The scalars as one float64 tensor where the kernels read it, a row per cohort."""
        if isinstance(scalars, DeviceScalars):
            return scalars.table
        return torch.frombuffer(array("d", chain.from_iterable(scalars)), dtype=torch.float64)

    def _bind_products(self, products: Sequence[Product | None]) -> None:
        flags = self.table[:, FLAGS].tolist()
        addresses = []
        for i, product in enumerate(products):
            if product is None:
                addresses.append(0)
                continue
            value = product.value
            if value.stride() != self.weights[i].stride() or value.dtype != self.weights[i].dtype:
                value = torch.empty_like(self.weights[i]).copy_(value)
            self.keep.append(value)
            addresses.append(value.data_ptr())
            flags[i] &= ~(SIGNED_PRODUCT | PROBE_GRADIENT)
            flags[i] |= SIGNED_PRODUCT * product.signed | PROBE_GRADIENT * product.probed
        self.table[:, PRODUCT] = _numbers(addresses)
        self.table[:, FLAGS] = _numbers(flags)

    def _fitted(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors in the layout of their parameters, copied where they have another."""
        pairs = zip(tensors, self.weights, strict=True)
        return [t if t.stride() == w.stride() else torch.empty_like(w).copy_(t) for t, w in pairs]

    def _pick(self, values: Sequence[T]) -> list[T]:
        return [values[i] for i in self.native] if self.odd else values  # type: ignore[return-value]

    # ---- kernels ------------------------------------------------------------------------------------------------

    @abstractmethod
    def bind(self, column: int, tensors: Sequence[Tensor]) -> tuple[int, int]:
        """Writes addresses into a column, and with parameters also size, dtype and layout.

        Returns:
            How many tensors do not fit their row in dtype, shape or order of elements, and how many gradients share
            memory with others.
        """

    @abstractmethod
    def kernel_square_sums(self, adaptive: bool) -> Tensor:
        """Squared gradient norm per group; of |x| ⊙ g where ``adaptive``."""

    @abstractmethod
    def kernel_weight_square_sum(self) -> Tensor:
        """Σ x² over the table."""

    @abstractmethod
    def kernel_perturb(self, scales: Tensor, adaptive: bool, seed: int, draw: Tensor) -> None:
        """x into the backups, x + ε into the parameters. A backup may be the gradient itself."""

    @abstractmethod
    def kernel_restore(self) -> None:
        """Backups into the parameters."""

    @abstractmethod
    def kernel_rademacher(self, outs: list[Tensor], indices: list[int], seed: int, draw: int) -> None:
        """Signs into contiguous tensors."""

    @abstractmethod
    def kernel_probe(self, weights: list[Tensor], indices: list[int], h: float, seed: int, draw: int) -> None:
        """Adds h·z to contiguous tensors."""

    @abstractmethod
    def kernel_step(self, scalars: Tensor, seed: int, noise_draw: Tensor | None) -> None:
        """The ordinary update, of x in the backups (which may be the parameters)."""

    @abstractmethod
    def kernel_refresh_step(
        self, scalars: Tensor, seed: int, draw: int, noise_draw: Tensor | None, sample: Sample
    ) -> Tensor:
        """The update with products. Returns tallies, a row per row of the table."""

    @abstractmethod
    def kernel_apart_step(self, scalars: Tensor, adaptive: bool, seed: int, noise_draw: Tensor | None) -> Tensor:
        """The ordinary update of x in the backups, in place. Returns squares of m per group."""

    @abstractmethod
    def kernel_apart_refresh_step(
        self, scalars: Tensor, adaptive: bool, seed: int, draw: int, noise_draw: Tensor | None, sample: Sample
    ) -> tuple[Tensor, Tensor]:
        """The same with products. Returns tallies and squares."""

    @abstractmethod
    def kernel_momentum_ascent(self, scales: Tensor, adaptive: bool, seed: int, draw: Tensor) -> None:
        """x + ε into the parameters, from x in the backups and from m."""

    @abstractmethod
    def kernel_gap_sums(self) -> Tensor:
        """‖g‖², g·g̃ and ‖g̃‖² over the table."""

    @abstractmethod
    def kernel_decompose(self, scales: Tensor) -> None:
        """g̃ − α g⊥ into the gradients."""
