"""The oracle itself, against numpy and exact arithmetic."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import assert_same_bits
from tolerances import INTEGER_POWER_RTOL, mean_bound, sum_bound

from sassha_fast import reference
from sassha_fast._core.scalars import Request, integer_power, step_scalars
from sassha_fast._passes.layout import StepScalars
from sassha_fast.variant import Sample

GROUP = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.5, "eps": 1e-4, "hessian_power": 0.5, "maximize": False}


def test_comparison_of_bits_tells_signed_zeros_apart_and_nans_not():
    zero, nan = torch.tensor([0.0, 1.0]), torch.tensor([torch.nan, 1.0])
    assert_same_bits(nan, -nan * torch.tensor([1.0, -1.0]))
    for other in (torch.tensor([-0.0, 1.0]), nan, torch.tensor([0.0, 1.0 + 2.0**-23]), zero.double(), zero[:1]):
        with pytest.raises(AssertionError):
            assert_same_bits(zero, other)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, torch.float64), *((d, torch.float32) for d in (torch.float32, torch.bfloat16, torch.float16))],
)
def test_only_double_is_computed_in_double(dtype, expected):
    assert reference.compute_dtype(dtype) == expected


# ---- root ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_root_is_correctly_rounded_like_numpy_over_all_magnitudes(dtype):
    integer, exponents = (torch.int32, 2**31) if dtype == torch.float32 else (torch.int64, 2**63)
    pattern = torch.randint(0, exponents - 1, (1_000_000,), dtype=torch.int64).to(integer).view(dtype)
    info = torch.finfo(dtype)
    subnormal = info.tiny * info.eps
    special = torch.tensor([0.0, -0.0, 1.0, 4.0, info.max, info.tiny, subnormal, 3 * subnormal, torch.inf], dtype=dtype)
    edges = torch.tensor([2.0**k * (1 + j * info.eps) for k in range(-20, 21) for j in range(-3, 4)], dtype=dtype)
    value = torch.cat((pattern[pattern.isfinite()], special, edges))
    with np.errstate(invalid="ignore"):
        assert_same_bits(reference.root(value), torch.from_numpy(np.sqrt(value.numpy())))


def test_root_of_a_negative_number_or_nan_is_nan():
    for dtype in (torch.float32, torch.float64):
        assert reference.root(torch.tensor([-1.0, -torch.inf, torch.nan], dtype=dtype)).isnan().all()


# ---- scalars ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [0.9, 0.999, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 10, 127, 1000, 4999])
def test_integer_power_is_near_the_exact_power(base, exponent):
    exact = Fraction(base) ** exponent
    found = integer_power(base, exponent)
    if exact < Fraction(2) ** -1022:  # below the normal range a relative error means nothing
        assert 0.0 <= found <= 2.0**-1022
    else:
        assert abs(Fraction(found) - exact) <= Fraction(INTEGER_POWER_RTOL) * exact


def test_step_scalars_are_the_corrections_of_adam():
    s = step_scalars(GROUP, 3, 0.25, refresh=True, request=Request(4.0, 0.5))
    bias1, bias2 = 1 - 0.9 * (0.9 * 0.9), 1 - 0.99 * (0.99 * 0.99)
    kept = bias2 / (1 - 0.99 * 0.99)  # of three refreshes over two
    corrections = (bias2, 0.25, bias2, kept)
    assert s == StepScalars(0.95, 0.9, 1 - 0.9, 0.99, 1 - 0.99, *corrections, 1e-4, 0.1 / bias1, 0.5, 4.0, 0.5)


def test_an_ordinary_step_keeps_the_correction_of_the_last_refresh():
    s = step_scalars(GROUP, 7, 0.25, refresh=False, request=Request())
    assert (s.bias2, s.bias2_kept, s.first, s.kept, s.product_scale, s.clip) == (0.25, 0.25, 1.0, 1.0, 1.0, math.inf)


def test_maximize_flips_the_gradient_and_nothing_else():
    plain, flipped = (
        step_scalars({**GROUP, "maximize": m}, 2, 0.0, refresh=True, request=Request()) for m in (False, True)
    )
    assert flipped == plain._replace(one_minus_beta1=-plain.one_minus_beta1)


def test_without_bias_correction_both_corrections_are_one():
    s = step_scalars(GROUP, 5, 0.25, refresh=True, request=Request(bias_correction=False))
    assert (s.bias2, s.step_size) == (1.0, 0.1)


def test_scalar_tensors_are_rounded_once_to_the_compute_dtype():
    s = step_scalars(GROUP, 3, 0.25, refresh=True, request=Request())
    for dtype in (torch.float32, torch.float64):
        tensors = reference.scalar_tensors(s, dtype, torch.device("cpu"))
        assert_same_bits(list(tensors), [torch.tensor(value, dtype=torch.float64).to(dtype) for value in s])


# ---- ascent -------------------------------------------------------------------------------------------------------


def test_square_sum_weighs_by_the_parameter_where_it_is_given():
    g, x = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([-2.0, 0.0, 1.0])
    assert reference.square_sum(g).item() == 14.0
    assert reference.square_sum(g, x).item() == 13.0
    assert reference.square_sum(g.bfloat16()).dtype == torch.float64


def test_square_sum_is_exact_to_the_order_of_summation():
    g = torch.randn(10_000)
    exact = math.fsum(v * v for v in g.tolist())
    assert abs(reference.square_sum(g).item() - exact) <= sum_bound(10_000, exact)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_ascent_scales_of_a_nonfinite_norm_are_zero(value):
    scales = reference.ascent_scales(torch.tensor([1.0, value], dtype=torch.float64), [0.1, 0.2], [1e-12, 1e-12])
    assert_same_bits(scales, torch.zeros(2))


def test_ascent_scales_divide_rho_by_the_norm_over_all_groups():
    scales = reference.ascent_scales(torch.tensor([9.0, 16.0], dtype=torch.float64), [0.1, 0.2], [0.0, 0.0])
    assert_same_bits(scales, torch.tensor([0.1 / 5, 0.2 / 5]))


def test_ascend_adds_the_scaled_gradient_or_asams():
    x, g, scale = torch.tensor([2.0, -3.0]), torch.tensor([1.0, 4.0]), torch.tensor(0.5)
    assert_same_bits(reference.ascend(x, g, scale), torch.tensor([2.5, -1.0]))
    assert_same_bits(reference.ascend(x, g, scale, adaptive=True), torch.tensor([4.0, 15.0]))


def test_ascend_of_reduced_precision_needs_noise():
    x = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"torch\.bfloat16 parameter needs noise"):
        reference.ascend(x, x, torch.tensor(1.0))


# ---- random bits --------------------------------------------------------------------------------------------------


def test_stochastic_round_rejects_a_dtype_without_a_grid():
    with pytest.raises(ValueError, match=r"dtype is torch\.float32, expected torch\.bfloat16 or torch\.float16"):
        reference.stochastic_round(torch.ones(2), torch.float32, torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 16), (torch.float16, 13)])
def test_stochastic_round_goes_up_once_noise_and_remainder_fill_the_gap(dtype, bits):
    gap = torch.finfo(dtype).eps
    value = torch.tensor([1 + gap / 4, -1 - gap / 4, 1.0])
    limit = 3 * 2 ** (bits - 2)
    for noise, steps in ((0, 0), (limit - 1, 0), (limit, 1), (2**bits - 1, 1)):
        found = reference.stochastic_round(value, dtype, torch.full((3,), noise, dtype=torch.int32))
        assert found.tolist() == [1 + steps * gap, -1 - steps * gap, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_round_keeps_what_is_not_finite_and_never_overflows_at_random(dtype):
    value = torch.tensor([torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max])
    found = reference.stochastic_round(value, dtype, torch.full((4,), 0xFFFF, dtype=torch.int32))
    assert_same_bits(found, value.to(dtype))


def test_philox_rademacher_and_noise_read_the_same_words():
    blocks = torch.arange(2)
    words = reference.philox(blocks, 3, 4, 5)
    z = reference.rademacher(torch.empty(256), 3, 5, 4)
    assert_same_bits(z[:32], 1.0 - 2.0 * ((words[0, 0] >> torch.arange(32)) & 1))
    noise_words = reference.philox(blocks, 3, 4, 5, reference.ASCENT_NOISE)
    noise = reference.rounding_noise(torch.empty(9), 3, 5, 4, reference.ASCENT_NOISE)
    expected = [half for word in noise_words.flatten().tolist() for half in (word & 0xFFFF, word >> 16)][:9]
    assert noise.tolist() == expected
    assert abs(z.mean()) <= mean_bound(256)


# ---- step ---------------------------------------------------------------------------------------------------------


def test_step_follows_algorithm_one_on_numbers_worked_by_hand():
    x, g, m, d = (torch.tensor([v], dtype=torch.float64) for v in (2.0, 4.0, 1.0, 8.0))
    s = StepScalars(0.5, 0.5, 0.5, 0.25, 0.75, 0.5, 0.125, 0.75, 2.0, 1.0, 2.0, 0.5, 0.25)
    # m = 0.5*1 + 0.5*4; D = 0.25*8 + 0.75*|-24/4| on a refresh; denominator = sqrt(D/0.5) + 1, or sqrt(D/0.125) + 1
    assert_same_bits(reference.step(x, g, m, d, s), tuple(_doubles(1.0 - 2.0 * (2.5 / 5.0), 2.5, 8.0)))
    refreshed = reference.step(x, g, m, d, s, torch.tensor([-24.0], dtype=torch.float64))
    assert_same_bits(refreshed, tuple(_doubles(1.0 - 2.0 * (2.5 / (math.sqrt(13.0) + 1.0)), 2.5, 6.5)))
    kept = reference.step(x, g, m, d, s, torch.tensor([torch.inf], dtype=torch.float64))
    assert_same_bits(kept, tuple(_doubles(1.0 - 2.0 * (2.5 / 9.0), 2.5, 8.0)))
    unseen = reference.step(x, 0.0 * g, m, d, s, torch.tensor([0.0], dtype=torch.float64))  # m = 0.5, D = 2*8
    assert_same_bits(unseen, tuple(_doubles(1.0 - 2.0 * (0.5 / (math.sqrt(32.0) + 1.0)), 0.5, 16.0)))
    zero = reference.step(x, 0.0 * g, m, d, s, torch.tensor([0.0], dtype=torch.float64), zero_is_seen=True)  # 0.25*8
    assert_same_bits(zero, tuple(_doubles(1.0 - 2.0 * (0.5 / 3.0), 0.5, 2.0)))
    first = reference.step(x, g, m, -0.0 * d, s, torch.tensor([-24.0], dtype=torch.float64))  # D = 0.75*|-24/4|
    assert_same_bits(first, tuple(_doubles(1.0 - 2.0 * (2.5 / 4.0), 2.5, 4.5)))
    clipped = reference.step(x, g, m, d, s._replace(grad_scale=0.5, clip=0.125))  # m = 1.5, and 1.5 / 5 is too much
    assert_same_bits(clipped, tuple(_doubles(1.0 - 2.0 * 0.125, 1.5, 8.0)))
    assert_same_bits(reference.step(x, g, m, d, s._replace(skip=1.0)), (x, m, d))
    linear = reference.step(x, g, m, d, s._replace(power=1.0))
    assert_same_bits(linear, tuple(_doubles(1.0 - 2.0 * (2.5 / 17.0), 2.5, 8.0)))
    floored = reference.step(x, g, m, d, s._replace(floor=64.0))
    assert_same_bits(floored, tuple(_doubles(1.0 - 2.0 * (2.5 / 9.0), 2.5, 8.0)))


@pytest.mark.parametrize(("sample", "expected"), [(Sample.ABS, 6.0), (Sample.SIGNED, -6.0), (Sample.SQUARE, 36.0)])
def test_samples_are_the_magnitude_the_value_and_the_square(sample, expected):
    h = torch.tensor([-6.0, -0.0])
    assert_same_bits(reference.sampled(h, sample), torch.tensor([expected, 0.0]))
    assert reference.is_unknown(torch.tensor([-0.0, 0.0, -1.0])).tolist() == [True, False, False]


def test_gap_follows_its_equations_on_numbers_worked_by_hand():
    g2, g = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 3.0])
    sums = reference.gap_sums(g2, g)
    assert sums.tolist() == [10.0, 2.0, 4.0]
    scales = reference.gap_scales(sums, [0.5, 0.0])
    assert scales.tolist() == [[0.5, 0.5], [0.0, 0.5]]
    assert reference.descent(g2, g, scales[0]).tolist() == [2.0, -1.5]  # the orthogonal part is (0, 3)
    assert reference.descent(g2, g, scales[1]).tolist() == [2.0, 0.0]


def _doubles(*values):
    return [torch.tensor([v], dtype=torch.float64) for v in values]


def test_every_public_function_is_there_to_be_tested():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in reference.__all__ if f"reference.{name}(" not in source] == []


def test_finite_difference_is_taken_over_a_probe_of_length_h():
    assert reference.finite_difference(torch.tensor([3.0]), torch.tensor([2.0])).item() == 1.0
    assert reference.probe(torch.zeros(200), torch.tensor(0.5), 1, 2, 3).abs().unique().item() == 0.5


@pytest.mark.parametrize(("sample", "wanted"), [(Sample.ABS, (3.0, 3.5)), (Sample.SQUARE, (3.0**0.5, 3.5**0.5))])
def test_what_a_smaller_batch_lacks_is_completed_on_numbers_worked_by_hand(sample, wanted):
    """D = 1.5 of weight 1/2 is a curvature of 3; products are to be doubled, and squared by one of the samples."""
    s = StepScalars(*[1.0] * 12)._replace(product_scale=2.0, first=0.75, kept=1.5)
    d = torch.tensor([1.0, 1.5, -0.0, 1.0])
    seen = torch.tensor([True, False, False, False])
    h, g = torch.tensor([-1.75, 0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    mean = reference.mean_sample(h, seen, s, sample)
    assert mean.item() == (3.5 if sample is Sample.ABS else 3.5**2)
    found = reference.completed(d, h, g, seen, s, sample, torch.tensor(3.5))
    torch.testing.assert_close(found, torch.tensor([-1.75, wanted[0] / 2, wanted[1] / 2, 0.0]))
    assert reference.mean_sample(h, ~seen & (h != 0), s, sample).isnan()  # nothing was seen


def test_what_was_never_seen_gets_the_mean_on_numbers_worked_by_hand():
    d = torch.tensor([1.0, 4.0, -0.0, -0.0])
    product, g = torch.tensor([2.0, 0.0, 0.0, torch.nan]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    sums = reference.unseen_sums(d, product, g)
    assert sums.tolist() == [2.0, 2.0, 5.0]  # two were not seen, two have a curvature
    found = reference.filled(d, product, g, sums)
    assert found[:3].tolist() == [1.0, 4.0, 2.5]
    assert reference.is_unknown(found).tolist() == [False, False, False, True]
