"""Launches, copies and waits of a step, counted by the virtual GPU (tools/vgpu): they do not grow with the tensors."""

import gc

import pytest
import torch
from cases import DEVICE

from sassha_fast import GSASSHA, MSASSHA, SASSHA, AdaHessian, SophiaH

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
# With refreshes ten steps apart: steps until most places of gradients were seen, steps that are then looked at, and
# tables that these may still copy. It was 3 of 60; with as few as 32 that are kept it is 66.
UNSETTLED_STEPS, SETTLED_STEPS, MOST_UNKNOWN = 240, 60, 12


@pytest.fixture(autouse=True)
def fresh_allocator():
    """Where tensors come to lie, and so how many tables are copied, would depend on what other tests have freed."""
    gc.collect()
    torch.cuda.empty_cache()


def backward(params, graph=False):
    """Of Σ ‖x‖³, in few operators for any number of tensors."""
    norms = torch.stack(torch._foreach_norm(params))
    value = (norms * norms * norms).sum()
    value.backward(create_graph=graph)
    return value


class Counted:
    """An optimizer whose own calls are counted, apart from the passes of the model."""

    def __init__(self, backend, tensors, interval=10**6, method=SASSHA, shape=(33,), **options):
        self.params = [torch.nn.Parameter(torch.full(shape, 1.0 + i)) for i in range(tensors)]
        if method not in (AdaHessian, SophiaH):
            options["rho"] = 0.05
        self.opt = method(self.params, lr=1e-3, lazy_hessian=interval, backend=backend, **options)
        self.ascends = method in (SASSHA, GSASSHA)
        self.exact = options.get("hvp", "exact") == "exact"

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
        """One step of hand-written calls."""
        self.found, self.launches, self.waits, before = {}, 0, 0, self._uploads()
        if self.ascends:
            backward(self.params)
            self._counting(self.opt.perturb_weights)
        backward(self.params, graph=self.opt.hessian_due and self.exact)
        for _ in range(self.opt.probes_due):
            self._counting(self.opt.probe_weights)
            backward(self.params)
        if self.ascends:
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

    def copied(self):
        """Copies between host and device, but for tables of addresses: those follow the allocator."""
        return self.copies("memcpy H2D", "memcpy D2H") - self.tables

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
        assert each.copies("memcpy H2D pageable", "memcpy D2H", "cudaHostAlloc") == 0
        scalars = 0 if capturable else 1
        if torch.cuda.get_allocator_backend() == "native":
            assert each.copies("memcpy H2D pinned") <= scalars  # no table
            assert each.copies("cudaMalloc") == 0
        else:  # it keeps no memory between tensors, so tables follow
            assert each.copied() <= scalars


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


def assert_a_refresh_waits_for_nothing(few, many, most_tables=MOST_TABLES):
    """Nor does it launch and copy more for many tensors than for few."""
    for each in (few, many):
        assert each.waits == 0
        assert each.copies("memcpy H2D pageable", "memcpy D2H pageable") == 0
        assert each.tables <= most_tables
    assert many.launches == few.launches
    # Signs may have come to lie elsewhere in one of them: their table is copied then, which no mirror counts.
    assert many.copied() <= few.copied() + 1


PROBES = {
    "one": {"hvp": "finite_difference"},
    "two": {"hvp": "finite_difference", "n_samples": 2},
    "central": {"hvp": "central_difference"},
    "capturable": {"hvp": "finite_difference", "capturable": True},
}


@pytest.mark.parametrize("method", [SASSHA, MSASSHA])
@pytest.mark.parametrize("options", PROBES.values(), ids=PROBES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refresh_by_finite_differences_waits_for_nothing_either(backend, options, method):
    counted = (Counted(backend, n, REFRESHED_EVERY, method, **options).refresh() for n in (FEW, 40))
    assert_a_refresh_waits_for_nothing(*counted)


RELATIVES = {
    "clipped": (SASSHA, {"max_grad_norm": 0.1}),
    "adaptive": (SASSHA, {"adaptive": True, "capturable": True}),
    "skipping": (SASSHA, {"skip_nonfinite": True, "max_grad_norm": 0.1, "capturable": True}),
    "M-SASSHA": (MSASSHA, {"max_grad_norm": 0.1}),
    "M-SASSHA capturable": (MSASSHA, {"adaptive": True, "skip_nonfinite": True, "capturable": True}),
    "G-SASSHA": (GSASSHA, {"max_grad_norm": 0.1, "adaptive": True}),
    "G-SASSHA capturable": (GSASSHA, {"capturable": True}),
    "AdaHessian": (AdaHessian, {"max_grad_norm": 0.1}),
    "AdaHessian of filters": (AdaHessian, {"shape": (3, 11, 1, 1)}),
    "AdaHessian capturable": (AdaHessian, {"skip_nonfinite": True, "capturable": True}),
    "Sophia-H": (SophiaH, {"max_grad_norm": 0.1}),
    "Sophia-H capturable": (SophiaH, {"max_grad_norm": 0.1, "capturable": True}),
}


@pytest.mark.parametrize(("method", "options"), RELATIVES.values(), ids=RELATIVES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_relatives_and_options_wait_for_nothing_either(backend, method, options):
    few, many = (Counted(backend, n, REFRESHED_EVERY, method, **options) for n in (FEW, 40))
    most_tables = MOST_TABLES + (method is GSASSHA)  # whose two gradients are in one
    assert_a_refresh_waits_for_nothing(few.refresh(), many.refresh(), most_tables)
    torch.cuda.synchronize()  # the next step reads what the refresh brought, long after it was sent
    for each in (few.step(), many.step()):
        assert each.waits == 0
        assert each.copies("memcpy H2D pageable", "memcpy D2H") == 0
        assert each.copies("memcpy H2D pinned") - each.tables <= (0 if options.get("capturable") else 1)
    assert many.launches == few.launches


def test_gradients_without_a_graph_are_looked_at_together():
    counted = Counted("cuda", FEW)
    idle = [torch.nn.Parameter(torch.ones(5)) for _ in range(FEW)]
    counted.opt.add_param_group({"params": idle})
    backward(counted.params)
    for p in idle:
        p.grad = torch.zeros_like(p)
    counted.opt.perturb_weights()
    backward(counted.params, graph=True)
    for p in idle:
        p.grad = torch.zeros_like(p)
    with vgpu.counting() as counts:
        counted.opt.unperturb()
    assert sum(n for kind, n in counts.copies.items() if kind.startswith("D2H")) == 1


def test_tables_become_known_though_refreshes_unsettle_the_allocator():
    if torch.cuda.get_allocator_backend() != "native":
        pytest.skip("cudaMallocAsync keeps no memory, so tensors need not come back to where others were")
    params = [torch.nn.Parameter(torch.full((33 + i % 7,), 1.0 + i)) for i in range(40)]
    opt = SASSHA(params, lr=1e-3, rho=0.05, lazy_hessian=10, backend="cuda")

    def closure():
        opt.zero_grad()
        return backward(params)

    uploads = []
    for _ in range(UNSETTLED_STEPS):
        opt.step(closure)
        plans = opt.parts.params._plans.values()
        uploads.append(sum(passes.mirrors.uploads for plan in plans for passes, _ in plan.parts))
    assert uploads[-1] - uploads[-1 - SETTLED_STEPS] <= MOST_UNKNOWN


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
