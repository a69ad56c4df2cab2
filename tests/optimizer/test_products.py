"""Exact products of every model of the zoo against torch.func, and products in float16."""

import math

import pytest
import torch
import zoo
from tolerances import PRODUCT_RTOL
from torch.amp import GradScaler
from torch.func import functional_call, grad
from torch.nn import functional as F
from training import assert_same_bits, closure_of, make_net, snapshot, state_of

from sassha_fast import SASSHA, AdaHessian, reference
from sassha_fast._core.contexts import frozen_batchnorm, refresh_context
from sassha_fast._core.products import exact_products

RHO = 0.05
PLAIN_TWIN = {"transformer_with_checkpointing": "transformer_with_dropout"}  # torch.func has no checkpointing


def products_by_torch_func(name):
    """|z ⊙ ∇²f(x+ε) z| of the zoo's model at its first weights."""
    model, loss_fn = zoo.make(PLAIN_TWIN.get(name, name))
    params = {key: p.detach().clone() for key, p in model.named_parameters()}
    network = model.forward

    def loss(values):
        torch.manual_seed(5)
        given = {f"model.{key}": value for key, value in values.items()}
        model.forward = lambda x: functional_call(_Bare(model, network), given, (x,))
        try:
            return loss_fn()
        finally:
            model.forward = network

    with refresh_context(), frozen_batchnorm(model):
        gradient = grad(loss)(params)
        total = sum((g * g).sum() for g in gradient.values()).reshape(1)
        scale = reference.ascent_scales(total, [RHO], [1e-12])[0].double()
        perturbed = {key: p + scale * gradient[key] for key, p in params.items()}
        signs = {key: reference.rademacher(p, i, 0, 0) for i, (key, p) in enumerate(params.items())}

        def along_z(values):
            return sum((g * signs[key]).sum() for key, g in grad(loss)(values).items())

        return [(signs[key] * hz).abs() for key, hz in grad(along_z)(perturbed).items()]


class _Bare(torch.nn.Module):
    """The model under its own forward, which functional_call can put other weights into."""

    def __init__(self, model, forward):
        super().__init__()
        self.model, self.run = model, forward

    def forward(self, x):
        return self.run(x)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_exact_products_are_those_of_torch_func(name):
    model, loss_fn = zoo.make(name)
    opt = SASSHA(model.parameters(), lr=1e-3, rho=RHO, betas=(0.9, 0.0), unseen="zero")  # D is the last |z ⊙ Hz|
    opt.attach(model)
    torch.manual_seed(5)
    opt.step(closure_of(opt, loss_fn))
    for entry, expected in zip(state_of(opt), products_by_torch_func(name), strict=True):
        torch.testing.assert_close(entry["exp_hessian_diag"], expected, rtol=PRODUCT_RTOL, atol=PRODUCT_RTOL)


# ---- float16 ------------------------------------------------------------------------------------------------------


class Ones:
    """Probes of ones: with a Hessian of positive entries no product cancels."""

    signs_in_registers = (True,)

    def __init__(self, *params):
        self.params = params

    def rademacher(self, positions, seed, draw):
        return [torch.ones(64, 64, dtype=torch.float16) for _ in positions]


def test_probes_are_scaled_so_that_float16_products_do_not_overflow():
    """H has 4,096² entries of 16, so Hz is 65,536 everywhere and overflows, while Hz/‖z‖ is 1,024."""
    p = torch.nn.Parameter(torch.full((64, 64), 2.0**-10, dtype=torch.float16))
    gradient = torch.autograd.grad(0.5 * (4.0 * p).sum().float().square(), p, create_graph=True)[0]
    assert torch.isfinite(gradient).all()
    unscaled = torch.autograd.grad(gradient, p, torch.ones_like(p), retain_graph=True)[0]
    assert torch.isinf(unscaled).all()
    products, scale = exact_products(Ones(p), [gradient], [True], n_samples=1, seed=0, draw=0, elements=64 * 64)
    assert scale == 64.0
    assert (products.values[0].double() * scale == 65536.0).all()


@pytest.mark.parametrize("n_samples", [1, 3])
def test_the_scale_of_probes_changes_no_bit_in_float32(n_samples):
    """A power of two commutes with every rounding."""
    net = make_net()
    x = torch.randn(8, 12)
    params = list(net.parameters())
    plan_like = _Reference(params)
    gradients = torch.autograd.grad(net(x).square().sum(), params, create_graph=True)
    options = {"n_samples": n_samples, "seed": 3, "draw": 4, "elements": 6243}
    found, scale = exact_products(plan_like, gradients, [True] * 6, **options)
    assert math.log2(scale * n_samples).is_integer()
    total = None
    gradients = torch.autograd.grad(net(x).square().sum(), params, create_graph=True)
    for sample in range(n_samples):
        z = [reference.rademacher(p, i, 3, 4 + sample) for i, p in enumerate(params)]
        terms = torch.autograd.grad(gradients, params, z, retain_graph=True)
        signed = [h if n_samples == 1 else h * s for h, s in zip(terms, z, strict=True)]
        total = signed if total is None else [a + b for a, b in zip(total, signed, strict=True)]
    assert_same_bits([value * (scale * n_samples) for value in found.values], list(total))


class _Reference:
    signs_in_registers = (True,) * 6

    def __init__(self, params):
        self.params = params

    def rademacher(self, positions, seed, draw):
        shapes = [p.shape for p in make_net().parameters()]
        return [reference.rademacher(torch.empty(shapes[i]), i, seed, draw) for i in positions]


@pytest.mark.parametrize("way", ["calls", "closure"])
def test_overflow_in_the_product_alone_keeps_curvature_and_the_step(way):
    """The gradient is finite and the product is not: the refresh is lost and counted, the step is taken."""
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.01, rho=0.05, lazy_hessian=2)
    scaler = GradScaler("cpu", init_scale=4.0)
    x = torch.randn(8, 12)

    def loss(huge=False):
        value = net(x).square().mean()
        # A function whose first derivative is 1 and whose second is infinite.
        return _Kink.apply(value) if huge else value

    def step(huge):
        def closure():
            opt.zero_grad()
            value = loss(huge)
            scaler.scale(value).backward()
            return value

        if way == "closure":
            opt.step(closure, scaler=scaler)
        else:
            scaler.scale(loss(huge)).backward()
            opt.perturb_weights()
            scaler.scale(loss(huge)).backward(create_graph=opt.hessian_due)
            opt.unperturb(scaler=scaler)
            scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    step(False)
    step(False)
    before, state = snapshot(net), state_of(opt)
    step(True)
    assert opt.stats.skipped_refreshes == 1
    assert opt.stats.skipped_steps == 0
    for entry, old in zip(state_of(opt), state, strict=True):
        assert_same_bits([entry["exp_hessian_diag"]], [old["exp_hessian_diag"]])
        assert entry["step"] == 3
    assert all(torch.isfinite(p).all() and (p != q).any() for p, q in zip(net.parameters(), before, strict=True))
    assert opt.hessian_due  # a scheduled refresh that failed is still due
    step(False)
    assert opt.stats.refreshes == 2


class _Kink(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value.clone()

    @staticmethod
    def backward(ctx, grad_output):
        (value,) = ctx.saved_tensors
        return _Slope.apply(value, grad_output)


class _Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, grad_output):
        return grad_output.clone()

    @staticmethod
    def backward(ctx, grad_grad):
        return torch.full_like(grad_grad, torch.inf), grad_grad


@pytest.mark.parametrize("method", [SASSHA, AdaHessian])
def test_two_optimizers_of_one_graph_are_told_what_to_do_and_x_is_back(method):
    net = make_net()
    parts = [method(net[i].parameters(), lr=0.01, **({"rho": 0.05} if method is SASSHA else {})) for i in (0, 4)]
    x, y = torch.ones(4, 12), torch.tensor([0, 1, 2, 0])
    before = snapshot(net)
    if method is SASSHA:
        F.cross_entropy(net(x), y).backward()
        for opt in parts:
            opt.perturb_weights()
    F.cross_entropy(net(x), y).backward(create_graph=True)
    calls = [opt.unperturb if method is SASSHA else opt.take_products for opt in parts]
    calls[0]()
    with pytest.raises(RuntimeError, match=r"graph of the gradients is used up.* Give one optimizer all parameters"):
        calls[1]()
    assert_same_bits(snapshot(net), before)
