"""Launches, copies and waits of a step, counted by the virtual GPU (tools/vgpu): they do not grow with the tensors."""

import pytest
import torch
from cases import DEVICE

from sassha_fast import SASSHA

try:
    import vgpu
except ImportError:
    vgpu = None

pytestmark = pytest.mark.skipif(
    DEVICE != "cuda" or vgpu is None or not vgpu.is_running(), reason="counts are those of the virtual GPU"
)

BACKENDS = ("cuda", "triton")
FEW, MANY = 10, 1000
MOST = {("calls", "cuda"): 5, ("closure", "cuda"): 4}  # norm and its sum, ascent, way back, update
REFRESHED_EVERY = 4
MOST_TABLES = 3  # of a step: for the ascent, for the update, and for what a refresh adds after it


def backward(params, graph=False):
    """Of Σ ‖x‖³, in few operators for any number of tensors."""
    norms = torch.stack(torch._foreach_norm(params))
    value = (norms * norms * norms).sum()
    value.backward(create_graph=graph)
    return value


class Counted:
    """An optimizer whose own calls are counted, apart from the passes of the model."""

    def __init__(self, backend, tensors, interval=10**6, **options):
        self.params = [torch.nn.Parameter(torch.full((33,), 1.0 + i)) for i in range(tensors)]
        self.opt = SASSHA(self.params, lr=1e-3, rho=0.05, lazy_hessian=interval, backend=backend, **options)

    def _counting(self, call):
        with vgpu.counting() as counts:
            call()
        for name, number in counts.items():
            self.found[name] = self.found.get(name, 0) + number
        self.launches += counts.launches
        self.waits += counts.waits

    def _uploads(self):
        plans = self.opt.parts.params._plans.values()
        return sum(passes.mirrors.uploads for plan in plans for passes, _ in plan.parts)

    def step(self):
        """One step of three calls."""
        self.found, self.launches, self.waits, before = {}, 0, 0, self._uploads()
        backward(self.params)
        self._counting(self.opt.perturb_weights)
        backward(self.params, graph=self.opt.hessian_due)
        self._counting(self.opt.unperturb)
        self._counting(self.opt.step)
        self._counting(self.opt.zero_grad)
        self.tables = self._uploads() - before
        return self

    def ordinary(self):
        """An ordinary step, after others have made everything that is kept and torch's allocator has settled."""
        for _ in range(16):
            self.step()
        torch.cuda.synchronize()
        return self.step()

    def refresh(self):
        """A refresh."""
        for _ in range(2 * REFRESHED_EVERY):
            self.step()
        torch.cuda.synchronize()
        while not self.opt.hessian_due:
            self.step()
        return self.step()

    def copies(self, *kinds):
        return sum(n for name, n in self.found.items() if name.startswith(kinds) and not name.endswith("bytes"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("capturable", [False, True], ids=["eager", "capturable"])
def test_an_ordinary_step_launches_copies_and_waits_as_much_for_many_tensors_as_for_few(backend, capturable):
    few, many = (Counted(backend, n, capturable=capturable).ordinary() for n in (FEW, MANY))
    assert many.launches == few.launches
    if backend == "cuda":
        assert few.launches <= MOST["calls", "cuda"]
    for each in (few, many):
        assert each.waits == 0
        assert each.copies("memcpy H2D pageable", "memcpy D2H", "cudaMalloc", "cudaHostAlloc") == 0
        assert each.copies("memcpy H2D pinned") <= (0 if capturable else 1)  # the scalars; no table


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refresh_waits_for_nothing_and_copies_no_more_for_more_tensors(backend):
    few, many = (Counted(backend, n, REFRESHED_EVERY).refresh() for n in (FEW, 100))
    assert few.waits == many.waits == 0
    assert many.launches == few.launches
    kinds = ("memcpy H2D", "memcpy D2H")
    # Where the gradients of a refresh come is the allocator's affair, and each pass may need a table for it.
    assert few.tables <= MOST_TABLES
    assert many.tables <= MOST_TABLES
    assert many.copies(*kinds) - many.tables <= few.copies(*kinds) - few.tables


def test_a_closure_takes_a_launch_less_than_three_calls():
    params = [torch.nn.Parameter(torch.full((33,), 1.0 + i)) for i in range(FEW)]
    opt = SASSHA(params, lr=1e-3, rho=0.05, lazy_hessian=100, backend="cuda")

    def closure():
        opt.zero_grad()
        return backward(params)

    for _ in range(8):
        opt.step(closure)
    torch.cuda.synchronize()
    with vgpu.counting() as counts:
        opt.step(closure)  # the model launches torch's operators alone, which are not counted here
    assert counts.launches <= MOST["closure", "cuda"]
    assert counts.waits == 0
