"""What compilers make of the Triton kernels for one GPU of each vendor; ``make prove-triton`` does all targets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TARGETS = ("sm_80", "gfx942")
FLOORS = {"norm": 4, "perturb": 16, "restore": 8, "rademacher": 4, "probe": 8, "step": 24, "refresh": 32}
FLOORS |= {"momentum ascent": 12, "gap sums": 8, "decompose": 12, "step in state": 24, "refresh in state": 32}
SUMS = ("norm", "gap sums")  # which write no parameter
PHILOX_MULTIPLIES = 20  # of one call


def prove(*arguments):
    # Compiling needs kernels that were not made for the interpreter.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.prove_triton", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {(f["target"], f["kernel"], f["dtype"]): f for f in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def figures():
    return prove("--targets", *TARGETS, "--dtypes", "float32", "bfloat16", "--kernels", *FLOORS)


@pytest.mark.parametrize("kernel", FLOORS)
@pytest.mark.parametrize("target", TARGETS)
def test_full_chunks_move_the_bytes_of_the_algorithm_in_words_of_128_bits(figures, target, kernel):
    found = figures[target, kernel, "float32"]
    words = found["loads"] + found["stores"]
    assert (found["ptx_loads"], found["ptx_stores"]) == (found["loads"], found["stores"])
    assert found["stores"] > 0 or kernel in SUMS
    # 256 threads move a chunk of 2048 parameters; less than the floor would be access in shorter words.
    assert FLOORS[kernel] <= 16 * words * 256 / 2048 <= 1.1 * FLOORS[kernel]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_spills_contracts_approximates_or_leaves_its_floor(figures, target, dtype):
    for kernel in FLOORS:
        found = figures[target, kernel, dtype]
        assert (found["spills"], found["contracted"], found["approximate"]) == (0, 0, 0), found
        assert found["floor"] <= found["bytes"] <= 1.1 * found["floor"], found


@pytest.mark.parametrize("target", TARGETS)
def test_one_philox_call_serves_many_elements(figures, target):
    # A thread has eight elements: of at most two rows of signs, or of one call of noise in each of the two paths.
    assert figures[target, "probe", "float32"]["philox_multiplies"] <= 2 * PHILOX_MULTIPLIES
    assert figures[target, "perturb", "bfloat16"]["philox_multiplies"] <= 2 * PHILOX_MULTIPLIES + 2
