"""A program's piece of the pointer table, and access to it.

The table has a row for each tensor (``Row`` in ``csrc/params.h``). Tensors are cut into chunks; a list of int32
triples (row, number of the chunk in its tensor, place of its partial results) tells each program which chunk is its
own, so one launch serves any number of tensors. A chunk is a tile of rows of 128 elements, so a Philox call for signs
serves a row.

Full chunks at aligned addresses are read and written in words of 128 bits. That needs an access without a mask, and
the word that the address is a multiple of 16 bytes; the compiler can't know either from a number in memory. Each
program asks both questions of its own row, as the answers change with every gradient that torch allocates.
"""

import triton
import triton.language as tl

from .._passes import layout
from .formats import correction_of, state_of

LANES = tl.constexpr(128)  # philox.SIGNS_PER_CALL
# Enough for a program that every thread has whole words of 128 bits in every dtype (see `threads_of`), and that
# finding the chunk costs little beside it; few enough that small tensors waste little.
CHUNK = tl.constexpr(2048)
CHUNK_ROWS = tl.constexpr(2048 // 128)
MAP_WORDS = tl.constexpr(3)

ROW_WORDS = tl.constexpr(layout.ROW_WORDS)
PARAM, GRAD, BACKUP = tl.constexpr(layout.PARAM), tl.constexpr(layout.GRAD), tl.constexpr(layout.BACKUP)
EXP_AVG, HESSIAN = tl.constexpr(layout.EXP_AVG), tl.constexpr(layout.HESSIAN)
CORRECTION = tl.constexpr(layout.CORRECTION)
EXP_AVG_SCALE, HESSIAN_SCALE = tl.constexpr(layout.EXP_AVG_SCALE), tl.constexpr(layout.HESSIAN_SCALE)
PRODUCT, FIRST, NUMEL = tl.constexpr(layout.PRODUCT), tl.constexpr(layout.FIRST), tl.constexpr(layout.NUMEL)
INDEX, GROUP, COHORT = tl.constexpr(layout.INDEX), tl.constexpr(layout.GROUP), tl.constexpr(layout.COHORT)
FLAGS = tl.constexpr(layout.FLAGS)
SIGNED_PRODUCT = tl.constexpr(layout.SIGNED_PRODUCT)
PROBE_GRADIENT = tl.constexpr(layout.PROBE_GRADIENT)


def threads_of(dtype, stored=0):
    """Threads of a program on parameters of a dtype, stored as ``Row::format`` says.

    A thread gets two words of 128 bits of each float32 or float64 stream and one of a reduced one: a step then has
    eight loads in flight. With twice as many of float64, refreshes on gfx942 run out of scalar registers. Where there
    are streams of 8 bits, a word of one is sixteen elements, so half as many threads take a chunk.
    """
    if dtype == tl.float64:
        return 512
    return 128 if state_of(stored) == 8 or correction_of(stored) == 8 else 256


def launch_options(dtype, warp_size, stored=0):
    """How kernels on parameters of a dtype are launched: without contraction, see ``math``."""
    return {"num_warps": threads_of(dtype, stored) // warp_size, "enable_fp_fusion": False}


@triton.jit
def chunk_of(table, chunks):
    """The row of this program and the first element of its chunk."""
    entry = chunks + tl.program_id(0).to(tl.int64) * MAP_WORDS
    row = table + tl.load(entry).to(tl.int64) * ROW_WORDS
    return row, tl.load(entry + 1).to(tl.int64) * CHUNK


@triton.jit
def place_of(chunks):
    """The place of this program's partial results, read when they are there: until then it takes no register."""
    return tl.load(chunks + tl.program_id(0).to(tl.int64) * MAP_WORDS + 2).to(tl.int64)


@triton.jit
def offsets_of_chunk():
    """Number of each element in its chunk."""
    return tl.arange(0, CHUNK_ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def takes_words(row, begin, addresses):
    """Whether the chunk is full and lies at multiples of 16 bytes; ``addresses`` are those it uses, or'ed."""
    return (begin + CHUNK <= tl.load(row + NUMEL)) & ((addresses & 15) == 0)


@triton.jit
def pointers(address, begin, T: tl.constexpr, FULL: tl.constexpr):
    """Pointers to the elements of a chunk.

    bfloat16 is taken as its bits and converted by ``math``: the interpreter's own conversion does not round to even.
    """
    if T == tl.bfloat16:
        base = address.to(tl.pointer_type(tl.uint16))
    else:
        base = address.to(tl.pointer_type(T))
    if FULL:
        base = tl.multiple_of(base, 16)
    return base + begin + offsets_of_chunk()


@triton.jit
def inside(row, begin):
    """Which elements of a chunk belong to the tensor."""
    return offsets_of_chunk() < tl.load(row + NUMEL) - begin


@triton.jit
def load(row, address, begin, T: tl.constexpr, FULL: tl.constexpr):
    """The elements as memory holds them, 0 past the end."""
    at = pointers(address, begin, T, FULL)
    if FULL:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside(row, begin), other=0)


@triton.jit
def store(row, address, begin, value, T: tl.constexpr, FULL: tl.constexpr):
    """Writes what :func:`load` reads."""
    at = pointers(address, begin, T, FULL)
    if FULL:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=inside(row, begin))


@triton.jit
def finish(partials, spans, totals, WORDS: tl.constexpr):
    """Adds partial results of WORDS doubles: program i those in span i, in an order that depends on nothing else."""
    program = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(spans + 2 * program), tl.load(spans + 2 * program + 1)
    lanes = tl.arange(0, CHUNK)
    for word in tl.static_range(WORDS):
        total = tl.zeros((CHUNK,), tl.float64)
        for first in range(begin, end, CHUNK):
            place = first + lanes
            total += tl.load(partials + place * WORDS + word, mask=place < end, other=0.0)
        tl.store(totals + program * WORDS + word, tl.sum(total))
