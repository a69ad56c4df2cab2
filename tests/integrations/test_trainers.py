"""Frameworks in two processes: replicas are equal, and equal to a plain loop with DDP, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tolerances import PATIENCE
from training import assert_same_bits, assert_same_state

for package in ("lightning", "transformers", "accelerate"):
    pytest.importorskip(package)

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What trainers.py saw in either process."""
    folder = tmp_path_factory.mktemp("trainers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*command, str(SUPPORT / "trainers.py"), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},  # ours has the examples
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert ran.returncode == 0, ran.stdout
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("method", ["sassha_exact", "sassha_differences", "m_sassha_exact", "m_sassha_differences"])
@pytest.mark.parametrize("framework", ["lightning", "huggingface", "accelerate"])
def test_processes_of_a_framework_equal_those_of_a_plain_loop_bit_for_bit(framework, method, ranks):
    first, second = (results[framework, method] for results in ranks)
    assert len(first["batches"]) == len(second["batches"]) == 6
    assert not torch.equal(first["batches"][0]["input_ids"], second["batches"][0]["input_ids"])
    assert_same_bits(first["weights"], second["weights"])
    for rank in (first, second):
        assert_same_bits(rank["weights"], rank["plain_weights"])
        assert_same_state(rank["state"], rank["plain_state"])
