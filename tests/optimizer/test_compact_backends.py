"""Compact state on parameters of odd sizes and places: every backend that has kernels for it gives the same bits."""

import pytest
import torch
from cases import DEVICE, PASSES
from training import assert_same_bits, assert_same_state, state_of, three_calls

from sassha_fast import SASSHA, backends

NAMES = [name for name, kind in PASSES.items() if name == "foreach" or getattr(kind, "takes_compact", False)]
OPTIONS = {"lr": 0.02, "rho": 0.1, "weight_decay": 0.01, "state_bits": 8, "master_weight_bits": 24}
STEPS, REFRESHES = (50, 5) if DEVICE == "cpu" else (6, 2)  # the reference takes long on the virtual GPU


def made(shape, dtype, place):
    """A parameter whose groups of 32 end inside of it."""
    start = torch.randn(shape, dtype=torch.float32).to(dtype)
    if place == "misaligned":
        memory = torch.empty(start.numel() + 1, dtype=dtype)[1:]
        start = memory.view(shape).copy_(start)
    elif place == "gaps":
        start = torch.empty(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2].copy_(start)
    elif place == "transposed":
        start = start.t().contiguous().t()
    elif place == "channels_last":
        start = start.to(memory_format=torch.channels_last)
    return torch.nn.Parameter(start)


def made_all():
    torch.manual_seed(0)
    shapes = {"contiguous": (33, 5), "misaligned": (7, 29), "gaps": (13, 9), "transposed": (31, 3)}
    shapes["channels_last"] = (3, 5, 3, 7)
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return [made(shape, dtype, place) for dtype in kinds for place, shape in shapes.items()] + [
        made((1, 1), torch.bfloat16, "contiguous"), made((0, 3), torch.float32, "contiguous"),
        made((37,), torch.bfloat16, "misaligned"),
    ]  # fmt: skip


def run(name, monkeypatch):
    params, kind = made_all(), PASSES[name]
    found = backends.Backend(name, "under test", lambda: kind, lambda device: None)
    monkeypatch.setattr(backends, "_REGISTRY", {**backends._REGISTRY, name: found})
    opt = SASSHA(params, **OPTIONS, full_precision_below=0, lazy_hessian=STEPS // REFRESHES, backend=name)
    weights = [torch.rand(p.shape) for p in params]
    pairs = list(zip(weights, params, strict=True))
    losses = [three_calls(opt, lambda: sum((w * p.double().sin() ** 2).sum() for w, p in pairs)) for _ in range(STEPS)]
    assert losses[-1] < losses[0]
    return params, state_of(opt), opt.stats.refreshes


@pytest.mark.usefixtures("native_ops")
@pytest.mark.parametrize("name", NAMES)
def test_many_steps_on_odd_sizes_and_places_equal_the_reference(name, monkeypatch):
    params, state, count = run(name, monkeypatch)
    expected, expected_state, _ = run("reference", monkeypatch)
    assert count == REFRESHES
    assert_same_bits(params, expected)
    assert_same_state(state, expected_state)
