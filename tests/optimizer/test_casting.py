"""Networks in bfloat16 whose norms with running statistics are not."""

import copy

import pytest
import torch
from torch import nn

from sassha_fast import SASSHA, cast_model


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.InstanceNorm2d(8, affine=True), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8 * 36, 4), nn.LayerNorm(4),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_with_statistics_keep_float32_and_their_bits(dtype):
    net = make_net()
    net(torch.randn(4, 3, 8, 8))
    before = copy.deepcopy(net.state_dict())
    assert cast_model(net, dtype) is net
    for name, value in net.state_dict().items():
        kept = name.split(".")[0] in ("1", "2")
        if not value.is_floating_point():
            assert torch.equal(value, before[name])
            continue
        assert value.dtype == (torch.float32 if kept else dtype), name
        assert torch.equal(value, before[name] if kept else before[name].to(dtype)), name


def test_parameters_stay_the_same_objects():
    net = make_net()
    before = list(net.parameters())
    assert all(a is b for a, b in zip(before, cast_model(net, torch.bfloat16).parameters(), strict=True))


def test_a_cast_network_trains_with_exact_products_and_its_statistics_move():
    net = cast_model(make_net(), torch.bfloat16)
    opt = SASSHA(net.parameters(), lr=0.1, rho=0.05, state_bits=8, master_weight_bits=24, full_precision_below=16)
    opt.attach(net)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 3, 8, 8, generator=generator).bfloat16()
    y = torch.randint(0, 4, (16,), generator=generator)
    mean, losses = net[1].running_mean.clone(), []

    def closure():
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x).float(), y)
        loss.backward()
        return loss

    for _ in range(30):
        losses.append(float(opt.step(closure)))
    assert losses[-1] < 0.5 * losses[0]
    assert opt.stats.refreshes == 3
    assert not torch.equal(net[1].running_mean, mean)


def test_float32_and_lazy_networks_are_cast_as_well():
    net = cast_model(cast_model(make_net(), torch.bfloat16), torch.float32)
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    lazy = cast_model(nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), torch.bfloat16)
    lazy(torch.randn(8, 3).bfloat16())
    assert [p.dtype for p in lazy.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2


def test_no_other_dtype_is_taken():
    net = make_net()
    with pytest.raises(ValueError, match=r"cast_model: dtype is torch.int8, expected one of \[torch.bfloat16"):
        cast_model(net, torch.int8)
    assert {p.dtype for p in net.parameters()} == {torch.float32}


@pytest.mark.parametrize("model", ["x", None])
def test_what_is_no_network_is_refused_by_name(model):
    with pytest.raises(TypeError, match=r"^cast_model: model is .*, expected a torch.nn.Module"):
        cast_model(model, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_complex_tensors_keep_their_imaginary_parts(dtype):
    net = nn.Linear(3, 3)
    net.register_buffer("turns", torch.randn(4, dtype=torch.complex64))
    turns = net.turns.clone()
    cast_model(net, dtype)
    assert net.weight.dtype == dtype
    assert torch.equal(net.turns, turns)
