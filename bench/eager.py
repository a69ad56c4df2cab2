"""An optimizer in the style of the authors' code: a Python loop over tensors, one torch call per operation.

It is what a user of their repository runs today, so it is what speed-ups are counted against.
"""

from __future__ import annotations

import torch
from torch import Tensor


class EagerSASSHA(torch.optim.Optimizer):
    """SASSHA with ε kept in the state, added and subtracted, and about 25 operations per tensor and step."""

    def __init__(self, params, lr=0.15, betas=(0.9, 0.999), weight_decay=0.0, rho=0.0, lazy_hessian=10, eps=1e-4):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "rho": rho, "eps": eps})
        self.lazy_hessian = lazy_hessian
        device = self.all_params()[0].device
        self.generator = torch.Generator(device).manual_seed(0)
        self.hess: dict[Tensor, Tensor] = {}
        for p in self.all_params():
            self.state[p]["hessian step"] = 0

    def probes(self, params):
        return [torch.randint(0, 2, p.size(), generator=self.generator, device=p.device) * 2.0 - 1.0 for p in params]

    def all_params(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def gradient_norm(self):
        norms = [(1.0 * p.grad).norm(p=2) for p in self.all_params() if p.grad is not None]
        return torch.norm(torch.stack(norms), p=2)

    @torch.no_grad()
    def ascend(self, norm):
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                e_w = p.grad * scale.to(p)
                p.add_(e_w)
                self.state[p]["e_w"] = e_w

    def perturb_weights(self, zero_grad=True):
        self.ascend(self.gradient_norm())
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def unperturb(self):
        for p in self.all_params():
            if "e_w" in self.state[p]:
                p.data.sub_(self.state[p]["e_w"])

    def clear_hessian(self):
        for p in self.all_params():
            if p in self.hess and self.state[p]["hessian step"] % self.lazy_hessian == 0:
                self.hess[p].zero_()

    @torch.no_grad()
    def set_hessian(self):
        due = []
        for p in self.all_params():
            if p.grad is None:
                continue
            if self.state[p]["hessian step"] % self.lazy_hessian == 0:
                due.append(p)
            self.state[p]["hessian step"] += 1
        if not due:
            return
        zs = self.probes(due)
        hzs = torch.autograd.grad([p.grad for p in due], due, grad_outputs=zs)
        for p, z, hz in zip(due, zs, hzs, strict=True):
            self.hess[p] = hz * z

    def reduce(self, tensors):
        """One collective per tensor where there are several processes; here, the question whether there are."""
        for t in tensors:
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(t)

    @torch.no_grad()
    def step(self):
        self.clear_hessian()
        self.set_hessian()
        self.reduce(p.grad for p in self.all_params() if p.grad is not None)
        self.reduce(self.hess.values())
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.hess[p] = self.hess[p].abs().clone()
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if "exp_avg" not in state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_hessian_diag"] = torch.zeros_like(p)
                state["step"] += 1
                m, d = state["exp_avg"], state["exp_hessian_diag"]
                m.mul_(beta1).add_(p.grad.detach(), alpha=1 - beta1)
                if (state["hessian step"] - 1) % self.lazy_hessian == 0:
                    d.mul_(beta2).add_(self.hess[p], alpha=1 - beta2)
                    state["bias_correction2"] = (1 - beta2 ** state["step"]) ** 0.5
                step_size = group["lr"] / (1 - beta1 ** state["step"])
                denom = ((d**0.5) / state["bias_correction2"]).add_(group["eps"])
                p.addcdiv_(m, denom, value=-step_size)
