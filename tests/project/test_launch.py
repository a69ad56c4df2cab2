"""The examples of several processes, as users start them: with torchrun."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tolerances import PATIENCE
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytest.importorskip("sklearn")
pytestmark = pytest.mark.product
ROOT = Path(__file__).resolve().parents[2]


def torchrun(example, *arguments, restarts=0, wait=True):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), "-m", f"examples.{example}", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    started = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if not wait:
        return started
    output, _ = started.communicate(timeout=PATIENCE)
    assert started.returncode == 0, output
    return output


def losses(output):
    return [float(value) for value in re.findall(r"train loss ([\d.]+)", output)]


def test_ddp_learns(tmp_path):
    output = torchrun("ddp", "--epochs", 2)
    assert losses(output)[1] < losses(output)[0]


def test_fsdp2_learns_and_resumes(tmp_path):
    first = torchrun("fsdp2", "--epochs", 1, "--checkpoints", tmp_path)
    second = torchrun("fsdp2", "--epochs", 2, "--checkpoints", tmp_path)
    assert "resumed from" in second
    assert len(losses(second)) == 1
    assert losses(second)[0] < losses(first)[0]


def worker_of(launcher, local_rank):
    """The process that torchrun started for a rank."""
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == launcher.pid and b"LOCAL_RANK=%d" % local_rank in environment:
            return int(entry.name)
    return None


@pytest.mark.slow
def test_a_killed_process_costs_nothing_but_time(tmp_path):
    """SIGKILL in the middle: torchrun starts again, from the last checkpoint, and ends with the same weights."""
    undisturbed = torchrun("ddp", "--epochs", 6, "--checkpoints", tmp_path / "undisturbed")
    folder = tmp_path / "killed"
    launcher = torchrun("ddp", "--epochs", 6, "--checkpoints", folder, restarts=1, wait=False)
    while not (folder / "epoch-2" / ".metadata").exists():
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.02)
    os.kill(worker_of(launcher, 1), signal.SIGKILL)
    output, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, output
    assert "resumed from" in output
    assert losses(output)[-1] == losses(undisturbed)[-1]
    ends = []
    for run in (tmp_path / "undisturbed", folder):
        dcp_to_torch_save(run / "epoch-6", tmp_path / "end.pt")
        ends.append(torch.load(tmp_path / "end.pt"))
    assert ends[0]["model"].keys() == ends[1]["model"].keys()
    assert all(torch.equal(ends[0]["model"][key], ends[1]["model"][key]) for key in ends[0]["model"])
