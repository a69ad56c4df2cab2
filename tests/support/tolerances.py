"""Every tolerance of the tests, beside its reason. What is not listed here is compared bit for bit."""

import math

import torch

# ---- sums in double -----------------------------------------------------------------------------------------------

DOUBLE_ROUNDING = 2.0**-53


def sum_bound(n: int, magnitude: float) -> float:
    """How far two sums of the same n doubles may lie apart; ``magnitude`` is the sum of their absolute values.

    Each order of summation errs by at most n roundings of a partial sum that never exceeds ``magnitude``. Backends
    differ in nothing but this order.
    """
    return 2 * n * DOUBLE_ROUNDING * magnitude


def trace_bound(n: int, magnitude: float, compute: torch.dtype) -> float:
    """How far two traces may lie apart: kernels add blocks of 128 elements in the compute dtype, then in double."""
    return 128 * torch.finfo(compute).eps / 2 * magnitude + sum_bound(n, magnitude)


# ---- a general Hessian power --------------------------------------------------------------------------------------

# powf/pow of the C library in kernels, Sleef in torch: each within 1 ulp of the truth, so the denominators within 2.
# Seen: 1/denominator 1.41 eps apart in float32 and float64, over 50 decades and powers from 0.1 to 1.3.
POWER_ULPS = 2
# The division by the denominator and the product with the step size round once each, in both of the two results.
UPDATE_ULPS = POWER_ULPS + 2


def power_rtol(dtype: torch.dtype) -> float:
    """Relative distance of two reciprocals of D̄^power computed in ``dtype``."""
    return POWER_ULPS * torch.finfo(dtype).eps


def power_bound(next_x: torch.Tensor, update: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """Distance of two parameters after an update computed in ``compute`` and rounded to the parameters' dtype."""
    info = torch.finfo(next_x.dtype)
    last_rounding = info.eps * next_x.double().abs() + info.tiny * info.eps
    return UPDATE_ULPS * torch.finfo(compute).eps * update.double().abs() + last_rounding


# ---- the eager loop -----------------------------------------------------------------------------------------------

# The loop in the style of the authors' code rounds elsewhere (fused operations, ε subtracted again) and does not round
# the ascent scale to float32, a relative 6e-8 of ε. Seen after 25 steps in float64: 4e-8.
EAGER_RTOL = 1e-6

# ---- micro-batches -------------------------------------------------------------------------------------------------

# Sums over micro-batches are added in another order. In float64 thirty steps amplify that by less than 1e8 roundings;
# in float32 trajectories part over many steps, so one step from equal state is compared. Relative to each tensor's
# norm: where curvature nearly cancels, single elements move by more.
ACCUMULATION_RTOL = {torch.float64: 1e-8, torch.float32: 1e-5}

# ---- processes ----------------------------------------------------------------------------------------------------

# One process on the joined batch adds the rows in another order than several do; like micro-batches. Products by finite
# differences divide that by h.
PROCESSES_RTOL = {torch.float64: 1e-8, torch.float32: 1e-5}
# Of one step by finite differences in float32. The rounding that h divides is that of torch's matrix products, which
# depend on the processor: seen 1.02 with AVX2 and 2.7 with AVX-512.
DIFFERENCES_FACTOR = 5

# The radius over the norm and the factor of clipping are rounded to float32 for every dtype. An oracle in plain torch
# does not, and over a dozen steps that grows.
SCALES_TOLERANCE = {"rtol": 1e-5, "atol": 1e-8}

# ---- exact products -----------------------------------------------------------------------------------------------

# torch.func differentiates other formulas (composite functions instead of fused backward kernels) in float64; second
# derivatives lose a few digits to cancellation. Seen: 3e-13 relative to entries of order 1.
PRODUCT_RTOL = 1e-10

# ---- scalars ------------------------------------------------------------------------------------------------------

# Repeated squaring doubles the relative error and adds a rounding each time: about n * 2^-53 for the n-th power.
INTEGER_POWER_RTOL = 1e-12  # n up to 5000

# ---- state and weights in fewer bits -------------------------------------------------------------------------------

# m in 8 bits is s·a with a = c/(254−c). Next to the largest, codes 126 and 127 are 1/64 of s apart, and the border
# between them, 126.5, is 1/127.5 below s: to nearest, no error is larger. Codes are rounded to 1/4096 before that,
# which is 2e-6 of s.
MOMENTUM_BOUND = 1 / 127
# At random the neighbour on the other side may be taken: a whole step, 1/64 of the largest.
MOMENTUM_BOUND_AT_RANDOM = 2 / 127
# Rounded to 1/4096 of a code first, a value may lie half of that outside of its two neighbours. One that is less than
# that of the largest, 5e-7 of it, is 0 at random too.
MOMENTUM_FINEST = 2e-6
# The derivative of s·c/(254−c) is s·(1+a)²/254, so half a step is a relative (1+a)²/(508a): 0.8 % at the largest and
# 1.99 % at an eighth of it.
MOMENTUM_RTOL, MOMENTUM_RTOL_FROM = 0.02, 1 / 8

# D in 8 bits has 3 bits of mantissa: steps of 1/8 of a power of two. At random an error is below one step, to nearest
# at most half of one.
CURVATURE_RTOL = 1 / 16
CURVATURE_RTOL_AT_RANDOM = 1 / 8
# Noise has 16 of the 20 bits that are rounded away, so that what is 2^-19 above a level is never rounded up.
CURVATURE_FINEST = 2.0**-19
# 254 levels of a positive value, eight to the octave; with a sign 126.
CURVATURE_OCTAVES, SIGNED_CURVATURE_OCTAVES = 30, 15

# Weights at 24 bits: r is rounded to 1/256 of a last place, an error of 1/512, and of 1/256 where float16 has no
# r of +128.
WEIGHT_PLACES = 1 / 254

# Averages of 2,000 refreshes that begin a tenth away from a constant are 0.1·0.999^2000 = 1.35 % away from it at the
# end. The mean over n elements, rounded at random, has an error far below the rest of the 2 %.
AVERAGE_RTOL = 0.02

# ---- statistics ---------------------------------------------------------------------------------------------------

# Seeds are fixed, so a check passes always or never. A sound generator exceeds 5 sigma in one of 1.7 million checks;
# there are a few hundred.
SIGMAS = 5


def mean_bound(n: int, deviation: float = 1.0) -> float:
    """How far the mean of n independent values of this standard deviation may lie from its expectation."""
    return SIGMAS * deviation / math.sqrt(n)


# ---- time ---------------------------------------------------------------------------------------------------------

# Seconds until a process that was started counts as hung. It is no measure of speed: a machine that is busy with other
# work may give a test a tenth of a core, and importing torch alone then takes a minute.
PATIENCE = 1800
