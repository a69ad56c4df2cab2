"""A share of a batch: the first rows of every tensor in it, for passes that a smaller batch is enough for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .._core.gap import decomposes
from .._core.optimizer import FusedOptimizer
from ..checks import as_number, shown
from ..variant import Ascent

__all__ = ["check_use", "checked_share", "first_rows", "least_rows", "taken_share"]


def checked_share(name: str, share: Any, *, caller: str) -> float | None:
    """A share as a plain number, None if there is none. Raises ValueError unless it is a fraction."""
    if share is None:
        return None
    number = as_number(share)  # a tensor of one too, which rounds to no number of rows
    if number is None or not 0.0 < number <= 1.0:
        raise ValueError(
            f"{caller}: {name} is {shown(share)}, expected a fraction of the batch above 0 and up to 1, such as 1/4"
        )
    return number


def check_use(opt: FusedOptimizer, ascent_share: float | None, hessian_share: float | None, *, caller: str) -> None:
    """Raises ValueError if the optimizer has no pass that a share could be for."""
    name = type(opt).__name__
    if ascent_share is not None and opt.variant.ascent is not Ascent.GRADIENT:
        raise ValueError(
            f"{caller}: ascent_share is for the pass of an ascent, which {name} does without; leave it out"
        )
    if ascent_share is not None and decomposes(opt.parts.params, opt.parts.options):
        raise ValueError(
            f"{caller}: ascent_share gives the ascent another batch than the descent, which {name} with alpha above 0 "
            "makes of the gradients of both passes; leave ascent_share out, or set alpha to 0"
        )
    if hessian_share is not None and not opt.parts.descent.has_curvature:
        raise ValueError(
            f"{caller}: hessian_share is for products of the Hessian, which {name} does without; leave it out"
        )


def least_rows(model: nn.Module) -> int:
    """How many rows a pass needs: one alone has no variance, which BatchNorm divides by."""
    return 2 if any(isinstance(module, _BatchNorm) for module in model.modules()) else 1


def first_rows(batch: Any, share: float, *, caller: str, least: int = 1) -> Any:
    """The first rows of a batch: of every tensor along its first dimension, in dicts, lists and tuples of any depth.

    Numbers, text and tensors without dimensions stay as they are; a list without tensors that has as many entries as
    the batch has rows is cut too. ``least`` rows are left, where there are so many. Nothing is copied. A batch whose
    lists may have an entry for each row is refused.
    """
    rows = _rows(batch, caller)
    return _cut(batch, rows, _kept(rows, share, least), caller)


def taken_share(batch: Any, share: float, *, caller: str, least: int = 1) -> float:
    """Which share of the rows :func:`first_rows` takes, as rows are whole."""
    rows = _rows(batch, caller)
    return _kept(rows, share, least) / rows


def _kept(rows: int, share: float, least: int) -> int:
    return max(min(rows, least), round(rows * share))


def _rows(batch: Any, caller: str) -> int:
    """How many rows a batch has. Raises if they can't be told."""
    sizes = {tensor.shape[0] for tensor in _tensors(batch, caller)}
    if len(sizes) != 1 or 0 in sizes:
        found = f"tensors of {' and '.join(map(str, sorted(sizes)))} rows" if sizes else "no tensor with rows"
        raise ValueError(
            f"{caller}: a batch has {found}, so that no share of it can be taken; let all its tensors have the batch "
            "as first dimension, or write the step yourself with opt.step(closure, ascent_closure=..., "
            "hessian_closure=...)"
        )
    rows = sizes.pop()
    lists = _lists_of_rows(batch, rows, caller)
    if lists:
        found = " and ".join(f"a list of {length}" for length in lists)
        raise ValueError(
            f"{caller}: a batch has {found} with tensors whose first dimension is {rows}, and nothing tells which of "
            "these are the rows; let collate_fn stack or pad rows to one tensor, name every tensor in a dict, or write "
            "the step yourself with opt.step(closure, ascent_closure=..., hessian_closure=...)"
        )
    return rows


def _lists_of_rows(batch: Any, rows: int, caller: str) -> list[int]:
    """Lengths of lists with tensors that may have an entry for each row, as ``tuple(zip(*rows))`` makes them.

    There are none where a tensor is in no list of its like: it has the rows in its first dimension, and so have the
    others then. Else lists are doubtful whose entries are dicts or lists, which have the same length as another one, or
    as a list without tensors where none of these goes with the first dimension. What is left are columns of one kind:
    tokens and their targets, views of the same pictures.
    """
    columns = list(_columns(batch, caller))
    if any(isinstance(column, Tensor) for column in columns):
        return []
    kinds = [(_kind(column[0], caller), len(column)) for column in columns]
    lengths = [length for kind, length in kinds if kind is not None]
    others = {length for kind, length in kinds if kind is None}
    is_nested = any(kind in (dict, list) for kind, _ in kinds)
    are_zipped = len(set(lengths)) < len(lengths)
    are_labelled = rows not in others and not others.isdisjoint(lengths)
    return lengths if is_nested or are_zipped or are_labelled else []


def _columns(value: Any, caller: str) -> Iterator[Tensor | Sequence[Any]]:
    """Tensors with rows that are in no list of their like, and lists whose entries are all alike."""
    if isinstance(value, Tensor):
        if value.dim() > 0:
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _columns(part, caller)
    elif isinstance(value, list | tuple) and value:
        if hasattr(value, "_fields") or len({_kind(part, caller) for part in value}) > 1:
            for part in value:
                yield from _columns(part, caller)
        else:
            yield value


def _kind(value: Any, caller: str) -> Any:
    """What the entries of a list have in common if each is a row: None is what has no tensor with rows."""
    if isinstance(value, Tensor):
        return (value.dtype, value.dim()) if value.dim() > 0 else None
    if not any(True for _ in _tensors(value, caller)):
        return None
    return dict if isinstance(value, Mapping) else list


def _tensors(value: Any, caller: str) -> Iterator[Tensor]:
    """The tensors of a batch that have rows."""
    if isinstance(value, Tensor):
        if value.is_nested:
            _refuse(value, caller)
        if value.dim() > 0:
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part, caller)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, caller)
    elif value is not None and not isinstance(value, str | bytes | bool | int | float | complex):
        _refuse(value, caller)


def _refuse(value: Any, caller: str) -> NoReturn:
    raise ValueError(
        f"{caller}: a batch holds a {type(value).__name__}, of which no share can be taken; give tensors in dicts, "
        "lists or tuples, or write the step yourself with opt.step(closure, ascent_closure=..., hessian_closure=...)"
    )


def _cut(value: Any, rows: int, kept: int, caller: str) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_nested:
            _refuse(value, caller)
        return value[:kept] if value.dim() > 0 else value
    if isinstance(value, Mapping):
        return _cut_mapping(value, rows, kept, caller)
    if isinstance(value, list | tuple):
        is_named = hasattr(value, "_fields")
        is_whole = is_named or isinstance(value, torch.Size)  # whose length is never that of the batch
        if len(value) == rows and not is_whole and _kind(value, caller) is None:
            return value[:kept]  # something of every row, as names of files
        entries: Sequence[Any] = [_cut(entry, rows, kept, caller) for entry in value]
        return type(value)(*entries) if is_named else type(value)(entries)
    return value


def _cut_mapping(value: Mapping[Any, Any], rows: int, kept: int, caller: str) -> Any:
    """The same kind of mapping with all entries cut. One whose copies share their entries is refused."""
    entries = dict(value.items())
    try:
        part: Any = copy(value)
        for key, entry in entries.items():
            part[key] = _cut(entry, rows, kept, caller)
    except TypeError:  # it can't be copied, or not be written
        _refuse(value, caller)
    if any(value[key] is not entry for key, entry in entries.items()):
        for key, entry in entries.items():
            part[key] = entry  # which is the batch itself
        _refuse(value, caller)
    return part
