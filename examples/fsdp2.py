"""SASSHA with FSDP2 on a character-level transformer: weights, gradients and state in shards.

Run it with ``torchrun --nproc-per-node 2 -m examples.fsdp2 --text book.txt``: on two cores with gloo as on two GPUs
with NCCL. Without ``--text`` it reads the licence of this project, which shows that it learns and nothing more. With
``--checkpoints FOLDER`` it saves after every epoch and resumes from the last, also with another number of processes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from examples.lib.launch import arguments, resume, save, say, start, stop
from sassha_fast import SASSHA

LENGTH, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
BATCH = 16  # of all processes together
STEPS = 50  # in an epoch
LICENCE = Path(__file__).resolve().parent.parent / "LICENSE"


class Block(nn.Module):
    """Causal attention and a small network, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Characters(nn.Module):
    """The loss of predicting the next of ``n`` characters."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(n, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, n))

    def forward(self, tokens: Tensor) -> Tensor:
        seen, following = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(seen) + self.positions(torch.arange(LENGTH, device=tokens.device))
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), following.flatten())


def main() -> None:
    parser = arguments(epochs=4, lr=0.05, description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=LICENCE, help="any text file")
    args = parser.parse_args()
    if not args.text.is_file():
        sys.exit(f"examples.fsdp2: --text is {args.text}, expected a text file; tiny Shakespeare is a good one")
    device = start()
    rank, size = dist.get_rank(), dist.get_world_size()
    text = args.text.read_text(encoding="utf-8")
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    data = torch.tensor([alphabet[character] for character in text])

    torch.manual_seed(0)
    model = Characters(len(alphabet)).to(device)
    mesh = init_device_mesh(device.type, (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Gradients of shards have no graph, so products come from differences of gradients.
    opt = SASSHA(model.parameters(), lr=args.lr, rho=args.rho, weight_decay=0.01, hvp="finite_difference")
    opt.attach(model)

    for epoch in range(resume(model, opt, args.checkpoints), args.epochs):
        generator = torch.Generator().manual_seed(epoch)
        losses = []
        for _ in range(STEPS):
            starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)[rank::size]
            tokens = torch.stack([data[i : i + LENGTH + 1] for i in starts.tolist()]).to(device)

            def closure(tokens: Tensor = tokens) -> Tensor:
                opt.zero_grad()
                loss = model(tokens)
                loss.backward()
                return loss

            losses.append(opt.step(closure))
        say(f"epoch {epoch + 1:3d}: train loss {torch.stack(losses).mean():.4f}")
        save(model, opt, args.checkpoints, epoch + 1)
    stop()


if __name__ == "__main__":
    main()
