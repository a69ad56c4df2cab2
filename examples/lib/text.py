"""Text for examples.gpt: characters, bytes or words of a file, and batches of sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from examples.lib.engine import Batch, Data

UNKNOWN = "<unk>"
WHERE = """
Where to get data (any text file will do):
  tiny Shakespeare   https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
  WikiText-2         https://huggingface.co/datasets/Salesforce/wikitext, written to a text file"""


@dataclass(frozen=True)
class Text:
    """Numbers of tokens, for training and for validation.

    Attributes:
        train: Training tokens.
        validation: Those held out.
        vocabulary: What the numbers stand for.
    """

    train: Tensor
    validation: Tensor
    vocabulary: list[str]


def _read(path: Path, option: str) -> str:
    if not path.is_file():
        raise SystemExit(f"examples.gpt: {option} {path}: no such file\n{WHERE}")
    return path.read_text(encoding="utf-8")


def load(path: Path, validation: Path | None, kind: str, limit: int, size: int = 0) -> Text:
    """Reads one file, whose last tenth is for validation, or two.

    Args:
        path: Training text.
        validation: Validation text; None takes the last tenth of the other.
        kind: ``"chars"``, ``"bytes"`` or ``"words"``, which are what stands between spaces.
        limit: Size of the vocabulary of words; rarer ones are unknown.
        size: How many training tokens to keep; 0 is all.
    """
    first = _read(path, "--data")
    texts = [first, _read(validation, "--validation")] if validation is not None else [first]
    if kind == "bytes":
        parts = [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long() for text in texts]
        vocabulary = [repr(bytes([i])) for i in range(256)]
    else:
        split = [text.replace("\n", " <eos> ").split() if kind == "words" else list(text) for text in texts]
        most = Counter(split[0]).most_common(limit - 1 if kind == "words" else None)
        vocabulary = [UNKNOWN, *sorted(token for token, _ in most if token != UNKNOWN)]
        numbers = {token: i for i, token in enumerate(vocabulary)}
        parts = [torch.tensor([numbers.get(token, 0) for token in tokens]) for tokens in split]
    if len(parts) == 1:
        cut = len(parts[0]) * 9 // 10
        parts = [parts[0][:cut], parts[0][cut:]]
    return Text(parts[0][: size or None], parts[1], vocabulary)


def batches(text: Text, length: int, batch: int, seed: int, evaluated: int) -> Data:
    """Sequences that cover the text once an epoch, from a start and in an order that epoch and seed decide.

    Args:
        text: The tokens.
        length: Tokens of a sequence.
        batch: Sequences of a step, of all processes together.
        seed: Of the order.
        evaluated: Sequences of the validation text that are evaluated; 0 is all.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    steps = (len(text.train) - length) // (length * batch)
    if not steps:
        raise SystemExit(f"--batch {batch}: the text has only {len(text.train)} tokens, sequences have {length}")

    def sequences(tokens: Tensor, starts: Tensor) -> Batch:
        whole = tokens[starts[:, None] + torch.arange(length + 1)]
        return whole[:, :-1], whole[:, 1:]

    def of_epoch(epoch: int, first: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed((seed << 12) + epoch)
        shift = torch.randint(0, length, (), generator=generator)
        starts = torch.randperm(steps * batch, generator=generator) * length + shift
        for part in starts.split(batch)[first:]:
            yield sequences(text.train, part[rank::size])

    def held_out() -> Iterator[Batch]:
        starts = torch.arange(0, len(text.validation) - length, length)
        for part in (starts[:evaluated] if evaluated else starts).split(max(batch // size, 1)):
            yield sequences(text.validation, part)

    return Data(steps, of_epoch, held_out, "tokens")
