"""Parameter shapes of the models that the benchmarks stand for."""

from __future__ import annotations

import math
from functools import partial

Shapes = list[tuple[int, ...]]


def gpt(width: int = 384, layers: int = 4, tokens: int = 50257) -> Shapes:
    """A GPT of 27 M parameters: 4 layers of width 384, context 256, the 50,257 tokens of GPT-2, tied embeddings."""
    block: Shapes = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]  # fmt: skip
    return [(tokens, width), (256, width), *block * layers, (width,), (width,)]


def resnet20() -> Shapes:
    """ResNet-20 for CIFAR with projection shortcuts: 65 tensors, 0.27 M parameters."""
    shapes: Shapes = [(16, 3, 3, 3), (16,), (16,)]
    width = 16
    for stage in (16, 32, 64):
        for _ in range(3):
            shapes += [(stage, width, 3, 3), (stage,), (stage,), (stage, stage, 3, 3), (stage,), (stage,)]
            if width != stage:
                shapes += [(stage, width, 1, 1), (stage,), (stage,)]
            width = stage
    return [*shapes, (10, 64), (10,)]


def small(tensors: int = 5000) -> Shapes:
    """5,000 tensors of 64 elements: nothing but overhead."""
    return [(64,)] * tensors


def even(parameters: int, tensors: int = 100) -> Shapes:
    """Tensors of the same size, which are square as weights are, or nearly."""
    size = parameters // tensors
    rows = next(r for r in range(math.isqrt(size), 0, -1) if size % r == 0)
    return [(rows, size // rows)] * tensors


def count(shapes: Shapes) -> int:
    """Number of parameters."""
    return sum(math.prod(shape) for shape in shapes)


MODELS = {"gpt": gpt, "resnet20": resnet20, "small": small}
# The same kinds in a size that only shows that a benchmark runs.
QUICK = {"gpt": partial(gpt, width=96, layers=2, tokens=2000), "resnet20": resnet20, "small": partial(small, 1000)}
