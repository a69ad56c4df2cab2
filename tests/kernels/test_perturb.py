"""The ascent x + ε, the backup of x, and the way back."""

from functools import cache

import pytest
import torch
from cases import (
    BY_NAME,
    DTYPES,
    PASSES,
    REDUCED,
    assert_same_bits,
    build,
    clones,
    groups_of,
    indices_of,
    members_of,
    pair_id,
    passes_over,
    place,
    runs_of,
    sizes_for,
)
from tolerances import mean_bound

from sassha_fast import reference
from sassha_fast._passes.reference import Members

pytestmark = pytest.mark.usefixtures("native_ops")
TABLES = ("native", "triton")  # kernels that write x into the gradients' memory
SCALES = torch.tensor([0.37, 99.0, -1.9])  # by group; a negative one descends (maximize)
SEED, DRAW = 2**34 + 5, torch.tensor([11])


RUNS = runs_of(walk=True)


def perturb_by(runner, weights, grads, scales, adaptive, take_grads=False):
    """Perturbs in place; returns the backups and what undoes it."""
    passes = passes_over(runner, members_of(weights))
    passes.bind_grads(grads)
    passes.perturb(scales, adaptive=adaptive, take_grads=[take_grads] * len(grads), seed=SEED, draw=DRAW)
    return passes.backups, passes.restore


@cache
def expected_case(case, dtype, adaptive):
    lists = build(case, dtype)
    return expected_weights(lists.weights, lists.grads, SCALES, adaptive)


def expected_weights(weights, grads, scales, adaptive):
    out = []
    for weight, grad, group, index in zip(
        weights, grads, groups_of(len(weights)), indices_of(len(weights)), strict=True
    ):
        noise = None
        if weight.dtype in REDUCED:
            noise = reference.rounding_noise(weight, index, SEED, DRAW, reference.ASCENT_NOISE)
        out.append(reference.ascend(weight, grad, scales[group], adaptive=adaptive, noise=noise))
    return out


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("case", "dtype", "runner"), RUNS, ids=pair_id)
def test_perturb_equals_the_reference_and_restore_undoes_it(case, dtype, runner, adaptive):
    lists = build(case, dtype)
    before, grads = clones(lists.weights), clones(lists.grads)
    _, restore = perturb_by(runner, lists.weights, lists.grads, SCALES, adaptive)
    assert_same_bits(lists.weights, expected_case(case, dtype, adaptive))
    assert_same_bits(lists.grads, grads)
    restore()
    assert_same_bits(lists.weights, before)


@pytest.mark.cpu
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_perturb_does_not_depend_on_thread_count(dtype, adaptive, restore_threads):
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        lists = build(BY_NAME["sizes"], dtype)
        backups, _ = perturb_by("native", lists.weights, lists.grads, SCALES, adaptive)
        results.append(lists.weights + backups)
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("runner", PASSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_zero_scale_leaves_params_bitwise_unchanged_even_with_infinite_gradients(dtype, runner, adaptive):
    lists = build(sizes_for(runner), dtype)
    for weight, grad in zip(lists.weights, lists.grads, strict=True):
        weight[::3] = -0.0
        grad[::2], grad[1::4] = torch.inf, torch.nan
    before = clones(lists.weights)
    _, restore = perturb_by(runner, lists.weights, lists.grads, torch.zeros(3), adaptive)
    assert_same_bits(lists.weights, before)
    restore()
    assert_same_bits(lists.weights, before)


# ---- reduced precision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("runner", PASSES)
@pytest.mark.parametrize("dtype", REDUCED, ids=pair_id)
def test_perturb_equals_the_reference_for_every_bit_pattern(dtype, runner, adaptive):
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    weights = [patterns.clone().view(dtype)]
    grads = [patterns[torch.randperm(2**16)].view(dtype)]
    expected = expected_weights(weights, grads, SCALES, adaptive)
    perturb_by(runner, weights, grads, SCALES, adaptive)
    assert_same_bits(weights, expected)


@pytest.mark.parametrize("dtype", REDUCED, ids=pair_id)
@pytest.mark.parametrize("magnitude", [1.0, 2.0**-20, 60000.0])
def test_stochastic_rounding_gives_one_of_the_two_neighbours(dtype, magnitude):
    weights = [(torch.rand(20_000) * magnitude).to(dtype)]
    grads = [(torch.randn(20_000) * magnitude / 100).to(dtype)]
    exact = weights[0].float() + SCALES[0] * grads[0].float()
    nearest = exact.to(dtype)
    infinity = torch.full_like(nearest, torch.inf)
    below = torch.where(nearest.float() > exact, torch.nextafter(nearest, -infinity), nearest)
    above = torch.where(nearest.float() < exact, torch.nextafter(nearest, infinity), nearest)
    perturb_by("native", weights, grads, SCALES, False)
    assert ((weights[0] == below) | (weights[0] == above)).all()
    between = below != above
    for neighbour in (below, above):
        assert (weights[0][between] == neighbour[between]).any()


@pytest.mark.parametrize("dtype", REDUCED, ids=pair_id)
@pytest.mark.parametrize("share", [0.03, 0.5, 0.8])
@pytest.mark.parametrize("start", [1.0, -1.5, 2.0**-20])
def test_stochastic_rounding_keeps_the_mean(dtype, start, share):
    n = 1 << 18
    x = torch.tensor(start, dtype=dtype)
    gap = (torch.nextafter(x, 2 * x) - x).double()  # away from zero, signed like x
    weights, grads = [x.expand(n).clone()], [torch.ones(n, dtype=dtype)]
    scales = torch.tensor([float(gap) * share, 0.0, 0.0])
    exact = (x.float() + scales[0]).double()
    perturb_by("native", weights, grads, scales, False)
    steps = (weights[0].double() - x.double()) / gap
    probability = (exact - x.double()) / gap
    deviation = float((probability * (1 - probability)).sqrt())
    truncation = 2.0**-13  # float16 compares 13 random bits
    assert abs(steps.mean() - probability) <= mean_bound(n, deviation) + truncation


def test_rounding_noise_differs_between_parameters_and_draws():
    def moved(index, draw):
        weights, grads = [torch.ones(256, dtype=torch.bfloat16)], [torch.ones(256, dtype=torch.bfloat16)]
        passes = PASSES["native"](Members(weights, [index], [0], 1, ["weight"]))
        passes.bind_grads(grads)
        scales, number = torch.tensor([2.0**-8]), torch.tensor([draw])
        passes.perturb(scales, adaptive=False, take_grads=False, seed=SEED, draw=number)
        return weights[0]

    assert (moved(0, 0) != moved(1, 0)).any()
    assert (moved(0, 0) != moved(0, 1)).any()


# ---- where the backup lies ----------------------------------------------------------------------------------------


IN_PLACE = [(c, d, r) for c, d, r in RUNS if r == "native" or (r == "triton" and c.name in ("tiles", "gaps"))]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("case", "dtype", "runner"), IN_PLACE, ids=pair_id)
def test_backup_in_the_gradients_memory_changes_no_bit(case, dtype, runner, adaptive):
    lists = build(case, dtype)
    before = clones(lists.weights)
    _, restore = perturb_by(runner, lists.weights, lists.grads, SCALES, adaptive, take_grads=True)
    assert_same_bits(lists.weights, expected_case(case, dtype, adaptive))
    restore()
    assert_same_bits(lists.weights, before)


def perturbed_with(runner, weights, grads):
    passes = passes_over(runner, members_of(weights))
    passes.bind_grads(grads)
    passes.perturb(SCALES, adaptive=False, take_grads=[True] * len(grads), seed=SEED, draw=DRAW)
    return passes


@pytest.mark.parametrize("runner", TABLES)
def test_backup_lies_in_the_gradient_where_nobody_shares_it(runner):
    weights, grads = [torch.randn(500), torch.randn(3, 4)], [torch.randn(500), torch.randn(3, 4)]
    passes = perturbed_with(runner, weights, grads)
    assert [b.data_ptr() for b in passes.backups] == [g.data_ptr() for g in grads]


@pytest.mark.parametrize("runner", TABLES)
@pytest.mark.parametrize("overlap", ["same", "partial", "part_of_a_buffer"])
def test_gradients_that_share_memory_keep_it(overlap, runner):
    buffer = torch.randn(600)
    first, second = {
        "same": (buffer[:], buffer[:]),
        "partial": (buffer[:400], buffer[200:]),
        "part_of_a_buffer": (buffer[:300], buffer[300:]),
    }[overlap]
    weights, grads = [torch.randn_like(g) for g in (first, second)], [first, second]
    weights.append(torch.randn(7))
    grads.append(torch.randn(7))
    before, kept = clones(weights), buffer.clone()
    expected = expected_weights(before, grads, SCALES, False)
    passes = perturbed_with(runner, weights, grads)
    assert_same_bits(buffer, kept)
    assert passes.backups[2].data_ptr() == grads[2].data_ptr()
    assert_same_bits(weights, expected)
    passes.restore()
    assert_same_bits(weights, before)


@pytest.mark.parametrize("runner", TABLES)
def test_gradient_in_another_layout_is_not_overwritten(runner):
    weights, grads = [torch.randn(20, 30)], [place(torch.randn(20, 30), "transposed")]
    before, kept = clones(weights), clones(grads)
    expected = expected_weights(before, grads, SCALES, False)
    passes = perturbed_with(runner, weights, grads)
    assert_same_bits(weights, expected)
    assert_same_bits(grads, kept)
    passes.restore()
    assert_same_bits(weights, before)


@pytest.mark.cpu
def test_restore_past_the_cache_copies_every_bit():
    weights = [torch.randn(1 << 22), place(torch.randn(16_387), "misaligned"), torch.randn(33_001, dtype=torch.float64)]
    weights.append(torch.randn(5_003, dtype=torch.bfloat16))
    before, grads = clones(weights), [torch.zeros_like(w) for w in weights]
    _, restore = perturb_by("native", weights, grads, torch.zeros(3), False)
    for weight in weights:
        weight.fill_(torch.nan)
    restore()
    assert_same_bits(weights, before)
