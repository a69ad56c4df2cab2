"""What the examples of several processes share: the process group, one line per epoch, and checkpoints."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer


def start() -> torch.device:
    """Joins the other processes of torchrun: NCCL on GPUs, gloo elsewhere."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(local_rank)
    # A restart finds the store of the processes that failed: their addresses are under another prefix.
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=size)
    return torch.device("cuda", local_rank) if gpu else torch.device("cpu")


def stop() -> None:
    """Leaves the other processes, as the last thing that a program does. A program that is alone goes on.

    A mesh or a wrapped model keeps gloo's threads beyond their group, and one that lets go of a tensor while the
    interpreter shuts down aborts the process (seen with torch 2.13). So with gloo the process ends here, without that.
    """
    if not dist.is_initialized():
        return
    gloo = "gloo" in dist.get_backend()
    dist.destroy_process_group()
    if gloo:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def arguments(epochs: int, lr: float, description: str) -> argparse.ArgumentParser:
    """The options that all of them have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--rho", type=float, default=0.1, help="radius of the ascent")
    parser.add_argument("--checkpoints", type=Path, help="folder to save to after each epoch, and to resume from")
    return parser


def say(text: str) -> None:
    """Prints once, not once per process."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def newest(folder: Path | None) -> tuple[Path | None, int]:
    """The last checkpoint that was written whole, and how many epochs it has."""
    found = [path for path in (folder.glob("epoch-*") if folder is not None else ()) if (path / ".metadata").exists()]
    last = max(found, key=lambda path: int(path.name.split("-")[1]), default=None)
    return last, 0 if last is None else int(last.name.split("-")[1])


def resume(model: nn.Module, opt: Optimizer, folder: Path | None) -> int:
    """Loads the newest checkpoint, whatever number of processes wrote it. Returns the epochs that it has."""
    path, epochs = newest(folder)
    if path is not None:
        weights, state = get_state_dict(model, opt)
        content = {"model": weights, "optimizer": state}
        dcp.load(content, checkpoint_id=path)
        set_state_dict(model, opt, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
        say(f"resumed from {path}")
    return epochs


def save(model: nn.Module, opt: Optimizer, folder: Path | None, epochs: int) -> None:
    """Writes a checkpoint of all processes."""
    if folder is not None:
        weights, state = get_state_dict(model, opt)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"epoch-{epochs}")
