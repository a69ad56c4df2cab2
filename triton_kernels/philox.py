"""Philox4x32-10 and the streams drawn from it: the twin of ``csrc/philox.h``.

Every random bit is a pure function of (seed, parameter index, draw, logical element index).
"""

import triton
import triton.language as tl

SIGNS_PER_CALL = tl.constexpr(128)  # one bit per element
NOISE_PER_CALL = tl.constexpr(8)  # sixteen bits per element

# Keep signs, the rounding of an ascent, of an update, of m and of D on different keys.
SIGNS = tl.constexpr(0)
ASCENT_NOISE = tl.constexpr(0x53525244)
UPDATE_NOISE = tl.constexpr(0x55504454)
MOMENTUM_NOISE = tl.constexpr(0x4D4E4F49)
CURVATURE_NOISE = tl.constexpr(0x434E4F49)


@triton.jit
def philox4x32_10(block, stream, draw, key0, key1):
    """Four words for each int64 block number; the other numbers are uint32 scalars."""
    c0, c1, c2, c3 = block.to(tl.uint32), (block >> 32).to(tl.uint32), stream, draw
    for _ in tl.static_range(10):
        even_high, even_low = tl.umulhi(c0, 0xD2511F53), tl.mul(c0, 0xD2511F53, sanitize_overflow=False)
        odd_high, odd_low = tl.umulhi(c2, 0xCD9E8D57), tl.mul(c2, 0xCD9E8D57, sanitize_overflow=False)
        c0, c2 = odd_high ^ c1 ^ key0, even_high ^ c3 ^ key1
        c1, c3 = odd_low, even_low
        key0 = tl.add(key0, 0x9E3779B9, sanitize_overflow=False)
        key1 = tl.add(key1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def stream_bits(seed, index, draw, block, DOMAIN: tl.constexpr):
    """The four words of each block of one parameter's stream; seed, index and draw are int64 scalars."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    domain = tl.full((), DOMAIN, tl.uint32)
    return philox4x32_10(block, index.to(tl.uint32), draw.to(tl.uint32), low, high ^ domain)


@triton.jit
def word_of(bits0, bits1, bits2, bits3, number):
    """Word ``number`` of four."""
    return tl.where(number < 2, tl.where(number < 1, bits0, bits1), tl.where(number < 3, bits2, bits3))


@triton.jit
def sign_bits(seed, index, draw, element, ROWS: tl.constexpr):
    """Signs of ROWS blocks from ``element`` on, [ROWS, 128]: 1 stands for -1.

    Bit e % 32 of word (e % 128) / 32. One call serves a row.
    """
    block = element // SIGNS_PER_CALL + tl.arange(0, ROWS)[:, None]
    bits0, bits1, bits2, bits3 = stream_bits(seed, index, draw, block, SIGNS)
    lane = tl.arange(0, SIGNS_PER_CALL)[None, :]
    return (word_of(bits0, bits1, bits2, bits3, lane // 32) >> (lane % 32).to(tl.uint32)) & 1


@triton.jit
def noise_bits(seed, index, draw, element, ROWS: tl.constexpr, DOMAIN: tl.constexpr):
    """Sixteen bits for each of ROWS * 128 elements from ``element`` on, [ROWS, 128].

    The low half of word (e % 8) / 2, then the high half. One call serves eight elements.
    """
    CALLS: tl.constexpr = SIGNS_PER_CALL // NOISE_PER_CALL
    call = tl.arange(0, ROWS)[:, None, None] * CALLS + tl.arange(0, CALLS)[None, :, None]
    block = element // NOISE_PER_CALL + call
    bits0, bits1, bits2, bits3 = stream_bits(seed, index, draw, block, DOMAIN)
    lane = tl.arange(0, NOISE_PER_CALL)[None, None, :]
    halves = (word_of(bits0, bits1, bits2, bits3, lane // 2) >> (16 * (lane % 2)).to(tl.uint32)) & 0xFFFF
    return tl.reshape(halves, (ROWS, SIGNS_PER_CALL))
