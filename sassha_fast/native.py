"""Backend ``cpu``: the C++ kernels, one parallel pass over all tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .tables import TablePasses
from .variant import Sample

__all__ = ["NativePasses"]


class NativePasses(TablePasses):
    """Passes of the C++ kernels."""

    name = "cpu"
    ops = torch.ops.sassha_fast

    def bind(self, column: int, tensors: Sequence[Tensor]) -> tuple[int, int]:
        """See :meth:`TablePasses.bind`."""
        try:
            found: tuple[int, int] = self.ops.table_bind(self.table, column, tensors)
        except NotImplementedError:  # a tensor of a kind that the dispatcher has no kernel for, such as sparse
            return len(tensors), 0
        return found

    def kernel_square_sums(self, adaptive: bool) -> Tensor:
        """See :meth:`TablePasses.kernel_square_sums`."""
        sums: Tensor = self.ops.table_square_sums(self.table, self.members.n_groups, adaptive)
        return sums

    def kernel_weight_square_sum(self) -> Tensor:
        """See :meth:`TablePasses.kernel_weight_square_sum`."""
        sums: Tensor = self.ops.square_sums(self.weights, [], [0] * len(self.weights), 1)
        return sums

    def kernel_perturb(self, scales: Tensor, adaptive: bool, seed: int, draw: Tensor) -> None:
        """See :meth:`TablePasses.kernel_perturb`."""
        self.ops.table_perturb(self.table, scales, adaptive, seed, draw)

    def kernel_restore(self) -> None:
        """See :meth:`TablePasses.kernel_restore`."""
        self.ops.table_restore(self.table)

    def kernel_rademacher(self, outs: list[Tensor], indices: list[int], seed: int, draw: int) -> None:
        """See :meth:`TablePasses.kernel_rademacher`."""
        self.ops.rademacher_(outs, indices, seed, draw)

    def kernel_probe(self, weights: list[Tensor], indices: list[int], h: float, seed: int, draw: int) -> None:
        """See :meth:`TablePasses.kernel_probe`."""
        self.ops.probe_(weights, indices, h, seed, draw)

    def kernel_step(self, scalars: Tensor, seed: int, noise_draw: Tensor | None) -> None:
        """See :meth:`TablePasses.kernel_step`."""
        self.ops.table_step(self.table, scalars, seed, noise_draw)

    def kernel_refresh_step(
        self, scalars: Tensor, seed: int, draw: int, noise_draw: Tensor | None, sample: Sample
    ) -> Tensor:
        """See :meth:`TablePasses.kernel_refresh_step`."""
        tallies: Tensor = self.ops.table_refresh_step(self.table, scalars, seed, draw, noise_draw, int(sample))
        return tallies

    def kernel_apart_step(self, scalars: Tensor, adaptive: bool, seed: int, noise_draw: Tensor | None) -> Tensor:
        """See :meth:`TablePasses.kernel_apart_step`."""
        n_groups = self.members.n_groups
        squares: Tensor = self.ops.table_apart_step(self.table, scalars, n_groups, adaptive, seed, noise_draw)
        return squares

    def kernel_apart_refresh_step(
        self, scalars: Tensor, adaptive: bool, seed: int, draw: int, noise_draw: Tensor | None, sample: Sample
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`TablePasses.kernel_apart_refresh_step`."""
        found: tuple[Tensor, Tensor] = self.ops.table_apart_refresh_step(
            self.table, scalars, self.members.n_groups, adaptive, seed, draw, noise_draw, int(sample)
        )
        return found

    def kernel_momentum_ascent(self, scales: Tensor, adaptive: bool, seed: int, draw: Tensor) -> None:
        """See :meth:`TablePasses.kernel_momentum_ascent`."""
        self.ops.table_momentum_ascent(self.table, scales, adaptive, seed, draw)

    def kernel_gap_sums(self) -> Tensor:
        """See :meth:`TablePasses.kernel_gap_sums`."""
        sums: Tensor = self.ops.table_gap_sums(self.table)
        return sums

    def kernel_decompose(self, scales: Tensor) -> None:
        """See :meth:`TablePasses.kernel_decompose`."""
        self.ops.table_decompose(self.table, scales)
