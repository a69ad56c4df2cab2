"""Checkpoints that are damaged or of somebody else: an error by the name of what is wrong, and nothing changed."""

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from test_old_checkpoint import METHODS as OLD
from test_old_checkpoint import Problem, by_closure, saved_by_0_1_0
from torch import nn
from training import assert_same_bits, assert_same_state, state_of

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH
from sassha_fast._core.keys import EXP_AVG, HESSIAN, WEIGHT

METHODS = {
    "SASSHA": (SASSHA, {"rho": 0.05}),
    "GSASSHA": (GSASSHA, {"rho": 0.05}),
    "MSASSHA": (MSASSHA, {"rho": 0.05}),
    "AdaHessian": (AdaHessian, {}),
    "SophiaH": (SophiaH, {}),
    "SAM over SGD": (SAM, {"base_optimizer": torch.optim.SGD, "momentum": 0.875}),
    "SAM over AdamW": (SAM, {"base_optimizer": torch.optim.AdamW}),
}
OURS = [name for name in METHODS if not name.startswith("SAM")]
CURVED = ("SASSHA", "GSASSHA", "MSASSHA", "AdaHessian")  # whose D has no negative elements


def trained(name, steps=3):
    problem, (method, own) = Problem(), METHODS[name]
    opt = method(problem.groups(), lr=2.0**-7, **own)
    for _ in range(steps):
        by_closure(opt, problem.loss)
    return problem, opt


def state_with(saved, index, key, value):
    saved["state"][index][key] = value
    return saved


def group_with(saved, number, key, value):
    saved["param_groups"][number][key] = value
    return saved


def groups_of(opt):
    return [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]


def assert_refused(name, damage, *mentioned):
    """Loading raises ValueError that mentions all of these, and changes nothing."""
    problem, opt = trained(name)
    saved = damage(copy.deepcopy(opt.state_dict()))
    weights, state, groups = problem.weights(), state_of(opt), copy.deepcopy(groups_of(opt))
    with pytest.raises(ValueError, match=r"load_state_dict: ") as caught:
        opt.load_state_dict(saved)
    for text in mentioned:
        assert text in str(caught.value)
    assert len(str(caught.value)) < 500
    assert_same_bits(problem.weights(), weights)
    assert_same_state(state_of(opt), state)
    assert groups_of(opt) == groups
    return problem, opt


@pytest.mark.parametrize("name", METHODS)
def test_after_a_refused_checkpoint_the_run_goes_on_bit_for_bit(name):
    def damage(saved):
        saved["state"][0] = {key: torch.ones(7) for key in saved["state"][0]}
        return saved

    problem, opt = assert_refused(name, damage, "of parameter 0 of group 0")
    expected, other = trained(name, steps=5)
    by_closure(opt, problem.loss)
    by_closure(opt, problem.loss)
    assert_same_bits(problem.weights(), expected.weights())
    assert_same_state(state_of(opt), state_of(other))


# ---- numbers in the state -----------------------------------------------------------------------------------------

NO_COUNTS = {
    "negative": -1,
    "not whole": 2.5,
    "NaN": math.nan,
    "infinite": math.inf,
    "too large for int64": 2**63,
    "of thousands of digits": 10**5000,
    "text": "3",
    "None": None,
    "a flag": True,
    "nested": [[3]],
    "complex": 3 + 0j,
    "two elements": torch.tensor([3, 4]),
    "on the meta device": torch.tensor(3, device="meta"),
    "a complex tensor": torch.tensor(3 + 0j),
    "a tensor of NaN": torch.tensor(math.nan),
}


@pytest.mark.parametrize("kind", NO_COUNTS)
@pytest.mark.parametrize("key", ["step", "hessian_step"])
def test_a_count_of_steps_that_is_none_is_refused(key, kind):
    assert_refused("SASSHA", lambda s: state_with(s, 1, key, NO_COUNTS[kind]), f"'{key}' of parameter 0 of group 1")


@pytest.mark.parametrize("name", METHODS)
def test_a_negative_step_count_is_refused_by_every_method_that_has_one(name):
    if name == "SAM over SGD":
        pytest.skip("SGD counts no steps")
    assert_refused(name, lambda s: state_with(s, 0, "step", -5), "'step' of parameter 0 of group 0 is -5")


@pytest.mark.parametrize("kind", NO_COUNTS)
def test_a_count_of_the_authors_optimizer_that_is_none_is_refused(kind):
    def damage(saved):
        saved["state"][1]["hessian step"] = NO_COUNTS[kind]
        del saved["state"][1]["hessian_step"]
        return saved

    assert_refused("SASSHA", damage, "'hessian step' of parameter 0 of group 1")


@pytest.mark.parametrize("value", [-0.5, 1.5, math.nan, "0.5", None, True, [0.5]], ids=str)
@pytest.mark.parametrize("authors", [False, True])
def test_a_correction_that_is_no_fraction_is_refused(authors, value):
    def damage(saved):
        if authors:
            saved["state"][2]["hessian step"] = saved["state"][2].pop("hessian_step")
        return state_with(saved, 2, "bias_correction2", value)

    assert_refused("SASSHA", damage, "'bias_correction2' of parameter 1 of group 1")


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, "0.5", None], ids=str)
def test_a_scale_of_the_ascent_that_is_not_finite_is_refused(value):
    assert_refused("MSASSHA", lambda s: state_with(s, 0, "ascent_scale", value), "'ascent_scale' of parameter 0")


def test_numbers_of_numpy_and_tensors_of_one_element_load_like_numbers():
    _, opt = trained("SASSHA")
    saved = copy.deepcopy(opt.state_dict())
    for entry in saved["state"].values():
        entry["step"], entry["hessian_step"] = np.int64(entry["step"]), torch.tensor(float(entry["hessian_step"]))
        entry["bias_correction2"] = np.float64(entry["bias_correction2"])
    saved["param_groups"][0] |= {"lr": np.float64(2.0**-7), "rho": Fraction(1, 20), "weight_decay": 0}
    _, other = trained("SASSHA", steps=0)
    other.load_state_dict(saved)
    assert_same_state(state_of(other), state_of(opt))
    assert all(type(entry["step"]) is int and type(entry["hessian_step"]) is int for entry in state_of(other))


# ---- tensors in the state -----------------------------------------------------------------------------------------


def filled(value, place):
    def fill(tensor):
        changed = tensor.clone()
        changed.view(-1)[place] = value
        return changed

    return fill


NO_TENSORS = {
    "NaN": filled(math.nan, -1),
    "inf": filled(math.inf, 0),
    "-inf": filled(-math.inf, 1),
    "on the meta device": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "complex": lambda t: t.to(torch.complex128),
    "of integers": lambda t: t.to(torch.int64),
    "of flags": lambda t: t.to(torch.bool),
    "of another shape": lambda t: t.unsqueeze(0),
    "nested": lambda t: torch.nested.nested_tensor([t]),
    "a list": lambda t: t.tolist(),
    "an array": lambda t: t.numpy(),
    "None": lambda t: None,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", NO_TENSORS)
@pytest.mark.parametrize(
    ("name", "key"),
    [("SASSHA", EXP_AVG), ("SASSHA", HESSIAN), ("MSASSHA", WEIGHT), ("SAM over SGD", "momentum_buffer")],
)
def test_a_tensor_that_no_optimizer_has_written_is_refused(name, key, kind):
    def damage(saved):
        return state_with(saved, 1, key, NO_TENSORS[kind](saved["state"][1][key]))

    assert_refused(name, damage, f"'{key}' of parameter 0 of group 1")


@pytest.mark.parametrize("name", CURVED)
def test_negative_curvature_is_refused_where_it_is_an_average_of_magnitudes(name):
    def damage(saved):
        return state_with(saved, 1, HESSIAN, filled(-0.25, 1)(saved["state"][1][HESSIAN]))

    assert_refused(name, damage, f"'{HESSIAN}' of parameter 0 of group 1", "no element below 0")


def test_negative_curvature_loads_where_it_keeps_its_sign():
    _, opt = trained("SophiaH")
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][1][HESSIAN] = filled(-0.25, 1)(saved["state"][1][HESSIAN])
    opt.load_state_dict(saved)
    assert state_of(opt)[1][HESSIAN][1] == -0.25


def test_elements_that_the_dtype_of_the_state_can_not_hold_are_refused():
    """The fourth parameter is bfloat16 with float32 state."""

    def damage(saved):
        return state_with(saved, 3, HESSIAN, saved["state"][3][HESSIAN].double() * 0 + 1e300)

    assert_refused("SASSHA", damage, f"'{HESSIAN}' of parameter 2 of group 1", "torch.float32")


def test_tensors_that_require_gradients_load_without_their_graph():
    _, opt = trained("SASSHA")
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0][EXP_AVG] = saved["state"][0][EXP_AVG].requires_grad_() * 1.0
    saved["param_groups"][0]["lr"] = torch.tensor(2.0**-7, requires_grad=True) * 1.0
    _, other = trained("SASSHA", steps=0)
    other.load_state_dict(saved)
    assert_same_state(state_of(other), state_of(opt))
    assert not other.state[other.param_groups[0]["params"][0]][EXP_AVG].requires_grad
    assert not other.param_groups[0]["lr"].requires_grad


# ---- structure ----------------------------------------------------------------------------------------------------


def edited(edit):
    def damage(saved):
        edit(saved)
        return saved

    return damage


STRUCTURES = {
    "nothing": (lambda s: None, "NoneType"),
    "keys of several types": (lambda s: {"state": {}, 3: 4}, "'3'"),
    "state is a list": (lambda s: {**s, "state": [1]}, "'state' is [1]"),
    "groups are a dict": (lambda s: {**s, "param_groups": {0: 1}}, "'param_groups' is {0: 1}"),
    "a group is text": (lambda s: {**s, "param_groups": ["lr", "rho"]}, "group 0 is 'lr'"),
    "no parameters": (edited(lambda s: s["param_groups"][0].pop("params")), "'params' of group 0 is None"),
    "parameters are a number": (lambda s: group_with(s, 1, "params", 3), "'params' of group 1 is 3"),
    "one group too few": (edited(lambda s: s["param_groups"].pop()), "groups of [1] parameters"),
    "one group twice": (edited(lambda s: s["param_groups"].append(s["param_groups"][0])), "groups of [1, 3, 1]"),
    "a number twice": (lambda s: group_with(s, 1, "params", [1, 2, 2]), "the number of parameter 2 of group 1 is 2"),
    "a number of two groups": (lambda s: group_with(s, 1, "params", [0, 2, 3]), "the number of parameter 0 of group 1"),
    "a number is a flag": (lambda s: group_with(s, 0, "params", [False]), "the number of parameter 0 of group 0"),
    "a number is a list": (lambda s: group_with(s, 0, "params", [[0]]), "the number of parameter 0 of group 0"),
    "state by text": (lambda s: {**s, "state": {str(k): v for k, v in s["state"].items()}}, "state of ['0', '1'"),
    "an entry is None": (edited(lambda s: s["state"].update({1: None})), "state of parameter 0 of group 1 is None"),
    "an entry is a tensor": (edited(lambda s: s["state"].update({0: torch.ones(2, 3)})), "state of parameter 0 of"),
    "too few names": (lambda s: group_with(s, 1, "param_names", ["a"]), "'param_names' of group 1 is ['a']"),
    "names are numbers": (lambda s: group_with(s, 0, "param_names", [7]), "'param_names' of group 0 is [7]"),
    "names are text": (lambda s: group_with(s, 1, "param_names", "abc"), "'param_names' of group 1 is 'abc'"),
}


@pytest.mark.parametrize("name", ["SASSHA", "MSASSHA", "SAM over SGD", "SAM over AdamW"])
@pytest.mark.parametrize("kind", STRUCTURES)
def test_a_checkpoint_of_another_structure_is_refused(name, kind):
    damage, text = STRUCTURES[kind]
    assert_refused(name, damage, text)


def test_names_of_the_checkpoint_replace_those_of_the_optimizer():
    problem, opt = trained("SASSHA")
    saved = group_with(opt.state_dict(), 1, "param_names", ["a", "b", "c"])
    opt.load_state_dict(saved)
    assert opt.param_groups[1]["param_names"] == ["a", "b", "c"]
    opt.load_state_dict(group_with(saved, 1, "param_names", None))
    assert opt.param_groups[1]["param_names"] == ["a", "b", "c"]
    by_closure(opt, problem.loss)


# ---- hyperparameters ----------------------------------------------------------------------------------------------

HYPERPARAMETERS = {
    "lr": (-0.1, math.nan, math.inf, "0.1", None, True, [0.1], 10**5000, torch.tensor([0.1, 0.2]), 1 + 0j),
    "rho": (math.nan, -1.0, "0.05", None, torch.tensor(0.1, device="meta")),
    "betas": (("0.9", "0.99"), "ab", (0.9,), (0.9, 1.0), (math.nan, 0.9), 0.9, None, ((0.9, 0.9), 0.9)),
    "weight_decay": (math.inf, "1", None),
    "eps": (math.nan, None, {}),
    "hessian_power": (math.nan, "half", None),
    "hessian_floor": (math.nan, "low"),
    "clip_update": (-1.0, "x"),
    "maximize": ("no", None, 2, [False]),
    "power_step": (-1, 0.5, "3", None, True),
    "rho_step": (-1, math.nan, None, 2**70),
}


@pytest.mark.parametrize(
    ("key", "value"),
    [pytest.param(k, v, id=f"{k}-{i}") for k, values in HYPERPARAMETERS.items() for i, v in enumerate(values)],
)
def test_a_hyperparameter_that_the_constructor_would_refuse_is_refused(key, value):
    assert_refused("SASSHA", lambda s: group_with(s, 1, key, value), "group 1", key)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("MSASSHA", "sign", 0),
        ("MSASSHA", "sign", "-1"),
        ("MSASSHA", "evaluating", "no"),
        ("GSASSHA", "alpha", math.nan),
        ("SophiaH", "clip_threshold", 0.0),
        ("SophiaH", "clip_threshold", "1"),
        ("SAM over SGD", "rho", math.nan),
        ("SAM over SGD", "alpha", "0"),
        ("SAM over SGD", "ascents", -1),
        ("SAM over SGD", "ascents", "3"),
        ("SAM over SGD", "lr", -0.1),
        ("SAM over SGD", "lr", math.nan),
        ("SAM over SGD", "lr", "0.1"),
        ("SAM over SGD", "momentum", -0.5),
        ("SAM over SGD", "momentum", None),
        ("SAM over SGD", "nesterov", "yes"),
        ("SAM over SGD", "weight_decay", 1e300),  # which bfloat16 can't hold, and torch says so only in a step
        ("SAM over AdamW", "betas", (0.9, 1.5)),
        ("SAM over AdamW", "betas", ("0.9", "0.9")),
        ("SAM over AdamW", "betas", (0.9,)),
        ("SAM over AdamW", "eps", -1.0),
        ("SAM over AdamW", "amsgrad", 3),
    ],
)
def test_hyperparameters_of_one_method_alone_are_checked_too(name, key, value):
    assert_refused(name, lambda s: group_with(s, 1, key, value), "group 1")


@pytest.mark.parametrize("make", [SASSHA, SophiaH])
@pytest.mark.parametrize("lr", ["0.1", None, True, [0.1], 10**5000, 1 + 0j], ids=lambda lr: type(lr).__name__)
def test_constructors_refuse_what_is_no_number(make, lr):
    with pytest.raises(ValueError, match=r"lr is .*, expected a finite number from 0"):
        make([nn.Parameter(torch.ones(2))], lr=lr)


# ---- checkpoints of others ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("saver", METHODS)
@pytest.mark.parametrize("loader", METHODS)
def test_a_checkpoint_of_another_method_is_refused_or_the_run_goes_on(loader, saver):
    """What is refused are other state, other hyperparameters, and curvature of another kind. Nothing fails later."""
    _, other = trained(saver)
    problem, opt = trained(loader)
    weights, state = problem.weights(), state_of(opt)
    if loader == saver or {loader, saver} == {"SASSHA", "GSASSHA"}:
        opt.load_state_dict(other.state_dict())
    else:
        with pytest.raises(ValueError, match=r"load_state_dict: .* (lacks|curvature is an average)"):
            opt.load_state_dict(other.state_dict())
        assert_same_bits(problem.weights(), weights)
        assert_same_state(state_of(opt), state)
    by_closure(opt, problem.loss)


def without_mark(saved):
    """As 0.1.0 wrote it."""
    for group in saved["param_groups"]:
        group.pop("curvature", None)
    return saved


@pytest.mark.parametrize(
    ("saver", "loader", "method", "mark"),
    [
        ("AdaHessian", "SASSHA", "AdaHessian, whose curvature is an average of squares,", True),
        ("SASSHA", "AdaHessian", "SASSHA, G-SASSHA or M-SASSHA, whose curvature is an average of absolute", True),
        ("SophiaH", "AdaHessian", "Sophia-H, whose curvature is an average of signed", True),
        ("SophiaH", "SASSHA", "Sophia-H, whose curvature is an average of signed", False),
        ("SASSHA", "AdaHessian", "SASSHA, G-SASSHA or M-SASSHA, whose curvature is an average of absolute", False),
        ("GSASSHA", "SophiaH", "SASSHA, G-SASSHA or M-SASSHA, whose curvature is an average of absolute", False),
        (
            "SASSHA with rho 0",
            "SophiaH",
            "SASSHA, G-SASSHA or M-SASSHA, whose curvature is an average of absolute",
            True,
        ),
    ],
)
def test_curvature_of_another_kind_is_refused_by_the_names_of_both_methods(saver, loader, method, mark):
    name = saver.removesuffix(" with rho 0")
    saved = copy.deepcopy(trained(name)[1].state_dict())
    for group in saved["param_groups"] if saver != name else ():
        group["rho"] = 0.0
    _, opt = trained(loader)
    live, state = groups_of(opt), state_of(opt)
    message = rf"{loader}.load_state_dict: group 0 is of {method}.*begin {loader} with an empty"
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(saved if mark else without_mark(saved))
    assert groups_of(opt) == live
    assert_same_state(state_of(opt), state)


@pytest.mark.parametrize("name", OURS)
def test_groups_without_a_mark_load_into_their_own_method_and_get_it(name):
    problem, opt = trained(name)
    live = groups_of(opt)
    opt.load_state_dict(without_mark(copy.deepcopy(opt.state_dict())))
    assert groups_of(opt) == live
    by_closure(opt, problem.loss)


@pytest.mark.parametrize("value", [7, None, "cube"])
def test_a_mark_that_nobody_writes_is_a_damage(value):
    assert_refused("SASSHA", lambda saved: group_with(saved, 1, "curvature", value), "'curvature' of group 1", "one of")


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "step"])
def test_state_that_the_base_optimizer_of_sam_needs_is_missed(key):
    assert_refused("SAM over AdamW", edited(lambda s: s["state"][1].pop(key)), f"lacks ['{key}']")


def test_a_base_optimizer_that_can_not_be_asked_loads_its_own_checkpoints():
    """It needs a parameter of its own size, so nothing is known of its state before its first step."""

    class Particular(torch.optim.SGD):
        def step(self, closure=None):
            sizes = {p.numel() for group in self.param_groups for p in group["params"]}
            assert sizes <= {3, 4, 5, 6}
            return super().step(closure)

    problems = [Problem(), Problem()]
    first, second = (SAM(p.groups(), Particular, lr=2.0**-7, momentum=0.5) for p in problems)
    by_closure(first, problems[0].loss)
    second.load_state_dict(first.state_dict())
    assert_same_state(state_of(second), state_of(first))


@pytest.mark.parametrize("name", OLD)
def test_a_damaged_checkpoint_of_0_1_0_is_refused(name):
    saved = saved_by_0_1_0()[name]["opt"]
    entry = saved["state"][1]
    key = next(key for key, value in entry.items() if isinstance(value, torch.Tensor))
    entry[key] = entry[key] * math.nan
    problem, (method, options) = Problem(), OLD[name]
    opt = method(problem.groups(), **options)
    weights = problem.weights()
    with pytest.raises(ValueError, match=f"'{key}' of parameter 0 of group 1"):
        opt.load_state_dict(saved)
    assert_same_bits(problem.weights(), weights)
    assert not opt.state


AUTHORS_DAMAGE = {
    "no curvature": (lambda s: s["state"][1].pop("hess_momentum"), HESSIAN),
    "a step of text": (lambda s: s["state"][1].update(step="3"), "'step' of parameter 0 of group 1"),
    "no clock": (lambda s: s["state"][1].pop("hessian_step"), "'hessian_step' of parameter 0 of group 1"),
    "a norm of NaN": (lambda s: s["param_groups"][1].update(norm_factor=[math.nan]), "'norm_factor' of group 1"),
    "no norm": (lambda s: s["param_groups"][1].update(norm_factor=[]), "'norm_factor' of group 1"),
    "betas of text": (lambda s: s["param_groups"][1].update(betas=("a", "b")), "'betas' of group 1"),
    "no betas": (lambda s: s["param_groups"][1].pop("betas"), "lacks ['betas']"),
}


@pytest.mark.parametrize("kind", AUTHORS_DAMAGE)
def test_a_damaged_checkpoint_of_the_authors_m_sassha_is_refused(kind):
    edit, text = AUTHORS_DAMAGE[kind]

    def damage(saved):
        for i, entry in saved["state"].items():
            saved["state"][i] = {
                "hessian_step": entry["hessian_step"],
                "step": entry["step"],
                "grad_momentum": entry[EXP_AVG],
                "hess_momentum": entry[HESSIAN],
            }
        for group in saved["param_groups"]:
            del group["perturb_eps"], group["evaluating"]
            group["norm_factor"] = [torch.tensor(0.25)]
        edit(saved)
        return saved

    assert_refused("MSASSHA", damage, text)
