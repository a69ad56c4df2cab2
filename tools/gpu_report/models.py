"""The models whose training steps are timed, each with a batch of random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.lib.networks import GPT, language_model, resnet50, small_resnet

TOKENS = 50257  # of GPT-2
Loss = Callable[[], Tensor]


@dataclass(frozen=True)
class Task:
    """A model and its batches.

    Attributes:
        title: What it is.
        make: Builds the model.
        loss: From what runs the model and the size of a batch, the loss of one batch.
        batches: Sizes to try, the largest first.
        unit: What a batch counts.
    """

    title: str
    make: Callable[[], nn.Module]
    loss: Callable[[Callable[[Tensor], Tensor], int], Loss]
    batches: tuple[int, ...]
    unit: str


def on_tokens(tokens: int, length: int) -> Callable[[Callable[[Tensor], Tensor], int], Loss]:
    """The loss of a language model."""

    def make(forward: Callable[[Tensor], Tensor], batch: int) -> Loss:
        text = torch.randint(0, tokens, (batch, length + 1))
        return lambda: F.cross_entropy(forward(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    return make


def on_pictures(size: int, classes: int) -> Callable[[Callable[[Tensor], Tensor], int], Loss]:
    """The loss of a classifier."""

    def make(forward: Callable[[Tensor], Tensor], batch: int) -> Loss:
        x, y = torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))
        return lambda: F.cross_entropy(forward(x), y)

    return make


def gpt2(trial: bool) -> Task:
    """GPT-2 small: 124 M parameters, 12 layers of width 768, sequences of 1,024 tokens."""
    if trial:
        tiny = partial(GPT, tokens=61, length=16, layers=1, width=16, heads=2)
        return Task("a GPT of 1 layer of width 16", tiny, on_tokens(61, 16), (2,), "sequences of 16 tokens")
    make, loss = partial(language_model, "gpt2-small", TOKENS), on_tokens(TOKENS, 1024)
    return Task("GPT-2 small, 12 layers of width 768", make, loss, (16, 8, 4, 2, 1), "sequences of 1,024 tokens")


def resnet(trial: bool) -> Task:
    """ResNet-50 on pictures of ImageNet's size."""
    if trial:
        return Task("ResNet-8", partial(small_resnet, 8, 10), on_pictures(8, 10), (4,), "pictures of 8 × 8")
    loss = on_pictures(224, 1000)
    return Task("ResNet-50", partial(resnet50, 1000), loss, (128, 64, 32, 16, 8), "pictures of 224 × 224")


TASKS = {"gpt2": gpt2, "resnet50": resnet}
