"""Products of exactly 0 from passes in 16 bits, or from finite differences, are no curvatures."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import BACKENDS, DEVICE, assert_same_bits, closure_of, make_batch, make_net, snapshot

from sassha_fast import MSASSHA, SASSHA
from sassha_fast._core import descent
from sassha_fast._core.products import are_rounded, without_zeros
from sassha_fast._passes.layout import PROBE_GRADIENT
from sassha_fast._passes.reference import Products
from sassha_fast.reference import is_unknown

HESSIAN = "exp_hessian_diag"


def convolutional():
    torch.manual_seed(0)
    blocks = []
    for before, after in ((3, 16), (16, 16), (16, 16)):
        blocks += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).to(DEVICE)


def pictures():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 3, 12, 12, generator=generator).to(DEVICE)
    return x, torch.randint(0, 10, (32,), generator=generator).to(DEVICE)


def losses(net, opt, steps, enabled=True):
    x, y = pictures()

    def loss():
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            logits = net(x)
        return F.cross_entropy(logits.float(), y)

    return [opt.step(closure_of(opt, loss)).item() for _ in range(steps)]


@pytest.mark.filterwarnings("ignore:.*finite differences see curvature at the kinks")
@pytest.mark.parametrize("hvp", ["exact", "finite_difference", "central_difference"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_network_under_autocast_survives_its_lost_products(backend, hvp, monkeypatch):
    def train():
        net = convolutional()
        start = snapshot(net)
        opt = SASSHA(net.parameters(), lr=0.02, rho=0.05, eps=1e-9, hvp=hvp, backend=backend)
        opt.attach(net)
        seen = losses(net, opt, 1)
        lost = [is_unknown(opt.state[p][HESSIAN]) for p in net.parameters()]
        assert_same_bits(*([p[u] for p, u in zip(of, lost, strict=True)] for of in (snapshot(net), start)))
        largest = max(p.abs().max().item() for p in net.parameters())
        return opt, sum(u.sum().item() for u in lost), largest, seen + losses(net, opt, 11)

    opt, lost, largest, seen = train()
    assert 0 < lost < 0.05 * sum(p.numel() for p in opt.param_groups[0]["params"])
    assert opt.stats.refreshes == opt.stats.partial_refreshes == 2
    assert largest < 5
    assert max(seen) < seen[0] + 0.2
    assert seen[-1] < seen[0]
    monkeypatch.setattr(descent, "without_zeros", lambda products, grads, **_: products)
    _, lost, largest, _ = train()
    assert lost == 0
    assert largest > 1000  # a gradient over eps: what the rule is for


def test_float32_takes_exact_products_of_zero_as_they_are():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(8, 3)).to(DEVICE)
    rows = torch.tensor([[0, 1], [1, 2], [2, 0]], device=DEVICE)

    def train(**options):
        copied = copy.deepcopy(net)
        opt = SASSHA(copied.parameters(), lr=0.01, rho=0.05, weight_decay=0.1, **options)
        opt.step(closure_of(opt, lambda: F.cross_entropy(copied(rows), torch.arange(3, device=DEVICE))))
        return copied[0].weight, is_unknown(opt.state[copied[0].weight][HESSIAN]), opt

    weight, unknown, opt = train(unseen="zero")
    assert not unknown.any()
    assert not torch.equal(weight[3:], net[0].weight[3:])  # decay
    assert opt.stats.partial_refreshes == 0
    weight, unknown, opt = train(unseen="zero", hvp="finite_difference")
    assert unknown[3:].all()
    assert not unknown[:3].any()
    assert torch.equal(weight[3:], net[0].weight[3:])
    assert opt.stats.partial_refreshes == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_tell_by_their_graph_whether_they_were_rounded(dtype):
    net = convolutional()
    x, y = pictures()

    def found(enabled, casts=False):
        net.zero_grad()
        with torch.autocast(DEVICE, dtype, enabled=enabled):
            logits = net(x)
        if casts:  # from and to other formats, and sums, are no rounding to 16 bits
            logits = logits.double() + logits.double()
        F.cross_entropy(logits, y).backward(create_graph=True)
        return [are_rounded([p], [p.grad]) for p in net.parameters()]

    assert all(found(True))
    assert not any(found(False))
    assert not any(found(False, casts=True))
    net.zero_grad()


def test_parameters_of_16_bits_are_rounded():
    p, q = torch.ones(3, dtype=torch.bfloat16, device=DEVICE), torch.ones(3, device=DEVICE)
    assert are_rounded([p], [p])
    assert are_rounded([q, p], [q, p])
    assert not are_rounded([q], [q])  # without a graph


def test_zeros_of_either_sign_become_nan_and_differences_are_compared_with_the_gradient():
    p = nn.Parameter(torch.zeros(4, device=DEVICE))
    p.grad = torch.tensor([1.0, 2.0, 0.0, 3.0], device=DEVICE)
    value = torch.tensor([0.0, -0.0, 5.0, float("inf")], device=DEVICE)
    (got,) = without_zeros(Products([value], [0]), [p.grad], zero_is_seen=True).values
    assert got.isnan().tolist() == [True, True, False, False]
    assert torch.equal(got[2:], value[2:])
    probed = Products([torch.tensor([1.0, 2.5, 0.0, 3.0], device=DEVICE)], [PROBE_GRADIENT])
    assert without_zeros(probed, [p.grad], zero_is_seen=True).values[0].isnan().tolist() == [True, False, True, True]
    assert without_zeros(Products([None], [0]), [p.grad], zero_is_seen=True).values == [None]
    (kept,) = without_zeros(Products([torch.zeros(4, device=DEVICE)], [0]), [p.grad], zero_is_seen=False).values
    assert kept.isnan().tolist() == [True, True, False, True]  # without a gradient there was nothing to lose


def test_micro_batches_are_coarse_if_one_of_them_is():
    x, y = make_batch()

    def train(second):
        net = make_net().to(DEVICE)
        opt = SASSHA(net.parameters(), lr=0.02, rho=0.05)
        seen = []
        opt.parts.descent.update = lambda step, plan, curvature, amp: seen.append(curvature.coarse)

        def part(enabled):
            def closure():
                with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
                    loss = F.cross_entropy(net(x).float(), y) / 2
                loss.backward()
                return loss

            return closure

        opt.step([part(False), part(second)])
        return seen

    assert train(False) == [False]
    assert train(True) == [True]


def test_m_sassha_leaves_weights_without_curvature_alone():
    net = convolutional()
    before = snapshot(net)
    opt = MSASSHA(net.parameters(), lr=0.02, rho=0.05, eps=1e-9)
    opt.attach(net)
    values = losses(net, opt, 1)
    unknown = [is_unknown(opt.state[p][HESSIAN]) for p in net.parameters()]
    assert any(u.any() for u in unknown)
    opt.eval()
    assert_same_bits(*([p[u] for p, u in zip(of, unknown, strict=True)] for of in (snapshot(net), before)))
    opt.train()
    assert max(losses(net, opt, 11)) < values[0] + 0.5


@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
def test_a_parameter_all_of_whose_products_are_lost_does_not_make_every_step_a_refresh(hvp):
    torch.manual_seed(0)
    net = nn.Linear(6, 3).to(DEVICE)
    slope = nn.Parameter(torch.ones(4, device=DEVICE))
    x = torch.randn(8, 6, device=DEVICE)
    opt = SASSHA([*net.parameters(), slope], lr=0.01, rho=0.05, lazy_hessian=5, hvp=hvp)

    def loss():
        with torch.autocast(DEVICE, torch.bfloat16):
            steep = 2.0 + 0.0 * net.bias.sum()
            return net(x).float().square().mean() + (steep * slope).sum()  # linear in the slope

    seen = [opt.step(closure_of(opt, loss)).item() for _ in range(6)]
    assert (opt.stats.refreshes, opt.stats.skipped_refreshes) == (2, 0)
    assert torch.equal(slope, torch.ones_like(slope))
    assert seen[-1] < seen[0]


def test_a_parameter_whose_products_overflow_is_refreshed_in_the_next_step():
    net = make_net().to(DEVICE)
    opt = SASSHA(net.parameters(), lr=0.01, rho=0.05, lazy_hessian=5, hvp="finite_difference")
    x, y = make_batch()
    calls = []

    def loss():
        calls.append(1)
        value = F.cross_entropy(net(x), y)
        if len(calls) == 3:  # the probe of the first step
            value = value + float("nan") * net[0].bias.sum()
        return value

    for step in range(3):
        opt.step(closure_of(opt, loss))
        assert opt.stats.refreshes == min(step + 1, 2)
