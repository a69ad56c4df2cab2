"""What an optimizer lets go of: parameters and gradients that nobody else holds are freed."""

import gc
import weakref

import pytest
import torch
from torch import nn
from training import assert_same_bits

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian

BACKENDS = ("reference", "foreach", "cpu")


def start(method=SASSHA, **options):
    params = [nn.Parameter(torch.linspace(-1.0, 1.0, 4 + i)) for i in range(4)]
    return params, method(params, lr=0.05, rho=0.1, lazy_hessian=3, **options)


def closure_of(opt, params, replace=lambda grad: grad):
    def closure():
        opt.zero_grad()
        loss = sum((p**3).sum() + p.square().sum() for p in params)
        loss.backward()
        for p in params:
            p.grad = replace(p.grad)
        return loss

    return closure


def alive(refs):
    gc.collect()
    return [ref() is not None for ref in refs]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("moved", [0, 1, 3])
@pytest.mark.parametrize("method", [SASSHA, MSASSHA])
def test_parameters_are_freed_after_some_were_given_other_memory(method, moved, backend):
    params, opt = start(method, backend=backend)
    refs = list(map(weakref.ref, params))
    opt.step(closure_of(opt, params))
    for _ in range(2):
        params[moved].data = params[moved].data.clone()
        opt.step(closure_of(opt, params))
    opt.zero_grad()
    del params, opt
    assert alive(refs) == [False] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_with_the_negative_bit_are_freed(backend):
    params, opt = start(backend=backend)
    refs = []

    def negative(grad):
        grad = torch._neg_view(-grad)
        refs.append(weakref.ref(grad))
        return grad

    for first in (True, False, False):
        opt.step(closure_of(opt, params, (lambda grad: grad) if first else negative))
    opt.zero_grad()
    assert alive(refs) == [False] * len(refs)
    assert refs


@pytest.mark.parametrize("overflow", [True, False])
@pytest.mark.parametrize("method", [SASSHA, MSASSHA, AdaHessian, SAM])
def test_gradients_are_freed_by_zero_grad_after_a_step_that_was_skipped_too(method, overflow):
    p = nn.Parameter(torch.ones(3))
    options = {"base_optimizer": torch.optim.SGD} if method is SAM else {}
    opt = method([p], lr=0.1, skip_nonfinite=True, **options)
    opt.step(closure_of(opt, [p], lambda grad: grad * (torch.nan if overflow else 1.0)))
    ref = weakref.ref(p.grad)
    opt.zero_grad()
    assert alive([ref]) == [False]


def test_parameters_can_be_swapped_after_every_step():
    params, opt = start(backend="cpu")
    for _ in range(3):
        opt.step(closure_of(opt, params))
        opt.zero_grad(set_to_none=True)
        for p in params:
            torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone()))


@pytest.mark.parametrize("create_graph", [True, False])
def test_an_optimizer_that_is_dropped_before_its_step_leaves_nothing_at_parameters(create_graph):
    params, opt = start()
    refs = [*map(weakref.ref, params), weakref.ref(opt)]
    if not create_graph:
        opt.step(closure_of(opt, params))
    closure_of(opt, params)()
    opt.perturb_weights()
    sum((p**3).sum() for p in params).backward(create_graph=create_graph)
    opt.unperturb()
    for p in params:
        p.grad = None
    del params, opt, p
    assert alive(refs) == [False] * 5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(8, 6), (4096,), (0,)])
@pytest.mark.parametrize("when", ["first", "second"])
def test_gradients_that_are_autograds_zeros_are_zeros(when, shape, backend):
    def run(make_zero):
        torch.manual_seed(0)
        p, q = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(5))
        opt = SASSHA([p, q], lr=0.1, rho=0.05, lazy_hessian=3, backend=backend, unseen="zero")
        for step in range(3):
            for number in ("first", "second"):
                (p.square().sum() + (q**4).sum()).backward(create_graph=number == "second" and opt.hessian_due)
                if step and number == when:
                    p.grad = make_zero(shape)
                opt.perturb_weights() if number == "first" else opt.unperturb()
            opt.step()
            opt.zero_grad()
        return p, q

    assert_same_bits(run(torch._efficientzerotensor), run(torch.zeros))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
def test_gsassha_takes_autograds_zeros_apart(hvp, backend):
    def run(make_zero):
        params, _ = start()
        opt = GSASSHA(params, lr=0.05, rho=0.1, alpha=0.3, lazy_hessian=3, hvp=hvp, backend=backend, unseen="zero")
        replaced = iter([False] * 2 + [True] * 100)  # an exact product needs the first gradients

        def zeros(grad):
            return make_zero(grad.shape) if grad.shape == params[0].shape and next(replaced) else grad

        opt.step(closure_of(opt, params))
        for _ in range(2):
            opt.step(closure_of(opt, params, zeros))
        return params

    assert_same_bits(run(torch._efficientzerotensor), run(torch.zeros))
