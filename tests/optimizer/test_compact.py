"""Whole optimizers over state and weights in fewer bits."""

import copy
import pickle
import warnings
from functools import cache

import pytest
import torch
from compact_runs import COMPACT, METHODS, SETTINGS, SEVEN, Setting, built, decoded, id_of, train, trained
from torch.amp import GradScaler
from training import (
    BACKENDS,
    assert_same_bits,
    assert_same_state,
    closure_of,
    make_loss,
    make_net,
    snapshot,
    state_of,
    three_calls,
)

from sassha_fast import SASSHA, SophiaH
from sassha_fast._core.keys import ONLY_SAVED

STEPS = 50  # five refreshes
PLAIN = Setting(torch.float32)
EIGHT = Setting(torch.float32, 8)
OTHERS = [name for name in BACKENDS if name != "reference"]


@cache
def reference_run(setting, method, calls=False, options=()):
    net, opt, losses = trained(setting, STEPS, method, calls=calls, backend="reference", **dict(options))
    return snapshot(net), state_of(opt), losses, opt.stats.refreshes


def assert_equals_the_reference(backend, setting, method, *, calls=False, **options):
    weights, state, losses, refreshes = reference_run(setting, method, calls, tuple(options.items()))
    net, opt, _ = trained(setting, STEPS, method, calls=calls, backend=backend, **options)
    assert refreshes == 5
    assert_same_bits(snapshot(net), weights)
    assert_same_state(state_of(opt), state)
    return losses


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("setting", COMPACT, ids=id_of)
def test_fifty_steps_of_three_calls_equal_the_reference_and_train(setting, backend):
    losses = assert_equals_the_reference(backend, setting, "SASSHA", calls=True)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("setting", [EIGHT, SEVEN], ids=id_of)
@pytest.mark.parametrize("method", METHODS)
def test_fifty_closures_of_every_method_equal_the_reference_and_train(method, setting, backend):
    losses = assert_equals_the_reference(backend, setting, method)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("setting", [EIGHT, SEVEN], ids=id_of)
def test_products_by_differences_equal_the_reference(setting, backend):
    assert_equals_the_reference(backend, setting, "SASSHA", hvp="finite_difference")


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.1, "clip_update": 0.7, "maximize": True},
        {"curvature": "signed", "hessian_power": 1.0, "eps": 1e-2, "hessian_floor": 1e-3},
        {"n_samples": 2, "adaptive": True, "rho": 0.5},
        {"unseen": "zero", "skip_nonfinite": True},
    ],
    ids=["clipped", "signed", "adaptive", "zero"],
)
@pytest.mark.parametrize("backend", OTHERS)
def test_other_options_equal_the_reference(options, backend):
    assert_equals_the_reference(backend, SEVEN, "SASSHA", **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_state_in_8_bits_arrives_near_float32(method, backend):
    """Not the same place: rounding at random is another path. As far down, however."""
    _, _, exact = trained(PLAIN, STEPS, method, backend=backend)
    for setting in (Setting(torch.float32, 16), EIGHT):
        _, _, losses = trained(setting, STEPS, method, backend=backend)
        assert losses[-1] - exact[-1] < 0.1 * (exact[0] - exact[-1])


# ---- what is stored -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS, ids=id_of)
def test_state_has_the_bits_that_were_asked_for_and_flat_parameters_all(setting):
    _, opt, _ = trained(setting, 2)
    m = {32: torch.float32, 16: torch.bfloat16, 8: torch.int8}[setting.state_bits]
    d = {32: torch.float32, 16: torch.bfloat16, 8: torch.uint8}[setting.state_bits]
    r = {None: None, 24: torch.int8, 32: torch.int16}[setting.master_weight_bits]
    for p, entry in opt.state.items():
        if p.dim() == 2:
            assert (entry["exp_avg"].dtype, entry["exp_hessian_diag"].dtype) == (m, d)
            assert ("exp_avg_scale" in entry) == (setting.state_bits == 8)
        else:
            assert entry["exp_avg"].dtype == entry["exp_hessian_diag"].dtype == torch.float32
        found = entry["weight_correction"].dtype if "weight_correction" in entry else None
        assert found == (r if p.dim() == 2 or r is None else torch.int16)


def test_small_parameters_are_compact_from_the_limit_on():
    net = make_net()
    opt = SASSHA(net.parameters(), state_bits=8, full_precision_below=480)
    train(net, opt, 1)
    kinds = {tuple(p.shape): opt.state[p]["exp_avg"].dtype for p in net.parameters()}
    assert kinds[40, 12] == kinds[130, 40] == torch.int8  # 480 and 5200 elements
    assert kinds[3, 130] == kinds[130,] == torch.float32


def test_bits_may_be_whole_numbers_of_any_kind():
    net = make_net(torch.bfloat16)
    opt = SASSHA(net.parameters(), state_bits=8.0, master_weight_bits=24.0)
    assert (opt.state_bits, opt.master_weight_bits) == (8, 24)
    assert type(opt.state_bits) is type(opt.master_weight_bits) is int
    train(net, opt, 2)
    opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("name", ["state_bits", "master_weight_bits", "full_precision_below"])
def test_formats_are_fixed_by_construction(name):
    _, opt = built(SEVEN)
    with pytest.raises(AttributeError, match=f"SASSHA: {name} is .* from construction on; construct an optimizer"):
        setattr(opt, name, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_bits": 4}, r"state_bits is 4, expected one of \[32, 16, 8\]"),
        ({"state_bits": "8"}, r"state_bits is '8', expected one of"),
        ({"master_weight_bits": 16}, r"master_weight_bits is 16, expected one of \[None, 24, 32\]"),
        ({"full_precision_below": -1}, r"full_precision_below is -1, expected a number of elements"),
        ({"full_precision_below": 1.5}, r"full_precision_below is 1.5, expected a number of elements"),
        ({"master_weight_bits": 24, "stochastic_rounding": True}, r"master_weight_bits=24 keeps what stochastic_rou"),
    ],
)
def test_settings_that_do_not_exist_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=rf"^SASSHA: {message}"):
        SASSHA(make_net().parameters(), **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [24, 32])
def test_masters_keep_updates_that_bfloat16_loses(bits, backend):
    """A hundred updates of 2^-14 beside weights of 1, a step of whose grid is 2^-7."""
    moved = {}
    for masters in (None, bits):
        p = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        options = {"lr": 2.0**-14, "eps": 0.0, "betas": (0.0, 0.999), "lazy_hessian": 10**6, "backend": backend}
        opt = SASSHA([p], master_weight_bits=masters, **options)
        for _ in range(100):  # g = 1 and D̄ = 1, so every update is lr
            if opt.hessian_due:
                (0.5 * p.float().square()).sum().backward(create_graph=True)
            else:
                p.grad = torch.ones_like(p)
            opt.step()
            opt.zero_grad()
        model = torch.nn.ParameterDict({"p": p})
        moved[masters] = 1.0 - opt.master_weights(model)["p"].double().mean().item()
    assert moved[None] == 0.0
    assert moved[bits] == pytest.approx(100 * 2.0**-14, rel=1e-6)


def test_with_32_bit_masters_and_full_state_bfloat16_weights_are_float32_rounded():
    """The same gradients to both, so that only the storage of weights could make a difference."""
    wide = torch.nn.Parameter(torch.randn(65, 33))
    narrow = torch.nn.Parameter(wide.detach().bfloat16())
    with torch.no_grad():
        wide.copy_(narrow)
    factor = torch.rand(65, 33)
    opts = [SASSHA([p], lr=0.1, weight_decay=0.01, master_weight_bits=32) for p in (wide, narrow)]
    for t in range(30):
        g = torch.randn(65, 33, generator=torch.Generator().manual_seed(t)).bfloat16()
        for p, opt in zip((wide, narrow), opts, strict=True):
            if opt.hessian_due:
                (0.5 * factor.bfloat16() * p.bfloat16().square()).sum().backward(create_graph=True)
                opt.take_products()
            p.grad = g.to(p.dtype)
            opt.step()
            opt.zero_grad()
    masters = opts[1].master_weights(torch.nn.ParameterDict({"p": narrow}))["p"]
    assert torch.equal(masters, wide.detach())


# ---- what goes with it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [True, False], ids=["calls", "closure"])
@pytest.mark.parametrize("setting", [EIGHT, SEVEN], ids=id_of)
@pytest.mark.parametrize("backend", BACKENDS)
def test_capturable_training_has_the_bits_of_the_other(backend, setting, calls):
    net, opt, _ = trained(setting, 12, calls=calls, backend=backend, capturable=True, lazy_hessian=4)
    other, expected, _ = trained(setting, 12, calls=calls, backend=backend, lazy_hessian=4)
    assert_same_bits(snapshot(net), snapshot(other))
    for entry, wanted in zip(state_of(opt), state_of(expected), strict=True):
        assert entry.keys() == wanted.keys()
        for key in wanted.keys() - {"step", "bias_correction2", *ONLY_SAVED}:
            assert torch.equal(torch.as_tensor(entry[key]), torch.as_tensor(wanted[key])), key


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", ["SASSHA", "MSASSHA"])
def test_maximizing_minus_the_loss_is_minimizing_it(method, backend):
    found = []
    for sign in (1.0, -1.0):
        net, opt = built(SEVEN, method, maximize=sign < 0, backend=backend)
        loss = make_loss(net, torch.bfloat16)
        for _ in range(12):
            opt.step(closure_of(opt, lambda sign=sign, loss=loss: sign * loss()))
        found.append((snapshot(net), state_of(opt)))
    assert_same_bits(found[0][0], found[1][0])
    for left, right in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(left["exp_hessian_diag"], right["exp_hessian_diag"])


@pytest.mark.parametrize("setting", [EIGHT, SEVEN, Setting(torch.float16, 16, 32)], ids=id_of)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_grad_scaler_skips_changes_no_bit_of_weights_and_state(backend, setting):
    net, opt = built(setting, backend=backend, lazy_hessian=2)
    scaler = GradScaler("cpu", init_scale=256.0)
    loss = make_loss(net, setting.dtype)

    def step(factor=1.0):
        scaler.scale(loss()).backward()
        opt.perturb_weights()
        scaler.scale(factor * loss()).backward(create_graph=opt.hessian_due)
        opt.unperturb(scaler=scaler)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    for _ in range(3):
        step()
    before = snapshot(net), state_of(opt)
    step(torch.inf)
    assert opt.stats.skipped_steps == 1
    assert_same_bits(snapshot(net), before[0])
    for entry, wanted in zip(state_of(opt), before[1], strict=True):
        for key in wanted.keys() & {"exp_avg", "exp_hessian_diag", "exp_avg_scale", "weight_correction"}:
            assert torch.equal(entry[key], wanted[key]), key
    step()
    assert any(not torch.equal(a, b) for a, b in zip(snapshot(net), before[0], strict=True))


@pytest.mark.parametrize("setting", [EIGHT, SEVEN], ids=id_of)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_is_not_finite_is_skipped(backend, setting):
    net, opt, _ = trained(setting, 3, calls=True, backend=backend, skip_nonfinite=True)
    before, state, loss = snapshot(net), state_of(opt), make_loss(net, setting.dtype)
    loss().backward()
    opt.perturb_weights()
    (torch.nan * loss()).backward()
    opt.unperturb()
    opt.step()
    opt.zero_grad()
    assert_same_bits(snapshot(net), before)
    for entry, wanted in zip(state_of(opt), state, strict=True):
        assert torch.equal(entry["exp_avg"], wanted["exp_avg"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_model_and_optimizer_trains_on_alike(clone, method):
    net, opt, _ = trained(SEVEN, 6, method, lazy_hessian=4)
    other_net, other = clone((net, opt))
    train(net, opt, 7)
    train(other_net, other, 7)
    assert_same_bits(snapshot(other_net), snapshot(net))
    assert_same_state(state_of(other), state_of(opt))


@pytest.mark.parametrize("backend", BACKENDS)
def test_unperturb_brings_weights_with_corrections_back(backend):
    net, opt, _ = trained(SEVEN, 3, calls=True, backend=backend)
    before, state = snapshot(net), state_of(opt)
    make_loss(net, torch.bfloat16)().backward()
    opt.perturb_weights()
    assert any(not torch.equal(a, b) for a, b in zip(snapshot(net), before, strict=True))
    opt.unperturb()
    assert_same_bits(snapshot(net), before)
    assert_same_state(state_of(opt), state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_of_all_dtypes_and_layouts_train_together(backend):
    torch.manual_seed(0)
    shapes = {torch.float32: (65, 70), torch.bfloat16: (129, 33), torch.float16: (70, 65), torch.float64: (8, 9)}
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for dtype, shape in shapes.items()]
    params.append(torch.nn.Parameter(torch.randn(5, 8, 3, 7).to(memory_format=torch.channels_last)))
    params.append(torch.nn.Parameter(torch.randn(66, 100)[:, ::2]))
    weights = [torch.rand(p.shape) for p in params]

    def loss():
        pairs = zip(weights, params, strict=True)
        return sum((w * p.double().sin() ** 2).sum() for w, p in pairs)

    before = [p.detach().clone() for p in params]
    results = []
    for name in ("reference", backend):
        with torch.no_grad():
            for p, x in zip(params, before, strict=True):
                p.copy_(x)
        options = {"state_bits": 8, "master_weight_bits": 24, "full_precision_below": 0}
        opt = SASSHA(params, lr=0.02, rho=0.1, lazy_hessian=3, backend=name, **options)
        losses = [three_calls(opt, loss) for _ in range(10)]
        assert losses[-1] < losses[0]
        results.append(([p.detach().clone() for p in params], state_of(opt)))
    assert_same_bits(results[1][0], results[0][0])
    assert_same_state(results[1][1], results[0][1])
    assert results[1][1][3]["exp_avg"].dtype == torch.float64


# ---- parameters that change their dtype ------------------------------------------------------------------------------

TO_FLOAT32, TO_FLOAT16, TO_BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
CASTS = [
    (SEVEN, TO_FLOAT32, "has a 'weight_correction'"),
    (SEVEN, TO_FLOAT16, "'weight_correction' is of a dtype with 7 bits of mantissa"),
    (Setting(torch.float16, 32, 32), TO_BFLOAT16, "'weight_correction' is of a dtype with 10 bits of mantissa"),
    (Setting(torch.bfloat16, 32, 24), TO_FLOAT32, "has a 'weight_correction'"),
    (Setting(torch.float32, 8, 24), TO_BFLOAT16, "lacks 'weight_correction'"),
    (Setting(torch.float32, 32, 32), TO_FLOAT16, "lacks 'weight_correction'"),
    (Setting(torch.float64, 8), TO_FLOAT32, "'exp_avg' is torch.float64, expected torch.|lacks 'exp_avg_scale'"),
    (Setting(torch.float64, 8, 24), TO_BFLOAT16, "'exp_avg' is torch.float64, expected torch.|lacks '"),
    (EIGHT, torch.float64, "'exp_avg' is torch.int8, expected torch.float64"),
]


@pytest.mark.parametrize("calls", [True, False], ids=["calls", "closure"])
@pytest.mark.parametrize(("setting", "dtype", "found"), CASTS, ids=id_of)
@pytest.mark.parametrize("method", ["SASSHA", "MSASSHA", "AdaHessian"])
@pytest.mark.filterwarnings("ignore:MSASSHA. the model's state_dict")
def test_parameters_that_changed_their_dtype_are_refused_by_name_and_nothing_changes(
    method, setting, dtype, found, calls
):
    net, opt, _ = trained(setting, 3, method)
    saved = opt.state_dict()
    net.to(dtype)
    before, state = snapshot(net), state_of(opt)
    found = "'(exp_avg|weight)' is torch|lacks|has a" if method == "MSASSHA" else found
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"^{method}: parameter 0 of group 0 .*({found}).* changed its dtype"):
            train(net, opt, 1, calls=calls and method == "SASSHA")
    assert_same_bits(snapshot(net), before)
    assert_same_state(state_of(opt), state)
    kind, options = METHODS[method]
    other = kind(net.parameters(), **options, **setting.options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the checkpoint has bits of")
        other.load_state_dict(saved)  # which is the remedy
    train(net, other, 2)


@pytest.mark.parametrize(("setting", "dtype", "found"), CASTS[:4], ids=id_of)
def test_master_weights_are_not_made_of_corrections_of_another_dtype(setting, dtype, found):
    net, opt, _ = trained(setting, 3)
    net.to(dtype)
    with pytest.raises(RuntimeError, match=r"SASSHA.master_weights: '0.weight' is .* changed its dtype"):
        opt.master_weights(net)
    m_net, m_opt, _ = trained(setting, 3, "MSASSHA")
    wanted = m_opt.master_weights(m_net)  # of x, which is in state
    m_net.to(dtype)
    for name, value in m_opt.master_weights(m_net).items():
        assert torch.equal(value, wanted[name])


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_takes_its_group_with_it(value, bits):
    """As docs/compact.md says: 32 elements share a scale, unless the step is skipped."""
    lost = {}
    for skips in (True, False):
        p = torch.nn.Parameter(torch.randn(70, 70))
        opt = SASSHA([p], lr=0.1, rho=0.0, state_bits=bits, skip_nonfinite=skips)
        for step in range(3):
            p.square().sum().backward(create_graph=opt.hessian_due)
            if opt.hessian_due:
                opt.take_products()
            p.grad = p.grad.detach().clone()
            p.grad[0, 40] = value if step == 1 else 1.0
            opt.step()
            opt.zero_grad()
        lost[skips] = (~p.isfinite()).nonzero().tolist()
    assert lost[True] == []
    assert lost[False] == ([[0, i] for i in range(32, 64)] if bits == 8 else [[0, 40]])


def test_without_corrections_float32_may_become_bfloat16():
    net, opt, _ = trained(EIGHT, 3)
    net.bfloat16()
    train(net, opt, 2)


# ---- curvature with a sign -------------------------------------------------------------------------------------------


def test_sophia_stores_signs_and_small_curvature_stays_small():
    """15 octaves below the largest of its group, curvature of either sign keeps a place."""
    h = torch.tensor([1.0, -1.0, 2.0**-14, -(2.0**-14), 2.0**-40]).repeat(820)[:4096].view(64, 64)
    found = {}
    for bits in (32, 8):
        p = torch.nn.Parameter(torch.full((64, 64), 0.1))
        opt = SophiaH([p], lr=0.0, state_bits=bits, lazy_hessian=1)
        for _ in range(3):
            (0.5 * h * p.square()).sum().backward(create_graph=True)
            opt.step()
            opt.zero_grad()
        found[bits] = decoded(opt)[0]["exp_hessian_diag"]
    exact, d = found[32], found[8]
    assert opt.state[p]["exp_hessian_diag"].dtype == torch.int8
    assert torch.equal(d.sign(), h.sign())
    near = h.abs() >= 2.0**-14
    assert torch.allclose(d[near], exact[near], rtol=0.3)  # three roundings of at most an eighth
    least = float(d[~near].max()) / float(exact.max())
    assert 2.0**-40 < least < 2.0**-14  # all that is below has the least code
