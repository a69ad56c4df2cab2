"""Public implementations of the family, given the same gradients and probes. Where one differs from its paper, the
test says how.
"""

import pytest
import torch
from test_family import make_problem
from torch.optim import SGD
from training import assert_same_bits, closure_of, snapshot

from sassha_fast import SAM, AdaHessian, SophiaH, reference

peers = pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")

# Both round in float64, in another order of operations.
RTOL = 1e-9
# The gradient norm of pytorch_optimizer's SAM is a float32, and our scale of the ascent is rounded to float32.
SAM_RTOL = 1e-6


def curvature_run(ours, theirs, steps, k):
    """Both optimizers on networks of their own, with one set of probes; ours refreshes every k steps."""
    mine, other = make_problem(), make_problem()
    opt, peer = ours(mine.net.parameters()), theirs(other.net.parameters())
    for t in range(steps):
        mine.loss().backward(create_graph=opt.hessian_due)
        opt.step()
        opt.zero_grad()
        params = list(other.net.parameters())
        other.loss().backward(create_graph=True)
        hessian = None
        if t % k == 0:
            signs = [reference.rademacher(p, i, 0, t) for i, p in enumerate(params)]
            products = torch.autograd.grad([p.grad for p in params], params, signs)
            hessian = [z * hz for z, hz in zip(signs, products, strict=True)]
        for p in params:
            p.grad = p.grad.detach()
        peer.step(hessian=hessian)
        peer.zero_grad()
    return list(mine.net.parameters()), list(other.net.parameters())


def assert_close(a, b, rtol=RTOL):
    for p, q in zip(a, b, strict=True):
        assert (p - q).norm() <= rtol * q.norm()


def test_adahessian_without_spatial_averaging_is_theirs():
    """Theirs never averages over filters, which the paper does; and its step has the bias correction of m, as ours."""
    a, b = curvature_run(
        lambda params: AdaHessian(params, lr=0.05, weight_decay=0.01, spatial_averaging=False),
        lambda params: peers.AdaHessian(params, lr=0.05, weight_decay=0.01, eps=1e-4, foreach=False),
        steps=20,
        k=1,
    )
    assert_close(a, b)


def test_adahessian_of_theirs_lets_the_correction_run_on_between_refreshes():
    """With lazy updates it divides an old average by 1 − β2^t of today, so that curvature fades until the next one."""
    a, b = curvature_run(
        lambda params: AdaHessian(params, lr=0.05, lazy_hessian=5, spatial_averaging=False),
        lambda params: peers.AdaHessian(params, lr=0.05, eps=1e-4, update_period=5, foreach=False),
        steps=4,
        k=5,
    )
    with pytest.raises(AssertionError):
        assert_close(a, b, rtol=1e-3)


def test_sophia_is_theirs_with_the_threshold_taken_out_of_the_clip():
    """Theirs is x − η clip(m / max(h, ε), p), so η = ηp, γ = p and ε = εp here; the paper has max(γh, ε) and 1."""
    p = 0.02
    a, b = curvature_run(
        lambda params: SophiaH(
            params, lr=0.06 * p, betas=(0.96, 0.99), clip_threshold=p, eps=1e-3 * p, weight_decay=0.0
        ),
        lambda params: peers.SophiaH(params, lr=0.06, betas=(0.96, 0.99), p=p, eps=1e-3, foreach=False),
        steps=20,
        k=10,
    )
    assert_close(a, b)


@pytest.mark.parametrize("adaptive", [False, True])
def test_sam_is_theirs(adaptive):
    mine, other = make_problem(), make_problem()
    opt = SAM(mine.net.parameters(), SGD, rho=0.1, adaptive=adaptive, lr=0.1, momentum=0.9)
    peer = peers.SAM(other.net.parameters(), SGD, rho=0.1, adaptive=adaptive, lr=0.1, momentum=0.9)
    for _ in range(10):
        opt.step(closure_of(opt, mine.loss))
        closure = closure_of(peer, other.loss)
        closure()
        peer.step(closure)
    assert_close(list(mine.net.parameters()), list(other.net.parameters()), SAM_RTOL)


class _Radius:
    """What stands in for its scheduler of ρ."""

    def step(self):
        return 0.1


def test_gsam_is_theirs_but_for_weights_that_it_subtracts_back():
    """The gradients agree. Theirs restores by subtraction, which loses bits that ours keeps."""
    mine, other = make_problem(torch.float32), make_problem(torch.float32)
    opt = SAM(mine.net.parameters(), SGD, rho=0.1, alpha=0.3, lr=0.1)
    peer = peers.GSAM(
        other.net.parameters(), SGD(other.net.parameters(), lr=0.1), other.net, _Radius(), alpha=0.3, foreach=False
    )
    before = snapshot(mine.net)
    mine.loss().backward()
    opt.perturb_weights()
    mine.loss().backward()
    opt.unperturb()
    other.loss().backward()
    peer.perturb_weights(0.1)
    other.net.zero_grad()
    other.loss().backward()
    peer.gradient_decompose(0.3)
    peer.un_perturb()
    for p, q in zip(mine.net.parameters(), other.net.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm()
    assert_same_bits(snapshot(mine.net), before)
    assert any((p != x).any() for p, x in zip(other.net.parameters(), before, strict=True))
