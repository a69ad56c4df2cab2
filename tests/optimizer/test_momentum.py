"""M-SASSHA: which weights the parameters hold, and that no way around them loses or confuses any."""

import copy
import pickle
import warnings

import pytest
import torch
from test_family import by_closure, by_hand, make_problem, state_lists
from torch import nn
from training import assert_same_bits, assert_same_state, snapshot, state_of

from sassha_fast import MSASSHA
from sassha_fast._core.keys import ASCENT_SCALE, EXP_AVG, WEIGHT

OPTIONS = {"lr": 0.05, "rho": 0.1, "weight_decay": 0.01}
# Differences of bfloat16 gradients are mostly noise: divided by much, it does no harm.
REDUCED = {**OPTIONS, "lr": 0.01, "eps": 1.0, "hvp": "finite_difference"}


def options_for(dtype):
    return REDUCED if dtype.itemsize == 2 else OPTIONS


def started(steps=5, dtype=torch.float32, **options):
    problem = make_problem(dtype)
    opt = MSASSHA(problem.net.parameters(), **{**options_for(dtype), **options})
    for _ in range(steps):
        by_hand(opt, problem.loss)
    return problem, opt


# ---- x and x + ε --------------------------------------------------------------------------------------------------


def test_parameters_hold_x_plus_epsilon_of_length_rho_between_steps():
    problem, opt = started(dtype=torch.float64)
    xs = state_lists(opt, WEIGHT)[0]
    eps = torch.cat([(p.detach() - x).flatten() for p, x in zip(problem.net.parameters(), xs, strict=True)])
    m = torch.cat([m.flatten() for m in state_lists(opt, EXP_AVG)[0]])
    torch.testing.assert_close(eps, -0.1 * m / m.norm(), rtol=1e-6, atol=1e-12)
    assert float(opt.stats.grad_norm) == pytest.approx(float(m.norm()), rel=1e-12)


@pytest.mark.parametrize("number", [0, 1])
def test_a_train_that_raises_leaves_the_true_weights_and_can_be_repeated(number):
    """Of two layers one had no gradient in the last step, so that each has an ε of its own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    opt = MSASSHA(net.parameters(), **OPTIONS)
    x = torch.randn(5, 3)

    def step():
        net(x).square().sum().backward(create_graph=opt.hessian_due)
        opt.step()
        opt.zero_grad()

    step()
    net[0].requires_grad_(False)
    step()
    net[0].requires_grad_(True)
    perturbed = snapshot(net)
    opt.eval()
    shown = snapshot(net)
    net[number].double()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="changed its dtype after its first step"):
            opt.train()
        assert opt.evaluating
        with pytest.raises(RuntimeError, match=r"the parameters hold the true weights since eval"):
            opt.step()
    net[number].float()
    assert_same_bits(snapshot(net), shown)
    opt.train()
    assert_same_bits(snapshot(net), perturbed)
    step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "foreach", "cpu"])
def test_eval_shows_x_and_train_brings_x_plus_epsilon_back_bit_for_bit(backend, dtype):
    problem, opt = started(dtype=dtype, backend=backend)
    perturbed, xs = snapshot(problem.net), copy.deepcopy(state_lists(opt, WEIGHT)[0])
    for _ in range(2):
        opt.eval()
        opt.eval()  # twice is once
        assert opt.evaluating
        assert not opt.perturbed
        assert_same_bits(snapshot(problem.net), xs)
        opt.train()
        opt.train()
        assert opt.perturbed
        assert_same_bits(snapshot(problem.net), perturbed)
    assert any((p != x).any() for p, x in zip(perturbed, xs, strict=True))


def test_evaluation_in_between_changes_nothing():
    runs = []
    for evaluates in (False, True):
        problem, opt = started(0)
        for _ in range(12):
            by_hand(opt, problem.loss)
            if evaluates:
                with opt.true_weights():
                    problem.loss()
        runs.append((problem, opt))
    assert_same_bits(snapshot(runs[0][0].net), snapshot(runs[1][0].net))
    assert_same_state(state_of(runs[0][1]), state_of(runs[1][1]))


def test_the_authors_names_work_in_their_loop():
    expected, expected_opt = started(9)
    problem, opt = started(0)
    for _ in range(3):  # epochs
        opt.move_up_to_momentumAscent()
        for _ in range(3):
            problem.loss().backward(create_graph=True)
            opt.step()
            opt.zero_grad()
        opt.move_back_from_momentumAscent()
        assert_same_bits(snapshot(problem.net), state_lists(opt, WEIGHT)[0])
    opt.move_up_to_momentumAscent()
    assert_same_bits(snapshot(problem.net), snapshot(expected.net))
    assert_same_state(state_of(opt), state_of(expected_opt))


def test_true_weights_within_eval_leaves_eval():
    _, opt = started()
    opt.eval()
    with opt.true_weights():
        pass
    assert opt.evaluating
    with pytest.raises(ZeroDivisionError), opt.true_weights():
        raise ZeroDivisionError
    assert opt.evaluating
    opt.train()
    with pytest.raises(ZeroDivisionError), opt.true_weights():
        raise ZeroDivisionError
    assert opt.perturbed


def test_weights_changed_within_true_weights_are_the_new_x():
    problem, opt = started()
    with opt.true_weights(), torch.no_grad():
        for p in problem.net.parameters():
            p.mul_(0.5)
        halved = snapshot(problem.net)
    assert_same_bits(state_lists(opt, WEIGHT)[0], halved)
    by_hand(opt, problem.loss)
    opt.eval()
    assert all((p - h).abs().max() < 0.2 for p, h in zip(problem.net.parameters(), halved, strict=True))


def test_groups_have_radii_of_their_own_under_one_norm():
    problem = make_problem(torch.float64)
    params = list(problem.net.parameters())
    opt = MSASSHA([{"params": params[:2], "rho": 0.4}, {"params": params[2:4], "rho": 0.0}, {"params": params[4:]}])
    by_hand(opt, problem.loss)
    m = state_lists(opt, EXP_AVG)[0]
    norm = torch.cat([t.flatten() for t in m]).norm()
    for i, (p, x) in enumerate(zip(params, state_lists(opt, WEIGHT)[0], strict=True)):
        rho = (0.4, 0.4, 0.0, 0.0, 0.3, 0.3)[i]
        torch.testing.assert_close(p.detach() - x, -rho * m[i] / norm, rtol=1e-6, atol=1e-12)


def test_a_parameter_without_gradient_keeps_its_own_epsilon():
    problem, opt = started(4)
    last = list(problem.net.parameters())[-1]
    for _ in range(2):
        problem.loss().backward(create_graph=opt.hessian_due)
        last.grad = None
        before = last.detach().clone()
        opt.step()
        opt.zero_grad()
        assert_same_bits([last.detach()], [before])
    perturbed = snapshot(problem.net)
    scales = {opt.state[p][ASCENT_SCALE] for p in problem.net.parameters()}
    assert len(scales) == 2
    with opt.true_weights():
        assert_same_bits([last.detach()], [opt.state[last][WEIGHT]])
    assert_same_bits(snapshot(problem.net), perturbed)


def test_maximize_turns_epsilon_around_with_the_momentum():
    problem, _ = started(1, dtype=torch.float64, weight_decay=0.0)
    other = make_problem(torch.float64)
    loss = other.loss
    negated = MSASSHA(other.net.parameters(), **{**OPTIONS, "weight_decay": 0.0}, maximize=True)
    by_hand(negated, lambda: -loss())
    for p, q in zip(problem.net.parameters(), other.net.parameters(), strict=True):
        torch.testing.assert_close(p, q)


# ---- mistakes -----------------------------------------------------------------------------------------------------


def test_a_step_in_evaluation_is_refused_and_changes_nothing():
    problem, opt = started()
    opt.eval()
    before, weights = state_of(opt), snapshot(problem.net)
    problem.loss().backward()
    with pytest.raises(RuntimeError, match=r"MSASSHA\.step: .*call opt\.train\(\) before the forward pass"):
        opt.step()
    with pytest.raises(RuntimeError, match=r"call opt\.train\(\)"):
        by_closure(opt, problem.loss)
    assert_same_state(state_of(opt), before)
    assert_same_bits(snapshot(problem.net), weights)


def test_weights_changed_while_perturbed_are_refused_by_name():
    problem, opt = started()
    before = state_of(opt)
    with torch.no_grad():
        problem.net[3].weight.add_(1.0)
    problem.loss().backward(create_graph=True)
    with pytest.raises(RuntimeError, match=r"parameter 2 of group 0 changed in place while holding x \+ ε"):
        opt.step()
    assert_same_state(state_of(opt), before)
    opt.eval()
    assert_same_bits(snapshot(problem.net), [entry[WEIGHT] for entry in before])


def test_an_attached_model_warns_where_its_perturbed_weights_are_taken_for_the_true_ones():
    problem, opt = started(0)
    opt.attach(problem.net)
    problem.net.state_dict()  # nothing has moved yet
    by_hand(opt, problem.loss)
    with pytest.warns(UserWarning, match="state_dict is taken while its parameters hold x"):
        problem.net.state_dict()
    problem.net.eval()
    with pytest.warns(UserWarning, match="evaluated while its parameters hold x"):
        problem.loss()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opt.true_weights():
            problem.net.state_dict()
            problem.loss()
        problem.net.train()
        problem.loss()
        copied = pickle.loads(pickle.dumps(copy.deepcopy(problem.net).eval()))
        copied.state_dict()
        copied(torch.zeros(1, 1, 6, 6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sign": 0}, "sign is 0, expected -1"),
        ({"hvp_point": "upstream"}, "no argument 'hvp_point'"),
        ({"perturb_sync": True}, "no argument 'perturb_sync'"),
        ({"rho": -0.1}, "rho is -0.1"),
        ({"hessian_floor": -1.0}, "hessian_floor is -1.0"),
        ({"rhoo": 0.1}, "rhoo"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        MSASSHA(make_problem().net.parameters(), **options)


def test_a_missing_graph_names_the_remedy_and_nothing_moves():
    problem, opt = started(10)
    before, weights = state_of(opt), snapshot(problem.net)
    problem.loss().backward()
    with pytest.raises(RuntimeError, match=r"MSASSHA\.step: .*create_graph=opt\.hessian_due"):
        opt.step()
    assert_same_state(state_of(opt), before)
    assert_same_bits(snapshot(problem.net), weights)


def test_missing_probes_name_the_remedy_and_nothing_moves():
    problem = make_problem()
    opt = MSASSHA(problem.net.parameters(), hvp="finite_difference")
    problem.loss().backward()
    with pytest.raises(RuntimeError, match=r"need probe_weights\(\) and a backward pass"):
        opt.step()


def test_eval_at_a_probe_is_refused():
    problem = make_problem()
    opt = MSASSHA(problem.net.parameters(), hvp="finite_difference")
    problem.loss().backward()
    opt.probe_weights()
    with pytest.raises(RuntimeError, match="the weights are at a probe"):
        opt.eval()
    with pytest.raises(RuntimeError, match="perturbed"):
        opt.state_dict()
    problem.loss().backward()
    opt.step()


# ---- a step -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
def test_an_ordinary_step_costs_one_gradient_and_a_refresh_by_differences_two(hvp):
    problem, opt = started(0, hvp=hvp)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        opt.zero_grad()
        loss = problem.loss()
        loss.backward()
        return loss

    for _ in range(20):
        opt.step(closure)
    assert calls == (20 if hvp == "exact" else 22)


@pytest.mark.parametrize("step", [0, 10])
@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
def test_an_exception_in_a_closure_leaves_everything_as_it_was(hvp, step):
    problem, opt = started(0, hvp=hvp)
    for _ in range(step):
        by_closure(opt, problem.loss)
    before, weights, calls = state_of(opt), snapshot(problem.net), 0

    def closure():
        nonlocal calls
        calls += 1
        opt.zero_grad()
        loss = problem.loss()
        loss.backward()
        if calls == (1 if hvp == "exact" else 2):  # the second is at a probe
            raise ZeroDivisionError
        return loss

    with pytest.raises(ZeroDivisionError):
        opt.step(closure)
    assert_same_bits(snapshot(problem.net), weights)
    if step:
        assert_same_state(state_of(opt), before)
    by_closure(opt, problem.loss)


def test_gradients_of_the_second_pass_return_from_the_probes_for_clipping():
    problem = make_problem()
    opt = MSASSHA(problem.net.parameters(), hvp="finite_difference", rho=0.1)
    problem.loss().backward()
    grads, weights = [p.grad.clone() for p in problem.net.parameters()], snapshot(problem.net)
    opt.zero_grad()
    problem.loss().backward()
    for _ in range(opt.probes_due):
        opt.probe_weights()
        problem.loss().backward()
    opt.take_products()
    assert_same_bits([p.grad for p in problem.net.parameters()], grads)
    assert_same_bits(snapshot(problem.net), weights)
    nn.utils.clip_grad_norm_(problem.net.parameters(), 0.1)
    opt.step()


@pytest.mark.parametrize("unscale", [False, True])
def test_a_loss_scale_changes_nothing_but_rounding(unscale):
    expected, _ = started(12, dtype=torch.float64)
    problem, opt = started(0, dtype=torch.float64)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
    for _ in range(12):
        scaler.scale(problem.loss()).backward(create_graph=opt.hessian_due)
        if unscale:
            opt.take_products(scaler)
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    for p, q in zip(problem.net.parameters(), expected.net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_overflow_skips_the_step_and_keeps_the_weights():
    problem, opt = started(skip_nonfinite=True)
    before, weights = state_of(opt), snapshot(problem.net)
    problem.loss().backward()
    problem.net[0].weight.grad[0] = torch.inf
    opt.step()
    assert opt.stats.skipped_steps == 1
    assert_same_state(state_of(opt), before)
    assert_same_bits(snapshot(problem.net), weights)


def test_capturable_steps_equal_ordinary_ones():
    expected, expected_opt = started(12)
    problem, opt = started(12, capturable=True)
    assert_same_bits(snapshot(problem.net), snapshot(expected.net))
    perturbed = snapshot(problem.net)
    with opt.true_weights():
        assert_same_bits(snapshot(problem.net), state_lists(expected_opt, WEIGHT)[0])
    assert_same_bits(snapshot(problem.net), perturbed)
    state = opt.state_dict()["state"][0]
    assert isinstance(state[ASCENT_SCALE], float)


def test_rho_follows_its_schedule_once_a_step():
    problem = make_problem(torch.float64)
    opt = MSASSHA(problem.net.parameters(), lr=0.05, rho_scheduler=lambda t: 0.1 * (t + 1))
    for t, step in enumerate((by_hand, by_closure, by_hand)):
        step(opt, problem.loss)
        xs = state_lists(opt, WEIGHT)[0]
        eps = torch.cat([(p.detach() - x).flatten() for p, x in zip(problem.net.parameters(), xs, strict=True)])
        assert float(eps.norm()) == pytest.approx(0.1 * (t + 1), rel=1e-6)
