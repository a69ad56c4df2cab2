"""The passes alone, over tensors of given shapes: as a backend runs them, without the optimizer around them."""

from __future__ import annotations

from functools import cached_property, lru_cache, partial

import torch
from eager import EagerSASSHA
from shapes import Shapes
from torch import Tensor

from sassha_fast import backends
from sassha_fast._core.scalars import Request, step_scalars
from sassha_fast._passes.layout import FLAGS, GAP_WORDS, GRAD, PRODUCT, TALLY_WORDS
from sassha_fast._passes.reference import Members, Passes
from sassha_fast._passes.table import TablePasses, common_power
from sassha_fast.variant import Sample

GROUP = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "weight_decay": 0.01,
    "eps": 1e-4,
    "hessian_power": 0.5,
    "maximize": False,
}
TILE = 1 << 16


@lru_cache(maxsize=8)
def _tile(seed: int, device: str) -> Tensor:
    return torch.randn(TILE, generator=torch.Generator(device).manual_seed(seed), device=device)


def tensors(shapes: Shapes, seed: int) -> list[Tensor]:
    """Normal numbers, the same ones over and over: a hundred million new ones would take longer than timing them."""
    tile = _tile(seed, torch.get_default_device().type)
    made = [torch.empty(shape) for shape in shapes]
    for t in made:
        for part in t.view(-1).split(TILE):
            part.copy_(tile[: part.numel()])
    return made


def kernel_backends() -> list[str]:
    """Backends with kernels on the device that is timed, the default one first."""
    device = torch.get_default_device().type
    candidates = ["cpu"] if device == "cpu" else ["cuda", "triton"]
    return [name for name in candidates if name in backends.available(device)]


class Tensors:
    """What the passes work on, made when one first asks for it."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes, n = shapes, len(shapes)
        self.weights = tensors(shapes, 0)
        self.members = Members(self.weights, list(range(n)), [0] * n, 1, [f"weight {i}" for i in range(n)])
        self.scalars = [step_scalars(GROUP, 5, 0.5, refresh=False, request=Request())]
        self.scales, self.gap_scales = torch.full((1,), 1e-6), torch.tensor([[0.1, 0.9]])
        self.draw = torch.zeros(1, dtype=torch.int64)
        self.length = torch.tensor(1e-9, dtype=torch.float64)
        self.sums, self.gap = torch.empty(1, dtype=torch.float64), torch.empty(GAP_WORDS, dtype=torch.float64)
        self.tallies = torch.empty(n, TALLY_WORDS, dtype=torch.float64)

    grads = cached_property(lambda self: tensors(self.shapes, 1))
    backups = cached_property(lambda self: tensors(self.shapes, 2))
    exp_avgs = cached_property(lambda self: tensors(self.shapes, 3))
    hessians = cached_property(lambda self: [d.abs_() for d in tensors(self.shapes, 4)])
    products = cached_property(lambda self: tensors(self.shapes, 5))


class Kernels(Tensors):
    """Kernels over tables of addresses that were written before, as the optimizer calls them step after step."""

    def __init__(self, shapes: Shapes, backend: str | None = None) -> None:
        super().__init__(shapes)
        device = self.weights[0].device
        self.kind: type[TablePasses] = backends.choose(backend or kernel_backends()[0], device)

    @cached_property
    def climbing(self) -> TablePasses:
        """Where x goes into the gradients' memory."""
        return self._with_backups(self.grads)

    @cached_property
    def descending(self) -> TablePasses:
        """At x + ε, with x aside and new gradients."""
        made = self._with_backups(self.backups)
        made.bind_state(self.exp_avgs, self.hessians)
        made.bind_grads(self.grads)
        self.numbers = made.scalar_table(self.scalars)
        return made

    @cached_property
    def refreshing(self) -> TablePasses:
        """The same with products."""
        made = self._with_backups(self.backups)
        made.bind_state(self.exp_avgs, self.hessians)
        made.bind_grads(self.grads)
        made.table[:, PRODUCT] = torch.tensor([h.data_ptr() for h in self.products], device="cpu")
        made.table[:, FLAGS] = 0
        self.numbers = made.scalar_table(self.scalars)
        return made

    @cached_property
    def in_state(self) -> TablePasses:
        """Where x is kept in state, and two gradients are there to take apart."""
        made = self.kind(self.members)
        made.bind_state(self.exp_avgs, self.hessians, self.backups)
        made.bind_grads(self.grads)
        made.bind_firsts(self.products)
        self.numbers = made.scalar_table(self.scalars)
        return made

    def _with_backups(self, memory: list[Tensor]) -> TablePasses:
        made = self.kind(self.members)
        made.bind_grads(memory, overwrite=True)
        made.perturb(self.scales, adaptive=False, take_grads=True, seed=0, draw=self.draw)
        return made

    def _step(self, made: TablePasses, tallies: Tensor | None = None, squares: Tensor | None = None) -> None:
        args = (self.numbers, 0, 0, None, int(Sample.ABS), False, False)
        made.launch("step", *args, tallies, squares, made.journal, common_power(self.scalars))

    def norm(self) -> None:
        self.climbing.launch("square_sums", self.sums, GRAD, False)

    def perturb(self) -> None:
        made = self.climbing
        made.launch("perturb", self.scales, False, 0, self.draw, made.journal)

    def restore(self) -> None:
        self.descending.launch("restore", self.descending.journal)

    def step(self) -> None:
        self._step(self.descending)

    def refresh_step(self) -> None:
        self._step(self.refreshing, tallies=self.tallies)

    def ordinary(self) -> None:
        """What one ordinary step of a closure costs: norm, perturb, step with restore fused in."""
        self.norm()
        self.perturb()
        self.step()

    def momentum_ascent(self) -> None:
        self.in_state.launch("momentum_ascent", self.scales, False, 0, self.draw)

    def gap_sums(self) -> None:
        self.in_state.launch("gap_sums", self.gap)

    def decompose(self) -> None:
        self.in_state.launch("decompose", self.gap_scales)

    def step_in_state(self) -> None:
        self._step(self.in_state, squares=self.sums)

    def rademacher(self) -> None:
        self.climbing.rademacher(range(len(self.shapes)), 0, 0)

    def probe(self) -> None:
        self.climbing.probe(self.length, 0, 0)


class TorchPasses(Tensors):
    """Passes of a backend without kernels, whose lists of tensors are set again before each."""

    def __init__(self, shapes: Shapes, backend: str) -> None:
        super().__init__(shapes)
        self.passes: Passes = backends.choose(backend, self.weights[0].device)(self.members)
        self.cohorts = [0] * len(shapes)

    def norm(self) -> None:
        self.passes.grads = self.grads
        self.passes.square_sums(adaptive=False)

    def perturb(self) -> None:
        self.passes.grads = self.grads
        self.passes.perturb(self.scales, adaptive=False, take_grads=True, seed=0, draw=self.draw)

    def restore(self) -> None:
        self.passes.backups = self.backups
        self.passes.restore()

    def step(self) -> None:
        self.passes.grads, self.passes.backups = self.grads, self.backups
        self.passes.bind_state(self.exp_avgs, self.hessians)
        self.passes.step(self.scalars, self.cohorts, None, 0, 0, restore=True)

    def rademacher(self) -> None:
        self.passes.rademacher(range(len(self.shapes)), 0, 0)

    def probe(self) -> None:
        self.passes.probe(self.length, 0, 0)


class EagerPasses:
    """The same parts of the loop over tensors."""

    def __init__(self, shapes: Shapes) -> None:
        self.params = [torch.nn.Parameter(t) for t in tensors(shapes, 0)]
        for p, g in zip(self.params, tensors(shapes, 1), strict=True):
            p.grad = g
        self.opt = EagerSASSHA(self.params, lr=1e-3, rho=1e-6)
        self.size = self.opt.gradient_norm()

    def norm(self) -> None:
        self.opt.gradient_norm()

    def perturb(self) -> None:
        self.opt.ascend(self.size)

    def restore(self) -> None:
        self.opt.unperturb()

    def rademacher(self) -> None:
        self.opt.probes(self.params)


WITH_KERNELS = {f"sassha {backend}": partial(Kernels, backend=backend) for backend in kernel_backends()}
WITHOUT_KERNELS = {f"sassha {backend}": partial(TorchPasses, backend=backend) for backend in ("foreach", "reference")}
BACKENDS = {**WITH_KERNELS, **WITHOUT_KERNELS}
