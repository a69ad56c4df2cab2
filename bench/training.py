"""Whole training steps: one gradient, the family with both products, Shampoo, and the eager loop of the authors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from eager import EagerSASSHA
from models import MODELS, Loss
from torch import nn

from sassha_fast import GSASSHA, MSASSHA, SASSHA, AdaHessian, SophiaH

try:
    from pytorch_optimizer import Shampoo
except ImportError:  # an extra of the benchmarks
    Shampoo = None

NEVER = 10**9
RHO, LR = 0.05, 1e-4

Step = Callable[[], object]


def gradient(model: nn.Module, loss: Loss) -> Step:
    """One gradient computation: what everything is counted in."""

    def step() -> None:
        for p in model.parameters():
            p.grad = None
        loss().backward()

    return step


def sam(model: nn.Module, loss: Loss) -> Step:
    """SAM on fused AdamW: two gradients, the weights kept aside in between."""
    params = list(model.parameters())
    opt = torch.optim.AdamW(params, lr=LR, fused=True)

    def step() -> None:
        opt.zero_grad()
        loss().backward()
        with torch.no_grad():
            origin = [p.clone() for p in params]
            norm = nn.utils.get_total_norm([p.grad for p in params])
            for p in params:
                p.add_(p.grad * (RHO / (norm + 1e-12)))
        opt.zero_grad()
        loss().backward()
        with torch.no_grad():
            torch._foreach_copy_(params, origin)
        opt.step()

    return step


def family(
    model: nn.Module, loss: Loss, method: type, *, refresh: bool = False, hvp: str = "exact", **options: float
) -> Step:
    """``step(closure)``: an ordinary step, or one that refreshes the curvature."""
    opt = method(model.parameters(), lr=LR, hvp=hvp, lazy_hessian=1 if refresh else NEVER, **options)
    opt.attach(model)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    return lambda: opt.step(closure)


def eager(model: nn.Module, loss: Loss, refresh: bool) -> Step:
    """The authors' loop: a graph on every step, whether it is used or not."""
    opt = EagerSASSHA(model.parameters(), lr=LR, rho=RHO, lazy_hessian=1 if refresh else NEVER)

    def step() -> None:
        loss().backward()
        opt.perturb_weights(zero_grad=True)
        # Its double backward needs what has one, as a user of that code has to see to.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss().backward(create_graph=True)
        opt.unperturb()
        opt.step()
        opt.zero_grad()

    return step


def shampoo(model: nn.Module, loss: Loss) -> Step:
    """Shampoo of pytorch_optimizer, with its preconditioners computed every tenth step."""
    opt = Shampoo(model.parameters(), lr=LR, preconditioning_compute_steps=10)

    def step() -> None:
        opt.zero_grad()
        loss().backward()
        opt.step()

    return step


STEPS: dict[str, Callable[[nn.Module, Loss], Step]] = {
    "gradient": gradient,
    "sam": sam,
    "sassha_ordinary": lambda *on: family(*on, SASSHA, rho=RHO),
    "sassha_exact": lambda *on: family(*on, SASSHA, rho=RHO, refresh=True),
    "sassha_finite_difference": lambda *on: family(*on, SASSHA, rho=RHO, refresh=True, hvp="finite_difference"),
    "gsassha_ordinary": lambda *on: family(*on, GSASSHA, rho=RHO, alpha=0.1),
    "gsassha_exact": lambda *on: family(*on, GSASSHA, rho=RHO, alpha=0.1, refresh=True),
    "msassha_ordinary": lambda *on: family(*on, MSASSHA, rho=RHO),
    "msassha_exact": lambda *on: family(*on, MSASSHA, rho=RHO, refresh=True),
    "msassha_finite_difference": lambda *on: family(*on, MSASSHA, rho=RHO, refresh=True, hvp="finite_difference"),
    "adahessian": lambda *on: family(*on, AdaHessian, refresh=True),
    "sophia_ordinary": lambda *on: family(*on, SophiaH),
    "sophia_exact": lambda *on: family(*on, SophiaH, refresh=True),
    "shampoo": shampoo,
    "eager_ordinary": lambda model, loss: eager(model, loss, False),
    "eager_refresh": lambda model, loss: eager(model, loss, True),
}
# Its preconditioners are square in every dimension: 8,192 tokens make the GPT's too large to invert here.
STEPS_OF = {
    model: [name for name in STEPS if name != "shampoo" or (Shampoo is not None and model == "resnet20")]
    for model in MODELS
}


def build(model: str, step: str) -> Step:
    """A step of one contender on its own copy of a model, past its first call, which creates state."""
    run = STEPS[step](*MODELS[model]())
    run()
    return run
