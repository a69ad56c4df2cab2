"""The models whose training is timed, each with a fixed batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.lib.networks import GPT, small_resnet

Loss = Callable[..., Tensor]  # of a share of the batch; without one, of all of it


def resnet20() -> tuple[nn.Module, Loss]:
    """ResNet-20 on a batch of 128 images of CIFAR's size."""
    torch.manual_seed(0)
    model = small_resnet(20, classes=10)
    x, y = torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))

    def loss(share: float = 1.0) -> Tensor:
        rows = round(len(x) * share)
        return F.cross_entropy(model(x[:rows]), y[:rows])

    return model, loss


def gpt() -> tuple[nn.Module, Loss]:
    """A GPT of 4 layers of width 384 and 8,192 tokens, 10 M parameters, on 8 sequences of 128 tokens."""
    torch.manual_seed(0)
    model = GPT(tokens=8192, length=128, layers=4, width=384, heads=6)
    tokens = torch.randint(0, 8192, (8, 129))

    def loss(share: float = 1.0) -> Tensor:
        rows = tokens[: round(len(tokens) * share)]
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return model, loss


MODELS = {"resnet20": resnet20, "gpt": gpt}
