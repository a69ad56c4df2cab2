"""Ascent and the way back: x + eps into the parameter, x into the backup, and the copy that undoes it.

Where x is kept in state, x + eps is derived from it and from the momentum.
"""

import triton
import triton.language as tl

from .access import BACKUP, CHUNK_ROWS, EXP_AVG, GRAD, GROUP, INDEX, PARAM, chunk_of, load, store, takes_words
from .math import adaptive_ascent, ascent, narrow, round_stochastically, widen
from .philox import ASCENT_NOISE, noise_bits


@triton.jit
def ascended(row, begin, kept, g, scale, seed, draw, T: tl.constexpr, ADAPTIVE: tl.constexpr):
    """x + eps of a chunk, like x as memory holds it. g is the gradient or the momentum."""
    x, scale = widen(kept), scale.to(g.dtype)
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
    row, begin, param, grad, backup, scale, seed, draw, T: tl.constexpr, ADAPTIVE: tl.constexpr, FULL: tl.constexpr
):
    """One chunk. The backup may be the gradient, so all of the gradient is read before any of it is overwritten."""
    kept = load(row, param, begin, T, FULL)
    g = widen(load(row, grad, begin, T, FULL))
    moved = ascended(row, begin, kept, g, scale, seed, draw, T, ADAPTIVE)
    if not FULL:  # full chunks are stored by the threads that have read them, others may be distributed anew
        tl.debug_barrier()
    store(row, backup, begin, kept, T, FULL)
    store(row, param, begin, moved, T, FULL)


@triton.jit(do_not_specialize=["seed"])
def perturb(table, chunks, scales, draw, seed: tl.int64, T: tl.constexpr, ADAPTIVE: tl.constexpr):
    """x into the backups, x + eps into the parameters."""
    row, begin = chunk_of(table, chunks)
    param, grad, backup = tl.load(row + PARAM), tl.load(row + GRAD), tl.load(row + BACKUP)
    scale = tl.load(scales + tl.load(row + GROUP))
    seed, number = seed.to(tl.int64), tl.load(draw)
    if takes_words(row, begin, param | grad | backup):
        perturb_of(row, begin, param, grad, backup, scale, seed, number, T, ADAPTIVE, True)
    else:
        perturb_of(row, begin, param, grad, backup, scale, seed, number, T, ADAPTIVE, False)


@triton.jit(do_not_specialize=["seed"])
def momentum_ascent(table, chunks, scales, draw, seed: tl.int64, T: tl.constexpr, ADAPTIVE: tl.constexpr):
    """x + eps into the parameters, from x in the backups and from m."""
    C: tl.constexpr = tl.float64 if T == tl.float64 else tl.float32
    row, begin = chunk_of(table, chunks)
    param, backup, exp_avg = tl.load(row + PARAM), tl.load(row + BACKUP), tl.load(row + EXP_AVG)
    scale = tl.load(scales + tl.load(row + GROUP))
    seed, number = seed.to(tl.int64), tl.load(draw)
    if takes_words(row, begin, param | backup | exp_avg):
        kept, m = load(row, backup, begin, T, True), load(row, exp_avg, begin, C, True)
        store(row, param, begin, ascended(row, begin, kept, m, scale, seed, number, T, ADAPTIVE), T, True)
    else:
        kept, m = load(row, backup, begin, T, False), load(row, exp_avg, begin, C, False)
        store(row, param, begin, ascended(row, begin, kept, m, scale, seed, number, T, ADAPTIVE), T, False)


@triton.jit
def restore(table, chunks, T: tl.constexpr):
    """Backups into the parameters."""
    row, begin = chunk_of(table, chunks)
    param, backup = tl.load(row + PARAM), tl.load(row + BACKUP)
    if takes_words(row, begin, param | backup):
        store(row, param, begin, load(row, backup, begin, T, True), T, True)
    else:
        store(row, param, begin, load(row, backup, begin, T, False), T, False)
