"""THE maths of SASSHA, one function per line of the algorithm: the twin of ``csrc/math.h``.

Every elementary operation is rounded on its own: launches switch contraction off, and square roots and quotients of
float32 ask for the nearest value, which plain ``sqrt`` and ``/`` do not promise there. For float64 they do.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton import knobs

from ..variant import Sample

if knobs.runtime.interpret:  # no device library there, but kernels are plain Python
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    def device_pow(v: Any, e: Any) -> Any:
        """v ** e by the C library that numpy calls."""
        return tl.tensor(TensorHandle(np.power(v.handle.data, e.handle.data), v.handle.dtype), v.type)

else:
    from triton.language.extra import libdevice

    device_pow = libdevice.pow

# What a launch knows about the exponents of its cohorts.
HALF, ONE, ANY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# What enters the average D of a product.
MAGNITUDE, SIGNED, SQUARE = (tl.constexpr(int(s)) for s in (Sample.ABS, Sample.SIGNED, Sample.SQUARE))


class StepScalars(NamedTuple):
    """Everything the update needs beside the tensors, in the compute type: ``csrc/params.h`` says what each is."""

    decay: Any
    beta1: Any
    one_minus_beta1: Any
    beta2: Any
    one_minus_beta2: Any
    bias2: Any
    bias2_kept: Any
    first: Any
    kept: Any
    eps: Any
    step_size: Any
    power: Any
    product_scale: Any
    grad_scale: Any
    clip: Any
    skip: Any
    floor: Any


STEP_SCALAR_WORDS = tl.constexpr(len(StepScalars._fields))


@triton.jit
def is_unknown(v):
    """Whether v is -0, with which an average D starts."""
    if v.dtype == tl.float64:
        return v.to(tl.uint64, bitcast=True) == 0x8000000000000000
    else:
        return v.to(tl.uint32, bitcast=True) == 0x80000000


@triton.jit
def is_finite(v):
    """Whether v is neither infinite nor NaN."""
    return tl.abs(v) < float("inf")


@triton.jit
def absolute_bits(v):
    """The bits of |v| in float32, which order as magnitudes do; what is not finite comes last."""
    return v.to(tl.uint32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def root(v):
    """√v, correctly rounded."""
    if v.dtype == tl.float64:
        return tl.sqrt(v)
    else:
        return tl.sqrt_rn(v)


@triton.jit
def quotient(v, w):
    """v / w, correctly rounded."""
    if v.dtype == tl.float64:
        return v / w
    else:
        return tl.div_rn(v, w)


# ---- conversions: csrc/cpu/block.h ---------------------------------------------------------------------------------


@triton.jit
def widen(v):
    """What memory holds, in the compute type. bfloat16 comes as its bits (see ``access``)."""
    if v.dtype == tl.uint16:
        return (v.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif v.dtype == tl.float16:
        return v.to(tl.float32)
    else:
        return v


@triton.jit
def to_bfloat16(v):
    """The bits of the nearest bfloat16, ties to even."""
    bits = v.to(tl.uint32, bitcast=True)
    nearest = tl.add(bits, 0x7FFF + ((bits >> 16) & 1), sanitize_overflow=False) >> 16
    return tl.where(v == v, nearest, 0x7FC0).to(tl.uint16)


@triton.jit
def narrow(v, T: tl.constexpr):
    """The nearest value of type T, as memory holds it."""
    if T == tl.bfloat16:
        return to_bfloat16(v)
    elif T == tl.float16:
        return v.to(tl.float16)
    else:
        return v


# ---- probe: z in {-1, +1} ------------------------------------------------------------------------------------------


@triton.jit
def times_sign(v, bit):
    """v * z, where z is -1 if ``bit`` is 1: a sign flip, exact for every v."""
    if v.dtype == tl.float64:
        return (v.to(tl.uint64, bitcast=True) ^ (bit.to(tl.uint64) << 63)).to(tl.float64, bitcast=True)
    else:
        return (v.to(tl.uint32, bitcast=True) ^ (bit << 31)).to(tl.float32, bitcast=True)


# ---- ascent --------------------------------------------------------------------------------------------------------


@triton.jit
def ascent(scale, g):
    """eps = scale * g, with scale = rho / ||g||."""
    return scale * g


@triton.jit
def adaptive_ascent(scale, g, x):
    """ASAM: eps = scale * g * x^2, with scale = rho / || |x| g ||."""
    return (scale * g) * (x * x)


@triton.jit
def stochastic_bfloat16(v, noise):
    """The next bfloat16 below or above v in magnitude, chosen with the probability that keeps the expectation."""
    bits = tl.add(v.to(tl.uint32, bitcast=True), noise, sanitize_overflow=False)
    rounded = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(is_finite(v) & is_finite(rounded), rounded, v)


@triton.jit
def stochastic_float16(v, noise):
    """The same on float16's grid: 13 discarded bits where it is normal, steps of 2^-24 where it is subnormal."""
    bits = v.to(tl.uint32, bitcast=True)
    normal = (tl.add(bits, noise & 0x1FFF, sanitize_overflow=False) & 0xFFFFE000).to(tl.float32, bitcast=True)
    magnitude = tl.abs(v)
    steps = tl.floor(magnitude * 16777216.0 + noise.to(tl.float32) * 0.0000152587890625)
    unsigned = (steps * 5.9604644775390625e-08).to(tl.uint32, bitcast=True)
    subnormal = (unsigned | (bits & 0x80000000)).to(tl.float32, bitcast=True)
    rounded = tl.where(magnitude >= 6.103515625e-05, normal, subnormal)
    return tl.where(tl.abs(rounded) <= 65504.0, rounded, v)


@triton.jit
def round_stochastically(v, noise, T: tl.constexpr):
    """v on the grid of the reduced type T, still in float32."""
    if T == tl.bfloat16:
        return stochastic_bfloat16(v, noise)
    else:
        return stochastic_float16(v, noise)


# ---- gap -----------------------------------------------------------------------------------------------------------


@triton.jit
def descent(g2, g, alpha, share):
    """GSAM: g2 - alpha * (the component of g orthogonal to g2)."""
    return g2 - alpha * (g - share * g2)


# ---- step ----------------------------------------------------------------------------------------------------------


@triton.jit
def momentum(m, g, s):
    """m = beta1 m + (1 - beta1) g, with g clipped and free of any loss scale."""
    return s.beta1 * m + s.one_minus_beta1 * (s.grad_scale * g)


@triton.jit
def sampled(h, SAMPLE: tl.constexpr):
    """|H|, H or H^2. Adding 0 makes +0 of -0, which would say that no curvature is known."""
    if SAMPLE == MAGNITUDE:
        return tl.abs(h)
    elif SAMPLE == SQUARE:
        return h * h
    else:
        return h + 0.0


@triton.jit
def is_unseen(product, g, ZERO_IS_SEEN: tl.constexpr):
    """Whether the batch had nothing to tell about an element: no gradient, no product."""
    if ZERO_IS_SEEN:
        return product != product  # no element: one that is NaN has no sample anyway
    else:
        return (product == 0) & (g == 0)


@triton.jit
def mean_curvature(total, known):
    """The curvature of elements that no refresh has seen: the mean of the others, in float32 for every dtype."""
    return (total / known).to(tl.float32)


@triton.jit
def filled(d, product, g, mean):
    """D, where elements that no refresh has seen get the mean."""
    return tl.where(is_unknown(d) & is_unseen(product, g, False), mean, d)


@triton.jit
def curvature(d, sample, s):
    """D = beta2 D + (1 - beta2) sample. D starts at -0; the first sample weighs as if it had always been there."""
    averaged = s.beta2 * d + s.one_minus_beta2 * sample
    return tl.where(is_unknown(d), s.first * sample, averaged)


@triton.jit
def denominator(d, bias2, s, POWER: tl.constexpr):
    """max(D / (1 - beta2^t), floor)^power + eps; NaN stays NaN."""
    unfloored = quotient(d, bias2)
    corrected = tl.where(unfloored < s.floor, s.floor, unfloored)
    if POWER == HALF:
        return root(corrected) + s.eps
    elif POWER == ONE:
        return corrected + s.eps
    else:  # cohorts of several kinds in one launch; a program has one cohort
        powered = corrected
        if s.power == 0.5:
            powered = root(corrected)
        elif s.power != 1.0:
            powered = device_pow(corrected, s.power)
        return powered + s.eps


@triton.jit
def clipped(v, bound):
    """v within [-bound, bound]; NaN stays NaN."""
    below = tl.where(v > bound, bound, v)
    return tl.where(below < -bound, -bound, below)


@triton.jit
def descend(x, m, d, denom, s):
    """x (1 - lr * wd) - step_size * m / denominator, and x itself where no curvature is known."""
    moved = x * s.decay - s.step_size * clipped(quotient(m, denom), s.clip)
    return tl.where(is_unknown(d), x, moved)
