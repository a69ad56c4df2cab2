"""What training takes in memory: measured, and as ``sassha_fast.memory`` says."""

import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

from sassha_fast import SASSHA, memory

SIDE, LAYERS = 1024, 10  # 10.5 million parameters


def live_bytes():
    """Of all tensors that anybody holds, gradients included; shared memory once."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        # Not of subclasses that only pretend to have memory, which other tests may have left behind.
        if (
            type(found) in (torch.Tensor, torch.nn.Parameter)
            and found.layout == torch.strided
            and found.device.type == "cpu"
        ):
            for tensor in (found, found.grad if found.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("dtype", "options", "most"),
    [
        (torch.bfloat16, {"state_bits": 8, "master_weight_bits": 24}, 7.3),
        (torch.float32, {"state_bits": 16}, 12.05),
        (torch.float32, {}, 16.05),
    ],
    ids=["7_bytes", "12_bytes", "16_bytes"],
)
def test_live_tensors_grow_by_the_bytes_of_the_bill(dtype, options, most):
    """From before the model to after three steps, the gradients of the last of which are still there."""
    before = live_bytes()
    net = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS))).to(dtype)
    opt = SASSHA(net.parameters(), lr=1e-3, rho=0.05, **options)
    x = torch.randn(2, SIDE, dtype=dtype)
    for _ in range(3):
        opt.zero_grad()
        net(x).float().square().mean().backward()
        opt.perturb_weights(zero_grad=True)
        net(x).float().square().mean().backward(create_graph=opt.hessian_due)
        opt.unperturb()
        opt.step()
    assert all(p.grad is not None for p in net.parameters())
    n = LAYERS * SIDE**2
    grown = (live_bytes() - before) / n
    assert grown <= most
    kinds = {name: (kind, given) for name, kind, given in memory.SETTINGS}
    (bill,) = [row for row in memory.bills(net) if kinds.get(row.name) == (dtype, options)]
    assert bill.total / n == pytest.approx(grown, abs=0.05)


def test_small_and_frozen_parameters_are_billed_as_they_are_stored():
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).requires_grad_(True)
    net[1].bias.requires_grad_(False)
    n = 64 * 64 + 64 + 64 * 8
    compact = memory.bills(net)[-1]
    assert compact.weights == compact.gradients == 2 * n
    assert compact.state == 64 * 64 * 3 + 6 * 64 * 2 + (64 + 64 * 8) * (8 + 2)
    assert memory.bills(net)[0].total == 16 * n


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("1000", 1000), ("1,000,000", 10**6), ("350M", 350 * 10**6), ("7b", 7 * 10**9), ("1.5e9", 1_500_000_000)),
        *(("1.5B", 1_500_000_000), ("1,500M", 1_500_000_000), ("1,234.5k", 1_234_500), ("1_000_000", 10**6)),
    ],
)
def test_numbers_of_parameters_are_read_as_people_write_them(text, number):
    assert memory.count_of(text) == number


@pytest.mark.parametrize("text", ["", "many", "-5", "0", "7X", "1.2.3"])
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match=r"^--memory is .* expected a number of parameters, such as 125000000, 350M"):
        memory.count_of(text)


@pytest.mark.parametrize(
    "text", ["1,5B", "0,5B", "1,5", "12,34M", "1,5e9", "1,0000", "1000,000", "0,500B", "1.000,5", ","]
)
def test_a_comma_that_parts_no_thousands_is_not_left_out(text):
    with pytest.raises(ValueError, match=r"^--memory is .*; a comma parts thousands, as in 125,000,000, and a point"):
        memory.count_of(text)


@pytest.mark.parametrize("text", ["1e400", "1e30", "99999999999999T", "1e999999999", "0.5"])
def test_numbers_that_nobody_has_are_refused(text):
    with pytest.raises(ValueError, match=r"^--memory is .*, and no more than 10\^18"):
        memory.count_of(text)


@pytest.mark.parametrize("count", [1, 5, 10, 100, 1000, 10**9 + 1, 10**18])
def test_the_bill_is_of_the_number_that_was_asked_for(count):
    assert memory.report(count).startswith(f"{count:,} parameters;")
    rows = memory.bills(count)
    assert [row.weights // count for row in rows] == [4, 2, 4, 4, 4, 2, 2, 2]
    assert rows[-1].state == 3 * count + 6 * -(-count // 32)
    assert all(row == other for row, other in zip(rows, memory.bills(count, full_precision_below=0), strict=True))


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        (-1, ValueError, "model is -1, expected a number of parameters from 1 to 10"),
        (0, ValueError, "model is 0, expected a number of parameters from 1"),
        (10**19, ValueError, "model is 10000000000000000000, expected a number of parameters from 1"),
        (2.5, TypeError, "model is 2.5, expected a torch.nn.Module or a whole number"),
        ("7B", TypeError, "model is '7B', expected a torch.nn.Module or a whole number"),
        (None, TypeError, "model is None, expected a torch.nn.Module or a whole number"),
        (True, TypeError, "model is True, expected a torch.nn.Module or a whole number"),
        (nn.LazyLinear(3), ValueError, "'weight' has no shape before the first forward pass of its lazy module"),
    ],
    ids=str,
)
def test_what_is_no_model_and_no_number_is_refused_by_name(model, kind, message):
    with pytest.raises(kind, match=f"^sassha_fast.memory: {message}"):
        memory.report(model)


def test_a_limit_that_is_no_number_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"^sassha_fast.memory: full_precision_below is 'a', expected a number of elem"
    ):
        memory.bills(nn.Linear(3, 3), full_precision_below="a")


def test_a_network_without_parameters_costs_nothing():
    assert [row.total for row in memory.bills(nn.ReLU())] == [0] * 8
    assert memory.report(nn.ReLU())


def test_the_command_prints_the_bill_beside_adamw():
    command = [sys.executable, "-m", "sassha_fast", "--memory", "7B"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("7,000,000,000 parameters")
    assert "AdamW, float32 " in printed
    assert printed.split("master_weight_bits=24, state_bits=8")[1].split()[4] == "7.19"
    wrong = subprocess.run([*command[:-1], "seven"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "expected a number of parameters" in wrong.stderr
