"""``triton_kernels/formats.py`` in Triton's interpreter, with the names of ``sassha_fast.formats``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sassha_fast.triton_kernels.formats import (
    GROUP,
    GROUPS,
    corrected,
    curvature16,
    curvature_code,
    curvature_level,
    curvature_scale,
    curvature_value,
    largest_of_groups,
    momentum16,
    momentum_code,
    momentum_scale,
    momentum_value,
    spread,
    top_of,
    weight_of,
)
from sassha_fast.triton_kernels.math import absolute_bits
from torch import Tensor

ROWS = 1024  # of a program; the interpreter takes a tile at a time
LANES = tl.constexpr(GROUP.value * GROUPS.value)
TILE = ROWS * LANES.value


@triton.jit
def places(ROWS: tl.constexpr):
    """The elements of a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return row[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def group_places(ROWS: tl.constexpr):
    """The groups of a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return row[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]


@triton.jit
def encode_weights(x, p, r, T: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr):
    i = places(ROWS)
    param, rest = corrected(tl.load(x + i), T, BITS)
    tl.store(p + i, param)
    tl.store(r + i, rest)


@triton.jit
def decode_weights(p, r, x, T: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr):
    i = places(ROWS)
    tl.store(x + i, weight_of(tl.load(p + i), tl.load(r + i), T, BITS))


@triton.jit
def encode_momenta(m, noise, codes, scales, ROWS: tl.constexpr):
    i = places(ROWS)
    values = tl.load(m + i)
    scale = momentum_scale(largest_of_groups(absolute_bits(values), ROWS))
    tl.store(scales + group_places(ROWS), scale)
    bits = tl.load(noise + i).to(tl.uint32)
    tl.store(codes + i, momentum_code(values, spread(scale, ROWS), bits).to(tl.int8))


@triton.jit
def decode_momenta(codes, scales, m, ROWS: tl.constexpr):
    i = places(ROWS)
    tl.store(m + i, momentum_value(tl.load(codes + i), spread(tl.load(scales + group_places(ROWS)), ROWS)))


@triton.jit
def encode_curvatures(d, noise, codes, scales, LEVELS: tl.constexpr, ROWS: tl.constexpr):
    i = places(ROWS)
    values = tl.load(d + i)
    level = curvature_level(values, tl.load(noise + i).to(tl.uint32))
    top = largest_of_groups(level, ROWS)
    tl.store(scales + group_places(ROWS), curvature_scale(top))
    tl.store(codes + i, curvature_code(values, level, spread(top, ROWS), LEVELS))


@triton.jit
def decode_curvatures(codes, scales, d, LEVELS: tl.constexpr, ROWS: tl.constexpr):
    i = places(ROWS)
    top = spread(top_of(tl.load(scales + group_places(ROWS))), ROWS)
    tl.store(d + i, curvature_value(tl.load(codes + i), top, LEVELS))


@triton.jit
def encode_16(v, noise, m, d, ROWS: tl.constexpr):
    i = places(ROWS)
    values, bits = tl.load(v + i), tl.load(noise + i).to(tl.uint32)
    tl.store(m + i, momentum16(values, bits))
    tl.store(d + i, curvature16(values, bits))


def padded(values: Tensor, per_element: int = 1) -> Tensor:
    """Values and as many zeros as whole tiles need, bfloat16 as the bits that kernels take."""
    values = torch.nn.functional.pad(values, (0, -len(values) % (TILE // per_element)))
    return values.view(torch.uint16) if values.dtype == torch.bfloat16 else values


class TritonFormats:
    """The functions of the kernels over flat tensors of whole groups."""

    def encode_weight(self, x: Tensor, dtype: torch.dtype, bits: int) -> tuple[Tensor, Tensor]:
        n, x = len(x), padded(x)
        p = padded(torch.empty(x.shape, dtype=dtype))
        r = torch.empty(x.shape, dtype=torch.int8 if bits == 8 else torch.int16)
        encode_weights[(len(x) // TILE,)](x, p, r, T=_kind(dtype), BITS=bits, ROWS=ROWS)
        return p.view(dtype)[:n], r[:n]

    def weight_of(self, p: Tensor, correction: Tensor) -> Tensor:
        n, kind, bits = len(p), _kind(p.dtype), 8 * correction.element_size()
        p, correction = padded(p), padded(correction)
        x = torch.empty(p.shape)
        decode_weights[(len(x) // TILE,)](p, correction, x, T=kind, BITS=bits, ROWS=ROWS)
        return x[:n]

    def encode_momentum(self, values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        n, values, noise = len(values), padded(values), padded(noise)
        codes = torch.empty(values.shape, dtype=torch.int8)
        scales = torch.empty(len(values) // GROUP.value)
        encode_momenta[(len(values) // TILE,)](values, noise, codes, scales, ROWS=ROWS)
        return codes[:n], scales[: n // GROUP.value]

    def momentum_of(self, codes: Tensor, scales: Tensor) -> Tensor:
        n, codes, scales = len(codes), padded(codes), padded(scales, GROUP.value)
        values = torch.empty(codes.shape)
        decode_momenta[(len(codes) // TILE,)](codes, scales, values, ROWS=ROWS)
        return values[:n]

    def encode_curvature(self, values: Tensor, noise: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
        n, values, noise = len(values), padded(values), padded(noise)
        codes = torch.empty(values.shape, dtype=torch.uint8)
        scales = torch.empty(len(values) // GROUP.value, dtype=torch.uint16)
        levels = 127 if signed else 255
        encode_curvatures[(len(values) // TILE,)](values, noise, codes, scales, LEVELS=levels, ROWS=ROWS)
        found = codes.view(torch.int8) if signed else codes
        return found[:n], scales.view(torch.bfloat16)[: n // GROUP.value]

    def curvature_of(self, codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
        n, codes, scales = len(codes), padded(codes.view(torch.uint8)), padded(scales, GROUP.value)
        values = torch.empty(codes.shape)
        levels = 127 if signed else 255
        decode_curvatures[(len(codes) // TILE,)](codes, scales, values, LEVELS=levels, ROWS=ROWS)
        return values[:n]

    def encode16(self, values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        n, values, noise = len(values), padded(values), padded(noise)
        m, d = (torch.empty(values.shape, dtype=torch.uint16) for _ in range(2))
        encode_16[(len(values) // TILE,)](values, noise, m, d, ROWS=ROWS)
        return m.view(torch.bfloat16)[:n], d.view(torch.bfloat16)[:n]


def _kind(dtype: torch.dtype) -> tl.dtype:
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
