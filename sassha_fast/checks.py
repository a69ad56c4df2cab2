"""Checks of arguments. Each error names the subject, the value and what was expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

__all__ = [
    "as_number",
    "check_choice",
    "check_count",
    "check_flag",
    "check_number",
    "check_overlap",
    "check_param",
    "check_positive",
    "is_step_count",
    "parameter_name",
    "refuse_saved",
    "shown",
]

MOST_SHOWN = 80  # characters of a value in an error
MOST_STEPS = 2**31  # what counts on a device can hold, and more than anybody takes


def parameter_name(group: int, index: int, given: str | None) -> str:
    """How errors call a parameter: by the name that ``named_parameters()`` gave, else by its place."""
    return f"parameter {index} of group {group}" if given is None else repr(given)


def shown(value: Any) -> str:
    """How errors show a value that may be anything, and of any size."""
    if isinstance(value, Tensor) and (value.is_nested or value.numel() != 1 or value.is_meta):
        shape = "" if value.is_nested else f" and shape {tuple(value.shape)}"
        return f"a tensor of {value.dtype}{shape} on {value.device}"
    try:
        text = repr(value)
    except Exception:  # integers of thousands of digits have no text
        text = f"of type {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def as_number(value: Any) -> float | None:
    """A real number, or a tensor of one, as a float; None for anything else, flags and text included."""
    if isinstance(value, Tensor):
        if value.is_nested or value.layout != torch.strided or value.is_meta or value.numel() != 1:
            return None
        if value.is_complex() or value.dtype == torch.bool:
            return None
    elif isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond all floats
        return None


def is_step_count(value: Any) -> bool:
    """Whether it may be the number of steps that somebody has taken."""
    number = as_number(value)
    return number is not None and 0 <= number < MOST_STEPS and number == int(number)


def refuse_saved(what: str, value: Any, expected: str, *, caller: str) -> NoReturn:
    """Raises ValueError for a value in a checkpoint."""
    raise ValueError(
        f"{caller}.load_state_dict: {what} is {shown(value)}, expected {expected}; the checkpoint is damaged or not of "
        "this model and optimizer, so load another"
    )


def check_number(name: str, value: Any, below: float = math.inf, *, caller: str) -> None:
    """Raises ValueError unless ``value`` is a number that is finite, not negative and less than ``below``."""
    number = as_number(value)
    if number is None or not 0.0 <= number < below or not math.isfinite(number):
        limit = "" if below == math.inf else f" below {below:g}"
        raise ValueError(f"{caller}: {name} is {shown(value)}, expected a finite number from 0{limit}")


def check_positive(name: str, value: Any, *, caller: str) -> None:
    """Raises ValueError unless ``value`` is a number that is finite and above 0."""
    number = as_number(value)
    if number is None or not 0.0 < number < math.inf:
        raise ValueError(f"{caller}: {name} is {shown(value)}, expected a finite number above 0")


def check_flag(name: str, value: Any, *, caller: str) -> None:
    """Raises ValueError unless ``value`` is True or False, or None in the place of a default."""
    if isinstance(value, Tensor) or value not in (True, False, None):
        raise ValueError(f"{caller}: {name} is {value!r}, expected True or False")


def check_count(name: str, value: Any, least: int = 1, *, caller: str) -> None:
    """Raises ValueError unless ``value`` is an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{caller}: {name} is {value!r}, expected an integer of at least {least}")


def check_choice(name: str, value: Any, choices: tuple[str, ...], *, caller: str) -> None:
    """Raises ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{caller}: {name} is {value!r}, expected one of {list(choices)}")


def check_param(name: str, param: Any, *, caller: str) -> None:
    """Raises ValueError for a parameter that is sparse, expanded, complex or not floating point."""
    if not isinstance(param, Tensor):
        return  # torch's own error names the type
    if param.is_complex() or not param.is_floating_point():
        raise ValueError(f"{caller}: {name} is {param.dtype}, expected a real floating-point dtype")
    if param.layout != torch.strided:
        raise ValueError(f"{caller}: {name} has layout {param.layout}, expected a dense tensor")
    if any(step == 0 and size > 1 for step, size in zip(param.stride(), param.shape, strict=True)):
        raise ValueError(
            f"{caller}: {name} is expanded (shape {tuple(param.shape)}, strides {param.stride()}), so elements share "
            "memory and can't be updated one by one; pass a copy of it, as of p.contiguous()"
        )


def check_overlap(names: Sequence[str], tensors: Sequence[Tensor], *, caller: str) -> None:
    """Raises ValueError if two parameters share an element: moved twice, it would have no way back.

    Parameters that lie between each other, such as every second column of one tensor, share none.
    """
    ranges = sorted(
        (t.data_ptr(), t.data_ptr() + _extent(t), i)
        for i, t in enumerate(tensors)
        if not is_lazy(t) and t.device.type != "meta" and t.numel() > 0
    )
    widest: tuple[int, int, int] | None = None  # the range that reaches furthest so far
    for found in ranges:
        if widest is not None and found[0] < widest[1] and _share(tensors[widest[2]], tensors[found[2]]):
            one, other = sorted((widest[2], found[2]))
            raise ValueError(
                f"{caller}: {names[one]} and {names[other]} share memory, so a step would move their elements twice; "
                "pass one of them, and let modules that share weights share the Parameter itself"
            )
        widest = found if widest is None or found[1] > widest[1] else widest


def _extent(t: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size()


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose ranges overlap have a byte in common."""
    if all(torch.ops.aten.is_non_overlapping_and_dense(t) for t in (a, b)):
        return True
    start = min(a.data_ptr(), b.data_ptr())
    end = max(t.data_ptr() + _extent(t) for t in (a, b))
    taken = torch.zeros(end - start, dtype=torch.int8, device="cpu")
    for t in (a, b):
        size = t.element_size()
        strides = [stride * size for stride in t.stride()]
        taken.as_strided((*t.shape, size), (*strides, 1), t.data_ptr() - start).add_(1)
    return bool((taken > 1).any())
