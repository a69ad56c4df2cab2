"""GSAM's decomposition: sums of products of both gradients, and the descent that they make."""

from functools import cache

import pytest
import torch
from cases import (
    BY_NAME,
    DTYPES,
    PASSES,
    assert_same_bits,
    build,
    clones,
    groups_of,
    members_of,
    pair_id,
    passes_over,
    place,
    runs_of,
    sizes_for,
)
from tolerances import sum_bound

from sassha_fast import reference

pytestmark = pytest.mark.usefixtures("native_ops")
SCALES = torch.tensor([[0.3, -0.21], [99.0, 99.0], [0.45, 1.7]])  # α and the share of g along g̃, by group
RUNS = runs_of()


def firsts_of(lists):
    """Gradients of a first pass: the momenta of the case, in the dtype of the gradients."""
    return [m.to(g.dtype) for m, g in zip(lists.exp_avgs, lists.grads, strict=True)]


def bound(runner, lists):
    passes = passes_over(runner, members_of(lists.weights))
    passes.bind_grads(lists.grads)
    passes.bind_firsts(firsts_of(lists))
    return passes


@cache
def expected_case(case, dtype):
    lists = build(case, dtype)
    firsts = firsts_of(lists)
    sums = torch.stack([reference.gap_sums(g2, g) for g2, g in zip(lists.grads, firsts, strict=True)]).sum(0)
    groups = groups_of(len(firsts))
    taken = [reference.descent(*pair, SCALES[k]) for *pair, k in zip(lists.grads, firsts, groups, strict=True)]
    return sums, taken


@pytest.mark.parametrize(("case", "dtype", "runner"), RUNS, ids=pair_id)
def test_gap_sums_equal_the_reference_up_to_the_order_of_summation(case, dtype, runner):
    lists = build(case, dtype)
    found = bound(runner, lists).gap_sums()
    expected, _ = expected_case(case, dtype)
    n = sum(g.numel() for g in lists.grads)
    limit = sum_bound(n, float((expected[0] * expected[2]).sqrt()))  # Cauchy and Schwarz bound the magnitudes of g·g̃
    for i in (0, 2):
        assert abs(found[i] - expected[i]) <= sum_bound(n, float(expected[i]))
    assert abs(found[1] - expected[1]) <= limit
    assert found.dtype == torch.float64


@pytest.mark.parametrize(("case", "dtype", "runner"), RUNS, ids=pair_id)
def test_decomposed_gradients_equal_the_reference(case, dtype, runner):
    lists = build(case, dtype)
    bound(runner, lists).decompose(SCALES)
    assert_same_bits(lists.grads, expected_case(case, dtype)[1])


@pytest.mark.parametrize("runner", PASSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_alpha_zero_leaves_gradients_bitwise_alone_even_if_the_first_are_infinite(dtype, runner):
    lists = build(sizes_for(runner), dtype)
    before, firsts = clones(lists.grads), firsts_of(lists)
    for first in firsts:
        first[::2] = torch.inf
    passes = passes_over(runner, members_of(lists.weights))
    passes.bind_grads(lists.grads)
    passes.bind_firsts(firsts)
    passes.decompose(torch.zeros_like(SCALES))
    assert_same_bits(lists.grads, before)


@pytest.mark.parametrize("runner", PASSES)
def test_gradients_in_another_layout_are_decomposed_where_they_lie(runner):
    lists = build(BY_NAME["transposed"], torch.float32)
    expected = expected_case(BY_NAME["transposed"], torch.float32)[1]
    lists.grads[:] = [place(g, "contiguous") for g in lists.grads]
    bound(runner, lists).decompose(SCALES)
    assert_same_bits(lists.grads, expected)


def test_the_orthogonal_part_is_orthogonal_and_alpha_is_its_weight():
    g2, g = torch.randn(1000, dtype=torch.float64), torch.randn(1000, dtype=torch.float64)
    sums = reference.gap_sums(g2, g)
    alpha, share = reference.gap_scales(sums, [0.4])[0]
    assert alpha == torch.tensor(0.4, dtype=torch.float32)
    orthogonal = g - share.double() * g2
    assert abs(orthogonal @ g2) <= 1e-6 * g.norm() * g2.norm()  # the share is rounded to float32
    torch.testing.assert_close(reference.descent(g2, g, torch.stack((alpha, share))), g2 - alpha.double() * orthogonal)


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_gradients_without_a_usable_norm_are_left_alone(value):
    g2, g = torch.full((5,), value), torch.randn(5)
    scales = reference.gap_scales(reference.gap_sums(g2, g), [0.4, 0.1])
    assert_same_bits(scales, torch.zeros(2, 2))
    assert_same_bits(reference.descent(g2, g, scales[0]), g2)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_gap_does_not_depend_on_thread_count(dtype, restore_threads):
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        lists = build(BY_NAME["sizes"], dtype)
        passes = bound("native", lists)
        sums = passes.gap_sums()
        passes.decompose(SCALES)
        results.append([*lists.grads, sums])
    assert_same_bits(results[1], results[0])
