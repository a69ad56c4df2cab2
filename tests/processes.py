"""Runs scenarios in several processes on gloo. Each returns what its process saw; tests compare the returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from replicas import REPLICAS
from shards import SHARDS, checkpoint_scenario

SCENARIOS = {**REPLICAS, **SHARDS}


def _plain(name: str) -> str:
    return name.replace("/", "_")


def work(rank: int, size: int, names: list[str], folder: str) -> None:
    """One process: runs the scenarios and saves what each returned."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    try:
        for name in names:
            scenario = checkpoint_scenario(name) if ":" in name else SCENARIOS[name]
            torch.save(scenario(), Path(folder) / f"{_plain(name)}.{rank}.pt")
    finally:
        dist.destroy_process_group()


def run(size: int, names: list[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What every process returned, by scenario."""
    torch.multiprocessing.start_processes(work, (size, names, str(folder)), nprocs=size, start_method="spawn")
    return {
        name: [torch.load(folder / f"{_plain(name)}.{rank}.pt", weights_only=False) for rank in range(size)]
        for name in names
    }
