"""SAM, ASAM and GSAM over optimizers of torch."""

import copy
import pickle

import pytest
import torch
from algorithms import toward
from test_family import by_closure, make_problem
from torch import nn
from torch.optim import SGD, AdamW
from training import assert_same_bits, snapshot, three_calls

from sassha_fast import SAM

BASES = {
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}),
    "AdamW": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


def trained(base, steps, step=three_calls, dtype=torch.float32, **options):
    problem = make_problem(dtype)
    cls, base_options = BASES[base]
    opt = SAM(problem.net.parameters(), cls, **{"rho": 0.1, **base_options, **options})
    for _ in range(steps):
        step(opt, problem.loss)
    return problem, opt


@pytest.mark.parametrize("backend", ["reference", "foreach", "cpu"])
@pytest.mark.parametrize("step", [three_calls, by_closure])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_sam_is_a_step_of_the_base_optimizer_from_x_with_the_gradient_at_x_plus_epsilon(base, adaptive, step, backend):
    problem, _ = trained(base, 10, step, adaptive=adaptive, backend=backend)
    plain = make_problem(torch.float32)
    cls, options = BASES[base]
    opt = cls(plain.net.parameters(), **options)
    for _ in range(10):
        x = snapshot(plain.net)
        grads = plain.gradient(toward(x, plain.gradient(x), 0.1, adaptive=adaptive))
        with torch.no_grad():
            for p, value, g in zip(plain.net.parameters(), x, grads, strict=True):
                p.copy_(value)
                p.grad = g
        opt.step()
    assert_same_bits(snapshot(problem.net), snapshot(plain.net))


@pytest.mark.parametrize("base", BASES)
def test_rho_zero_is_the_base_optimizer(base):
    problem, _ = trained(base, 10, by_closure, rho=0.0)
    plain = make_problem(torch.float32)
    cls, options = BASES[base]
    opt = cls(plain.net.parameters(), **options)
    for _ in range(10):
        by_closure(opt, plain.loss)
    assert_same_bits(snapshot(problem.net), snapshot(plain.net))


@pytest.mark.parametrize("step", [three_calls, by_closure])
def test_alpha_is_gsam_and_alpha_zero_is_sam(step):
    sam, _ = trained("SGD", 10, step)
    zero, _ = trained("SGD", 10, step, alpha=0.0)
    gsam, _ = trained("SGD", 10, step, alpha=0.3)
    assert_same_bits(snapshot(zero.net), snapshot(sam.net))
    assert any((p != q).any() for p, q in zip(gsam.net.parameters(), sam.net.parameters(), strict=True))


@pytest.mark.parametrize("base", BASES)
def test_a_resumed_run_is_the_uninterrupted_one(base):
    expected, _ = trained(base, 14)
    problem, opt = trained(base, 6)
    other, new = trained(base, 0)
    other.net.load_state_dict(problem.net.state_dict())
    new.load_state_dict(pickle.loads(pickle.dumps(opt.state_dict())))
    for _ in range(8):
        three_calls(new, other.loss)
    assert_same_bits(snapshot(other.net), snapshot(expected.net))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_shares_groups_and_state_with_its_own_base_optimizer(copied):
    problem, opt = trained("SGD", 3)
    net, other = copied((problem.net, opt))
    assert other.base_optimizer.param_groups is other.param_groups
    assert other.base_optimizer.state is other.state
    x, y = torch.randn(16, 1, 6, 6), torch.randint(0, 3, (16,))
    for model, optimizer in ((problem.net, opt), (net, other)):
        for _ in range(5):
            three_calls(optimizer, lambda model=model: nn.functional.cross_entropy(model(x), y))
    assert_same_bits(snapshot(net), snapshot(problem.net))


def test_learning_rate_schedulers_and_groups_reach_the_base_optimizer():
    problem = make_problem(torch.float32)
    params = list(problem.net.parameters())
    opt = SAM([{"params": params[:2], "lr": 0.0}, {"params": params[2:], "rho": 0.3}], SGD, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.1)
    before = snapshot(problem.net)
    three_calls(opt, problem.loss)
    schedule.step()
    assert_same_bits(snapshot(problem.net)[:2], before[:2])
    assert (params[2] != before[2]).any()
    assert [group["lr"] for group in opt.base_optimizer.param_groups] == pytest.approx([0.0, 0.01])
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(opt.base_optimizer.param_groups) == 3


def test_no_pass_needs_a_graph_and_gradients_that_overflow_are_skipped():
    problem, opt = trained("SGD", 3, skip_nonfinite=True)
    assert not opt.hessian_due
    assert opt.probes_due == 0
    before = snapshot(problem.net)
    problem.loss().backward()
    opt.perturb_weights()
    problem.loss().backward()
    problem.net[0].bias.grad.fill_(torch.nan)
    opt.unperturb()
    opt.step()
    assert opt.stats.skipped_steps == 1
    assert_same_bits(snapshot(problem.net), before)


def test_a_loss_scale_and_clipping_reach_the_base_optimizer():
    expected, _ = trained("SGD", 6, dtype=torch.float64, max_grad_norm=0.2)
    problem, opt = trained("SGD", 0, dtype=torch.float64, max_grad_norm=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    for _ in range(6):

        def closure():
            opt.zero_grad()
            loss = problem.loss()
            scaler.scale(loss).backward()
            return loss

        opt.step(closure, scaler=scaler)
        scaler.update()
    for p, q in zip(problem.net.parameters(), expected.net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda params: SAM(params, "SGD", lr=0.1), TypeError, "base_optimizer is 'SGD', expected a class"),
        (lambda params: SAM(params, SGD, lr=0.1, rho=-1.0), ValueError, "rho is -1.0"),
        (lambda params: SAM(params, SGD, lr=0.1, momentums=0.9), TypeError, "momentums"),
        (lambda params: SAM(params, SGD, lr=0.1, alpha=-0.1), ValueError, "alpha is -0.1"),
        (lambda params: SAM(params, SGD, lr=0.1).unperturb(), RuntimeError, r"SAM\.unperturb: .*call perturb_weights"),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(make_problem().net.parameters())


def test_a_checkpoint_of_another_optimizer_is_refused():
    problem, opt = trained("SGD", 1)
    plain = SGD(problem.net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="it was not written by SAM"):
        opt.load_state_dict(plain.state_dict())


def test_loaded_state_does_not_share_memory_with_the_checkpoint():
    _, opt = trained("SGD", 1)
    saved = copy.deepcopy(opt.state_dict())
    kept = copy.deepcopy(saved)
    problem, other = trained("SGD", 0)
    other.load_state_dict(saved)
    three_calls(other, problem.loss)
    for i, entry in kept["state"].items():
        assert torch.equal(saved["state"][i]["momentum_buffer"], entry["momentum_buffer"])


@pytest.mark.parametrize(("base", "name"), [("RMSprop", "alpha"), ("ASGD", "alpha"), ("Adadelta", "rho")])
def test_a_base_optimizer_with_a_hyperparameter_of_sams_name_is_refused(base, name):
    with pytest.raises(TypeError, match=rf"{base} has hyperparameters \['{name}'\] of its own"):
        SAM([nn.Parameter(torch.ones(2))], getattr(torch.optim, base), lr=0.1)


TAKEN = {"RMSprop": "alpha", "ASGD": "alpha", "Adadelta": "rho"}
OTHERS = ("Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "Rprop", "SGD")


def matrix():
    """A network of one matrix, which Muon takes too."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3, bias=False)
    return net, torch.randn(8, 4)


@pytest.mark.parametrize("base", OTHERS)
def test_every_optimizer_of_torch_without_names_of_ours_descends(base):
    if not hasattr(torch.optim, base):
        pytest.skip(f"this torch has no {base}")
    cls = getattr(torch.optim, base)
    net, x = matrix()
    opt = SAM(net.parameters(), cls, lr=0.01)
    plain, _ = matrix()
    other = cls(plain.parameters(), lr=0.01)
    for _ in range(3):
        three_calls(opt, lambda: net(x).square().mean())
        before = plain.weight.detach().clone()
        plain(x).square().mean().backward()
        with torch.no_grad():
            plain.weight.copy_(toward([before], [plain.weight.grad], 0.05)[0])
        plain.zero_grad()
        plain(x).square().mean().backward()
        with torch.no_grad():
            plain.weight.copy_(before)
        other.step()
        plain.zero_grad()
    assert_same_bits(snapshot(net), snapshot(plain))
    again = SAM(net.parameters(), cls, lr=0.01)
    again.load_state_dict(opt.state_dict())
    three_calls(again, lambda: net(x).square().mean())


@pytest.mark.parametrize("as_groups", [False, True])
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="of newer torch")
def test_muon_is_asked_with_a_matrix_however_parameters_are_given(as_groups):
    net, _ = matrix()
    SAM([{"params": net.parameters()}] if as_groups else net.named_parameters(), torch.optim.Muon)
    with pytest.raises(ValueError, match="Muon only supports 2D"):
        SAM(nn.Linear(4, 3).parameters(), torch.optim.Muon)


@pytest.mark.parametrize("base", TAKEN)
def test_names_of_ours_are_refused(base):
    net, _ = matrix()
    with pytest.raises(TypeError, match=rf"^SAM: {base} has hyperparameters \['{TAKEN[base]}'\] of its own"):
        SAM(net.parameters(), getattr(torch.optim, base), lr=0.01)


def test_an_optimizer_that_runs_passes_itself_is_refused():
    net, _ = matrix()
    with pytest.raises(TypeError, match=r"^SAM: LBFGS\.step needs a closure, as it runs passes of its own"):
        SAM(net.parameters(), torch.optim.LBFGS, lr=0.01)
