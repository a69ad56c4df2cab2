"""The norm pass: sums of squares in double, per group."""

import pytest
import torch
from cases import (
    CASES,
    N_GROUPS,
    PAIRS,
    PASSES,
    affordable,
    assert_same_bits,
    build,
    groups_of,
    members_of,
    pair_id,
)
from tolerances import sum_bound

from sassha_fast import reference

pytestmark = pytest.mark.usefixtures("native_ops")
OPS = torch.ops.sassha_fast
RUNNERS = ("ops", *PASSES)
RUNS = [
    (case, dtype, runner)
    for case, dtype in PAIRS
    for runner in RUNNERS
    if (case.dense or runner != "ops") and affordable(runner, case)
]
BY_NAME = {case.name: case for case in CASES}


def sums_by(runner, weights, grads, adaptive):
    if runner == "ops":
        return OPS.square_sums(grads, weights if adaptive else [], groups_of(len(grads)), N_GROUPS)
    passes = PASSES[runner](members_of(weights))
    passes.bind_grads(grads)
    return passes.square_sums(adaptive=adaptive)


def expected_sums(weights, grads, adaptive):
    sums = torch.zeros(N_GROUPS, dtype=torch.float64)
    for group, weight, grad in zip(groups_of(len(grads)), weights, grads, strict=True):
        sums[group] += reference.square_sum(grad, weight if adaptive else None)
    return sums


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("case", "dtype", "runner"), RUNS, ids=pair_id)
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
@pytest.mark.parametrize(("case", "dtype"), [p for p in PAIRS if p[0].dense], ids=pair_id)
def test_square_sums_do_not_depend_on_thread_count(case, dtype, adaptive, restore_threads):
    lists = build(case, dtype)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(sums_by("ops", lists.weights, lists.grads, adaptive))
    assert_same_bits(results[1], results[0])


def test_table_and_list_operators_give_the_same_bits():
    lists = build(BY_NAME["sizes"], torch.float32)
    by_table, by_lists = (sums_by(runner, lists.weights, lists.grads, False) for runner in ("native", "ops"))
    assert_same_bits(by_table, by_lists)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_nonfinite_gradient_makes_only_its_group_nonfinite(runner, value):
    lists = build(BY_NAME["sizes"], torch.float32)
    lists.grads[9][49_999] = value  # group 2
    sums = sums_by(runner, lists.weights, lists.grads, False)
    assert torch.isfinite(sums[:2]).all()
    assert not torch.isfinite(sums[2])


@pytest.mark.parametrize("runner", RUNNERS)
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
