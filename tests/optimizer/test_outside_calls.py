"""What user code does between the calls of a step: skips by hand, second interrupts, looks at the true weights."""

import signal

import pytest
import torch
from torch import nn
from training import assert_same_bits, closure_of, same_bits

from sassha_fast import MSASSHA, SASSHA, AdaHessian, SophiaH
from sassha_fast._passes.plan import Plan

ONE, TARGET = torch.tensor(1.0), torch.tensor(1 - 0.9j)


def start(method, **options):
    torch.manual_seed(0)
    net, x = nn.Linear(4, 2), torch.randn(8, 4)
    opt = method(net.parameters(), **{"lr": 0.01, **options})
    return net, opt, lambda scale=1.0: net(scale * x).square().sum()


# ---- skipped steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", ["opt.zero_grad()", "net.zero_grad()", "by hand"])
@pytest.mark.parametrize("method", [SASSHA, MSASSHA, AdaHessian, SophiaH])
def test_products_of_a_skipped_step_are_not_used_whoever_zeroes_gradients(method, skip):
    found = []
    for skips in (False, True):
        net, opt, loss = start(method)
        if skips:
            loss(100.0).pow(2).backward(create_graph=True)
            opt.take_products()
            if skip == "by hand":
                net.weight.grad = net.bias.grad = None
            else:
                eval(skip, {"opt": opt, "net": net})
        loss().backward(create_graph=opt.hessian_due)
        opt.step()
        found.append(opt.state[net.weight]["exp_hessian_diag"].clone())
    assert_same_bits(found[1:], found[:1])


@pytest.mark.parametrize("skip", ["opt.zero_grad()", "net.zero_grad()", "by hand", "an exception"])
def test_random_numbers_of_a_skipped_pass_are_not_replayed(skip):
    torch.manual_seed(0)
    net, x, masks = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 2)), torch.randn(8, 4), []
    opt = SASSHA(net.parameters(), lr=0.01, rho=0.1)
    net[1].register_forward_hook(lambda module, args, out: masks.append(out == 0))
    try:
        with opt.replay_rng():
            net(x).sum().backward()
            if skip == "an exception":
                raise MemoryError
    except MemoryError:
        opt.zero_grad()
    if skip == "by hand":
        for p in net.parameters():
            p.grad = None
    elif skip != "an exception":
        eval(skip, {"opt": opt, "net": net})
    masks.clear()
    with opt.replay_rng():
        net(x).square().sum().backward()
    opt.perturb_weights()
    with opt.replay_rng():
        net(x).square().sum().backward(create_graph=True)
    opt.unperturb()
    opt.step()
    assert torch.equal(*masks)


# ---- a second interrupt -------------------------------------------------------------------------------------------


def interrupted_twice(monkeypatch, action):
    """Ctrl-C when the ascent has run, and again on the way back."""
    perturb, restore = Plan.perturb, Plan.restore

    def once(self, *args, **options):
        perturb(self, *args, **options)
        signal.raise_signal(signal.SIGINT)

    def again(self):
        monkeypatch.setattr(Plan, "restore", restore)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Plan, "perturb", once)
    monkeypatch.setattr(Plan, "restore", again)
    with pytest.raises(KeyboardInterrupt):
        action()
    monkeypatch.setattr(Plan, "perturb", perturb)


@pytest.mark.parametrize("following", ["state_dict", "step", "zero_grad"])
@pytest.mark.parametrize("way", ["calls", "closure"])
def test_a_second_interrupt_on_the_way_back_is_dealt_with_by_the_next_call(way, following, monkeypatch):
    net, opt, loss = start(SASSHA, lr=0.0, rho=0.5)
    before = net.weight.detach().clone()
    if way == "calls":
        loss().backward()
        interrupted_twice(monkeypatch, opt.perturb_weights)
        assert not same_bits(net.weight, before)
    else:
        interrupted_twice(monkeypatch, lambda: opt.step(closure_of(opt, loss)))
    if following == "step":
        opt.step(closure_of(opt, loss))
    else:
        getattr(opt, following)()
    assert same_bits(net.weight, before)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("method", [SASSHA, MSASSHA])
def test_a_second_interrupt_after_the_update_leaves_it_to_be_finished(method, monkeypatch):
    net, opt, loss = start(method, rho=0.1)
    twin, other, other_loss = start(method, rho=0.1)
    other.step(closure_of(other, other_loss))
    update, calls = Plan.step, []

    def signalled(self, *args, **options):
        update(self, *args, **options)
        calls.append(1)
        if len(calls) < 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Plan, "step", signalled)
    with pytest.raises(KeyboardInterrupt):
        opt.step(closure_of(opt, loss))
    assert opt.state_dict()["state"][0]["step"] == 1
    assert_same_bits(list(net.parameters()), list(twin.parameters()))


# ---- true weights of M-SASSHA -------------------------------------------------------------------------------------


def true_weights(net, opt):
    with opt.true_weights():
        return net.weight.detach().clone()


def m_sassha(**options):
    net, opt, loss = start(MSASSHA, **{"lr": 0.0, "rho": 0.5, **options})
    for _ in range(2):
        opt.step(closure_of(opt, loss))
    return net, opt, loss, true_weights(net, opt)


def test_eval_within_a_closure_is_refused_and_x_is_kept():
    net, opt, loss, x = m_sassha()

    def looks():
        opt.zero_grad()
        value = loss()
        value.backward()
        opt.eval()
        return value

    with pytest.raises(RuntimeError, match=r"MSASSHA.step: the parameters hold the true weights since eval"):
        opt.step(looks)
    opt.train()
    assert same_bits(true_weights(net, opt), x)


@pytest.mark.parametrize("call", ["probe_weights", "take_products", "step"])
def test_no_call_of_a_step_works_on_the_true_weights(call):
    net, opt, loss, x = m_sassha(hvp="finite_difference", lazy_hessian=1)
    opt.eval()
    loss().backward()
    with pytest.raises(RuntimeError, match=rf"MSASSHA.{call}: the parameters hold the true weights since eval\(\)"):
        getattr(opt, call)()
    saved = opt.state_dict()
    assert same_bits(saved["state"][0]["weight"], x)
    opt.train()
    assert same_bits(true_weights(net, opt), x)


def test_loading_a_checkpoint_without_state_leaves_x_in_the_parameters():
    net, opt, _, x = m_sassha()
    opt.load_state_dict(MSASSHA(net.parameters(), lr=0.0, rho=0.5).state_dict())
    assert same_bits(net.weight, x)


def test_a_refused_checkpoint_leaves_x_plus_epsilon():
    net, opt, _, _ = m_sassha()
    before = net.weight.detach().clone()
    with pytest.raises((ValueError, TypeError, KeyError)):
        opt.load_state_dict({"state": {0: {"nonsense": 1}}, "param_groups": opt.state_dict()["param_groups"]})
    assert same_bits(net.weight, before)


@pytest.mark.parametrize("what", ["step", "eval and train"])
def test_weights_loaded_over_x_plus_epsilon_are_noticed(what):
    net, opt, loss, _ = m_sassha()
    if what == "eval and train":
        opt.eval()
        opt.train()
    net.load_state_dict({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)})
    with pytest.raises(RuntimeError, match="changed in place while holding"):
        opt.step(closure_of(opt, loss))


@pytest.mark.parametrize("call", ["eval", "train"])
def test_an_interrupted_look_at_the_true_weights_changes_nothing(call, monkeypatch):
    net, opt, loss, x = m_sassha()
    held = net.weight.detach().clone()
    if call == "train":
        opt.eval()
    name = "show_x" if call == "eval" else "momentum_ascent"
    moves = getattr(Plan, name)

    def signalled(self, *args):
        monkeypatch.setattr(Plan, name, moves)
        moves(self, *args)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Plan, name, signalled)
    with pytest.raises(KeyboardInterrupt):
        getattr(opt, call)()
    assert not opt.evaluating
    assert same_bits(net.weight, held)
    assert same_bits(true_weights(net, opt), x)
    opt.step(closure_of(opt, loss))


# ---- groups and gradients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "foreach", "cpu"])
def test_a_parameter_that_changes_its_group_has_the_new_hyperparameters(backend):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(8, 4)
    params = list(net.parameters())
    groups = [{"params": params[:3], "lr": 0.01}, {"params": params[3:], "lr": 0.0}]
    opt = SASSHA(groups, rho=0.1, backend=backend)
    closure = closure_of(opt, lambda: net(x).square().sum())
    opt.step(closure)
    opt.param_groups[1]["params"].insert(0, opt.param_groups[0]["params"].pop())
    before = params[2].detach().clone()
    opt.step(closure)
    assert same_bits(params[2], before)


@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
def test_gradients_with_torchs_negative_bit_are_read_with_their_sign(hvp):
    found = []
    for backend in ("reference", "foreach", "cpu"):
        q = nn.Parameter(torch.tensor(0.5))
        opt = SASSHA([q], lr=0.05, rho=0.01, lazy_hessian=5, hvp=hvp, backend=backend)
        for _ in range(10):
            opt.step(closure_of(opt, lambda q=q: (torch.complex(ONE, q).conj() - TARGET).abs() ** 2))
        assert q.grad.abs() > 0
        found.append(q.detach().clone())
    assert found[0] > 0.5
    assert_same_bits(found[1:], found[:1] * 2)


def test_rho_without_an_ascent_is_warned_of_once():
    _, opt, loss = start(SASSHA, rho=0.05)
    loss().backward(create_graph=True)
    with pytest.warns(
        UserWarning, match=r"SASSHA.step: rho is 0.05, but the weights were not perturbed.*step\(closure"
    ):
        opt.step()
    opt.zero_grad()
    loss().backward()
    opt.step()  # filterwarnings makes an error of a second one


@pytest.mark.parametrize("method", [MSASSHA, AdaHessian, SophiaH])
def test_methods_without_an_ascent_of_their_own_do_not_warn(method):
    net, opt, loss = start(method)
    loss().backward(create_graph=True)
    opt.step()
    assert opt.state[net.weight]["step"] == 1


@pytest.mark.parametrize("backend", ["reference", "foreach", "cpu"])
def test_a_skipped_refresh_of_a_capturable_optimizer_is_still_due(backend):
    net, opt, loss = start(SASSHA, rho=0.05, capturable=True, skip_nonfinite=True, lazy_hessian=5, backend=backend)
    before = net.weight.detach().clone()
    opt.step(closure_of(opt, lambda: loss() * float("nan")))
    assert same_bits(net.weight, before)
    assert opt.hessian_due
    assert (opt.stats.refreshes, opt.stats.skipped_refreshes) == (0, 1)
    assert opt.state[net.weight]["bias_correction2"] == 0
    opt.step(closure_of(opt, loss))
    assert opt.stats.refreshes == 1
    assert opt.state[net.weight]["step"] == 1


@pytest.mark.parametrize("way", ["calls", "closure"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_differences_of_short_channels_last_weights_are_the_same_on_every_backend(dtype, way):
    found = []
    for backend in ("reference", "foreach", "cpu"):
        torch.manual_seed(0)
        conv, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 6, 6).to(dtype).to(memory_format=torch.channels_last)
        conv.to(dtype).to(memory_format=torch.channels_last)
        opt = SASSHA(conv.parameters(), lr=0.01, rho=0.05, hvp="finite_difference", lazy_hessian=2, backend=backend)

        def loss(conv=conv, x=x):
            return torch.tanh(conv(x)).float().square().sum()

        for _ in range(3):
            if way == "closure":
                opt.step(closure_of(opt, loss))
                continue
            loss().backward()
            opt.perturb_weights()
            loss().backward()
            for _ in range(opt.probes_due):
                opt.probe_weights()
                loss().backward()
            opt.unperturb()
            opt.step()
            opt.zero_grad()
        found.append([conv.weight.detach(), opt.state[conv.weight]["exp_hessian_diag"]])
    for other in found[1:]:
        assert_same_bits(other, found[0])
