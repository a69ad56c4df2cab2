"""State in fewer bits: which parameters have it, and its way to float32 and back, which checkpoints take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .. import formats
from .._passes.shards import is_sharded, local
from ..checks import refuse_saved
from ..formats import Format, flat, format_of, groups_of, mantissa_of
from ..variant import Sample
from .keys import (
    CODES_ORDER,
    COMPACT_KEYS,
    CORRECTION,
    CORRECTION_OF,
    EXP_AVG,
    EXP_AVG_SCALE,
    HESSIAN,
    HESSIAN_SCALE,
    ONLY_SAVED,
    SAVED_CODES,
    WEIGHT,
)
from .options import Options

CODES = (torch.int8, torch.uint8)
CORRECTIONS = {torch.int8: 8, torch.int16: 16}
KINDS = {EXP_AVG: (torch.int8,), HESSIAN: CODES, CORRECTION: tuple(CORRECTIONS)}  # of codes, by what they are of


def stored_format(param: Tensor, options: Options) -> Format:
    """How a parameter and its state are stored."""
    return format_of(
        param,
        state_bits=options.state_bits,
        master_weight_bits=options.master_weight_bits,
        below=options.full_precision_below,
        signed=options.variant.sample is Sample.SIGNED,
    )


def new_tensors(param: Tensor, stored: Format) -> dict[str, Any]:
    """m = 0, D of which nothing is known, and a correction of 0, as ``stored`` says."""
    m, d = stored.dtypes(param.dtype)
    exp_avg = torch.zeros_like(param, dtype=m, memory_format=torch.preserve_format)
    nothing = formats.UNKNOWN if stored.state_bits == 8 else -0.0
    tensors: dict[str, Any] = {
        EXP_AVG: exp_avg,
        HESSIAN: torch.full_like(exp_avg, nothing, dtype=d, memory_format=torch.preserve_format),
    }
    if stored.state_bits == 8:
        groups = groups_of(local(param).numel())
        tensors[EXP_AVG_SCALE] = torch.zeros(groups, dtype=torch.float32, device=param.device)
        tensors[HESSIAN_SCALE] = torch.zeros(groups, dtype=torch.bfloat16, device=param.device)
    if stored.correction_bits:
        dtype = stored.correction_dtype
        tensors[CORRECTION] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        tensors[CORRECTION_OF] = mantissa_of(param.dtype)
    saved = [SAVED_CODES[key] for key in SAVED_CODES if _is_code(tensors.get(key))]
    return tensors | dict.fromkeys(saved + [CODES_ORDER] * (stored.state_bits == 8))


def is_compact(entry: Mapping[str, Any]) -> bool:
    """Whether the state of a parameter is stored in fewer bits than float32."""
    return CORRECTION in entry or (EXP_AVG in entry and entry[EXP_AVG].dtype in (*CODES, torch.bfloat16))


# ---- to float32 ---------------------------------------------------------------------------------------------------


def has_correction(entry: Mapping[str, Any]) -> bool:
    """Whether the state of a parameter says more of x than the parameter does."""
    return CORRECTION in entry and bool(local(entry[CORRECTION]).any())


def belongs(entry: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Whether a correction counts places of ``dtype``. State from before it was written down is taken for such."""
    return int(entry.get(CORRECTION_OF, mantissa_of(dtype))) == mantissa_of(dtype)


def momentum(entry: Mapping[str, Any]) -> Tensor:
    """m of a parameter's state, in float32 or float64."""
    m: Tensor = entry[EXP_AVG]
    if m.dtype not in CODES:
        return m.to(torch.float32) if m.dtype == torch.bfloat16 else m
    return _decoded(m, formats.momentum_of(flat(local(m)), entry[EXP_AVG_SCALE]))


def curvature(entry: Mapping[str, Any]) -> Tensor:
    """D of a parameter's state, likewise; −0 where none is known."""
    d: Tensor = entry[HESSIAN]
    if d.dtype not in CODES:
        return d.to(torch.float32) if d.dtype == torch.bfloat16 else d
    signed = d.dtype == torch.int8
    return _decoded(d, formats.curvature_of(flat(local(d)), entry[HESSIAN_SCALE], signed=signed))


def _decoded(codes: Tensor, values: Tensor) -> Tensor:
    """Values in the order of memory as a tensor like the codes."""
    out = torch.empty_like(codes, dtype=torch.float32, memory_format=torch.preserve_format)
    flat(local(out)).copy_(values)
    return out


def weight(param: Tensor, entry: Mapping[str, Any]) -> Tensor:
    """x of a parameter in float32 or float64, with all bits that its state has of it."""
    x: Tensor = entry.get(WEIGHT, param.detach())
    if CORRECTION in entry:
        out = torch.empty_like(x, dtype=torch.float32, memory_format=torch.preserve_format)
        local(out).copy_(formats.weight_of(local(x), local(entry[CORRECTION])))
        return out
    return x.clone() if x.dtype == torch.float64 else x.to(torch.float32, copy=True)


def full_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter with m and D in float32, and with the correction as a part of the last place."""
    full = {key: value for key, value in entry.items() if key not in (EXP_AVG_SCALE, HESSIAN_SCALE, *ONLY_SAVED)}
    for key, decode in ((EXP_AVG, momentum), (HESSIAN, curvature)):
        if isinstance(entry.get(key), Tensor):
            full[key] = decode(entry)
    if _is_code(entry.get(CORRECTION)):
        bits = CORRECTIONS[entry[CORRECTION].dtype]
        full[CORRECTION] = entry[CORRECTION].to(torch.float32) * 2.0**-bits
    return _with_tensors(full)


def as_full(packed: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint with :func:`full_entry` in place of all entries."""
    own = {saved: key for key, saved in SAVED_CODES.items()}
    state = {}
    for index, saved in packed["state"].items():
        entry = _in_order({own.get(key, key): value for key, value in saved.items()})
        state[index] = full_entry(entry) if is_compact(entry) else entry
    return {**packed, "state": state}


def saved_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """State as it is, with codes under names of their own, and with the order that their groups have in memory."""
    own = ((key, value) for key, value in entry.items() if key not in ONLY_SAVED)
    saved = {SAVED_CODES.get(key, key) if _is_code(value) else key: value for key, value in own}
    if EXP_AVG_SCALE in entry:
        saved[CODES_ORDER] = _order_of(entry[EXP_AVG])
    return _with_tensors(saved)


def _with_tensors(saved: dict[str, Any]) -> dict[str, Any]:
    """Numbers as tensors of one dimension: torch's full_state_dict fails on others that only one side has."""
    bits = saved.get(CORRECTION_OF)
    if (
        isinstance(bits, int) and bits.bit_length() < 64
    ):  # a damaged one may be beyond all tensors, and is refused later
        device = next(value.device for value in saved.values() if isinstance(value, Tensor))
        saved[CORRECTION_OF] = torch.tensor([bits], device=device)
    return saved


def _order_of(codes: Tensor) -> Tensor:
    """The dimensions from the largest stride to the smallest: 0, 1, 2, 3 as a rule, and 0, 2, 3, 1 in channels last.

    Tools that copy tensors, ``torch.distributed.checkpoint`` among them, keep the index of an element but not its place
    in memory, which the groups follow.
    """
    order = list(range(codes.dim()))
    if not codes.is_contiguous():
        order.sort(key=lambda d: -codes.stride()[d])
    return torch.tensor(order, device=codes.device)


def _is_order(value: Any, dims: int) -> bool:
    """Whether it is what :func:`_order_of` gives for so many dimensions."""
    return _is_plain(value, (dims,)) and value.dtype == torch.int64 and sorted(value.tolist()) == list(range(dims))


def _in_order(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A saved entry with 8-bit codes laid out as they were when they were saved. Older ones say nothing of it."""
    found = dict(entry)
    given = found.pop(CODES_ORDER, None)
    for key in (EXP_AVG, HESSIAN):
        codes = found.get(key)
        if _is_code(codes) and codes.layout == torch.strided and _is_order(given, codes.dim()):
            order: list[int] = given.tolist()
            found[key] = codes.permute(order).contiguous().permute([order.index(d) for d in range(codes.dim())])
    return found


def _is_code(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype in (*CODES, *CORRECTIONS)


# ---- and back -----------------------------------------------------------------------------------------------------


def checked_full(entry: Mapping[str, Any], param: Tensor, name: str, stored: Format, *, caller: str) -> dict[str, Any]:
    """A loaded entry as :func:`full_entry` gives it. ``stored`` is what the optimizer itself has for the parameter.

    Raises:
        ValueError: If codes do not fit their scales, or the parameter.
    """
    entry = _of_one_form(_without_empty(entry, name, caller), param, stored)
    entry = _with_own_names(entry, name, caller)
    for key, kinds in KINDS.items():
        if _is_code(entry.get(key)) and entry[key].dtype not in kinds:
            expected = f"codes of {' or '.join(map(str, kinds))}"
            refuse_saved(f"{SAVED_CODES[key]!r} of {name}", entry[key], expected, caller=caller)
    if is_sharded(param) and any(_is_code(value) and not is_sharded(value) for value in entry.values()):
        raise ValueError(
            f"{caller}.load_state_dict: {name} is in shards, and its state in the checkpoint has codes of the whole "
            "parameter; load it into an optimizer of parameters that are not in shards with neither state_bits nor "
            "master_weight_bits, and what that one saves into this one"
        )
    if CODES_ORDER in entry and not _is_order(entry[CODES_ORDER], param.dim()):
        expected = f"a tensor of its {param.dim()} dimensions in the order of memory"
        refuse_saved(f"{CODES_ORDER!r} of {name}", entry[CODES_ORDER], expected, caller=caller)
    entry = _in_order(entry)
    for key, scale_key, dtype in ((EXP_AVG, EXP_AVG_SCALE, torch.float32), (HESSIAN, HESSIAN_SCALE, torch.bfloat16)):
        codes, scales = entry.get(key), entry.get(scale_key)
        if not isinstance(codes, Tensor) or codes.dtype not in CODES:
            if scale_key in entry:
                refuse_saved(f"{key!r} of {name}", codes, f"codes of 8 bits beside {scale_key!r}", caller=caller)
            continue
        _check_codes(key, codes, param, name, caller)
        if key == EXP_AVG and bool((local(codes) == -128).any()):
            refuse_saved(f"{SAVED_CODES[key]!r} of {name}", codes, "codes from −127 to 127", caller=caller)
        groups = groups_of(local(codes).numel())
        if not _is_plain(scales, (groups,)) or scales.dtype != dtype:
            refuse_saved(f"{scale_key!r} of {name}", scales, f"{groups} scales of {dtype}", caller=caller)
        if not bool((scales >= 0).all() & torch.isfinite(scales).all()):
            refuse_saved(f"{scale_key!r} of {name}", scales, "finite scales that are not negative", caller=caller)
    if _is_code(entry.get(CORRECTION)):
        _check_codes(CORRECTION, entry[CORRECTION], param, name, caller)
    return full_entry(entry)


def is_empty(value: Any) -> bool:
    """Whether it is what torch puts where a flat checkpoint lacks a name that the state of the optimizer has."""
    return isinstance(value, dict) and not value


def _without_empty(entry: Mapping[str, Any], name: str, caller: str) -> dict[str, Any]:
    """An entry without such names that the form alone decides on. The checkpoint may have the values under others."""
    forms = (EXP_AVG, HESSIAN, *COMPACT_KEYS, *ONLY_SAVED)
    found = {key: value for key, value in entry.items() if key not in forms or not is_empty(value)}
    missing = [key for key in (EXP_AVG, HESSIAN) if key in entry and not {key, SAVED_CODES[key]} & found.keys()]
    if missing:
        raise ValueError(
            f"{caller}.load_state_dict: {missing[0]!r} of {name} is empty: with "
            "StateDictOptions(flatten_optimizer_state_dict=True) torch asks a checkpoint only for names that the state "
            "of this optimizer has, and the checkpoint has others; load it into an optimizer with the state_bits, "
            "master_weight_bits and full_precision_below that it was saved with, and what that one's state_dict() "
            "gives into this one"
        )
    return found


def _of_one_form(entry: Mapping[str, Any], param: Tensor, stored: Format) -> dict[str, Any]:
    """An entry without what torch.distributed.checkpoint.state_dict has added to it.

    With ``full_state_dict=True`` it gives an entry all keys of the optimizer that loads it, with the values that this
    one has. Where there are codes and numbers of one tensor, those in the form of this optimizer are its own.
    """
    found = dict(entry)
    both = [key for key, saved in SAVED_CODES.items() if _is_code(found.get(saved)) and _is_number(found.get(key))]
    for key in both:
        in_codes = stored.correction_bits > 0 if key == CORRECTION else stored.state_bits == 8
        if is_sharded(param) or not in_codes:
            del found[key]
            continue
        del found[SAVED_CODES[key]]
        for beside in {EXP_AVG: (EXP_AVG_SCALE, CODES_ORDER), HESSIAN: (HESSIAN_SCALE,), CORRECTION: ()}[key]:
            found.pop(beside, None)
    return found


def _is_plain(value: Any, shape: tuple[int, ...]) -> TypeGuard[Tensor]:
    """Whether it is a dense tensor of this shape, which has memory."""
    if not isinstance(value, Tensor) or value.is_nested or value.is_meta or value.layout != torch.strided:
        return False
    return tuple(value.shape) == shape


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _with_own_names(entry: Mapping[str, Any], name: str, caller: str) -> dict[str, Any]:
    """A saved entry with codes under the names that they have in state."""
    found = dict(entry)
    for key, saved in SAVED_CODES.items():
        if saved in found:
            if key in found or not _is_code(found[saved]):
                refuse_saved(f"{saved!r} of {name}", found[saved], f"codes, in place of {key!r}", caller=caller)
            found[key] = found.pop(saved)
    return found


def _check_codes(key: str, codes: Tensor, param: Tensor, name: str, caller: str) -> None:
    fits = _is_plain(local(codes), tuple(local(param).shape)) and is_sharded(codes) == is_sharded(param)
    if not fits or not torch.ops.aten.is_non_overlapping_and_dense(local(codes)):
        refuse_saved(f"{key!r} of {name}", codes, f"codes of shape {tuple(param.shape)}", caller=caller)


def fill(state: Mapping[str, Any], entry: Mapping[str, Any], stored: Format) -> None:
    """Writes m, D and the correction of a full entry into new state, rounded to nearest."""
    _fill_average(state, EXP_AVG, EXP_AVG_SCALE, entry[EXP_AVG], stored)
    _fill_average(state, HESSIAN, HESSIAN_SCALE, entry[HESSIAN], stored)
    if CORRECTION in state and CORRECTION in entry:
        half = 1 << (stored.correction_bits - 1)
        parts = torch.floor(local(entry[CORRECTION]).to(torch.float32) * (2.0 * half) + 0.5)
        local(state[CORRECTION]).copy_(torch.clamp(parts, -half, half - 1))


def _fill_average(state: Mapping[str, Any], key: str, scale_key: str, value: Tensor, stored: Format) -> None:
    target = state[key]
    if stored.state_bits == 32:
        target.copy_(value)
        return
    laid_out = torch.empty_like(target, dtype=torch.float32, memory_format=torch.preserve_format).copy_(value)
    values, here = flat(local(laid_out)), flat(local(target))
    if stored.state_bits == 16:
        encode = formats.encode_momentum16 if key == EXP_AVG else formats.encode_curvature16
        here.copy_(encode(values))
        return
    if key == EXP_AVG:
        codes, scales = formats.encode_momentum(values)
    else:
        codes, scales = formats.encode_curvature(values, signed=stored.signed)
    here.copy_(codes)
    state[scale_key].copy_(scales)
