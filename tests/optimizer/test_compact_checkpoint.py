"""Checkpoints of compact state: as they are, in float32, and from any setting into any other."""

import io
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from compact_runs import COMPACT, METHODS, SETTINGS, SEVEN, Setting, built, decoded, id_of, train, trained
from tolerances import CURVATURE_RTOL, MOMENTUM_BOUND
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from training import assert_same_bits, assert_same_state, closure_of, make_loss, make_net, snapshot, state_of

from sassha_fast import SAM, SASSHA, cast_model

EIGHT = Setting(torch.float32, 8)
FORMS = {"as_it_is": lambda opt: opt.state_dict(), "in_float32": lambda opt: opt.full_state_dict()}
DROPPED = "the checkpoint has bits of .* weights"


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue()), torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def assert_resumes(setting, method, form, **options):
    options = {"lazy_hessian": 4, **options}
    net, opt, _ = trained(setting, 7, method, **options)
    _, saved = through_file({"net": net.state_dict(), "opt": FORMS[form](opt)})
    train(net, opt, 6)
    other_net, other = built(setting, method, seed=99, **options)
    other_net.load_state_dict(saved["net"])
    other.load_state_dict(saved["opt"])
    train(other_net, other, 6)
    assert_same_bits(snapshot(other_net), snapshot(net))
    assert_same_state(state_of(other), state_of(opt))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("setting", COMPACT, ids=id_of)
def test_interrupted_and_resumed_equals_uninterrupted(setting, form):
    assert_resumes(setting, "SASSHA", form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "SASSHA"])
@pytest.mark.filterwarnings("ignore:MSASSHA. the model's state_dict")
def test_the_same_of_the_other_methods(method, form):
    assert_resumes(SEVEN, method, form)


def test_a_capturable_run_resumes():
    assert_resumes(SEVEN, "SASSHA", "as_it_is", capturable=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", SETTINGS, ids=id_of)
@pytest.mark.parametrize("source", [Setting(torch.float32), EIGHT, Setting(torch.bfloat16, 16, 32), SEVEN], ids=id_of)
def test_every_checkpoint_loads_into_every_setting(source, target, form):
    net, opt, _ = trained(source, 12)
    other_net, other = built(target, seed=99)
    other_net.load_state_dict(net.state_dict())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*{DROPPED}")
        other.load_state_dict(through_file(FORMS[form](opt))[1])
    m, d = MOMENTUM_BOUND, CURVATURE_RTOL
    for found, wanted in zip(decoded(other), decoded(opt), strict=True):
        assert torch.allclose(
            found["exp_avg"], wanted["exp_avg"], rtol=0.0, atol=m * float(wanted["exp_avg"].abs().max())
        )
        assert torch.allclose(found["exp_hessian_diag"], wanted["exp_hessian_diag"], rtol=d, atol=0.0)
        unknown = [torch.signbit(entry["exp_hessian_diag"]) for entry in (found, wanted)]
        assert torch.equal(*unknown)
    assert [entry["step"] for entry in state_of(other)] == [12] * 6
    assert train(other_net, other, 5)[-1] < 2.0


def test_a_checkpoint_as_it_is_takes_the_bytes_that_the_state_takes():
    net = torch.nn.Linear(512, 512, bias=False).bfloat16()
    opt = SASSHA(net.parameters(), state_bits=8, master_weight_bits=24)
    (net(torch.randn(4, 512).bfloat16()).float() ** 2).mean().backward(create_graph=True)
    opt.step()
    sizes = {form: through_file(save(opt))[0] / 512**2 for form, save in FORMS.items()}
    assert 3.18 < sizes["as_it_is"] < 3.25
    assert 12.0 < sizes["in_float32"] < 12.1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", [Setting(torch.bfloat16), Setting(torch.float32, 8)], ids=id_of)
def test_corrections_that_are_dropped_are_warned_of_by_name(target, form):
    _, opt, _ = trained(SEVEN, 3)
    other_net = make_net(target.dtype)
    other = SASSHA(other_net.named_parameters(), **target.options)
    with pytest.warns(
        UserWarning, match=rf"SASSHA.load_state_dict: {DROPPED}, '0.weight' among them, .*master_weights"
    ):
        other.load_state_dict(FORMS[form](opt))


HALF = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", ["SASSHA", "MSASSHA"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_corrections_of_another_dtype_are_dropped_and_warned_of(dtype, method, form):
    """A place of bfloat16 is eight of float16."""
    _, opt, _ = trained(Setting(dtype, 8, 24), 3, method)
    _, saved = through_file(FORMS[form](opt))
    net, other = built(Setting(HALF[dtype], 8, 24), method)
    with pytest.warns(UserWarning, match=f"{DROPPED}.* over parameters of the dtype that they had, bfloat16 or"):
        other.load_state_dict(saved)
    assert not any(entry["weight_correction"].any() for entry in state_of(other))
    in_state = [entry.get("weight") for entry in state_of(other)]
    x = in_state if method == "MSASSHA" else snapshot(net)
    for found, wanted in zip(other.master_weights(net).values(), x, strict=True):
        assert torch.equal(found, wanted.float())
    train(net, other, 2)


def test_corrections_of_a_checkpoint_that_does_not_say_whose_they_are_are_the_parameters():
    net, opt, _ = trained(SEVEN, 3)
    for save in FORMS.values():
        saved = through_file(save(opt))[1]
        for entry in saved["state"].values():
            del entry["weight_correction_mantissa"]
        other_net, other = built(SEVEN, seed=99)
        other_net.load_state_dict(net.state_dict())
        other.load_state_dict(saved)
        assert_same_state(state_of(other), state_of(opt))


def test_a_warning_that_is_an_error_leaves_the_optimizer_as_it_was():
    _, opt, _ = trained(SEVEN, 3)
    _, other, _ = trained(EIGHT, 2)
    before = state_of(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=DROPPED):
            other.load_state_dict(opt.state_dict())
    assert_same_state(state_of(other), before)


def test_corrections_that_are_kept_or_that_are_all_0_are_not_warned_of():
    _, opt, _ = trained(SEVEN, 3)
    _, fresh = built(SEVEN)
    make_loss(make_net(torch.bfloat16), torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built(Setting(torch.bfloat16, 16, 32))[1].load_state_dict(opt.state_dict())
        built(Setting(torch.bfloat16))[1].load_state_dict(fresh.state_dict())


def test_sam_leaves_the_state_of_its_base_optimizer_as_it_is():
    net = make_net(torch.bfloat16)
    opt = SAM(net.parameters(), torch.optim.AdamW, lr=0.01, rho=0.05)
    train(net, opt, 2)
    before = state_of(opt.base_optimizer)
    assert before[0]["exp_avg"].dtype == torch.bfloat16
    opt.load_state_dict(through_file(opt.state_dict())[1])
    assert_same_state(state_of(opt.base_optimizer), before)


# ---- layouts of memory -----------------------------------------------------------------------------------------------


def images(memory_format, seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), nn.Conv2d(16, 9, 3), nn.Flatten(), nn.Linear(9, 7))
    net = net.bfloat16().to(memory_format=memory_format)
    return net, SASSHA(net.parameters(), lr=0.02, rho=0.05, lazy_hessian=3, **SEVEN.options)


def train_on_images(net, opt, steps):
    x = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(steps):
        opt.step(closure_of(opt, lambda: nn.functional.cross_entropy(net(x).float(), torch.arange(8) % 7)))


def through_distributed_checkpoint(folder, net, opt, other_net, other, *, without=(), planner=None):
    """What ``other`` gets if what ``opt`` has is saved by torch.distributed.checkpoint, but for some keys."""
    saved = get_optimizer_state_dict(net, opt)
    for entry in saved["state"].values():
        for key in without:
            entry.pop(key, None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({"opt": saved}, checkpoint_id=folder, no_dist=True)
    train_on_images(other_net, other, 1)  # which there is state of
    found = {"opt": get_optimizer_state_dict(other_net, other)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(found, checkpoint_id=folder, no_dist=True, planner=planner)
    set_optimizer_state_dict(other_net, other, found["opt"])


def copied_contiguously(folder, net, opt, other_net, other):
    saved = through_file(opt.state_dict())[1]
    for entry in saved["state"].values():
        entry.update({key: value.contiguous() for key, value in entry.items() if isinstance(value, torch.Tensor)})
    other.load_state_dict(saved)


LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@pytest.mark.parametrize("tool", [copied_contiguously, through_distributed_checkpoint])
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_tools_that_copy_tensors_do_not_tear_codes_from_their_scales(source, target, tool, tmp_path):
    """Groups of a scale follow memory, and a copy follows the indices of elements."""
    net, opt = images(LAYOUTS[source])
    train_on_images(net, opt, 5)
    other_net, other = images(LAYOUTS[target], seed=1)
    tool(tmp_path, net, opt, other_net, other)
    for found, wanted in zip(decoded(other), decoded(opt), strict=True):
        for key, bound in (("exp_avg", MOMENTUM_BOUND), ("exp_hessian_diag", CURVATURE_RTOL)):
            most = bound * wanted[key].abs() if key == "exp_hessian_diag" else bound * wanted[key].abs().max()
            assert ((found[key] - wanted[key]).abs() <= most).all(), key
    if source == target:
        other_net.load_state_dict(net.state_dict())
        train_on_images(net, opt, 4)
        train_on_images(other_net, other, 4)
        assert_same_bits(snapshot(other_net), snapshot(net))
        assert_same_state(state_of(other), state_of(opt))


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("target", SETTINGS, ids=id_of)
@pytest.mark.parametrize("source", [Setting(torch.float32), EIGHT, Setting(torch.bfloat16, 16, 32), SEVEN], ids=id_of)
def test_values_that_torch_adds_of_the_optimizer_that_loads_are_not_taken_for_the_checkpoint(source, target, used):
    """With ``full_state_dict=True`` it keeps what that one has under names that the checkpoint does not have."""
    net, opt, _ = trained(source, 12)
    other_net, other = built(target, seed=99)
    train(other_net, other, 2 if used else 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*{DROPPED}")
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(other_net, other, get_optimizer_state_dict(net, opt, options=options), options=options)
    for found, wanted in zip(decoded(other), decoded(opt), strict=True):
        bound = MOMENTUM_BOUND * float(wanted["exp_avg"].abs().max())
        assert torch.allclose(found["exp_avg"], wanted["exp_avg"], rtol=0.0, atol=bound)
        assert torch.allclose(found["exp_hessian_diag"], wanted["exp_hessian_diag"], rtol=CURVATURE_RTOL, atol=0.0)
    if source == target:
        other_net.load_state_dict(net.state_dict())
        assert_same_state(state_of(other), state_of(opt))
    train(other_net, other, 2)


# ---- flat checkpoints ------------------------------------------------------------------------------------------------

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def loaded_flat(net, opt, other_net, other):
    """What torch makes of a flat checkpoint: it asks for the names that the state of ``other`` has."""
    saved = through_file(get_optimizer_state_dict(net, opt, options=FLAT))[1]
    set_optimizer_state_dict(other_net, other, saved, options=FLAT)


@pytest.mark.parametrize(("used", "capturable"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("setting", "method"), [*((s, "SASSHA") for s in SETTINGS), *((SEVEN, m) for m in METHODS if m != "SASSHA")]
)
@pytest.mark.filterwarnings("ignore:MSASSHA. the model's state_dict")
def test_flat_checkpoints_go_on_bit_for_bit(setting, method, used, capturable):
    net, opt, _ = trained(setting, 7, method, capturable=capturable)
    other_net, other = built(setting, method, seed=99, capturable=capturable)
    train(other_net, other, 2 if used else 0)
    other_net.load_state_dict(net.state_dict())
    loaded_flat(net, opt, other_net, other)
    assert_same_state(state_of(other), state_of(opt))
    train(net, opt, 3)
    train(other_net, other, 3)
    assert_same_bits(snapshot(other_net), snapshot(net))
    assert_same_state(state_of(other), state_of(opt))


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_flat_distributed_checkpoints_say_how_codes_lie(source, target, tmp_path):
    net, opt = images(LAYOUTS[source])
    train_on_images(net, opt, 5)
    other_net, other = images(LAYOUTS[target], seed=1)
    train_on_images(other_net, other, 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        saved = {"opt": get_optimizer_state_dict(net, opt, options=FLAT)}
        dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
        found = {"opt": get_optimizer_state_dict(other_net, other, options=FLAT)}
        dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other_net, other, found["opt"], options=FLAT)
    for one, two in zip(decoded(other), decoded(opt), strict=True):
        bound = MOMENTUM_BOUND * float(two["exp_avg"].abs().max())
        assert torch.allclose(one["exp_avg"], two["exp_avg"], rtol=0.0, atol=bound)
        assert torch.allclose(one["exp_hessian_diag"], two["exp_hessian_diag"], rtol=CURVATURE_RTOL, atol=0.0)
    if source == target:
        assert_same_state(state_of(other), state_of(opt))


@pytest.mark.parametrize("target", [Setting(torch.float32), Setting(torch.float32, 16)], ids=id_of)
def test_flat_codes_that_torch_leaves_out_are_named_with_the_way_to_go(target):
    net, opt, _ = trained(EIGHT, 3)
    other_net, other, _ = trained(target, 2)
    before = state_of(other)
    way = r"flatten_optimizer_state_dict=True.* with the state_bits, master_weight_bits and full_precision_below that"
    with pytest.raises(ValueError, match=f"'exp_avg' of .*{way}") as caught:
        loaded_flat(net, opt, other_net, other)
    assert "damaged" not in str(caught.value)
    assert_same_state(state_of(other), before)
    same_net, same = built(EIGHT)  # which is the remedy
    loaded_flat(net, opt, same_net, same)
    other.load_state_dict(same.state_dict())
    train(other_net, other, 2)


@pytest.mark.parametrize("target", [EIGHT, Setting(torch.float32, 16)], ids=id_of)
def test_flat_numbers_load_into_state_of_fewer_bits(target):
    net, opt, _ = trained(Setting(torch.float32), 5)
    other_net, other, _ = trained(target, 2)
    loaded_flat(net, opt, other_net, other)
    for one, two in zip(decoded(other), decoded(opt), strict=True):
        bound = MOMENTUM_BOUND * float(two["exp_avg"].abs().max())
        assert torch.allclose(one["exp_avg"], two["exp_avg"], rtol=0.0, atol=bound)


def test_parameters_without_state_have_none_after_a_flat_checkpoint():
    net, opt = built(SEVEN)
    net[0].weight.requires_grad_(False)
    train(net, opt, 2)
    net[0].weight.requires_grad_(True)
    saved = get_optimizer_state_dict(net, opt, options=FLAT)
    other_net, other, _ = trained(SEVEN, 2)
    set_optimizer_state_dict(other_net, other, saved, options=FLAT)
    assert other_net[0].weight not in other.state
    assert other_net[2].weight in other.state


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_checkpoints_that_do_not_say_how_codes_lie_are_read_as_they_lie(source, target):
    net, opt = images(LAYOUTS[source])
    train_on_images(net, opt, 5)
    saved = through_file(opt.state_dict())[1]
    for entry in saved["state"].values():
        entry.pop("codes_order", None)
    others = [images(LAYOUTS[target], seed=1)[1] for _ in range(2)]
    for other, checkpoint in zip(others, (saved, opt.state_dict()), strict=True):
        other.load_state_dict(checkpoint)
    assert_same_state(state_of(others[0]), state_of(others[1]))


def test_older_distributed_checkpoints_load_if_the_planner_may_leave_keys_out(tmp_path):
    net, opt = images(torch.channels_last)
    train_on_images(net, opt, 5)
    other_net, other = images(torch.channels_last, seed=1)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    without = {"codes_order", "weight_correction_mantissa"}
    through_distributed_checkpoint(tmp_path, net, opt, other_net, other, without=without, planner=planner)
    assert_same_state(state_of(other), state_of(opt))


def test_any_order_of_dimensions_is_kept():
    for order in ((1, 0), (2, 0, 1), (0, 2, 3, 1), (3, 2, 1, 0), tuple(reversed(range(12)))):
        sizes = [3, 5, 4, 2, *[1] * 6, 2, 3][: len(order)]
        back = [order.index(d) for d in range(len(order))]
        p = torch.nn.Parameter(torch.randn([sizes[d] for d in order]).permute(back))
        opt = SASSHA([p], state_bits=8, full_precision_below=0)
        (p * torch.randn_like(p)).sin().sum().backward(create_graph=True)
        opt.step()
        saved = opt.state_dict()
        wanted = opt.full_state_dict()["state"][0]["exp_avg"]
        entry = saved["state"][0]
        entry.update({key: value.contiguous() for key, value in entry.items() if isinstance(value, torch.Tensor)})
        opt.load_state_dict(saved)
        assert torch.equal(opt.full_state_dict()["state"][0]["exp_avg"], wanted), order


# ---- weights for export -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["SASSHA", "MSASSHA"])
def test_master_weights_go_into_a_float32_model_that_continues(method):
    net, opt, _ = trained(Setting(torch.bfloat16, 32, 32), 5, method)
    masters = opt.master_weights(net)
    assert list(masters) == [name for name, _ in net.named_parameters()]
    wide = make_net()
    wide.load_state_dict(masters)
    x = {name: value.float() for name, value in (net.state_dict() if method == "SASSHA" else _true(net, opt)).items()}
    for name, value in masters.items():
        assert value.dtype == torch.float32
        assert torch.equal(value.bfloat16().float(), x[name])  # the parameter is the nearest of its masters
    assert any(not torch.equal(masters[name], x[name]) for name in masters)


def test_master_weights_have_all_names_of_tied_parameters():
    def tied(dtype):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(70, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 70, bias=False))
        net[3].weight = net[0].weight
        return cast_model(net, dtype)

    net = tied(torch.bfloat16)
    opt = SASSHA(net.parameters(), lr=0.02, full_precision_below=0, master_weight_bits=24)
    y = torch.arange(70)
    for _ in range(3):
        x = net[1](net[0](y)).float()
        loss = nn.functional.cross_entropy(net[3](net[2](x).bfloat16()).float(), y.flip(0))
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
    masters = opt.master_weights(net)
    assert list(masters) == [name for name, _ in net.named_parameters(remove_duplicate=False)]
    assert masters["3.weight"] is masters["0.weight"]
    wide = tied(torch.float32)
    assert set(wide.load_state_dict(masters, strict=False).missing_keys) <= {name for name, _ in wide.named_buffers()}
    assert torch.equal(wide[3].weight, masters["0.weight"])
    with pytest.warns(UserWarning, match=r"master_weights.* with model.load_state_dict\(weights, strict=False\)"):
        SASSHA(net.parameters()).load_state_dict(opt.state_dict())


def _true(net, opt):
    with opt.true_weights():
        return {name: value.clone() for name, value in net.state_dict().items()}


def test_master_weights_are_copies_of_the_parameters_that_the_optimizer_has():
    net = make_net()
    opt = SASSHA(net[0].parameters())
    masters = opt.master_weights(net)
    assert list(masters) == ["0.weight", "0.bias"]
    masters["0.weight"].zero_()
    assert net[0].weight.any()
    double = make_net(torch.float64)
    assert SASSHA(double.parameters()).master_weights(double)["0.weight"].dtype == torch.float64


def test_weights_that_others_write_keep_their_corrections_until_these_are_cleared():
    """As docs/compact.md says: they can't be told from the weights of the same checkpoint."""
    net, opt, _ = trained(SEVEN, 3)
    net.load_state_dict(make_net(torch.bfloat16, seed=5).state_dict())
    written = {name: p.detach().clone() for name, p in net.named_parameters()}
    masters = opt.master_weights(net)
    assert any(not torch.equal(masters[name], p.float()) for name, p in written.items())
    for name, p in written.items():
        assert ((masters[name] - p.float()).abs() <= 2.0**-8 * p.float().abs()).all()
    for entry in opt.state.values():
        if "weight_correction" in entry:
            entry["weight_correction"].zero_()
    assert all(torch.equal(master, written[name].float()) for name, master in opt.master_weights(net).items())


def test_master_weights_of_perturbed_weights_are_refused():
    net, opt, _ = trained(SEVEN, 2, calls=True)
    make_loss(net, torch.bfloat16)().backward()
    opt.perturb_weights()
    with pytest.raises(RuntimeError, match=r"SASSHA.master_weights: the weights are perturbed"):
        opt.master_weights(net)
    opt.unperturb()
    assert opt.master_weights(net)


# ---- damaged --------------------------------------------------------------------------------------------------------

CODES, SCALES = "exp_avg_codes", "exp_avg_scale"


def damage(key, change):
    def apply(entry):
        entry[key] = change(entry[key])

    return apply


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (damage(CODES, lambda t: t[1:]), r"'exp_avg' of .* expected codes of shape \(40, 12\)"),
        (damage(CODES, lambda t: t.float()), r"'exp_avg_codes' of .* expected codes, in place of 'exp_avg'"),
        (damage(CODES, lambda t: None), r"'exp_avg_codes' of .* expected codes, in place of 'exp_avg'"),
        (damage(CODES, lambda t: t.view(torch.uint8)), r"'exp_avg_codes' of .* expected codes of torch.int8;"),
        (damage(CODES, lambda t: t.to(torch.int16)), r"'exp_avg_codes' of .* expected codes of torch.int8;"),
        (damage(CODES, lambda t: t * 0 - 128), r"'exp_avg_codes' of .* expected codes from −127 to 127"),
        (
            damage("exp_hessian_diag_codes", lambda t: t.to(torch.int16)),
            r"'exp_hessian_diag_codes' of .* expected codes of torch.int8 or torch.uint8",
        ),
        (
            damage("exp_hessian_diag_codes", lambda t: t.view(torch.int8)),
            r"'exp_hessian_diag' of .* expected no element below 0",
        ),
        (
            damage("weight_correction_codes", lambda t: t.view(torch.uint8)),
            r"'weight_correction_codes' of .* expected codes of torch.int8 or torch.int16",
        ),
        (damage(SCALES, lambda t: t[1:]), r"'exp_avg_scale' of .* expected 15 scales of torch.float32"),
        (damage(SCALES, lambda t: -1 - t), r"'exp_avg_scale' of .* expected finite scales that are not negative"),
        (damage(SCALES, lambda t: t * torch.nan), r"'exp_avg_scale' of .* expected finite scales"),
        (
            damage("exp_hessian_diag_scale", lambda t: t.float()),
            r"'exp_hessian_diag_scale' of .* expected 15 scales of torch.bfloat16",
        ),
        (
            damage("weight_correction_mantissa", lambda n: 8),
            r"'weight_correction_mantissa' of .* is tensor\(\[8\]\), expected 7, of bfloat16, or 10, of",
        ),
        (
            damage("weight_correction_mantissa", lambda n: 10**20),
            r"'weight_correction_mantissa' of .* is 1000.*, expected 7, of bfloat16, or 10, of",
        ),
        (
            damage("codes_order", lambda t: t * 0),
            r"'codes_order' of .* expected a tensor of its 2 dim",
        ),
        (
            damage("codes_order", lambda t: t[:1]),
            r"'codes_order' of .* expected a tensor of its 2 dim",
        ),
        (damage("codes_order", lambda t: "x"), r"'codes_order' of .* is 'x', expected a tensor of its 2 dimensions"),
        (damage("weight_correction_codes", lambda t: t[:, 1:]), r"'weight_correction' of .* expected codes of shape"),
        (lambda e: e.pop(SCALES), r"'exp_avg_scale' of .* expected 15 scales"),
        (lambda e: e.pop(CODES), r"'exp_avg' of .* expected codes of 8 bits beside 'exp_avg_scale'"),
        (lambda e: e.update(exp_avg=e[CODES]), r"'exp_avg_codes' of .* expected codes, in place of 'exp_avg'"),
        (lambda e: e.update(exp_avg=7.0), r"'exp_avg_codes' of .* expected codes, in place of 'exp_avg'"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(apply, message):
    _, opt, _ = trained(SEVEN, 3)
    saved = through_file(opt.state_dict())[1]
    apply(saved["state"][0])
    before = state_of(opt)
    with pytest.raises(ValueError, match=rf"^SASSHA.load_state_dict: {message}"):
        opt.load_state_dict(saved)
    assert_same_state(state_of(opt), before)


def test_corrections_outside_of_a_last_place_are_refused():
    _, opt, _ = trained(SEVEN, 3)
    saved = opt.full_state_dict()
    saved["state"][0]["weight_correction"] += 1.0
    with pytest.raises(ValueError, match=r"'weight_correction' of .*parts of a last place, from -0.5 to 0.5"):
        opt.load_state_dict(saved)
