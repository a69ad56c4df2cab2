"""Several micro-batches in one step are one large batch."""

import pytest
import torch
from tolerances import ACCUMULATION_RTOL
from torch.nn import functional as F
from training import BACKENDS, closure_of, make_net, snapshot, state_of

from sassha_fast import SASSHA

OPTIONS = {"lr": 0.02, "rho": 0.05, "lazy_hessian": 10}


def batch(dtype):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 12, generator=generator).to(dtype), torch.randint(0, 3, (64,), generator=generator)


def trained(micro_batches, steps, dtype, **options):
    net = make_net(dtype)
    opt = SASSHA(net.parameters(), **OPTIONS, **options)
    x, y = batch(dtype)

    def micro(part, target):
        def closure():
            loss = F.cross_entropy(net(part), target) / micro_batches
            loss.backward()
            return loss

        return closure

    if micro_batches == 1:
        step = closure_of(opt, lambda: F.cross_entropy(net(x), y))
    else:
        step = [micro(*pair) for pair in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)]
    losses = [float(opt.step(step)) for _ in range(steps)]
    return net, opt, losses


def assert_close(found, expected, rtol):
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= rtol * b.norm()


@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
@pytest.mark.parametrize("n_samples", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_four_times_sixteen_is_sixty_four_over_thirty_steps(backend, n_samples, hvp):
    options = {"dtype": torch.float64, "backend": backend, "n_samples": n_samples, "hvp": hvp}
    expected, expected_opt, expected_losses = trained(1, 30, **options)
    found, opt, losses = trained(4, 30, **options)
    assert_close(snapshot(found), snapshot(expected), ACCUMULATION_RTOL[torch.float64])
    assert losses == pytest.approx(expected_losses, rel=1e-9)
    assert opt.stats.refreshes == expected_opt.stats.refreshes == 3
    assert opt.stats.trace.item() == pytest.approx(expected_opt.stats.trace.item(), rel=1e-6)


def test_one_step_from_equal_state_in_float32():
    expected, expected_opt, _ = trained(1, 1, torch.float32)
    found, opt, _ = trained(4, 1, torch.float32)
    assert_close(snapshot(found), snapshot(expected), ACCUMULATION_RTOL[torch.float32])
    for a, b in zip(state_of(opt), state_of(expected_opt), strict=True):
        assert_close([a["exp_hessian_diag"]], [b["exp_hessian_diag"]], ACCUMULATION_RTOL[torch.float32])


def test_hessian_closures_accumulate_too():
    curvatures = []
    for parts in (1, 4):
        net = make_net(torch.float64)
        opt = SASSHA(net.parameters(), lr=1e-3, rho=0.1)
        x, y = batch(torch.float64)
        pieces = [
            lambda a=a, b=b, parts=parts, net=net: (F.cross_entropy(net(a), b) / parts).backward() or 0.0
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)
        ]
        opt.step(closure_of(opt, lambda net=net, x=x, y=y: F.cross_entropy(net(x), y)), hessian_closure=pieces)
        curvatures.append([entry["exp_hessian_diag"] for entry in state_of(opt)])
    assert_close(*curvatures, ACCUMULATION_RTOL[torch.float64])


@pytest.mark.parametrize("closures", [[], [3]], ids=str)
def test_a_sequence_without_functions_is_refused(closures):
    with pytest.raises(TypeError, match="expected a function without arguments"):
        SASSHA(make_net().parameters()).step(closures)
