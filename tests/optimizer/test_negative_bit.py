"""Tensors whose memory holds the opposite of their values, which torch notes in a bit, as of an imaginary part."""

import pytest
import torch
from torch import nn
from training import assert_same_bits

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian

BACKENDS = ("reference", "foreach", "cpu")
SHAPE = (4, 4)


def values():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))


def gappy():
    return torch.complex(torch.zeros(SHAPE), -values()).conj().imag


KINDS = {
    "gappy": gappy,
    "contiguous": lambda: torch._neg_view(-values()),
    "transposed": lambda: torch._neg_view(-values().t().contiguous()).t(),
    "one_element": lambda: torch._neg_view(-values()[:1, :1].contiguous()),
}


def plain(kind):
    """The same values in the same order of memory, without the bit."""
    given = KINDS[kind]()
    return torch.empty_strided(given.shape, given.stride()).copy_(values()[: given.shape[0], : given.shape[1]])


def started(method, backend, shape, **options):
    p = nn.Parameter(torch.linspace(-1.0, 1.0, shape.numel()).view(shape))
    opt = method([p], backend=backend, **options)

    def closure():
        opt.zero_grad()
        loss = (p**4).sum()
        loss.backward()
        return loss

    opt.step(closure)
    opt.zero_grad()
    return p, opt


def climbs(p, opt, gradient):
    p.grad = gradient
    opt.perturb_weights()
    away = p.detach().clone()
    (p**4).sum().backward()
    opt.unperturb()
    opt.step()
    return away


def descends(p, opt, gradient):
    (p**4).sum().backward()
    opt.perturb_weights()
    away = p.detach().clone()
    p.grad = gradient
    opt.unperturb()
    opt.step()
    return away


def steps(p, opt, gradient):
    p.grad = gradient
    opt.step()
    return p.detach().clone()


SASSHA_OPTIONS = {"lr": 0.1, "rho": 0.3, "lazy_hessian": 100}
CASES = [
    (climbs, SASSHA, SASSHA_OPTIONS),
    (descends, SASSHA, SASSHA_OPTIONS),
    (steps, SASSHA, SASSHA_OPTIONS | {"rho": 0.0}),
    (climbs, GSASSHA, SASSHA_OPTIONS),
    (descends, GSASSHA, SASSHA_OPTIONS),
    (steps, MSASSHA, SASSHA_OPTIONS),
    (steps, AdaHessian, {"lr": 0.1, "lazy_hessian": 100}),
    (climbs, SAM, {"base_optimizer": torch.optim.SGD, "lr": 0.1, "rho": 0.3, "alpha": 0.1}),
    (descends, SAM, {"base_optimizer": torch.optim.SGD, "lr": 0.1, "rho": 0.3, "max_grad_norm": 0.1}),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("way", "method", "options"), CASES)
def test_a_gradient_with_the_bit_is_taken_for_its_values(way, method, options, kind, backend):
    found = []
    for make in (KINDS[kind], lambda: plain(kind)):
        gradient = make()
        p, opt = started(method, backend, gradient.shape, **options)
        away = way(p, opt, gradient)
        found.append([away, p, *(v for v in opt.state[p].values() if isinstance(v, torch.Tensor))])
    assert_same_bits(*found)


@pytest.mark.parametrize("hvp", ["finite_difference", "central_difference"])
@pytest.mark.parametrize("method", [SASSHA, MSASSHA])
def test_gradients_at_probes_may_have_the_bit(method, hvp):
    found = []
    for turn in (lambda g: torch._neg_view(-g), torch.clone):
        p, opt = started(method, "cpu", torch.Size(SHAPE), lr=0.1, rho=0.3, lazy_hessian=1, hvp=hvp)

        def backward(p=p, turn=turn):
            (gradient,) = torch.autograd.grad((p**4).sum(), p)
            p.grad = turn(gradient)

        backward()
        if method is SASSHA:
            opt.perturb_weights()
            backward()
        for _ in range(opt.probes_due):
            opt.probe_weights()
            backward()
        opt.take_products() if method is MSASSHA else opt.unperturb()
        opt.step()
        found.append([p, opt.state[p]["exp_hessian_diag"]])
    assert_same_bits(*found)


@pytest.mark.parametrize("shape", [(1,), SHAPE])
def test_a_refresh_differentiates_a_gradient_with_the_bit(shape):
    found = []
    for turn in (lambda g: torch._neg_view(-g), torch.clone):
        p, opt = started(SASSHA, "cpu", torch.Size(shape), lr=0.1, lazy_hessian=1)
        (gradient,) = torch.autograd.grad((p**4).sum(), p, create_graph=True)
        p.grad = turn(gradient)
        opt.step()
        found.append([p, opt.state[p]["exp_hessian_diag"]])
    assert_same_bits(*found)


class _Opposite(torch.autograd.Function):
    """x, whose second derivatives come back with the bit."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return torch._neg_view(-g)


def test_products_may_have_the_bit():
    found = []
    for function in (_Opposite.apply, torch.clone):
        p, opt = started(SASSHA, "cpu", torch.Size(SHAPE), lr=0.1, lazy_hessian=1)
        (function(p) ** 4).sum().backward(create_graph=True)
        opt.step()
        found.append([p, opt.state[p]["exp_hessian_diag"]])
    assert_same_bits(*found)


def test_a_parameter_with_the_bit_is_refused_by_name():
    p = nn.Parameter(torch._neg_view(values()))
    with pytest.raises(ValueError, match="SASSHA: 'w' has torch's negative bit"):
        SASSHA([("w", p)], lr=0.1)
    p, opt = started(SASSHA, "cpu", torch.Size(SHAPE), lr=0.1, lazy_hessian=100)
    p.data = torch._neg_view(values())
    p.grad = values()
    before = p.detach().clone()
    with pytest.raises(ValueError, match="parameter 0 of group 0 has torch's negative bit"):
        opt.step()
    assert torch.equal(p, before)
