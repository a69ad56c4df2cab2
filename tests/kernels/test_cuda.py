"""The CUDA kernels, run by the simulator in several orders of threads."""

import subprocess
from itertools import chain, permutations

import pytest
import test_gap
import test_x_in_state
import torch
from cases import (
    BY_NAME,
    Case,
    Spec,
    assert_same_bits,
    build,
    indices_of,
    members_of,
    pair_id,
    passes_over,
    place,
)
from sim import LIBRARY, OPS, ORDERS, SimPasses, thread_order
from test_norm import expected_sums, sums_by
from test_perturb import SCALES, expected_case, perturb_by
from test_probe import DRAW, SEED, expected_probe, expected_signs, length
from test_step import MODES, assert_stepped, cohorts_of, scalars_for, step_by
from test_step import expected_case as expected_step
from tolerances import PATIENCE
from training import assert_same_bits as assert_same_lists
from training import assert_same_state, make_loss, make_net, snapshot, state_of, three_calls

from sassha_fast import SASSHA, backends
from sassha_fast._passes import upload
from sassha_fast._passes.cpu import CpuPasses
from sassha_fast._passes.layout import GRAD, PROBE_GRADIENT, ROW_WORDS, SIGNED_PRODUCT, StepScalars
from sassha_fast._passes.reference import Passes, Products
from sassha_fast._passes.table import common_power
from sassha_fast._passes.upload import KEPT_TABLES, Mirrors
from sassha_fast.variant import Sample

pytestmark = pytest.mark.usefixtures("native_ops")
# One vector width each, and every way that a list can go wrong.
SHUFFLED = [
    (BY_NAME["sizes"], torch.float32),
    (BY_NAME["chunks"], torch.float64),
    (BY_NAME["chunks"], torch.bfloat16),
    (BY_NAME["misaligned"], torch.float32),
    (BY_NAME["misaligned"], torch.float16),
    (BY_NAME["empties"], torch.float32),
    (BY_NAME["mixed_dtypes"], torch.float32),
]


@pytest.fixture
def cuda_sim(monkeypatch):
    """Makes the simulator a backend that an optimizer can be built with."""
    backend = backends.Backend("cuda_sim", "the CUDA kernels on the CPU", lambda: SimPasses, lambda device: None)
    monkeypatch.setitem(backends._REGISTRY, "cuda_sim", backend)


# ---- orders of threads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS[1:])
@pytest.mark.parametrize(("case", "dtype"), SHUFFLED, ids=pair_id)
@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_step_has_the_same_bits_in_every_order_of_threads(mode, power, case, dtype, order):
    lists = build(case, dtype, nonfinite=True)
    with thread_order(order):
        found = step_by("cuda_sim", lists, scalars_for(power, mode), mode)
    assert_stepped(lists, found, expected_step(case, dtype, mode, power))


@pytest.mark.parametrize("order", ORDERS[1:])
@pytest.mark.parametrize(("case", "dtype"), SHUFFLED, ids=pair_id)
@pytest.mark.parametrize("adaptive", [False, True])
def test_perturb_has_the_same_bits_in_every_order_of_threads(adaptive, case, dtype, order):
    lists = build(case, dtype)
    before = [w.clone() for w in lists.weights]
    with thread_order(order):
        _, restore = perturb_by("cuda_sim", lists.weights, lists.grads, SCALES, adaptive, take_grads=True)
        assert_same_bits(lists.weights, expected_case(case, dtype, adaptive))
        restore()
    assert_same_bits(lists.weights, before)


@pytest.mark.parametrize(("case", "dtype"), SHUFFLED, ids=pair_id)
@pytest.mark.parametrize("adaptive", [False, True])
def test_norm_and_tallies_are_the_same_bits_in_every_order_of_threads(adaptive, case, dtype):
    results = []
    for order in ORDERS:
        lists = build(case, dtype)
        with thread_order(order):
            sums = sums_by("cuda_sim", lists.weights, lists.grads, adaptive)
            results.append([sums, step_by("cuda_sim", lists, scalars_for(0.5, "unsigned"), "unsigned")])
    for other in results[1:]:
        assert_same_bits(other, results[0])


@pytest.mark.parametrize(("case", "dtype"), SHUFFLED, ids=pair_id)
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("mode", ["ordinary", "signed"])
def test_updates_apart_and_their_ascent_have_the_same_bits_in_every_order_of_threads(mode, adaptive, case, dtype):
    sums = []
    for order in ORDERS:
        lists = build(case, dtype, nonfinite=True)
        passes, in_state = test_x_in_state.bound("cuda_sim", lists)
        products = Products.signed(lists.products) if mode == "signed" else None
        with thread_order(order):
            found = passes.step(
                scalars_for(0.5, mode), cohorts_of(len(in_state)), products, SEED, DRAW, adaptive=adaptive
            )
            passes.momentum_ascent(
                test_x_in_state.SCALES, adaptive=adaptive, seed=test_x_in_state.SEED, draw=test_x_in_state.NOISE
            )
        x, m, d, *_ = test_x_in_state.expected_case(case, dtype, mode)
        assert_same_bits([*in_state, *lists.exp_avgs, *lists.hessians], [*x, *m, *d])
        assert_same_bits(lists.weights, test_x_in_state.expected_ascent(x, m, adaptive))
        sums.append([t for t in found if t is not None])
    for other in sums[1:]:
        assert_same_bits(other, sums[0])


@pytest.mark.parametrize(("case", "dtype"), SHUFFLED, ids=pair_id)
def test_the_gap_has_the_same_bits_in_every_order_of_threads(case, dtype):
    sums = []
    for order in ORDERS:
        lists = build(case, dtype)
        passes = test_gap.bound("cuda_sim", lists)
        with thread_order(order):
            sums.append(passes.gap_sums())
            passes.decompose(test_gap.SCALES)
        assert_same_bits(lists.grads, test_gap.expected_case(case, dtype)[1])
        assert_same_bits(sums[-1], sums[0])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("case", "dtype"), SHUFFLED, ids=pair_id)
def test_signs_and_probes_have_the_same_bits_in_every_order_of_threads(case, dtype, order):
    weights = build(case, dtype).weights
    expected = expected_probe(weights, 0.013)
    with thread_order(order):
        OPS.probe_(weights, indices_of(len(weights)), length(0.013), SEED, DRAW)
        assert_same_bits(weights, expected)
        OPS.rademacher_(weights, indices_of(len(weights)), SEED, DRAW)
    assert_same_bits(weights, expected_signs(case, dtype))


# ---- the ways of an update ----------------------------------------------------------------------------------------


def step_like_the_reference(case, dtype, scalars, products, in_state, noise=None, order=4):
    """Updates by the simulator and by the reference; compares bits, tallies and, ``in_state``, squares of |x| m."""
    results = []
    for passes_class in (Passes, SimPasses):
        lists = build(case, dtype, nonfinite=True)
        passes = passes_class(members_of(lists.weights))
        lives = [w.clone() for w in lists.weights] if in_state else None
        passes.bind_state(lists.exp_avgs, lists.hessians, lives)
        passes.bind_grads(lists.grads)
        given, options = None if products is None else products(lists), {"noise_draw": noise, "adaptive": in_state}
        with thread_order(order):
            found = passes.step(scalars, cohorts_of(len(lists.weights)), given, SEED, DRAW, **options)
        results.append(([*lists.weights, *lists.exp_avgs, *lists.hessians, *(lives or [])], found))
    (expected, expected_found), (tensors, found) = results
    assert_same_bits(tensors, expected)
    if products is not None:
        assert_same_bits(found.tallies[:, 1:], expected_found.tallies[:, 1:])
    if in_state:
        assert torch.allclose(found.square_sums, expected_found.square_sums, rtol=1e-12, atol=0)


@pytest.mark.parametrize("order", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=pair_id)
@pytest.mark.parametrize("in_state", [False, True])
def test_gradients_at_a_probe_give_the_reference_s_curvature(in_state, dtype, order):
    def probed(lists):
        return Products(list(lists.products), [PROBE_GRADIENT] * len(lists.products))

    step_like_the_reference(BY_NAME["chunks"], dtype, scalars_for(0.5, "unsigned"), probed, in_state, order=order)


@pytest.mark.parametrize("order", [0, 1, 4])
@pytest.mark.parametrize("in_state", [False, True])
def test_rows_of_one_launch_may_differ_in_their_products(in_state, order):
    def mixed(lists):
        kinds = [(0, SIGNED_PRODUCT, 0, PROBE_GRADIENT)[i % 4] for i in range(len(lists.products))]
        return Products([None if i % 4 == 0 else p for i, p in enumerate(lists.products)], kinds)

    scalars = scalars_for(0.5, "unsigned")
    step_like_the_reference(BY_NAME["sizes"], torch.float32, scalars, mixed, in_state, order=order)
    scalars[1] = scalars[1]._replace(power=1.0)
    step_like_the_reference(BY_NAME["sizes"], torch.float32, scalars, mixed, in_state, order=order)


@pytest.mark.parametrize("mode", ["ordinary", "signed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=pair_id)
@pytest.mark.parametrize("case", [BY_NAME["chunks"], BY_NAME["misaligned"]], ids=pair_id)
@pytest.mark.parametrize("in_state", [False, True])
def test_updates_round_at_random_like_the_reference(in_state, case, dtype, mode):
    products = None if mode == "ordinary" else lambda lists: Products.signed(lists.products)
    step_like_the_reference(case, dtype, scalars_for(0.5, mode), products, in_state, noise=torch.tensor([17]))


@pytest.mark.parametrize("mode", ["ordinary", "signed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=pair_id)
def test_skipped_cohorts_only_restore(dtype, mode):
    case, scalars = BY_NAME["chunks"], scalars_for(0.5, mode)
    scalars[1] = scalars[1]._replace(skip=1.0)
    lists = build(case, dtype)
    before = build(case, dtype)
    passes = passes_over("cuda_sim", members_of(lists.weights))
    passes.bind_state(lists.exp_avgs, lists.hessians)
    passes.bind_grads(lists.grads, overwrite=True)
    passes.perturb(SCALES, adaptive=False, take_grads=False, seed=1, draw=torch.tensor([2]))
    passes.bind_grads(before.grads)
    n = len(lists.weights)
    products = None if mode == "ordinary" else Products.signed(lists.products)
    tallies = passes.step(scalars, cohorts_of(n), products, 1, 2, restore=True).tallies
    for column in ("weights", "exp_avgs", "hessians"):
        assert_same_bits(getattr(lists, column)[1::2], getattr(before, column)[1::2], column)
        assert not torch.equal(getattr(lists, column)[-2], getattr(before, column)[-2]) or (mode, column) == (
            "ordinary",
            "hessians",
        )
    assert tallies is None or tallies[1::2].eq(0).all()


@pytest.mark.parametrize("odd", ["weights", "in_state", "grads", "firsts", "exp_avgs", "hessians", "products"])
def test_one_operand_at_an_odd_address_is_enough_to_go_without_vectors(odd):
    results = []
    for passes_class in (Passes, SimPasses):
        lists = build(BY_NAME["chunks"], torch.float32)
        columns = {
            **lists._asdict(),
            "in_state": [w.clone() for w in lists.weights],
            "firsts": test_gap.firsts_of(lists),
        }
        columns[odd] = [place(t, "misaligned") for t in columns[odd]]
        passes = passes_class(members_of(columns["weights"]))
        passes.bind_state(columns["exp_avgs"], columns["hessians"], columns["in_state"])
        passes.bind_grads(columns["grads"])
        passes.bind_firsts(columns["firsts"])
        sums = passes.gap_sums()
        passes.decompose(test_gap.SCALES)
        products = Products.signed(columns["products"])
        cohorts = cohorts_of(len(products.values))
        found = passes.step(scalars_for(0.5, "signed"), cohorts, products, SEED, DRAW)
        skips = [row._replace(skip=1.0) for row in scalars_for(0.5, "ordinary")]
        skipped = passes.step(skips, cohorts, None, SEED, DRAW)
        passes.momentum_ascent(test_x_in_state.SCALES, adaptive=False, seed=SEED, draw=test_x_in_state.NOISE)
        results.append(([*chain.from_iterable(columns.values())], [sums, found.square_sums, skipped.square_sums]))
    (expected, expected_sums), (tensors, sums) = results
    assert_same_bits(tensors, expected)
    assert torch.allclose(torch.cat(sums), torch.cat(expected_sums), rtol=1e-12, atol=0)


# ---- beside the CPU's kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=pair_id)
def test_passes_equal_the_cpu_kernels_bit_for_bit(dtype):
    results, draw = [], torch.tensor([11])
    for passes_class in (CpuPasses, SimPasses):
        lists, grads = build(BY_NAME["chunks"], dtype), build(BY_NAME["chunks"], dtype, seed=1).grads
        n = len(lists.weights)
        passes = passes_class(members_of(lists.weights))
        passes.bind_state(lists.exp_avgs, lists.hessians)
        passes.bind_grads(lists.grads, overwrite=True)
        assert_same_sums(passes.square_sums(adaptive=False), lists)
        passes.perturb(SCALES, adaptive=True, take_grads=True, seed=5, draw=draw)
        moved = [w.clone() for w in lists.weights]
        for power in (0.5, 1.0):
            passes.bind_grads(grads)
            passes.step(
                scalars_for(power, "ordinary"), cohorts_of(n), None, 5, 6, restore=power == 0.5, noise_draw=draw
            )
            products = Products(list(lists.products), [0] * len(lists.products))
            passes.bind_grads(grads)
            options = {"noise_draw": draw, "sample": Sample.SQUARE}
            found = passes.step(scalars_for(power, "unsigned"), cohorts_of(n), products, 5, 6, **options)
        results.append([*moved, *lists.weights, *lists.exp_avgs, *lists.hessians, found.tallies[:, 1:]])
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=pair_id)
def test_passes_of_the_family_equal_the_cpu_kernels_bit_for_bit(dtype):
    results = []
    for runner in ("native", "cuda_sim"):
        lists = build(BY_NAME["chunks"], dtype)
        passes, _ = test_x_in_state.bound(runner, lists)
        passes.momentum_ascent(test_x_in_state.SCALES, adaptive=True, seed=SEED, draw=test_x_in_state.NOISE)
        passes.bind_firsts(test_gap.firsts_of(lists))
        sums = passes.gap_sums()
        assert torch.allclose(sums, test_gap.expected_case(BY_NAME["chunks"], dtype)[0], rtol=1e-12, atol=0)
        passes.decompose(test_gap.SCALES)
        results.append([*lists.weights, *lists.grads])
    assert_same_bits(results[1], results[0])


def assert_same_sums(sums, lists):
    expected = expected_sums(lists.weights, lists.grads, False)
    assert torch.allclose(sums, expected, rtol=1e-12, atol=0)


# ---- the optimizer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"adaptive": True, "rho": 0.5, "n_samples": 2}], ids=["plain", "adaptive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_twelve_steps_equal_the_reference_bit_for_bit(dtype, options, cuda_sim):
    results = []
    for order, backend in enumerate(("reference", "cuda_sim")):
        net = make_net(dtype)
        opt = SASSHA(net.parameters(), **{"lr": 0.03, "rho": 0.05, "backend": backend, "lazy_hessian": 5, **options})
        loss = make_loss(net, dtype)
        with thread_order(4 * order):
            losses = [three_calls(opt, loss) for _ in range(12)]
        results.append((snapshot(net), state_of(opt)))
        assert losses[-1] < losses[0]
    assert_same_lists(results[1][0], results[0][0])
    assert_same_state(results[1][1], results[0][1])


@pytest.mark.parametrize("capturable", [False, True])
def test_groups_clipping_and_powers_equal_the_reference_bit_for_bit(capturable, cuda_sim):
    results = []
    for backend in ("reference", "cuda_sim"):
        net = make_net(torch.float64)
        groups = [
            {"params": net[0].parameters(), "rho": 0.1, "eps": 1e-3},
            {"params": net[2].parameters(), "hessian_power": 1.0, "eps": 1e-2, "weight_decay": 0.1},
            {"params": net[4].parameters(), "maximize": True, "clip_update": 0.1},
        ]
        opt = SASSHA(
            groups, lr=0.03, rho=0.05, backend=backend, lazy_hessian=3, max_grad_norm=0.5, capturable=capturable
        )
        loss = make_loss(net, torch.float64)
        for _ in range(7):
            three_calls(opt, loss)
        results.append((snapshot(net), state_of(opt)))
    assert_same_lists(results[1][0], results[0][0])
    assert_same_state(results[1][1], results[0][1])


def passes_of(case, dtype=torch.float32):
    lists = build(case, dtype)
    passes = passes_over("cuda_sim", members_of(lists.weights))
    passes.bind_state(lists.exp_avgs, lists.hessians)
    return lists, passes


def test_an_ordinary_step_of_300_tensors_takes_four_launches():
    lists, passes = passes_of(Case("three hundred", tuple(Spec((37 * i % 271,)) for i in range(300))))
    before = OPS.launches()
    passes.bind_grads(lists.grads, overwrite=True)
    passes.square_sums(adaptive=False)
    passes.perturb(SCALES, adaptive=False, take_grads=True, seed=1, draw=torch.tensor([2]))
    passes.bind_grads(build(BY_NAME["many"], torch.float32).grads)
    passes.step(scalars_for(0.5, "ordinary"), cohorts_of(300), None, 1, 2, restore=True)
    assert OPS.launches() - before == 4


def test_a_step_apart_of_300_tensors_takes_three_launches():
    lists = build(Case("three hundred", tuple(Spec((37 * i % 271,)) for i in range(300))), torch.float32)
    passes, _ = test_x_in_state.bound("cuda_sim", lists)
    before = OPS.launches()
    passes.step(scalars_for(0.5, "ordinary"), cohorts_of(300), None, 1, 2)
    passes.momentum_ascent(test_x_in_state.SCALES, adaptive=False, seed=1, draw=test_x_in_state.NOISE)
    assert OPS.launches() - before == 3


def test_every_dtype_takes_one_launch_per_pass():
    lists, passes = passes_of(BY_NAME["mixed_dtypes"])
    passes.bind_grads(lists.grads)
    before = OPS.launches()
    passes.step(scalars_for(0.5, "ordinary"), cohorts_of(len(lists.weights)), None, 1, 2)
    assert OPS.launches() - before == 4


def test_a_table_that_is_on_the_device_is_not_copied_again():
    lists, passes = passes_of(BY_NAME["many"])
    grads, draw = lists.grads, torch.tensor([2])
    others = [torch.randn_like(g) for g in grads]
    for step in range(4):
        passes.bind_grads(grads, overwrite=True)
        passes.square_sums(adaptive=False)
        passes.perturb(SCALES, adaptive=False, take_grads=True, seed=1, draw=draw)
        passes.restore()
        passes.bind_grads(others)
        passes.step(scalars_for(0.5, "ordinary"), cohorts_of(len(grads)), None, 1, 2)
        if step == 1:  # from then on everything lies where it lay
            uploads = passes.mirrors.uploads
    assert passes.mirrors.uploads == uploads
    passes.bind_grads([torch.randn_like(g) for g in grads], overwrite=True)
    passes.square_sums(adaptive=False)
    assert passes.mirrors.uploads == uploads + 1


def test_tables_stay_in_host_memory_whatever_the_default_device():
    case, scalars = BY_NAME["chunks"], scalars_for(0.5, "signed")
    lists = build(case, torch.float32, nonfinite=True)
    torch.set_default_device("meta")
    try:
        found = step_by("cuda_sim", lists, scalars, "signed")
    finally:
        torch.set_default_device(None)
    assert_stepped(lists, found, expected_step(case, torch.float32, "signed", 0.5))


def test_mirrors_hold_what_they_were_asked_for_and_captured_ones_keep_it(monkeypatch):
    mirrors = Mirrors(torch.device("cpu"))
    tables = [torch.full((2, ROW_WORDS), i) for i in range(KEPT_TABLES + 3)]
    frozen = mirrors.find(tables[0])
    with monkeypatch.context() as capture:
        capture.setattr(upload, "is_capturing", lambda device: True)
        assert mirrors.find(tables[0]) is frozen
    for table in tables + tables[::-1]:
        assert torch.equal(mirrors.find(table), table)
    assert torch.equal(frozen, tables[0])
    assert mirrors.find(tables[0]) is frozen
    assert len(mirrors) == KEPT_TABLES  # with the one that stays


def test_a_table_is_told_from_one_whose_addresses_changed_places_and_found_again():
    mirrors, tables = Mirrors(torch.device("cpu")), []
    for order in permutations(range(5)):
        table = torch.zeros(5, ROW_WORDS, dtype=torch.int64)
        table[:, GRAD] = (torch.tensor(order) << 9) + (127 << 50)
        tables.append(table)
    for table in (*tables, *tables[::2], *tables[1::2]):
        assert torch.equal(mirrors.find(table), table)
    assert mirrors.uploads == len(mirrors) == len(tables)


def test_a_table_that_is_given_up_leaves_nothing_behind():
    mirrors = Mirrors(torch.device("cpu"))
    for i in range(3 * KEPT_TABLES):
        mirrors.find(torch.full((2, ROW_WORDS), i))
    assert len(mirrors) == len(mirrors._kept) == KEPT_TABLES


def test_what_a_capture_copies_is_found_by_its_own_call_alone(monkeypatch):
    """It is on the device only when the graph has been replayed, and the next call may be in no capture."""
    mirrors, table = Mirrors(torch.device("cpu")), torch.ones(2, ROW_WORDS, dtype=torch.int64)
    with monkeypatch.context() as capture:
        capture.setattr(upload, "is_capturing", lambda device: True)
        first = mirrors.find(table)
        assert mirrors.find(table) is first
        mirrors.begin()
        second = mirrors.find(table)
    assert second is not first
    assert all(mirrors.find(table) is not found for found in (first, second))
    assert len(mirrors) == 1


def test_scalars_that_are_tensors_reach_the_table():
    _, passes = passes_of(BY_NAME["empties"])
    rows = [StepScalars(*map(float, range(k, k + len(StepScalars._fields)))) for k in (0, 20)]
    mixed = [row._replace(grad_scale=torch.tensor(float(7 + i))) for i, row in enumerate(rows)]
    expected = torch.tensor([row._replace(grad_scale=7.0 + i) for i, row in enumerate(rows)], dtype=torch.float64)
    assert_same_bits(passes.scalar_table(mixed), expected)
    assert common_power(rows) is None
    assert common_power([row._replace(power=0.5) for row in rows]) == 0.5


def test_sanitizers_find_nothing():
    done = subprocess.run([LIBRARY.with_name("cuda_sim_watched")], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "25 lists, 3666 launches\n"
