"""Per-parameter state: its keys, its creation, and checkpoints of the authors' optimizer."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .checks import check_group, parameter_name
from .reference import compute_dtype
from .scalars import integer_power

__all__ = [
    "ASCENT_DRAW",
    "ASCENT_SCALE",
    "BIAS2",
    "EXP_AVG",
    "HESSIAN",
    "HESSIAN_STEP",
    "STEP",
    "UPSTREAM_CLOCK",
    "WEIGHT",
    "adopt_clock",
    "check_checkpoint",
    "check_entry",
    "check_is_checkpoint",
    "from_upstream",
    "from_upstream_momentum",
    "new_state",
    "placed",
]

STEP = "step"  # t: steps that this parameter has taken
HESSIAN_STEP = "hessian_step"  # the optimizer's refresh clock when it took the last of them
EXP_AVG = "exp_avg"  # m
HESSIAN = "exp_hessian_diag"  # D
BIAS2 = "bias_correction2"  # 1 − β2^t of its last refresh, 0 before the first
KEYS = frozenset((STEP, HESSIAN_STEP, EXP_AVG, HESSIAN, BIAS2))

# Where x lives apart from the parameter:
WEIGHT = "weight"  # x
ASCENT_SCALE = "ascent_scale"  # the parameter holds x + scale·m (ASAM: x + scale·m⊙x²)
ASCENT_DRAW = "ascent_draw"  # number of the draw that it was rounded with, if it is of reduced precision
APART_KEYS = KEYS | {WEIGHT, ASCENT_SCALE, ASCENT_DRAW}

UPSTREAM_CLOCK = "hessian step"  # the authors' name of the clock
UPSTREAM_ASCENT = "e_w"  # the authors keep ε in the state
UPSTREAM_MOMENTUM, UPSTREAM_CURVATURE = "grad_momentum", "hess_momentum"  # m and D of their M-SASSHA


def new_state(param: Tensor, *, on_device: bool = False, apart: bool = False) -> dict[str, Any]:
    """State of a parameter that has taken no step; with ``on_device`` its numbers are tensors beside it.

    With ``apart`` it has x as well, which the parameter holds as long as nothing has moved it.

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
    if apart:
        weight = torch.empty_like(param, memory_format=torch.preserve_format, requires_grad=False).copy_(param)
        state.update({WEIGHT: weight, ASCENT_SCALE: 0.0, ASCENT_DRAW: 0})
    return state


def adopt_clock(entry: MutableMapping[str, Any]) -> None:
    """Takes over a refresh clock that a script wrote under the authors' key on a live optimizer, in place.

    Without any other state the key says nothing that a fresh state would not.
    """
    clock = entry.pop(UPSTREAM_CLOCK)
    if entry:
        entry[HESSIAN_STEP] = int(clock)


def from_upstream(entry: Mapping[str, Any], group: Mapping[str, Any], lazy_hessian: int) -> dict[str, Any]:
    """One parameter's state as the authors' optimizer writes it, in our form."""
    ours = {key: value for key, value in entry.items() if key not in (UPSTREAM_CLOCK, UPSTREAM_ASCENT)}
    if not ours:
        return {}
    clock = ours[HESSIAN_STEP] = int(entry[UPSTREAM_CLOCK])
    if BIAS2 in ours and STEP in ours:
        # Theirs is raised to the Hessian power. The step of the last refresh gives the exact value back, unless
        # their script has reset the clock since.
        powered, power = float(ours[BIAS2]), float(group["hessian_power"])
        last_refresh = int(ours[STEP]) - (clock - 1) % lazy_hessian
        exact = 1.0 - integer_power(group["betas"][1], max(last_refresh, 0))
        known = abs(exact**power - powered) <= 1e-9 * powered
        ours[BIAS2] = exact if known else powered ** (1.0 / power)
    return ours


def from_upstream_momentum(state_dict: Any, param_groups: Sequence[Mapping[str, Any]], lazy_hessian: int) -> Any:
    """A checkpoint of the authors' M-SASSHA in our form, with x from the parameters; any other as it is."""
    if not any(UPSTREAM_MOMENTUM in entry for entry in state_dict["state"].values()):
        return state_dict
    state, groups = dict(state_dict["state"]), []
    for saved, group in zip(state_dict["param_groups"], param_groups, strict=False):
        factor = float(saved.get("norm_factor", [0.0])[0])
        ours = {key: value for key, value in saved.items() if key != "norm_factor"}
        groups.append({**ours, "perturb_eps": group["perturb_eps"], "evaluating": True})
        for index, p in zip(saved["params"], group["params"], strict=False):
            entry = state.get(index, {})
            if UPSTREAM_MOMENTUM not in entry:
                state.pop(index, None)
                continue
            step, clock = int(entry[STEP]), int(entry[HESSIAN_STEP])
            last_refresh = max(step - (clock - 1) % lazy_hessian, 0)
            state[index] = {
                STEP: step,
                HESSIAN_STEP: clock,
                EXP_AVG: entry[UPSTREAM_MOMENTUM],
                HESSIAN: entry[UPSTREAM_CURVATURE],
                BIAS2: 1.0 - integer_power(saved["betas"][1], last_refresh),  # theirs is a global variable
                WEIGHT: p.detach(),
                ASCENT_SCALE: -factor,  # they subtract
                ASCENT_DRAW: 0,
            }
    return {"state": state, "param_groups": groups}


def check_entry(entry: Mapping[str, Any], param: Tensor, name: str, *, apart: bool, caller: str) -> None:
    """Raises ValueError unless ``entry`` is a complete state that fits ``param``."""
    keys = APART_KEYS if apart else KEYS
    missing, unknown = sorted(keys - entry.keys()), sorted(map(str, entry.keys() - keys))
    if missing or unknown:
        raise ValueError(
            f"{caller}.load_state_dict: state of {name} lacks {missing} and has {unknown}; expected exactly "
            f"{sorted(keys)}. Load a checkpoint written by this optimizer or by the authors' SASSHA"
        )
    for key in (EXP_AVG, HESSIAN, WEIGHT) if apart else (EXP_AVG, HESSIAN):
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
    apart: bool,
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
        check_group(saved, caller=f"{caller}.load_state_dict")
        given = group.get("param_names") or repeat(None)
        for i, (index, p, name) in enumerate(zip(saved["params"], group["params"], given, strict=False)):
            entry = dict(state_dict["state"].get(index, {}))
            if UPSTREAM_CLOCK in entry:
                entry = from_upstream(entry, saved, lazy_hessian)
            if entry:
                check_entry(entry, p, parameter_name(g, i, name), apart=apart, caller=caller)
                state[index] = entry
    stray = sorted(set(state_dict["state"]) - {i for g in groups for i in g["params"]}, key=str)
    if stray:
        raise ValueError(
            f"{caller}.load_state_dict: state of {stray} belongs to no parameter; the checkpoint is damaged"
        )
    return {"state": state, "param_groups": groups}


def placed(entry: Mapping[str, Any], param: Tensor, *, on_device: bool = False, apart: bool = False) -> dict[str, Any]:
    """A loaded state with its tensors in memory of their own, in the parameter's layout and the state's dtype."""
    state = new_state(param, on_device=on_device, apart=apart)
    state[EXP_AVG].copy_(entry[EXP_AVG])
    state[HESSIAN].copy_(entry[HESSIAN])
    if apart:
        state[WEIGHT].copy_(entry[WEIGHT])
        state.update({ASCENT_SCALE: float(entry[ASCENT_SCALE]), ASCENT_DRAW: int(entry[ASCENT_DRAW])})
    state[HESSIAN_STEP] = int(entry[HESSIAN_STEP])
    if on_device:
        state[STEP].fill_(int(entry[STEP]))
        state[BIAS2].fill_(float(entry[BIAS2]))
    else:
        state.update({STEP: int(entry[STEP]), BIAS2: float(entry[BIAS2])})
    return state
