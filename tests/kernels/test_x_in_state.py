"""Weights that are kept in state: updated there, with ‖m‖ on the way, and x + ε derived from them."""

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
    Spec,
    assert_same_bits,
    build,
    clones,
    groups_of,
    indices_of,
    members_of,
    pair_id,
    passes_over,
    runs_of,
)
from test_step import DRAW, SEED, cohorts_of, expected_lists, scalars_for
from tolerances import sum_bound

from sassha_fast import reference
from sassha_fast._passes.reference import Products

pytestmark = pytest.mark.usefixtures("native_ops")
SCALES = torch.tensor([-0.37, 99.0, 1.9])
NOISE = torch.tensor([13])
TAILS = Case("tails", (Spec((2053,)), Spec((300,), "misaligned"), Spec(())))
RUNS = runs_of()
MODES = ("ordinary", "signed")


def takes(runner, case, adaptive, mode=None):
    # In Triton's interpreter a chunk takes long: no axis is left out, but the skipped update alone crosses them.
    if runner == "triton" and mode is not None and adaptive != (mode == "signed"):
        return False
    return runner != "triton" or not adaptive or case.name in ("tiles", "gaps", "mixed_dtypes")


ASCENTS = [(c, d, r, a) for c, d, r in RUNS for a in (False, True) if takes(r, c, a)]
UPDATES = [(c, d, r, m, a) for c, d, r in RUNS for m in MODES for a in (False, True) if takes(r, c, a, m)]


def chunks_for(runner):
    return BY_NAME["tiles" if runner == "triton" else "chunks"]


def bound(runner, lists):
    """Passes whose parameters are NaN and whose x is what the case has as weights."""
    xs = [torch.empty_like(w).copy_(w) for w in lists.weights]
    for weight in lists.weights:
        weight.fill_(torch.nan)
    passes = passes_over(runner, members_of(lists.weights))
    passes.bind_state(lists.exp_avgs, lists.hessians, xs)
    passes.bind_grads(lists.grads)
    return passes, xs


def expected_ascent(xs, exp_avgs, adaptive):
    out = []
    for x, m, group, index in zip(xs, exp_avgs, groups_of(len(xs)), indices_of(len(xs)), strict=True):
        reduced = x.dtype in REDUCED
        noise = reference.rounding_noise(x, index, SEED, NOISE, reference.ASCENT_NOISE) if reduced else None
        out.append(reference.ascend(x, m, SCALES[group], adaptive=adaptive, noise=noise))
    return out


@cache
def expected_case(case, dtype, mode):
    return expected_lists(build(case, dtype, nonfinite=True), scalars_for(0.5, mode), mode)


@pytest.mark.parametrize(("case", "dtype", "runner", "mode", "adaptive"), UPDATES, ids=pair_id)
def test_update_apart_equals_the_reference_adds_squares_and_leaves_parameters_alone(
    case, dtype, runner, mode, adaptive
):
    lists = build(case, dtype, nonfinite=True)
    passes, xs = bound(runner, lists)
    products = Products.signed(lists.products) if mode == "signed" else None
    n = len(xs)
    found = passes.step(scalars_for(0.5, mode), cohorts_of(n), products, SEED, DRAW, adaptive=adaptive)
    weights, exp_avgs, hessians, tallies, _ = expected_case(case, dtype, mode)
    assert_same_bits(xs, weights, "x")
    assert_same_bits(lists.exp_avgs, exp_avgs, "m")
    assert_same_bits(lists.hessians, hessians, "D")
    assert all(w.isnan().all() for w in lists.weights)
    assert (found.tallies is None) == (mode == "ordinary")
    if found.tallies is not None:
        assert found.tallies[:, 1:].tolist() == [list(row[1:]) for row in tallies]
    sums = torch.zeros(N_GROUPS, dtype=torch.float64)
    for x, m, group in zip(weights, exp_avgs, groups_of(n), strict=True):
        sums[group] += reference.square_sum(m, x if adaptive else None)
    elements = sum(w.numel() for w in weights)
    assert ((found.square_sums - sums).abs() <= sum_bound(elements, float(sums.sum()))).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("runner", PASSES)
@pytest.mark.parametrize("dtype", REDUCED, ids=pair_id)
def test_an_update_apart_rounded_at_random_weighs_m_by_the_x_that_it_wrote(dtype, runner, mode):
    found = {}
    for name in ("reference", runner):
        lists = build(TAILS, dtype)
        passes, xs = bound(name, lists)
        products = Products.signed(lists.products) if mode == "signed" else None
        options = {"noise_draw": NOISE, "adaptive": True}
        stepped = passes.step(scalars_for(0.5, mode), cohorts_of(len(xs)), products, SEED, DRAW, **options)
        found[name] = xs, lists.exp_avgs, stepped.square_sums
    (x, m, sums), (wanted_x, wanted_m, wanted_sums) = found[runner], found["reference"]
    assert_same_bits([*x, *m], [*wanted_x, *wanted_m])
    nearest = expected_lists(build(TAILS, dtype), scalars_for(0.5, mode), mode)[0]
    assert any((a != b).any() for a, b in zip(x, nearest, strict=True))
    elements = sum(w.numel() for w in x)
    assert ((sums - wanted_sums).abs() <= sum_bound(elements, float(wanted_sums.sum()))).all()


@pytest.mark.parametrize("runner", PASSES)
def test_squares_take_nothing_from_past_the_end_of_a_tensor(runner):
    lists = build(TAILS, torch.float32)
    for d in lists.hessians:
        d.fill_(1.0)
    scalars = [row._replace(eps=0.0) for row in scalars_for(0.5, "ordinary")]  # what lies past the end would be 0 / 0
    passes, xs = bound(runner, lists)
    found = passes.step(scalars, cohorts_of(len(xs)), None, SEED, DRAW, adaptive=True).square_sums
    total = sum(reference.square_sum(m, x) for m, x in zip(lists.exp_avgs, xs, strict=True))
    torch.testing.assert_close(found.sum(), total, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(("case", "dtype", "runner", "adaptive"), ASCENTS, ids=pair_id)
def test_momentum_ascent_equals_the_reference_and_show_x_undoes_it(case, dtype, runner, adaptive):
    lists = build(case, dtype)
    passes, xs = bound(runner, lists)
    before, moments = clones(xs), clones(lists.exp_avgs)
    passes.momentum_ascent(SCALES, adaptive=adaptive, seed=SEED, draw=NOISE)
    assert_same_bits(lists.weights, expected_ascent(before, moments, adaptive))
    assert_same_bits(xs, before)
    assert_same_bits(lists.exp_avgs, moments)
    passes.show_x()
    assert_same_bits(lists.weights, before)


@pytest.mark.parametrize("runner", PASSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_scale_zero_shows_x_even_with_infinite_momentum(dtype, runner):
    lists = build(chunks_for(runner), dtype)
    for m in lists.exp_avgs:
        m.view(-1)[::2] = torch.inf
    passes, xs = bound(runner, lists)
    passes.momentum_ascent(torch.zeros(N_GROUPS), adaptive=False, seed=SEED, draw=NOISE)
    assert_same_bits(lists.weights, xs)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("runner", PASSES)
def test_a_skipped_update_changes_nothing_and_still_adds_squares(runner, mode, adaptive):
    lists = build(chunks_for(runner), torch.float32)
    passes, xs = bound(runner, lists)
    before = clones([*xs, *lists.exp_avgs, *lists.hessians])
    scalars = [row._replace(skip=1.0) for row in scalars_for(0.5, mode)]
    products = Products.signed(lists.products) if mode == "signed" else None
    found = passes.step(scalars, cohorts_of(len(xs)), products, SEED, DRAW, adaptive=adaptive)
    assert_same_bits([*xs, *lists.exp_avgs, *lists.hessians], before)
    total = sum(reference.square_sum(m, x if adaptive else None) for m, x in zip(lists.exp_avgs, xs, strict=True))
    torch.testing.assert_close(found.square_sums.sum(), total, rtol=1e-12, atol=0.0)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_x_in_state_does_not_depend_on_thread_count(dtype, restore_threads):
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        lists = build(BY_NAME["sizes"], dtype)
        passes, xs = bound("native", lists)
        found = passes.step(scalars_for(0.5, "ordinary"), cohorts_of(len(xs)), None, SEED, DRAW)
        passes.momentum_ascent(SCALES, adaptive=True, seed=SEED, draw=NOISE)
        results.append([*xs, *lists.weights, *lists.exp_avgs, found.square_sums])
    assert_same_bits(results[1], results[0])
