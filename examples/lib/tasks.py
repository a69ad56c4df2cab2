"""The tasks of ``examples.compare``: small enough that all optimizers reach the end of training on one core."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.lib import pictures, text
from examples.lib.engine import Batch, Data
from examples.lib.networks import GPT, Residual, normed
from examples.lib.noise import with_noise
from examples.lib.trials import Given, Task

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "data"
METHODS = ("sgd", "adamw", "sam", "sassha", "sassha-quarter", "m-sassha")

# ---- pictures ----------------------------------------------------------------------------------------------------

SIDE, BATCH, WIDTHS = 16, 128, (32, 64, 128)
TRAIN, VALIDATION = 8000, 2000  # pictures of CIFAR-10's training set; the test set is for the test alone
FEW = 128  # training pictures on which sharpness is measured


def resnet8(classes: int = 10) -> nn.Module:
    """A ResNet of three blocks for pictures of 16 pixels: He et al.'s (2016) for CIFAR, begun with a stride of 2."""
    before = WIDTHS[0]
    layers: list[nn.Module] = [normed(3, before, 3, 2), nn.ReLU()]
    for width in WIDTHS:
        stride = 1 if width == before else 2
        branch = nn.Sequential(normed(before, width, 3, stride), nn.ReLU(), normed(width, width, 3))
        layers.append(Residual(branch, before, width, stride))
        before = width
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
    return net.to(memory_format=torch.channels_last)


def _small(path: Path) -> tuple[pictures.Decoded, pictures.Decoded, int]:
    """Training and test pictures of 16 pixels."""
    train, test, classes = pictures.find(path, CACHE)
    name = path.name.split(".")[0]
    kept = [CACHE / f"{name}-{split}-{SIDE}.pt" for split in ("train", "test")]
    found = [pictures.decoded(split, SIDE, file) for split, file in zip((train, test), kept, strict=True)]
    return found[0], found[1], classes


def load_pictures(path: Path, noise: float, seed: int, size: int = TRAIN, batch: int = 0) -> Given:
    """CIFAR-10 without augmentation; only training labels are made wrong."""
    batch = batch or BATCH
    whole, test, classes = _small(path)
    order = torch.randperm(len(whole.labels), generator=torch.Generator().manual_seed(0))
    train, validation = order[:size], order[size : size + VALIDATION]
    x, y = _ready(whole.pixels[train]), with_noise(whole.labels[train], noise, classes, seed)

    def of_epoch(epoch: int, first: int) -> Iterator[Batch]:
        shuffled = torch.randperm(size, generator=torch.Generator().manual_seed((seed << 12) + epoch))
        for index in shuffled.split(batch)[first : size // batch]:
            yield x[index].contiguous(memory_format=torch.channels_last), y[index]

    held_out = _batches(_ready(whole.pixels[validation]), whole.labels[validation])
    data = Data(size // batch, of_epoch, lambda: iter(held_out), "images")
    few = _batches(x[:FEW], y[:FEW])
    return Given(data, _batches(_ready(test.pixels), test.labels), few, partial(resnet8, classes))


def _ready(pixels: Tensor) -> Tensor:
    return pictures.normalised(pixels).contiguous(memory_format=torch.channels_last)


def _batches(x: Tensor, y: Tensor) -> list[Batch]:
    return list(zip(x.split(256), y.split(256), strict=True))


# ---- text --------------------------------------------------------------------------------------------------------

LENGTH, SEQUENCES = 64, 16
CHARACTERS = 5_000  # of training text: few enough to be learnt by heart
HELD_OUT = 128  # sequences for validation, and as many for the test
MEASURED = 4  # batches of training text on which sharpness is measured
LAYERS, WIDTH, HEADS = 3, 64, 4


def load_text(path: Path, noise: float, seed: int, size: int = CHARACTERS) -> Given:
    """The beginning of a text, and of its last tenth: first what validates, then what tests."""
    if noise:
        raise ValueError(f"load_text: noise is {noise}, but a text has no labels; give 0")
    read = text.load(path, None, "chars", 0, size)
    cut = HELD_OUT * LENGTH + 1
    data = text.batches(text.Text(read.train, read.validation[:cut], read.vocabulary), LENGTH, SEQUENCES, seed, 0)
    rest = text.Text(read.train, read.validation[cut : 2 * cut], read.vocabulary)
    test = list(text.batches(rest, LENGTH, SEQUENCES, seed, 0).validation())
    few = list(text.batches(read, LENGTH, SEQUENCES, 0, 0).train(0, 0))[:MEASURED]
    return Given(data, test, few, partial(GPT, len(read.vocabulary), LENGTH, LAYERS, WIDTH, HEADS))


# ---- both --------------------------------------------------------------------------------------------------------

_PLAIN, _STEEP, _STEEPER = (1e-3, 3e-3, 1e-2), (0.03, 0.1, 0.3), (0.1, 0.3, 1.0)
TASKS = {
    "cifar10": Task(
        "cifar10",
        "CIFAR-10: 8,000 pictures of 16 pixels, ResNet-8",
        load_pictures,
        epochs=12,
        grid_epochs=5,
        decay=5e-4,
        rates=dict.fromkeys(METHODS, _STEEP) | {"adamw": _PLAIN},
        radii=(0.05, 0.2),
        noises=(0.0, 0.2, 0.4),
    ),
    "shakespeare": Task(
        "shakespeare",
        "Tiny Shakespeare: 5,000 characters, GPT of 3 layers of width 64",
        load_text,
        epochs=105,
        grid_epochs=42,
        decay=1e-5,
        rates={"sgd": _STEEP}
        | dict.fromkeys(("adamw", "sam-adamw"), _PLAIN)
        | dict.fromkeys(("sassha", "sassha-quarter", "m-sassha"), _STEEPER)
        | {"sassha-whole": _STEEP},
        radii=(0.02, 0.1),
        stops_early=True,
        every=7,
    ),
}
