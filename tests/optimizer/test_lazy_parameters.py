"""Parameters that get their shape from the first forward pass, as optimizers of torch take them."""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from training import assert_same_bits, assert_same_state, closure_of, snapshot, state_of

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH

METHODS = {
    **{cls.__name__: cls for cls in (SASSHA, GSASSHA, MSASSHA, AdaHessian, SophiaH)},
    "differences": lambda p, **given: SASSHA(p, hvp="finite_difference", **given),
    "SAM": lambda p, **given: SAM(p, SGD, **given),
}
X = torch.linspace(-1.0, 1.0, 32).view(8, 4)


def lazy_net():
    return nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(2))


def steps(net, opt):
    """Three, from weights that do not depend on who was first, the optimizer or the shapes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    for _ in range(3):
        opt.step(closure_of(opt, lambda: net(X).square().mean()))
    return snapshot(net), state_of(opt)


@pytest.mark.parametrize("backend", ["reference", "foreach", "cpu"])
@pytest.mark.parametrize("method", METHODS)
def test_an_optimizer_may_be_built_before_the_first_forward_pass(method, backend):
    net, other = lazy_net(), lazy_net()
    opt = METHODS[method](net.parameters(), lr=0.01, backend=backend)
    net(X), other(X)
    found = steps(net, opt)
    expected = steps(other, METHODS[method](other.parameters(), lr=0.01, backend=backend))
    assert_same_bits(found[0], expected[0])
    assert_same_state(found[1], expected[1])


@pytest.mark.parametrize("method", METHODS)
def test_without_a_forward_pass_there_is_no_gradient_to_step_from(method):
    opt = METHODS[method](lazy_net().parameters(), lr=0.01)
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        opt.step(lambda: 0.0)
    opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("method", METHODS)
def test_what_stays_lazy_is_left_alone(method):
    net, rest = nn.Linear(4, 2), nn.LazyLinear(3)
    opt = METHODS[method]([*net.parameters(), *rest.parameters()], lr=0.01)
    before = snapshot(net)
    opt.step(closure_of(opt, lambda: net(X).square().mean()))
    assert all(not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    assert not any(opt.state.get(p) for p in rest.parameters())
