"""The norm pass: sums of squares in double, per group."""

import pytest
import torch
from cases import (
    N_GROUPS,
    PAIRS,
    PASSES,
    assert_same_bits,
    build,
    groups_of,
    members_of,
    pair_id,
    passes_over,
    runs_of,
    sizes_for,
)
from tolerances import sum_bound

from sassha_fast import reference

pytestmark = pytest.mark.usefixtures("native_ops")
RUNS = runs_of()


def sums_by(runner, weights, grads, adaptive):
    passes = passes_over(runner, members_of(weights))
    passes.bind_grads(grads)
    return passes.square_sums(adaptive=adaptive)


def expected_sums(weights, grads, adaptive):
    sums = torch.zeros(N_GROUPS, dtype=torch.float64)
    for group, weight, grad in zip(groups_of(len(grads)), weights, grads, strict=True):
        sums[group] += reference.square_sum(grad, weight if adaptive else None)
    return sums


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("case", "dtype", "runner"), runs_of(walk=True), ids=pair_id)
def test_square_sums_equal_the_reference_up_to_order(case, dtype, runner, adaptive):
    lists = build(case, dtype)
    sums = sums_by(runner, lists.weights, lists.grads, adaptive)
    expected = expected_sums(lists.weights, lists.grads, adaptive)
    n = sum(grad.numel() for grad in lists.grads)
    assert sums.dtype == torch.float64
    for found, wanted in zip(sums.tolist(), expected.tolist(), strict=True):
        assert abs(found - wanted) <= sum_bound(n, wanted)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("case", "dtype", "runner"), RUNS, ids=pair_id)
def test_square_sums_of_small_integers_are_exact(case, dtype, runner, adaptive):
    lists = build(case, dtype)
    for tensor in lists.weights + lists.grads:
        tensor.copy_((tensor * 4).round().clamp(-8, 8))
    expected = torch.zeros(N_GROUPS, dtype=torch.int64)
    for group, weight, grad in zip(groups_of(len(lists.grads)), lists.weights, lists.grads, strict=True):
        term = weight.long() * grad.long() if adaptive else grad.long()
        expected[group] += term.square().sum()
    assert_same_bits(sums_by(runner, lists.weights, lists.grads, adaptive), expected.double())


@pytest.mark.cpu
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("case", "dtype"), PAIRS, ids=pair_id)
def test_square_sums_do_not_depend_on_thread_count(case, dtype, adaptive, restore_threads):
    lists = build(case, dtype)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(sums_by("native", lists.weights, lists.grads, adaptive))
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("in_state", [False, True])
@pytest.mark.parametrize(("case", "dtype", "runner"), RUNS, ids=pair_id)
def test_the_norm_of_x_is_taken_where_x_lies(case, dtype, runner, in_state):
    lists = build(case, dtype)
    passes, xs = passes_over(runner, members_of(lists.weights)), lists.weights
    if in_state:
        xs = [torch.empty_like(w).copy_(w) for w in lists.weights]
        for weight in lists.weights:
            weight.fill_(torch.nan)
        passes.bind_state(lists.exp_avgs, lists.hessians, xs)
    expected = sum(float(reference.square_sum(x)) for x in xs)
    found = passes.weight_square_sum()
    assert abs(found - expected) <= sum_bound(sum(x.numel() for x in xs), expected)


@pytest.mark.parametrize("runner", PASSES)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_nonfinite_gradient_makes_only_its_group_nonfinite(runner, value):
    lists = build(sizes_for(runner), torch.float32)
    last = max(range(1, len(lists.grads), 2), key=lambda i: lists.grads[i].numel())  # of group 2
    lists.grads[last][-1] = value
    sums = sums_by(runner, lists.weights, lists.grads, False)
    assert torch.isfinite(sums[:2]).all()
    assert not torch.isfinite(sums[2])


@pytest.mark.parametrize("runner", PASSES)
def test_squares_beyond_the_range_of_float32_are_summed(runner):
    weights, grads = [torch.ones(3)], [torch.full((3,), 1e30)]
    expected = 3 * grads[0][0].double() ** 2
    sums = sums_by(runner, weights, grads, False)
    assert abs(sums[0] - expected) <= sum_bound(3, float(expected))


@pytest.mark.parametrize("runner", PASSES)
def test_gradient_in_another_layout_is_summed_with_its_own_weight(runner):
    weights, grads = [torch.arange(6.0).reshape(2, 3)], [torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 2.0]]).t()]
    sums = sums_by(runner, weights, grads, True)
    assert_same_bits(sums, torch.tensor([(0.0 * 1) ** 2 + (5.0 * 2) ** 2, 0.0, 0.0], dtype=torch.float64))
