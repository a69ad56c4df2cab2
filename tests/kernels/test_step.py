"""The update, ordinary and on a refresh."""

import math
from functools import cache

import pytest
import torch
from cases import (
    BY_NAME,
    DTYPES,
    N_GROUPS,
    PASSES,
    REDUCED,
    Case,
    Lists,
    Spec,
    assert_same_bits,
    build,
    indices_of,
    members_of,
    pair_id,
    passes_over,
    place,
    runs_of,
    sizes_for,
)
from tolerances import power_bound, power_rtol, trace_bound

from sassha_fast import reference
from sassha_fast._core.scalars import Request, step_scalars
from sassha_fast._passes.layout import SIGNED_PRODUCT, StepScalars
from sassha_fast._passes.reference import Products
from sassha_fast.variant import Sample

pytestmark = pytest.mark.usefixtures("native_ops")
# Passes that take x from the parameters, and kernels that take it from backups and restore on the way.
RUNNERS = (*PASSES, *(f"{name}_restored" for name in ("native", "cuda_sim") if name in PASSES))
MODES = ("ordinary", "unsigned", "signed")
SEED, DRAW = 2**36 + 7, 31


POWERS = (0.5, 1.0)


def takes(runner, case, power):
    # In Triton's interpreter a chunk takes long: no axis is left out, but not all are crossed.
    return runner != "triton" or power == 0.5 or case.name in ("tiles", "mixed_dtypes")


def ways(runner):
    """A runner, and the one that restores on the way."""
    return [name for name in (runner, f"{runner}_restored") if name in RUNNERS]


RUNS = [(c, d, m, w, p) for c, d, r in runs_of() for m in MODES for w in ways(r) for p in POWERS if takes(r, c, p)]


def cohorts_of(n):
    return [i % 2 for i in range(n)]


def scalars_for(power, mode):
    """Two cohorts: one late and decayed, one early that maximizes."""
    late = {"lr": 0.13, "betas": (0.9, 0.99), "weight_decay": 0.02, "maximize": False, "eps": 1e-4}
    first = {"lr": 0.4, "betas": (0.8, 0.95), "weight_decay": 0.0, "maximize": True, "eps": 1e-3, "clip_update": 0.3}
    refresh, product_scale = mode != "ordinary", 1 / 3 if mode == "signed" else 0.7
    requests = [Request(product_scale), Request(product_scale, grad_scale=0.37)]
    return [
        step_scalars({**late, "hessian_power": power}, 21, 0.17, refresh=refresh, request=requests[0]),
        step_scalars({**first, "hessian_power": power}, 2, 0.05, refresh=refresh, request=requests[1]),
    ]


def step_by(runner, lists, scalars, mode, noise=None, sample=Sample.ABS, zero_is_seen=False):
    """Updates the lists in place; returns the tally of a refresh. ``noise`` is the draw of stochastic rounding."""
    n, name = len(lists.weights), runner.removesuffix("_restored")
    passes = passes_over(name, members_of(lists.weights))
    passes.bind_state(lists.exp_avgs, lists.hessians)
    passes.bind_grads(lists.grads)
    if name != runner:  # an ascent of length 0 makes backups, and nothing but them knows x from then on
        passes.perturb(torch.zeros(N_GROUPS), adaptive=False, take_grads=False, seed=SEED, draw=torch.tensor([DRAW]))
        passes.bind_grads(lists.grads)
        for weight in lists.weights:
            weight.fill_(torch.nan)
    products = None
    if mode != "ordinary":
        products = Products(*map(list, zip(*(_product(passes, lists, i, mode) for i in range(n)), strict=True)))
    options = {"restore": name != runner, "noise_draw": noise, "sample": sample, "zero_is_seen": zero_is_seen}
    return passes.step(scalars, cohorts_of(n), products, SEED, DRAW, **options).tallies


def _product(passes, lists, i, mode):
    if mode == "signed":
        return lists.products[i], SIGNED_PRODUCT
    if passes.signs_in_registers(i):
        return lists.products[i], 0
    z = reference.rademacher(lists.weights[i], indices_of(i + 1)[i], SEED, DRAW)
    return lists.products[i] * z, SIGNED_PRODUCT


def expected_lists(lists, scalars, mode, sample=Sample.ABS, zero_is_seen=False):
    """Weights, m, D and tallies by the reference, and the sum of magnitudes in each trace."""
    weights, exp_avgs, hessians, tallies, magnitudes = [], [], [], [], []
    for i, (x, g, m, d, p) in enumerate(zip(*lists, strict=True)):
        s, h = scalars[cohorts_of(i + 1)[i]], None
        if mode != "ordinary":
            h = p * reference.rademacher(x, indices_of(i + 1)[i], SEED, DRAW) if mode == "unsigned" else p
            compute = reference.compute_dtype(x.dtype)
            mean = h.to(compute) * torch.tensor(s.product_scale, dtype=compute)
            unseen = (h == 0) & (g == 0) & (not zero_is_seen)
            seen = mean[mean.isfinite() & ~unseen].double()
            tallies.append((float(seen.sum()), int((seen < 0).sum()), seen.numel()))
            magnitudes.append(float(seen.abs().sum()))
        results = reference.step(x, g, m, d, s, h, sample=sample, zero_is_seen=zero_is_seen)
        for column, value in zip((weights, exp_avgs, hessians), results, strict=True):
            column.append(value)
    return weights, exp_avgs, hessians, tallies, magnitudes


@cache
def expected_case(case, dtype, mode, power):
    return expected_lists(build(case, dtype, nonfinite=True), scalars_for(power, mode), mode)


def assert_stepped(lists, found, expected):
    """Bits of weights and state, counts of the tallies; traces up to the order of summation."""
    weights, exp_avgs, hessians, tallies, magnitudes = expected
    assert_same_bits(lists.weights, weights, "weights")
    assert_same_bits(lists.exp_avgs, exp_avgs, "exp_avgs")
    assert_same_bits(lists.hessians, hessians, "hessians")
    assert (found is None) == (not tallies)
    if found is None:
        return
    for row, (trace, *counts), weight, magnitude in zip(found.tolist(), tallies, weights, magnitudes, strict=True):
        assert row[1:] == counts
        compute = reference.compute_dtype(weight.dtype)
        assert abs(row[0] - trace) <= trace_bound(weight.numel(), magnitude, compute)


@pytest.mark.parametrize(("case", "dtype", "mode", "runner", "power"), RUNS, ids=pair_id)
def test_step_equals_the_reference(case, dtype, mode, runner, power):
    lists = build(case, dtype, nonfinite=True)
    found = step_by(runner, lists, scalars_for(power, mode), mode)
    assert_stepped(lists, found, expected_case(case, dtype, mode, power))


@pytest.mark.parametrize("runner", [r for r in RUNNERS if r != "reference"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_general_power_stays_within_its_tolerance_and_state_is_bitwise(dtype, mode, runner):
    case = sizes_for(runner)
    before, lists = (build(case, dtype, nonfinite=True) for _ in range(2))
    scalars = scalars_for(0.7, mode)
    step_by(runner, lists, scalars, mode)
    weights, exp_avgs, hessians, _, _ = expected_case(case, dtype, mode, 0.7)
    assert_same_bits(lists.exp_avgs, exp_avgs, "exp_avgs")
    assert_same_bits(lists.hessians, hessians, "hessians")
    for i, (found, wanted) in enumerate(zip(lists.weights, weights, strict=True)):
        update = wanted.double() - before.weights[i].double() * scalars[i % 2].decay
        bound = power_bound(wanted, update, reference.compute_dtype(dtype))
        assert ((found.double() - wanted.double()).abs() <= bound).all(), f"weights[{i}]"


@pytest.mark.parametrize("power", [0.1, 0.7, 1.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=pair_id)
def test_general_power_denominator_over_fifty_decades(dtype, power):
    d = (10 ** (torch.rand(100_000, dtype=torch.float64) * 50 - 25)).to(dtype)
    x, g, m = torch.zeros_like(d), torch.zeros_like(d), torch.ones_like(d)
    only_power = StepScalars(1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, power)  # x = −1 / D^power
    wanted, _, _ = reference.step(x, g, m, d, only_power)
    step_by("native", Lists([x], [g], [m], [d], []), [only_power], "ordinary")
    assert (((x - wanted) / wanted).abs() <= power_rtol(dtype)).all()


@pytest.mark.cpu
@pytest.mark.parametrize("power", [0.5, 1.0, 0.7])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_step_does_not_depend_on_thread_count(dtype, mode, power, restore_threads):
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        lists = build(BY_NAME["sizes"], dtype, nonfinite=True)
        tally = step_by("native_restored", lists, scalars_for(power, mode), mode)
        results.append([*lists.weights, *lists.exp_avgs, *lists.hessians, *([] if tally is None else [tally])])
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", REDUCED, ids=pair_id)
def test_refresh_reads_and_rounds_every_bit_pattern_like_torch(dtype, runner):
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    before, lists = (build(Case("patterns", (Spec((2**16,)),)), dtype) for _ in range(2))
    for tensors in (before, lists):
        for column, stride in ((tensors.weights, 1), (tensors.grads, 3), (tensors.products, 5)):
            column[0].copy_(patterns[(torch.arange(2**16) * stride) % 2**16].view(dtype))
    scalars = scalars_for(0.5, "unsigned")
    found = step_by(runner, lists, scalars, "unsigned")
    assert_stepped(lists, found, expected_lists(before, scalars, "unsigned"))


# ---- what a refresh adds, and the least curvature -----------------------------------------------------------------


@pytest.mark.parametrize("floors", [(0.0, 0.6), (-math.inf, -math.inf)], ids=["floor", "none"])
@pytest.mark.parametrize("sample", Sample)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_samples_and_floors_equal_the_reference(dtype, runner, sample, floors):
    case = Case("two", (Spec((2049,)), Spec((300,)))) if runner == "triton" else BY_NAME["chunks"]
    before, lists = (build(case, dtype, nonfinite=True) for _ in range(2))
    if sample is Sample.SIGNED:
        for column in (before.hessians, lists.hessians):
            for d in column:
                d[d > 1] *= -1  # averages of signed samples are of either sign
    power = 1.0 if floors[0] < 0 else 0.5
    rows = zip(scalars_for(power, "unsigned"), floors, strict=True)  # a cohort has its own
    scalars = [row._replace(floor=floor) for row, floor in rows]
    found = step_by(runner, lists, scalars, "unsigned", sample=sample)
    assert_stepped(lists, found, expected_lists(before, scalars, "unsigned", sample))


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_square_that_overflows_leaves_curvature_as_it_was(runner):
    lists = build(Case("one", (Spec((300,)),)), torch.float32)
    lists.products[0].fill_(1e25)
    before = lists.hessians[0].clone()
    tally = step_by(runner, lists, scalars_for(0.5, "signed"), "signed", sample=Sample.SQUARE)
    assert_same_bits(lists.hessians[0], before)
    assert tally[0, 2] == 300  # the product itself is finite


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("sample", Sample)
def test_a_product_of_minus_zero_makes_curvature_known_whatever_is_sampled(sample, runner):
    lists = build(Case("one", (Spec((300,)),)), torch.float32)
    lists.hessians[0].fill_(-0.0)
    lists.products[0].fill_(-0.0)
    step_by(runner, lists, scalars_for(0.5, "signed"), "signed", sample=sample)
    assert_same_bits(lists.hessians[0], torch.zeros(300))


# ---- what a batch does not show -----------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_is_seen", [False, True], ids=["keep", "zero"])
@pytest.mark.parametrize("sample", Sample)
@pytest.mark.parametrize("mode", ["unsigned", "signed"])
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_elements_without_gradient_and_product_equal_the_reference(dtype, runner, mode, sample, zero_is_seen):
    case = Case("two", (Spec((2049,)), Spec((300,))))
    before, lists = (build(case, dtype, nonfinite=True) for _ in range(2))
    for each in (before, lists):
        for g, h, d in zip(each.grads, each.products, each.hessians, strict=True):
            g[::3], h[::2], h[5::7] = 0.0, 0.0, -0.0
            d[::5] = -0.0
    scalars = scalars_for(0.5, mode)
    found = step_by(runner, lists, scalars, mode, sample=sample, zero_is_seen=zero_is_seen)
    assert_stepped(lists, found, expected_lists(before, scalars, mode, sample, zero_is_seen))


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_late_first_sample_weighs_like_those_that_were_there_from_the_start(runner):
    x, product = torch.randn(300), torch.full((300,), 2.0)
    scalars = scalars_for(0.5, "signed")[0]
    always = torch.full((300,), scalars.first * 2.0 * scalars.product_scale)  # D with this product at all refreshes
    d = always / scalars.kept
    d[::2] = -0.0
    lists, _ = one_cohort(runner, x, d, product, "signed")
    torch.testing.assert_close(lists.hessians[0], always)


# ---- curvature that isn't there -----------------------------------------------------------------------------------


def one_cohort(runner, x, d, product, mode):
    lists = build(Case("one", (Spec((len(x),)),)), x.dtype)
    for tensors, value in ((lists.weights, x), (lists.hessians, d), (lists.products, product)):
        tensors[0].copy_(value)
    tally = step_by(runner, lists, scalars_for(0.5, mode), mode)
    return lists, tally


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_weights_without_curvature_do_not_move_and_gather_momentum(dtype, runner):
    x = torch.randn(300).to(dtype)
    d = torch.full((300,), -0.0)
    lists, _ = one_cohort(runner, x, d, x, "ordinary")
    assert_same_bits(lists.weights[0], x)
    assert_same_bits(lists.hessians[0], d.to(lists.hessians[0].dtype))
    assert (lists.exp_avgs[0] != build(Case("one", (Spec((300,)),)), dtype).exp_avgs[0]).all()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("mode", ["unsigned", "signed"])
def test_a_product_of_zero_makes_curvature_known_and_the_weight_move(mode, zero, runner):
    x = torch.randn(300)
    lists, tally = one_cohort(runner, x, torch.full((300,), -0.0), torch.full((300,), zero), mode)
    assert_same_bits(lists.hessians[0], torch.zeros(300))
    assert (lists.weights[0] != x).all()
    assert tally.tolist() == [[0.0, 0.0, 300.0]]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_nonfinite_products_keep_curvature_and_are_not_counted(value, runner):
    x, d, product = torch.randn(300), torch.rand(300) + 0.5, torch.ones(300)
    product[::3], d[3] = value, -0.0
    lists, tally = one_cohort(runner, x, d, product, "signed")
    assert_same_bits(lists.hessians[0][::3], d[::3])
    assert (lists.hessians[0][1::3] != d[1::3]).all()
    assert_same_bits(lists.weights[0][3], x[3])
    assert torch.isfinite(lists.weights[0]).all()
    assert tally[0, 1:].tolist() == [0.0, 200.0]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_a_first_refresh_lost_to_overflow_moves_nothing(dtype, runner):
    lists = build(Case("one", (Spec((300,)),)), dtype)
    lists.hessians[0].fill_(-0.0)
    lists.products[0].fill_(torch.inf)
    before, unknown = lists.weights[0].clone(), lists.hessians[0].clone()
    scalars = [scalars_for(0.5, "unsigned")[0]._replace(bias2_kept=0.0)]  # 0/0 in every denominator
    tally = step_by(runner, lists, scalars, "unsigned")
    assert_same_bits(lists.weights[0], before)
    assert_same_bits(lists.hessians[0], unknown)
    assert torch.isfinite(lists.exp_avgs[0]).all()
    assert tally.tolist() == [[0.0, 0.0, 0.0]]


# ---- beyond the cache ---------------------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("mode", ["ordinary", "unsigned"])
def test_step_past_the_cache_equals_the_reference(mode):
    specs = (Spec(((1 << 22) + 8,)), Spec((16_387,), "misaligned"), Spec((9_001,), dtype=torch.float64))
    case = Case("large", (*specs, Spec((5_003,), dtype=torch.bfloat16)))
    before, lists = build(case, torch.float32), build(case, torch.float32)
    scalars = scalars_for(0.5, mode)
    found = step_by("native_restored", lists, scalars, mode)
    assert_stepped(lists, found, expected_lists(before, scalars, mode))


@pytest.mark.parametrize("runner", PASSES)
def test_gradients_and_products_in_another_layout_meet_their_own_weights(runner):
    case = BY_NAME["transposed"]
    before, lists = build(case, torch.float32), build(case, torch.float32)
    for column in (lists.grads, lists.products):
        column[:] = [place(t, "contiguous") for t in column]
    scalars = scalars_for(0.5, "signed")
    found = step_by(runner, lists, scalars, "signed")
    assert_stepped(lists, found, expected_lists(before, scalars, "signed"))


@pytest.mark.parametrize("runner", PASSES)
def test_members_without_a_product_keep_curvature_on_a_refresh(runner):
    case = sizes_for(runner)
    before, lists = build(case, torch.float32), build(case, torch.float32)
    passes = passes_over(runner, members_of(lists.weights))
    passes.bind_state(lists.exp_avgs, lists.hessians)
    passes.bind_grads(lists.grads)
    scalars = scalars_for(0.5, "signed")
    n = len(lists.weights)
    products = Products.signed([p if i % 3 == 0 else None for i, p in enumerate(lists.products)])
    found = passes.step(scalars, cohorts_of(n), products, SEED, DRAW).tallies
    for i, (x, g, m, d, p) in enumerate(zip(*before, strict=True)):
        expected = reference.step(x, g, m, d, scalars[i % 2], p if i % 3 == 0 else None)
        assert_same_bits([lists.weights[i], lists.exp_avgs[i], lists.hessians[i]], expected, f"member {i}")
        assert found[i, 2] == (x.numel() if i % 3 == 0 else 0)
