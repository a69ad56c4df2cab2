"""The update: restore, decay, both moving averages, bias correction, root, division, descent, in one pass.

Where x is kept in state, it is updated there, and squares of the new m are added up on the way.
"""

import triton
import triton.language as tl

from .access import (
    BACKUP,
    CHUNK_ROWS,
    COHORT,
    CORRECTION,
    EXP_AVG,
    EXP_AVG_SCALE,
    FLAGS,
    GRAD,
    HESSIAN,
    HESSIAN_SCALE,
    INDEX,
    PARAM,
    PROBE_GRADIENT,
    PRODUCT,
    SIGNED_PRODUCT,
    chunk_of,
    inside,
    load,
    place_of,
    store,
    takes_words,
)
from .formats import corrected, correction_of, state_of
from .math import (
    STEP_SCALAR_WORDS,
    StepScalars,
    curvature,
    denominator,
    descend,
    is_finite,
    is_unseen,
    momentum,
    narrow,
    round_stochastically,
    sampled,
    times_sign,
    widen,
)
from .norm import square_sum
from .philox import UPDATE_NOISE, noise_bits, sign_bits
from .stored import load_curvature, load_momentum, store_correction, store_curvature, store_momentum, weight


@triton.jit
def rounded(scalars, cohort, C: tl.constexpr):
    """The scalars of a cohort, rounded once to the compute type."""
    at = scalars + cohort * STEP_SCALAR_WORDS
    words = ()
    for i in tl.static_range(STEP_SCALAR_WORDS):
        words = words + (tl.load(at + i).to(C),)  # noqa: RUF005 (the compiler knows no star in a tuple)
    return StepScalars(*words)


@triton.jit
def curvature_sample(row, begin, product, g, seed, draw, s, T: tl.constexpr, FULL: tl.constexpr):
    """Hz of a chunk up to its scale, and z * Hz, averaged over probes.

    What the product is does not make kernels of its own: the differences are two selections, and signs that nobody
    needs cost less than the memory they wait for.
    """
    flags = tl.load(row + FLAGS)
    raw = widen(load(row, product, begin, T, FULL))
    hz = tl.where((flags & PROBE_GRADIENT) != 0, raw - g, raw)
    bits = sign_bits(seed, tl.load(row + INDEX), draw, begin, CHUNK_ROWS)
    return hz, times_sign(hz * s.product_scale, tl.where((flags & SIGNED_PRODUCT) != 0, 0, bits).to(tl.uint32))


@triton.jit
def refreshed(
    row,
    begin,
    product,
    grad,
    g,
    d,
    s,
    tally,
    seed,
    draw,
    T: tl.constexpr,
    SAMPLE: tl.constexpr,
    ZERO_IS_SEEN: tl.constexpr,
    FULL: tl.constexpr,
):
    """D of a chunk after a refresh, and its correction. The tally counts what was seen, whatever D takes of it."""
    # A row without a product reads its gradient in its place, and refreshes nothing.
    refreshes = product != 0
    hz, h = curvature_sample(row, begin, tl.where(refreshes, product, grad), g, seed, draw, s, T, FULL)
    h = tl.where(refreshes, h, float("nan"))
    sample = sampled(h, SAMPLE)
    # A sample that is not finite leaves D and its correction as they were.
    finite = is_finite(sample)
    unseen = is_unseen(hz, g, ZERO_IS_SEEN)
    d = tl.where(finite, tl.where(unseen, d * s.kept, curvature(d, sample, s)), d)
    bias2 = tl.where(finite, s.bias2, tl.where(refreshes, s.bias2_kept, s.bias2))
    counted = is_finite(h) & (unseen == 0)
    if not FULL:
        counted = counted & inside(row, begin)
    tl.store(tally, tl.sum(tl.sum(tl.where(counted, h, 0.0).to(tl.float64), axis=1), axis=0))
    tl.store(tally + 1, tl.sum(tl.sum((counted & (h < 0)).to(tl.int32), axis=1), axis=0).to(tl.float64))
    tl.store(tally + 2, tl.sum(tl.sum(counted.to(tl.int32), axis=1), axis=0).to(tl.float64))
    return d, bias2


@triton.jit
def momentum_squares(row, begin, m, x, ADAPTIVE: tl.constexpr, FULL: tl.constexpr):
    """Sum of squares of m over a chunk, or of |x| m for the x that was written."""
    if ADAPTIVE:
        m = tl.abs(x) * m
    if not FULL:  # zeros past the end do not stay zeros where a denominator is 0
        m = tl.where(inside(row, begin), m, 0.0)
    return square_sum(m)


@triton.jit
def again(row, address, COLUMN: tl.constexpr, FULL: tl.constexpr):
    """An address for a store after loads.

    It is read again where chunks are not full, lest the addresses of their single elements wait in registers.
    """
    if FULL:
        return address
    else:
        return tl.load(row + COLUMN)


@triton.jit
def step_of(
    row,
    begin,
    addresses,
    s,
    results,
    draws,
    T: tl.constexpr,
    C: tl.constexpr,
    POWER: tl.constexpr,
    REFRESH: tl.constexpr,
    SAMPLE: tl.constexpr,
    ZERO_IS_SEEN: tl.constexpr,
    AT_RANDOM: tl.constexpr,
    IN_STATE: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    FORMAT: tl.constexpr,
    STATE_AT_RANDOM: tl.constexpr,
    FULL: tl.constexpr,
):
    """One chunk. All is read before anything is written, as the backup may be the parameter."""
    param, grad, backup, exp_avg, hessian, product, exp_avg_scale, hessian_scale, correction = addresses
    chunks, tallies, squares = results
    seed, draw, noise_draw, state_draw = draws
    x = weight(row, begin, load(row, backup, begin, T, FULL), correction, T, FORMAT, FULL)
    g = widen(load(row, grad, begin, T, FULL))
    m = load_momentum(row, begin, exp_avg, exp_avg_scale, C, FORMAT, FULL)
    d = load_curvature(row, begin, hessian, hessian_scale, C, FORMAT, FULL)
    bias2 = s.bias2
    if REFRESH:
        tally = tallies + place_of(chunks) * 3
        d, bias2 = refreshed(row, begin, product, grad, g, d, s, tally, seed, draw, T, SAMPLE, ZERO_IS_SEEN, FULL)
    m = momentum(m, g, s)  # before the power, which needs many registers
    denom = denominator(d, bias2, s, POWER)
    moved = descend(x, m, d, denom, s)
    if AT_RANDOM:
        noise = noise_bits(seed, tl.load(row + INDEX), noise_draw, begin, CHUNK_ROWS, UPDATE_NOISE)
        moved = round_stochastically(moved, noise, T)
    if correction_of(FORMAT) == 0:
        written = narrow(moved, T)
    else:
        written, rest = corrected(moved, T, correction_of(FORMAT))
    if IN_STATE:  # before the stores, which need registers for addresses
        tl.store(squares + place_of(chunks), momentum_squares(row, begin, m, widen(written), ADAPTIVE, FULL))
    store(row, param, begin, written, T, FULL)
    if correction_of(FORMAT) != 0:
        store_correction(row, begin, again(row, correction, CORRECTION, FULL), rest, FORMAT, FULL)
    rounding = (seed, state_draw)
    exp_avg = again(row, exp_avg, EXP_AVG, FULL)
    store_momentum(row, begin, exp_avg, exp_avg_scale, m, rounding, C, FORMAT, STATE_AT_RANDOM, FULL)
    if REFRESH:
        hessian = again(row, hessian, HESSIAN, FULL)
        store_curvature(row, begin, hessian, hessian_scale, d, rounding, C, FORMAT, STATE_AT_RANDOM, FULL)


@triton.jit(do_not_specialize=["seed", "draw"])
def step(
    table,
    chunks,
    scalars,
    tallies,
    squares,
    noise_draw,
    state_draw,
    seed: tl.int64,
    draw: tl.int64,
    T: tl.constexpr,
    POWER: tl.constexpr,
    REFRESH: tl.constexpr,
    SAMPLE: tl.constexpr,
    ZERO_IS_SEEN: tl.constexpr,
    AT_RANDOM: tl.constexpr,
    IN_STATE: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    FORMAT: tl.constexpr,
    STATE_AT_RANDOM: tl.constexpr,
):
    """The update of x in the backups, which may be the parameters; with products where REFRESH.

    Where IN_STATE, x stays in the backups, and each chunk leaves its squares of m; ADAPTIVE weighs them by |x|. What is
    computed is the same in every FORMAT: m and D of this step go on unrounded, and are encoded when they are written.
    """
    C: tl.constexpr = tl.float64 if T == tl.float64 else tl.float32
    TARGET: tl.constexpr = BACKUP if IN_STATE else PARAM
    row, begin = chunk_of(table, chunks)
    s = rounded(scalars, tl.load(row + COHORT), C)
    param, grad, backup = tl.load(row + TARGET), tl.load(row + GRAD), tl.load(row + BACKUP)
    exp_avg, hessian, product = tl.load(row + EXP_AVG), tl.load(row + HESSIAN), tl.load(row + PRODUCT)
    exp_avg_scale, hessian_scale, correction = exp_avg, hessian, backup
    seed, draw = seed.to(tl.int64), draw.to(tl.int64)
    number, state_number, used = seed, seed, param | grad | backup | exp_avg | hessian
    if state_of(FORMAT) == 8:  # whose scales no word of 128 bits takes, so they lie anywhere
        exp_avg_scale, hessian_scale = tl.load(row + EXP_AVG_SCALE), tl.load(row + HESSIAN_SCALE)
    if correction_of(FORMAT) != 0:
        correction = tl.load(row + CORRECTION)
        used |= correction
    if AT_RANDOM:
        number = tl.load(noise_draw)
    if STATE_AT_RANDOM:
        state_number = tl.load(state_draw)
    if REFRESH:
        used |= product
    addresses = (param, grad, backup, exp_avg, hessian, product, exp_avg_scale, hessian_scale, correction)
    results, draws = (chunks, tallies, squares), (seed, draw, number, state_number)
    if s.skip != 0:  # gradients overflowed: the tally stays 0
        # So rare that the short words of the last chunk do.
        if IN_STATE:
            m = load_momentum(row, begin, exp_avg, exp_avg_scale, C, FORMAT, False)
            x = widen(load(row, backup, begin, T, False))
            tl.store(squares + place_of(chunks), momentum_squares(row, begin, m, x, ADAPTIVE, False))
        elif param != backup:
            store(row, param, begin, load(row, backup, begin, T, False), T, False)
    elif takes_words(row, begin, used):
        step_of(
            row,
            begin,
            addresses,
            s,
            results,
            draws,
            T,
            C,
            POWER,
            REFRESH,
            SAMPLE,
            ZERO_IS_SEEN,
            AT_RANDOM,
            IN_STATE,
            ADAPTIVE,
            FORMAT,
            STATE_AT_RANDOM,
            True,
        )
    else:
        step_of(
            row,
            begin,
            addresses,
            s,
            results,
            draws,
            T,
            C,
            POWER,
            REFRESH,
            SAMPLE,
            ZERO_IS_SEEN,
            AT_RANDOM,
            IN_STATE,
            ADAPTIVE,
            FORMAT,
            STATE_AT_RANDOM,
            False,
        )
