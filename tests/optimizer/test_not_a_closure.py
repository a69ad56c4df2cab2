"""What is no closure is refused in words that say what one is, and changes nothing; so are calls within a closure."""

import pytest
import torch
from torch import nn
from training import assert_same_bits, assert_same_state, closure_of, snapshot, state_of

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH

METHODS = {
    "SASSHA": lambda p: SASSHA(p, lr=0.03, rho=0.05, lazy_hessian=2),
    "GSASSHA": lambda p: GSASSHA(p, lr=0.03, rho=0.05, lazy_hessian=2),
    "MSASSHA": lambda p: MSASSHA(p, lr=0.03, rho=0.05, lazy_hessian=2),
    "AdaHessian": lambda p: AdaHessian(p, lr=0.03),
    "SophiaH": lambda p: SophiaH(p, lazy_hessian=2),
    "SAM": lambda p: SAM(p, torch.optim.SGD, lr=0.03),
}
CURVED = [name for name in METHODS if name != "SAM"]


class Scene:
    """A trained model with BatchNorm and dropout. After an error everything must be as it was."""

    def __init__(self, method):
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))
        self.opt = METHODS[method](self.net.parameters())
        self.opt.attach(self.net)
        self.x = torch.randn(16, 4)
        for _ in range(2):
            self.opt.step(self.good)
        self.before = self.now()

    def loss(self):
        return self.net(self.x).square().mean()

    def good(self):
        return closure_of(self.opt, self.loss)()

    def now(self):
        buffers = [b.double() for b in self.net.buffers()]
        return snapshot(self.net), buffers, state_of(self.opt), torch.get_rng_state()

    def check(self):
        weights, buffers, state, random = self.now()
        assert_same_bits(weights, self.before[0])
        assert_same_bits(buffers, self.before[1])
        assert_same_state(state, self.before[2])
        assert torch.equal(random, self.before[3])
        assert self.opt.step(self.good) is not None  # and it goes on


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda s: 7, "closure is 7, expected a function without arguments"),
        (lambda s: s.loss().detach(), r"closure is tensor\(.*\), expected a function"),
        (lambda s: torch.zeros(500), "closure is a Tensor, expected a function"),
        (lambda s: "closure", "closure is 'closure', expected a function"),
        (lambda s: [], r"closure is \[\], expected a function"),
        (lambda s: [s.good, 3], "expected a function"),
        (lambda s: (f for f in [s.good]), "expected a function"),
        (lambda s: {"closure": s.good}, "expected a function"),
    ],
    ids=["number", "loss", "large_tensor", "string", "empty", "one_of_them", "generator", "dict"],
)
def test_step_says_what_a_closure_is(method, given, said):
    scene = Scene(method)
    what = given(scene)
    scene.before = scene.now()
    with pytest.raises(TypeError, match=rf"^{method}\.step: closure is ") as error:
        scene.opt.step(what)
    error.match(said)
    error.match(r"loss\.backward\(\), and returns the loss; or a list of functions, one for each micro-batch")
    scene.check()


RETURNED = {
    "None": lambda loss: None,
    "tuple": lambda loss: (loss, 1),
    "dict": lambda loss: {"loss": loss},
    "vector": lambda loss: loss.expand(3),
    "string": lambda loss: "0.3",
    "comparison": lambda loss: loss > 0,
    "flag": lambda loss: bool(loss > 0),
    "complex": lambda loss: loss.detach() + 1j,
}
SAID = {"None": "None", "tuple": r"\(tensor", "dict": r"(\{'loss'|a dict)", "vector": r"a tensor of shape \(3,\)"}
SAID |= {"comparison": r"tensor\(True", "flag": "True", "complex": r"tensor\("}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", RETURNED)
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_a_closure_that_returns_no_loss_is_named(method, kind, several):
    scene = Scene(method)

    def bad():
        loss = scene.loss()
        loss.backward()
        return RETURNED[kind](loss)

    def micro():
        loss = scene.loss()
        loss.backward()
        return loss

    call = r"closure\[1\]" if several else "closure"
    with pytest.raises(TypeError, match=rf"^{method}\.step: {call} returned {SAID.get(kind, '')}.*return loss"):
        scene.opt.step([micro, bad] if several else bad)
    scene.opt.zero_grad()
    scene.check()


@pytest.mark.parametrize("method", CURVED)
@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
@pytest.mark.parametrize("bad", [7, lambda: None, [lambda: None], []], ids=["number", "none", "none_of_one", "empty"])
def test_a_hessian_closure_is_held_to_the_same(method, hvp, bad):
    scene = Scene(method)
    scene.opt.hvp = hvp
    given = len(bad) if isinstance(bad, list) else None
    call = r"hessian_closure\[0\] returned" if given else "hessian_closure (is|returned)"
    with pytest.raises(TypeError, match=rf"^{method}\.step: {call} "):
        scene.opt.step(scene.good, hessian_closure=bad)
    scene.opt.zero_grad()
    scene.check()


def test_sam_says_that_it_has_no_use_for_a_hessian_closure():
    scene = Scene("SAM")
    with pytest.raises(TypeError, match=r"^SAM\.step: hessian_closure is for products of the Hessian, which SAM does"):
        scene.opt.step(scene.good, hessian_closure=scene.good)
    scene.check()


def test_numbers_of_python_and_numpy_are_losses():
    numpy = pytest.importorskip("numpy")
    scene = Scene("SASSHA")
    for number in (0.5, 1, numpy.float32(0.5), numpy.float64(2.0)):

        def closure(number=number):
            scene.good()
            return number

        assert scene.opt.step(closure) == number


# ---- calls within a closure ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [1, 2], ids=["first_pass", "second_pass"])
@pytest.mark.parametrize(
    "call", ["step", "step_closure", "perturb_weights", "unperturb", "take_products", "probe_weights"]
)
def test_a_call_of_the_step_within_its_closure_is_refused(method, at, call):
    scene, passes = Scene(method), []
    if at == 2 and method in ("MSASSHA", "AdaHessian", "SophiaH"):
        pytest.skip("one pass")
    if method == "MSASSHA" and call in ("perturb_weights", "unperturb"):
        pytest.skip("refused anyway")

    def closure():
        loss = scene.good()
        passes.append(loss)
        if len(passes) == at:
            if call == "step_closure":
                scene.opt.step(scene.good)
            else:
                getattr(scene.opt, call)()
        return loss

    name = call.removesuffix("_closure")
    with pytest.raises(RuntimeError, match=rf"^{method}\.{name}: it was called within a closure of {method}\.step"):
        scene.opt.step(closure)
    scene.opt.zero_grad()
    scene.check()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:.*rho is .* but the weights were not perturbed")
def test_after_an_exception_in_a_closure_calls_are_not_taken_for_calls_within_it(method):
    scene = Scene(method)

    def fails():
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        scene.opt.step(fails)
    scene.loss().backward(create_graph=True)
    scene.opt.step()
