"""Trains a GPT on a text file with any optimizer of the paper's tables.

    python -m examples.gpt --data tinyshakespeare.txt --optimizer sassha
    python -m examples.gpt --data wikitext2-train.txt --validation wikitext2-valid.txt --tokens words --preset gpt1-mini
    torchrun --nproc-per-node 8 -m examples.gpt --data corpus.txt --tokens bytes --preset gpt2-small --amp

``--out`` gets a log (CSV), a checkpoint after every epoch and a plot; ``--resume`` goes on where a run was stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from examples.lib import presets, text
from examples.lib.command import assemble, chosen, execute, parser
from examples.lib.engine import Run
from examples.lib.launch import stop
from examples.lib.networks import LANGUAGE, language_model


def parse_args(given: list[str] | None = None) -> argparse.Namespace:
    p = parser("examples.gpt", __doc__.splitlines()[0], presets.LANGUAGE, "char-gpt")
    p.add_argument("--model", choices=list(LANGUAGE), help="another size than the preset's")
    p.add_argument("--validation", type=Path, help="text to validate on; default: the last tenth of --data")
    p.add_argument("--tokens", choices=["chars", "bytes", "words"], default="chars", help="default: %(default)s")
    p.add_argument("--vocabulary", type=int, default=30000, help="size of one of words; default: %(default)s")
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--train-size", type=int, default=0, help="so many training tokens, the first; 0 is all")
    p.add_argument("--validation-size", type=int, default=0, help="sequences to validate on; 0 is all")
    return p.parse_args(given)


def prepare(args: argparse.Namespace) -> Run:
    """The run that the arguments describe, at its beginning."""
    preset, settings = chosen(args, presets.LANGUAGE)
    name = args.model or preset.model
    read = text.load(args.data, args.validation, args.tokens, args.vocabulary, args.train_size)
    data = text.batches(read, LANGUAGE[name][3], preset.batch, args.seed, args.validation_size)
    torch.manual_seed(args.seed)
    model = language_model(name, len(read.vocabulary), args.dropout)
    return assemble(args, preset, settings, model, data)


def main(given: list[str] | None = None) -> None:
    execute(parse_args(given), prepare)


if __name__ == "__main__":
    main()
    stop()
