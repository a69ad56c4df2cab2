"""State that the authors' optimizers and scripts write, in our form."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

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
    elif STEP in ours:  # their language-model code: no bias corrections, and a clock that counts micro-batches
        ours[HESSIAN_STEP], ours[BIAS2] = int(ours[STEP]), 1.0
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
