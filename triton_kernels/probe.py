"""Rademacher signs: written out as a tensor, or added to the parameters as x + h z."""

import triton
import triton.language as tl

from .access import CHUNK_ROWS, INDEX, LANES, PARAM, chunk_of, load, store, takes_words
from .math import narrow, times_sign, widen
from .philox import sign_bits


@triton.jit
def signed_constant(row, begin, value, seed, draw, T: tl.constexpr):
    """``value`` times z for every element of a chunk, in the compute type."""
    bits = sign_bits(seed.to(tl.int64), tl.load(row + INDEX), draw.to(tl.int64), begin, CHUNK_ROWS)
    if T == tl.float64:
        return times_sign(tl.zeros((CHUNK_ROWS, LANES), tl.float64) + value.to(tl.float64), bits)
    else:
        return times_sign(tl.zeros((CHUNK_ROWS, LANES), tl.float32) + value.to(tl.float32), bits)


@triton.jit(do_not_specialize=["seed", "draw"])
def rademacher(table, chunks, seed: tl.int64, draw: tl.int64, T: tl.constexpr):
    """z into the parameters' column."""
    row, begin = chunk_of(table, chunks)
    out = tl.load(row + PARAM)
    z = narrow(signed_constant(row, begin, tl.full((), 1.0, tl.float32), seed, draw, T), T)
    if takes_words(row, begin, out):
        store(row, out, begin, z, T, True)
    else:
        store(row, out, begin, z, T, False)


@triton.jit(do_not_specialize=["seed", "draw"])
def probe(table, chunks, h, seed: tl.int64, draw: tl.int64, T: tl.constexpr):
    """Parameters become x + h z. h lies in memory, as a number among the arguments would be a float32."""
    row, begin = chunk_of(table, chunks)
    param = tl.load(row + PARAM)
    hz = signed_constant(row, begin, tl.load(h), seed, draw, T)
    if takes_words(row, begin, param):
        x = widen(load(row, param, begin, T, True))
        store(row, param, begin, narrow(x + hz, T), T, True)
    else:
        x = widen(load(row, param, begin, T, False))
        store(row, param, begin, narrow(x + hz, T), T, False)
