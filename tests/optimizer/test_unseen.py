"""What a batch does not show: rows of an embedding whose tokens are not in it have no gradient and no product."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import assert_same_bits, closure_of, same_bits

from sassha_fast import GSASSHA, MSASSHA, SASSHA, AdaHessian, SophiaH
from sassha_fast._core.keys import HESSIAN
from sassha_fast.reference import is_unknown

BACKENDS = ("reference", "foreach", "cpu")
METHODS = (SASSHA, GSASSHA, MSASSHA, AdaHessian, SophiaH)


class Words(nn.Module):
    """Three words of twelve, and what they mean together."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(12, 5)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(15, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(self, *words):
        tokens = torch.tensor(words).view(-1, 3)
        return F.cross_entropy(self.head(self.table(tokens)), torch.arange(len(tokens)) % 3)


def started(method, *batches, **options):
    """A network after steps on these words, its optimizer, and D of the embedding after each step."""
    net = Words()
    opt = method(net.parameters(), **{"lr": 0.05, "lazy_hessian": 1, **options})
    opt.attach(net)
    seen = []
    for words in batches:
        opt.step(closure_of(opt, lambda words=words: net.loss(*words)))
        seen.append(opt.state[net.table.weight][HESSIAN].clone())
    return net, opt, seen


FIRST, SECOND = (0, 1, 2, 1, 2, 3), (2, 3, 4, 3, 4, 5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_rows_that_were_never_seen_have_the_mean_curvature_of_the_others(method, backend):
    _, opt, (d,) = started(method, FIRST, backend=backend)
    assert not is_unknown(d).any()
    assert_same_bits([d[4:]], [torch.full_like(d[4:], d[:4].double().mean().item())])
    assert opt.stats.partial_refreshes == 0  # nothing was lost


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_rows_that_a_refresh_does_not_see_keep_their_share_in_the_curvature(method, backend):
    # D of an element that always has the same product grows with the weight of all samples, 1 − β2^r.
    _, opt, (before, after) = started(method, FIRST, SECOND, backend=backend)
    beta2 = opt.defaults["betas"][1]
    grown = (1 - beta2**2) / (1 - beta2)
    torch.testing.assert_close(after[:2], before[:2] * grown)
    torch.testing.assert_close(after[6:], before[6:] * grown)
    assert not torch.allclose(after[2:4], before[2:4] * grown)


@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
@pytest.mark.parametrize("method", METHODS)
def test_a_word_that_comes_late_moves_no_further_than_the_others(method, hvp):
    net, opt, _ = started(method, FIRST, SECOND, FIRST, hvp=hvp)
    opt.lazy_hessian = 100  # from now on no step refreshes
    if method is MSASSHA:
        opt.eval()
    before = net.table.weight.detach().clone()
    if method is MSASSHA:
        opt.train()
    for _ in range(3):
        opt.step(closure_of(opt, lambda: net.loss(1, 2, 9, 2, 9, 10)))
    if method is MSASSHA:
        opt.eval()
    moved = (net.table.weight - before).abs()
    assert 0 < moved[9:11].max() < 3 * moved[1:3].max()


def test_a_word_that_comes_late_is_thrown_far_where_zeros_are_curvatures():
    net, opt, _ = started(SASSHA, FIRST, SECOND, FIRST, unseen="zero")
    opt.lazy_hessian = 100
    before = net.table.weight.detach().clone()
    opt.step(closure_of(opt, lambda: net.loss(1, 2, 9, 2, 9, 10)))
    moved = (net.table.weight - before).abs()
    assert moved[9:11].max() > 10 * moved[1:3].max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_are_curvatures_if_asked_for(backend):
    _, _, (before, after) = started(SASSHA, FIRST, SECOND, backend=backend, unseen="zero")
    assert same_bits(before[4:], torch.zeros_like(before[4:]))
    assert_same_bits([after[:2]], [torch.tensor(0.999) * before[:2]])


def test_gradients_without_curvature_keep_their_meaning_beside_elements_without_both():
    p, q = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    opt = SASSHA([p, q], lr=0.5, eps=0.25)
    slope = torch.tensor([1.0, 2.0, 0.0, 0.0])
    opt.step(closure_of(opt, lambda: ((slope + 0.0 * q) * p).sum() + (q**2).sum()))
    d = opt.state[p][HESSIAN]
    assert same_bits(d, torch.zeros(4))  # the mean of what is known is 0, too
    torch.testing.assert_close(p.detach(), 1.0 - 0.5 * slope / 0.25)


def test_a_parameter_that_no_batch_shows_waits_and_asks_for_no_refresh_of_its_own():
    net = Words()
    idle = nn.Parameter(torch.ones(3))
    opt = SASSHA([*net.parameters(), idle], lr=0.05, weight_decay=0.1, lazy_hessian=5)
    loss = lambda: net.loss(*FIRST) + (0.0 * idle).sum()  # noqa: E731
    for _ in range(3):
        opt.step(closure_of(opt, loss))
    assert same_bits(idle, torch.ones(3))
    assert opt.stats.refreshes == 1
    for _ in range(3):  # the next refresh sees it
        opt.step(closure_of(opt, lambda: net.loss(*FIRST) + (idle**2).sum()))
    assert opt.stats.refreshes == 2
    assert (idle < 1).all()


def test_a_resumed_run_knows_what_was_seen():
    net, opt, _ = started(SASSHA, FIRST, SECOND)
    other = Words()
    other.load_state_dict(net.state_dict())
    resumed = SASSHA(other.parameters(), lr=0.05, lazy_hessian=1)
    resumed.load_state_dict(opt.state_dict())
    for words in (FIRST, (7, 8, 9)):
        opt.step(closure_of(opt, lambda words=words: net.loss(*words)))
        resumed.step(closure_of(resumed, lambda words=words: other.loss(*words)))
    assert_same_bits(list(other.parameters()), list(net.parameters()))


def test_the_choice_is_one_of_two():
    with pytest.raises(ValueError, match=r"SASSHA: unseen is 'ignore', expected one of \['keep', 'zero'\]"):
        SASSHA(Words().parameters(), unseen="ignore")
