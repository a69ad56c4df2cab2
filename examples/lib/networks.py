"""The networks of the examples and benchmarks: ResNets for CIFAR, WideResNet, ResNet-50, a vision transformer, GPT."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# ---- convolutions ------------------------------------------------------------------------------------------------


def normed(before: int, after: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the picture's size but for its stride, and BatchNorm."""
    return nn.Sequential(nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after))


class Residual(nn.Module):
    """Branch and shortcut added. The shortcut is a projection where the shape changes."""

    def __init__(self, branch: nn.Module, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        same = before == after and stride == 1
        self.shortcut: nn.Module = nn.Identity() if same else normed(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


def small_resnet(depth: int, classes: int) -> nn.Sequential:
    """He et al. (2016) for CIFAR: three stages of widths 16, 32 and 64, 6n + 2 layers."""
    layers: list[nn.Module] = [normed(3, 16, 3), nn.ReLU()]
    width = 16
    for stage in (16, 32, 64):
        for _ in range((depth - 2) // 6):
            stride = 1 if width == stage else 2
            branch = nn.Sequential(normed(width, stage, 3, stride), nn.ReLU(), normed(stage, stage, 3))
            layers.append(Residual(branch, width, stage, stride))
            width = stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


class PreActivated(nn.Module):
    """A block of a WideResNet: BatchNorm and ReLU before each convolution, and before the projection."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(before), nn.ReLU())
        self.branch = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
        )
        self.shortcut = None if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = self.first(x)
        return self.branch(active) + (x if self.shortcut is None else self.shortcut(active))


def wide_resnet(depth: int, factor: int, classes: int) -> nn.Sequential:
    """Zagoruyko and Komodakis (2016)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
    width = 16
    for stage in (16 * factor, 32 * factor, 64 * factor):
        for block in range((depth - 4) // 6):
            layers.append(PreActivated(width, stage, 2 if block == 0 and stage > 16 * factor else 1))
            width = stage
    head = (nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
    return nn.Sequential(*layers, *head)


def resnet50(classes: int) -> nn.Sequential:
    """He et al. (2016) for ImageNet, with the stride in the 3x3 convolution."""
    layers: list[nn.Module] = [normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for stage, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            stride = 2 if block == 0 and stage > 64 else 1
            narrow = (normed(width, stage, 1), nn.ReLU(), normed(stage, stage, 3, stride), nn.ReLU())
            branch = nn.Sequential(*narrow, normed(stage, 4 * stage, 1))
            layers.append(Residual(branch, width, 4 * stage, stride))
            width = 4 * stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


# ---- transformers ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(x))


class GPT(nn.Module):
    """A GPT with tied embeddings."""

    def __init__(self, tokens: int, length: int, layers: int, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True, dropout=dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


class VisionTransformer(nn.Module):
    """Dosovitskiy et al. (2021), with the mean over patches in place of a class token (Beyer et al., 2022)."""

    def __init__(self, classes: int, size: int, patch: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.randn((size // patch) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(x).mean(1))


# ---- names -------------------------------------------------------------------------------------------------------

# By name: the side of a picture, and the network for a number of classes.
PICTURES: dict[str, tuple[int, Callable[[int], nn.Module]]] = {
    "resnet20": (32, lambda classes: small_resnet(20, classes)),
    "resnet32": (32, lambda classes: small_resnet(32, classes)),
    "wrn-28-10": (32, lambda classes: wide_resnet(28, 10, classes)),
    "resnet50": (224, resnet50),
    "vit-s-32": (224, lambda classes: VisionTransformer(classes, 224, 32, layers=12, width=384, heads=6)),
}
# By name: layers, width, heads and length of a sequence.
LANGUAGE: dict[str, tuple[int, int, int, int]] = {
    "char-gpt": (3, 64, 4, 128),
    "gpt1-mini": (4, 256, 8, 128),
    "gpt2-small": (12, 768, 12, 1024),
}


def language_model(name: str, tokens: int, dropout: float = 0.0) -> GPT:
    """A GPT of a named size for a vocabulary."""
    layers, width, heads, length = LANGUAGE[name]
    return GPT(tokens, length, layers, width, heads, dropout)
