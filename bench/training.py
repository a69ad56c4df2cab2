"""Whole training steps: a gradient, AdamW, SAM, the family with its products, Shampoo, the authors' eager loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from contenders import NEVER, Shampoo
from eager import EagerSASSHA
from models import MODELS, Loss
from torch import nn
from torch.optim import Optimizer

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH, suggest

RHO, LR = 0.05, 1e-4
TRIED = 8  # steps on trial of a suggestion, of 32 by default
ORDINARY, EXACT = "ordinary", "exact"
FORWARD, CENTRAL = "finite difference", "central difference"

Step = Callable[[], object]
Steps = dict[str, Step]  # by kind; a method that takes only one kind of step calls it ordinary


def gradient(model: nn.Module, loss: Loss) -> Steps:
    """One gradient computation: what everything is counted in."""

    def step() -> None:
        for p in model.parameters():
            p.grad = None
        loss().backward()

    return {ORDINARY: step}


def shampoo(model: nn.Module, loss: Loss) -> Steps:
    """Shampoo of pytorch_optimizer: steps that invert its preconditioners, and such that do not."""
    opt = Shampoo(model.parameters(), lr=LR)

    def step(interval: int) -> None:
        opt.preconditioning_compute_steps = interval
        opt.zero_grad()
        loss().backward()
        opt.step()

    return {ORDINARY: partial(step, NEVER), EXACT: partial(step, 1)}


def adamw(model: nn.Module, loss: Loss) -> Steps:
    """A gradient and fused AdamW."""
    opt = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> None:
        opt.zero_grad()
        loss().backward()
        opt.step()

    return {ORDINARY: step}


def family(
    model: nn.Module, loss: Loss, make: Callable[..., Optimizer], kinds: tuple[str, ...], **options: float
) -> Steps:
    """``step(closure)``: ordinary steps, and such that refresh the curvature in one way or another."""
    opt = make(model.parameters(), lr=LR, **options)
    opt.attach(model)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    def step(kind: str) -> None:
        opt.lazy_hessian = NEVER if kind == ORDINARY else 1
        opt.hvp = EXACT if kind == ORDINARY else kind.replace(" ", "_")
        opt.step(closure)

    return {kind: partial(step, kind) for kind in kinds}


def quarter(model: nn.Module, loss: Loss) -> Steps:
    """SASSHA with ascent and products from a quarter of the batch."""
    opt = SASSHA(model.parameters(), lr=LR, rho=RHO)
    opt.attach(model)
    whole, part = partial(_closure, opt, loss, 1.0), partial(_closure, opt, loss, 1 / 4)

    def step(kind: str) -> None:
        opt.lazy_hessian = NEVER if kind == ORDINARY else 1
        opt.step(whole, ascent_closure=part, hessian_closure=part)

    return {kind: partial(step, kind) for kind in (ORDINARY, EXACT)}


def _closure(opt: Optimizer, loss: Loss, share: float) -> torch.Tensor:
    opt.zero_grad()
    value = loss(share)
    value.backward()
    return value


def asking(model: nn.Module, loss: Loss) -> Steps:
    """Suggestions of hyperparameters, from few steps on trial."""

    def closure() -> torch.Tensor:
        value = loss()
        value.backward()
        return value

    return {ORDINARY: lambda: suggest(model, closure, steps=TRIED)}


def eager(model: nn.Module, loss: Loss) -> Steps:
    """The authors' loop: a graph on every step, whether it is used or not."""
    opt = EagerSASSHA(model.parameters(), lr=LR, rho=RHO)

    def step(interval: int) -> None:
        opt.lazy_hessian = interval
        loss().backward()
        opt.perturb_weights(zero_grad=True)
        # Its double backward needs what has one, as a user of that code has to see to.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss().backward(create_graph=True)
        opt.unperturb()
        opt.step()
        opt.zero_grad()

    return {ORDINARY: partial(step, NEVER), EXACT: partial(step, 1)}


def sam(model: nn.Module, loss: Loss) -> Steps:
    """SAM on fused AdamW."""
    opt = SAM(model.parameters(), torch.optim.AdamW, rho=RHO, lr=LR, fused=True)
    opt.attach(model)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    return {ORDINARY: lambda: opt.step(closure)}


METHODS: dict[str, Callable[[nn.Module, Loss], Steps]] = {
    "gradient": gradient,
    "adamw fused": adamw,
    "sam": sam,
    "sassha": partial(family, make=SASSHA, kinds=(ORDINARY, EXACT, FORWARD), rho=RHO),
    "sassha quarter": quarter,
    "g-sassha": partial(family, make=GSASSHA, kinds=(ORDINARY, EXACT), rho=RHO, alpha=0.1),
    "m-sassha": partial(family, make=MSASSHA, kinds=(ORDINARY, EXACT, FORWARD), rho=RHO),
    "adahessian": partial(family, make=AdaHessian, kinds=(EXACT,)),
    "sophia-h": partial(family, make=SophiaH, kinds=(ORDINARY, EXACT)),
    "shampoo": shampoo,
    "eager loop": eager,
    # One gradient a step, and products where the weights are: what a refresh adds.
    "products": partial(family, make=SASSHA, kinds=(ORDINARY, EXACT, FORWARD, CENTRAL), rho=0.0),
}


def runs(method: str, model: str) -> bool:
    """Whether a method trains a model: Shampoo's preconditioners of 8,192 tokens are too large to invert here."""
    return method != "shampoo" or (Shampoo is not None and model == "resnet20")


def build(model: str, method: str) -> Steps:
    """The steps of a method on its own copy of a model, past a first call, which creates state."""
    steps = METHODS[method](*MODELS[model]())
    steps[EXACT if EXACT in steps else ORDINARY]()
    return steps
