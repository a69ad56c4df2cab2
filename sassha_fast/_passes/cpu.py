"""Backend ``cpu``: the C++ kernels, one parallel pass over all tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from . import layout
from .reference import Members
from .table import TablePasses


class CpuPasses(TablePasses):
    """Passes of the C++ kernels."""

    name = "cpu"
    takes_compact = True
    ops = torch.ops.sassha_fast

    def __init__(self, members: Members) -> None:
        """Writes the table."""
        self._operators: dict[str, Callable[..., Any]] = {}
        super().__init__(members)

    @override
    def bind(self, column: int, tensors: Sequence[Tensor]) -> tuple[int, int]:
        try:
            found: tuple[int, int] = self.operator("bind")(self.table, column, tensors)
        except NotImplementedError:  # a tensor of a kind that the dispatcher has no kernel for, such as sparse
            return len(tensors), 0
        return found

    @override
    def holds(self, weights: list[Tensor], *, in_form: bool) -> bool:
        if not in_form:
            return super().holds(weights, in_form=False)
        try:
            found: bool = self.operator("holds")(self.table, layout.PARAM, weights)
        except NotImplementedError:  # as above: of a device that has no kernels
            return False
        return found

    @override
    def launch(self, op: str, *args: Any) -> None:
        self.operator(op)(self.table, *args)

    def operator(self, op: str) -> Callable[..., Any]:
        """The operator of a pass, looked up once: each look-up and its choice of an overload take a microsecond.

        It is torch's own function, which its wrapper in Python only calls.
        """
        found = self._operators.get(op)
        if found is None:
            found = self._operators[op] = getattr(self.ops, "table_" + op).default._op
        return found

    @override
    def draw_signs(self, outs: list[Tensor], indices: list[int], seed: int, draw: int) -> None:
        self.ops.rademacher_(outs, indices, seed, draw)

    @override
    def add_signs(self, h: Tensor, seed: int, draw: int) -> None:
        weights, indices = self.numbered_members()
        self.ops.probe_(weights, indices, h, seed, draw)
