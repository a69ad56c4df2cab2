"""Every method of the family against its equations, on every backend, resumed midway; and where methods coincide."""

from __future__ import annotations

import copy
from functools import cache

import algorithms
import pytest
import torch
from algorithms import Problem
from sim import SimPasses
from torch import nn
from torch.nn import functional as F
from training import assert_same_bits, assert_same_state, snapshot, state_of, three_calls

from sassha_fast import GSASSHA, MSASSHA, SASSHA, AdaHessian, SophiaH, backends, schedules
from sassha_fast._core.keys import EXP_AVG, HESSIAN, WEIGHT

STEPS, RESUMED = 30, 17  # three refreshes; saved and loaded between two of them
FEW, RESUMED_SOON = 12, 7  # two refreshes, for Triton's interpreter, in which a step takes long
BACKENDS = ("reference", "foreach", "cpu", "cuda_sim", "triton")
DTYPES = (torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def _simulator(monkeypatch):
    backend = backends.Backend("cuda_sim", "the CUDA kernels on the CPU", lambda: SimPasses, lambda device: None)
    monkeypatch.setitem(backends._REGISTRY, "cuda_sim", backend)


def make_problem(dtype=torch.float64, seed=0):
    """A smooth network with a convolution, for which AdaHessian has a rule of its own; every seed sees one batch."""
    torch.manual_seed(seed)
    layers = nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 10), nn.GELU(), nn.Linear(10, 3)
    net = nn.Sequential(*layers).to(dtype)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(16, 1, 6, 6, dtype=torch.float64, generator=generator).to(dtype)
    y = torch.randint(0, 3, (16,), generator=generator)
    return Problem(net, lambda: F.cross_entropy(net(x), y))


# Each method with its equations: how to build it, and what they are called with.
METHODS = {
    "SASSHA": (
        lambda params, **o: SASSHA(params, lr=0.05, rho=0.05, weight_decay=0.01, **o),
        lambda problem, steps: algorithms.sassha(problem, steps, lr=0.05, rho=0.05, wd=0.01),
    ),
    "SASSHA, ASAM": (
        lambda params, **o: SASSHA(params, lr=0.05, rho=0.5, adaptive=True, **o),
        lambda problem, steps: algorithms.sassha(problem, steps, lr=0.05, rho=0.5, adaptive=True),
    ),
    "M-SASSHA": (
        lambda params, **o: MSASSHA(params, lr=0.05, rho=0.1, weight_decay=0.01, **o),
        lambda problem, steps: algorithms.m_sassha(problem, steps, lr=0.05, rho=0.1, wd=0.01),
    ),
    "M-SASSHA, ASAM, along m": (
        lambda params, **o: MSASSHA(params, lr=0.05, rho=0.5, weight_decay=0.0, sign=1, adaptive=True, **o),
        lambda problem, steps: algorithms.m_sassha(problem, steps, lr=0.05, rho=0.5, sign=1, adaptive=True),
    ),
    "G-SASSHA": (
        lambda params, **o: GSASSHA(params, lr=0.05, rho=0.1, alpha=0.3, **o),
        lambda problem, steps: algorithms.sassha(problem, steps, lr=0.05, rho=0.1, alpha=0.3),
    ),
    "G-SASSHA, ASAM": (
        lambda params, **o: GSASSHA(params, lr=0.05, rho=0.5, alpha=0.1, adaptive=True, **o),
        lambda problem, steps: algorithms.sassha(problem, steps, lr=0.05, rho=0.5, alpha=0.1, adaptive=True),
    ),
    "AdaHessian": (
        lambda params, **o: AdaHessian(params, lr=0.05, weight_decay=0.01, **o),
        lambda problem, steps: algorithms.adahessian(problem, steps, lr=0.05, wd=0.01),
    ),
    "Sophia-H": (
        lambda params, **o: SophiaH(params, lr=0.01, weight_decay=0.1, eps=1e-3, **o),
        lambda problem, steps: algorithms.sophia_h(problem, steps, lr=0.01, gamma=0.04, wd=0.1, eps=1e-3),
    ),
}


def by_hand(opt, loss):
    """One step of a hand-written loop."""
    one_pass = isinstance(opt, MSASSHA) or (isinstance(opt, (AdaHessian, SophiaH)) and opt.hvp == "exact")
    if not one_pass:
        three_calls(opt, loss)
        return
    loss().backward(create_graph=opt.hvp == "exact" and opt.hessian_due)
    for _ in range(opt.probes_due):
        opt.probe_weights()
        loss().backward()
    opt.step()
    opt.zero_grad()


def by_closure(opt, loss):
    def closure():
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    opt.step(closure)


def resumed(problem, build, opt, **options):
    """Another optimizer on another network, from checkpoints of both."""
    other = make_problem(next(problem.net.parameters()).dtype, seed=1)
    new = build(other.net.parameters(), **options)
    other.net.load_state_dict(problem.net.state_dict())
    new.load_state_dict(copy.deepcopy(opt.state_dict()))
    return other, new


@cache
def expected(method, dtype, steps):
    return METHODS[method][1](make_problem(dtype), steps)


def state_lists(opt, *keys):
    entries = [opt.state[p] for group in opt.param_groups for p in group["params"]]
    return [[entry[key] for entry in entries] for key in keys]


# Triton has every method in one dtype, by turns; its passes are tested in all of them.
RUNS = [
    (method, backend, dtype)
    for i, method in enumerate(METHODS)
    for backend in BACKENDS
    for dtype in ((DTYPES[i % 2],) if backend == "triton" else DTYPES)
]


@pytest.mark.parametrize(("method", "backend", "dtype"), RUNS, ids=str)
def test_runs_resumed_in_the_middle_equal_the_equations(method, backend, dtype):
    steps, saved = (FEW, RESUMED_SOON) if backend == "triton" else (STEPS, RESUMED)
    problem, build = make_problem(dtype), METHODS[method][0]
    opt = build(problem.net.parameters(), backend=backend)
    for _ in range(saved):
        by_hand(opt, problem.loss)
    problem, opt = resumed(problem, build, opt, backend=backend)
    for _ in range(steps - saved):
        by_closure(opt, problem.loss)
    wanted = expected(method, dtype, steps)
    m, d = state_lists(opt, EXP_AVG, HESSIAN)
    assert_same_bits(m, wanted.m)
    assert_same_bits(d, wanted.d)
    assert_same_bits(snapshot(problem.net), wanted.at)
    if isinstance(opt, MSASSHA):
        assert_same_bits(state_lists(opt, WEIGHT)[0], wanted.x)
        opt.eval()
        assert_same_bits(snapshot(problem.net), wanted.x)


# ---- where methods coincide ---------------------------------------------------------------------------------------


def trained(build, steps=STEPS, step=by_hand, dtype=torch.float32):
    problem = make_problem(dtype)
    opt = build(problem.net.parameters())
    for _ in range(steps):
        step(opt, problem.loss)
    return problem.net, opt


def assert_same_run(a, b, keys=(EXP_AVG, HESSIAN)):
    assert_same_bits(snapshot(a[0]), snapshot(b[0]))
    for left, right in zip(state_lists(a[1], *keys), state_lists(b[1], *keys), strict=True):
        assert_same_bits(left, right)


@pytest.mark.parametrize("step", [by_hand, by_closure])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_g_sassha_with_alpha_zero_is_sassha(dtype, step):
    options = {"lr": 0.05, "rho": 0.1, "weight_decay": 0.01}
    a = trained(lambda params: GSASSHA(params, alpha=0.0, **options), step=step, dtype=dtype)
    b = trained(lambda params: SASSHA(params, **options), step=step, dtype=dtype)
    assert_same_run(a, b)


def test_g_sassha_with_alpha_zero_in_one_group_leaves_that_group_its_gradients():
    """Selected, not multiplied: the kernels of the gap run for both groups."""
    problem = make_problem(torch.float32)
    params = list(problem.net.parameters())
    opt = GSASSHA([{"params": params[:3], "alpha": 0.0}, {"params": params[3:]}], lr=0.05, rho=0.1, alpha=0.3)
    problem.loss().backward()
    opt.perturb_weights()
    problem.loss().backward(create_graph=True)
    before = [p.grad.detach().clone() for p in params]
    opt.unperturb()
    assert_same_bits([p.grad for p in params[:3]], before[:3])
    assert all((p.grad != g).any() for p, g in zip(params[3:], before[3:], strict=True))


@pytest.mark.parametrize("step", [by_hand, by_closure])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_m_sassha_with_rho_zero_is_sassha_with_rho_zero(dtype, step):
    options = {"lr": 0.05, "rho": 0.0, "weight_decay": 0.01}
    a = trained(lambda params: MSASSHA(params, **options), step=step, dtype=dtype)
    b = trained(lambda params: SASSHA(params, **options), step=step, dtype=dtype)
    assert_same_run(a, b)


def test_sassha_with_rho_zero_is_its_unperturbed_form():
    def unperturbed(opt, loss):
        loss().backward(create_graph=opt.hessian_due)
        opt.step()
        opt.zero_grad()

    build = lambda params: SASSHA(params, lr=0.05, rho=0.0)  # noqa: E731
    assert_same_run(trained(build, step=three_calls), trained(build, step=unperturbed))


@pytest.mark.parametrize("method", ["SASSHA", "M-SASSHA", "G-SASSHA"])
@pytest.mark.parametrize(("k", "steps", "refreshes"), [(1, 7, 7), (3, 7, 3), (100, 7, 1)])
def test_curvature_is_refreshed_every_k_steps(method, k, steps, refreshes):
    _, opt = trained(lambda params: METHODS[method][0](params, lazy_hessian=k), steps=steps)
    assert opt.stats.refreshes == refreshes


@pytest.mark.parametrize("hvp", ["finite_difference", "central_difference"])
@pytest.mark.parametrize("method", METHODS)
def test_hand_written_probes_equal_a_closure(method, hvp):
    build = lambda params: METHODS[method][0](params, hvp=hvp)  # noqa: E731
    assert_same_run(trained(build, 12, by_hand, torch.float64), trained(build, 12, by_closure, torch.float64))


@pytest.mark.parametrize("method", ["M-SASSHA", "G-SASSHA", "AdaHessian", "Sophia-H"])
def test_finite_differences_come_close_to_exact_products(method):
    exact, approximate = (
        trained(lambda params, hvp=hvp: METHODS[method][0](params, hvp=hvp, n_samples=1), 1, by_closure, torch.float64)
        for hvp in ("exact", "central_difference")
    )
    for a, b in zip(*(state_lists(opt, HESSIAN)[0] for _, opt in (exact, approximate)), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02 * float(a.abs().max()))


# ---- ablations of the paper ---------------------------------------------------------------------------------------


ABLATIONS = {
    "No-Sqrt": {"hessian_power": 1.0, "eps": 1e-2},
    "No-Abs": {"curvature": "signed"},
    "No-Abs, negative curvature kept": {"curvature": "signed", "hessian_floor": None, "hessian_power": 1.0, "eps": 1.0},
    "clipping": {"hessian_power": 1.0, "hessian_floor": 0.05},
    "damping": {"hessian_power": 1.0, "eps": 0.05},
    "squares": {"curvature": "square"},
    "warm-up of rho": {"rho_scheduler": schedules.Linear(10, 0.0, 0.1)},
}


@pytest.mark.parametrize("backend", ["foreach", "cpu"])
@pytest.mark.parametrize("ablation", ABLATIONS)
def test_ablations_equal_the_reference_backend(ablation, backend):
    options = {"lr": 0.02, "rho": 0.05, **ABLATIONS[ablation]}
    a = trained(lambda params: SASSHA(params, backend=backend, **options), 12)
    b = trained(lambda params: SASSHA(params, backend="reference", **options), 12)
    assert all(torch.isfinite(p).all() for p in a[0].parameters())
    assert_same_run(a, b)
    plain = trained(lambda params: SASSHA(params, lr=0.02, rho=0.05), 12)
    assert any((p != q).any() for p, q in zip(a[0].parameters(), plain[0].parameters(), strict=True))


def test_the_power_warms_up_along_its_schedule():
    schedule = schedules.Linear(10, 1.0, 0.5)
    problem = make_problem()
    opt = SASSHA(problem.net.parameters(), schedule, lr=0.02, rho=0.05)
    for t in range(12):
        three_calls(opt, problem.loss)
        assert opt.hessian_power_t == schedule(t)


def test_asam_without_biases_climbs_plainly_there():
    """ε of weights is ρ x²⊙g/N and of biases ρ g/N, with N² the sum of ‖|x|⊙g‖² of weights and ‖g‖² of biases."""
    problem = make_problem()
    params = list(problem.net.parameters())
    opt = SASSHA(params, rho=0.3, adaptive=True, adaptive_bias=False)
    before = snapshot(problem.net)
    problem.loss().backward()
    grads = [p.grad.clone() for p in params]
    opt.perturb_weights()
    squares = [((x.abs() if x.dim() > 1 else 1.0) * g).square().sum() for x, g in zip(before, grads, strict=True)]
    norm = torch.stack(squares).sum().sqrt()
    for p, x, g in zip(params, before, grads, strict=True):
        torch.testing.assert_close(
            p.detach() - x, 0.3 / norm * g * (x * x if x.dim() > 1 else 1.0), rtol=1e-6, atol=1e-12
        )
    problem.loss().backward(create_graph=True)
    opt.unperturb()
    assert_same_bits(snapshot(problem.net), before)


@pytest.mark.parametrize("backend", ["foreach", "cpu"])
@pytest.mark.parametrize("method", ["SASSHA, ASAM", "M-SASSHA, ASAM, along m", "G-SASSHA, ASAM"])
def test_asam_without_biases_equals_the_reference_backend(method, backend):
    runs = [
        trained(lambda params, b=b: METHODS[method][0](params, adaptive_bias=False, backend=b), 12, by_closure)
        for b in (backend, "reference")
    ]
    assert_same_run(*runs)
    assert_same_state(state_of(runs[0][1]), state_of(runs[1][1]))
