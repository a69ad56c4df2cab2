"""A small GPT-2 from its configuration and sequences that follow a rule, for the examples in training frameworks."""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from sassha_fast import MSASSHA, SASSHA

OPTIMIZERS = {"sassha": SASSHA, "m-sassha": MSASSHA}
VOCABULARY, LENGTH, BATCH = 64, 16, 8


def build_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def sequences(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Every token follows from the one before; the first is random."""
    tokens = [torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))]
    for _ in range(LENGTH - 1):
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
    return [{"input_ids": row, "labels": row} for row in torch.stack(tokens, dim=1)]


def arguments(prog: str, description: str) -> argparse.ArgumentParser:
    """The options that all frameworks share."""
    p = argparse.ArgumentParser(prog=f"python -m examples.{prog}", description=description)
    p.add_argument("--optimizer", choices=list(OPTIMIZERS), default="sassha")
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--rho", type=float, default=0.05)
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batches", type=int, default=32, help="of an epoch; default: %(default)s")
    p.add_argument("--accumulate", type=int, default=1, help="batches of a step; default: %(default)s")
    return p
