"""The methods of the family as their papers write them, each a function of a dozen lines in plain torch.

They know nothing of optimizers, passes or state: weights go in, weights come out. Operations are rounded one by one in
the order of the equations, so the optimizers are compared with them bit for bit. Three things are taken from the
package: Philox's signs, √ that is rounded correctly, and β^t by repeated squaring.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sassha_fast import reference
from sassha_fast._core.scalars import integer_power

Weights = list[Tensor]


class Problem(NamedTuple):
    """A network and the loss of a batch."""

    net: nn.Module
    loss: Callable[[], Tensor]

    def gradient(self, x: Weights, *, graph: bool = False) -> Weights:
        """∇f(x)."""
        params = list(self.net.parameters())
        with torch.no_grad():
            for p, value in zip(params, x, strict=True):
                p.copy_(value)
        return list(torch.autograd.grad(self.loss(), params, create_graph=graph))

    def diagonal(self, x: Weights, seed: int, draw: int) -> tuple[Weights, Weights]:
        """∇f(x), and Hutchinson's z⊙∇²f(x)z."""
        params = list(self.net.parameters())
        grads = self.gradient(x, graph=True)
        signs = [reference.rademacher(p, i, seed, draw) for i, p in enumerate(params)]
        products = torch.autograd.grad(grads, params, signs)
        return [g.detach() for g in grads], [z * hz for z, hz in zip(signs, products, strict=True)]


def toward(x: Weights, direction: Weights, rho: float, *, adaptive: bool = False) -> Weights:
    """x + ρ d/‖d‖, or with ASAM's scaling x + ρ x²⊙d/‖|x|⊙d‖."""
    scaled = [a.abs() * d if adaptive else d for a, d in zip(x, direction, strict=True)]
    norm = torch.stack([d.double().square().sum() for d in scaled]).sum().sqrt()
    scale = (rho / (norm + 1e-12)).float().to(x[0].dtype)
    eps = [scale * d for d in direction]
    return [a + (e * (a * a) if adaptive else e) for a, e in zip(x, eps, strict=True)]


def correction(beta: float, t: int) -> float:
    return 1.0 - integer_power(beta, t)


def averaged(average: Weights, sample: Weights, beta: float) -> Weights:
    return [beta * a + (1.0 - beta) * s for a, s in zip(average, sample, strict=True)]


class Run(NamedTuple):
    """Where a method arrived."""

    x: Weights
    m: Weights
    d: Weights
    at: Weights  # where the next gradient would be taken


def start(problem: Problem) -> tuple[Weights, Weights, Weights]:
    x = [p.detach().clone() for p in problem.net.parameters()]
    return x, [torch.zeros_like(a) for a in x], [torch.zeros_like(a) for a in x]


def sassha(
    problem, steps, *, lr, rho, k=10, betas=(0.9, 0.999), wd=0.0, eps=1e-4, seed=0, alpha=0.0, adaptive=False, part=None
):
    """Algorithm 1 of the SASSHA paper; with ``alpha`` its descent is GSAM's.

    ``part`` is the loss of fewer rows: ascent and products are of it, the gradient of the descent is not.
    """
    x, m, d = start(problem)
    d_bar = d
    for t in range(1, steps + 1):
        g = (part or problem).gradient(x)
        perturbed = toward(x, g, rho, adaptive=adaptive)
        if (t - 1) % k == 0:
            g2, h = (part or problem).diagonal(perturbed, seed, t - 1)
            if part:
                g2 = problem.gradient(perturbed)
            d = averaged(d, [a.abs() for a in h], betas[1])
            d_bar = [reference.root(a / correction(betas[1], t)) for a in d]
        else:
            g2 = problem.gradient(perturbed)
        if alpha:
            dot, square = (sum((a.double() * b.double()).sum() for a, b in zip(u, g2, strict=True)) for u in (g, g2))
            share = (dot / square).float().to(x[0].dtype)
            weight = torch.tensor(alpha, dtype=torch.float32).to(x[0].dtype)
            g2 = [b - weight * (a - share * b) for a, b in zip(g, g2, strict=True)]
        m = averaged(m, g2, betas[0])
        step = lr / correction(betas[0], t)
        x = [a * (1.0 - lr * wd) - step * (b / (c + eps)) for a, b, c in zip(x, m, d_bar, strict=True)]
    return Run(x, m, d, x)


def m_sassha(problem, steps, *, lr, rho, k=10, betas=(0.9, 0.999), wd=0.0, eps=1e-4, seed=0, sign=-1, adaptive=False):
    """Its variant of one gradient a step: ε = −ρ m/‖m‖ of the step before."""
    x, m, d = start(problem)
    d_bar, at = d, x
    for t in range(1, steps + 1):
        if (t - 1) % k == 0:
            g, h = problem.diagonal(at, seed, t - 1)
            d = averaged(d, [a.abs() for a in h], betas[1])
            d_bar = [reference.root(a / correction(betas[1], t)) for a in d]
        else:
            g = problem.gradient(at)
        m = averaged(m, g, betas[0])
        step = lr / correction(betas[0], t)
        x = [a * (1.0 - lr * wd) - step * (b / (c + eps)) for a, b, c in zip(x, m, d_bar, strict=True)]
        at = toward(x, m, sign * rho, adaptive=adaptive)
    return Run(x, m, d, at)


def adahessian(problem, steps, *, lr, k=1, betas=(0.9, 0.999), wd=0.0, eps=1e-4, seed=0):
    """Algorithm 1 of the AdaHessian paper, with its spatial averaging."""
    x, m, v = start(problem)
    v_bar = v
    for t in range(1, steps + 1):
        if (t - 1) % k == 0:
            g, h = problem.diagonal(x, seed, t - 1)
            h = [a.abs().mean((2, 3), keepdim=True).expand_as(a) if a.dim() == 4 else a for a in h]
            v = averaged(v, [a * a for a in h], betas[1])
            v_bar = [reference.root(a / correction(betas[1], t)) for a in v]
        else:
            g = problem.gradient(x)
        m = averaged(m, g, betas[0])
        step = lr / correction(betas[0], t)
        x = [a * (1.0 - lr * wd) - step * (b / (c + eps)) for a, b, c in zip(x, m, v_bar, strict=True)]
    return Run(x, m, v, x)


def sophia_h(problem, steps, *, lr, gamma, k=10, betas=(0.965, 0.99), wd=0.0, eps=1e-15, seed=0):
    """Algorithm 3 of the Sophia paper: x − η clip(m / max(γh, ε), 1), written as (η/γ) clip(m / max(h, ε/γ), γ)."""
    x, m, h = start(problem)
    for t in range(1, steps + 1):
        if (t - 1) % k == 0:
            g, sample = problem.diagonal(x, seed, t - 1)
            h = averaged(h, sample, betas[1])
        else:
            g = problem.gradient(x)
        m = averaged(m, g, betas[0])
        ratio = [(a / torch.clamp(b, min=eps / gamma)).clamp(-gamma, gamma) for a, b in zip(m, h, strict=True)]
        x = [a * (1.0 - lr * wd) - (lr / gamma) * r for a, r in zip(x, ratio, strict=True)]
    return Run(x, m, h, x)
