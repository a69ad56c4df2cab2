"""What outsiders met between steps: zeroed gradients around remembered random numbers, resumed SAM, late errors."""

import copy

import pytest
import torch
from torch import nn
from training import assert_same_bits, closure_of, make_loss, make_net, snapshot

from sassha_fast import GSASSHA, SAM, SASSHA, AdaHessian


@pytest.mark.parametrize("order", ["zero_grad within", "zero_grad before backward"])
def test_random_numbers_are_replayed_wherever_gradients_are_zeroed(order):
    net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))
    masks = []
    net[1].register_forward_hook(lambda module, args, output: masks.append(output == 0))
    opt, x = SASSHA(net.parameters(), rho=0.05, lr=0.01), torch.randn(4, 8)

    def run(create_graph=False):
        with opt.replay_rng():
            if order == "zero_grad within":
                opt.zero_grad()
            loss = net(x).square().mean()
        if order != "zero_grad within":
            opt.zero_grad()
        loss.backward(create_graph=create_graph)

    for _ in range(3):
        run()
        opt.perturb_weights()
        run(create_graph=opt.hessian_due)
        opt.unperturb()
        opt.step()
        first, second = masks[-2:]
        assert torch.equal(first, second)
    assert not torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("unscales", [False, True])
def test_g_sassha_at_the_authors_point_is_the_same_with_a_loss_scale(unscales):
    def trained(scale):
        net = make_net(torch.float64)
        opt = GSASSHA(net.parameters(), lr=0.02, rho=0.05, alpha=0.3, lazy_hessian=2, hvp_point="upstream")
        loss, scaler = make_loss(net, torch.float64), torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scale)
        for _ in range(4):
            scaler.scale(loss()).backward()
            opt.perturb_weights()
            scaler.scale(loss()).backward(create_graph=opt.hessian_due)
            opt.unperturb(scaler=scaler)
            if unscales:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        return snapshot(net)

    for scaled, plain in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(scaled, plain, rtol=1e-9, atol=1e-12)


def test_a_resumed_sam_keeps_what_schedulers_and_users_put_into_its_groups():
    net = make_net()
    groups = [{"params": list(net.parameters()), "name": "all"}]
    opt = SAM(groups, torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10)
    saved = copy.deepcopy(opt.state_dict())
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["name"] == "all"
    opt.step(closure_of(opt, make_loss(net)))
    schedule.step()


def hyperparameters(opt):
    return [{key: value for key, value in group.items() if key != "params"} for group in opt.param_groups]


def test_a_base_optimizer_that_fails_leaves_clock_and_schedule_of_sam():
    net = make_net()
    opt = SAM(net.parameters(), torch.optim.SGD, lr=0.1, rho_scheduler=lambda t: 0.1 * (t + 1))
    before, groups = (
        snapshot(net),
        copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]),
    )

    def fail():
        raise MemoryError

    opt.base_optimizer.step = fail
    with pytest.raises(MemoryError):
        opt.step(closure_of(opt, make_loss(net)))
    assert_same_bits(snapshot(net), before)
    assert hyperparameters(opt) == groups


def test_the_advice_of_methods_without_an_ascent_can_be_followed():
    net = make_net()
    opt, scaler, loss = (
        AdaHessian(net.parameters(), lr=0.01),
        torch.amp.GradScaler("cpu", init_scale=4.0),
        make_loss(net),
    )

    def begun():
        opt.zero_grad()
        scaler.scale(loss()).backward(create_graph=True)

    begun()
    scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match=r"call take_products\(scaler=scaler\)"):
        scaler.step(opt)
    scaler.update()
    begun()
    opt.take_products(scaler=scaler)
    scaler.unscale_(opt)
    scaler.step(opt)
    assert opt.stats.refreshes == 1


def test_a_backend_that_is_assigned_is_checked():
    opt = SASSHA(make_net().parameters())
    with pytest.raises(ValueError, match="backend is 'nope', expected 'auto', 'fused' or one of"):
        opt.backend = "nope"
    assert opt.backend != "nope"
