"""The Triton kernels in the forms in which ``prove_triton`` compiles them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton.language as tl
from sassha_fast.triton_kernels import access, gap, math, norm, perturb, probe, step, unseen

from sassha_fast.formats import FULL, Format

DTYPES = {"float32": tl.float32, "float64": tl.float64, "bfloat16": tl.bfloat16, "float16": tl.float16}
ITEM = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}

# Types of the kernels' arguments. Pointers come from torch, which aligns them.
TYPES = {
    **{name: "*i64" for name in ("table", "spans", "noise_draw", "state_draw")},
    **{name: "*fp64" for name in ("scalars", "tallies", "squares", "partials", "totals", "sums", "h")},
    **{name: "i64" for name in ("seed", "draw")},
    "chunks": "*i32",
    "scales": "*fp32",
    "column": "i32",
}


@dataclass(frozen=True)
class Kernel:
    """One pass in one form.

    Attributes:
        name: The pass.
        function: The kernel.
        constants: Its compile-time arguments beside the dtype; None for tensors it does not get.
        streams: How many times it reads or writes an element of the parameter's dtype, of the state's, and a correction
            where there is one; none of any for sums over chunks, whose bytes are not counted.
        types: Argument types that differ from ``TYPES``.
        dtypes: Of parameters for which it is compiled; the kernels know no more of them than this.
        stored: How parameters and state are stored, for kernels that ask. Scales of groups are not counted: of m and
            D together they are 3/16 of a byte per parameter.
    """

    name: str
    function: object
    constants: dict[str, object]
    streams: tuple[int, int, int]
    types: dict[str, str] | None = None
    dtypes: tuple[str, ...] = tuple(DTYPES)
    stored: Format = FULL

    def floor(self, dtype: str) -> int:
        """Bytes per parameter that the algorithm needs."""
        state = 8 if dtype == "float64" else self.stored.state_bits // 8
        parameter, correction = ITEM[dtype], self.stored.correction_bits // 8
        return sum(n * size for n, size in zip(self.streams, (parameter, state, correction), strict=True))

    def divides(self) -> bool:
        """Whether it has a division or a root, which are made of fused steps."""
        decodes = self.function is perturb.momentum_ascent and self.stored.state_bits == 8
        return decodes or self.function in (step.step, unseen.fill_unseen)


def _ascent(
    name: str,
    function: object,
    streams: tuple[int, int, int],
    *,
    adaptive: bool = False,
    dtypes: Sequence[str] = tuple(DTYPES),
    stored: Format = FULL,
) -> Kernel:
    constants: dict[str, object] = {"ADAPTIVE": adaptive, "FORMAT": stored.code}
    return Kernel(name, function, constants, streams, {"draw": "*i64"}, tuple(dtypes), stored)


def _step(
    name: str,
    power: int = math.HALF.value,
    *,
    refresh: bool = False,
    sample: int = math.MAGNITUDE.value,
    at_random: bool = False,
    in_state: bool = False,
    adaptive: bool = False,
    dtypes: Sequence[str] = (),
    stored: Format = FULL,
) -> Kernel:
    constants: dict[str, object] = {"POWER": power, "REFRESH": refresh, "SAMPLE": sample, "AT_RANDOM": at_random}
    rounds = stored.state_bits < 32
    constants.update(ZERO_IS_SEEN=False, IN_STATE=in_state, ADAPTIVE=adaptive)
    constants.update(FORMAT=stored.code, STATE_AT_RANDOM=rounds)
    given = {"tallies": refresh, "squares": in_state, "noise_draw": at_random, "state_draw": rounds}
    constants.update({tensor: None for tensor, there in given.items() if not there})
    # Reads x, g, m, D and writes x, m; a refresh also reads the product and writes D.
    streams = (4, 4, 2) if refresh else (3, 3, 2)
    return Kernel(name, step.step, constants, streams, dtypes=tuple(dtypes or DTYPES), stored=stored)


def _unseen(suffix: str = "", *, dtypes: Sequence[str] = tuple(DTYPES), stored: Format = FULL) -> list[Kernel]:
    rounds = stored.state_bits < 32
    written: dict[str, object] = {"FORMAT": stored.code, "STATE_AT_RANDOM": rounds}
    if not rounds:
        written["state_draw"] = None
    form = {"dtypes": tuple(dtypes), "stored": stored}
    return [
        Kernel("unseen sums" + suffix, unseen.unseen_sums, {"FORMAT": stored.code}, (2, 1, 0), **form),
        Kernel("fill unseen" + suffix, unseen.fill_unseen, written, (2, 2, 0), **form),
    ]


def _compact(stored: Format, *dtypes: str, updates_alone: bool = False) -> list[Kernel]:
    """Passes that know how state and weights are stored, in one format."""
    corrected = f", {16 + stored.correction_bits}-bit x" if stored.correction_bits else ""
    suffix = f", {stored.state_bits}-bit state{corrected}"
    form = {"dtypes": dtypes, "stored": stored}
    updates = [_step("step" + suffix, **form), _step("refresh" + suffix, refresh=True, **form)]
    if updates_alone:
        return updates
    return [
        *([_ascent("perturb" + suffix, perturb.perturb, (4, 0, 1), **form)] if corrected else ()),
        _ascent("momentum ascent" + suffix, perturb.momentum_ascent, (2, 1, 1), **form),
        *(_unseen(suffix, **form) if stored.state_bits < 32 else ()),
        *updates,
        _step("step in state" + suffix, in_state=True, **form),
        _step("refresh in state" + suffix, refresh=True, in_state=True, adaptive=True, **form),
    ]


_WIDE, _REDUCED, _BOTH = ("float32", "float64"), ("bfloat16", "float16"), ("float32", "bfloat16")
KERNELS = (
    Kernel("norm", norm.square_sums, {"ADAPTIVE": False}, (1, 0, 0)),
    Kernel("norm, adaptive", norm.square_sums, {"ADAPTIVE": True}, (2, 0, 0), dtypes=_BOTH),
    *(Kernel(f"finish, {n} per chunk", access.finish, {"WORDS": n}, (0, 0, 0), dtypes=("float64",)) for n in (1, 3)),
    _ascent("perturb", perturb.perturb, (4, 0, 1)),
    _ascent("perturb, adaptive", perturb.perturb, (4, 0, 1), adaptive=True, dtypes=_BOTH),
    _ascent("momentum ascent", perturb.momentum_ascent, (2, 1, 1)),
    _ascent("momentum ascent, adaptive", perturb.momentum_ascent, (2, 1, 1), adaptive=True, dtypes=_BOTH),
    Kernel("restore", perturb.restore, {}, (2, 0, 0)),
    Kernel("gap sums", gap.gap_sums, {}, (2, 0, 0)),
    Kernel("decompose", gap.decompose, {}, (3, 0, 0)),
    *_unseen(),
    Kernel("rademacher", probe.rademacher, {}, (1, 0, 0)),
    Kernel("probe", probe.probe, {}, (2, 0, 0)),
    _step("step"),
    _step("step, power 1", math.ONE.value, dtypes=_WIDE),
    _step("step, any power", math.ANY.value, dtypes=_WIDE),
    _step("step, rounded at random", at_random=True, dtypes=_REDUCED),
    _step("step in state", in_state=True),
    _step("step in state, adaptive", in_state=True, adaptive=True, dtypes=_BOTH),
    _step("step in state, rounded at random", in_state=True, at_random=True, dtypes=_REDUCED),
    _step("refresh", refresh=True),
    _step("refresh, power 1", math.ONE.value, refresh=True, dtypes=_WIDE),
    _step("refresh, any power", math.ANY.value, refresh=True, dtypes=_WIDE),
    _step("refresh, rounded at random", refresh=True, at_random=True, dtypes=_REDUCED),
    _step("refresh, signed", math.ONE.value, refresh=True, sample=math.SIGNED.value, dtypes=_BOTH),
    _step("refresh, squares", refresh=True, sample=math.SQUARE.value, dtypes=_BOTH),
    _step("refresh in state", refresh=True, in_state=True),
    _step("refresh in state, adaptive", refresh=True, in_state=True, adaptive=True, dtypes=_BOTH),
    _step("refresh in state, rounded at random", refresh=True, in_state=True, at_random=True, dtypes=_REDUCED),
    *_compact(Format(8), "float32"),
    *_compact(Format(8, 8), *_REDUCED),
    *_compact(Format(16), "float32"),
    *_compact(Format(16, 16), "bfloat16"),
    *_compact(Format(32, 16), *_REDUCED),
    *(k for s in (Format(8, 16), Format(16, 8), Format(32, 8)) for k in _compact(s, "bfloat16", updates_alone=True)),
    _step("step, any power, 8-bit state", math.ANY.value, dtypes=("float32",), stored=Format(8)),
    _step("refresh, any power, 8-bit state", math.ANY.value, refresh=True, dtypes=("float32",), stored=Format(8)),
    *(
        _step(
            f"refresh, signed, {name}",
            math.ONE.value,
            refresh=True,
            sample=math.SIGNED.value,
            dtypes=(dtype,),
            stored=Format(8, bits, signed=True),
        )
        for dtype, bits, name in (("float32", 0, "8-bit state"), ("bfloat16", 8, "8-bit state, 24-bit x"))
    ),
)
