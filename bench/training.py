"""Whole training steps: one gradient, SAM, SASSHA with both products, and the eager loop in the authors' style."""

from __future__ import annotations

from collections.abc import Callable

import torch
from eager import EagerSASSHA
from models import MODELS, Loss
from torch import nn

from sassha_fast import SASSHA

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


def sassha(model: nn.Module, loss: Loss, hvp: str, refresh: bool) -> Step:
    """``step(closure)``: an ordinary step, or one that refreshes the curvature."""
    opt = SASSHA(model.parameters(), lr=LR, rho=RHO, hvp=hvp, lazy_hessian=1 if refresh else NEVER)
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


STEPS: dict[str, Callable[[nn.Module, Loss], Step]] = {
    "gradient": gradient,
    "sam": sam,
    "sassha_ordinary": lambda model, loss: sassha(model, loss, "exact", False),
    "sassha_exact": lambda model, loss: sassha(model, loss, "exact", True),
    "sassha_finite_difference": lambda model, loss: sassha(model, loss, "finite_difference", True),
    "eager_ordinary": lambda model, loss: eager(model, loss, False),
    "eager_refresh": lambda model, loss: eager(model, loss, True),
}


def build(model: str, step: str) -> Step:
    """A step of one contender on its own copy of a model, past its first call, which creates state."""
    run = STEPS[step](*MODELS[model]())
    run()
    return run
