"""What a ``hessian_closure`` of fewer rows does not show, though the batch of the gradients does."""

import pytest
import torch
from test_unseen import FIRST, METHODS, SECOND, Words
from torch import nn
from torch.nn import functional as F
from training import assert_same_bits, closure_of, snapshot

from sassha_fast import SASSHA, AdaHessian, SophiaH
from sassha_fast._core.keys import BIAS2, HESSIAN
from sassha_fast.reference import is_unknown

BACKENDS = ("reference", "foreach", "cpu")
WHOLE = (0, 1, 2, 3, 4, 5)


def step(net, opt, words, part):
    closure, products = (closure_of(opt, lambda w=w: net.loss(*w)) for w in (words, part))
    return opt.step(closure, hessian_closure=products)


def started(method, *batches, **options):
    """A network after steps, each on words and with products from other words, its optimizer, and D after each."""
    net = Words()
    opt = method(net.parameters(), **{"lr": 0.05, "lazy_hessian": 1, **options})
    opt.attach(net)
    seen = []
    for words, part in batches:
        step(net, opt, words, part)
        seen.append(opt.state[net.table.weight][HESSIAN].clone())
    return net, opt, seen


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_rows_that_the_part_lacks_begin_with_the_mean_curvature_of_its_own(method, backend):
    _, opt, (d,) = started(method, (WHOLE, FIRST[:3]), backend=backend)
    assert not is_unknown(d).any()
    mean = d[:3].double().mean().float()
    torch.testing.assert_close(d[3:], mean.expand_as(d[3:]), rtol=1e-5, atol=0.0)
    assert opt.stats.partial_refreshes == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_rows_that_a_later_part_lacks_keep_their_share_in_the_curvature(method, backend):
    _, opt, (before, after) = started(method, (WHOLE, WHOLE), (WHOLE, (2, 3, 4)), backend=backend)
    beta2 = opt.defaults["betas"][1]
    grown = (1 - beta2**2) / (1 - beta2)
    torch.testing.assert_close(after[:2], before[:2] * grown, rtol=1e-5, atol=0.0)
    assert not torch.allclose(after[2:5], before[2:5] * grown)


@pytest.mark.parametrize("options", [{}, {"state_bits": 8, "full_precision_below": 0}, {"capturable": True}])
@pytest.mark.parametrize("method", METHODS)
def test_all_backends_have_the_same_bits(method, options):
    batches = [(WHOLE, FIRST[:3]), (SECOND, (2, 3, 4)), (WHOLE, WHOLE), ((6, 7, 0), (6, 7, 8))]
    nets = [started(method, *batches, backend=backend, **options)[0] for backend in BACKENDS]
    for other in nets[1:]:
        assert_same_bits(list(other.parameters()), list(nets[0].parameters()))


@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
def test_a_row_that_parts_lack_moves_no_further_than_the_others(hvp):
    net, opt, _ = started(SASSHA, *[(WHOLE, (0, 1, 2))] * 2, hvp=hvp)
    before = net.table.weight.detach().clone()
    step(net, opt, WHOLE, (0, 1, 2))
    moved = (net.table.weight - before).abs()
    assert moved[:3].max() > 0
    assert moved[3:6].max() < 10 * moved[:3].max()


def test_zeros_of_a_part_are_curvatures_if_asked_for():
    _, _, (d,) = started(SASSHA, (WHOLE, (0, 1, 2)), unseen="zero")
    assert not d[3:].any()
    assert d[:3].all()


def test_a_part_in_which_the_loss_is_linear_keeps_its_meaning():
    p = nn.Parameter(torch.ones(3))
    opt = SASSHA([p], lr=0.5, eps=0.25)
    loss = lambda: (torch.tensor([1.0, 2.0, 0.0]) * p).sum() + p[2] ** 2  # noqa: E731
    opt.step(closure_of(opt, loss), hessian_closure=closure_of(opt, loss))
    assert opt.state[p][HESSIAN][:2].tolist() == [0.0, 0.0]
    torch.testing.assert_close(p.detach()[:2], 1.0 - 0.5 * torch.tensor([1.0, 2.0]) / 0.25)


@pytest.mark.parametrize("method", [SASSHA, AdaHessian, SophiaH])
def test_products_of_no_rows_are_no_refresh(method):
    """An empty batch has products of 0 everywhere; the first refresh divided by eps for it."""
    net = nn.Linear(4, 2)
    opt = method(net.parameters(), lr=0.05)
    x = torch.randn(6, 4)
    loss = lambda rows: (net(rows) ** 2).sum()  # noqa: E731
    before = snapshot(net)
    for _ in range(2):
        opt.step(closure_of(opt, lambda: loss(x)), hessian_closure=closure_of(opt, lambda: loss(x[:0])))
    assert_same_bits(snapshot(net), before)
    assert opt.stats.skipped_refreshes == 2
    assert opt.hessian_due
    opt.step(closure_of(opt, lambda: loss(x)), hessian_closure=closure_of(opt, lambda: loss(x[:1])))
    assert opt.stats.refreshes == 1
    assert not torch.equal(snapshot(net)[0], before[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backend": "foreach"},
        {"backend": "reference"},
        {"hvp": "finite_difference"},
        {"hvp": "central_difference", "n_samples": 2},
        {"capturable": True},
        {"capturable": True, "hvp": "finite_difference"},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", METHODS)
def test_later_products_of_rows_without_a_label_are_no_refresh_either(method, options):
    net, opt, (before,) = started(method, (WHOLE, FIRST[:3]), **{**options, "lazy_hessian": 3})
    kept, trace = torch.as_tensor(opt.state[net.table.weight][BIAS2]).clone(), opt.stats.trace

    def unlabelled():
        out = net.head(net.table(torch.tensor(WHOLE).view(-1, 3)))
        return F.cross_entropy(out, torch.full((len(out),), -100), reduction="sum")

    for _ in range(2):
        step(net, opt, WHOLE, WHOLE)
    for failed in (1, 2):
        assert opt.hessian_due
        weights = snapshot(net)
        opt.step(closure_of(opt, lambda: net.loss(*WHOLE)), hessian_closure=closure_of(opt, unlabelled))
        assert not torch.equal(net.table.weight, weights[0])  # a step along the curvature that is known
        assert (opt.stats.refreshes, opt.stats.skipped_refreshes, opt.stats.partial_refreshes) == (1, failed, 0)
        assert_same_bits([opt.state[net.table.weight][HESSIAN]], [before])
        assert torch.equal(torch.as_tensor(opt.state[net.table.weight][BIAS2]), kept)
        assert opt.stats.trace == trace
    step(net, opt, WHOLE, (2, 3, 4))
    assert (opt.stats.refreshes, opt.stats.skipped_refreshes) == (2, 2)
    assert not torch.equal(opt.state[net.table.weight][HESSIAN], before)
    assert not opt.hessian_due


@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_hessian_closure_without_a_backward_pass_of_this_model_is_refused(method, accumulated, hvp):
    net, other = nn.Linear(4, 2), nn.Linear(4, 2)
    opt = method(net.parameters(), lr=0.05, hvp=hvp)
    x = torch.randn(6, 4)
    before = snapshot(net)

    def forgets():
        return (net(x) ** 2).sum()

    def trains_another():
        loss = (other(x) ** 2).sum()
        loss.backward()
        return loss

    for wrong in (forgets, trains_another):
        with pytest.raises(RuntimeError, match=r"step: no parameter has a gradient after hessian_closure; call loss\."):
            opt.step(closure_of(opt, forgets), hessian_closure=[wrong] if accumulated else wrong)
        assert_same_bits(snapshot(net), before)
