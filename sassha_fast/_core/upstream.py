"""State that the authors' optimizers and scripts write, in our form."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from ..checks import as_number, is_step_count, parameter_name, refuse_saved
from .keys import ASCENT_DRAW, ASCENT_SCALE, BIAS2, EXP_AVG, HESSIAN, HESSIAN_STEP, STEP, WEIGHT
from .scalars import integer_power

UPSTREAM_CLOCK = "hessian step"  # the authors' name of the clock
UPSTREAM_ASCENT = "e_w"  # the authors keep ε in the state
UPSTREAM_MOMENTUM, UPSTREAM_CURVATURE = "grad_momentum", "hess_momentum"  # m and D of their M-SASSHA


def adopt_clock(entry: MutableMapping[str, Any]) -> None:
    """Takes over a refresh clock that a script wrote under the authors' key on a live optimizer, in place.

    Without any other state the key says nothing that a fresh state would not.
    """
    clock = entry.pop(UPSTREAM_CLOCK)
    if entry:
        entry[HESSIAN_STEP] = int(clock)


def from_upstream(
    entry: Mapping[str, Any], group: Mapping[str, Any], lazy_hessian: int, name: str, *, caller: str
) -> dict[str, Any]:
    """One parameter's state as the authors' optimizer writes it, in our form. The group is checked already.

    Raises:
        ValueError: If a number that is needed for it is none.
    """
    ours = {key: value for key, value in entry.items() if key not in (UPSTREAM_CLOCK, UPSTREAM_ASCENT)}
    if not ours:
        return {}
    clock = ours[HESSIAN_STEP] = _step_count(entry, UPSTREAM_CLOCK, name, caller)
    if BIAS2 in ours and STEP in ours:
        # Theirs is raised to the Hessian power. The step of the last refresh gives the exact value back, unless
        # their script has reset the clock since.
        powered, power = as_number(ours[BIAS2]), float(group["hessian_power"])
        if powered is None or not 0.0 <= powered <= 1.0:
            refuse_saved(f"{BIAS2!r} of {name}", ours[BIAS2], "a number from 0 to 1", caller=caller)
        last_refresh = _step_count(ours, STEP, name, caller) - (clock - 1) % lazy_hessian
        exact = 1.0 - integer_power(group["betas"][1], max(last_refresh, 0))
        known = power == 0.0 or abs(exact**power - powered) <= 1e-9 * powered
        ours[BIAS2] = exact if known else powered ** (1.0 / power)
    elif STEP in ours:  # their language-model code: no bias corrections, and a clock that counts micro-batches
        ours[HESSIAN_STEP], ours[BIAS2] = int(ours[STEP]), 1.0
    return ours


def _step_count(entry: Mapping[str, Any], key: str, name: str, caller: str) -> int:
    value = entry.get(key)
    if not is_step_count(value):
        refuse_saved(f"{key!r} of {name}", value, "an integer from 0 to 2^31 − 1", caller=caller)
    return int(value)  # type: ignore[arg-type]


def from_upstream_momentum(state_dict: Any, param_groups: Sequence[Mapping[str, Any]], lazy_hessian: int) -> Any:
    """A checkpoint of the authors' M-SASSHA in our form, with x from the parameters; any other as it is.

    Raises:
        ValueError: If a value that is needed for it is missing or can't be used.
    """
    if not any(UPSTREAM_MOMENTUM in entry for entry in state_dict["state"].values()):
        return state_dict
    caller = "MSASSHA"
    state, groups = dict(state_dict["state"]), []
    for g, (saved, group) in enumerate(zip(state_dict["param_groups"], param_groups, strict=True)):
        factor, beta2 = _only_number(saved, "norm_factor", 0, g), _only_number(saved, "betas", 1, g)
        ours = {key: value for key, value in saved.items() if key != "norm_factor"}
        groups.append({**ours, "perturb_eps": group["perturb_eps"], "evaluating": True})
        given = group.get("param_names") or [None] * len(group["params"])
        for i, (index, p) in enumerate(zip(saved["params"], group["params"], strict=True)):
            entry, name = state.get(index, {}), parameter_name(g, i, given[i])
            if UPSTREAM_MOMENTUM not in entry:
                state.pop(index, None)
                continue
            step, clock = (_step_count(entry, key, name, caller) for key in (STEP, HESSIAN_STEP))
            last_refresh = max(step - (clock - 1) % lazy_hessian, 0)
            state[index] = {
                STEP: step,
                HESSIAN_STEP: clock,
                EXP_AVG: entry[UPSTREAM_MOMENTUM],
                HESSIAN: entry.get(UPSTREAM_CURVATURE),  # None is refused by its name
                BIAS2: 1.0 - integer_power(beta2, last_refresh),  # theirs is a global variable
                WEIGHT: p.detach(),
                ASCENT_SCALE: -factor,  # they subtract
                ASCENT_DRAW: 0,
            }
    return {"state": state, "param_groups": groups}


def _only_number(saved: Mapping[str, Any], key: str, place: int, number: int) -> float:
    """A number in a list of hyperparameters of the authors' M-SASSHA; 0 if there is no list."""
    values = saved.get(key, (0.0, 0.0))
    found = as_number(values[place]) if isinstance(values, Sequence) and len(values) > place else None
    if found is None or not abs(found) < float("inf"):
        refuse_saved(f"{key!r} of group {number}", values, "a list of finite numbers", caller="MSASSHA")
    return found
