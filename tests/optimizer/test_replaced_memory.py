"""Parameters, gradients and state that have another shape, dtype or order than before, at the same address."""

import pytest
import torch
from torch import nn
from training import assert_same_bits, same_bits

from sassha_fast import MSASSHA, SASSHA, AdaHessian

BACKENDS = ("reference", "foreach", "cpu")


def start(method=SASSHA, dtype=torch.float32, backend="cpu", shape=(4, 6), **options):
    """A parameter in the middle of memory that belongs to nobody, so that reading past its end would be noticed."""
    room = torch.full((3, *shape), 7.0, dtype=dtype)
    room[1] = torch.linspace(-1.0, 1.0, room[1].numel(), dtype=dtype).view(shape)
    p = nn.Parameter(room[1])
    opt = method([p], lr=0.1, backend=backend, **options)
    for _ in range(2):
        step(opt, p)
    return room, p, opt


def step(opt, p):
    def closure():
        opt.zero_grad()
        loss = (p.float() ** 2).sum() + p.float().sin().sum()
        loss.backward()
        return loss

    opt.step(closure)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", [SASSHA, MSASSHA, AdaHessian])
def test_a_parameter_that_shrank_in_place_is_refused_by_name_and_nothing_behind_it_moves(method, backend):
    room, p, opt = start(method, backend=backend)
    p.data = p.data[:2]
    before = room.clone()
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 has shape \(2, 6\), but its 'exp_avg' has \(4, 6"):
        step(opt, p)
    assert_same_bits([room], [before])
    del opt.state[p]
    step(opt, p)
    assert not same_bits(room[1, :2], before[1, :2])
    assert_same_bits([room[1, 2:], room[0], room[2]], [before[1, 2:], before[0], before[2]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transposed_parameter_is_another_one(backend):
    _, p, opt = start(backend=backend)
    p.data = p.data.t()
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match=r"has shape \(6, 4\), but its 'exp_avg' has \(4, 6\)"):
        step(opt, p)
    assert_same_bits([p], [before])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_square_parameter_that_is_transposed_in_place_is_updated_element_by_element(backend):
    _, p, opt = start(backend=backend, shape=(5, 5))
    twin = nn.Parameter(p.detach().t().clone())
    other = SASSHA([twin], lr=0.1, backend="reference")
    other.load_state_dict(opt.state_dict())
    p.data = p.data.t()
    if backend == "cpu":  # kernels go through memory, so the state has to lie in the same order
        with pytest.raises(RuntimeError, match="do not have the layout of their parameters; reload them"):
            step(opt, p)
        opt.load_state_dict(opt.state_dict())
    step(opt, p)
    step(other, twin)
    assert_same_bits([p], [twin])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "other"), [(torch.float32, torch.float16), (torch.bfloat16, torch.float16)])
def test_a_gradient_of_another_dtype_is_refused(kind, other, backend):
    _, p, opt = start(dtype=kind, backend=backend)
    opt.zero_grad()
    (p.float() ** 2).sum().backward()
    p.grad.data = p.grad.data.to(other)
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match=f"has dtype {other}, expected {kind} like the parameter"):
        opt.step()
    assert_same_bits([p], [before])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_shrank_in_place_is_refused(backend):
    _, p, opt = start(backend=backend)
    opt.zero_grad()
    (p**2).sum().backward()
    p.grad.data = p.grad.data[:2]
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match=r"has shape \(2, 6\), expected \(4, 6\) like the parameter"):
        opt.step()
    assert_same_bits([p], [before])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_of_another_dtype_at_the_same_address_is_read_as_what_it_is(backend):
    room, p, opt = start(dtype=torch.bfloat16, backend=backend)
    p.data = room.view(torch.float16)[1]
    p.data.copy_(torch.linspace(-1.0, 1.0, 24).view(4, 6))
    twin = nn.Parameter(p.detach().clone())
    other = SASSHA([twin], lr=0.1, backend="reference")
    other.load_state_dict(opt.state_dict())
    step(opt, p)
    step(other, twin)
    assert_same_bits([p], [twin])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", [SASSHA, MSASSHA, AdaHessian])
def test_a_model_made_double_midway_is_refused_by_name_on_all_backends_and_its_state_can_be_converted(method, backend):
    _, p, opt = start(method, backend=backend)
    p.data = p.data.double()
    before = p.detach().clone()
    said = rf"^{method.__name__}: parameter 0 of group 0 is torch.float64, but its 'exp_avg' is torch.float32, expected"
    with pytest.raises(RuntimeError, match=said):
        step(opt, p)
    assert_same_bits([p], [before])
    other = method([p], lr=0.1, backend=backend)
    other.load_state_dict(opt.state_dict())
    step(other, p)
    assert other.state[p]["exp_avg"].dtype == torch.float64
    assert other.state[p]["step"] == 3
    assert not same_bits(p, before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_model_made_half_midway_goes_on_with_its_state_in_float32(kind, backend):
    _, p, opt = start(backend=backend)
    p.data = p.data.to(kind)
    step(opt, p)
    assert opt.state[p]["exp_avg"].dtype == torch.float32
    assert opt.state[p]["step"] == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("elements", [0, 5])
@pytest.mark.parametrize("first", [True, False])
def test_a_gradient_whose_memory_was_given_away_is_refused(first, elements, backend):
    _, p, opt = start(backend=backend)
    opt.zero_grad()
    (p**2).sum().backward()
    before = p.detach().clone()
    if not first:
        opt.perturb_weights()
        (p**2).sum().backward()
        opt.unperturb()
    p.grad.untyped_storage().resize_(elements * 4)
    said = f"the gradient of parameter 0 of group 0 has lost its memory: its storage has {elements * 4} bytes"
    with pytest.raises(RuntimeError, match=said):
        opt.perturb_weights() if first else opt.step()
    assert_same_bits([p], [before])
    opt.zero_grad()
    step(opt, p)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("key", ["exp_avg", "exp_hessian_diag"])
def test_state_whose_memory_was_given_away_is_refused_until_it_is_back(key, backend):
    _, p, opt = start(backend=backend)
    storage = opt.state[p][key].untyped_storage()
    kept, size, before = opt.state[p][key].clone(), storage.nbytes(), p.detach().clone()
    storage.resize_(0)
    with pytest.raises(RuntimeError, match=f"'{key}' of parameter 0 of group 0 has lost its memory"):
        step(opt, p)
    assert_same_bits([p], [before])
    storage.resize_(size)
    opt.state[p][key].copy_(kept)
    step(opt, p)
    assert not same_bits(p, before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", [SASSHA, MSASSHA, AdaHessian])
def test_a_parameter_whose_memory_was_given_away_is_refused(method, backend):
    p = nn.Parameter(torch.linspace(-1.0, 1.0, 24))
    opt = method([p], lr=0.1, backend=backend)
    for _ in range(2):
        step(opt, p)
    (p**2).sum().backward()
    p.data.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="parameter 0 of group 0 has lost its memory: its storage has 0 bytes"):
        opt.perturb_weights() if method is SASSHA else opt.step()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_behind_the_end_of_what_is_left_of_its_storage_is_refused(backend):
    _, p, opt = start(backend=backend)
    opt.zero_grad()
    flat = torch.ones(2, *p.shape)
    p.grad = flat[1]
    flat.untyped_storage().resize_(p.numel() * 4)  # as many bytes as the gradient has, but before it
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="the gradient of parameter 0 of group 0 has lost its memory"):
        opt.perturb_weights()
    assert_same_bits([p], [before])


def test_a_parameter_with_less_memory_at_the_same_address_is_refused():
    for attempt in range(300):  # the allocator gives it sooner or later
        elements, cut = (1000, 5000, 20000)[attempt % 3], (16, 32, 64, 128)[attempt % 4]
        p = nn.Parameter(torch.ones(elements))
        opt = SASSHA([p], lr=0.1)
        for _ in range(2):
            step(opt, p)
        address, storage = p.data_ptr(), p.data.untyped_storage()
        p.grad = torch.ones_like(p)
        storage.resize_(0)
        storage.resize_(4 * elements - cut)
        if p.data_ptr() == address:
            break
    else:
        pytest.skip("the allocator gave other memory each time")
    with pytest.raises(ValueError, match=f"has lost its memory: its storage has {4 * elements - cut} bytes"):
        opt.perturb_weights()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("raises", [False, True])
def test_a_parameter_whose_memory_was_given_away_at_x_plus_eps_is_x_again(raises, backend):
    _, p, opt = start(backend=backend, rho=0.1)
    q = nn.Parameter(torch.linspace(-1.0, 1.0, 1 << 18))
    opt.add_param_group({"params": [q]})
    before = [p.detach().clone(), q.detach().clone()]

    def closure():
        opt.zero_grad()
        loss = (p**2).sum() + (q**2).sum()
        loss.backward()
        if not torch.equal(q, before[1]):
            q.data.untyped_storage().resize_(0)
            if raises:
                raise KeyboardInterrupt
        return loss.detach()

    with pytest.raises(KeyboardInterrupt if raises else (RuntimeError, ValueError)):
        opt.step(closure)
    assert_same_bits([p, q], before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", ["resized", "replaced"])
def test_a_probe_of_a_parameter_that_is_elsewhere_is_refused(change, backend):
    p = nn.Parameter(torch.linspace(-1.0, 1.0, 1 << 18))
    before = p.detach().clone()
    opt = SASSHA([p], lr=0.1, rho=0.1, hvp="finite_difference", backend=backend)
    (p**4).sum().backward()
    opt.perturb_weights()
    (p**4).sum().backward()
    said = "has lost its memory" if change == "resized" else "was changed by p.data"
    if change == "resized":
        p.data.untyped_storage().resize_(0)
    else:
        p.data = p.data.clone()
    with pytest.raises(RuntimeError, match=f"a probe would not move parameter 0 of group 0, which {said}"):
        opt.probe_weights()
    assert_same_bits([p], [before])
    opt.zero_grad()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state_bits", [32, 8])
def test_a_checkpoint_repairs_msassha_whose_parameter_changed_its_order(state_bits, backend):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(2, 3, 4, 5))
    opt = MSASSHA([p], lr=0.1, rho=0.1, backend=backend, state_bits=state_bits, full_precision_below=0)
    for _ in range(3):
        step(opt, p)
    opt.eval()
    x = p.detach().clone()
    opt.train()
    p.data = p.data.to(memory_format=torch.channels_last)
    opt.load_state_dict(opt.state_dict())
    opt.eval()
    assert_same_bits([p], [x])
    opt.train()
    step(opt, p)
