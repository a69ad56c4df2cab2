"""Per-parameter state: its keys, its creation, and its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ..checks import parameter_name
from ..reference import compute_dtype
from .keys import (
    ASCENT_DRAW,
    ASCENT_SCALE,
    BIAS2,
    EXP_AVG,
    HESSIAN,
    HESSIAN_STEP,
    KEYS,
    KEYS_WITH_X,
    STEP,
    WEIGHT,
)
from .options import HYPERPARAMETERS, check_group
from .upstream import UPSTREAM_CLOCK, from_upstream


def state_tensors(*, x_in_state: bool) -> tuple[str, ...]:
    """Keys of the tensors that the passes work on: m, D, and x where it is kept in state."""
    return (EXP_AVG, HESSIAN, WEIGHT) if x_in_state else (EXP_AVG, HESSIAN)


def new_state(param: Tensor, *, on_device: bool = False, x_in_state: bool = False) -> dict[str, Any]:
    """State of a parameter that has taken no step; with ``on_device`` its numbers are tensors beside it.

    With ``x_in_state`` it has x as well, which the parameter holds as long as nothing has moved it.

    D starts at −0. The sign bit says that no curvature is known, so nothing moves; the first finite |Ĥ| clears it, as
    −0 + 0 is +0.
    """
    dtype = compute_dtype(param.dtype)
    exp_avg = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    if on_device:
        count = torch.zeros((), dtype=torch.int64, device=param.device)
        correction = torch.zeros((), dtype=torch.float64, device=param.device)
    state = {
        STEP: count if on_device else 0,
        HESSIAN_STEP: 0,
        EXP_AVG: exp_avg,
        HESSIAN: torch.full_like(exp_avg, -0.0, memory_format=torch.preserve_format),
        BIAS2: correction if on_device else 0.0,
    }
    if x_in_state:
        weight = torch.empty_like(param, memory_format=torch.preserve_format, requires_grad=False).copy_(param)
        state.update({WEIGHT: weight, ASCENT_SCALE: 0.0, ASCENT_DRAW: 0})
    return state


def check_entry(entry: Mapping[str, Any], param: Tensor, name: str, *, x_in_state: bool, caller: str) -> None:
    """Raises ValueError unless ``entry`` is a complete state that fits ``param``."""
    keys = KEYS_WITH_X if x_in_state else KEYS
    missing, unknown = sorted(keys - entry.keys()), sorted(map(str, entry.keys() - keys))
    if missing or unknown:
        raise ValueError(
            f"{caller}.load_state_dict: state of {name} lacks {missing} and has {unknown}; expected exactly "
            f"{sorted(keys)}. Load a checkpoint written by this optimizer or by the authors' SASSHA"
        )
    for key in state_tensors(x_in_state=x_in_state):
        value = entry[key]
        if not isinstance(value, Tensor) or value.shape != param.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{caller}.load_state_dict: {key!r} of {name} is {found}, expected a tensor of shape "
                f"{tuple(param.shape)}; load it into the model that it was saved from"
            )


def check_is_checkpoint(state_dict: Any, *, caller: str) -> None:
    """Raises ValueError unless it is what ``torch.optim.Optimizer.state_dict`` gives."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        found = sorted(state_dict) if isinstance(state_dict, dict) else type(state_dict).__name__
        raise ValueError(f"{caller}.load_state_dict: found {found}, expected a dict with 'state' and 'param_groups'")


def check_checkpoint(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[Mapping[str, Any]],
    lazy_hessian: int,
    *,
    x_in_state: bool,
    caller: str,
) -> dict[str, Any]:
    """A copy of a checkpoint in our form.

    Raises:
        ValueError: If it is not one of ours or of the authors', or does not fit these parameters.
    """
    groups = [dict(group) for group in state_dict["param_groups"]]
    sizes, expected = [len(g["params"]) for g in groups], [len(g["params"]) for g in param_groups]
    if sizes != expected:
        raise ValueError(
            f"{caller}.load_state_dict: the checkpoint has groups of {sizes} parameters, the optimizer of {expected}; "
            "build the optimizer with the groups that were saved"
        )
    state: dict[Any, dict[str, Any]] = {}
    for g, (saved, group) in enumerate(zip(groups, param_groups, strict=True)):
        missing = sorted({"lr", "betas", "weight_decay", "eps", "perturb_eps"} - saved.keys())
        if missing:
            raise ValueError(
                f"{caller}.load_state_dict: a parameter group lacks {missing}; it was not written by a SASSHA optimizer"
            )
        for key, value in group.items():
            saved.setdefault(key, value)
        known = [key for key in HYPERPARAMETERS if key in saved]
        check_group(saved, known, caller=f"{caller}.load_state_dict")
        given = group.get("param_names") or repeat(None)
        for i, (index, p, name) in enumerate(zip(saved["params"], group["params"], given, strict=False)):
            entry = dict(state_dict["state"].get(index, {}))
            if UPSTREAM_CLOCK in entry:
                entry = from_upstream(entry, saved, lazy_hessian)
            if entry:
                check_entry(entry, p, parameter_name(g, i, name), x_in_state=x_in_state, caller=caller)
                state[index] = entry
    stray = sorted(set(state_dict["state"]) - {i for g in groups for i in g["params"]}, key=str)
    if stray:
        raise ValueError(
            f"{caller}.load_state_dict: state of {stray} belongs to no parameter; the checkpoint is damaged"
        )
    return {"state": state, "param_groups": groups}


def placed(
    entry: Mapping[str, Any], param: Tensor, *, on_device: bool = False, x_in_state: bool = False
) -> dict[str, Any]:
    """A loaded state with its tensors in memory of their own, in the parameter's layout and the state's dtype."""
    state = new_state(param, on_device=on_device, x_in_state=x_in_state)
    state[EXP_AVG].copy_(entry[EXP_AVG])
    state[HESSIAN].copy_(entry[HESSIAN])
    if x_in_state:
        state[WEIGHT].copy_(entry[WEIGHT])
        state.update({ASCENT_SCALE: float(entry[ASCENT_SCALE]), ASCENT_DRAW: int(entry[ASCENT_DRAW])})
    state[HESSIAN_STEP] = int(entry[HESSIAN_STEP])
    if on_device:
        state[STEP].fill_(int(entry[STEP]))
        state[BIAS2].fill_(float(entry[BIAS2]))
    else:
        state.update({STEP: int(entry[STEP]), BIAS2: float(entry[BIAS2])})
    return state
