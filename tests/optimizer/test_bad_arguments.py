"""Arguments of a wrong type are refused by name: when an optimizer is built, in a group, and when they are assigned."""

import math

import numpy as np
import pytest
import torch
from torch.optim import SGD
from training import BACKENDS, assert_same_bits, closure_of, make_net, same_bits, snapshot, three_calls

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH, reference
from sassha_fast.variant import Variant

FAMILY = (SASSHA, GSASSHA, MSASSHA, AdaHessian, SophiaH)
NO_NUMBERS = [None, "x", "0.1", b"1", 1j, True, math.nan, [0.1], torch.tensor(True), torch.tensor(1 + 0j)]
OWN = {  # what beside lr and weight_decay each has as a number
    SASSHA: ("rho", "eps", "perturb_eps", "hessian_power"),
    GSASSHA: ("rho", "alpha"),
    MSASSHA: ("rho", "eps"),
    AdaHessian: ("eps", "hessian_power"),
    SophiaH: ("clip_threshold", "eps"),
}


def parameter():
    return torch.nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize("method", FAMILY)
def test_what_is_no_number_is_refused_by_name(method, value):
    for name in ("lr", "weight_decay", *OWN[method]):
        shown = "hessian_floor" if (method, name) == (SophiaH, "eps") else name  # where Sophia-H keeps it
        if shown == "hessian_floor" and value is None:
            continue  # no floor
        with pytest.raises(ValueError, match=rf"^{method.__name__}: {shown} is .*, expected"):
            method([parameter()], **{name: value})


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize("method", FAMILY)
def test_groups_are_held_to_the_same(method, value):
    names = [name for name in ("lr", *OWN[method]) if (method, name) != (SophiaH, "eps")]
    opt = method([parameter()])
    for name in names:
        group = {"params": [parameter()], name: value}
        with pytest.raises(ValueError, match=rf"^{method.__name__}: {name} is "):
            method([group])
        with pytest.raises(ValueError, match=rf"^{method.__name__}: {name} is "):
            opt.add_param_group(group)
    assert len(opt.param_groups) == 1


WIDE = {"state_bits": 8, "master_weight_bits": 24, "full_precision_below": 0, "lazy_hessian": 7, "capturable": True}
WIDE |= {"seed": 3, "hvp": "finite_difference", "max_grad_norm": 1.0, "adaptive": True, "backend": "reference"}
WIDE |= {"spatial_averaging": None, "curvature": torch.ones(2), "grad_reduce": np.ones(2)}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("method", FAMILY)
def test_a_group_is_not_given_what_holds_for_the_whole_optimizer(method, name):
    group = {"params": [parameter()], name: WIDE[name]}
    opt = method([parameter()])
    for refused in (lambda: method([group]), lambda: opt.add_param_group(group)):
        with pytest.raises(
            ValueError, match=rf"^{method.__name__}: a parameter group has {name}=.* holds for the whole"
        ):
            refused()
    assert len(opt.param_groups) == 1


def test_groups_may_have_keys_of_their_owner_and_say_what_holds_anyway():
    torchs = torch.optim.AdamW([parameter()], lr=0.1).param_groups
    for method in FAMILY:
        opt = method([{**torchs[0], "initial_lr": 0.1, "layer": 3, "state_bits": 32}])
        assert opt.param_groups[0]["layer"] == 3
        method(opt.param_groups)
        opt.load_state_dict(opt.state_dict())
    SASSHA([{"params": [parameter()], "state_bits": 8}], state_bits=8)


def test_groups_of_sam_may_have_all_hyperparameters_of_its_base_optimizer():
    group = {"params": [parameter()], "capturable": True}
    assert SAM([group], torch.optim.AdamW, lr=0.1).param_groups[0]["capturable"] is True
    with pytest.raises(ValueError, match="SAM: a parameter group has seed=3"):
        SAM([{"params": [parameter()], "seed": 3}], torch.optim.AdamW, lr=0.1)


@pytest.mark.parametrize("name", ["state_bits", "hvp", "my_own"])
def test_groups_of_checkpoints_may_have_any_keys(name):
    opt = SASSHA([parameter()])
    saved = opt.state_dict()
    saved["param_groups"][0][name] = 8
    opt.load_state_dict(saved)
    assert opt.param_groups[0][name] == 8


@pytest.mark.parametrize("value", [v for v in NO_NUMBERS if v is not None], ids=repr)
@pytest.mark.parametrize("method", [*FAMILY, SAM])
def test_max_grad_norm_is_checked_when_it_is_given_and_when_it_is_assigned(method, value):
    build = (lambda p, **o: SAM(p, SGD, lr=0.1, **o)) if method is SAM else method
    with pytest.raises(ValueError, match=rf"^{method.__name__}: max_grad_norm is "):
        build([parameter()], max_grad_norm=value)
    opt = build([parameter()], max_grad_norm=2.0)
    with pytest.raises(ValueError, match=rf"^{method.__name__}: max_grad_norm is .*expected a finite number from 0"):
        opt.max_grad_norm = value
    assert opt.max_grad_norm == 2.0


@pytest.mark.parametrize(
    ("betas", "said"),
    [
        (("0.9", "0.999"), r"betas\[0\] is '0.9'"),
        ((0.9, None), r"betas\[1\] is None"),
        ((0.9, 1j), r"betas\[1\] is 1j"),
        ((True, 0.9), r"betas\[0\] is True"),
        (0.9, "betas is 0.9, expected two numbers"),
        ("ab", "betas is 'ab', expected two numbers"),
        (None, "betas is None, expected two numbers"),
        ({0.9, 0.99}, "betas is .*, expected two numbers"),
        (torch.tensor([0.9, 0.99]), "betas is .*, expected two numbers"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("method", FAMILY)
def test_betas_are_two_numbers(method, betas, said):
    with pytest.raises(ValueError, match=rf"^{method.__name__}: {said}"):
        method([parameter()], betas=betas)


@pytest.mark.parametrize("name", ["rho", "perturb_eps", "alpha"])
def test_sam_checks_its_own(name):
    with pytest.raises(ValueError, match=rf"^SAM: {name} is 'x'"):
        SAM([parameter()], SGD, lr=0.1, **{name: "x"})
    with pytest.raises(ValueError, match=rf"^SAM: {name} is None"):
        SAM([{"params": [parameter()], name: None}], SGD, lr=0.1)


@pytest.mark.parametrize("value", ["no", 2, 0.5, torch.tensor(True)], ids=repr)
def test_flags_are_true_or_false(value):
    for name in ("maximize", "skip_nonfinite", "stochastic_rounding", "capturable", "adaptive", "reduce_grads"):
        with pytest.raises(ValueError, match=rf"^SASSHA: {name} is .*, expected True or False"):
            SASSHA([parameter()], **{name: value})
    opt = SASSHA([parameter()])
    with pytest.raises(ValueError, match=r"^SASSHA: skip_nonfinite is "):
        opt.skip_nonfinite = value
    for build in (
        lambda: SAM([parameter()], SGD, lr=0.1, adaptive=value),
        lambda: MSASSHA([parameter()], adaptive_bias=value),
        lambda: AdaHessian([parameter()], spatial_averaging=value),
    ):
        with pytest.raises(ValueError, match="expected True or False"):
            build()


@pytest.mark.parametrize("name", ["seed", "lazy_hessian", "n_samples"])
@pytest.mark.parametrize("value", [True, "1", 1.5, None], ids=repr)
def test_counts_are_integers_when_they_are_given_and_when_they_are_assigned(name, value):
    with pytest.raises(ValueError, match=rf"^SASSHA: {name} is {value!r}"):
        SASSHA([parameter()], **{name: value})
    opt = SASSHA([parameter()])
    with pytest.raises(ValueError, match=rf"^SASSHA: {name} is {value!r}"):
        setattr(opt, name, value)


def test_the_sign_of_a_group_is_checked():
    with pytest.raises(ValueError, match=r"^MSASSHA: sign is 5, expected -1 \(against the momentum\)"):
        MSASSHA([{"params": [parameter()], "sign": 5}])


def test_numbers_of_other_libraries_are_numbers():
    numpy = pytest.importorskip("numpy")
    opt = SASSHA([parameter()], lr=numpy.float32(0.1), rho=numpy.float64(0.1), eps=1, betas=[0.9, numpy.float32(0.5)])
    assert opt.param_groups[0]["eps"] == 1
    SASSHA([parameter()], lr=torch.tensor(0.1), skip_nonfinite=numpy.True_, reduce_grads=None)


# ---- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", FAMILY)
def test_a_group_without_parameters_is_refused(method):
    with pytest.raises(ValueError, match=rf"^{method.__name__}: a parameter group has \['lr'\], expected a dict with"):
        method([{"lr": 0.1}])
    opt = method([parameter()])
    with pytest.raises(ValueError, match="expected a dict with 'params'"):
        opt.add_param_group({})
    with pytest.raises(ValueError, match="a parameter group is a list, expected a dict with 'params'"):
        opt.add_param_group([parameter()])
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("method", FAMILY)
def test_an_expanded_parameter_is_refused(method):
    p = torch.nn.Parameter(torch.ones(3, 1).expand(3, 4))
    with pytest.raises(
        ValueError,
        match=rf"^{method.__name__}: 'w' is expanded or overlaps itself \(shape \(3, 4\), strides \(1, 0\)\)",
    ):
        method([("w", p)])
    method([torch.nn.Parameter(torch.ones(3, 1)[:, :1].expand(3, 1))])  # nothing is shared
    method([torch.nn.Parameter(torch.ones(4, 3).t())])


@pytest.mark.parametrize("method", FAMILY)
def test_a_parameter_that_overlaps_itself_is_refused(method):
    with pytest.raises(ValueError, match=rf"^{method.__name__}: 'w' is expanded or overlaps itself .*strides \(1, 1\)"):
        method([("w", torch.nn.Parameter(torch.ones(6).as_strided((3, 3), (1, 1))))])
    method([torch.nn.Parameter(torch.ones(20).as_strided((2, 2), (3, 2)))])  # 0, 2, 3 and 5
    method([torch.nn.Parameter(torch.ones(4, 6)[::2, ::3])])


@pytest.mark.parametrize("value", [np.array([1, 2]), np.array(["a", "b"]), [1], "x", 3, torch.tensor(1)], ids=repr)
@pytest.mark.parametrize("method", FAMILY)
def test_flags_and_choices_are_refused_by_name_whatever_is_given(method, value):
    for name in ("foreach", "fused", "skip_nonfinite", "maximize", "hvp", "unseen", "backend"):
        with pytest.raises(ValueError, match=rf"^{method.__name__}: {name} is .*expected"):
            method([parameter()], **{name: value})
    with pytest.raises(ValueError, match=r"^MSASSHA: sign is .*, expected -1"):
        MSASSHA([parameter()], sign=value)


@pytest.mark.parametrize("method", FAMILY)
def test_integers_of_other_libraries_are_integers(method):
    options = {"lazy_hessian": 3, "n_samples": 2, "seed": 7}
    opt = method([parameter()], **{name: np.int64(value) for name, value in options.items()})
    for name, value in options.items():
        assert type(getattr(opt, name)) is int
        assert getattr(opt, name) == value
        for wrong in (True, np.float64(value), np.bool_(True), torch.tensor(value), str(value)):
            with pytest.raises(ValueError, match=rf"^{method.__name__}: {name} is "):
                setattr(opt, name, wrong)


# ---- a gradient of 0 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("gradient", [0.0, 1e-44])
def test_a_gradient_of_zero_gives_no_ascent_without_perturb_eps(backend, capturable, adaptive, gradient):
    p = torch.nn.Parameter(torch.arange(5.0))
    opt = SASSHA([p], rho=0.1, perturb_eps=0, backend=backend, capturable=capturable, adaptive=adaptive)
    p.grad = torch.full_like(p, gradient)
    before = p.detach().clone()
    opt.perturb_weights()
    assert same_bits(p.detach(), before)
    opt.unperturb()
    assert same_bits(p.detach(), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_without_perturb_eps_survives_a_first_gradient_of_zero(backend):
    net = make_net()
    opt = SASSHA(net.parameters(), rho=0.1, perturb_eps=0, backend=backend)
    before = snapshot(net)
    three_calls(opt, lambda: sum((p * 0.0).sum() + 0.0 * p.pow(2).sum() for p in net.parameters()))
    assert_same_bits(snapshot(net), before)
    momentum = MSASSHA(net.parameters(), rho=0.1, perturb_eps=0, weight_decay=0, backend=backend)
    momentum.step(closure_of(momentum, lambda: sum(0.0 * p.pow(2).sum() for p in net.parameters())))
    assert_same_bits(snapshot(net), before)


@pytest.mark.parametrize("on_device", [False, True])
def test_scales_of_other_norms_are_the_quotients_that_they_were(on_device):
    sums = torch.rand(50, dtype=torch.float64) * torch.logspace(-60, 60, 50, dtype=torch.float64)
    for total in sums:
        for rho, offset in ((0.1, 1e-12), (-0.3, 0.0), (0.0, 0.0)):
            found = reference.ascent_scales(total.reshape(1), [rho], [offset], on_device=on_device)
            expected = torch.tensor(rho / (math.sqrt(total.item()) + offset), dtype=torch.float64).float()
            assert same_bits(found, expected.reshape(1))


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("method", FAMILY)
def test_capturable_is_fixed_once_there_is_state(method, capturable):
    """Step counts lie on the host or on the device."""
    net = make_net()
    opt = method(net.parameters(), lr=0.01)
    opt.capturable = capturable

    def closure():
        opt.zero_grad()
        loss = net(torch.ones(2, 12)).square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    opt.capturable = capturable
    said = f"{method.__name__}: capturable is {capturable}, and the state is made for it; construct .* converts the"
    with pytest.raises(AttributeError, match=said):
        opt.capturable = not capturable
    with pytest.raises(ValueError, match=f"{method.__name__}: capturable is 'no', expected True or False"):
        opt.capturable = "no"
    opt.step(closure)
    assert opt.capturable is capturable


def test_sam_has_nothing_that_is_capturable():
    opt = SAM([parameter()], SGD, lr=0.1)
    with pytest.raises(AttributeError, match=r"^SAM: capturable is False, as SAM counts its steps on the host"):
        opt.capturable = True


@pytest.mark.parametrize("method", [*FAMILY, SAM])
def test_the_method_can_not_be_assigned(method):
    opt = SAM([parameter()], SGD, lr=0.1) if method is SAM else method([parameter()])
    before = opt.variant
    for value in (3, None, Variant()):
        with pytest.raises(AttributeError, match=rf"^{method.__name__}: variant is what .* construct"):
            opt.variant = value
    assert opt.variant is before


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("number", [0, 1])
def test_a_hyperparameter_that_was_taken_out_of_a_group_is_named(groups, number):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(groups)]
    opt = SASSHA([{"params": [p]} for p in params], lr=0.1)
    opt.step(closure_of(opt, lambda: sum((p**4).sum() for p in params)))
    number = min(number, groups - 1)
    kept = opt.param_groups[number].pop("lr")
    with pytest.raises(ValueError, match=f"SASSHA: group {number} has no 'lr', which was taken out; give it one"):
        opt.step(closure_of(opt, lambda: sum((p**4).sum() for p in params)))
    opt.param_groups[number]["lr"] = kept
    opt.step(closure_of(opt, lambda: sum((p**4).sum() for p in params)))


@pytest.mark.parametrize("backend", ["cpu", "foreach", "reference"])
def test_a_gradient_in_8_bits_is_refused_by_name_and_a_frozen_weight_is_not(backend):
    p, frozen = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), False)
    opt = SASSHA([p, frozen], lr=0.1, backend=backend)
    opt.step(closure_of(opt, lambda: (p**4).sum()))
    frozen.requires_grad_(True)
    p.grad, frozen.grad = torch.ones(4), torch.ones(4).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 is torch\.float8_e4m3fn, expected torch\.float32"):
        opt.perturb_weights()
