"""x, m and D of a chunk, in whatever format they are stored.

FORMAT is ``Row::format``, which all rows of a launch share. Values are tiles in the compute type; what memory holds
of them is decoded on the way in and encoded on the way out, a whole group at a time.
"""

import triton
import triton.language as tl

from .access import CHUNK_ROWS, INDEX, LANES, NUMEL, inside, load, store
from .formats import (
    GROUP,
    GROUPS,
    NEAREST,
    correction_of,
    curvature16,
    curvature_code,
    curvature_level,
    curvature_scale,
    curvature_value,
    largest_of_groups,
    levels_of,
    momentum16,
    momentum_code,
    momentum_scale,
    momentum_value,
    spread,
    state_of,
    top_of,
    weight_of,
)
from .math import absolute_bits, widen
from .philox import CURVATURE_NOISE, MOMENTUM_NOISE, noise_bits


@triton.jit
def scale_pointers(address, begin, T: tl.constexpr):
    """Pointers to the scales of a chunk's groups, [CHUNK_ROWS, GROUPS]."""
    base = address.to(tl.pointer_type(T)) + begin // GROUP
    return base + tl.arange(0, CHUNK_ROWS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]


@triton.jit
def has_elements(row, begin):
    """Which groups of a chunk begin within the tensor."""
    number = tl.arange(0, CHUNK_ROWS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    return number * GROUP < tl.load(row + NUMEL) - begin


@triton.jit
def load_scales(row, address, begin, T: tl.constexpr, FULL: tl.constexpr):
    """The scales of a chunk's groups, 0 past the end."""
    at = scale_pointers(address, begin, T)
    if FULL:
        return tl.load(at)
    else:
        return tl.load(at, mask=has_elements(row, begin), other=0)


@triton.jit
def store_scales(row, address, begin, value, T: tl.constexpr, FULL: tl.constexpr):
    """Writes what :func:`load_scales` reads."""
    at = scale_pointers(address, begin, T)
    if FULL:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=has_elements(row, begin))


@triton.jit
def rounding_noise(row, begin, rounding, AT_RANDOM: tl.constexpr, DOMAIN: tl.constexpr):
    """Sixteen bits for each element of a chunk, by which state is rounded. ``rounding`` is a seed and a draw."""
    if AT_RANDOM:
        seed, draw = rounding
        return noise_bits(seed, tl.load(row + INDEX), draw, begin, CHUNK_ROWS, DOMAIN)
    else:
        return tl.full((CHUNK_ROWS, LANES), NEAREST, tl.uint32)


@triton.jit
def nothing_past_the_end(row, begin, v, FULL: tl.constexpr):
    """v, and 0 for elements that are not there: they take no part in what their group shares."""
    if FULL:
        return v
    else:
        return tl.where(inside(row, begin), v, 0.0)


# ---- x -------------------------------------------------------------------------------------------------------------


@triton.jit
def weight(row, begin, kept, correction, T: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr):
    """x of a parameter as memory holds it, with the correction beside it where there is one."""
    BITS: tl.constexpr = correction_of(FORMAT)
    if BITS == 0:
        return widen(kept)
    else:
        return weight_of(kept, load_correction(row, begin, correction, FORMAT, FULL), T, BITS)


@triton.jit
def load_correction(row, begin, correction, FORMAT: tl.constexpr, FULL: tl.constexpr):
    """The corrections of a chunk."""
    INTEGER: tl.constexpr = tl.int8 if correction_of(FORMAT) == 8 else tl.int16
    return load(row, correction, begin, INTEGER, FULL)


@triton.jit
def store_correction(row, begin, correction, value, FORMAT: tl.constexpr, FULL: tl.constexpr):
    """Writes what :func:`load_correction` reads."""
    INTEGER: tl.constexpr = tl.int8 if correction_of(FORMAT) == 8 else tl.int16
    store(row, correction, begin, value.to(INTEGER), INTEGER, FULL)


# ---- m -------------------------------------------------------------------------------------------------------------


@triton.jit
def load_momentum(row, begin, exp_avg, scales, C: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr):
    """m of a chunk."""
    BITS: tl.constexpr = state_of(FORMAT)
    if BITS == 8:
        codes = load(row, exp_avg, begin, tl.int8, FULL)
        return momentum_value(codes, spread(load_scales(row, scales, begin, tl.float32, FULL), CHUNK_ROWS))
    elif BITS == 16:
        return widen(load(row, exp_avg, begin, tl.bfloat16, FULL))
    else:
        return load(row, exp_avg, begin, C, FULL)


@triton.jit
def store_momentum(
    row,
    begin,
    exp_avg,
    scales,
    m,
    rounding,
    C: tl.constexpr,
    FORMAT: tl.constexpr,
    AT_RANDOM: tl.constexpr,
    FULL: tl.constexpr,
):
    """Writes what :func:`load_momentum` reads."""
    BITS: tl.constexpr = state_of(FORMAT)
    if BITS == 8:
        m = nothing_past_the_end(row, begin, m, FULL)
        scale = momentum_scale(largest_of_groups(absolute_bits(m), CHUNK_ROWS))
        noise = rounding_noise(row, begin, rounding, AT_RANDOM, MOMENTUM_NOISE)
        codes = momentum_code(m, spread(scale, CHUNK_ROWS), noise).to(tl.int8)
        store(row, exp_avg, begin, codes, tl.int8, FULL)
        store_scales(row, scales, begin, scale, tl.float32, FULL)
    elif BITS == 16:
        noise = rounding_noise(row, begin, rounding, AT_RANDOM, MOMENTUM_NOISE)
        store(row, exp_avg, begin, momentum16(m, noise), tl.bfloat16, FULL)
    else:
        store(row, exp_avg, begin, m, C, FULL)


# ---- D -------------------------------------------------------------------------------------------------------------


@triton.jit
def load_curvature(row, begin, hessian, scales, C: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr):
    """D of a chunk, -0 where none is known."""
    BITS: tl.constexpr = state_of(FORMAT)
    if BITS == 8:
        codes = load(row, hessian, begin, tl.uint8, FULL)
        top = top_of(load_scales(row, scales, begin, tl.uint16, FULL))
        return curvature_value(codes, spread(top, CHUNK_ROWS), levels_of(FORMAT))
    elif BITS == 16:
        return widen(load(row, hessian, begin, tl.bfloat16, FULL))
    else:
        return load(row, hessian, begin, C, FULL)


@triton.jit
def store_curvature(
    row,
    begin,
    hessian,
    scales,
    d,
    rounding,
    C: tl.constexpr,
    FORMAT: tl.constexpr,
    AT_RANDOM: tl.constexpr,
    FULL: tl.constexpr,
):
    """Writes what :func:`load_curvature` reads. What was read and not changed keeps its bits, whatever the noise."""
    BITS: tl.constexpr = state_of(FORMAT)
    if BITS == 8:
        d = nothing_past_the_end(row, begin, d, FULL)
        level = curvature_level(d, rounding_noise(row, begin, rounding, AT_RANDOM, CURVATURE_NOISE))
        top = largest_of_groups(level, CHUNK_ROWS)
        codes = curvature_code(d, level, spread(top, CHUNK_ROWS), levels_of(FORMAT))
        store(row, hessian, begin, codes, tl.uint8, FULL)
        store_scales(row, scales, begin, curvature_scale(top), tl.uint16, FULL)
    elif BITS == 16:
        noise = rounding_noise(row, begin, rounding, AT_RANDOM, CURVATURE_NOISE)
        store(row, hessian, begin, curvature16(d, noise), tl.bfloat16, FULL)
    else:
        store(row, hessian, begin, d, C, FULL)
