"""The probe pass x + h z, and the signs as the classes of passes hand them out."""

from functools import cache

import pytest
import torch
from cases import (
    BY_NAME,
    CASES,
    DTYPES,
    PAIRS,
    REDUCED,
    assert_same_bits,
    build,
    clones,
    indices_of,
    members_of,
    pair_id,
    passes_over,
    runs_of,
)

from sassha_fast import reference

pytestmark = pytest.mark.usefixtures("native_ops")
OPS = torch.ops.sassha_fast
SEED, DRAW = 2**35 + 3, 21
ROW_MAJOR = [(case, dtype) for case, dtype in PAIRS if case.row_major]


def length(h):
    return torch.tensor(h, dtype=torch.float64)


def expected_probe(weights, h, seed=SEED, draw=DRAW):
    out = []
    for weight, index in zip(weights, indices_of(len(weights)), strict=True):
        compute = reference.compute_dtype(weight.dtype)
        z = reference.rademacher(weight, index, seed, draw).to(compute)
        out.append((weight.to(compute) + torch.tensor(h, dtype=compute) * z).to(weight.dtype))
    return out


@cache
def expected_signs(case, dtype):
    weights = build(case, dtype).weights
    return [
        reference.rademacher(weight, index, SEED, DRAW)
        for weight, index in zip(weights, indices_of(len(weights)), strict=True)
    ]


@pytest.mark.parametrize("h", [0.013, -2.5])
@pytest.mark.parametrize(("case", "dtype"), ROW_MAJOR, ids=pair_id)
def test_probe_adds_h_times_the_reference_signs(case, dtype, h):
    weights = build(case, dtype).weights
    expected = expected_probe(weights, h)
    OPS.probe_(weights, indices_of(len(weights)), length(h), SEED, DRAW)
    assert_same_bits(weights, expected)


@pytest.mark.parametrize("dtype", REDUCED, ids=pair_id)
def test_probe_rounds_every_bit_pattern_like_torch(dtype):
    weights = [torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)]
    for h in (1e-7, 0.4, 3e4):
        moved = clones(weights)
        OPS.probe_(moved, indices_of(1), length(h), SEED, DRAW)
        assert_same_bits(moved, expected_probe(weights, h))


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_probe_does_not_depend_on_thread_count(dtype, restore_threads):
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        weights = build(BY_NAME["sizes"], dtype).weights
        OPS.probe_(weights, indices_of(len(weights)), length(0.1), SEED, DRAW)
        results.append(weights)
    assert_same_bits(results[1], results[0])


def test_probe_rounds_its_length_to_float32_once():
    h = 1.0 + 2.0**-24 + 2.0**-40
    weights = [torch.zeros(300)]
    OPS.probe_(weights, [0], length(h), SEED, DRAW)
    assert_same_bits(weights[0].abs(), torch.full((300,), 1.0 + 2.0**-23))


@pytest.mark.parametrize(("case", "dtype", "runner"), runs_of(), ids=pair_id)
def test_passes_number_signs_by_logical_element(case, dtype, runner):
    weights = build(case, dtype).weights
    passes = passes_over(runner, members_of(weights))
    positions = list(range(len(weights)))[::-1]
    signs = passes.rademacher(positions, SEED, DRAW)
    assert_same_bits(signs, expected_signs(case, dtype)[::-1])


@pytest.mark.parametrize(("case", "dtype", "runner"), runs_of(), ids=pair_id)
def test_passes_probe_in_every_layout(case, dtype, runner):
    weights = build(case, dtype).weights
    expected = expected_probe(weights, 0.1 + 2.0**-40)
    passes_over(runner, members_of(weights)).probe(length(0.1 + 2.0**-40), SEED, DRAW)
    assert_same_bits(weights, expected)


@pytest.mark.parametrize("runner", ["native", "triton"])
def test_signs_stay_in_registers_only_where_memory_is_in_logical_order(runner):
    for case in CASES:
        weights = build(case, torch.float32).weights
        passes = passes_over(runner, members_of(weights))
        found = [passes.signs_in_registers(i) for i in range(len(weights))]
        # The reference, which takes what has gaps, numbers elements as they come.
        assert found == [spec.layout in ("contiguous", "misaligned", "gaps") for spec in case.specs], case.name
