"""Per-parameter state: its keys, its creation, and its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .._passes.shards import is_sharded, local
from ..checks import as_number, is_step_count, parameter_name, refuse_saved, shown
from ..formats import FULL, Format
from ..reference import compute_dtype
from ..variant import Sample, Variant
from .compact import checked_full, fill, is_empty, new_tensors
from .keys import (
    ASCENT_DRAW,
    ASCENT_SCALE,
    BIAS2,
    CORRECTION,
    CORRECTION_OF,
    CURVATURE,
    EXP_AVG,
    HESSIAN,
    HESSIAN_STEP,
    STEP,
    WEIGHT,
)
from .options import HYPERPARAMETERS, check_group
from .upstream import UPSTREAM_CLOCK, from_upstream


def state_tensors(*, x_in_state: bool) -> tuple[str, ...]:
    """Keys of the tensors that the passes work on: m, D, and x where it is kept in state."""
    return (EXP_AVG, HESSIAN, WEIGHT) if x_in_state else (EXP_AVG, HESSIAN)


def new_state(
    param: Tensor, stored: Format = FULL, *, on_device: bool = False, x_in_state: bool = False
) -> dict[str, Any]:
    """State of a parameter that has taken no step; with ``on_device`` its numbers are tensors beside it.

    With ``x_in_state`` it has x as well, which the parameter holds as long as nothing has moved it.

    D starts at −0. The sign bit says that no curvature is known, so nothing moves; the first finite |Ĥ| clears it, as
    −0 + 0 is +0.
    """

    def number(value: float, dtype: torch.dtype) -> Any:
        return torch.full((), value, dtype=dtype, device=param.device) if on_device else value

    state = {
        STEP: number(0, torch.int64),
        HESSIAN_STEP: 0,
        **new_tensors(param, stored),
        BIAS2: number(0.0, torch.float64),
    }
    if x_in_state:
        weight = torch.empty_like(param, memory_format=torch.preserve_format, requires_grad=False).copy_(param)
        state |= {WEIGHT: weight, ASCENT_SCALE: number(0.0, torch.float32), ASCENT_DRAW: number(0, torch.int64)}
    return state


# ---- what a checkpoint may hold ---------------------------------------------------------------------------------

# What is wrong with a value of a parameter's state: None, or what was expected.
Check = Callable[[Any, Tensor], "str | None"]

REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COUNTERS, FLAGS = ("power_step", "rho_step", "ascents"), ("maximize", "evaluating")  # of parameter groups


def step_count(value: Any, param: Tensor) -> str | None:
    """A number of steps."""
    return None if is_step_count(value) else "an integer from 0 to 2^31 − 1"


def finite_number(value: Any, param: Tensor) -> str | None:
    """Any number that float32 can hold."""
    number = as_number(value)
    good = number is not None and abs(number) <= torch.finfo(torch.float32).max
    return None if good else "a finite number"


def fraction(value: Any, param: Tensor) -> str | None:
    """A number from 0 to 1."""
    number = as_number(value)
    return None if number is not None and 0.0 <= number <= 1.0 else "a number from 0 to 1"


def elements(value: Any, param: Tensor, dtype: torch.dtype, *, signed: bool = True) -> str | None:
    """A tensor like the parameter, whose elements a tensor of ``dtype`` can hold."""
    shape = f"a tensor of shape {tuple(param.shape)}"
    if not isinstance(value, Tensor) or value.is_nested or value.shape != param.shape:
        return shape
    if value.layout != torch.strided or value.is_meta or value.dtype not in REAL:
        return f"{shape}, dense and of floating-point numbers"
    if is_sharded(value) != is_sharded(param):
        return f"{shape}, in shards as the parameter is"
    part = local(value).detach()
    if part.numel() == 0:
        return None
    low, high = (float(end) for end in torch.aminmax(part))  # NaN, if there is one
    most = torch.finfo(dtype).max
    if math.isnan(low) or not -most <= low <= high <= most:
        return f"finite elements of {dtype}, not from {low:g} to {high:g}"
    return None if signed or low >= 0.0 else f"no element below 0, not from {low:g} to {high:g}"


def part_of_last_place(value: Any, param: Tensor) -> str | None:
    """What a parameter of reduced precision lacks of x."""
    found = elements(value, param, torch.float32)
    if found is None and local(value).numel() and float(local(value).detach().abs().max()) > 0.5:
        return "parts of a last place, from -0.5 to 0.5"
    return found


def mantissa(value: Any, param: Tensor) -> str | None:
    """Bits of mantissa of a dtype that has corrections."""
    return None if as_number(value) in (7, 10) else "7, of bfloat16, or 10, of float16"


def fields_of(variant: Variant) -> dict[str, Check]:
    """The keys of a parameter's state, and what each may hold."""

    def average(value: Any, param: Tensor) -> str | None:
        return elements(value, param, compute_dtype(param.dtype))

    def curvature(value: Any, param: Tensor) -> str | None:
        return elements(value, param, compute_dtype(param.dtype), signed=variant.sample is Sample.SIGNED)

    def weight(value: Any, param: Tensor) -> str | None:
        return elements(value, param, param.dtype)

    fields: dict[str, Check] = {
        STEP: step_count,
        HESSIAN_STEP: step_count,
        EXP_AVG: average,
        HESSIAN: curvature,
        BIAS2: fraction,
    }
    if variant.x_in_state:
        fields |= {WEIGHT: weight, ASCENT_SCALE: finite_number, ASCENT_DRAW: step_count}
    return fields


@dataclass(frozen=True)
class Schema:
    """What the checkpoints of an optimizer hold.

    Attributes:
        caller: What errors call the optimizer.
        writer: Who writes such checkpoints.
        required: Hyperparameters that no saved group lacks. Others are taken from the live group.
        hyperparameters: Those that :func:`options.check_group` knows.
        check_group: Checks further hyperparameters of a saved group, which is given with the live one and its number.
        fields: What the state of a parameter holds, given its saved group and that group's number.
        closed: Whether state has these keys and no others.
        optional: What it may hold beside them.
        form: Of a parameter, where its state may be in fewer bits; it is checked in float32 then.
        check_origin: Checks that a saved group, given with its number, is of a method whose state means the same.
    """

    caller: str
    writer: str
    required: frozenset[str]
    hyperparameters: tuple[str, ...]
    fields: Callable[[Mapping[str, Any], int, Tensor], Mapping[str, Check]]
    check_group: Callable[[Mapping[str, Any], Mapping[str, Any], int], None] = lambda saved, live, number: None
    closed: bool = True
    optional: Mapping[str, Check] = field(default_factory=dict)
    form: Callable[[Tensor], Format] | None = None
    check_origin: Callable[[Mapping[str, Any], int], None] = lambda saved, number: None


def own_schema(variant: Variant, form: Callable[[Tensor], Format], *, caller: str) -> Schema:
    """The schema of the optimizers that keep m and D."""
    fields = fields_of(variant)
    required = frozenset({"lr", "betas", "weight_decay", "eps", "perturb_eps"})
    return Schema(
        caller,
        "this optimizer or by the authors' SASSHA",
        required,
        tuple(HYPERPARAMETERS),
        lambda saved, g, p: fields,
        optional={CORRECTION: part_of_last_place, CORRECTION_OF: mantissa},
        form=form,
        check_origin=lambda saved, number: _check_curvature(saved, number, variant.sample, caller),
    )


# What D is an average of, and whose it is.
CURVATURES = {
    Sample.ABS: ("absolute values", "SASSHA, G-SASSHA or M-SASSHA"),
    Sample.SIGNED: ("signed values", "Sophia-H"),
    Sample.SQUARE: ("squares", "AdaHessian"),
}


def _curvature_of(saved: Mapping[str, Any]) -> str | None:
    """What D of a saved group is an average of, None if nothing tells: SASSHA with ρ 0, or AdaHessian of 0.1.0."""
    if CURVATURE in saved:
        return str(saved[CURVATURE])
    if "clip_threshold" in saved:
        return Sample.SIGNED.name.lower()
    climbs = as_number(saved.get("rho", 0.0)) or "alpha" in saved or "sign" in saved
    return Sample.ABS.name.lower() if climbs else None


def _check_curvature(saved: Mapping[str, Any], number: int, sample: Sample, caller: str) -> None:
    """Raises ValueError if D of a saved group is known to be an average of something else than ``sample``."""
    found = _curvature_of(saved)
    if found is None and sample is Sample.SIGNED:
        found = Sample.ABS.name.lower()  # Sophia-H has always told
    if found is None or found == sample.name.lower():
        return
    if found not in (other.name.lower() for other in CURVATURES):
        known = [other.name.lower() for other in CURVATURES]
        refuse_saved(f"{CURVATURE!r} of group {number}", saved[CURVATURE], f"one of {known}", caller=caller)
    (theirs, method), (ours, _) = CURVATURES[Sample[found.upper()]], CURVATURES[sample]
    raise ValueError(
        f"{caller}.load_state_dict: group {number} is of {method}, whose curvature is an average of {theirs}, and that "
        f"of {caller} one of {ours}; load it into an optimizer of {method}, or load the model alone and begin {caller} "
        "with an empty state"
    )


# ---- checks of a checkpoint, before anything changes --------------------------------------------------------------


def check_structure(state_dict: Any, param_groups: Sequence[Mapping[str, Any]], *, caller: str) -> dict[str, Any]:
    """A copy of a checkpoint down to the values of its groups and entries, which are not looked at here.

    Raises:
        ValueError: Unless it is what ``torch.optim.Optimizer.state_dict`` gives for groups of these sizes.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        found = shown(sorted(map(str, state_dict))) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(f"{caller}.load_state_dict: found {found}, expected a dict with 'state' and 'param_groups'")
    entries, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(entries, Mapping):
        refuse_saved("'state'", entries, "a dict of what each parameter has", caller=caller)
    if not isinstance(groups, (list, tuple)):
        refuse_saved("'param_groups'", groups, "a list of dicts", caller=caller)
    for g, group in enumerate(groups):
        if not isinstance(group, Mapping):
            refuse_saved(f"group {g}", group, "a dict of hyperparameters", caller=caller)
        if not isinstance(group.get("params"), (list, tuple)):
            refuse_saved(f"'params' of group {g}", group.get("params"), "a list of numbers", caller=caller)
    sizes, expected = [len(g["params"]) for g in groups], [len(g["params"]) for g in param_groups]
    if sizes != expected:
        raise ValueError(
            f"{caller}.load_state_dict: the checkpoint has groups of {shown(sizes)} parameters, the optimizer of "
            f"{shown(expected)}; build the optimizer with the groups that were saved"
        )
    names: dict[Any, str] = {}
    for g, (saved, group) in enumerate(zip(groups, param_groups, strict=True)):
        _check_names(saved, g, caller)
        given = group.get("param_names") or [None] * len(group["params"])
        for i, index in enumerate(saved["params"]):
            name = parameter_name(g, i, given[i])
            if isinstance(index, bool) or not isinstance(index, (Integral, str)) or index in names:
                refuse_saved(f"the number of {name}", index, "an integer that no other parameter has", caller=caller)
            names[index] = name
    stray = ", ".join(sorted(map(shown, entries.keys() - names.keys())))
    if stray:
        raise ValueError(
            f"{caller}.load_state_dict: state of [{stray}] belongs to no parameter; the checkpoint is damaged"
        )
    for index, entry in entries.items():
        if not isinstance(entry, Mapping):
            refuse_saved(f"state of {names[index]}", entry, "a dict", caller=caller)
    return {
        "state": {index: dict(entry) for index, entry in entries.items()},
        "param_groups": [dict(group) for group in groups],
    }


def _check_names(saved: Mapping[str, Any], number: int, caller: str) -> None:
    names = saved.get("param_names")
    if names is None:
        return
    if not isinstance(names, (list, tuple)) or len(names) != len(saved["params"]) or not all(map(_is_text, names)):
        refuse_saved(
            f"'param_names' of group {number}", names, f"a list of {len(saved['params'])} names", caller=caller
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def check_checkpoint(
    state_dict: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]], lazy_hessian: int, schema: Schema
) -> dict[str, Any]:
    """A checkpoint of :func:`check_structure` in our form.

    Raises:
        ValueError: If it is not one of ours or of the authors', or does not fit these parameters.
    """
    caller = schema.caller
    groups = [dict(group) for group in state_dict["param_groups"]]
    state: dict[Any, dict[str, Any]] = {}
    for g, (saved, group) in enumerate(zip(groups, param_groups, strict=True)):
        missing = sorted(schema.required - saved.keys())
        if missing:
            raise ValueError(
                f"{caller}.load_state_dict: a parameter group lacks {missing}; it was not written by {schema.writer}"
            )
        if saved.get("param_names") is None:
            saved.pop("param_names", None)
        schema.check_origin(saved, g)
        for key, value in group.items():
            saved.setdefault(key, value)
        _check_hyperparameters(saved, g, schema)
        schema.check_group(saved, group, g)
        given = group.get("param_names") or [None] * len(group["params"])
        for i, (index, p) in enumerate(zip(saved["params"], group["params"], strict=True)):
            name = parameter_name(g, i, given[i])
            entry = dict(state_dict["state"].get(index, {}))
            if all(map(is_empty, entry.values())):  # torch makes it of a flat checkpoint, where it has no state of p
                entry = {}
            if UPSTREAM_CLOCK in entry:
                entry = from_upstream(entry, saved, lazy_hessian, name, caller=caller)
            if entry:
                entry = entry if schema.form is None else checked_full(entry, p, name, schema.form(p), caller=caller)
                _check_entry(entry, p, name, schema.fields(saved, g, p), schema)
                state[index] = entry
    return {"state": state, "param_groups": groups}


def _check_hyperparameters(saved: Mapping[str, Any], number: int, schema: Schema) -> None:
    """Raises ValueError unless the hyperparameters of a group are what our optimizers may have."""
    where = f"{schema.caller}.load_state_dict: group {number}"
    try:
        check_group(saved, [key for key in schema.hyperparameters if key in saved], caller=where)
    except ValueError as error:
        raise ValueError(f"{error}; the checkpoint is damaged, so load another") from None
    for key in COUNTERS:
        if key in saved and not is_step_count(saved[key]):
            refuse_saved(f"{key!r} of group {number}", saved[key], "an integer from 0", caller=schema.caller)
    for key in FLAGS:
        is_flag = isinstance(saved.get(key, False), int) and saved.get(key, False) in (0, 1)
        if key in schema.hyperparameters and not is_flag:
            refuse_saved(f"{key!r} of group {number}", saved[key], "True or False", caller=schema.caller)
    if "sign" in saved and "sign" in schema.hyperparameters and as_number(saved["sign"]) not in (-1.0, 1.0):
        refuse_saved(f"'sign' of group {number}", saved["sign"], "-1 or 1", caller=schema.caller)


def _check_entry(
    entry: Mapping[str, Any], param: Tensor, name: str, fields: Mapping[str, Check], schema: Schema
) -> None:
    """Raises ValueError unless ``entry`` is a complete state that fits ``param``."""
    fields = {**fields, **{key: check for key, check in schema.optional.items() if key in entry}}
    missing, unknown = sorted(fields.keys() - entry.keys()), sorted(map(str, entry.keys() - fields.keys()))
    if missing or (unknown and schema.closed):
        raise ValueError(
            f"{schema.caller}.load_state_dict: state of {name} lacks {missing} and has {shown(unknown)}; expected "
            f"exactly {sorted(fields)}. Load a checkpoint written by {schema.writer}"
        )
    for key, check in fields.items():
        expected = check(entry[key], param)
        if expected is not None:
            refuse_saved(f"{key!r} of {name}", entry[key], expected, caller=schema.caller)


# ---- loading ------------------------------------------------------------------------------------------------------


def copied(value: Any) -> Any:
    """A value that shares nothing with a checkpoint, graphs included."""
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)


def placed(
    entry: Mapping[str, Any],
    param: Tensor,
    stored: Format = FULL,
    *,
    on_device: bool = False,
    x_in_state: bool = False,
) -> dict[str, Any]:
    """A loaded state with its tensors in memory of their own, in the parameter's layout and as it is to be stored."""
    state = new_state(param, stored, on_device=on_device, x_in_state=x_in_state)
    fill(state, entry, stored)
    state[HESSIAN_STEP] = int(entry[HESSIAN_STEP])
    numbers: dict[str, float] = {STEP: int(entry[STEP]), BIAS2: float(entry[BIAS2])}
    if x_in_state:
        state[WEIGHT].copy_(entry[WEIGHT])
        numbers |= {ASCENT_SCALE: float(entry[ASCENT_SCALE]), ASCENT_DRAW: int(entry[ASCENT_DRAW])}
    for key, value in numbers.items():
        state[key] = state[key].fill_(value) if on_device else value
    return state
