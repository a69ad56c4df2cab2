"""Errors around ``torch.amp.GradScaler``: the remedy that they name works, and nothing of the failed call is left."""

import pytest
import torch
from torch.amp import GradScaler
from training import assert_same_bits, assert_same_state, closure_of, make_loss, make_net, snapshot, state_of

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH

METHODS = {
    "SASSHA": lambda p, **o: SASSHA(p, lr=0.03, rho=0.05, lazy_hessian=2, **o),
    "GSASSHA": lambda p, **o: GSASSHA(p, lr=0.03, rho=0.05, lazy_hessian=2, **o),
    "MSASSHA": lambda p, **o: MSASSHA(p, lr=0.03, rho=0.05, lazy_hessian=2, **o),
    "AdaHessian": lambda p, **o: AdaHessian(p, lr=0.03, **o),
    "SophiaH": lambda p, **o: SophiaH(p, lazy_hessian=2, **o),
}
CLIMBS = ("SASSHA", "GSASSHA")


class Scene:
    """A step with a scaler, call by call. ``told`` passes the scaler on, as the message asks for."""

    def __init__(self, method, **options):
        self.method, self.net, self.scaler = method, make_net(), GradScaler("cpu", init_scale=1024.0)
        self.opt = METHODS[method](self.net.parameters(), **options)
        self.loss = make_loss(self.net)

    def step(self, told):
        opt, scaler, given = self.opt, self.scaler, {"scaler": self.scaler} if told else {}
        if self.method in CLIMBS:
            scaler.scale(self.loss()).backward()
            opt.perturb_weights()
        scaler.scale(self.loss()).backward(create_graph=opt.hessian_due)
        if self.method in CLIMBS:
            opt.unperturb(**given)
        elif told:
            opt.take_products(**given)
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


@pytest.mark.parametrize("method", METHODS)
def test_a_loop_that_did_not_tell_the_scale_goes_on_as_the_message_says(method):
    scene, fresh = Scene(method), Scene(method)
    before = snapshot(scene.net)
    collector = "unperturb" if method in CLIMBS else "take_products"
    with pytest.raises(RuntimeError, match=rf"^{method}\.step: GradScaler has unscaled.*{collector}\(scaler=scaler\)"):
        scene.step(told=False)
    assert_same_bits(snapshot(scene.net), before)
    assert not hasattr(scene.opt, "found_inf")
    assert not hasattr(scene.opt, "grad_scale")
    scene.scaler.update()
    scene.opt.zero_grad()
    for _ in range(3):
        scene.step(told=True)
        fresh.step(told=True)
    assert_same_bits(snapshot(scene.net), snapshot(fresh.net))
    assert_same_state(state_of(scene.opt), state_of(fresh.opt))


@pytest.mark.parametrize("method", METHODS)
def test_after_an_error_within_the_scaler_nobody_believes_that_it_runs(method):
    scene, plain = Scene(method), Scene(method)
    closure = closure_of(scene.opt, scene.loss)
    scene.scaler.scale(scene.loss()).backward()
    with pytest.raises(RuntimeError, match=r"opt\.step\(closure, scaler=scaler\)"):
        scene.scaler.step(scene.opt, closure)
    scene.opt.step(closure)
    plain.opt.step(closure_of(plain.opt, plain.loss))
    assert_same_bits(snapshot(scene.net), snapshot(plain.net))


def test_an_error_of_sam_within_the_scaler_leaves_nothing_either():
    net = make_net()
    opt, loss, scaler = SAM(net.parameters(), torch.optim.SGD, lr=0.1), make_loss(net), GradScaler("cpu")
    scaler.scale(loss()).backward()
    opt.perturb_weights()
    scaler.scale(loss()).backward()
    with pytest.raises(RuntimeError, match=r"^SAM\.step: the weights are still perturbed; call unperturb\(\) first"):
        scaler.step(opt)
    assert not hasattr(opt, "found_inf")
    opt.unperturb()
    scaler.update()
    opt.zero_grad()
    opt.step(closure_of(opt, loss))


@pytest.mark.parametrize("method", METHODS)
def test_a_scaler_without_a_closure_is_told_a_call_that_the_method_has(method):
    scene = Scene(method)
    collector = "unperturb" if method in CLIMBS else "take_products"
    with pytest.raises(TypeError, match=rf"^{method}\.step: .* or use {collector}\(scaler=scaler\) and scaler\.step"):
        scene.opt.step(scaler=scene.scaler)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:.*rho is .* but the weights were not perturbed")
def test_products_of_an_unknown_scale_are_not_used_by_a_later_call(method):
    scene = Scene(method)
    with pytest.raises(RuntimeError, match="GradScaler has unscaled"):
        scene.step(told=False)
    before = snapshot(scene.net)
    with pytest.raises(RuntimeError, match="no gradient has a graph"):
        scene.opt.step()
    assert_same_bits(snapshot(scene.net), before)
    assert not scene.opt.state


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_a_step_that_failed_may_be_taken_again_before_the_scaler_is_updated(kind):
    found = []
    for fails in (False, True):
        p = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 12, dtype=kind))
        opt = AdaHessian([p], lr=0.03)
        scaler = GradScaler("cpu", init_scale=64.0)

        def closure(opt=opt, p=p, scaler=scaler):
            opt.zero_grad()
            loss = (p.float() ** 2).sum()
            scaler.scale(loss).backward()
            return loss

        opt.step(closure, scaler=scaler)
        scaler.update()
        if fails:
            kept = opt.state[p]["exp_avg"]
            opt.state[p]["exp_avg"] = kept[:5]
            with pytest.raises(RuntimeError, match="but its 'exp_avg' has"):
                opt.step(closure, scaler=scaler)
            opt.state[p]["exp_avg"] = kept
        opt.step(closure, scaler=scaler)
        with pytest.raises(RuntimeError, match=r"the scaler has served a step since its last update; call scaler\.up"):
            opt.step(closure, scaler=scaler)
        scaler.update()
        opt.step(closure, scaler=scaler)
        found.append(p.detach())
    assert_same_bits([found[0]], [found[1]])
