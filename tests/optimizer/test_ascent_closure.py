"""``step(closure, ascent_closure=...)``: the ascent follows the gradient of another batch, as it may by hand."""

import copy
import math
from contextlib import nullcontext

import algorithms
import pytest
import torch
import zoo
from torch.nn import functional as F
from training import BACKENDS, assert_same_bits, assert_same_state, closure_of, make_loss, make_net, snapshot, state_of

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH
from sassha_fast.log import StatsLog

OPTIONS = {"lr": 0.02, "rho": 0.05, "weight_decay": 0.01, "lazy_hessian": 3}


class Part:
    """A model whose loss is that of the first rows of its batch, or of all."""

    def __init__(self, name):
        torch.manual_seed(0)
        self.model = zoo.MODELS[name]().double()
        if name.startswith("cnn"):
            self.x, self.y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(0, zoo.TOKENS, (8,))
        else:
            self.x = torch.randint(0, zoo.TOKENS, (8, 7))
            self.y = self.x.roll(1, 1)

    def loss(self, rows=None):
        out = self.model(self.x[:rows])
        return F.cross_entropy(out.flatten(0, -2), self.y[:rows].flatten())

    def picture(self, opt):
        buffers = [b.clone() for b in self.model.buffers()]
        return [snapshot(self.model), buffers, state_of(opt), torch.get_rng_state()]


def by_hand(opt, part):
    """The three calls with everything that a closure does by itself."""
    exact = opt.hvp == "exact"
    with opt.refresh_context() if exact and opt.hessian_due else nullcontext():
        with opt.replay_rng(), opt.frozen_batchnorm(part.model):
            part.loss(2).backward()
        opt.perturb_weights()
        with opt.replay_rng():
            loss = part.loss()
            loss.backward(create_graph=exact and opt.hessian_due)
        for _ in range(opt.probes_due):
            opt.probe_weights()
            with opt.replay_rng(), opt.frozen_batchnorm(part.model):
                part.loss().backward()
        opt.unperturb()
    opt.step()
    opt.zero_grad()
    return loss.item()


@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["cnn_with_batchnorm", "transformer_with_dropout"])
@pytest.mark.filterwarnings("ignore:.*finite differences see curvature at the kinks")
def test_a_step_equals_the_same_passes_by_hand_bit_for_bit(name, backend, hvp):
    results = []
    for with_closure in (False, True):
        part = Part(name)
        opt = SASSHA(part.model.parameters(), backend=backend, hvp=hvp, **OPTIONS)
        opt.attach(part.model)
        losses = []
        for _ in range(4):
            if with_closure:
                small = closure_of(opt, lambda part=part: part.loss(2))
                losses.append(opt.step(closure_of(opt, part.loss), ascent_closure=small).item())
            else:
                losses.append(by_hand(opt, part))
        results.append((*part.picture(opt), losses))
    three, one = results
    assert_same_bits(one[0], three[0])
    assert all(map(torch.equal, one[1], three[1]))
    assert_same_state(one[2], three[2])
    assert torch.equal(one[3], three[3])
    assert one[4] == three[4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ascent_and_products_of_a_quarter_are_the_equations_with_its_loss_bit_for_bit(backend, dtype):
    def problems():
        torch.manual_seed(0)
        layers = torch.nn.Conv2d(1, 4, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(64, 3)
        net = torch.nn.Sequential(*layers).to(dtype)
        x, y = torch.randn(16, 1, 6, 6, dtype=dtype), torch.randint(0, 3, (16,))
        return [algorithms.Problem(net, lambda n=n: F.cross_entropy(net(x[:n]), y[:n])) for n in (16, 4)]

    whole, part = problems()
    wanted = algorithms.sassha(whole, 12, lr=0.02, rho=0.05, k=3, wd=0.01, part=part)
    whole, part = problems()
    opt = SASSHA(whole.net.parameters(), backend=backend, **OPTIONS)
    small = closure_of(opt, part.loss)
    for _ in range(12):
        opt.step(closure_of(opt, whole.loss), ascent_closure=small, hessian_closure=small)
    found = state_of(opt)
    assert_same_bits([entry["exp_avg"] for entry in found], wanted.m)
    assert_same_bits([entry["exp_hessian_diag"] for entry in found], wanted.d)
    assert_same_bits(snapshot(whole.net), wanted.x)


def test_the_ascent_follows_the_other_batch_and_the_loss_is_that_of_the_batch_at_the_top():
    net = make_net(torch.float64)
    opt = SASSHA(net.parameters(), **{**OPTIONS, "rho": 0.3})
    main, other = make_loss(net, torch.float64, seed=1), make_loss(net, torch.float64, seed=2)
    other().backward()
    norm = torch.stack([p.grad.square().sum() for p in net.parameters()]).sum().sqrt()
    x = snapshot(net)
    with torch.no_grad():
        for p in net.parameters():
            p += 0.3 / norm * p.grad
        expected = main().item()
        for p, before in zip(net.parameters(), x, strict=True):
            p.copy_(before)
    loss = opt.step(closure_of(opt, main), ascent_closure=closure_of(opt, other))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert opt.stats.grad_norm.item() == pytest.approx(norm.item())
    assert opt.stats.predicted_gap.item() == pytest.approx(0.3 * norm.item())
    assert math.isnan(opt.stats.ascent_gap)


def test_the_gap_is_known_again_after_a_step_with_one_batch():
    net = make_net()
    opt = SASSHA(net.parameters(), **OPTIONS)
    closure = closure_of(opt, make_loss(net))
    for others, known in (({}, True), ({"ascent_closure": closure}, False), ({}, True)):
        opt.step(closure, **others)
        assert math.isfinite(opt.stats.ascent_gap) == known


def test_logs_leave_the_gap_empty():
    net = make_net()
    opt = SASSHA(net.parameters(), **OPTIONS)
    closure = closure_of(opt, make_loss(net))
    with StatsLog(opt) as log:
        loss = opt.step(closure, ascent_closure=closure_of(opt, make_loss(net, seed=2)))
        assert log.read()["loss"] == [loss.item()]
        assert math.isnan(log.read()["ascent_gap"][0])


def test_statistics_are_those_of_the_whole_batch_and_move_once():
    part = Part("cnn_with_batchnorm")
    opt = SASSHA(part.model.parameters(), **OPTIONS)
    opt.attach(part.model)
    norm, sizes = part.model[1], []

    def note(module, args):
        if module.track_running_stats:
            sizes.append(len(args[0]))

    norm.register_forward_pre_hook(note)
    for _ in range(3):
        opt.step(closure_of(opt, part.loss), ascent_closure=closure_of(opt, lambda: part.loss(2)))
    assert sizes == [8, 8, 8]
    assert norm.num_batches_tracked == 3


def test_both_passes_begin_with_the_same_random_numbers_and_those_of_the_batch_go_on():
    part = Part("transformer_with_dropout")
    opt = SASSHA(part.model.parameters(), **{**OPTIONS, "lazy_hessian": 100})
    drawn, after = [], []

    def noting(rows=None):
        drawn.append(torch.get_rng_state())
        loss = part.loss(rows)
        after.append(torch.get_rng_state())
        return loss

    for _ in range(2):
        opt.step(closure_of(opt, noting), ascent_closure=closure_of(opt, lambda: noting(2)))
        assert torch.equal(torch.get_rng_state(), after[-1])
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[2], after[1])


@pytest.mark.parametrize(("rho", "calls"), [(0.0, 0), (0.1, 3), (torch.tensor(0.0), 3)], ids=str)
def test_without_an_ascent_it_is_not_called(rho, calls):
    net = make_net()
    opt = SASSHA(net.parameters(), **{**OPTIONS, "rho": rho})
    called = []

    def ascent():
        called.append(1)
        return closure_of(opt, make_loss(net, seed=2))()

    for _ in range(3):
        opt.step(closure_of(opt, make_loss(net)), ascent_closure=ascent)
    assert len(called) == calls


def test_micro_batches_of_the_ascent_add_up():
    results = []
    for parts in (1, 4):
        net = make_net(torch.float64)
        opt = SASSHA(net.parameters(), **OPTIONS)
        x, y = (
            torch.randn(32, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3)),
            torch.arange(32) % 3,
        )
        pieces = [
            lambda a=a, b=b, parts=parts, net=net: (F.cross_entropy(net(a), b) / parts).backward() or 0.0
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)
        ]
        main = make_loss(net, torch.float64)
        halves = [lambda opt=opt, main=main: (main() / 2).backward() or main().detach() / 2] * 2
        for _ in range(3):
            loss = opt.step(halves, ascent_closure=pieces, hessian_closure=pieces)
        results.append((snapshot(net), loss))
    for one, four in zip(*(found for found, _ in results), strict=True):
        torch.testing.assert_close(four, one, rtol=1e-9, atol=1e-12)
    assert results[0][1] == pytest.approx(results[1][1].item())


def test_a_loss_scale_of_all_closures_cancels():
    results = []
    for scale in (None, 1024.0):
        net = make_net()
        opt = SASSHA(net.parameters(), **OPTIONS)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)

        def backward(loss, scaler=scaler):
            scaler.scale(loss).backward()

        for _ in range(4):
            main, other = (closure_of(opt, make_loss(net, seed=seed), backward) for seed in (1, 2))
            opt.step(main, ascent_closure=other, scaler=scaler)
            scaler.update()
        results.append((snapshot(net), state_of(opt), opt.stats.grad_norm.item()))
    plain, scaled = results
    for a, b in zip(scaled[0], plain[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert scaled[2] == pytest.approx(plain[2], rel=1e-5)


def test_it_works_with_sam_and_with_a_decomposition_of_weight_zero():
    for method, options in ((SAM, {"base_optimizer": torch.optim.SGD}), (GSASSHA, {"alpha": 0.0})):
        net = make_net()
        opt = method(net.parameters(), lr=0.01, rho=0.1, **options)
        main, other = make_loss(net, seed=1), make_loss(net, seed=2)
        twin = copy.deepcopy(net)
        hand = method(twin.parameters(), lr=0.01, rho=0.1, **options)
        opt.step(closure_of(opt, main), ascent_closure=closure_of(opt, other))
        make_loss(twin, seed=2)().backward()
        hand.perturb_weights()
        make_loss(twin, seed=1)().backward(create_graph=hand.hessian_due)
        hand.unperturb()
        hand.step()
        assert_same_bits(snapshot(net), snapshot(twin))


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_in", ["ascent", "descent", "products"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_in_any_of_the_closures_leaves_everything_as_it_was(fails_in, backend):
    part = Part("cnn_with_batchnorm")
    opt = SASSHA(part.model.parameters(), backend=backend, **{**OPTIONS, "lazy_hessian": 1})
    opt.attach(part.model)

    def closure(name, rows):
        def run():
            torch.rand(3)
            loss = closure_of(opt, lambda: part.loss(rows))()
            if name == fails_in and fails:
                raise ZeroDivisionError
            return loss

        return run

    closures = closure("descent", None)
    others = {"ascent_closure": closure("ascent", 2), "hessian_closure": closure("products", 4)}
    fails = False
    opt.step(closures, **others)
    before, fails = part.picture(opt), True
    with pytest.raises(ZeroDivisionError):
        opt.step(closures, **others)
    after = part.picture(opt)
    assert_same_bits(after[0], before[0])
    assert all(map(torch.equal, after[1], before[1]))
    assert_same_state(after[2], before[2])
    assert torch.equal(after[3], before[3])
    fails = False
    opt.step(closures, **others)


@pytest.mark.parametrize("method", [MSASSHA, AdaHessian, SophiaH])
def test_methods_that_take_no_gradient_for_an_ascent_say_so(method):
    net = make_net()
    opt = method(net.parameters())
    closure, before = closure_of(opt, make_loss(net)), snapshot(net)
    with pytest.raises(
        TypeError, match=rf"^{method.__name__}\.step: ascent_closure is for the gradient that an ascent"
    ):
        opt.step(closure, ascent_closure=closure)
    assert_same_bits(snapshot(net), before)


@pytest.mark.parametrize(
    ("method", "options"), [(GSASSHA, {}), (SAM, {"base_optimizer": torch.optim.SGD, "alpha": 0.2})], ids=str
)
def test_a_decomposition_of_two_batches_is_refused(method, options):
    net = make_net()
    opt = method(net.parameters(), lr=0.01, rho=0.1, **options)
    closure = closure_of(opt, make_loss(net))
    with pytest.raises(ValueError, match=r"alpha above 0 .* have to be of one batch; leave ascent_closure out"):
        opt.step(closure, ascent_closure=closure)
    opt.step(closure)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (3, "ascent_closure is 3, expected a function"),
        (lambda: None, "ascent_closure returned None, expected the loss"),
        ([lambda: torch.zeros(2)], r"ascent_closure\[0\] returned a tensor of shape \(2,\)"),
    ],
    ids=["a number", "no loss", "a tensor"],
)
def test_it_is_held_to_what_a_closure_is(bad, message):
    net = make_net()
    opt = SASSHA(net.parameters(), **OPTIONS)
    before = snapshot(net)
    with pytest.raises(TypeError, match=rf"^SASSHA\.step: {message}"):
        opt.step(closure_of(opt, make_loss(net)), ascent_closure=bad)
    assert_same_bits(snapshot(net), before)


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("method", [SASSHA, SAM])
def test_without_a_backward_pass_it_is_named(method, accumulated):
    net = make_net()
    base = {"base_optimizer": torch.optim.SGD} if method is SAM else {}
    opt = method(net.parameters(), lr=0.01, rho=0.05, **base)
    loss = make_loss(net)
    closure, before = closure_of(opt, loss), snapshot(net)
    forgets = [loss] if accumulated else loss
    with pytest.raises(
        RuntimeError, match=rf"^{method.__name__}\.step: no parameter has a gradient after ascent_closure"
    ):
        opt.step(closure, ascent_closure=forgets)
    with pytest.raises(
        RuntimeError, match=rf"^{method.__name__}\.step: no parameter has a gradient after closure; call"
    ):
        opt.step(forgets)
    assert_same_bits(snapshot(net), before)
    opt.step(closure, ascent_closure=closure)


@pytest.mark.parametrize("rho", [0.0, 0.05])
def test_a_closure_without_a_backward_pass_is_named_before_probes(rho):
    net = make_net()
    opt = SASSHA(net.parameters(), lr=0.01, rho=rho, hvp="finite_difference")
    with pytest.raises(RuntimeError, match=r"^SASSHA\.step: no parameter has a gradient after closure; call"):
        opt.step(make_loss(net))


def test_alone_it_is_refused():
    opt = SASSHA(make_net().parameters())
    with pytest.raises(TypeError, match="ascent_closure, hessian_closure or scaler was given without closure"):
        opt.step(ascent_closure=lambda: 0.0)
