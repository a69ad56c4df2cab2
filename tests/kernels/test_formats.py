"""The formats of compact state and weights, over every number where they are few enough."""

import pytest
import torch
from formats_triton import TritonFormats
from formats_twin import Twin
from tolerances import (
    AVERAGE_RTOL,
    CURVATURE_FINEST,
    CURVATURE_OCTAVES,
    CURVATURE_RTOL,
    CURVATURE_RTOL_AT_RANDOM,
    MOMENTUM_BOUND,
    MOMENTUM_BOUND_AT_RANDOM,
    MOMENTUM_FINEST,
    MOMENTUM_RTOL,
    MOMENTUM_RTOL_FROM,
    SIGNED_CURVATURE_OCTAVES,
    WEIGHT_PLACES,
    mean_bound,
)

from sassha_fast import formats, reference
from sassha_fast.formats import (
    GROUP,
    LARGEST_LEVEL,
    LEAST,
    NEAREST,
    UNKNOWN,
    ZERO,
    Format,
    curvature_of,
    encode_curvature,
    encode_curvature16,
    encode_momentum,
    encode_momentum16,
    encode_weight,
    format_of,
    momentum_of,
    weight_of,
)

REDUCED = (torch.bfloat16, torch.float16)
NOISES = (0, NEAREST, 0xFFFF)  # down, to nearest, up
EXPONENTS = {torch.bfloat16: (1, 127, 254), torch.float16: (113, 127, 141)}  # biased; the first and last whole ones
PART = 1 << 20  # elements at a time


def bits_of(t):
    return t.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def same(a, b):
    return a.dtype == b.dtype and torch.equal(bits_of(a), bits_of(b))


def numbers(dtype):
    """Every finite number of a 16-bit dtype."""
    found = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return found[torch.isfinite(found)]


def octave(exponent, parts=1):
    """Every float32 of a biased exponent in rising order, a part at a time; every ``parts``-th part alone."""
    step = PART * parts
    for first in range(0, 1 << 23, step):
        yield ((exponent << 23) + torch.arange(first, first + PART, dtype=torch.int32)).view(torch.float32)


def under(top, values):
    """Groups of 31 of these values each, below a largest one, which comes first."""
    values = values[: values.numel() // (GROUP - 1) * (GROUP - 1)].view(-1, GROUP - 1)
    return torch.cat([torch.full((len(values), 1), top), values], 1).flatten()


def without_top(values):
    return values.view(-1, GROUP)[:, 1:].flatten()


def wild(n, seed=0):
    """Random bits: numbers of all sizes, subnormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, (n,), generator=generator).to(torch.int32).view(torch.float32)


def noise_of(n, seed=0):
    return torch.randint(0, 1 << 16, (n,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


# ---- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_every_parameter_with_every_8_bit_correction_comes_back(dtype):
    p = numbers(dtype)
    for r in range(-128, 128):
        correction = torch.full(p.shape, r, dtype=torch.int8)
        x = weight_of(p, correction)
        again, rest = encode_weight(x, dtype, 8)
        assert same(weight_of(again, rest), x)
        # Of 0, nothing is below it. A correction below a power of two of float16 counts in its larger places, and of
        # the neighbour below it is the same number.
        moved = (again != p) | (rest != correction)
        known = (p == 0) & (r < 0) if dtype == torch.bfloat16 else (p == 0) | _is_power(p)
        assert not (moved & ~known).any()


def _is_power(p):
    return (bits_of(p).to(torch.int32) & 0x3FF) == 0


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_weights_of_every_mantissa_are_exact_at_32_bits_close_at_24_monotone_and_symmetric(dtype):
    for exponent in EXPONENTS[dtype]:
        before = -1.0
        last_place = 2.0 ** (exponent - 127) * torch.finfo(dtype).eps
        for x in octave(exponent, parts=1 if exponent == 127 else 4):
            if dtype == torch.bfloat16 and exponent == 254:
                x = x[x < torch.finfo(dtype).max]
            decoded = {bits: weight_of(*encode_weight(x, dtype, bits)) for bits in (8, 16)}
            assert same(decoded[16], x)
            error = (decoded[8].double() - x.double()).abs()
            assert float(error.max()) <= WEIGHT_PLACES * last_place
            assert (error <= (x.to(dtype).double() - x.double()).abs()).all(), "worse with 8 bits more than without"
            assert float(decoded[8][0]) >= before
            assert (decoded[8].diff() >= 0).all()
            before = float(decoded[8][-1])
            assert same(weight_of(*encode_weight(-x, dtype, 8)), -decoded[8])


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_weights_that_are_not_finite_or_too_large_are_rounded_as_without_a_correction(dtype, bits):
    x = wild(PART)
    p, r = encode_weight(x, dtype, bits)
    lost = ~torch.isfinite(p)
    assert lost.any()
    plain = x.to(dtype)
    assert torch.equal(p[lost].float().nan_to_num(5.0), plain[lost].float().nan_to_num(5.0))
    assert not r[lost].any()
    assert torch.isfinite(weight_of(p, r)).eq(~lost).all()


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_a_parameter_that_was_set_to_0_is_0_whatever_its_correction(dtype):
    r = torch.arange(-128, 1, dtype=torch.int8)
    assert not weight_of(torch.zeros(len(r), dtype=dtype), r).any()


# ---- m ------------------------------------------------------------------------------------------------------------


def all_momentum_codes(scales):
    """Groups of all codes under every scale; code 127, which is the largest, leads each."""
    codes = torch.arange(-127, 128, dtype=torch.int8)
    codes = torch.nn.functional.pad(codes, (0, -len(codes) % (GROUP - 1))).view(-1, GROUP - 1)
    groups = torch.cat([torch.full((len(codes), 1), 127, dtype=torch.int8), codes], 1)
    return groups.repeat(len(scales), 1).flatten(), scales.repeat_interleave(len(groups))


def test_every_code_of_m_under_scales_of_all_sizes_comes_back_whatever_the_noise():
    exponents = torch.arange(16, 255, dtype=torch.int32)  # below, values near 0 run out of bits
    mantissas = torch.randint(0, 1 << 23, (8, 1), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    scales = ((exponents << 23) + mantissas).flatten().view(torch.float32)
    codes, spread = all_momentum_codes(scales)
    values = momentum_of(codes, spread)
    for noise in (*NOISES, noise_of(len(codes))):
        again, found = encode_momentum(values, noise)
        assert same(again, codes)
        assert same(found, spread)


def test_codes_of_m_are_monotone_and_symmetric_and_the_largest_is_exact():
    codes = torch.arange(-127, 128, dtype=torch.int8)
    for scale in (1e-30, 1.0, 3e38):
        values = momentum_of(codes, torch.full((formats.groups_of(len(codes)),), scale))
        assert (values.diff() > 0).all()
        assert torch.equal(values, -values.flip(0))
        assert float(values[-1]) == torch.tensor(scale)
        assert same(values[127], torch.tensor(0.0))


@pytest.mark.parametrize("exponent", [126, 124, 120, 100])
def test_m_of_every_mantissa_is_close_monotone_and_symmetric(exponent):
    """The largest of every group is 1; exponents are those of values from 1/2, 1/8, 1/128 and 2^-27 on."""
    for x in octave(exponent, parts=1 if exponent == 126 else 4):
        values = under(1.0, x)
        nearest = momentum_of(*encode_momentum(values))
        error = (nearest - values).abs()
        assert float(error.max()) <= MOMENTUM_BOUND
        if 2.0 ** (exponent - 127) >= MOMENTUM_RTOL_FROM:
            assert (error <= MOMENTUM_RTOL * values).all()
        assert (without_top(nearest).diff() >= 0).all()
        assert torch.equal(momentum_of(*encode_momentum(-values)), -nearest)
        low, high = (momentum_of(*encode_momentum(values, noise)) for noise in (0, 0xFFFF))
        assert ((low <= values + MOMENTUM_FINEST) & (high >= values - MOMENTUM_FINEST)).all()
        assert float((high - low).max()) <= MOMENTUM_BOUND_AT_RANDOM


def test_16_bits_of_m_are_never_worse_than_8_near_the_largest():
    for x in octave(126, parts=8):
        values = under(1.0, x)
        eight = (momentum_of(*encode_momentum(values)) - values).abs().max()
        assert float((encode_momentum16(values).float() - values).abs().max()) <= float(eight)


def test_a_group_of_m_without_values_is_0_and_one_that_is_not_finite_is_nan():
    values = torch.zeros(3 * GROUP)
    values[GROUP + 5], values[2 * GROUP] = torch.inf, 1.0
    decoded = momentum_of(*encode_momentum(values)).view(3, GROUP)
    assert not decoded[0].any()
    assert decoded[1].isnan().all()
    assert torch.equal(decoded[2], values.view(3, GROUP)[2])


# ---- D ------------------------------------------------------------------------------------------------------------


def all_curvature_codes(signed):
    """Groups of all codes under every scale, and the level of the scale; the largest code leads each."""
    levels = Format(signed=signed).levels
    tops = torch.arange(1, LARGEST_LEVEL + 1, dtype=torch.int32)
    codes = torch.arange(256, dtype=torch.int32)
    if signed:
        codes = codes[(codes & levels >= LEAST) | (codes < LEAST)]  # there is no −0 but "unknown"
    codes = torch.nn.functional.pad(codes, (0, -len(codes) % (GROUP - 1))).view(-1, GROUP - 1)
    groups = torch.cat([torch.full((len(codes), 1), levels, dtype=torch.int32), codes], 1)
    scales = (tops << 4).to(torch.int16).view(torch.bfloat16).repeat_interleave(len(groups))
    every = groups.repeat(len(tops), 1).flatten().to(torch.uint8)
    return every.view(torch.int8) if signed else every, scales, tops.repeat_interleave(groups.numel())


@pytest.mark.parametrize("signed", [False, True])
def test_every_code_of_d_under_every_scale_comes_back_whatever_the_noise(signed):
    levels = Format(signed=signed).levels
    every, scales, top = all_curvature_codes(signed)
    values = curvature_of(every, scales, signed=signed)
    field = every.to(torch.int32) & 255 & levels
    assert reference.is_unknown(values).eq(field == UNKNOWN).all()
    assert (values == 0).eq(field < LEAST).all(), "known curvature became 0"
    assert ((values == 0) & ~reference.is_unknown(values)).eq(field == ZERO).all()
    exact = (field < LEAST) | (top - levels + field >= 1)  # levels below the least float32 are that one
    for noise in (*NOISES, noise_of(len(every))):
        again, found = encode_curvature(values, noise, signed=signed)
        assert same(found, scales)
        assert torch.equal(again[exact], every[exact])
        assert same(curvature_of(again, found, signed=signed), values)


@pytest.mark.parametrize(("signed", "octaves"), [(False, CURVATURE_OCTAVES), (True, SIGNED_CURVATURE_OCTAVES)])
def test_d_of_every_mantissa_is_close_monotone_and_symmetric(signed, octaves):
    """The largest of every group is 1; values are those of the octaves below it that its codes reach."""
    for below in (1, octaves // 2, octaves):
        for x in octave(127 - below, parts=1 if below == octaves else 8):
            values = under(1.0, x)
            found = [curvature_of(*encode_curvature(values, noise, signed=signed), signed=signed) for noise in NOISES]
            low, nearest, high = found
            assert ((nearest - values).abs() <= CURVATURE_RTOL * values).all()
            for rounded in (low, high):
                assert ((rounded - values).abs() < CURVATURE_RTOL_AT_RANDOM * values).all()
            assert (low <= values).all()
            assert (high >= values * (1 - CURVATURE_FINEST)).all()
            assert (without_top(nearest).diff() >= 0).all()
            if signed:
                assert torch.equal(curvature_of(*encode_curvature(-values, signed=True), signed=True), -nearest)


@pytest.mark.parametrize("signed", [False, True])
def test_known_curvature_never_becomes_0_nor_unknown(signed):
    positive = (torch.arange(1, 1 << 12, dtype=torch.int32) << 19).view(torch.float32)  # of all sizes
    values = under(3e38, torch.cat([positive[torch.isfinite(positive)], wild(PART).abs().nan_to_num(1.0)]))
    values = torch.where(values == 0, 1e-45, values)
    for noise in (*NOISES, noise_of(len(values))):
        decoded = curvature_of(*encode_curvature(values, noise, signed=signed), signed=signed)
        assert (decoded > 0).all()
        assert torch.isfinite(decoded).all()
        assert (encode_curvature16(values.clamp(max=3e38), noise).float() > 0).all()


def test_what_is_not_known_and_what_is_0_stay_so_in_8_and_16_bits():
    values = torch.tensor([-0.0, 0.0, 1.0, -0.0]).repeat(20)
    for noise in (*NOISES, noise_of(len(values))):
        for decoded in (curvature_of(*encode_curvature(values, noise)), encode_curvature16(values, noise).float()):
            assert same(decoded, values)


def test_16_bits_of_d_are_never_worse_than_8():
    for x in octave(120, parts=8):
        values = under(1.0, x)
        sixteen, eight = encode_curvature16(values).float(), curvature_of(*encode_curvature(values))
        assert ((sixteen - values).abs() <= (eight - values).abs()).all()


# ---- averages -----------------------------------------------------------------------------------------------------

ELEMENTS, REFRESHES, BETA2 = 1024, 2000, 0.999


def averages(bits, at_random):
    """D over |Ĥ| after many refreshes of a constant |Ĥ|, which differs between elements: of those that began a tenth
    below it, and a tenth above."""
    h = torch.linspace(1.0, 2.0, ELEMENTS).repeat(2)
    d = torch.cat([0.9 * h[:ELEMENTS], 1.1 * h[ELEMENTS:]])
    for draw in range(REFRESHES):
        noise = reference.rounding_noise(d, 0, 0, draw, formats.CURVATURE_NOISE) if at_random else NEAREST
        d = BETA2 * d + (1.0 - BETA2) * h
        d = curvature_of(*encode_curvature(d, noise)) if bits == 8 else encode_curvature16(d, noise).float()
    return (d / h).view(2, -1).mean(1).tolist()


@pytest.mark.parametrize("bits", [8, 16])
def test_averages_reach_a_constant_at_random_and_stand_still_to_nearest(bits):
    for found in averages(bits, at_random=True):
        assert abs(found - 1.0) <= AVERAGE_RTOL
    for found in averages(bits, at_random=False):
        assert abs(found - 1.0) > 2 * AVERAGE_RTOL


def test_small_momentum_beside_large_is_there_at_random_and_never_to_nearest():
    """Gradients of 1/100 beside one of 1: the share of a step, (1−β1)/100, is less than half of the least code."""
    g = torch.full((64 * GROUP,), 0.01)
    g[::GROUP] = 1.0
    found = {}
    for at_random in (False, True):
        m, means = torch.zeros_like(g), []
        m[::GROUP] = 1.0
        for draw in range(300):
            noise = reference.rounding_noise(m, 0, 0, draw, formats.MOMENTUM_NOISE) if at_random else NEAREST
            m = momentum_of(*encode_momentum(0.9 * m + 0.1 * g, noise))
            means.append(float(without_top(m).mean()))
        found[at_random] = sum(means[100:]) / 200
    assert found[False] == 0.0
    assert found[True] == pytest.approx(0.01, rel=0.05)


def test_rounding_at_random_is_right_on_average():
    n = 1 << 16
    noise = reference.rounding_noise(torch.empty(n), 3, 5, 7, formats.CURVATURE_NOISE)
    values = under(8.0, torch.full((n,), 1.3))[:n]
    ways = {
        "m": momentum_of(*encode_momentum(values, noise[: len(values)])),
        "D": curvature_of(*encode_curvature(values, noise[: len(values)])),
        "D16": encode_curvature16(values, noise[: len(values)]).float(),
        "m16": encode_momentum16(values, noise[: len(values)]).float(),
    }
    for name, rounded in ways.items():
        error = without_top(rounded - values).double()
        # m is rounded on its curved scale: the mean of two neighbours there is not that of their values.
        bias = 1e-4 if name == "m" else 0.0
        assert abs(float(error.mean())) <= mean_bound(len(error), float(error.std())) + bias, name
        assert float(error.std()) > 0, name


# ---- which format -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((64, 64), torch.bfloat16, Format(8, 8)),
        ((63, 65), torch.bfloat16, Format(32, 16)),
        ((8192,), torch.bfloat16, Format(32, 16)),
        ((64, 64), torch.float16, Format(8, 8)),
        ((64, 64), torch.float32, Format(8)),
        ((64, 64), torch.float64, Format()),
        ((), torch.float32, Format()),
    ],
)
def test_small_and_flat_parameters_and_float64_are_not_compact(shape, dtype, expected):
    found = format_of(torch.empty(shape, dtype=dtype), state_bits=8, master_weight_bits=24, below=4096)
    assert found == expected


# ---- twins --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["csrc", "triton"])
def twin(request, tmp_path_factory):
    """The functions of C++ and CUDA kernels, or of Triton's."""
    return Twin(tmp_path_factory.mktemp("twin")) if request.param == "csrc" else TritonFormats()


def octaves(first, *others):
    """Random bits, every float32 of one exponent and a part of those of others."""
    return [wild(PART), *octave(first), *(part for exponent in others for part in octave(exponent, parts=8))]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_weights_in_the_kernels_functions_equal_these(twin, dtype, bits):
    for x in octaves(127, *EXPONENTS[dtype]):
        finite = torch.isfinite(x)
        for found, expected in zip(twin.encode_weight(x, dtype, bits), encode_weight(x, dtype, bits), strict=True):
            assert torch.equal(found[finite], expected[finite])
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[~every.isnan()]
    for r in range(-128, 128) if bits == 8 else (-32768, -1, 0, 1, 77, 32767):
        correction = torch.full(every.shape, r, dtype=torch.int8 if bits == 8 else torch.int16)
        assert same(twin.weight_of(every, correction), weight_of(every, correction))


def test_codes_of_m_in_the_kernels_functions_equal_these(twin):
    for x in octaves(126, 124, 100):
        values = x if not torch.isfinite(x).all() else under(1.0, x)
        for noise in (torch.full(values.shape, NEAREST, dtype=torch.int32), noise_of(len(values))):
            codes, scales = encode_momentum(values, noise)
            found, found_scales = twin.encode_momentum(values, noise)
            whole = torch.isfinite(scales).repeat_interleave(GROUP)
            assert torch.equal(scales.nan_to_num(-1.0), found_scales.nan_to_num(-1.0))
            assert torch.equal(found[whole], codes[whole])
            assert same(twin.momentum_of(codes, scales)[whole], momentum_of(codes, scales)[whole])


def test_every_code_of_m_means_the_same_in_the_kernels_functions(twin):
    codes, scales = all_momentum_codes(((torch.arange(1, 255, dtype=torch.int32) << 23) + 77).view(torch.float32))
    assert same(twin.momentum_of(codes, scales), momentum_of(codes, scales))


@pytest.mark.parametrize("signed", [False, True])
def test_codes_of_d_in_the_kernels_functions_equal_these(twin, signed):
    for x in octaves(100, 126, 1):
        values = x if not torch.isfinite(x).all() else under(1.0, x)
        values = values if signed else torch.where(values == 0, values, values.abs())
        for noise in (torch.full(values.shape, NEAREST, dtype=torch.int32), noise_of(len(values))):
            codes, scales = encode_curvature(values, noise, signed=signed)
            found, found_scales = twin.encode_curvature(values, noise, signed=signed)
            assert torch.equal(found, codes)
            assert same(found_scales, scales)
            assert same(twin.curvature_of(codes, scales, signed=signed), curvature_of(codes, scales, signed=signed))


@pytest.mark.parametrize("signed", [False, True])
def test_every_code_of_d_means_the_same_in_the_kernels_functions(twin, signed):
    codes, scales, _ = all_curvature_codes(signed)
    assert same(twin.curvature_of(codes, scales, signed=signed), curvature_of(codes, scales, signed=signed))


def test_16_bits_in_the_kernels_functions_equal_these(twin):
    values = wild(PART)
    values = values[torch.isfinite(values)]
    noise = noise_of(len(values))
    m, d = twin.encode16(values, noise)
    assert same(m, encode_momentum16(values, noise))
    assert same(d, encode_curvature16(values, noise))
