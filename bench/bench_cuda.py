"""The CUDA kernels against a copy of the same bytes: `pytest bench --device cuda` on a machine with a GPU."""

import pytest
import torch
from measure import Measured
from shapes import count, gpt

from sassha_fast.cuda import CudaPasses
from sassha_fast.passes import Members, Product
from sassha_fast.scalars import Request, step_scalars

BYTES = {
    "copy": 8,
    "norm": 4,
    "perturb": 16,
    "restore": 8,
    "momentum_ascent": 12,
    "gap_sums": 8,
    "decompose": 12,
    "step": 24,
    "apart_step": 24,
    "refresh_step": 32,
}
ROUNDS = 50
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and --device cuda")


def timed(run, rounds=ROUNDS, warmup=5):
    """Seconds of each round by the device's own clock."""
    seconds = []
    for turn in range(warmup + rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if turn >= warmup:
            seconds.append(begin.elapsed_time(end) / 1e3)
    return seconds


@pytest.fixture(scope="module")
def passes():
    shapes, n = gpt(), len(gpt())

    def column():
        return [torch.randn(shape, device="cuda") for shape in shapes]

    weights, grads, products = column(), column(), column()
    made = CudaPasses(Members(weights, list(range(n)), [0] * n, 1, [f"weight {i}" for i in range(n)]))
    made.bind_state(column(), [d.abs_() for d in column()])
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01, "eps": 1e-4, "maximize": False}
    scalars = [step_scalars({**group, "hessian_power": 0.5}, 5, 0.5, refresh=False, request=Request())]
    scales, draw = torch.full((1,), 1e-6, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    numbers = made.scalar_table(scalars)
    made.bind_grads(grads, overwrite=True)
    made.perturb(scales, adaptive=False, take_grads=True, seed=0, draw=draw)
    made.bind_grads(column())
    made.bind_firsts(column())
    gap_scales = torch.tensor([[0.1, 0.9]], device="cuda")

    def refresh_step():
        made.bind_grads(grads)
        made.step(scalars, [0] * n, [Product(p, signed=False) for p in products], 0, 0)

    others = column()
    return {
        "copy": lambda: torch._foreach_copy_(others, weights),
        "norm": lambda: made.kernel_square_sums(False),
        "perturb": lambda: made.kernel_perturb(scales, False, 0, draw),
        "restore": made.kernel_restore,
        "momentum_ascent": lambda: made.kernel_momentum_ascent(scales, False, 0, draw),
        "gap_sums": made.kernel_gap_sums,
        "decompose": lambda: made.kernel_decompose(gap_scales),
        "step": lambda: made.kernel_step(numbers, 0, None),
        "apart_step": lambda: made.kernel_apart_step(numbers, False, 0, None),
        "refresh_step": refresh_step,
    }


@pytest.mark.parametrize("name", BYTES)
def test_pass_on_the_device(name, passes, record, say):
    measured = Measured(name, timed(passes[name]))
    speed = BYTES[name] * count(gpt()) / measured.median / 1e9
    record(measured, bytes_per_parameter=BYTES[name], gigabytes_per_second=speed)
    say(f"cuda, {name:<15} {measured.median * 1e6:8.1f} µs  {BYTES[name]:2d} bytes/parameter  {speed:7.1f} GB/s")
