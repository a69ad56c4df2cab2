"""Checks of arguments. Each error names the subject, the value and what was expected."""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Hashable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

__all__ = [
    "as_integer",
    "as_number",
    "check_choice",
    "check_count",
    "check_flag",
    "check_memory",
    "check_number",
    "check_overlap",
    "check_param",
    "check_positive",
    "give_memory",
    "is_one_of",
    "is_step_count",
    "lacks_memory",
    "parameter_name",
    "refuse_cast",
    "refuse_saved",
    "shown",
    "user_level",
]

MOST_SHOWN = 80  # characters of a value in an error
_INNER = tuple(f"{Path(str(file)).parent}{os.sep}" for file in (torch.__file__, __file__))
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


def user_level() -> int:
    """``stacklevel`` of a warning for the line that called us: the first frame that is neither torch's nor ours."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        frame, level = frame.f_back, level + 1
    return level


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


def as_integer(value: Any) -> int | None:
    """An integer of any library as an int; None for anything else, flags and tensors included."""
    if isinstance(value, (bool, Tensor)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def is_one_of(value: Any, choices: Sequence[Any]) -> bool:
    """Whether it is a choice. Arrays, whose comparison is an array, are none."""
    return isinstance(value, Hashable) and not isinstance(value, Tensor) and value in choices


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


def refuse_cast(name: str, param: Tensor, found: str, *, caller: str) -> NoReturn:
    """Raises RuntimeError for state of a parameter that is of another dtype by now."""
    raise RuntimeError(
        f"{caller}: {name} is {param.dtype}, but its {found}: the parameter changed its dtype after its first step. "
        "Construct a new optimizer and load opt.state_dict() into it, which converts the state"
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
    if not is_one_of(value, (True, False, None)):
        raise ValueError(f"{caller}: {name} is {shown(value)}, expected True or False")


def check_count(name: str, value: Any, least: int = 1, *, caller: str) -> int:
    """Returns ``value`` as an int. Raises ValueError unless it is an integer of at least ``least``."""
    number = as_integer(value)
    if number is None or number < least:
        raise ValueError(f"{caller}: {name} is {shown(value)}, expected an integer of at least {least}")
    return number


def check_choice(name: str, value: Any, choices: tuple[Any, ...], *, caller: str) -> None:
    """Raises ValueError unless ``value`` is one of ``choices``."""
    if not is_one_of(value, choices):
        raise ValueError(f"{caller}: {name} is {shown(value)}, expected one of {list(choices)}")


def check_param(name: str, param: Any, *, caller: str) -> None:
    """Raises ValueError for a parameter that is sparse, complex, not floating point or not alone with its memory."""
    if not isinstance(param, Tensor):
        return  # torch's own error names the type
    if param.is_complex() or not param.is_floating_point():
        raise ValueError(f"{caller}: {name} is {param.dtype}, expected a real floating-point dtype")
    if param.layout != torch.strided:
        raise ValueError(f"{caller}: {name} has layout {param.layout}, expected a dense tensor")
    if not is_lazy(param) and _overlaps_itself(param):
        raise ValueError(
            f"{caller}: {name} is expanded or overlaps itself (shape {tuple(param.shape)}, strides {param.stride()}), "
            "so elements share memory and can't be updated one by one; pass a copy of it, as of p.contiguous()"
        )
    check_memory(name, param, caller=caller)


def lacks_memory(tensor: Tensor) -> bool:
    """Whether a tensor's storage was resized, by whoever saves memory so, and does not hold all elements any more."""
    if not tensor.numel() or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() < _end(tensor)


def give_memory(tensor: Tensor) -> None:
    """Gives a tensor that lacks memory enough of it, whose elements are yet to be written."""
    if lacks_memory(tensor):
        tensor.untyped_storage().resize_(_end(tensor))


def _end(tensor: Tensor) -> int:
    """Bytes from the beginning of its storage to the end of the last element."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + reach) * tensor.element_size())


def check_memory(name: str, param: Tensor, *, caller: str) -> None:
    """Raises ValueError for a parameter whose memory is not there, or holds the opposite of its values."""
    if not is_lazy(param) and not param.is_meta and lacks_memory(param):
        raise ValueError(
            f"{caller}: {name} has lost its memory: its storage has {param.untyped_storage().nbytes()} bytes, as "
            "somebody has resized it; bring its values back before calls of the optimizer"
        )
    if not is_lazy(param) and param.is_neg():
        raise ValueError(
            f"{caller}: {name} has torch's negative bit, as the imaginary part of a conjugate has: its memory "
            "holds the opposite of its values, and its other views would move the wrong way; make a parameter of "
            "p.detach().resolve_neg()"
        )


def _overlaps_itself(t: Tensor) -> bool:
    """Whether two elements of a tensor have one address."""
    reach = 0  # of the dimensions with smaller strides, in elements
    for step, size in sorted((step, size) for step, size in zip(t.stride(), t.shape, strict=True) if size > 1):
        if step <= reach:  # the usual sign of it, and for strides such as (2, 3) a false one
            places = torch.arange(_reach(t) + 1, device="cpu").as_strided(t.shape, t.stride())
            return bool(places.unique().numel() < t.numel())  # type: ignore[no-untyped-call]
        reach += (size - 1) * step
    return False


def check_overlap(names: Sequence[str], tensors: Sequence[Tensor], *, caller: str) -> None:
    """Raises ValueError if two parameters share an element: moved twice, it would have no way back.

    Parameters that lie between each other, such as every second column of one tensor, share none.
    """
    ranges = sorted(
        (t.data_ptr(), t.data_ptr() + _extent(t), i)
        for i, t in enumerate(tensors)
        if not is_lazy(t) and t.device.type != "meta" and t.numel() > 0
    )
    cluster: list[int] = []  # whose ranges hang together
    end = 0
    for start, stop, i in [*ranges, (math.inf, 0, -1)]:
        if start >= end:
            pair = _sharing(tensors, cluster) if len(cluster) > 1 else None
            if pair is not None:
                one, other = pair
                raise ValueError(
                    f"{caller}: {names[one]} and {names[other]} share memory, so a step would move their elements "
                    "twice; pass one of them, and let modules that share weights share the Parameter itself"
                )
            cluster, end = [], 0
        cluster.append(i)
        end = max(end, stop)


def _extent(t: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    return (_reach(t) + 1) * t.element_size()


def _reach(t: Tensor) -> int:
    """Elements of memory from the first element to the last."""
    return sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def _sharing(tensors: Sequence[Tensor], cluster: Sequence[int]) -> tuple[int, int] | None:
    """Two tensors of a cluster that have a byte in common, None if there are none.

    Each marks its bytes in one map of the whole range, so that the work is that of reading the cluster once.
    """
    origin = tensors[cluster[0]].data_ptr()
    size = max(tensors[i].data_ptr() + _extent(tensors[i]) for i in cluster) - origin
    taken = torch.zeros(size, dtype=torch.bool, device="cpu")
    for place, i in enumerate(cluster):
        mine = _bytes(taken, tensors[i], origin)
        if bool(mine.any()):
            for other in cluster[:place]:
                whole = torch.zeros_like(taken)
                _bytes(whole, tensors[other], origin).fill_(True)
                if bool(_bytes(whole, tensors[i], origin).any()):
                    one, two = sorted((other, i))
                    return one, two
        mine.fill_(True)
    return None


def _bytes(room: Tensor, t: Tensor, origin: int) -> Tensor:
    """The elements of a map of bytes that begins at ``origin`` which belong to a tensor."""
    size = t.element_size()
    strides = [stride * size for stride in t.stride()]
    return room.as_strided((*t.shape, size), (*strides, 1), t.data_ptr() - origin)
