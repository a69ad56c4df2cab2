"""Updates of reduced-precision parameters: what rounding to nearest loses and stochastic rounding keeps."""

import pytest
import torch
from cases import PASSES, REDUCED, assert_same_bits, build, indices_of, pair_id, sizes_for
from test_step import RUNNERS, SEED, expected_lists, scalars_for, step_by
from tolerances import mean_bound
from training import BACKENDS, make_loss, make_net, snapshot, train

from sassha_fast import SASSHA, reference

pytestmark = pytest.mark.usefixtures("native_ops")
NOISE = torch.tensor([77])


@pytest.mark.parametrize("mode", ["ordinary", "signed"])
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", REDUCED, ids=pair_id)
def test_stochastic_updates_equal_the_reference_bit_for_bit(dtype, runner, mode):
    before, lists = (build(sizes_for(runner), dtype) for _ in range(2))
    scalars = scalars_for(0.5, mode)
    step_by(runner, lists, scalars, mode, NOISE)
    changed = 0
    nearest = expected_lists(before, scalars, mode)[0]
    for i, (x, g, m, d, p) in enumerate(zip(*before, strict=True)):
        noise = reference.rounding_noise(x, indices_of(i + 1)[i], SEED, 77, reference.UPDATE_NOISE)
        row, product = scalars[i % 2], p if mode == "signed" else None
        assert_same_bits(lists.weights[i], reference.step(x, g, m, d, row, product, noise)[0], f"weights[{i}]")
        changed += int((lists.weights[i] != nearest[i]).sum())
    assert changed > 1000


@pytest.mark.parametrize("runner", PASSES)
def test_full_precision_is_not_rounded_at_random(runner):
    lists, plain = (build(sizes_for(runner), torch.float32) for _ in range(2))
    scalars = scalars_for(0.5, "ordinary")
    step_by(runner, lists, scalars, "ordinary", NOISE)
    step_by(runner, plain, scalars, "ordinary")
    assert_same_bits(lists.weights, plain.weights)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", REDUCED, ids=pair_id)
def test_small_updates_are_lost_to_the_nearest_value_and_kept_at_random(dtype, backend):
    """A hundred updates of 2^-14 and 2^-17 beside weights of 1: far below half a step of the grid."""
    size = {torch.bfloat16: 2.0**-14, torch.float16: 2.0**-17}[dtype]
    n, steps, moved = 4096, 100, {}
    for stochastic in (False, True):
        p = torch.nn.Parameter(torch.ones(n, dtype=dtype))
        options = {"lr": size, "eps": 0.0, "betas": (0.0, 0.999), "lazy_hessian": 10**6}
        opt = SASSHA([p], backend=backend, stochastic_rounding=stochastic, **options)
        for _ in range(steps):  # g = 1 and D̄ = 1, so every update is lr
            loss = (0.5 * p.float().square()).sum() if opt.hessian_due else None
            if loss is None:
                p.grad = torch.ones_like(p)
            else:
                loss.backward(create_graph=True)
            opt.step()
            opt.zero_grad()
        moved[stochastic] = (1.0 - p.detach().double()).mean().item()
    assert moved[False] == 0.0
    grid = torch.finfo(dtype).eps
    assert abs(moved[True] - steps * size) <= mean_bound(n, (steps * size * grid) ** 0.5) + 1e-2 * steps * size


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
@pytest.mark.parametrize("dtype", REDUCED, ids=pair_id)
def test_training_with_stochastic_rounding_equals_the_reference(dtype, backend):
    results = []
    for name in (backend, "reference"):
        net = make_net(dtype)
        train(net, SASSHA(net.parameters(), lr=0.01, rho=0.05, backend=name, stochastic_rounding=True), 12, dtype)
        results.append(snapshot(net))
    assert_same_bits(*results)


def test_bfloat16_trains_further_with_stochastic_rounding():
    """At a learning rate whose updates are mostly below half a step of the grid."""
    losses = {}
    for stochastic in (False, True):
        net = make_net(torch.bfloat16)
        opt = SASSHA(net.parameters(), lr=2e-4, rho=0.02, stochastic_rounding=stochastic)
        train(net, opt, 150, torch.bfloat16)
        losses[stochastic] = make_loss(net, torch.bfloat16)().item()
    exact = make_net()
    train(exact, SASSHA(exact.parameters(), lr=2e-4, rho=0.02), 150)
    start, target = make_loss(make_net())().item(), make_loss(exact)().item()
    assert start - losses[True] > 0.7 * (start - target)
    assert start - losses[False] < 0.6 * (start - target)
