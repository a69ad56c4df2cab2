"""``suggest`` finds hyperparameters to begin with, follows the scale of the loss, and leaves everything as it was."""

import copy
import io
import math
import sys

import pytest
import torch
import zoo
from torch import nn
from torch.nn import functional as F
from training import assert_same_bits, assert_same_state, closure_of, make_loss, make_net, snapshot, state_of

import sassha_fast
from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH, suggest
from sassha_fast._measure.trial import Trial

QUICK = {"steps": 8}


def closures_of(net, factor=1.0, count=3, dtype=torch.float32):
    """Closures of several batches, which zero nothing."""

    def closure(loss):
        def run():
            value = factor * loss()
            value.backward()
            return value

        return run

    return [closure(make_loss(net, dtype, seed)) for seed in range(1, count + 1)]


def everything(model, opt=None):
    """All that has to stay, and the gradients themselves."""
    tensors = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    grads = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in grads]
    return tensors, grads, values, torch.get_rng_state(), None if opt is None else copy.deepcopy(opt.state_dict())


def assert_unchanged(model, before, opt=None):
    after = everything(model, opt)
    for a, b in zip(after[0], before[0], strict=True):
        assert torch.equal(a, b)
    assert all(a is b for a, b in zip(after[1], before[1], strict=True))
    for a, b in zip(after[2], before[2], strict=True):
        assert a is b is None or torch.equal(a, b)
    assert torch.equal(after[3], before[3])
    if opt is not None:
        assert after[4]["param_groups"] == before[4]["param_groups"]
        assert_same_state(list(after[4]["state"].values()), list(before[4]["state"].values()))


@pytest.mark.parametrize("name", zoo.MODELS)
def test_nothing_is_changed(name):
    model, loss = zoo.make(name)
    loss().backward()  # gradients of somebody else

    def closure():
        model.zero_grad(set_to_none=False)
        value = loss()
        value.backward()
        return value

    before = everything(model)
    found = suggest(model, closure, **QUICK)
    assert_unchanged(model, before)
    assert found.lr > 0
    assert model.training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("fails_at", [1, 2, 7, 15, 23])
def test_nothing_is_changed_by_an_exception_either(fails_at):
    model, loss = zoo.make("cnn_with_batchnorm")
    loss().backward()
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        value = loss()
        value.backward()
        if calls == fails_at:
            raise KeyboardInterrupt
        return value

    before = everything(model)
    with pytest.raises(KeyboardInterrupt):
        suggest(model, closure, **QUICK)
    assert calls == fails_at
    assert_unchanged(model, before)


@pytest.mark.parametrize("method", [SASSHA, GSASSHA, MSASSHA, AdaHessian, SophiaH])
def test_an_optimizer_keeps_its_state_and_goes_on_as_if_nothing_had_been(method):
    results = []
    for asked in (False, True):
        net = make_net()
        opt = method(net.parameters(), lr=0.01, lazy_hessian=2)
        opt.attach(net)
        closure = closure_of(opt, make_loss(net))
        for _ in range(3):
            opt.step(closure)
        if asked:
            before = everything(net, opt)
            found = suggest(opt, closures_of(net), **QUICK)
            assert_unchanged(net, before, opt)
            assert found.optimizer == method.__name__
            assert (found.rho is None) == (method in (AdaHessian, SophiaH, MSASSHA))
            assert opt.stats.refreshes == 2
        for _ in range(3):
            opt.step(closure)
        results.append((snapshot(net), state_of(opt)))
    assert_same_bits(results[0][0], results[1][0])
    assert_same_state(results[0][1], results[1][1])


def test_weights_that_are_not_trained_have_no_part_in_it():
    net = make_net()
    net[0].requires_grad_(False)
    opt = SASSHA(net[2:].parameters())
    opt.attach(net)
    alone = suggest(opt, closures_of(net), **QUICK)
    opt = SASSHA([*net[2:].parameters(), *net[0].parameters()])  # signs of probes go by position
    opt.attach(net)
    assert suggest(opt, closures_of(net), **QUICK) == alone


def test_both_move_the_weights_as_far():
    """One batch, one step: AdamW moves every weight by its learning rate, and SASSHA by the gradient over √D."""
    net = make_net(torch.float64)
    found = suggest(net, closures_of(net, count=1, dtype=torch.float64), steps=1, adamw_lr=3e-4)
    opt = SASSHA(net.parameters(), lr=found.lr * 2**found.halvings)
    x = snapshot(net)
    opt.step(closure_of(opt, make_loss(net, torch.float64)))
    moved = torch.cat([(p - q).flatten() for p, q in zip(snapshot(net), x, strict=True)]).square().mean().sqrt()
    assert found.adamw_size == pytest.approx(1.0, rel=1e-3)
    assert moved.item() == pytest.approx(3e-4, rel=1e-3)
    assert found.lr * 2**found.halvings == pytest.approx(3e-4 * found.adamw_size / found.size)


def test_weight_decay_takes_off_as_much_in_every_step():
    net = make_net()
    found = suggest(net, closures_of(net), adamw_lr=2e-3, adamw_weight_decay=0.1, **QUICK)
    assert found.weight_decay * found.lr == pytest.approx(2e-3 * 0.1)


def trained(factor, found):
    net = make_net(torch.float64)
    opt = SASSHA(net.parameters(), lr=found.lr, rho=found.rho, weight_decay=found.weight_decay, eps=found.eps)
    loss = make_loss(net, torch.float64)
    for _ in range(12):
        opt.step(closure_of(opt, lambda: factor * loss()))
    return snapshot(net)


def test_a_loss_times_64_is_trained_the_same_by_what_is_suggested_for_it():
    """D is 64 times as large, so the update is 8 times as long, and eps has to be 8 times as large too."""
    net = make_net(torch.float64)
    plain = suggest(net, closures_of(net, 1.0, dtype=torch.float64), **QUICK)
    scaled = suggest(net, closures_of(net, 64.0, dtype=torch.float64), eps=8e-4, **QUICK)
    assert scaled.lr == pytest.approx(plain.lr / 8, rel=1e-4)
    assert scaled.rho == plain.rho
    assert scaled.weight_decay == pytest.approx(8 * plain.weight_decay, rel=1e-4)
    assert scaled.eps_share == plain.eps_share
    for a, b in zip(trained(64.0, scaled), trained(1.0, plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    # With the same eps it is nearly so, as long as eps is small beside the root of the curvature.
    assert suggest(net, closures_of(net, 64.0, dtype=torch.float64), **QUICK).lr == pytest.approx(
        plain.lr / 8, rel=0.02
    )


def test_a_loss_so_small_that_eps_rules_is_told():
    net = make_net()
    found = suggest(net, closures_of(net, 1e-8), **QUICK)
    assert found.eps_share > 0.9
    assert "is larger than the denominator" in str(found)
    told = suggest(net, closures_of(net, 1e-8), eps=found.denominator / 100, **QUICK)
    assert told.eps_share < 0.1
    assert "is larger than the denominator" not in str(told)
    assert f"eps={told.eps:g})" in told.line()


def test_rho_is_the_largest_whose_rise_is_predicted_and_modest():
    net = make_net()
    found = suggest(net, closures_of(net), **QUICK)
    *modest, last = found.rises
    assert all(rise.is_modest(found.first_loss) for rise in modest)
    assert found.rho == (last.rho if last.is_modest(found.first_loss) else modest[-1].rho)
    for rise in found.rises:
        assert rise.predicted / rise.rho == pytest.approx(found.rises[0].predicted / found.rises[0].rho, rel=1e-3)


def test_a_learning_rate_at_which_the_loss_rises_is_halved(monkeypatch):
    net = make_net()
    plain = suggest(net, closures_of(net), **QUICK)
    assert plain.halvings == 0
    trial = Trial
    take = trial.with_it
    monkeypatch.setattr(
        trial, "with_it", lambda self, lr, *rest: math.inf if lr > plain.lr / 3 else take(self, lr, *rest)
    )
    found = suggest(net, closures_of(net), **QUICK)
    assert found.halvings == 2
    assert found.lr == plain.lr / 4
    assert found.weight_decay == 4 * plain.weight_decay
    assert f"At {plain.lr:.2g} the loss rose on trial, so the learning rate was halved 2 times" in str(found)


def test_a_learning_rate_at_which_old_curvatures_let_the_loss_leap_is_halved():
    pytest.importorskip("sklearn")
    from examples import first_hour

    torch.manual_seed(0)
    model, batches = first_hour.build_model(), first_hour.data(60)
    found = suggest(model, first_hour.closures(model, batches[:8]), adamw_lr=10**-1.5)
    assert found.halvings
    opt = SASSHA(model.parameters(), lr=found.lr, rho=found.rho, weight_decay=found.weight_decay)
    losses = [opt.step(closure).item() for closure in first_hour.closures(model, batches)]
    assert max(losses) < 1.5 * losses[0]
    assert sum(losses[-8:]) / 8 < 1.0


def test_a_learning_rate_that_adamw_can_not_train_with_is_told():
    net = make_net()
    assert "AdamW's loss rose at 1: give a smaller adamw_lr." in str(
        suggest(net, closures_of(net), adamw_lr=1.0, **QUICK)
    )


def test_the_line_to_paste_runs():
    net = make_net()
    for options in ({}, {"eps": 1e-3}, {"hessian_power": 1.0, "max_grad_norm": 0.5, "hvp": "finite_difference"}):
        found = suggest(net, closures_of(net), **QUICK, **options)
        namespace = {"SASSHA": SASSHA, "model": net}
        exec(str(found)[str(found).index("opt = ") :], namespace)
        group = namespace["opt"].param_groups[0]
        for name in ("lr", "rho", "weight_decay", "eps"):
            assert group[name] == pytest.approx(getattr(found, name), rel=0.05)
        for name, value in options.items():  # lr is of use with them alone
            assert (group[name] if name in group else getattr(namespace["opt"], name)) == value


def test_of_an_optimizer_the_line_says_what_to_change():
    net = make_net()
    decayed = {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1}
    opt = SASSHA([decayed, {"params": [p for p in net.parameters() if p.dim() < 2]}], rho=0.05)
    opt.attach(net)
    line = suggest(opt, closures_of(net), **QUICK).line()
    assert line.startswith("opt = SASSHA(..., lr=")
    assert "model.parameters()" not in line


def test_a_loss_that_hardly_falls_on_trial_is_told():
    net = make_net()
    x, y = torch.randn(64, 12), torch.randn(64, 3)

    def closure():
        loss = (net(x) - y).abs().mean()  # linear in pieces: its curvature says little
        loss.backward()
        return loss

    found = suggest(net, closure, adamw_lr=0.01)
    fell = found.first_loss - found.loss
    assert fell < (found.first_loss - found.adamw_loss) / 3
    assert "where AdamW's fell by" in str(found)
    assert "where AdamW's fell by" not in str(suggest(net, closures_of(net), steps=16))


def test_a_rise_that_is_predicted_but_large_beside_the_loss_is_no_lack_of_precision():
    net = make_net()

    def shifted(closure):
        def run():
            return closure() - start

        return run

    batches = closures_of(net)
    start = batches[0]().item() - 1e-3
    found = suggest(net, [shifted(batch) for batch in batches[:1]], **QUICK)
    assert "choose rho yourself" in str(found)
    assert "float32" not in str(found)


def test_where_there_is_no_curvature_no_other_eps_is_advised():
    net = nn.Linear(4, 1)
    x = torch.randn(16, 4)

    def closure():
        loss = net(x).relu().mean()
        loss.backward()
        return loss

    found = suggest(net, closure, **QUICK)
    assert found.denominator == 0
    assert "have no curvature" in str(found)
    assert "Try eps" not in str(found)


@pytest.mark.parametrize("inference", [False, True])
def test_buffers_that_nobody_can_write_to_stay(inference):
    net = make_net()
    with torch.inference_mode(inference):
        mask = torch.ones(1, 1) if inference else torch.ones(1, 1).expand(8, 8)
    net.register_buffer("mask", mask)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    before = everything(net)
    assert suggest(net, closures_of(net), **QUICK).lr > 0
    assert_unchanged(net, before)
    assert net.mask is mask


def test_grad_mode_comes_back_from_an_interrupt_within_it():
    net = make_net()

    def closure():
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    before = everything(net)
    with pytest.raises(KeyboardInterrupt):
        suggest(net, closure, **QUICK)
    assert torch.is_grad_enabled()
    assert_unchanged(net, before)


def test_products_without_a_graph_and_reduced_precision_work():
    net = make_net()
    exact = suggest(net, closures_of(net), steps=16)
    assert suggest(net, closures_of(net), steps=16, hvp="finite_difference").lr == pytest.approx(exact.lr, rel=0.1)
    rough = make_net(torch.bfloat16)
    x = torch.randn(32, 12).bfloat16()

    def closure():
        loss = F.cross_entropy(rough(x).float(), torch.arange(32) % 3)
        loss.backward()
        return loss

    before = snapshot(rough)
    assert math.isfinite(suggest(rough, closure, **QUICK).lr)
    assert_same_bits(snapshot(rough), before)


def test_progress_is_told_where_it_is_asked_for(capsys, monkeypatch):
    net = make_net()
    suggest(net, closures_of(net), **QUICK)
    assert capsys.readouterr().err == ""
    suggest(net, closures_of(net), progress=True, **QUICK)
    assert "AdamW, step 8 of 8" in capsys.readouterr().err

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    suggest(net, closures_of(net), **QUICK)
    assert "SASSHA, step 8 of 8" in terminal.getvalue()


def test_what_it_can_not_work_with_is_said():
    net = make_net()
    closures = closures_of(net)
    with pytest.raises(
        TypeError, match=r"target is a list, expected a torch.nn.Module, or an optimizer of sassha_fast"
    ):
        suggest([], closures)
    with pytest.raises(TypeError, match="target is a SAM, expected"):
        suggest(SAM(net.parameters(), torch.optim.SGD, lr=0.1), closures)
    with pytest.raises(TypeError, match=r"no model is attached to SASSHA.* call opt.attach\(model\) before"):
        suggest(SASSHA(net.parameters()), closures)
    for bad in (3, [], [3]):
        with pytest.raises(TypeError, match=r"suggest: closures is .*, expected a function"):
            suggest(net, bad)
    with pytest.raises(TypeError, match=r"suggest: closures\[1\] returned None, expected the loss"):
        suggest(net, [closures[0], lambda: None])
    with pytest.raises(TypeError, match=r"suggest: \['lr'\] can't be given"):
        suggest(net, closures, lr=0.1)
    opt = SASSHA(net.parameters(), rho=0.1)
    opt.attach(net)
    with pytest.raises(TypeError, match=r"suggest: \['eps'\] can't be given beside an optimizer"):
        suggest(opt, closures, eps=0.1)
    with pytest.raises(ValueError, match="maximize is True, but trials compare losses that are to fall"):
        suggest(net, closures, maximize=True)
    for name, value in (("adamw_lr", 0.0), ("adamw_weight_decay", -1.0), ("steps", 0)):
        with pytest.raises(ValueError, match=f"suggest: {name} is"):
            suggest(net, closures, **{name: value})
    with pytest.raises(FloatingPointError, match=r"the loss of closures\[0\] is nan at the weights as they"):
        suggest(net, closures_of(net, math.nan))
    with pytest.raises(RuntimeError, match=r"no parameter has a gradient|can't be compared|no gradient has a graph"):
        suggest(net, lambda: 1.0)
    closures[0]()
    opt.perturb_weights()
    with pytest.raises(RuntimeError, match="while the weights are perturbed"):
        suggest(opt, closures)
    opt.zero_grad()


def test_a_wrapped_model_is_refused(monkeypatch):
    class Wrapped(nn.Linear):
        pass

    monkeypatch.setattr(sassha_fast.suggestion, "DistributedDataParallel", Wrapped)
    with pytest.raises(TypeError, match="the model is a DistributedDataParallel, but one process is enough"):
        suggest(Wrapped(2, 2), lambda: 0.0)


def test_which_batch_comes_first_is_of_no_matter():
    """Losses are compared with those of the same batches: one batch may be easier than the others."""
    torch.manual_seed(0)
    x = torch.randn(64, 20)
    y = x.sum(1)
    model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 1))

    def closure(rows):
        def run():
            loss = F.mse_loss(model(x[rows])[:, 0], y[rows])
            loss.backward()
            return loss

        return run

    few = [closure(slice(i, None, 8)) for i in range(8)]
    found = [suggest(model, few[k:] + few[:k]) for k in range(0, 8, 2)]
    assert not any(each.halvings for each in found)
    assert not any("AdamW's loss rose" in str(each) for each in found)
    rates = [each.lr for each in found]
    assert max(rates) < 3 * min(rates)


def test_a_suggestion_that_did_not_train_says_so():
    net = make_net()
    found = suggest(net, closures_of(net), adamw_lr=1e3, **QUICK)
    assert f"The loss still rose on trial at {found.lr:.2g}, after 4 halvings: don't train with this" in str(found)
    assert "begin with a warm-up" not in str(found)


def test_an_ascent_that_can_not_be_measured_says_so():
    net = make_net().bfloat16()
    x, y = torch.randn(16, 12).bfloat16(), torch.randint(0, 3, (16,))

    def closure():
        loss = F.cross_entropy(net(x), y)  # in bfloat16, whose steps are larger than the rise
        loss.backward()
        return loss

    found = suggest(net, closure, **QUICK)
    assert found.rho == found.rises[0].rho
    assert f"Even rho={found.rho:g} raises the loss by" in str(found)


def test_models_without_weights_to_train_are_named():
    net = make_net()
    for p in net.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="suggest: the model has no parameter that requires a gradient; unfreeze"):
        suggest(net, lambda: torch.zeros(()))
    with pytest.raises(ValueError, match="suggest: the model has lazy parameters; run a forward pass"):
        suggest(nn.LazyLinear(3), lambda: torch.zeros(()))


def test_modes_that_a_closure_sets_are_put_back():
    net = make_net()
    loss = make_loss(net)

    def closure():
        net.eval()
        value = loss()
        value.backward()
        net[0].bias.requires_grad_(True)
        return value

    suggest(net, closure, **QUICK)
    assert all(module.training for module in net.modules())


def test_groups_without_decay_stay_without(monkeypatch):
    net = make_net()
    weights, biases = ([p for p in net.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    opt = SASSHA([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.1, weight_decay=0.1)
    opt.attach(net)
    seen = []
    plain = sassha_fast.suggestion._like

    def noting(*arguments):
        found = plain(*arguments)
        seen.append([group["weight_decay"] for group in found.param_groups])
        return found

    monkeypatch.setattr(sassha_fast.suggestion, "_like", noting)
    suggest(opt, closures_of(net), **QUICK)
    assert any(first > 0 for first, _ in seen)
    assert not any(second for _, second in seen)
