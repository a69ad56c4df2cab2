"""What a refresh did not see: how much there is of it, and the curvature that it gets."""

import triton
import triton.language as tl

from .access import GRAD, HESSIAN, MAP_WORDS, NUMEL, PRODUCT, chunk_of, inside, load, place_of, store, takes_words
from .math import filled, is_unknown, is_unseen, mean_curvature, widen


@triton.jit
def row_number(chunks):
    """The row of this program's chunk."""
    return tl.load(chunks + tl.program_id(0).to(tl.int64) * MAP_WORDS).to(tl.int64)


@triton.jit
def count(flags):
    """How many of a chunk's elements are marked."""
    return tl.sum(tl.sum(flags.to(tl.int32), axis=1), axis=0).to(tl.float64)


@triton.jit
def unseen_sums_of(row, begin, grad, product, hessian, partials, T: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr):
    """One chunk."""
    g = widen(load(row, grad, begin, T, FULL))
    p = widen(load(row, product, begin, T, FULL))
    d = load(row, hessian, begin, C, FULL)
    unseen, known = is_unseen(p, g, False), is_unknown(d) == 0
    if not FULL:
        here = inside(row, begin)
        unseen, known = unseen & here, known & here
    tl.store(partials, count(unseen))
    tl.store(partials + 1, count(known))
    tl.store(partials + 2, tl.sum(tl.sum(d.to(tl.float64), axis=1), axis=0))


@triton.jit
def unseen_sums(table, chunks, tallies, partials, T: tl.constexpr):
    """Elements not seen, those with a curvature and its sum, per chunk of rows of which not everything was seen."""
    C: tl.constexpr = tl.float64 if T == tl.float64 else tl.float32
    row, begin = chunk_of(table, chunks)
    grad, product, hessian = tl.load(row + GRAD), tl.load(row + PRODUCT), tl.load(row + HESSIAN)
    partials += place_of(chunks) * 3
    seen = tl.load(tallies + row_number(chunks) * 3 + 2)
    if (product != 0) & (seen < tl.load(row + NUMEL).to(tl.float64)):
        if takes_words(row, begin, grad | product | hessian):
            unseen_sums_of(row, begin, grad, product, hessian, partials, T, C, True)
        else:
            unseen_sums_of(row, begin, grad, product, hessian, partials, T, C, False)


@triton.jit
def fill_of(row, begin, grad, product, hessian, mean, T: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr):
    """One chunk."""
    g = widen(load(row, grad, begin, T, FULL))
    p = widen(load(row, product, begin, T, FULL))
    d = load(row, hessian, begin, C, FULL)
    store(row, hessian, begin, filled(d, p, g, mean.to(C)), C, FULL)


@triton.jit
def fill_unseen(table, chunks, sums, T: tl.constexpr):
    """The mean curvature of a row into those of its elements that no refresh has seen."""
    C: tl.constexpr = tl.float64 if T == tl.float64 else tl.float32
    row, begin = chunk_of(table, chunks)
    sums += row_number(chunks) * 3
    elements, known = tl.load(sums), tl.load(sums + 1)
    if (elements > 0) & (known > 0):
        grad, product, hessian = tl.load(row + GRAD), tl.load(row + PRODUCT), tl.load(row + HESSIAN)
        mean = mean_curvature(tl.load(sums + 2), known)
        if takes_words(row, begin, grad | product | hessian):
            fill_of(row, begin, grad, product, hessian, mean, T, C, True)
        else:
            fill_of(row, begin, grad, product, hessian, mean, T, C, False)
