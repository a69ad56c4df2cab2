"""A GPT-2 of two layers from its configuration, and sequences that it can learn, for the tests of the frameworks."""

from __future__ import annotations

import os
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
from torch import Tensor
from torch import distributed as dist
from training import snapshot
from transformers import GPT2Config, GPT2LMHeadModel

from sassha_fast import MSASSHA, SASSHA

VOCABULARY, LENGTH, BATCH = 64, 16, 4

# A class and its arguments, as frameworks take them.
METHODS = {
    "sassha_exact": (SASSHA, {"lr": 0.01, "rho": 0.05, "weight_decay": 0.01, "lazy_hessian": 2}),
    "sassha_differences": (
        SASSHA,
        {"lr": 0.01, "rho": 0.05, "weight_decay": 0.01, "lazy_hessian": 2, "hvp": "finite_difference"},
    ),
    "m_sassha_exact": (MSASSHA, {"lr": 0.01, "rho": 0.05, "weight_decay": 0.01, "lazy_hessian": 2}),
    "m_sassha_differences": (
        MSASSHA,
        {"lr": 0.01, "rho": 0.05, "weight_decay": 0.01, "lazy_hessian": 2, "hvp": "finite_difference"},
    ),
}


def make_gpt(dropout: float = 0.1, seed: int = 0) -> GPT2LMHeadModel:
    """Dropout is on, so that passes which draw other masks give other weights."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def make_sequences(count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Every token follows from the one before."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, VOCABULARY, (count,), generator=generator)]
    for _ in range(LENGTH - 1):
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
    return [{"input_ids": row, "labels": row} for row in torch.stack(tokens, dim=1)]


def make_batches(count: int) -> list[dict[str, Tensor]]:
    """The same sequences, as a loader that does not shuffle gives them."""
    rows = make_sequences(count * BATCH)
    parts = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    return [{key: torch.stack([row[key] for row in part]) for key in part[0]} for part in parts]


class Passes:
    """Counts the forward passes of a model."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self.count = 0
        if model is not None:
            self(model)

    def __call__(self, model: torch.nn.Module) -> torch.nn.Module:
        """Counts those of this model."""
        model.register_forward_pre_hook(self._note)
        return model

    def _note(self, *_: object) -> None:
        self.count += 1


def plain_loop(
    method,
    batches,
    accumulate=1,
    *,
    autocast=False,
    by_tokens=False,
    dropout=0.1,
    wrap=lambda model: model,
    shares=None,
    **options,
):
    """Steps in plain torch, random numbers seeded by the number of the step. Returns the optimizer and copies of x.

    ``by_tokens`` divides sums by the tokens of all micro-batches, as ``transformers.Trainer`` does, in place of means
    by the number of micro-batches. ``wrap`` makes the model one of several processes. ``shares`` has by the name of a
    closure the share of a batch that it takes.
    """
    kind, settings = METHODS[method]
    net = make_gpt(dropout)
    net.train()
    model = wrap(net)
    opt = kind(net.parameters(), **settings, **options)
    opt.attach(model)

    size = dist.get_world_size() if dist.is_initialized() else 1
    tokens = {"num_items_in_batch": torch.tensor(size * accumulate * BATCH * LENGTH)} if by_tokens else {}

    def micro(batch, share=1):
        part = {key: rows[: int(BATCH * share)] for key, rows in batch.items()}
        number = {key: items * share for key, items in tokens.items()}

        def closure():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(**part, **number).loss
            loss = loss * size if by_tokens else loss / accumulate
            loss.backward()
            return loss

        return closure

    def whole(batch):
        opt.zero_grad()
        return micro(batch)()

    for step in range(len(batches) // accumulate):
        torch.manual_seed(step)
        parts = batches[step * accumulate : (step + 1) * accumulate]
        others = {name: [micro(batch, share) for batch in parts] for name, share in (shares or {}).items()}
        opt.step(partial(whole, *parts) if accumulate == 1 else [micro(batch) for batch in parts], **others)
    return opt, true_weights(net, opt)


def true_weights(model, opt):
    """Copies of x."""
    if isinstance(opt, MSASSHA):
        opt.eval()
    return snapshot(model)
