"""What a refresh did not see: how much there is of it, and the curvature that it gets."""

import triton
import triton.language as tl

from .access import (
    GRAD,
    HESSIAN,
    HESSIAN_SCALE,
    MAP_WORDS,
    NUMEL,
    PRODUCT,
    chunk_of,
    inside,
    load,
    place_of,
    takes_words,
)
from .formats import state_of
from .math import filled, is_unknown, is_unseen, mean_curvature, widen
from .stored import load_curvature, store_curvature


@triton.jit
def row_number(chunks):
    """The row of this program's chunk."""
    return tl.load(chunks + tl.program_id(0).to(tl.int64) * MAP_WORDS).to(tl.int64)


@triton.jit
def count(flags):
    """How many of a chunk's elements are marked."""
    return tl.sum(tl.sum(flags.to(tl.int32), axis=1), axis=0).to(tl.float64)


@triton.jit
def addresses_of(row, FORMAT: tl.constexpr):
    """What the passes read: gradient, product, D and what goes with it."""
    grad, product, hessian = tl.load(row + GRAD), tl.load(row + PRODUCT), tl.load(row + HESSIAN)
    hessian_scale = hessian
    if state_of(FORMAT) == 8:
        hessian_scale = tl.load(row + HESSIAN_SCALE)
    return grad, product, hessian, hessian_scale


@triton.jit
def unseen_sums_of(
    row, begin, addresses, partials, T: tl.constexpr, C: tl.constexpr, FORMAT: tl.constexpr, FULL: tl.constexpr
):
    """One chunk."""
    grad, product, hessian, hessian_scale = addresses
    g = widen(load(row, grad, begin, T, FULL))
    p = widen(load(row, product, begin, T, FULL))
    d = load_curvature(row, begin, hessian, hessian_scale, C, FORMAT, FULL)
    unseen, known = is_unseen(p, g, False), is_unknown(d) == 0
    if not FULL:
        here = inside(row, begin)
        unseen, known = unseen & here, known & here
    tl.store(partials, count(unseen))
    tl.store(partials + 1, count(known))
    tl.store(partials + 2, tl.sum(tl.sum(d.to(tl.float64), axis=1), axis=0))


@triton.jit
def unseen_sums(table, chunks, tallies, partials, T: tl.constexpr, FORMAT: tl.constexpr):
    """Elements not seen, those with a curvature and its sum, per chunk of rows of which not everything was seen."""
    C: tl.constexpr = tl.float64 if T == tl.float64 else tl.float32
    row, begin = chunk_of(table, chunks)
    addresses = addresses_of(row, FORMAT)
    grad, product, hessian, _ = addresses
    partials += place_of(chunks) * 3
    seen = tl.load(tallies + row_number(chunks) * 3 + 2)
    if (product != 0) & (seen < tl.load(row + NUMEL).to(tl.float64)):
        if takes_words(row, begin, grad | product | hessian):
            unseen_sums_of(row, begin, addresses, partials, T, C, FORMAT, True)
        else:
            unseen_sums_of(row, begin, addresses, partials, T, C, FORMAT, False)


@triton.jit
def fill_of(
    row,
    begin,
    addresses,
    mean,
    rounding,
    T: tl.constexpr,
    C: tl.constexpr,
    FORMAT: tl.constexpr,
    AT_RANDOM: tl.constexpr,
    FULL: tl.constexpr,
):
    """One chunk."""
    grad, product, hessian, hessian_scale = addresses
    g = widen(load(row, grad, begin, T, FULL))
    p = widen(load(row, product, begin, T, FULL))
    before = load_curvature(row, begin, hessian, hessian_scale, C, FORMAT, FULL)
    d = filled(before, p, g, mean.to(C))
    if state_of(FORMAT) == 8 and not FULL:  # what lies beyond the end is unknown too, but no part of its group
        d = tl.where(inside(row, begin), d, before)
    store_curvature(row, begin, hessian, hessian_scale, d, rounding, C, FORMAT, AT_RANDOM, FULL)


@triton.jit(do_not_specialize=["seed"])
def fill_unseen(
    table,
    chunks,
    sums,
    state_draw,
    seed: tl.int64,
    T: tl.constexpr,
    FORMAT: tl.constexpr,
    STATE_AT_RANDOM: tl.constexpr,
):
    """The mean curvature of a row into those of its elements that no refresh has seen."""
    C: tl.constexpr = tl.float64 if T == tl.float64 else tl.float32
    row, begin = chunk_of(table, chunks)
    sums += row_number(chunks) * 3
    elements, known = tl.load(sums), tl.load(sums + 1)
    if (elements > 0) & (known > 0):
        addresses = addresses_of(row, FORMAT)
        grad, product, hessian, _ = addresses
        mean = mean_curvature(tl.load(sums + 2), known)
        seed = seed.to(tl.int64)
        number = seed
        if STATE_AT_RANDOM:
            number = tl.load(state_draw)
        rounding = (seed, number)
        if takes_words(row, begin, grad | product | hessian):
            fill_of(row, begin, addresses, mean, rounding, T, C, FORMAT, STATE_AT_RANDOM, True)
        else:
            fill_of(row, begin, addresses, mean, rounding, T, C, FORMAT, STATE_AT_RANDOM, False)
