"""Checks of arguments. Each error names the subject, the value and what was expected."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "check_choice",
    "check_count",
    "check_number",
    "check_param",
    "check_positive",
    "parameter_name",
]


def parameter_name(group: int, index: int, given: str | None) -> str:
    """How errors call a parameter: by the name that ``named_parameters()`` gave, else by its place."""
    return f"parameter {index} of group {group}" if given is None else repr(given)


def check_number(name: str, value: Any, below: float = math.inf, *, caller: str) -> None:
    """Raises ValueError unless ``value`` is finite, not negative and less than ``below``."""
    number = float(value)
    if not 0.0 <= number < below or not math.isfinite(number):
        limit = "" if below == math.inf else f" below {below:g}"
        raise ValueError(f"{caller}: {name} is {value}, expected a finite number from 0{limit}")


def check_positive(name: str, value: Any, *, caller: str) -> None:
    """Raises ValueError unless ``value`` is finite and above 0."""
    if not 0.0 < float(value) < math.inf:
        raise ValueError(f"{caller}: {name} is {value!r}, expected a finite number above 0")


def check_count(name: str, value: Any, least: int = 1, *, caller: str) -> None:
    """Raises ValueError unless ``value`` is an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{caller}: {name} is {value!r}, expected an integer of at least {least}")


def check_choice(name: str, value: Any, choices: tuple[str, ...], *, caller: str) -> None:
    """Raises ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{caller}: {name} is {value!r}, expected one of {list(choices)}")


def check_param(name: str, param: Any, *, caller: str) -> None:
    """Raises ValueError for a parameter that is sparse, complex or not floating point."""
    if not isinstance(param, Tensor):
        return  # torch's own error names the type
    if param.is_complex() or not param.is_floating_point():
        raise ValueError(f"{caller}: {name} is {param.dtype}, expected a real floating-point dtype")
    if param.layout != torch.strided:
        raise ValueError(f"{caller}: {name} has layout {param.layout}, expected a dense tensor")
