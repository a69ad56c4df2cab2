"""Gradients without a graph beside others that have one: never a curvature of 0."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import assert_same_bits, closure_of, same_bits, snapshot, state_of

from sassha_fast import GSASSHA, MSASSHA, SASSHA, AdaHessian, SophiaH, check_model

METHODS = (SASSHA, GSASSHA, MSASSHA, AdaHessian, SophiaH)


class FineTuned(nn.Module):
    """A frozen embedding, a checkpointed block and a head, as in fine-tuning with enable_input_require_grads."""

    def __init__(self, *, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.block, self.head = (
            nn.Embedding(9, 6),
            nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
            nn.Linear(6, 2),
        )
        self.table.requires_grad_(False)
        self.table.register_forward_hook(lambda module, args, out: out.requires_grad_())
        self.reentrant = reentrant
        self.tokens = torch.arange(8) % 9

    def forward(self, tokens):
        return self.head(checkpoint(self.block, self.table(tokens), use_reentrant=self.reentrant))

    def loss(self):
        return self(self.tokens).square().sum()

    def trained(self):
        return [(name, p) for name, p in self.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("method", METHODS)
def test_reentrant_checkpoints_are_refused_by_name_and_nothing_moves(method):
    net = FineTuned(reentrant=True)
    opt = method(net.trained(), lr=0.01)
    before, state = snapshot(net), state_of(opt)
    with pytest.raises(
        RuntimeError, match=r"the gradient of 'block.0.weight' and 1 more has no graph.*use_reentrant=Fa"
    ):
        opt.step(closure_of(opt, net.loss))
    assert_same_bits(snapshot(net), before)
    assert state_of(opt) == state


def test_the_three_calls_refuse_them_and_restore():
    net = FineTuned(reentrant=True)
    opt = SASSHA(net.trained(), lr=0.01, rho=0.1)
    before = snapshot(net)
    net.loss().backward()
    opt.perturb_weights()
    net.loss().backward(create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"SASSHA.unperturb: the gradient of 'block.0.weight' and 1 more has no graph"
    ):
        opt.unperturb()
    assert_same_bits(snapshot(net), before)


def test_m_sassha_in_a_hand_written_loop_refuses_them():
    net = FineTuned(reentrant=True)
    opt = MSASSHA(net.trained(), lr=0.01)
    net.loss().backward(create_graph=True)
    with pytest.raises(RuntimeError, match=r"MSASSHA.step: the gradient of 'block.0.weight' and 1 more has no graph"):
        opt.step()


@pytest.mark.parametrize("remedy", [{"reentrant": False}, {"reentrant": True, "hvp": "finite_difference"}], ids=str)
def test_both_remedies_work(remedy):
    options = dict(remedy)
    net = FineTuned(reentrant=options.pop("reentrant"))
    opt = SASSHA(net.trained(), lr=0.01, rho=0.05, **options)
    losses = [opt.step(closure_of(opt, net.loss)).item() for _ in range(6)]
    assert losses[-1] < losses[0]
    assert max(losses) < 2 * losses[0]


def test_a_second_loss_without_a_graph_is_refused():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    opt = SASSHA([("a", a), ("b", b)], lr=0.1)
    (a**2).sum().backward()
    (b**2).sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="the gradient of 'a' has no graph"):
        opt.step()
    assert same_bits(a, torch.ones(3))


def test_a_gradient_of_zero_needs_no_graph():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    opt = SASSHA([a, b], lr=0.1)
    opt.step(closure_of(opt, lambda: (0.0 * a).sum() + (b**2).sum()))
    assert same_bits(a, torch.ones(3))
    assert (b < 1).all()


def test_check_model_sees_reentrant_checkpoints_and_sparse_embeddings():
    net = FineTuned(reentrant=True)
    report = check_model(net, net.tokens)
    assert list(report.stubborn) == ["FineTuned"]
    assert "use_reentrant=True" in str(report)
    assert not report.exact_works
    assert check_model(FineTuned(reentrant=False), net.tokens).exact_works
    sparse = check_model(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)), torch.tensor([1, 2]))
    assert sparse.sparse == ["0"]
    assert not sparse.exact_works
    assert "0: sparse gradients; construct it with sparse=False" in str(sparse)
