"""How state and weights are stored in fewer bits: the codes with their equations, the oracle of every backend.

A pass decodes a group of elements to float32, computes as ever, and encodes what it writes. Every operation is one that
rounds the same everywhere: additions, quotients and integers, no logarithm and no exponential.

Three things are stored, each for itself:

* **m** in 8 bits: codes c from −127 to 127 on a curved scale, and s, the largest magnitude of the group, in float32.
  m = s·φ⁻¹(c/127) with φ(u) = 2u/(1+|u|), which is s·c/(254−|c|).
* **D** in 8 bits: a float of 3 bits of mantissa, whose exponent counts down from the largest of the group. What a
  denominator needs is relative precision, and that no known curvature becomes 0. Code 0 says that none is known, and
  code 1 is a known 0.
* **x** in 24 or 32 bits: the bfloat16 or float16 parameter and a correction r beside it, in parts of its last place.

16 bits of m and D are bfloat16. A group is :data:`GROUP` elements that lie side by side in memory; the last group of
a tensor or a shard may be shorter. ``noise`` is sixteen random bits for each element, see
:func:`reference.rounding_noise`; :data:`NEAREST` in its place rounds to nearest. Encoding what was decoded gives the
same code and the same scale back, whatever the noise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .reference import compute_dtype, is_unknown, stochastic_round

__all__ = [
    "CURVATURE_NOISE",
    "FULL",
    "GROUP",
    "MOMENTUM_NOISE",
    "NEAREST",
    "Format",
    "curvature_of",
    "encode_curvature",
    "encode_curvature16",
    "encode_momentum",
    "encode_momentum16",
    "encode_weight",
    "flat",
    "format_of",
    "groups_of",
    "mantissa_of",
    "momentum_of",
    "weight_of",
]

GROUP = 32  # elements that share a scale
NEAREST = 0x8000  # the noise of rounding to nearest
MOMENTUM_NOISE, CURVATURE_NOISE = 0x4D4E4F49, 0x434E4F49  # Philox domains, beside those of the reference

UNKNOWN, ZERO, LEAST = 0, 1, 2  # codes of D: no curvature is known, it is 0, and the least other one
LARGEST_LEVEL = 0x7F7  # of finite numbers


class Format(NamedTuple):
    """How one parameter and its state are stored.

    Attributes:
        state_bits: Of m and D: 32 for the dtype that they are computed in, 16 or 8.
        correction_bits: Of the correction beside a bfloat16 or float16 parameter: 0 for none, 8 or 16.
        signed: Whether D may be negative, which costs its 8-bit code a bit of the exponent.
    """

    state_bits: int = 32
    correction_bits: int = 0
    signed: bool = False

    @property
    def code(self) -> int:
        """``Row::format`` in ``csrc/params.h``."""
        return {32: 0, 16: 1, 8: 2}[self.state_bits] | {0: 0, 8: 4, 16: 8}[self.correction_bits] | 16 * self.signed

    @property
    def levels(self) -> int:
        """The largest 8-bit code of D, of positive values."""
        return 127 if self.signed else 255

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Of m and D beside a parameter of ``dtype``."""
        if self.state_bits == 32:
            return compute_dtype(dtype), compute_dtype(dtype)
        if self.state_bits == 16:
            return torch.bfloat16, torch.bfloat16
        return torch.int8, torch.int8 if self.signed else torch.uint8

    @property
    def correction_dtype(self) -> torch.dtype:
        """Of the correction, where there is one."""
        return torch.int8 if self.correction_bits == 8 else torch.int16


FULL = Format()


def mantissa_of(dtype: torch.dtype) -> int:
    """Bits of mantissa behind the point: 7 of bfloat16, 10 of float16."""
    return -math.frexp(torch.finfo(dtype).eps)[1] + 1


def format_of(
    param: Tensor, *, state_bits: int = 32, master_weight_bits: int | None = None, below: int = 0, signed: bool = False
) -> Format:
    """The format of a parameter.

    Small parameters and those of one dimension, biases and the weights of norms, are as good as float32: their state
    is, and the correction beside them has 16 bits. Parameters of float64 are stored in float64.

    Args:
        param: The parameter, all of it where it is sharded.
        state_bits: What was asked for: 32, 16 or 8.
        master_weight_bits: What was asked for: None, 24 or 32.
        below: Elements that a parameter needs to be stored so.
        signed: Whether D may be negative.
    """
    small = param.dim() < 2 or param.numel() < below
    reduced = param.dtype in (torch.bfloat16, torch.float16)
    bits = 32 if small or param.dtype == torch.float64 else state_bits
    correction = 0
    if reduced and master_weight_bits is not None:
        correction = 16 if small else master_weight_bits - 16
    return Format(bits, correction, signed and bits == 8)


# ---- groups -----------------------------------------------------------------------------------------------------


def groups_of(elements: int) -> int:
    """Groups of a tensor of so many elements."""
    return -(-elements // GROUP)


def flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor without gaps, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _grouped(values: Tensor) -> Tensor:
    """Flat values as rows of a group each, with zeros at the end of the last."""
    missing = -values.numel() % GROUP
    return torch.nn.functional.pad(values, (0, missing)).view(-1, GROUP)


def _spread(scales: Tensor, elements: int) -> Tensor:
    """The scale of every element."""
    return scales.repeat_interleave(GROUP)[:elements]


# ---- m ----------------------------------------------------------------------------------------------------------


def encode_momentum(values: Tensor, noise: Tensor | int = NEAREST) -> tuple[Tensor, Tensor]:
    """8-bit codes of flat float32 values, and the scale of every group.

    The code of a magnitude a = |m|/s is 127·φ(a) = 254 − 254/(1+a), which every single operation leaves monotone. It
    is rounded in two steps: to 1/4096, which makes up for the rounding of these operations, and by ``noise``.

    A group with a value that is not finite has the scale NaN, and so have its values.
    """
    largest = _grouped(values.abs()).amax(1) if values.numel() else values
    scales = torch.where(torch.isfinite(largest), largest, torch.nan)
    s = _spread(scales, values.numel())
    a = torch.where(s > 0, values.abs() / s, torch.zeros_like(s))
    top = torch.full((), 254.0 * 4096.0, dtype=torch.float32, device=values.device)
    t = torch.floor((top - top / (1.0 + a)) + 0.5).to(torch.int32)
    c = (t + (noise >> 4)) >> 12
    return torch.where(values < 0, -c, c).to(torch.int8), scales


def momentum_of(codes: Tensor, scales: Tensor) -> Tensor:
    """m = s·c/(254−|c|) of flat codes, in float32."""
    c = codes.to(torch.float32)
    return _spread(scales, codes.numel()) * (c / (254.0 - c.abs()))


# ---- D ----------------------------------------------------------------------------------------------------------


def encode_curvature(values: Tensor, noise: Tensor | int = NEAREST, *, signed: bool = False) -> tuple[Tensor, Tensor]:
    """8-bit codes of flat float32 values, and the largest of every group, which bfloat16 holds exactly.

    Codes that have a sign are int8, others uint8.

    The level of a magnitude is its float32 with all but 3 bits of mantissa rounded away: an integer, of which eight
    more are one octave more. The code counts levels down from the largest of the group, which is 255 (127 where
    ``signed``, and 128 more if the value is negative). What is too small for that has the least code.
    """
    levels = FULL._replace(signed=signed).levels
    bits = torch.clamp(values.abs().view(torch.int32), max=0x7F7FFFFF)
    level = torch.clamp((bits + (noise << 4)) >> 20, 1, LARGEST_LEVEL)
    level = torch.where(bits == 0, 0, level)
    tops = _grouped(level).amax(1) if values.numel() else level
    code = torch.clamp(level - _spread(tops, values.numel()) + levels, min=LEAST)
    code = torch.where(values < 0, code + 128, code) if signed else code
    code = torch.where(bits == 0, torch.where(is_unknown(values), UNKNOWN, ZERO), code)
    codes = code.to(torch.uint8)
    return codes.view(torch.int8) if signed else codes, (tops << 4).to(torch.int16).view(torch.bfloat16)


def curvature_of(codes: Tensor, scales: Tensor, *, signed: bool = False) -> Tensor:
    """D of flat codes, in float32; −0 where none is known."""
    levels = FULL._replace(signed=signed).levels
    tops = _spread(scales.view(torch.int16).to(torch.int32) >> 4, codes.numel())
    code = codes.to(torch.int32) & 255
    field = code & levels
    level = torch.clamp(tops - levels + field, 1, LARGEST_LEVEL)
    value = (level << 20).view(torch.float32)
    value = torch.where(code > levels, -value, value)
    nothing = torch.where(field == UNKNOWN, -torch.zeros_like(value), torch.zeros_like(value))
    return torch.where(field < LEAST, nothing, value)


def encode_curvature16(values: Tensor, noise: Tensor | int = NEAREST) -> Tensor:
    """The same in bfloat16: −0 where no curvature is known, and known curvature does not become 0."""
    bits = values.view(torch.int32)
    rounded = stochastic_round(values, torch.bfloat16, _noise_like(values, noise)).to(torch.float32).view(torch.int32)
    lost = ((bits & 0x7FFFFFFF) != 0) & ((rounded & 0x7FFFFFFF) == 0)
    return torch.where(lost, rounded | 0x10000, rounded).view(torch.float32).to(torch.bfloat16)


def encode_momentum16(values: Tensor, noise: Tensor | int = NEAREST) -> Tensor:
    """m in bfloat16."""
    return stochastic_round(values, torch.bfloat16, _noise_like(values, noise))


def _noise_like(values: Tensor, noise: Tensor | int) -> Tensor:
    return noise if isinstance(noise, Tensor) else torch.full_like(values, noise, dtype=torch.int32)


# ---- x ----------------------------------------------------------------------------------------------------------


def encode_weight(x: Tensor, dtype: torch.dtype, bits: int) -> tuple[Tensor, Tensor]:
    """The nearest number of ``dtype`` and the correction that makes x of it, of float32 values of any shape.

    bfloat16 has the exponents of float32, so x as an integer is the parameter as an integer, shifted, plus r. 16 bits
    of r are all that float32 has more, and 8 bits are the upper half of them. Values halfway between two neighbours
    go away from 0, so that −r is never as large as half a last place and more.

    float16 has not: there r counts parts of its last place, whose size is that of 2⁻¹⁴ below 2⁻¹⁴. Of values from 2⁻¹⁷
    on, 16 bits are all of float32.
    """
    finite = torch.isfinite(x)
    if dtype == torch.bfloat16:
        word = x.contiguous().view(torch.int32)
        if bits == 8:
            word = (word + 0x80) & -0x100
        upper = (word + 0x8000) >> 16
        correction = (word - (upper << 16)) >> (16 - bits)
        p = (upper << 16).view(torch.float32)
        finite = finite & torch.isfinite(p)
    else:
        p, correction = _near_float16(x.abs(), bits)
        p = torch.where(torch.signbit(x), -p, p)
        finite = finite & (p.abs() <= 65504.0)
    correction = torch.where(finite, correction, 0)
    return torch.where(finite, p, x).to(dtype), correction.to(torch.int8 if bits == 8 else torch.int16)


def _near_float16(magnitude: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The float16 next to magnitudes below infinity, in float32, and parts of its last place that are left."""
    word = magnitude.contiguous().view(torch.int32)
    normal = ((word + 0x1000) & -0x2000).view(torch.float32)
    subnormal = torch.floor(magnitude * 2.0**24 + 0.5) * 2.0**-24
    p = torch.where(magnitude >= 2.0**-14, normal, subnormal)
    half = 1 << (bits - 1)
    steps = torch.floor((magnitude - p) * _places16(p) * (2.0 * half) + 0.5)
    return p, torch.clamp(steps, -half, half - 1).to(torch.int32)


def _places16(p: Tensor) -> Tensor:
    """One over the last place of float16 magnitudes, in float32: a power of two."""
    exponent = torch.clamp(p.view(torch.int32) >> 23, min=113)  # of 2^-14 and below
    return ((264 - exponent) << 23).view(torch.float32)


def weight_of(p: Tensor, correction: Tensor) -> Tensor:
    """x, in float32, of a parameter and its correction."""
    bits = 8 * correction.dtype.itemsize
    r = correction.to(torch.int32)
    wide = p.to(torch.float32)
    word = wide.abs().contiguous().view(torch.int32)
    # Whoever sets a parameter to 0 leaves its correction as it was: there is nothing below 0 to go to.
    if p.dtype == torch.bfloat16:
        magnitude = torch.clamp(word + (r << (16 - bits)), min=0).view(torch.float32)
    else:
        exponent = torch.clamp(word >> 23, min=113)
        place = ((exponent - 10) << 23).view(torch.float32)
        magnitude = torch.clamp(wide.abs() + (r.to(torch.float32) * 2.0**-bits) * place, min=0.0)
    x = torch.where(torch.signbit(wide), -magnitude, magnitude)
    return torch.where(torch.isfinite(wide), x, wide)
