"""What users of torch.optim expect: groups, schedulers, hooks, frozen, shared and unused parameters."""

import pytest
import torch
from training import (
    BACKENDS,
    assert_same_bits,
    make_loss,
    make_net,
    same_bits,
    snapshot,
    three_calls,
    train,
)

from sassha_fast import SASSHA


def trained(backend="auto", steps=12, lr=0.03, **options):
    net = make_net()
    opt = SASSHA(net.parameters(), lr=lr, rho=0.05, backend=backend, **options)
    train(net, opt, steps)
    return net, opt


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensor_lr_equals_the_number_and_is_read_at_every_step(backend):
    expected, _ = trained(backend, lr=0.03125)
    lr = torch.tensor(0.03125)
    found, opt = trained(backend, lr=lr)
    assert_same_bits(snapshot(found), snapshot(expected))
    before = snapshot(found)
    lr.zero_()
    three_calls(opt, make_loss(found))
    assert_same_bits(snapshot(found), before)


def test_learning_rate_schedulers_drive_the_step():
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.1, rho=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.0)
    loss = make_loss(net)
    three_calls(opt, loss)
    scheduler.step()
    before = snapshot(net)
    three_calls(opt, loss)
    assert_same_bits(snapshot(net), before)


def test_one_cycle_scheduler_may_cycle_the_first_beta():
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.01, rho=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.02, total_steps=12)
    loss = make_loss(net)
    betas = set()
    for _ in range(11):
        three_calls(opt, loss)
        scheduler.step()
        betas.add(opt.param_groups[0]["betas"][0])
    assert len(betas) > 5
    assert all(torch.isfinite(p).all() for p in net.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_rho_of_a_group_sets_the_length_of_its_ascent(backend):
    a, b = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
    opt = SASSHA([{"params": [a], "rho": 1.0}, {"params": [b], "rho": 0.0}], backend=backend)
    a.grad, b.grad = torch.full((4,), 3.0), torch.full((4,), 4.0)
    opt.perturb_weights()
    torch.testing.assert_close(a.detach(), torch.full((4,), 0.3))
    assert same_bits(b, torch.zeros(4))
    torch.testing.assert_close(opt.stats.predicted_gap.item(), 3.6, rtol=1e-6, atol=0)


def test_a_group_added_later_trains_and_gets_curvature_at_once():
    net = make_net()
    extra = torch.nn.Parameter(torch.ones(7))
    opt = SASSHA(net.parameters(), lr=0.03, rho=0.05)
    train(net, opt, 3)
    opt.add_param_group({"params": [extra], "lr": 0.5})
    base = make_loss(net)
    three_calls(opt, lambda: base() + (extra**4).sum())
    assert (extra < 1).all()
    assert opt.state[extra]["step"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_without_gradient_stay_and_get_no_state(backend):
    net = make_net()
    unused = torch.nn.Parameter(torch.ones(3))
    opt = SASSHA([*net.parameters(), unused], lr=0.03, rho=0.05, weight_decay=0.5, backend=backend)
    train(net, opt, 4)
    assert same_bits(unused, torch.ones(3))
    assert unused not in opt.state


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_may_come_and_go_between_steps_and_between_the_calls(backend):
    a, b = (torch.nn.Parameter(torch.rand(20) + 1) for _ in range(2))
    opt = SASSHA([a, b], lr=0.01, rho=0.05, lazy_hessian=2, backend=backend)
    for use_first, use_second in ((a, b), (b, a), (a, a), (b, b), (a, b)):
        weights = [a.detach().clone(), b.detach().clone()]
        (use_first**4).sum().backward()
        opt.perturb_weights()
        (use_second**4).sum().backward(create_graph=opt.hessian_due)
        opt.unperturb()
        assert_same_bits([a.detach(), b.detach()], weights)
        opt.step()
        opt.zero_grad()
        other = b if use_second is a else a
        assert same_bits(other, weights[0] if other is a else weights[1])
    assert opt.state[a]["step"] == 2
    assert opt.state[b]["step"] == 3


def test_frozen_parameters_stay_and_thaw():
    net = make_net()
    net[0].requires_grad_(False)
    opt = SASSHA(net.parameters(), lr=0.03, rho=0.05, lazy_hessian=3)
    before = snapshot(net)
    train(net, opt, 4)
    assert_same_bits(snapshot(net)[:2], before[:2])
    assert len(list(opt.get_params())) == 4
    net[0].requires_grad_(True)
    train(net, opt, 4)
    assert not same_bits(net[0].weight, before[0])


def test_shared_parameters_are_updated_once():
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(9, 6)
    head = torch.nn.Linear(6, 9, bias=False)
    head.weight = embedding.weight
    model = torch.nn.ModuleList([embedding, head])
    opt = SASSHA(model.parameters(), lr=0.03, rho=0.05)
    tokens = torch.arange(9)
    first = [
        three_calls(opt, lambda: torch.nn.functional.cross_entropy(head(embedding(tokens)), tokens.roll(1)))
        for _ in range(12)
    ]
    assert first[-1] < first[0]
    assert head.weight is embedding.weight
    assert len(opt.state) == 1


def test_step_hooks_run():
    net, opt = trained(steps=1)
    seen = []
    opt.register_step_pre_hook(lambda *_: seen.append("before"))
    opt.register_step_post_hook(lambda *_: seen.append("after"))
    three_calls(opt, make_loss(net))
    assert seen == ["before", "after"]


def test_nothing_is_hung_on_parameters():
    net = make_net()
    before = [set(vars(p)) for p in net.parameters()]
    opt = SASSHA(net.parameters(), rho=0.05)
    train(net, opt, 2)
    assert [set(vars(p)) for p in net.parameters()] == before


def test_gradient_clipping_between_the_calls_is_seen():
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.1, rho=0.05)
    loss = make_loss(net)
    loss().backward()
    opt.perturb_weights()
    loss().backward(create_graph=True)
    opt.unperturb()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-30)
    before = snapshot(net)
    opt.step()
    for p, b in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), b, rtol=0, atol=1e-20)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_and_zero_dimensional_parameters_train_beside_others(backend):
    scalar, empty, vector = (torch.nn.Parameter(torch.ones(s)) for s in ((), (0,), (5,)))
    opt = SASSHA([empty, scalar, vector, torch.nn.Parameter(torch.ones(0, 3))], lr=0.1, rho=0.05, backend=backend)
    for _ in range(3):
        three_calls(opt, lambda: scalar**4 + (vector**4).sum() + empty.sum())
    assert not opt.hessian_due
    assert scalar < 1
    assert (vector < 1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_with_gaps_in_memory_train_like_dense_ones(backend):
    results = []
    for strided in (False, True):
        torch.manual_seed(0)
        buffer = torch.rand(6, 8) + 1
        p = torch.nn.Parameter(buffer[:, ::2] if strided else buffer[:, ::2].clone())
        opt = SASSHA([p], lr=0.05, rho=0.05, lazy_hessian=2, backend=backend)
        for _ in range(5):
            three_calls(opt, lambda p=p: (p**4).sum())
        results.append([p.detach().contiguous()])
        if strided:
            assert same_bits(p, buffer[:, ::2])
    assert_same_bits(*results)


def test_mixed_dtypes_in_one_list_train_together():
    torch.manual_seed(0)
    params = [
        torch.nn.Parameter((torch.rand(50) + 1).to(d))
        for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    ]
    results = []
    for backend in BACKENDS:
        copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
        opt = SASSHA(copies, lr=0.05, rho=0.05, lazy_hessian=2, backend=backend)
        for _ in range(5):
            three_calls(opt, lambda copies=copies: sum((p.double() ** 4).sum() for p in copies))
        results.append([p.detach() for p in copies])
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_a_stepping_scheduler_in_the_authors_form_drives_the_power():
    class Stepping:
        def __init__(self):
            self.t = 0

        def step(self):
            self.t += 1
            return 0.5 + 0.1 * self.t

    net = make_net()
    opt = SASSHA(net.parameters(), rho=0.05)
    opt.hessian_power_scheduler = Stepping()
    train(net, opt, 2)
    assert opt.hessian_power_t == pytest.approx(0.7)
