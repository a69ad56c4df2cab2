"""Checkpoints that version 0.1.0 wrote load, and the run goes on to the last bit as it would have gone then.

``python tests/optimizer/test_old_checkpoint.py --write`` wrote them, with the package of that version.
"""

import io
import lzma
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH, __version__, schedules

FILE = Path(__file__).parents[1] / "support" / "data" / "checkpoints-0.1.0.pt.xz"
SAVED_AFTER, MORE = 13, 12  # a refresh every five steps, so there are three before and two after
LAZY = {"lazy_hessian": 5}
# Powers of two: their products are exact, so it does not matter where torch's SGD contracts them.
SGD = {"lr": 2.0**-6, "momentum": 0.875, "weight_decay": 2.0**-10}
SCHEDULED = {
    "rho_scheduler": schedules.Linear(20, 0.05, 0.25),
    "hessian_power_scheduler": lambda t: 0.5 if t < 15 else 1.0,  # both are exact on every machine
}


class Problem:
    """A coupled polynomial of four parameters, written so that every machine computes the same gradients.

    There are only products and sums of elements, each rounded on its own, and the loss is computed in double precision.
    Filters have two elements, whose mean has only one order of summation.
    """

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        shapes = ((2, 3), (3,), (2, 1, 1, 2), (5,))
        dtypes = (torch.float64, torch.float64, torch.float64, torch.bfloat16)
        starts = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
        self.params = [nn.Parameter(start.to(dtype)) for start, dtype in zip(starts, dtypes, strict=True)]

    def groups(self):
        return [{"params": self.params[:1], "lr": 2.0**-7}, {"params": self.params[1:]}]

    def loss(self):
        total = torch.zeros((), dtype=torch.float64)
        for i, p in enumerate(self.params):
            x = p.double().reshape(-1)
            y = x * x - x.roll(1) * 0.5 + (i - 1.5)
            total = total + (y * y * 0.25 + x.roll(1) * x * x.roll(2) * 0.125).sum()
        return total

    def weights(self):
        return [p.detach().clone() for p in self.params]


METHODS = {
    "SASSHA": (SASSHA, {"lr": 2.0**-6, "weight_decay": 0.01, **LAZY, **SCHEDULED}),
    "SASSHA, finite differences": (
        SASSHA,
        {"lr": 2.0**-6, "rho": 0.1, "hvp": "finite_difference", "n_samples": 2, "stochastic_rounding": True, **LAZY},
    ),
    "MSASSHA": (MSASSHA, {"lr": 2.0**-6, "rho": 0.1, **LAZY}),
    "MSASSHA, evaluating": (MSASSHA, {"lr": 2.0**-6, "rho": 0.1, "adaptive": True, **LAZY}),
    "GSASSHA": (GSASSHA, {"lr": 2.0**-6, "rho": 0.1, "alpha": 0.3, **LAZY}),
    "SAM": (SAM, {"base_optimizer": torch.optim.SGD, "rho": 0.05, "alpha": 0.1, **SGD}),
    "AdaHessian": (AdaHessian, {"lr": 2.0**-6, "weight_decay": 0.01, **LAZY}),
    "SophiaH": (SophiaH, {"lr": 2.0**-8, **LAZY}),
}


def build(name, backend="cpu"):
    problem, (method, options) = Problem(), METHODS[name]
    return problem, method(problem.groups(), backend=backend, **options)


def by_closure(opt, loss):
    def closure():
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    opt.step(closure)


def by_calls(opt, loss):
    climbs = not isinstance(opt, (MSASSHA, AdaHessian, SophiaH))
    if climbs:
        loss().backward()
        opt.perturb_weights()
    loss().backward(create_graph=opt.hvp == "exact" and opt.hessian_due)
    for _ in range(opt.probes_due):
        opt.probe_weights()
        loss().backward()
    if climbs:
        opt.unperturb()
    opt.step()
    opt.zero_grad()


def write():
    assert __version__ == "0.1.0", "the file holds what 0.1.0 wrote, and no other version can write it again"
    written = {}
    for name in METHODS:
        problem, opt = build(name)
        for _ in range(SAVED_AFTER):
            by_closure(opt, problem.loss)
        if name.endswith("evaluating"):
            opt.eval()
        saved = {"params": problem.weights(), "opt": opt.state_dict()}
        kept = io.BytesIO()
        torch.save(saved, kept)  # what follows would change the tensors of the state
        if name.endswith("evaluating"):
            opt.train()
        for _ in range(MORE):
            by_closure(opt, problem.loss)
        kept.seek(0)
        written[name] = {**torch.load(kept), "later": problem.weights()}
    file = io.BytesIO()
    torch.save(written, file)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_bytes(lzma.compress(file.getvalue()))
    print(f"{FILE}: {FILE.stat().st_size} bytes")


def saved_by_0_1_0():
    return torch.load(io.BytesIO(lzma.decompress(FILE.read_bytes())), weights_only=True)


def bits(tensors):
    return [t.detach().view(torch.int16 if t.dtype.itemsize == 2 else torch.int64).tolist() for t in tensors]


@pytest.mark.parametrize("step", [by_closure, by_calls])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", METHODS)
def test_a_checkpoint_of_0_1_0_loads_and_the_run_goes_on_bit_for_bit(name, backend, step):
    saved = saved_by_0_1_0()[name]
    problem, opt = build(name, backend)
    with torch.no_grad():
        for p, value in zip(problem.params, saved["params"], strict=True):
            p.copy_(value)
    opt.load_state_dict(saved["opt"])
    assert bits(problem.params) == bits(saved["params"])
    if name.endswith("evaluating"):
        assert opt.evaluating
        opt.train()
        assert bits(problem.params) != bits(saved["params"])
    for _ in range(MORE):
        step(opt, problem.loss)
    assert bits(problem.params) == bits(saved["later"])


def test_the_weights_in_the_file_moved_after_the_checkpoint():
    """Else equal bits would say nothing."""
    for saved in saved_by_0_1_0().values():
        for before, later in zip(saved["params"], saved["later"], strict=True):
            assert torch.isfinite(later).all()
            assert (before != later).double().mean() >= 0.8  # bfloat16 may come back to where it was


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    torch.set_num_threads(1)
    write()
