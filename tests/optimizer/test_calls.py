"""Python and C calls of a step do not grow with the number of tensors: work on each of them is left to C loops."""

import gc
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from sim import SimPasses

from sassha_fast import MSASSHA, SASSHA, AdaHessian, backends

FEW, MANY = 8, 800
MOST_ON_A_REFRESH = 6  # calls for every further tensor, where products of each are taken
METHODS = {SASSHA: {"rho": 0.05}, MSASSHA: {"rho": 0.05}, AdaHessian: {}}
OWN_CALL = torch.autograd.grad.__code__  # which walks over its tensors in Python


@pytest.fixture(autouse=True)
def _simulator(monkeypatch):
    backend = backends.Backend("cuda_sim", "the CUDA kernels on the CPU", lambda: SimPasses, lambda device: None)
    monkeypatch.setitem(backends._REGISTRY, "cuda_sim", backend)


def loss_of(params):
    """Σ ‖x‖³ of any number of tensors in four calls, with gradients and products in memory of their own."""
    norms = torch.stack(torch._foreach_norm(params))
    return (norms * norms * norms).sum()


class Calls:
    """Counts calls that run inside, by the function that makes them; those of ``torch.autograd.grad`` apart."""

    def __init__(self):
        self.by_caller, self.within = Counter(), 0

    def __enter__(self):
        gc.collect()  # what others left behind is not taken down within
        gc.disable()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        gc.enable()

    def _note(self, frame, event, argument):
        if event in ("call", "c_call") and not self.within and argument is not sys.setprofile:
            caller = frame if event == "c_call" else frame.f_back
            self.by_caller[caller.f_code] += 1
        if frame.f_code is OWN_CALL and event in ("call", "return"):
            self.within += 1 if event == "call" else -1

    @property
    def total(self):
        return sum(self.by_caller.values())


def counted_step(opt, loss, way):
    """One step, of which the optimizer's calls are counted."""
    calls = Calls()
    if way == "closure":

        def closure():
            opt.zero_grad()
            value = loss()
            value.backward()
            return value

        with calls:
            opt.step(closure)
        return calls
    if isinstance(opt, SASSHA):
        loss().backward()
        with calls:
            opt.perturb_weights()
    loss().backward(create_graph=opt.hessian_due)
    with calls:
        if isinstance(opt, SASSHA):
            opt.unperturb()
        opt.step()
        opt.zero_grad()
    return calls


def calls_of(method, backend, way, tensors, lazy_hessian):
    """The calls of a step that has had others before it."""
    params = [torch.nn.Parameter(torch.full((3,), 1.0 + i)) for i in range(tensors)]
    opt = method(params, lr=1e-3, lazy_hessian=lazy_hessian, backend=backend, **METHODS[method])
    for _ in range(2):
        counted_step(opt, lambda: loss_of(params), way)
    return counted_step(opt, lambda: loss_of(params), way)


def growth(few, many):
    """Functions that make more calls with more tensors, for the message of a failure."""
    grown = {code: many.by_caller[code] - few.by_caller[code] for code in many.by_caller}
    rows = sorted((-n, code.co_filename, code.co_firstlineno, code.co_qualname) for code, n in grown.items() if n)
    return "".join(f"\n{-n:+6d} in {Path(file).name}:{line} {name}" for n, file, line, name in rows)


@pytest.mark.parametrize("backend", ["cpu", "cuda_sim"])
@pytest.mark.parametrize("way", ["calls", "closure"])
@pytest.mark.parametrize("method", METHODS)
def test_calls_of_an_ordinary_step_do_not_grow_with_the_number_of_tensors(method, way, backend):
    few, many = (calls_of(method, backend, way, n, lazy_hessian=10**6) for n in (FEW, MANY))
    assert many.total == few.total, f"{few.total} at {FEW} tensors, {many.total} at {MANY}{growth(few, many)}"


@pytest.mark.parametrize("way", ["calls", "closure"])
@pytest.mark.parametrize("method", METHODS)
def test_a_refresh_makes_few_calls_for_a_tensor(method, way):
    few, many = (calls_of(method, "cpu", way, n, lazy_hessian=1) for n in (FEW, MANY))
    each = (many.total - few.total) / (MANY - FEW)
    assert each <= MOST_ON_A_REFRESH, f"{each:.1f} calls for each further tensor{growth(few, many)}"
