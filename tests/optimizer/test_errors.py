"""Bad input is named, with its value and the remedy, and changes nothing."""

import copy
import math
import warnings

import pytest
import torch
from training import (
    BACKENDS,
    assert_same_bits,
    assert_same_state,
    make_loss,
    make_net,
    snapshot,
    state_of,
    three_calls,
    train,
)

from sassha_fast import GSASSHA, MSASSHA, SASSHA, AdaHessian, SophiaH
from sassha_fast._passes.reference import Members, check_grads


@pytest.mark.parametrize("name", ["lr", "weight_decay", "rho", "perturb_eps", "eps", "hessian_power"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_hyperparameters_must_be_finite_and_not_negative(name, value):
    with pytest.raises(ValueError, match=f"SASSHA: {name} is {value}, expected a finite number from 0"):
        SASSHA(make_net().parameters(), **{name: value})
    opt = SASSHA(make_net().parameters())
    with pytest.raises(ValueError, match=f"SASSHA: {name} is {value}"):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], name: value})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (1.0, 0.9)}, r"betas\[0\] is 1.0, expected a finite number from 0 below 1"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] is -0.1"),
        ({"betas": (0.9,)}, r"betas is \(0.9,\), expected two numbers"),
        ({"betas": 0.9}, "betas is 0.9, expected two numbers"),
        ({"lazy_hessian": 0}, "lazy_hessian is 0, expected an integer of at least 1"),
        ({"lazy_hessian": 2.5}, "lazy_hessian is 2.5"),
        ({"n_samples": 0}, "n_samples is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"grad_reduce": "max"}, r"grad_reduce is 'max', expected one of \['mean', 'sum'\]"),
        ({"hvp": "magic"}, "hvp is 'magic'"),
        ({"hvp_point": "elsewhere"}, "hvp_point is 'elsewhere'"),
        (
            {"backend": "gpu"},
            r"backend is 'gpu', expected 'auto', 'fused' or one of \['cpu', 'cuda', 'triton', 'foreach', 'reference'\]",
        ),
        ({"foreach": True, "fused": True}, "exclude each other"),
        ({"backend": "cpu", "foreach": True}, "contradicts"),
        ({"lr": torch.ones(2)}, r"lr is a tensor of shape \(2,\)"),
    ],
)
def test_constructor_names_the_bad_argument(options, message):
    with pytest.raises(ValueError, match=message):
        SASSHA(make_net().parameters(), **options)


@pytest.mark.parametrize("number", [0.1, 1, True])
def test_a_number_in_the_schedulers_place_is_refused(number):
    with pytest.raises(TypeError, match=f"hessian_power_scheduler is {number}.*pass lr=.*by keyword"):
        SASSHA(make_net().parameters(), number)


def test_an_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="momentum"):
        SASSHA(make_net().parameters(), momentum=0.9)


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.ones(2, dtype=torch.complex64), "parameter 0 of group 0 is torch.complex64"),
        (torch.ones(2, dtype=torch.int64), "parameter 0 of group 0 is torch.int64"),
        (torch.eye(2).to_sparse(), "parameter 0 of group 0 has layout torch.sparse_coo"),
    ],
)
def test_parameters_that_are_sparse_or_not_real_are_refused(param, message):
    with pytest.raises(ValueError, match=message):
        SASSHA([param])


def test_a_hessian_closure_alone_is_refused():
    opt = SASSHA(make_net().parameters())
    with pytest.raises(TypeError, match="hessian_closure or scaler was given without closure"):
        opt.step(hessian_closure=lambda: None)


def test_attach_wants_a_module():
    with pytest.raises(TypeError, match=r"model is int, expected a torch\.nn\.Module"):
        SASSHA(make_net().parameters()).attach(3)


def test_attach_warns_of_kinks_that_finite_differences_see():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    with pytest.warns(UserWarning, match="kinks of ReLU that exact products ignore"):
        SASSHA(model.parameters(), hvp="finite_difference").attach(model)
    SASSHA(model.parameters()).attach(model)  # a warning would be an error here


class Scene:
    """A trained model whose weights and state must be the same after the error as before it."""

    def __init__(self, backend="auto", steps=2, **options):
        self.net = make_net()
        self.opt = SASSHA(self.net.parameters(), lr=0.03, rho=0.05, lazy_hessian=2, backend=backend, **options)
        self.loss = make_loss(self.net)
        train(self.net, self.opt, steps)
        self.weights, self.state = snapshot(self.net), state_of(self.opt)

    def check(self):
        assert_same_bits(snapshot(self.net), self.weights)
        assert_same_state(state_of(self.opt), self.state)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [0, 2], ids=["first", "later"])
@pytest.mark.filterwarnings("ignore:.*rho is .* but the weights were not perturbed")
def test_unperturb_without_a_graph_restores_and_then_raises(backend, steps):
    scene = Scene(backend, steps)
    scene.loss().backward()
    scene.opt.perturb_weights()
    scene.loss().backward()
    with pytest.raises(RuntimeError, match=r"unperturb: .* loss.backward\(create_graph=opt.hessian_due\)"):
        scene.opt.unperturb()
    scene.check()
    with pytest.raises(RuntimeError, match="this step refreshes the curvature"):
        scene.opt.step()
    scene.check()
    scene.opt.zero_grad()
    three_calls(scene.opt, scene.loss)


def test_perturbing_twice_is_refused_and_the_way_back_stays():
    scene = Scene()
    scene.loss().backward()
    scene.opt.perturb_weights()
    scene.loss().backward()
    with pytest.raises(RuntimeError, match="perturbed already; call unperturb"):
        scene.opt.perturb_weights()
    scene.opt.zero_grad()
    scene.opt.unperturb()
    scene.check()


def test_perturbing_without_gradients_is_refused():
    scene = Scene()
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        scene.opt.perturb_weights()
    scene.check()


def test_unperturb_without_perturb_is_refused():
    scene = Scene()
    with pytest.raises(RuntimeError, match="not perturbed; call perturb_weights"):
        scene.opt.unperturb()
    scene.check()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda opt: opt.step(), "still perturbed"),
        (lambda opt: opt.state_dict(), "a checkpoint of the model would not hold them"),
        (lambda opt: opt.load_state_dict({}), "perturbed"),
        (lambda opt: copy.deepcopy(opt), "can't copy or pickle while the weights are perturbed"),
        (lambda opt: opt.add_param_group({"params": []}), "perturbed"),
    ],
    ids=["step", "state_dict", "load_state_dict", "deepcopy", "add_param_group"],
)
def test_while_perturbed(act, message):
    scene = Scene()
    scene.loss().backward()
    scene.opt.perturb_weights()
    with pytest.raises(RuntimeError, match=message):
        act(scene.opt)
    scene.opt.unperturb()
    scene.check()


def test_an_exception_between_the_calls_leaves_a_way_back():
    scene = Scene()
    scene.loss().backward()
    scene.opt.perturb_weights()
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        scene.opt.unperturb()
    scene.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.double(), "has dtype torch.float32, expected torch.float64"),
        (lambda p: torch.cat([p, p]), r"has shape \(3,\), expected \(6,\)"),
    ],
    ids=["dtype", "shape"],
)
def test_a_gradient_that_does_not_fit_its_parameter_is_named(backend, change, message):
    """Only ``p.data = ...`` can bring this about: torch itself guards ``p.grad = ...``."""
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    opt = SASSHA([("spoon", p)], backend=backend)
    p.data = change(p.data)
    for call in (opt.perturb_weights, opt.step):
        with pytest.raises(RuntimeError, match=f"gradient of 'spoon' {message}") as error:
            call()
        assert "backward() again" in str(error.value)
    assert not opt.state


def test_a_gradient_on_another_device_is_named():
    with pytest.raises(RuntimeError, match="gradient of fork has device meta, expected cpu like the parameter"):
        check_grads(Members([torch.ones(3)], [0], [0], 1, ["fork"]), [torch.ones(3, device="meta")])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sparse_gradient_is_named(backend):
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    opt = SASSHA(embedding.parameters(), backend=backend)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 is sparse.*sparse=False"):
        opt.perturb_weights()


def test_a_backend_asked_for_by_name_that_cannot_run_says_why():
    p = torch.nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones(3, device="meta")
    with pytest.raises(RuntimeError, match="backend 'cpu' can't run parameters on meta: its kernels run on the CPU"):
        SASSHA([p], backend="cpu").perturb_weights()


def test_a_schedule_that_gives_a_bad_value_is_named():
    net = make_net()
    opt = SASSHA(net.parameters(), lambda t: -1.0, rho=0.1)
    weights = snapshot(net)
    with pytest.raises(ValueError, match=r"hessian_power is -1\.0"):
        three_calls(opt, make_loss(net))
    assert_same_bits(snapshot(net), weights)
    assert not opt.state


# ---- errors that teach --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_changed_in_place_between_the_calls_are_named(backend):
    scene = Scene(backend)
    scene.loss().backward()
    scene.opt.perturb_weights()
    scene.loss().backward(create_graph=True)
    with torch.no_grad():
        scene.net[2].weight.clamp_(-1, 1)
    with pytest.raises(RuntimeError, match=r"parameter 2 of group 0 changed .* move the line .* after step\(\)"):
        scene.opt.unperturb()
    scene.check()


def test_weights_changed_in_place_by_a_closure_are_named():
    scene = Scene()

    def closure():
        scene.opt.zero_grad()
        loss = scene.loss()
        loss.backward()
        with torch.no_grad():
            for p in scene.net.parameters():
                p.mul_(1.0)
        return loss

    with pytest.raises(RuntimeError, match="step: parameter 0 of group 0 and 5 more changed in place"):
        scene.opt.step(closure)
    scene.check()


def test_a_flash_kernel_on_a_hand_written_refresh_is_explained():
    linear, x = torch.nn.Linear(8, 24), torch.randn(2, 4, 8)
    opt = SASSHA(linear.parameters(), rho=0.05)

    def loss():
        q, k, v = linear(x).view(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).square().sum()

    before = snapshot(linear)
    loss().backward()
    opt.perturb_weights()
    loss().backward(create_graph=True)
    with pytest.raises(RuntimeError, match=r"flash_attention.*`with opt\.refresh_context\(\):`"):
        opt.unperturb()
    assert_same_bits(snapshot(linear), before)
    opt.zero_grad()
    with opt.refresh_context():
        loss().backward()
        opt.perturb_weights()
        loss().backward(create_graph=True)
        opt.unperturb()
    opt.step()
    assert opt.stats.refreshes == 1


def test_a_closure_handed_to_the_scaler_is_refused():
    scene = Scene()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(scene.loss()).backward()
    with pytest.raises(RuntimeError, match=r"scaler\.step\(opt, closure\) by opt\.step\(closure, scaler=scaler\)"):
        scaler.step(scene.opt, lambda: scene.loss())
    scene.opt.zero_grad()
    scene.check()


@pytest.mark.parametrize("method", [SASSHA, GSASSHA, MSASSHA, AdaHessian, SophiaH])
def test_bad_arguments_are_refused_in_the_name_of_the_method(method):
    param = torch.nn.Parameter(torch.ones(2))
    for options in ({"lr": -1.0}, {"n_samples": 0}, {"hvp": "magic"}, {"seed": -1}, {"max_grad_norm": -1.0}):
        with pytest.raises(ValueError, match=rf"^{method.__name__}: {next(iter(options))} is "):
            method([param], **options)
    opt = method([param])
    with pytest.raises(ValueError, match=rf"^{method.__name__}.load_state_dict: found list, expected a dict"):
        opt.load_state_dict([])


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize(("name", "value"), [("hvp", "finite_difference"), ("seed", 7), ("n_samples", 2)])
def test_options_that_products_belong_to_do_not_change_within_a_step(name, value, collected):
    net = make_net()
    opt, loss = SASSHA(net.parameters(), lr=0.01, rho=0.05), make_loss(net)
    before, old = snapshot(net), getattr(opt, name)
    loss().backward()
    opt.perturb_weights()
    loss().backward(create_graph=True)
    if collected:
        opt.unperturb()
    with pytest.raises(RuntimeError, match=rf"^SASSHA: {name} can't become .* within a step, .*; assign it after step"):
        setattr(opt, name, value)
    assert getattr(opt, name) == old
    if not collected:
        opt.unperturb()
    assert_same_bits(snapshot(net), before)
    opt.step()
    setattr(opt, name, value)
    assert getattr(opt, name) == value


def test_a_hook_that_drops_all_gradients_is_not_told_of_an_ascent_that_there_was():
    net = make_net()
    opt, loss = SASSHA(net.parameters(), lr=0.01, rho=0.05), make_loss(net)
    opt.register_step_pre_hook(lambda opt, args, kwargs: opt.zero_grad())
    before = snapshot(net)
    loss().backward()
    opt.perturb_weights()
    loss().backward(create_graph=True)
    opt.unperturb()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    assert_same_bits(snapshot(net), before)


@pytest.mark.parametrize("method", [SASSHA, SophiaH])
def test_arguments_of_step_without_a_name_are_refused_by_the_name_of_the_class(method):
    net = make_net()
    opt = method(net.parameters(), lr=0.01)
    message = rf"^{method.__name__}\.step: .* name them, as in opt.step\(closure, scaler=scaler\)"
    with pytest.raises(TypeError, match=message):
        opt.step(make_loss(net), torch.amp.GradScaler("cpu"))
