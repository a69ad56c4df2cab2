"""After a refresh: sums over what it did not see, and the mean curvature that this gets."""

from functools import cache

import pytest
import torch
from cases import (
    BY_NAME,
    DTYPES,
    PASSES,
    assert_same_bits,
    build,
    members_of,
    pair_id,
    passes_over,
    runs_of,
)
from tolerances import sum_bound

from sassha_fast import reference
from sassha_fast._passes.layout import UNSEEN_WORDS
from sassha_fast._passes.reference import Products, Stepped

pytestmark = pytest.mark.usefixtures("native_ops")
RUNS = runs_of()


def sparse(case, dtype):
    """Lists of which every third element was not seen, every fifth curvature is unknown, and some tensors are whole."""
    lists = build(case, dtype)
    for i, (g, p, d) in enumerate(zip(lists.grads, lists.products, lists.hessians, strict=True)):
        if i % 4 == 3:
            continue
        places = torch.arange(g.numel()).reshape(g.shape)
        for tensor, value, marked in ((g, 0.0, places % 3 == 0), (p, 0.0, places % 3 == 0), (d, -0.0, places % 5 == 0)):
            tensor.copy_(torch.where(marked, torch.full_like(tensor, value), tensor))
        if i % 4 == 2 and d.numel():
            d.fill_(-0.0)  # nothing to take a mean of
    return lists


def products_of(lists):
    """None of every sixth tensor."""
    return Products.signed([None if i % 6 == 5 else p for i, p in enumerate(lists.products)])


def seen_by(lists, products):
    """What a refresh would have tallied."""
    rows = []
    for g, p in zip(lists.grads, products.values, strict=True):
        seen = 0 if p is None else int((~reference.is_unseen(p, g)).sum())
        rows.append([0.0, 0.0, float(seen)])
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 3)


def after_refresh(runner, lists):
    """Passes as an update leaves them."""
    passes = passes_over(runner, members_of(lists.weights))
    passes.bind_state(lists.exp_avgs, lists.hessians)
    passes.bind_grads(lists.grads)
    products = products_of(lists)
    tallies = seen_by(lists, products)
    for part, at in getattr(passes, "parts", [(passes, range(len(lists.weights)))]):
        part.found = Stepped(tallies[list(at)].contiguous())
        part.products = products.take(at)
        if hasattr(part, "table"):
            part._bind_products(part.products)
    return passes


@cache
def expected_case(case, dtype):
    lists = sparse(case, dtype)
    sums = torch.zeros(len(lists.weights), UNSEEN_WORDS, dtype=torch.float64)
    rows = zip(lists.hessians, products_of(lists).values, lists.grads, strict=True)
    for i, (d, p, g) in enumerate(rows):
        if p is not None and reference.is_unseen(p, g).any():
            sums[i] = reference.unseen_sums(d, p, g)
            d.copy_(reference.filled(d, p, g, sums[i]))
    return sums, lists.hessians


@pytest.mark.parametrize(("case", "dtype", "runner"), RUNS, ids=pair_id)
def test_sums_equal_the_reference_up_to_the_order_of_summation(case, dtype, runner):
    found = after_refresh(runner, sparse(case, dtype)).unseen_sums()
    expected, hessians = expected_case(case, dtype)
    assert found.dtype == torch.float64
    assert torch.equal(found[:, :2], expected[:, :2])
    for total, wanted, d in zip(found[:, 2], expected[:, 2], hessians, strict=True):
        assert abs(total - wanted) <= sum_bound(d.numel(), float(d.abs().double().sum()))


@pytest.mark.parametrize(("case", "dtype", "runner"), RUNS, ids=pair_id)
def test_elements_that_were_never_seen_get_the_mean_and_no_others(case, dtype, runner):
    lists = sparse(case, dtype)
    passes = after_refresh(runner, lists)
    sums, hessians = expected_case(case, dtype)
    passes.fill_unseen(sums)
    assert_same_bits(lists.hessians, hessians)


@pytest.mark.parametrize("runner", PASSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_a_lost_product_leaves_its_curvature_unknown(dtype, runner):
    lists = build(BY_NAME["empties"], dtype)
    for g, p, d in zip(lists.grads, lists.products, lists.hessians, strict=True):
        if g.numel() > 100:
            d.fill_(1.0)
            for at, product, grad in ((1, torch.nan, 1.0), (2, 0.0, 1.0), (3, 0.0, 0.0), (4, torch.nan, 0.0)):
                p[at], g[at], d[at] = product, grad, -0.0
    passes = after_refresh(runner, lists)
    passes.fill_unseen(passes.unseen_sums())
    for i, d in enumerate(lists.hessians):
        if d.numel() > 100 and i % 6 != 5:
            assert reference.is_unknown(d[1:5]).tolist() == [True, True, False, True]
            assert d[3] == 1.0


def test_the_mean_is_a_float32_whatever_the_dtype():
    d = torch.tensor([1.0, 2.0, 2.0, -0.0], dtype=torch.float64)
    p, g = (torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64) for _ in range(2))
    filled = reference.filled(d, p, g, reference.unseen_sums(d, p, g))
    assert filled.tolist() == [1.0, 2.0, 2.0, torch.tensor(5 / 3).item()]
