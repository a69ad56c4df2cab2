"""Checks of arguments. Each error names the subject, the value and what was expected."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "check_choice",
    "check_count",
    "check_flag",
    "check_number",
    "check_param",
    "check_positive",
    "parameter_name",
]


def parameter_name(group: int, index: int, given: str | None) -> str:
    """How errors call a parameter: by the name that ``named_parameters()`` gave, else by its place."""
    return f"parameter {index} of group {group}" if given is None else repr(given)


def _as_float(value: Any) -> float:
    """A number or a tensor of one; NaN, which no check lets pass, for anything else, also if it can be converted."""
    if isinstance(value, Tensor):
        is_number = value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    else:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
    return float(value) if is_number else math.nan


def check_number(name: str, value: Any, below: float = math.inf, *, caller: str) -> None:
    """Raises ValueError unless ``value`` is a number that is finite, not negative and less than ``below``."""
    number = _as_float(value)
    if not 0.0 <= number < below or not math.isfinite(number):
        limit = "" if below == math.inf else f" below {below:g}"
        raise ValueError(f"{caller}: {name} is {value!r}, expected a finite number from 0{limit}")


def check_positive(name: str, value: Any, *, caller: str) -> None:
    """Raises ValueError unless ``value`` is a number that is finite and above 0."""
    if not 0.0 < _as_float(value) < math.inf:
        raise ValueError(f"{caller}: {name} is {value!r}, expected a finite number above 0")


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
