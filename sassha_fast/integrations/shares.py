"""A share of a batch: the first rows of every tensor in it, for passes that a smaller batch is enough for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from torch import Tensor

from .._core.optimizer import FusedOptimizer
from ..checks import as_number, shown
from ..variant import Ascent

__all__ = ["check_shares", "check_use", "first_rows", "taken_share"]


def check_shares(ascent_share: float | None, hessian_share: float | None, *, caller: str) -> None:
    """Raises ValueError unless each is None or a fraction."""
    for name, share in (("ascent_share", ascent_share), ("hessian_share", hessian_share)):
        number = as_number(share)
        if share is not None and (number is None or not 0.0 < number <= 1.0):
            raise ValueError(
                f"{caller}: {name} is {shown(share)}, expected a fraction of the batch above 0 and up to 1, such as 1/4"
            )


def check_use(opt: FusedOptimizer, ascent_share: float | None, hessian_share: float | None, *, caller: str) -> None:
    """Raises ValueError if the optimizer has no pass that a share could be for."""
    name = type(opt).__name__
    if ascent_share is not None and opt.variant.ascent is not Ascent.GRADIENT:
        raise ValueError(
            f"{caller}: ascent_share is for the pass of an ascent, which {name} does without; leave it out"
        )
    if hessian_share is not None and not opt.parts.descent.has_curvature:
        raise ValueError(
            f"{caller}: hessian_share is for products of the Hessian, which {name} does without; leave it out"
        )


def first_rows(batch: Any, share: float, *, caller: str) -> Any:
    """The first rows of a batch: of every tensor along its first dimension, in dicts, lists and tuples of any depth.

    Numbers, text and tensors without dimensions stay as they are; a list with an entry for each row is cut too. At
    least one row is left. Nothing is copied.
    """
    rows = _rows(batch, caller)
    return _cut(batch, rows, max(1, round(rows * share)))


def taken_share(batch: Any, share: float, *, caller: str) -> float:
    """Which share of the rows :func:`first_rows` takes, as rows are whole."""
    rows = _rows(batch, caller)
    return max(1, round(rows * share)) / rows


def _rows(batch: Any, caller: str) -> int:
    """How many rows a batch has."""
    sizes = {len(tensor) for tensor in _tensors(batch, caller)}
    if len(sizes) != 1 or 0 in sizes:
        found = f"tensors of {' and '.join(map(str, sorted(sizes)))} rows" if sizes else "no tensor with rows"
        raise ValueError(
            f"{caller}: a batch has {found}, so that no share of it can be taken; let all its tensors have the batch "
            "as first dimension, or write the step yourself with opt.step(closure, ascent_closure=..., "
            "hessian_closure=...)"
        )
    return sizes.pop()


def _tensors(value: Any, caller: str) -> Iterator[Tensor]:
    """The tensors of a batch that have rows."""
    if isinstance(value, Tensor):
        if value.dim() > 0:
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part, caller)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, caller)
    elif value is not None and not isinstance(value, str | bytes | bool | int | float | complex):
        raise ValueError(
            f"{caller}: a batch holds a {type(value).__name__}, of which no share can be taken; give tensors in dicts, "
            "lists or tuples, or write the step yourself with opt.step(closure, ascent_closure=..., "
            "hessian_closure=...)"
        )


def _cut(value: Any, rows: int, kept: int) -> Any:
    if isinstance(value, Tensor):
        return value[:kept] if value.dim() > 0 else value
    if isinstance(value, Mapping):
        part = copy(value)
        for key, entry in value.items():
            part[key] = _cut(entry, rows, kept)  # type: ignore[index]
        return part
    if isinstance(value, list | tuple):
        entries: Sequence[Any] = [_cut(entry, rows, kept) for entry in value]
        if len(value) == rows and not any(isinstance(entry, Tensor | Mapping | list | tuple) for entry in value):
            entries = entries[:kept]  # something of every row, as names of files
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return value
