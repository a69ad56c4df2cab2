"""The CUDA kernels for state and weights in fewer bits, run by the simulator in several orders of threads."""

import pytest
import test_compact_passes as compact
import torch
from cases import BY_NAME, assert_same_bits, members_of, place
from sim import OPS, ORDERS, SimPasses, thread_order
from test_step import DRAW, SEED, cohorts_of, scalars_for

from sassha_fast._passes.cpu import CpuPasses
from sassha_fast._passes.layout import PROBE_GRADIENT, SIGNED_PRODUCT
from sassha_fast._passes.reference import Passes, Products
from sassha_fast.formats import Format

pytestmark = pytest.mark.usefixtures("native_ops")
# Codes and bfloat16, groups that lanes share in runs and in warps, and whatever lies at odd addresses.
SHUFFLED = [
    ("chunks", torch.bfloat16, Format(8, 8)),
    ("chunks", torch.float32, Format(8, signed=True)),
    ("large_chunks", torch.float16, Format(8, 16)),
    ("large_chunks", torch.bfloat16, Format(16, 8)),
    ("misaligned", torch.bfloat16, Format(8, 8)),
    ("empties", torch.float32, Format(8)),
]


@pytest.mark.parametrize("order", ORDERS[1:])
@pytest.mark.parametrize(("name", "dtype", "stored"), SHUFFLED, ids=compact.name_of)
@pytest.mark.parametrize("in_state", [False, True])
def test_every_order_of_threads_gives_the_same_bits(in_state, name, dtype, stored, order):
    case = BY_NAME[name]
    with thread_order(order):
        found = compact.stepped("cuda_sim", case, dtype, stored, "unsigned", in_state=in_state)
    compact.assert_same(found, compact.expected(case, dtype, stored, "unsigned", in_state=in_state), dtype)


def stepped_by(passes_class, case, dtype, stored, kinds):
    """All tensors after an update whose rows have products of these kinds by turns, and what it found."""
    lists = compact.Compact(case, dtype, stored)
    passes = passes_class(members_of(lists.weights, stored))
    passes.bind_state(lists.exp_avgs, lists.hessians)
    passes.bind_compact(lists.corrections, lists.exp_avg_scales, lists.hessian_scales)
    passes.bind_grads(lists.grads)
    n = len(lists.weights)
    given = [kinds[i % len(kinds)] for i in range(n)]
    values = [None if kind is None else product for kind, product in zip(given, lists.products, strict=True)]
    scalars = scalars_for(0.5, "unsigned")
    scalars[1] = scalars[1]._replace(power=1.0)  # powers of one launch may differ
    products = Products(values, [kind or 0 for kind in given])
    found = passes.step(scalars, cohorts_of(n), products, SEED, DRAW, state_draw=compact.draw_of())
    return [t for column in lists.tensors().values() for t in column], found


@pytest.mark.parametrize(
    "kinds", [(PROBE_GRADIENT,), (None, SIGNED_PRODUCT, 0, PROBE_GRADIENT)], ids=["probed", "mixed"]
)
@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.float32, Format(8)), (torch.bfloat16, Format(8, 8)), (torch.float16, Format(32, 8))]
)
def test_rows_of_one_launch_may_differ_in_their_products_and_powers(dtype, stored, kinds):
    case = BY_NAME["chunks"]
    expected, wanted = stepped_by(Passes, case, dtype, stored, kinds)
    for passes_class in (SimPasses, CpuPasses):
        tensors, found = stepped_by(passes_class, case, dtype, stored, kinds)
        assert_same_bits(tensors, expected)
        assert_same_bits(found.tallies[:, 1:], wanted.tallies[:, 1:])


@pytest.mark.parametrize("odd", ["exp_avg_scales", "hessian_scales"])
def test_scales_may_lie_anywhere(odd):
    case, stored = BY_NAME["large_chunks"], Format(8, 8)
    found = compact.stepped("cuda_sim", case, torch.bfloat16, stored, "unsigned", odd=odd)
    compact.assert_same(found, compact.expected(case, torch.bfloat16, stored, "unsigned"), torch.bfloat16)


@pytest.mark.parametrize(("dtype", "stored"), [(torch.bfloat16, Format(8, 8)), (torch.float32, Format(16))])
def test_a_step_of_a_compact_table_takes_as_many_launches_as_any(dtype, stored):
    lists = compact.Compact(BY_NAME["chunks"], dtype, stored)
    passes = lists.passes("cuda_sim")
    before = OPS.launches()
    passes.bind_grads(lists.grads, overwrite=True)
    passes.square_sums(adaptive=False)
    passes.perturb(compact.scales(), adaptive=False, take_grads=False, seed=SEED, draw=compact.draw_of())
    passes.bind_grads(lists.firsts)
    passes.step(scalars_for(0.5, "ordinary"), cohorts_of(len(lists.weights)), None, SEED, DRAW, restore=True)
    assert OPS.launches() - before == 4


def test_the_simulator_shuffles_with_all_lanes_of_a_warp():
    """What a group shares is found among neighbouring lanes, so a group of one warp must not reach into the next."""
    lists = compact.Compact(BY_NAME["misaligned"], torch.float32, Format(8))
    before = [t.clone() for t in lists.exp_avg_scales]
    wild = place(lists.grads[0].clone(), "misaligned")
    wild.view(-1)[32] = 1e30  # the first element of the second group
    lists.grads[0] = wild
    passes = lists.passes("cuda_sim")
    passes.bind_grads(lists.grads)
    passes.step(scalars_for(0.5, "ordinary"), cohorts_of(len(lists.weights)), None, SEED, DRAW)
    assert (lists.exp_avg_scales[0] > 1e20).nonzero().flatten().tolist() == [1]
    assert len(before[0]) > 2
