"""Sum of squares in double, per chunk; ``access.finish`` adds the chunks of a group."""

import triton
import triton.language as tl

from .access import PARAM, chunk_of, load, place_of, takes_words
from .math import widen


@triton.jit
def square_sum(g):
    """The sum over a chunk at hand."""
    g = g.to(tl.float64)
    return tl.sum(tl.sum(g * g, axis=1), axis=0)


@triton.jit
def square_sum_of(row, begin, address, param, T: tl.constexpr, ADAPTIVE: tl.constexpr, FULL: tl.constexpr):
    """The sum over a chunk in memory."""
    g = widen(load(row, address, begin, T, FULL))
    if ADAPTIVE:
        g = tl.abs(widen(load(row, param, begin, T, FULL))) * g
    return square_sum(g)


@triton.jit(do_not_specialize=["column"])
def square_sums(table, chunks, partials, column: tl.int32, T: tl.constexpr, ADAPTIVE: tl.constexpr):
    """Of the tensors in a column of the table; times the magnitude of the parameters where ADAPTIVE."""
    row, begin = chunk_of(table, chunks)
    address, param = tl.load(row + column), tl.load(row + PARAM)
    used = address
    if ADAPTIVE:
        used = address | param
    if takes_words(row, begin, used):
        total = square_sum_of(row, begin, address, param, T, ADAPTIVE, True)
    else:
        total = square_sum_of(row, begin, address, param, T, ADAPTIVE, False)
    tl.store(partials + place_of(chunks), total)
