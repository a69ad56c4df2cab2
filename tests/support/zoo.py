"""One small model of each kind that people train, with its batch and loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH = 11, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention, self.dropout = nn.LayerNorm(WIDTH), Attention(), nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.dropout(self.mlp(x))


class Transformer(nn.Module):
    """Tied embeddings, dropout, and activation checkpointing where asked."""

    def __init__(self, dropout: float = 0.2, recompute: bool = False) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(TOKENS, WIDTH), nn.ModuleList(Block(dropout) for _ in range(2))
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x @ self.embedding.weight.T


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.lstm, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def _cnn() -> nn.Module:
    convolutions = (
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
    )
    return nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(64, TOKENS))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn_with_batchnorm": _cnn,
    "transformer_with_dropout": Transformer,
    "transformer_with_checkpointing": lambda: Transformer(recompute=True),
    "lstm": Recurrent,
}
SMOOTH = ("transformer_with_dropout", "lstm")


def make(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model in training mode, and its loss on a fixed batch."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    if name.startswith("cnn"):
        x, y = torch.randn(6, 3, 8, 8, dtype=dtype), torch.randint(0, TOKENS, (6,))
    else:
        x = torch.randint(0, TOKENS, (4, 7))
        y = x.roll(1, 1)
    return model, lambda: F.cross_entropy(model(x).flatten(0, -2), y.flatten())
