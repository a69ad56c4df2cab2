"""How state and weights are stored in fewer bits: the twin of ``csrc/formats.h``.

A chunk is a tile of rows of 128 elements, so a group of 32 is a quarter of a row: tiles of values are [ROWS, 128], and
those of scales [ROWS, 4].
"""

import triton
import triton.language as tl

from .math import absolute_bits, is_finite, is_unknown, quotient, stochastic_bfloat16, times_sign, to_bfloat16, widen

GROUP = tl.constexpr(32)
GROUPS = tl.constexpr(4)  # in a row of a chunk
NEAREST = tl.constexpr(0x8000)
UNKNOWN_CODE, ZERO_CODE, LEAST_CODE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LARGEST_LEVEL = tl.constexpr(0x7F7)

# ---- Row::format ---------------------------------------------------------------------------------------------------


@triton.constexpr_function
def state_of(stored):
    """Bits of m and D in a format: 32 (64 beside float64 parameters), 16 or 8."""
    return (32, 16, 8)[stored & 3]


@triton.constexpr_function
def correction_of(stored):
    """Bits of the correction beside a parameter: 0, 8 or 16."""
    return 8 * (stored >> 2 & 3)


@triton.constexpr_function
def levels_of(stored):
    """The largest 8-bit code of D, of positive values."""
    return 127 if stored & 16 else 255


# ---- groups --------------------------------------------------------------------------------------------------------


@triton.jit
def largest_of_groups(v, ROWS: tl.constexpr):
    """The largest integer of every group of a tile."""
    return tl.max(tl.reshape(v, (ROWS, GROUPS, GROUP)), axis=2)


@triton.jit
def spread(v, ROWS: tl.constexpr):
    """What the groups of a tile have, at each of their elements."""
    return tl.reshape(tl.broadcast_to(v[:, :, None], (ROWS, GROUPS, GROUP)), (ROWS, GROUPS * GROUP))


# ---- m in 8 bits: s c / (254 - |c|) --------------------------------------------------------------------------------


@triton.jit
def momentum_scale(largest):
    """The scale of a group, of the bits of its largest magnitude; NaN if a value is not finite."""
    return tl.where(largest < 0x7F800000, largest, 0x7FC00000).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def momentum_code(m, scale, noise):
    """254 - 254 / (1 + |m| / s), rounded to 1/4096 and then by noise."""
    usable = scale > 0.0
    a = tl.where(usable, quotient(tl.abs(m), tl.where(usable, scale, 1.0)), 0.0)
    a = tl.where(usable, a, 0.0)
    t = (1040384.0 - tl.div_rn(tl.zeros_like(a) + 1040384.0, 1.0 + a)) + 0.5
    code = (t.to(tl.int32) + (noise >> 4).to(tl.int32)) >> 12
    return tl.where(m < 0.0, -code, code)


@triton.jit
def momentum_value(code, scale):
    """m of int8 codes."""
    c = code.to(tl.float32)
    return scale * tl.div_rn(c, 254.0 - tl.abs(c))


# ---- D in 8 bits: levels of three bits of mantissa, counted down from the largest of the group ----------------------


@triton.jit
def curvature_level(d, noise):
    """The level of a value, 0 for one that is 0 or unknown."""
    bits = absolute_bits(d)
    level = (tl.add(bits, noise.to(tl.uint32) << 4, sanitize_overflow=False) >> 20).to(tl.int32)
    return tl.where(bits == 0, 0, tl.minimum(tl.maximum(level, 1), LARGEST_LEVEL))


@triton.jit
def curvature_code(d, level, top, LEVELS: tl.constexpr):
    """The code of a value, whose group has the largest level ``top``."""
    code = tl.maximum(level - top + LEVELS, LEAST_CODE)
    if LEVELS == 127:
        code = tl.where(d < 0.0, code + 128, code)
    nothing = tl.where(is_unknown(d), UNKNOWN_CODE, ZERO_CODE)
    return tl.where(absolute_bits(d) == 0, nothing, code).to(tl.uint8)


@triton.jit
def curvature_value(code, top, LEVELS: tl.constexpr):
    """D of uint8 codes; -0 where none is known."""
    number = code.to(tl.int32)
    field = number & LEVELS
    level = tl.minimum(tl.maximum(top - LEVELS + field, 1), LARGEST_LEVEL)
    bits = level.to(tl.uint32) << 20
    if LEVELS == 127:
        bits = tl.where(number > LEVELS, bits | 0x80000000, bits).to(tl.uint32)
    nothing = tl.where(field == UNKNOWN_CODE, 0x80000000, 0).to(tl.uint32)
    return tl.where(field < LEAST_CODE, nothing, bits).to(tl.float32, bitcast=True)


@triton.jit
def curvature_scale(top):
    """The scale of a group as bfloat16 bits: its largest value."""
    return (top << 4).to(tl.uint16)


@triton.jit
def top_of(scale):
    """The largest level of a group, of the bits of its scale."""
    return scale.to(tl.int32) >> 4


# ---- m and D in 16 bits: bfloat16 ------------------------------------------------------------------------------------


@triton.jit
def momentum16(m, noise):
    """m as bfloat16 bits."""
    return to_bfloat16(stochastic_bfloat16(m, noise))


@triton.jit
def curvature16(d, noise):
    """D as bfloat16 bits. Known curvature does not become 0, nor -0, which says that none is known."""
    rounded = momentum16(d, noise)
    lost = (absolute_bits(d) != 0) & ((rounded & 0x7FFF) == 0)
    return tl.where(lost, rounded | 1, rounded).to(tl.uint16)


# ---- x in 24 or 32 bits: a parameter and a correction of BITS bits beside it -----------------------------------------


@triton.jit
def corrected(x, T: tl.constexpr, BITS: tl.constexpr):
    """The parameter, as memory holds it, and the correction (int32) that makes x of it."""
    if T == tl.bfloat16:
        word = x.to(tl.uint32, bitcast=True)
        if BITS == 8:
            word = tl.add(word, 0x80, sanitize_overflow=False) & 0xFFFFFF00
        upper = tl.add(word, 0x8000, sanitize_overflow=False) & 0xFFFF0000
        rest = tl.sub(word, upper, sanitize_overflow=False).to(tl.int32, bitcast=True) >> (16 - BITS)
        finite = is_finite(x) & is_finite(upper.to(tl.float32, bitcast=True))
        return tl.where(finite, (upper >> 16).to(tl.uint16), to_bfloat16(x)), tl.where(finite, rest, 0)
    else:
        HALF: tl.constexpr = 1 << (BITS - 1)
        word = absolute_bits(x)
        magnitude = word.to(tl.float32, bitcast=True)
        normal = (tl.add(word, 0x1000, sanitize_overflow=False) & 0xFFFFE000).to(tl.float32, bitcast=True)
        subnormal = tl.floor(magnitude * 16777216.0 + 0.5) * 5.9604644775390625e-08
        p = tl.where(magnitude >= 6.103515625e-05, normal, subnormal)
        finite = p <= 65504.0
        p = tl.where(finite, p, 0.0)
        exponent = tl.maximum((p.to(tl.uint32, bitcast=True) >> 23).to(tl.int32), 113)
        places = ((264 - exponent) << 23).to(tl.float32, bitcast=True)
        left = tl.where(finite, magnitude - p, 0.0)
        steps = tl.floor(left * places * (2.0 * HALF) + 0.5)
        rest = tl.minimum(tl.maximum(steps, -1.0 * HALF), HALF - 1.0).to(tl.int32)
        signed = times_sign(p, x.to(tl.uint32, bitcast=True) >> 31)
        return tl.where(finite, signed, x).to(tl.float16), tl.where(finite, rest, 0)


@triton.jit
def weight_of(param, correction, T: tl.constexpr, BITS: tl.constexpr):
    """x of a parameter, as memory holds it, and its correction."""
    wide = widen(param)
    sign = wide.to(tl.uint32, bitcast=True) >> 31
    word = absolute_bits(wide)
    r = correction.to(tl.int32)
    if T == tl.bfloat16:
        x = tl.maximum(word.to(tl.int32, bitcast=True) + (r << (16 - BITS)), 0).to(tl.float32, bitcast=True)
    else:
        exponent = tl.maximum((word >> 23).to(tl.int32), 113)
        place = ((exponent - 10) << 23).to(tl.float32, bitcast=True)
        part = r.to(tl.float32) * (1.0 / (1 << BITS))
        x = tl.maximum(tl.abs(wide) + part * place, 0.0)
    return tl.where(is_finite(wide), times_sign(x, sign), wide)
