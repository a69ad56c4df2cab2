"""Every backend gives the bits of the reference."""

import pytest
import torch
from training import (
    BACKENDS,
    DEVICE,
    assert_same_bits,
    assert_same_state,
    make_loss,
    make_net,
    snapshot,
    state_of,
    three_calls,
)

from sassha_fast import SASSHA

STEPS = 50  # five refreshes


def groups_of(net):
    return [
        {"params": net[0].parameters(), "rho": 0.1, "betas": (0.8, 0.99), "eps": 1e-3},
        {"params": net[2].parameters(), "lr": 0.02, "weight_decay": 0.1, "hessian_power": 1.0, "eps": 1e-2},
        {"params": net[4].parameters()},
    ]


VARIANTS = {
    "plain": {},
    "adaptive": {"adaptive": True, "rho": 0.5},
    "weight_decay": {"weight_decay": 0.05},
    "two_samples": {"n_samples": 2},
    "no_bias_correction": {"bias_correction": False},
    "upstream_point": {"hvp_point": "upstream"},
    "power_one": {"hessian_power": 1.0, "eps": 1e-2},
    "refresh_every_step": {"lazy_hessian": 1},
}


def run(backend, dtype, *, groups=False, **options):
    net = make_net(dtype)
    params = groups_of(net) if groups else net.parameters()
    opt = SASSHA(params, **{"lr": 0.03, "rho": 0.05, "backend": backend, **options})
    loss = make_loss(net, dtype)
    losses = [three_calls(opt, loss) for _ in range(STEPS)]
    return net, opt, losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["foreach", DEVICE])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fifty_steps_equal_the_reference_bit_for_bit(variant, backend, dtype):
    expected, expected_opt, losses = run("reference", dtype, **VARIANTS[variant])
    found, found_opt, _ = run(backend, dtype, **VARIANTS[variant])
    assert losses[-1] < losses[0]
    assert_same_bits(snapshot(found), snapshot(expected))
    assert_same_state(state_of(found_opt), state_of(expected_opt))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["foreach", DEVICE])
def test_groups_with_their_own_settings_equal_the_reference_bit_for_bit(backend, dtype):
    expected, expected_opt, _ = run("reference", dtype, groups=True)
    found, found_opt, _ = run(backend, dtype, groups=True)
    assert_same_bits(snapshot(found), snapshot(expected))
    assert_same_state(state_of(found_opt), state_of(expected_opt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["foreach", DEVICE])
def test_reduced_precision_equals_the_reference_bit_for_bit(backend, dtype):
    expected, expected_opt, _ = run("reference", dtype)
    found, found_opt, _ = run(backend, dtype)
    assert_same_bits(snapshot(found), snapshot(expected))
    assert_same_state(state_of(found_opt), state_of(expected_opt))
    assert all(entry["exp_avg"].dtype == torch.float32 for entry in state_of(found_opt))


def test_channels_last_parameters_equal_contiguous_ones_bit_for_bit():
    """Probes are numbered by logical element, so the layout in memory is no part of the result."""

    def trained(memory_format, backend):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 3))
        net = net.double().to(memory_format=memory_format)
        opt = SASSHA(net.parameters(), lr=0.1, rho=0.1, backend=backend)
        weights = [torch.randn(p.shape, dtype=p.dtype) for p in net.parameters()]

        def loss():  # no convolution: its own arithmetic differs with the layout
            return sum((w * p.contiguous() ** 4).sum() for w, p in zip(weights, net.parameters(), strict=True))

        for _ in range(12):
            three_calls(opt, loss)
        return [p.detach().contiguous() for p in net.parameters()]

    expected = trained(torch.contiguous_format, "reference")
    for backend in BACKENDS:
        assert_same_bits(trained(torch.channels_last, backend), expected)


@pytest.mark.cpu
def test_thread_count_does_not_change_a_bit(restore_threads):
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(100_003))
        opt = SASSHA([p], lr=0.1, rho=0.1, backend="cpu")
        for step in range(12):
            g = torch.randn(100_003, generator=torch.Generator().manual_seed(step))
            three_calls(opt, lambda g=g, p=p: (g * p * p).sum() + (p**4).sum() * 0.01)
        results.append([p.detach().clone(), opt.state[p]["exp_avg"], opt.state[p]["exp_hessian_diag"]])
    assert_same_bits(*results)
