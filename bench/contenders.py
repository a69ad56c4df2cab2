"""One set-up for all contenders: the same shapes, weights and gradients, and what counts as their work."""

from __future__ import annotations

import ctypes
import math
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import torch
from eager import EagerSASSHA
from measure import Timed, stopwatch
from shapes import Shapes
from torch import Tensor

from sassha_fast import SASSHA, ops
from sassha_fast.scalars import Request, step_scalars
from sassha_fast.tables import BACKUP, EXP_AVG, FLAGS, GRAD, HESSIAN, PARAM, PRODUCT, ROW_WORDS

NEVER = 10**9  # a refresh interval that leaves ordinary steps only, after the first


def tensors(shapes: Shapes, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def parameters(shapes: Shapes) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(t) for t in tensors(shapes, 0)]


def adamw(shapes: Shapes, **options: bool) -> Timed:
    """``torch.optim.AdamW.step`` with gradients in place."""
    params = parameters(shapes)
    for p, g in zip(params, tensors(shapes, 1), strict=True):
        p.grad = g
    return stopwatch(torch.optim.AdamW(params, lr=1e-3, **options).step)


def three_calls(opt: SASSHA | EagerSASSHA, params: list[torch.nn.Parameter], shapes: Shapes) -> Timed:
    """The work of perturb_weights, unperturb and step.

    Setting gradients is the backward passes' work and giving their memory back is zero_grad's: neither is timed, for
    no contender.
    """
    first, second = tensors(shapes, 1), tensors(shapes, 2)

    def set_grads(grads: list[Tensor]) -> list[Tensor]:
        """Sets copies as gradients; the aliases returned keep their memory until they are dropped."""
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        return [p.grad.detach() for p in params]

    loss = sum((p * p).sum() for p in params)
    loss.backward(create_graph=True)  # the first step refreshes, so that there is a curvature
    opt.step()
    opt.zero_grad()
    del loss

    def timed() -> float:
        aliases = set_grads(first)
        begin = time.perf_counter()
        opt.perturb_weights(zero_grad=True)
        taken = time.perf_counter() - begin
        aliases += set_grads(second)
        begin = time.perf_counter()
        opt.unperturb()
        opt.step()
        taken += time.perf_counter() - begin
        opt.zero_grad()
        return taken

    return timed


def sassha(shapes: Shapes, backend: str) -> Timed:
    params = parameters(shapes)
    return three_calls(SASSHA(params, lr=1e-3, rho=0.05, lazy_hessian=NEVER, backend=backend), params, shapes)


def eager(shapes: Shapes) -> Timed:
    params = parameters(shapes)
    return three_calls(EagerSASSHA(params, lr=1e-3, rho=0.05, lazy_hessian=NEVER), params, shapes)


class Kernels:
    """The passes as kernels alone, over a table of addresses, as the optimizer calls them."""

    def __init__(self, shapes: Shapes) -> None:
        ops.load()
        self.ops = torch.ops.sassha_fast
        names = ("param", "grad", "backup", "exp_avg", "hessian", "product")
        self.tensors = {name: tensors(shapes, i) for i, name in enumerate(names)}
        for d in self.tensors["hessian"]:
            d.abs_()
        self.table = torch.zeros(len(shapes), ROW_WORDS, dtype=torch.int64)
        for column, name in (
            (PARAM, "param"),
            (GRAD, "grad"),
            (BACKUP, "backup"),
            (EXP_AVG, "exp_avg"),
            (HESSIAN, "hessian"),
        ):
            self.ops.table_bind(self.table, column, self.tensors[name])
        self.in_grads = self.table.clone()
        self.in_grads[:, BACKUP] = self.in_grads[:, GRAD]  # perturb puts x into the gradients' memory
        self.refresh = self.table.clone()
        self.refresh[:, PRODUCT] = torch.tensor([h.data_ptr() for h in self.tensors["product"]])
        self.refresh[:, FLAGS] = 0
        group = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "weight_decay": 0.01,
            "eps": 1e-4,
            "hessian_power": 0.5,
            "maximize": False,
        }
        self.scalars = torch.tensor(step_scalars(group, 5, 0.5, refresh=False, request=Request()), dtype=torch.float64)
        self.draw = torch.zeros(1, dtype=torch.int64)
        self.scales = torch.full((1,), 1e-6)

    def norm(self) -> None:
        self.ops.table_square_sums(self.table, 1, False)

    def perturb(self) -> None:
        self.ops.table_perturb(self.in_grads, self.scales, False, 0, self.draw)

    def restore(self) -> None:
        self.ops.table_restore(self.table)

    def step(self) -> None:
        self.ops.table_step(self.table, self.scalars, 0, None)

    def refresh_step(self) -> None:
        self.ops.table_refresh_step(self.refresh, self.scalars, 0, 0, None, 0)

    def ordinary(self) -> None:
        """What one ordinary step of a closure costs: norm, perturb, step with restore fused in."""
        self.norm()
        self.perturb()
        self.step()


@cache
def _floor_library() -> ctypes.CDLL:
    source = Path(__file__).with_name("roofline.cpp")
    target = Path(tempfile.mkdtemp()) / "roofline.so"
    command = ["g++", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))


class Floors:
    """Loops without arithmetic with the reads and writes of each pass, over tensors of the same shapes."""

    def __init__(self, shapes: Shapes) -> None:
        self.lib = _floor_library()
        self.tensors = [tensors(shapes, seed) for seed in range(6)]
        lists = [(ctypes.c_void_p * len(shapes))(*(t.data_ptr() for t in column)) for column in self.tensors]
        self.p, self.b, self.g, self.m, self.d, self.h = lists
        sizes = (ctypes.c_int64 * len(shapes))(*(math.prod(shape) for shape in shapes))
        self.rest = (sizes, ctypes.c_int64(len(shapes)), ctypes.c_int(torch.get_num_threads()))

    def norm(self) -> None:
        self.lib.floor_norm(self.g, *self.rest)

    def perturb(self) -> None:
        self.lib.floor_perturb(self.p, self.g, *self.rest)

    def restore(self) -> None:
        self.lib.floor_restore(self.p, self.b, *self.rest)

    def step(self) -> None:
        self.lib.floor_step(self.p, self.b, self.g, self.m, self.d, None, *self.rest)

    def refresh_step(self) -> None:
        self.lib.floor_step(self.p, self.b, self.g, self.m, self.d, self.h, *self.rest)

    def copy(self) -> None:
        torch._foreach_copy_(self.tensors[0], self.tensors[1])
