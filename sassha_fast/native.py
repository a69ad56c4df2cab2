"""Backend ``cpu``: the C++ kernels over a table of addresses that is kept between steps.

Crossing the language boundary costs about as much per tensor as updating a small tensor does. So addresses of
parameters and state are written into a table once, and a step passes one list: its gradients.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, repeat
from typing import TypeVar

import torch
from torch import Tensor

from .accessors import address, is_contiguous
from .capturable import DeviceScalars
from .passes import Members, Passes, Product, check_grads
from .scalars import StepScalars

__all__ = ["NativePasses"]

# Columns of the table: struct Row in csrc/params.h.
PARAM, GRAD, BACKUP, EXP_AVG, HESSIAN, PRODUCT, NUMEL, LAYOUT, DTYPE, INDEX, GROUP, COHORT, FLAGS = range(13)
ROW_WORDS = 13
OWNS_BUFFER, SIGNED_PRODUCT, PROBE_GRADIENT = 1, 2, 4

T = TypeVar("T")


def fits_kernels(weight: Tensor) -> bool:
    """Whether the kernels take the tensor as it lies in memory.

    They need its elements without gaps, and in logical order where rounding noise is numbered by element.
    """
    if weight.dtype in (torch.float32, torch.float64):
        return bool(torch.ops.aten.is_non_overlapping_and_dense(weight))
    return weight.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()


class NativePasses(Passes):
    """Passes of the C++ kernels. Members whose memory they can't take go the reference's way."""

    name = "cpu"

    def __init__(self, members: Members) -> None:
        """Writes the table of the members that the kernels take."""
        super().__init__(members)
        self.ops = torch.ops.sassha_fast
        self.native = [i for i, weight in enumerate(members.weights) if fits_kernels(weight)]
        odd = sorted(set(range(len(members.weights))) - set(self.native))
        self.odd = odd
        self.rest = Passes(members.take(odd)) if odd else None
        own = members.take(self.native)
        self.weights = own.weights
        self.all_row_major = not odd and all(map(is_contiguous, own.weights))
        self.table = torch.zeros(len(self.native), ROW_WORDS, dtype=torch.int64)
        self.table[:, INDEX] = torch.tensor(own.indices, dtype=torch.int64)
        self.table[:, GROUP] = torch.tensor(own.groups, dtype=torch.int64)
        self.cohorts: Sequence[int] | None = None
        self.ops.table_bind(self.table, PARAM, own.weights)
        self.keep: list[Tensor] = []  # whatever the table points to that nobody else holds
        self.checked = False
        self.shared = 0

    def bind_state(self, exp_avgs: list[Tensor], hessians: list[Tensor]) -> None:
        """See :meth:`Passes.bind_state`. State in another layout than its parameter's is rejected."""
        super().bind_state(exp_avgs, hessians)
        for column, tensors in ((EXP_AVG, exp_avgs), (HESSIAN, hessians)):
            misfits, _ = self.ops.table_bind(self.table, column, self._pick(tensors))
            if misfits:
                raise RuntimeError(
                    f"SASSHA: {misfits} tensors of optimizer state do not have the layout of their parameters; "
                    "reload them with load_state_dict, which copies them into place"
                )
        if self.rest is not None:
            self.rest.bind_state([exp_avgs[i] for i in self.odd], [hessians[i] for i in self.odd])

    def bind_grads(self, grads: list[Tensor], *, overwrite: bool = False) -> None:
        """See :meth:`Passes.bind_grads`. Gradients in another layout are copied into the parameter's."""
        if self.checked and not overwrite and self.all_row_major and all(map(is_contiguous, grads)):
            # Nothing to find out about the gradients but where they are, which is cheaper than handing them over.
            addresses = array("q", map(address, grads))
            self.table[:, GRAD] = torch.frombuffer(addresses, dtype=torch.int64)
            self.grads = grads
            return
        if not self.checked:  # from then on, torch itself lets nothing else become the gradient of these parameters
            check_grads(self.members.names, self.members.weights, grads)
            self.checked = True
        mine = self._pick(grads)
        try:
            misfits, self.shared = self.ops.table_bind(self.table, GRAD, mine)
        except NotImplementedError:  # a gradient of a kind that the dispatcher has no kernel for, such as sparse
            misfits = len(mine)
        if misfits:
            check_grads(self.members.names, self.members.weights, grads)
            mine = [
                g if g.stride() == w.stride() else torch.empty_like(w).copy_(g)
                for g, w in zip(mine, self.weights, strict=True)
            ]
            _, self.shared = self.ops.table_bind(self.table, GRAD, mine)
        self.grads = mine
        if self.rest is not None:
            self.rest.bind_grads([grads[i] for i in self.odd])

    def square_sums(self, *, adaptive: bool) -> Tensor:
        """See :meth:`Passes.square_sums`."""
        sums: Tensor = self.ops.table_square_sums(self.table, self.members.n_groups, adaptive)
        return sums if self.rest is None else sums + self.rest.square_sums(adaptive=adaptive)

    def perturb(
        self, scales: Tensor, *, adaptive: bool, take_grads: bool | Sequence[bool], seed: int, draw: Tensor
    ) -> None:
        """See :meth:`Passes.perturb`."""
        into_grads = self.shared == 0 and (take_grads if isinstance(take_grads, bool) else all(take_grads))
        if into_grads:
            self.backups = self.grads
        else:
            taken = repeat(take_grads) if isinstance(take_grads, bool) else self._pick(take_grads)
            owned = (self.table[:, FLAGS] & OWNS_BUFFER).tolist()
            self.backups = [
                g if take and own else torch.empty_like(w)
                for g, w, take, own in zip(self.grads, self.weights, taken, owned, strict=False)
            ]
            self.ops.table_bind(self.table, BACKUP, self.backups)
        self.ops.table_perturb(self.table, scales, into_grads, adaptive, seed, draw)
        self.grads = []
        if self.rest is not None:
            self.rest.perturb(scales, adaptive=adaptive, take_grads=False, seed=seed, draw=draw)

    def restore(self) -> None:
        """See :meth:`Passes.restore`."""
        self.ops.table_restore(self.table)
        self.backups = []
        if self.rest is not None:
            self.rest.restore()

    def drop_backups(self) -> list[Tensor]:
        """See :meth:`Passes.drop_backups`."""
        backups = dict(zip(self.native, super().drop_backups(), strict=True))
        if self.rest is not None:
            backups.update(zip(self.odd, self.rest.drop_backups(), strict=True))
        return [backups[i] for i in range(len(backups))]

    def rademacher(self, positions: Sequence[int], seed: int, draw: int) -> list[Tensor]:
        """See :meth:`Passes.rademacher`."""
        members = self.members
        signs = [torch.empty(members.weights[i].shape, dtype=members.weights[i].dtype) for i in positions]
        self.ops.rademacher_(signs, [members.indices[i] for i in positions], seed, draw)
        return signs

    def probe(self, h: float, seed: int, draw: int) -> None:
        """See :meth:`Passes.probe`."""
        members = self.members
        rows = [i for i in self.native if members.weights[i].is_contiguous()]
        if rows:
            self.ops.probe_([members.weights[i] for i in rows], [members.indices[i] for i in rows], h, seed, draw)
        others = sorted(set(range(len(members.weights))) - set(rows))
        if others:  # signs are numbered by logical element
            Passes(members.take(others)).probe(h, seed, draw)

    def weight_square_sum(self) -> float:
        """See :meth:`Passes.weight_square_sum`."""
        rest = 0.0 if self.rest is None else self.rest.weight_square_sum()
        if not self.native:
            return rest
        sums: Tensor = self.ops.square_sums(self.weights, [], [0] * len(self.weights), 1)
        return float(sums) + rest

    def signs_in_registers(self, position: int) -> bool:
        """See :meth:`Passes.signs_in_registers`. Signs are numbered by logical element."""
        return self.members.weights[position].is_contiguous()

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
        """See :meth:`Passes.step`."""
        if cohorts is not self.cohorts and cohorts != self.cohorts:
            self.table[:, COHORT] = torch.tensor(self._pick(cohorts), dtype=torch.int64)
        self.cohorts = cohorts
        numbers = self._scalar_table(scalars)
        if products is None:
            tallies: Tensor | None = None
            self.ops.table_step(self.table, numbers, not restore, seed, noise_draw)
        else:
            self._bind_products(self._pick(products))
            tallies = self.ops.table_refresh_step(self.table, numbers, not restore, seed, draw, noise_draw)
            self.table[:, PRODUCT] = 0
        self.grads, self.keep = [], []
        if restore:
            self.backups = []
        if self.rest is not None:
            mine = None if products is None else [products[i] for i in self.odd]
            theirs = [cohorts[i] for i in self.odd]
            rest = self.rest.step(scalars, theirs, mine, seed, draw, restore=restore, noise_draw=noise_draw)
            if rest is not None and tallies is not None:
                both = torch.zeros(len(cohorts), rest.shape[1], dtype=torch.float64)
                both[self.native], both[self.odd] = tallies, rest
                tallies = both
        return tallies

    @staticmethod
    def _scalar_table(scalars: Sequence[StepScalars]) -> Tensor:
        """One row of float64 scalars per cohort."""
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
        self.table[:, PRODUCT] = torch.tensor(addresses, dtype=torch.int64)
        self.table[:, FLAGS] = torch.tensor(flags, dtype=torch.int64)

    def _pick(self, values: Sequence[T]) -> list[T]:
        return [values[i] for i in self.native] if self.odd else values  # type: ignore[return-value]
