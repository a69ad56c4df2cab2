"""GSAM's surrogate gap: sums of products of the two gradients, and the descent that they make."""

import triton
import triton.language as tl

from .access import FIRST, GRAD, GROUP, chunk_of, load, place_of, store, takes_words
from .math import descent, narrow, widen


@triton.jit
def product_sum(v, w):
    """The sum of v * w over a chunk."""
    return tl.sum(tl.sum(v * w, axis=1), axis=0)


@triton.jit
def gap_sums_of(row, begin, grad, first, partials, T: tl.constexpr, FULL: tl.constexpr):
    """One chunk."""
    g2 = widen(load(row, grad, begin, T, FULL)).to(tl.float64)
    g = widen(load(row, first, begin, T, FULL)).to(tl.float64)
    tl.store(partials, product_sum(g, g))
    tl.store(partials + 1, product_sum(g, g2))
    tl.store(partials + 2, product_sum(g2, g2))


@triton.jit
def gap_sums(table, chunks, partials, T: tl.constexpr):
    """g * g, g * g2 and g2 * g2 in double, per chunk: g of the first pass, g2 of the second."""
    row, begin = chunk_of(table, chunks)
    grad, first = tl.load(row + GRAD), tl.load(row + FIRST)
    partials += place_of(chunks) * 3
    if takes_words(row, begin, grad | first):
        gap_sums_of(row, begin, grad, first, partials, T, True)
    else:
        gap_sums_of(row, begin, grad, first, partials, T, False)


@triton.jit
def decompose_of(row, begin, grad, first, alpha, share, T: tl.constexpr, FULL: tl.constexpr):
    """One chunk."""
    g2 = widen(load(row, grad, begin, T, FULL))
    g = widen(load(row, first, begin, T, FULL))
    taken = descent(g2, g, alpha.to(g.dtype), share.to(g.dtype))
    store(row, grad, begin, narrow(taken, T), T, FULL)


@triton.jit
def decompose(table, chunks, scales, T: tl.constexpr):
    """The descent into the gradients; an alpha of 0 leaves them alone."""
    row, begin = chunk_of(table, chunks)
    grad, first = tl.load(row + GRAD), tl.load(row + FIRST)
    at = scales + tl.load(row + GROUP) * 2
    alpha, share = tl.load(at), tl.load(at + 1)
    if alpha != 0:
        if takes_words(row, begin, grad | first):
            decompose_of(row, begin, grad, first, alpha, share, T, True)
        else:
            decompose_of(row, begin, grad, first, alpha, share, T, False)
