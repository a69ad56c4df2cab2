"""The loop of the authors' GPT-2 script, and the one that docs/migrating.md makes of it: the same weights.

The loss is a sum over elements, so that the Hessian is diagonal and z⊙Hz is its diagonal whatever the probe.
"""

import pytest
import torch
from tolerances import SCALES_TOLERANCE
from torch import nn

from sassha_fast import SASSHA

STEPS, PARTS, LAZY, RHO_WARMUP, RHO, CLIP, LR, DECAY, BETAS = 13, 3, 4, 5, 0.05, 0.7, 0.1, 0.02, (0.965, 0.99)


def lr_at(t):
    """From 0 on, as in their script."""
    return LR * min(t / 4, 1.0)


def power_at(t):
    return 1.0 if t < 6 else 0.8


def make_params():
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(4, 3, dtype=torch.float64)), nn.Parameter(torch.randn(5, dtype=torch.float64))]


def batches(t):
    generator = torch.Generator().manual_seed(t)
    return [torch.rand(2, dtype=torch.float64, generator=generator) + 0.5 for _ in range(PARTS)]


def loss_of(params, batch):
    return sum((c * p.square() / 2 + 0.1 * p.pow(4) - p.sin()).sum() for c, p in zip(batch, params, strict=True))


def their_loop(params, stop=STEPS):
    """What their script computes, line by line in its order, in plain torch."""
    momentum, curvature = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    for t in range(stop):
        refresh, ascend = t % LAZY == 0, t > RHO_WARMUP
        hessian = [torch.zeros_like(p) for p in params]  # zero_hessian()

        def passes(differentiate, t=t, hessian=hessian):
            total = [torch.zeros_like(p) for p in params]
            for batch in batches(t):
                grads = torch.autograd.grad(loss_of(params, batch) / PARTS, params, create_graph=differentiate)
                if differentiate:  # set_hessian(), after every micro-batch
                    signs = [torch.randint(0, 2, p.shape) * 2.0 - 1.0 for p in params]
                    products = torch.autograd.grad(grads, params, signs)
                    for h, product, z in zip(hessian, products, signs, strict=True):
                        h += product * z
                for sum_, g in zip(total, grads, strict=True):
                    sum_ += g.detach()
            return total

        def clipped(grads):
            norm = torch.stack([g.norm() for g in grads]).norm()
            return [g * (CLIP / (norm + 1e-6)).clamp(max=1.0) for g in grads]

        grads = passes(refresh and not ascend)
        with torch.no_grad():
            if ascend:
                first = clipped(grads)
                norm = torch.stack([g.norm() for g in first]).norm()
                epsilon = [RHO / (norm + 1e-12) * g for g in first]
                for p, e in zip(params, epsilon, strict=True):
                    p += e
                with torch.enable_grad():
                    grads = passes(refresh)
                for p, e in zip(params, epsilon, strict=True):
                    p -= e
            for p, g, m, d, h in zip(params, clipped(grads), momentum, curvature, hessian, strict=True):
                p *= 1 - lr_at(t) * DECAY
                m.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
                if refresh:
                    d.mul_(BETAS[1]).add_(h.abs(), alpha=1 - BETAS[1])
                p -= lr_at(t) * m / (d ** power_at(t) + 1e-4)
    return momentum, curvature


def our_loop(params, stop=STEPS, opt=None, start=0):
    """The same after docs/migrating.md."""
    opt = opt or SASSHA(
        params,
        lr=LR,
        betas=BETAS,
        weight_decay=DECAY,
        lazy_hessian=LAZY,
        eps=1e-4,
        hessian_power_scheduler=power_at,
        rho_scheduler=lambda t: RHO if t > RHO_WARMUP else 0.0,
        bias_correction=False,
        max_grad_norm=CLIP,
        perturb_sync=True,
        grad_reduce="sum",
    )
    calls = []
    for t in range(start, stop):
        for group in opt.param_groups:
            group["lr"] = lr_at(t)

        def micro(batch):
            def closure():
                calls.append(batch)
                loss = loss_of(params, batch) / PARTS
                loss.backward()
                return loss

            return closure

        opt.step([micro(batch) for batch in batches(t)])
        opt.zero_grad(set_to_none=True)
    return opt, calls


def test_the_migrated_loop_takes_the_steps_of_theirs():
    theirs, ours = make_params(), make_params()
    momentum, curvature = their_loop(theirs)
    opt, calls = our_loop(ours)
    for p, q, m, d in zip(theirs, ours, momentum, curvature, strict=True):
        torch.testing.assert_close(q, p, **SCALES_TOLERANCE)
        torch.testing.assert_close(opt.state[q]["exp_avg"], m, **SCALES_TOLERANCE)
        torch.testing.assert_close(opt.state[q]["exp_hessian_diag"], d, **SCALES_TOLERANCE)
    assert len(calls) == PARTS * (STEPS + STEPS - RHO_WARMUP - 1)  # one pass while rho is 0, then two
    assert opt.param_groups[0]["rho"] == RHO  # their opt.rho_t
    assert opt.hessian_power_t == power_at(STEPS - 1)
    assert opt.stats.refreshes == -(-STEPS // LAZY)


def test_the_migrated_loop_resumes_bit_for_bit_without_another_refresh():
    whole, half = make_params(), make_params()
    our_loop(whole)
    opt, _ = our_loop(half, stop=6)
    saved, weights = opt.state_dict(), [p.detach().clone() for p in half]
    again = make_params()
    for p, w in zip(again, weights, strict=True):
        p.data.copy_(w)
    fresh, _ = our_loop(again, stop=0)
    fresh.load_state_dict(saved)
    our_loop(again, opt=fresh, start=6)
    assert all(torch.equal(p, q) for p, q in zip(whole, again, strict=True))


def test_a_checkpoint_of_their_script_loads_and_goes_on():
    theirs, ours, whole = make_params(), make_params(), make_params()
    momentum, curvature = their_loop(theirs, stop=7)
    their_loop(whole)
    group = {"lr": LR, "betas": BETAS, "weight_decay": DECAY, "perturb_eps": 1e-12, "eps": 1e-4, "params": [0, 1]}
    state = {
        i: {"hessian step": 2 * PARTS, "e_w": p.detach(), "step": 7, "exp_avg": m, "exp_hessian_diag": d}
        for i, (p, m, d) in enumerate(zip(theirs, momentum, curvature, strict=True))
    }
    for p, q in zip(theirs, ours, strict=True):
        q.data.copy_(p.data)
    opt, _ = our_loop(ours, stop=0)
    opt.load_state_dict({"state": state, "param_groups": [group]})
    for each in opt.param_groups:  # they count for themselves, and their checkpoint has nothing of it
        each["power_step"] = each["rho_step"] = 7
    our_loop(ours, opt=opt, start=7)
    for p, q in zip(whole, ours, strict=True):
        torch.testing.assert_close(q, p, **SCALES_TOLERANCE)


def test_what_their_script_calls_and_ours_has_not_is_an_error_at_once():
    opt, _ = our_loop(make_params(), stop=1)
    for name in ("zero_hessian", "set_hessian", "_sync_gradient", "rho_t"):
        with pytest.raises(AttributeError, match=name):
            getattr(opt, name)
    with pytest.raises(TypeError, match=r"SASSHA\.step: closure is 7, expected a function"):
        opt.step(7)  # their step(iter_num)
    with pytest.raises(TypeError, match=r"SASSHA\.step: closure is 0, expected a function"):
        opt.step(0)
