"""Ascent and the way back: x + eps into the parameter, x into the backup, and the copy that undoes it."""

import triton
import triton.language as tl

from .access import BACKUP, CHUNK_ROWS, GRAD, GROUP, INDEX, PARAM, chunk_of, load, store, takes_words
from .math import adaptive_ascent, ascent, narrow, round_stochastically, widen
from .philox import ASCENT_NOISE, noise_bits


@triton.jit
def perturb_of(
    row, begin, param, grad, backup, scale, seed, draw, T: tl.constexpr, ADAPTIVE: tl.constexpr, FULL: tl.constexpr
):
    """One chunk. The backup may be the gradient, so all of the gradient is read before any of it is overwritten."""
    kept = load(row, param, begin, T, FULL)
    x, g = widen(kept), widen(load(row, grad, begin, T, FULL))
    scale = scale.to(x.dtype)
    if ADAPTIVE:
        moved = x + adaptive_ascent(scale, g, x)
    else:
        moved = x + ascent(scale, g)
    if T == tl.bfloat16 or T == tl.float16:  # rounding to nearest would lose most of a small eps
        noise = noise_bits(seed, tl.load(row + INDEX), draw, begin, CHUNK_ROWS, ASCENT_NOISE)
        moved = round_stochastically(moved, noise, T)
    if not FULL:  # full chunks are stored by the threads that have read them, others may be distributed anew
        tl.debug_barrier()
    store(row, backup, begin, kept, T, FULL)
    # Selected, not multiplied: 0 * inf would be NaN.
    store(row, param, begin, tl.where(scale == 0, kept, narrow(moved, T)), T, FULL)


@triton.jit(do_not_specialize=["seed"])
def perturb(table, chunks, scales, draw, seed: tl.int64, T: tl.constexpr, ADAPTIVE: tl.constexpr):
    """x into the backups, x + eps into the parameters."""
    row, begin, _ = chunk_of(table, chunks)
    param, grad, backup = tl.load(row + PARAM), tl.load(row + GRAD), tl.load(row + BACKUP)
    scale = tl.load(scales + tl.load(row + GROUP))
    seed, number = seed.to(tl.int64), tl.load(draw)
    if takes_words(row, begin, param | grad | backup):
        perturb_of(row, begin, param, grad, backup, scale, seed, number, T, ADAPTIVE, True)
    else:
        perturb_of(row, begin, param, grad, backup, scale, seed, number, T, ADAPTIVE, False)


@triton.jit
def restore(table, chunks, T: tl.constexpr):
    """Backups into the parameters."""
    row, begin, _ = chunk_of(table, chunks)
    param, backup = tl.load(row + PARAM), tl.load(row + BACKUP)
    if takes_words(row, begin, param | backup):
        store(row, param, begin, load(row, backup, begin, T, True), T, True)
    else:
        store(row, param, begin, load(row, backup, begin, T, False), T, False)
