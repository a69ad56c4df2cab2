"""Passes over state and weights in fewer bits: every backend against the reference, bit for bit."""

from functools import cache

import pytest
import torch
from cases import (
    BY_NAME,
    DEVICE,
    N_GROUPS,
    PASSES,
    REDUCED,
    Case,
    Spec,
    assert_same_bits,
    build,
    members_of,
    pair_id,
    passes_over,
    place,
    sizes_for,
)
from test_step import DRAW, SEED, cohorts_of, scalars_for
from tolerances import sum_bound, trace_bound

from sassha_fast import formats, reference
from sassha_fast._passes.layout import SIGNED_PRODUCT
from sassha_fast._passes.reference import Products
from sassha_fast.formats import Format, flat
from sassha_fast.variant import Sample

pytestmark = pytest.mark.usefixtures("native_ops")
# Backends whose kernels take no format but float32 go the reference's way, which would be compared with itself.
RUNNERS = [name for name, kind in PASSES.items() if name == "foreach" or getattr(kind, "takes_compact", False)]
FORMATS = {
    torch.float32: [Format(16), Format(8), Format(8, signed=True)],
    torch.bfloat16: [Format(s, c) for s in (32, 16, 8) for c in (0, 8, 16) if (s, c) != (32, 0)],
    torch.float16: [Format(32, 8), Format(8), Format(8, 8), Format(16, 16)],
}
SMALLEST = {torch.float32: Format(8), torch.bfloat16: Format(8, 8), torch.float16: Format(8, 8)}
LAYOUTS = ("misaligned", "empties", "all_empty", "channels_last", "transposed", "gaps", "chunks", "large_chunks")
MODES = ("ordinary", "unsigned", "signed")


def runs():
    """Every format on the sizes around every boundary, the smallest one on every layout."""
    found = []
    for runner in RUNNERS:
        for dtype, kinds in FORMATS.items():
            found += [(sizes_for(runner), dtype, stored, runner) for stored in kinds]
            cases = [BY_NAME[name] for name in LAYOUTS if not BY_NAME[name].runners or runner in BY_NAME[name].runners]
            found += [(case, dtype, SMALLEST[dtype], runner) for case in cases]
    return found


def name_of(value):
    if isinstance(value, Format):
        return f"{value.state_bits}+{value.correction_bits}{'s' if value.signed else ''}"
    return pair_id(value)


class Compact:
    """Lists of a case whose state and weights are stored in a format."""

    def __init__(self, case, dtype, stored, *, nonfinite=True):
        lists = build(case, dtype, nonfinite=nonfinite)
        self.stored, self.specs = stored, case.specs
        self.weights, self.grads, self.products = lists.weights, lists.grads, lists.products
        for g, product in zip(self.grads, self.products, strict=True):  # some elements that a refresh does not see
            unseen = torch.arange(g.numel(), device=g.device).view(g.shape) % 5 == 2
            g.masked_fill_(unseen, 0.0)
            product.masked_fill_(unseen, 0.0)
        self.exp_avgs, self.hessians = [], []
        self.corrections = [] if stored.correction_bits else None
        self.exp_avg_scales, self.hessian_scales = ([], []) if stored.state_bits == 8 else (None, None)
        self.firsts = [g.clone() for g in self.grads]
        for i, spec in enumerate(case.specs):
            layout = "contiguous" if spec.layout == "gaps" else spec.layout
            self._encode(lists.exp_avgs[i], lists.hessians[i], layout, i)

    def _encode(self, m, d, layout, i):
        stored = self.stored
        m, d = (place(t.clone(), layout) for t in (m, d))
        if stored.signed:
            d = torch.where((torch.arange(d.numel(), device=d.device) % 3 == 0).view(d.shape) & (d != 0), -d, d)
            d = place(d, layout)
        if self.corrections is not None:
            n = self.weights[i].numel()
            r = ((torch.arange(n, device=m.device) * 37 + i) % (1 << stored.correction_bits)) - (
                1 << (stored.correction_bits - 1)
            )
            self.corrections.append(place(r.view(self.weights[i].shape).to(stored.correction_dtype), layout))
        if stored.state_bits == 32:
            self.exp_avgs.append(m)
            self.hessians.append(d)
        elif stored.state_bits == 16:
            for column, value in ((self.exp_avgs, m), (self.hessians, d)):
                column.append(place(value.to(torch.bfloat16), layout))
        else:
            codes, scales = formats.encode_momentum(flat(m))
            self._add(self.exp_avgs, codes, m, layout)
            self.exp_avg_scales.append(place(scales, "misaligned" if layout == "misaligned" else "contiguous"))
            codes, scales = formats.encode_curvature(flat(d), signed=stored.signed)
            self._add(self.hessians, codes, d, layout)
            self.hessian_scales.append(place(scales, "misaligned" if layout == "misaligned" else "contiguous"))

    def _add(self, column, codes, like, layout):
        out = torch.empty_strided(like.shape, like.stride(), dtype=codes.dtype, device=codes.device)
        flat(out).copy_(codes)
        column.append(place(out, layout))

    def passes(self, runner, xs=None):
        made = passes_over(runner, members_of(self.weights, self.stored))
        made.bind_state(self.exp_avgs, self.hessians, xs)
        made.bind_compact(self.corrections, self.exp_avg_scales, self.hessian_scales)
        return made

    def tensors(self):
        columns = {
            "weights": self.weights,
            "exp_avgs": self.exp_avgs,
            "hessians": self.hessians,
            "corrections": self.corrections,
            "exp_avg_scales": self.exp_avg_scales,
            "hessian_scales": self.hessian_scales,
        }
        return {name: column for name, column in columns.items() if column is not None}


def draw_of(number=DRAW):
    return torch.tensor([number], device=DEVICE)


def scales():
    """Of three groups, of which the second has no parameters and the last no ascent."""
    return torch.tensor([-0.3, 0.7, 0.0], device=DEVICE)


def products_for(passes, lists, mode):
    if mode == "ordinary":
        return None
    values, kinds = [], []
    for i, product in enumerate(lists.products):
        signed = mode == "signed" or not passes.signs_in_registers(i)
        if signed and mode != "signed":
            product = product * reference.rademacher(product, members_of(lists.weights).indices[i], SEED, DRAW)
        values.append(None if i % 7 == 6 else product)
        kinds.append(SIGNED_PRODUCT if signed else 0)
    return Products(values, kinds)


def stepped(
    runner, case, dtype, stored, mode, *, in_state=False, power=0.5, skip=False, draw=True, noise=False, odd=""
):
    """All lists after an ascent and the update, the weights at x + ε, and what the update found."""
    lists = Compact(case, dtype, stored)
    if odd:  # one column alone at addresses that allow no vectors
        setattr(lists, odd, [place(t, "misaligned") for t in getattr(lists, odd)])
    xs = [w.clone() for w in lists.weights] if in_state else None
    passes = lists.passes(runner, xs)
    restored = not in_state
    if restored:
        passes.bind_grads(lists.grads, overwrite=True)
        passes.perturb(scales(), adaptive=False, take_grads=False, seed=SEED, draw=draw_of())
    moved = [w.clone() for w in lists.weights]
    passes.bind_grads(lists.grads)
    sample = Sample.SIGNED if stored.signed else Sample.ABS
    rows = [s._replace(skip=float(skip and i == 0)) for i, s in enumerate(scalars_for(power, mode))]
    options = {"restore": restored, "state_draw": draw_of() if draw else None, "sample": sample}
    if noise:
        options |= {"noise_draw": draw_of(), "zero_is_seen": True}
    products = products_for(passes, lists, mode)
    found = passes.step(rows, cohorts_of(len(lists.weights)), products, SEED, DRAW, adaptive=in_state, **options)
    sums = None
    if mode != "ordinary":
        sums = passes.unseen_sums()
        if not skip:  # whoever skips an update has nothing to fill
            passes.fill_unseen(sums)
    if in_state:
        passes.momentum_ascent(scales(), adaptive=True, seed=SEED, draw=draw_of())
    tensors = lists.tensors()
    if in_state:
        tensors["xs"] = xs
    return tensors, moved, found, sums


@cache
def expected(*args, **options):
    return stepped("reference", *args, **options)


def assert_same(actual, wanted, dtype):
    (tensors, moved, found, sums), (right, right_moved, right_found, right_sums) = actual, wanted
    assert_same_bits(moved, right_moved, "x + ε")
    for name, column in tensors.items():
        assert_same_bits(column, right[name], name)
    if right_found.tallies is not None:
        assert torch.equal(found.tallies[:, 1:], right_found.tallies[:, 1:])
        assert torch.equal(sums[:, :2], right_sums[:, :2])
        n = max((t.numel() for t in right["weights"]), default=1)
        bound = trace_bound(n, 10.0 * n, torch.float32)
        assert torch.allclose(found.tallies[:, 0], right_found.tallies[:, 0], rtol=0.0, atol=bound)
        assert torch.allclose(sums[:, 2], right_sums[:, 2], rtol=0.0, atol=sum_bound(n, 100.0 * n))
    if right_found.square_sums is not None:
        assert torch.allclose(found.square_sums, right_found.square_sums, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("case", "dtype", "stored", "runner"), runs(), ids=name_of)
def test_ascent_update_and_fill_equal_the_reference(case, dtype, stored, runner, mode):
    assert_same(stepped(runner, case, dtype, stored, mode), expected(case, dtype, stored, mode), dtype)


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize(("case", "dtype", "stored", "runner"), runs(), ids=name_of)
def test_updates_of_x_in_state_and_the_ascent_from_it_equal_the_reference(case, dtype, stored, runner, mode):
    wanted = expected(case, dtype, stored, mode, in_state=True)
    assert_same(stepped(runner, case, dtype, stored, mode, in_state=True), wanted, dtype)


@pytest.mark.parametrize("power", [1.0])
@pytest.mark.parametrize("runner", RUNNERS)
def test_other_powers_equal_the_reference(runner, power):
    case = sizes_for(runner)
    for dtype, stored in SMALLEST.items():
        actual = stepped(runner, case, dtype, stored, "signed", power=power)
        assert_same(actual, expected(case, dtype, stored, "signed", power=power), dtype)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_general_power_leaves_the_same_state_and_weights_within_its_tolerance(runner):
    case, options = sizes_for(runner), {"power": 0.7}
    tensors, *_ = stepped(runner, case, torch.float32, Format(8), "signed", **options)
    wanted, *_ = expected(case, torch.float32, Format(8), "signed", **options)
    for name in tensors.keys() - {"weights"}:
        assert_same_bits(tensors[name], wanted[name], name)
    for weight, right in zip(tensors["weights"], wanted["weights"], strict=True):
        assert torch.allclose(weight, right, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("in_state", [False, True])
@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_skipped_update_restores_and_encodes_nothing(runner, mode, in_state):
    case = sizes_for(runner)
    for dtype, stored in SMALLEST.items():
        before, cohorts = Compact(case, dtype, stored).tensors(), cohorts_of(len(case.specs))
        actual = stepped(runner, case, dtype, stored, mode, in_state=in_state, skip=True)
        assert_same(actual, expected(case, dtype, stored, mode, in_state=in_state, skip=True), dtype)
        for name, column in before.items():
            skipped = [i for i, cohort in enumerate(cohorts) if cohort == 0 and not (in_state and name == "weights")]
            assert_same_bits([actual[0][name][i] for i in skipped], [column[i] for i in skipped], name)


@pytest.mark.parametrize("runner", RUNNERS)
def test_without_a_draw_state_is_rounded_to_nearest(runner):
    case = sizes_for(runner)
    for dtype, kinds in FORMATS.items():
        for stored in kinds[:2]:
            actual = stepped(runner, case, dtype, stored, "signed", draw=False)
            assert_same(actual, expected(case, dtype, stored, "signed", draw=False), dtype)


@pytest.mark.parametrize("in_state", [False, True])
@pytest.mark.parametrize("runner", RUNNERS)
def test_weights_without_a_correction_are_rounded_at_random_and_zeros_may_be_seen(runner, in_state):
    case = sizes_for(runner)
    for dtype, stored in ((torch.bfloat16, Format(8)), (torch.float16, Format(16))):
        actual = stepped(runner, case, dtype, stored, "unsigned", in_state=in_state, noise=True)
        assert_same(actual, expected(case, dtype, stored, "unsigned", in_state=in_state, noise=True), dtype)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_table_may_hold_parameters_of_several_dtypes(runner):
    sizes = (3, 129, 500, 64, 0, 9000, 9, 1)
    case = Case("mixed", tuple(Spec((n,), dtype=list(FORMATS)[i % 3]) for i, n in enumerate(sizes)))
    for mode in MODES[:2]:
        actual = stepped(runner, case, torch.float32, Format(8), mode, in_state=True)
        assert_same(actual, expected(case, torch.float32, Format(8), mode, in_state=True), torch.float32)


@pytest.mark.parametrize("odd", ["weights", "grads", "products", "exp_avgs", "hessians", "corrections"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_one_column_at_an_odd_address_changes_nothing(runner, odd):
    case = sizes_for(runner)
    for in_state in (False, True):
        actual = stepped(runner, case, torch.bfloat16, Format(8, 8), "unsigned", in_state=in_state, odd=odd)
        assert_same(actual, expected(case, torch.bfloat16, Format(8, 8), "unsigned", in_state=in_state), torch.bfloat16)


def test_there_is_something_to_fill():
    _, _, _, sums = expected(BY_NAME["chunks"], torch.bfloat16, Format(8, 8), "unsigned")
    assert (sums[1:6, 0] > 0).all()  # the first has a single element
    assert (sums[:6, 1] > 0).any()


def test_every_reduced_dtype_is_stored_with_and_without_corrections():
    assert set(REDUCED) < set(FORMATS)
    for dtype in REDUCED:
        assert {stored.correction_bits for stored in FORMATS[dtype]} == {0, 8, 16}
    assert len(scales()) == N_GROUPS
