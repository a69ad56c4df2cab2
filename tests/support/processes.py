"""Runs scenarios in several processes on gloo. Each returns what its process saw; tests compare the returns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from replicas import REPLICAS
from shards import SHARDS, checkpoint_scenario

from examples.lib.launch import stop

SCENARIOS = {**REPLICAS, **SHARDS}


def _plain(name: str) -> str:
    return name.replace("/", "_")


def _live(rank: int, size: int, meeting: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/rendezvous", rank=rank, world_size=size)
    work(*arguments)
    stop()


def start(size: int, work: Callable[..., None], *arguments: Any) -> None:
    """Runs ``work(*arguments)`` in every process of a group of its own, and raises what any of them raises.

    All tests start their groups here or by torchrun: a process with gloo's threads ends with care (see ``stop``).
    """
    with TemporaryDirectory() as meeting:
        given = size, meeting, work, arguments
        torch.multiprocessing.start_processes(_live, given, nprocs=size, start_method="spawn")


def work(names: list[str], folder: str) -> None:
    """One process: runs the scenarios and saves what each returned."""
    for name in names:
        scenario = checkpoint_scenario(name) if ":" in name else SCENARIOS[name]
        torch.save(scenario(), Path(folder) / f"{_plain(name)}.{dist.get_rank()}.pt")


def run(size: int, names: list[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What every process returned, by scenario."""
    start(size, work, names, str(folder))
    return {
        name: [torch.load(folder / f"{_plain(name)}.{rank}.pt", weights_only=False) for rank in range(size)]
        for name in names
    }
