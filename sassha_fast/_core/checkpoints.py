"""Checkpoints: what is saved of the state, and the state that is made of what was saved."""

from __future__ import annotations

import warnings
from collections import defaultdict
from itertools import islice
from typing import Any

from torch import Tensor, nn

from .._passes.shards import is_sharded
from ..checks import refuse_cast, user_level
from .compact import belongs, full_entry, has_correction, is_compact, saved_entry, stored_format, weight
from .keys import CORRECTION, CORRECTION_OF, WEIGHT
from .options import Options
from .params import Parameters
from .state import check_checkpoint, copied, own_schema, placed

Entries = dict[Tensor, dict[str, Any]]


def entries_to_save(params: Parameters) -> Entries | None:
    """The state as checkpoints have it, None if that is what it is."""
    if not any(map(is_compact, params.state.values())):
        return None
    saved = full_entry if any(map(is_sharded, params.all)) else saved_entry  # groups of a scale lie within a shard
    return {p: saved(entry) if is_compact(entry) else entry for p, entry in params.state.items()}


def loaded(state_dict: dict[str, Any], params: Parameters, options: Options) -> tuple[Entries, list[dict[str, Any]]]:
    """State and groups of a checkpoint, whose structure is known to be good. Nothing is changed."""
    x_in_state = options.variant.x_in_state
    schema = own_schema(options.variant, lambda p: stored_format(p, options), caller=options.caller)
    found = check_checkpoint(state_dict, params.groups, options.lazy_hessian, schema)
    state: Entries = defaultdict(dict)
    groups, dropped, names = [], [], iter(params.names())
    for saved, group in zip(found["param_groups"], params.groups, strict=True):
        mine = islice(names, len(group["params"]))
        for key, p, name in zip(saved.pop("params"), group["params"], mine, strict=True):
            if key in found["state"]:
                entry = found["state"][key]
                stored = stored_format(p, options)
                if not (stored.correction_bits and belongs(entry, p.dtype)):
                    if has_correction(entry):
                        dropped.append(name)
                    entry.pop(CORRECTION, None)
                state[p] = placed(entry, p, stored, on_device=options.capturable, x_in_state=x_in_state)
        groups.append({**{key: copied(value) for key, value in saved.items()}, "params": group["params"]})
    if dropped:
        warnings.warn(
            f"{options.caller}.load_state_dict: the checkpoint has bits of {len(dropped)} weights, {dropped[0]} "
            "among them, that their 16 bits in the model have not, and this optimizer can't take them over; "
            "construct it with master_weight_bits=24 or 32 over parameters of the dtype that they had, bfloat16 or "
            "float16, or load into the model what master_weights(model) gave where the checkpoint was saved, with "
            "model.load_state_dict(weights, strict=False) if the model has buffers",
            stacklevel=user_level(),
        )
    return state, groups


def master_weights(model: nn.Module, params: Parameters, *, caller: str) -> dict[str, Tensor]:
    """Weights of a model by name, with all bits that are known of them."""
    mine = set(params.all)
    found: dict[Tensor, Tensor] = {}
    names = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if p in mine]
    for name, p in names:
        if p not in found:
            entry = params.state.get(p, {})
            _check_correction(p, entry, name, caller)
            found[p] = weight(p, entry)
    return {name: found[p] for name, p in names}


def _check_correction(param: Tensor, entry: dict[str, Any], name: str, caller: str) -> None:
    """Raises RuntimeError if x can't be had from a correction: the parameter was of another dtype then."""
    if CORRECTION in entry and WEIGHT not in entry and not belongs(entry, param.dtype):
        bits = f"{CORRECTION!r} is of a dtype with {entry[CORRECTION_OF]} bits of mantissa"
        refuse_cast(repr(name), param, bits, caller=caller)
