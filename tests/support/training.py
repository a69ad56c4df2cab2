"""Small models and the three-call loop that the optimizer tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sassha_fast import SASSHA

DEVICE = os.environ.get("SASSHA_TEST_DEVICE", "cpu")  # see conftest.py
BACKENDS = ("reference", "foreach", DEVICE)


def make_net(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """A smooth network whose tensors span several Philox blocks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 130), nn.GELU(), nn.Linear(130, 3)).to(dtype)


def make_batch(dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(32, 12, generator=generator, device="cpu")
    y = torch.randint(0, 3, (32,), generator=generator, device="cpu")
    return x.to(DEVICE, dtype), y.to(DEVICE)


def make_loss(net: nn.Module, dtype: torch.dtype = torch.float32, seed: int = 1) -> Callable[[], Tensor]:
    x, y = make_batch(dtype, seed)
    return lambda: F.cross_entropy(net(x).double(), y)


def three_calls(
    opt: SASSHA,
    loss: Callable[[], Tensor],
    create_graph: bool | None = None,
    before_step: Callable[[], object] = lambda: None,
) -> float:
    """One step, with the probes of finite differences. ``create_graph=None`` asks ``hessian_due``, as new code does."""
    first = loss()
    first.backward()
    opt.perturb_weights(zero_grad=True)
    due = opt.hvp == "exact" and opt.hessian_due
    loss().backward(create_graph=due if create_graph is None else create_graph)
    for _ in range(opt.probes_due):
        opt.probe_weights()
        loss().backward()
    opt.unperturb()
    before_step()
    opt.step()
    opt.zero_grad()
    return first.item()


def closure_of(
    opt: torch.optim.Optimizer,
    loss: Callable[[], Tensor],
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> Callable[[], Tensor]:
    """What ``opt.step`` is given."""

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss()
        backward(value)
        return value

    return closure


def train(net: nn.Module, opt: SASSHA, steps: int, dtype: torch.dtype = torch.float32) -> None:
    loss = make_loss(net, dtype)
    for _ in range(steps):
        three_calls(opt, loss)


def snapshot(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def state_of(opt: SASSHA) -> list[dict[str, Any]]:
    """Copies of every parameter's state, in order."""
    entries = [opt.state.get(p, {}) for group in opt.param_groups for p in group["params"]]
    return [{k: v.clone() if isinstance(v, Tensor) else v for k, v in entry.items()} for entry in entries]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of every bit: −0 is not +0, and a NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().contiguous().view(kind), b.detach().contiguous().view(kind))


def assert_same_bits(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b)
    for i, (left, right) in enumerate(zip(a, b, strict=True)):
        assert same_bits(left, right), f"tensor {i} differs by up to {(left - right).abs().max().item()}"


def assert_same_state(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    assert len(a) == len(b)
    for i, (left, right) in enumerate(zip(a, b, strict=True)):
        assert left.keys() == right.keys()
        for key, value in left.items():
            same = same_bits(value, right[key]) if isinstance(value, Tensor) else value == right[key]
            assert same, f"{key!r} of parameter {i} differs"
