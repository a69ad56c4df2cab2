"""Errors speak of the class in use, and of calls that it has."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import SGD
from training import make_loss, make_net

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH

FAMILY = (SASSHA, GSASSHA, MSASSHA, AdaHessian, SophiaH)


class Own(MSASSHA):
    """Somebody's subclass."""


class OwnSAM(SAM):
    """Likewise."""


@pytest.mark.parametrize("method", [*FAMILY, Own])
def test_backends_are_refused_in_the_name_of_the_method(method):
    name = method.__name__
    for options, said in (
        ({"backend": "gpu"}, "backend is 'gpu'"),
        ({"foreach": True, "fused": True}, "foreach=True and fused=True exclude"),
        ({"backend": "cpu", "foreach": True}, "backend='cpu' contradicts"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: {said}"):
            method(make_net().parameters(), **options)
    p = torch.nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones(3, device="meta")
    with pytest.raises(RuntimeError, match=f"^{name}: backend 'cpu' can't run parameters on meta"):
        method([p], backend="cpu").step()
    with pytest.raises(ValueError, match=r"^SAM: backend is 'gpu'"):
        SAM([p], SGD, lr=0.1, backend="gpu")


def test_subclasses_are_called_by_their_names():
    net = make_net()
    opt, loss = Own(net.parameters(), hvp="finite_difference"), make_loss(net)
    with pytest.raises(RuntimeError, match=r"^Own\.perturb_weights: "):
        opt.perturb_weights()
    with pytest.raises(RuntimeError, match=r"^Own\.unperturb: "):
        opt.unperturb()
    loss().backward()
    opt.probe_weights()
    with pytest.raises(RuntimeError, match=r"^Own\.eval: the weights are at a probe"):
        opt.eval()
    loss().backward()
    opt.step()
    opt.eval()
    with pytest.raises(RuntimeError, match=r"^Own\.step: the parameters hold the true weights"):
        opt.step()
    with pytest.raises(ValueError, match=r"^Own: sign is 3"):
        Own(net.parameters(), sign=3)
    with pytest.raises(TypeError, match=r"^OwnSAM: base_optimizer is 3"):
        OwnSAM(net.parameters(), 3)
    with pytest.raises(ValueError, match=r"^OwnSAM\.load_state_dict: a parameter group lacks \['ascents', 'rho'\]"):
        OwnSAM(net.parameters(), SGD, lr=0.1).load_state_dict(SGD(net.parameters(), lr=0.1).state_dict())


@pytest.mark.parametrize(
    ("method", "said", "never"),
    [
        (SASSHA, r"perturb_weights\(\) \(rho may be 0\), probe_weights\(\) and unperturb\(\)", "take_products"),
        (MSASSHA, r"probe_weights\(\) and a backward pass, probes_due times", "perturb_weights()"),
        (AdaHessian, r"probe_weights\(\) and take_products\(\)", "unperturb"),
        (SophiaH, r"probe_weights\(\) and take_products\(\)", "unperturb"),
    ],
)
def test_a_probe_that_is_not_due_names_calls_that_the_method_has(method, said, never):
    with pytest.raises(RuntimeError, match=rf"^{method.__name__}\.probe_weights: no probe is due.*{said}") as error:
        method(make_net().parameters()).probe_weights()
    assert never not in str(error.value)


@pytest.mark.parametrize("method", [AdaHessian, SophiaH])
def test_a_step_at_a_probe_names_the_call_that_comes_back(method):
    net = make_net()
    opt, loss = method(net.parameters(), hvp="finite_difference"), make_loss(net)
    loss().backward()
    opt.perturb_weights(zero_grad=False)
    with pytest.raises(RuntimeError, match=r"perturbed already; call take_products\(\) first"):
        opt.perturb_weights()
    opt.probe_weights()
    loss().backward()
    with pytest.raises(RuntimeError, match=r"still perturbed; call take_products\(\) first"):
        opt.step()
    opt.take_products()
    opt.step()
    assert opt.stats.refreshes == 1


def test_sam_is_told_of_no_curvature():
    opt = SAM(make_net().parameters(), SGD, lr=0.1)
    with pytest.raises(RuntimeError, match=r"^SAM\.probe_weights: .*there is no curvature to probe for"):
        opt.probe_weights()
    with pytest.raises(RuntimeError, match=r"^SAM\.replayed: SAM never refreshes a curvature"):
        opt.replayed()
    with pytest.raises(TypeError, match=r"^SAM\.step: .* pass a closure too, or use scaler\.step\(opt\)"):
        opt.step(scaler=torch.amp.GradScaler("cpu"))


def build(method, params, **options):
    return method(params, SGD, lr=0.1, **options) if issubclass(method, SAM) else method(params, lr=0.1, **options)


@pytest.mark.parametrize("backend", ["reference", "foreach", "cpu"])
@pytest.mark.parametrize("method", [*FAMILY, Own, SAM, OwnSAM])
def test_gradients_are_refused_in_the_name_of_the_method(method, backend):
    p = torch.nn.Parameter(torch.ones(4, 3))
    opt = build(method, [p], backend=backend)
    call = opt.perturb_weights if isinstance(opt, SAM) else opt.step
    p.grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(
        RuntimeError, match=rf"^{method.__name__}: the gradient of .* is sparse .*, expected a dense one"
    ):
        call()
    p.grad = torch.ones(4, 3)
    p.data = p.data.double()
    with pytest.raises(
        RuntimeError, match=rf"^{method.__name__}: the gradient of .* has dtype torch.float32, expected"
    ):
        call()


@pytest.mark.parametrize("method", FAMILY)
def test_an_operation_without_double_backward_is_told_by_the_call_that_met_it(method):
    x = torch.nn.Parameter(torch.randn(1, 2, 8, 16))
    opt = method([x], lr=0.1)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        scaled_dot_product_attention(x, x, x).square().sum().backward(create_graph=True)
    for group in opt.param_groups:
        group["rho"] = 0.0
    with pytest.raises(RuntimeError, match=rf"^{method.__name__}\.step: an operation .* no double backward") as error:
        opt.step()
    assert "unperturb" not in str(error.value)
    assert "passes of a refresh step and this call" in str(error.value)
