"""Ascent and the way back: x + eps into the parameter, x into the backup, and the copy that undoes it.

Where x is kept in state, x + eps is derived from it and from the momentum.
"""

import triton
import triton.language as tl

from .access import (
    BACKUP,
    CHUNK_ROWS,
    CORRECTION,
    EXP_AVG,
    EXP_AVG_SCALE,
    GRAD,
    GROUP,
    INDEX,
    PARAM,
    chunk_of,
    load,
    store,
    takes_words,
)
from .formats import correction_of, state_of
from .math import adaptive_ascent, ascent, narrow, round_stochastically, widen
from .philox import ASCENT_NOISE, noise_bits
from .stored import load_momentum, weight


@triton.jit
def ascended(row, begin, kept, x, g, scale, seed, draw, T: tl.constexpr, ADAPTIVE: tl.constexpr):
    """x + eps of a chunk, as memory holds it; ``kept`` is x likewise. g is the gradient or the momentum."""
    scale = scale.to(g.dtype)
    if ADAPTIVE:
        moved = x + adaptive_ascent(scale, g, x)
    else:
        moved = x + ascent(scale, g)
    if T == tl.bfloat16 or T == tl.float16:  # rounding to nearest would lose most of a small eps
        noise = noise_bits(seed, tl.load(row + INDEX), draw, begin, CHUNK_ROWS, ASCENT_NOISE)
        moved = round_stochastically(moved, noise, T)
    # Selected, not multiplied: 0 * inf would be NaN.
    return tl.where(scale == 0, kept, narrow(moved, T))


@triton.jit
def perturb_of(
    row,
    begin,
    addresses,
    scale,
    seed,
    draw,
    T: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """One chunk. The backup may be the gradient, so all of the gradient is read before any of it is overwritten."""
    param, grad, backup, correction = addresses
    kept = load(row, param, begin, T, FULL)
    g = widen(load(row, grad, begin, T, FULL))
    x = weight(row, begin, kept, correction, T, FORMAT, FULL)
    moved = ascended(row, begin, kept, x, g, scale, seed, draw, T, ADAPTIVE)
    # Full chunks are stored by the threads that have read them. Others may be distributed anew, and so are those with
    # corrections of 8 bits: threads read sixteen elements at once, and write eight of a parameter.
    if (not FULL) or correction_of(FORMAT) == 8:
        tl.debug_barrier()
    store(row, backup, begin, kept, T, FULL)
    store(row, param, begin, moved, T, FULL)


@triton.jit(do_not_specialize=["seed"])
def perturb(table, chunks, scales, draw, seed: tl.int64, T: tl.constexpr, ADAPTIVE: tl.constexpr, FORMAT: tl.constexpr):
    """x into the backups, x + eps into the parameters. x has its correction, where there is one; its backup has not."""
    row, begin = chunk_of(table, chunks)
    param, grad, backup = tl.load(row + PARAM), tl.load(row + GRAD), tl.load(row + BACKUP)
    scale = tl.load(scales + tl.load(row + GROUP))
    seed, number = seed.to(tl.int64), tl.load(draw)
    correction, used = param, param | grad | backup
    if correction_of(FORMAT) != 0:
        correction = tl.load(row + CORRECTION)
        used |= correction
    addresses = (param, grad, backup, correction)
    if takes_words(row, begin, used):
        perturb_of(row, begin, addresses, scale, seed, number, T, ADAPTIVE, FORMAT, True)
    else:
        perturb_of(row, begin, addresses, scale, seed, number, T, ADAPTIVE, FORMAT, False)


@triton.jit
def momentum_ascent_of(
    row,
    begin,
    addresses,
    scale,
    seed,
    draw,
    T: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):
    """One chunk."""
    C: tl.constexpr = tl.float64 if T == tl.float64 else tl.float32
    param, backup, exp_avg, exp_avg_scale, correction = addresses
    kept = load(row, backup, begin, T, FULL)
    m = load_momentum(row, begin, exp_avg, exp_avg_scale, C, FORMAT, FULL)
    x = weight(row, begin, kept, correction, T, FORMAT, FULL)
    store(row, param, begin, ascended(row, begin, kept, x, m, scale, seed, draw, T, ADAPTIVE), T, FULL)


@triton.jit(do_not_specialize=["seed"])
def momentum_ascent(
    table, chunks, scales, draw, seed: tl.int64, T: tl.constexpr, ADAPTIVE: tl.constexpr, FORMAT: tl.constexpr
):
    """x + eps into the parameters, from x in the backups and from m."""
    row, begin = chunk_of(table, chunks)
    param, backup, exp_avg = tl.load(row + PARAM), tl.load(row + BACKUP), tl.load(row + EXP_AVG)
    scale = tl.load(scales + tl.load(row + GROUP))
    seed, number = seed.to(tl.int64), tl.load(draw)
    exp_avg_scale, correction, used = exp_avg, backup, param | backup | exp_avg
    if state_of(FORMAT) == 8:
        exp_avg_scale = tl.load(row + EXP_AVG_SCALE)
    if correction_of(FORMAT) != 0:
        correction = tl.load(row + CORRECTION)
        used |= correction
    addresses = (param, backup, exp_avg, exp_avg_scale, correction)
    if takes_words(row, begin, used):
        momentum_ascent_of(row, begin, addresses, scale, seed, number, T, ADAPTIVE, FORMAT, True)
    else:
        momentum_ascent_of(row, begin, addresses, scale, seed, number, T, ADAPTIVE, FORMAT, False)


@triton.jit
def restore(table, chunks, T: tl.constexpr):
    """Backups into the parameters."""
    row, begin = chunk_of(table, chunks)
    param, backup = tl.load(row + PARAM), tl.load(row + BACKUP)
    if takes_words(row, begin, param | backup):
        store(row, param, begin, load(row, backup, begin, T, True), T, True)
    else:
        store(row, param, begin, load(row, backup, begin, T, False), T, False)
