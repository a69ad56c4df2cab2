"""Parameter shapes of the models that the benchmarks stand for."""

from __future__ import annotations

import math

Shapes = list[tuple[int, ...]]


def gpt() -> Shapes:
    """A GPT of 27 M parameters: 4 layers of width 384, context 256, the 50,257 tokens of GPT-2, tied embeddings."""
    width, layers = 384, 4
    block: Shapes = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    ]  # fmt: skip
    return [(50257, width), (256, width), *block * layers, (width,), (width,)]


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


def small() -> Shapes:
    """5,000 tensors of 64 elements: nothing but overhead."""
    return [(64,)] * 5000


def count(shapes: Shapes) -> int:
    """Number of parameters."""
    return sum(math.prod(shape) for shape in shapes)
