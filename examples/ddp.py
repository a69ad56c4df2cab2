"""SASSHA with DistributedDataParallel on the handwritten digits of scikit-learn.

Run it with ``torchrun --nproc-per-node 2 -m examples.ddp``: on two cores with gloo as on two GPUs with NCCL. With
``--checkpoints FOLDER`` it saves after every epoch and resumes from the last, also with another number of processes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from examples.digits import build_model, evaluate, load_splits
from examples.lib.launch import arguments, resume, save, say, start, stop
from sassha_fast import SASSHA

BATCH = 64  # of all processes together


def main() -> None:
    parser = arguments(epochs=10, lr=0.1, description=__doc__.splitlines()[0])
    parser.add_argument("--hvp", default="exact", help="exact, finite_difference or central_difference")
    parser.add_argument("--perturb-sync", action="store_true", help="climb along the gradient of all processes")
    args = parser.parse_args()
    device = start()
    rank, size = dist.get_rank(), dist.get_world_size()
    (x, y), _, test = load_splits(device)

    torch.manual_seed(0)
    net = build_model().to(device)
    model = DistributedDataParallel(net)
    opt = SASSHA(
        net.parameters(),
        lr=args.lr,
        rho=args.rho,
        weight_decay=1e-3,
        hvp=args.hvp,
        perturb_sync=args.perturb_sync,
    )
    opt.attach(model)  # closures then run without DDP's reduction, and gradients and products are reduced together

    for epoch in range(resume(net, opt, args.checkpoints), args.epochs):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(epoch)).to(device)
        losses = []
        for joined in order.split(BATCH):
            mine = joined[rank::size]

            def closure(mine: Tensor = mine) -> Tensor:
                opt.zero_grad()
                loss = F.cross_entropy(model(x[mine]), y[mine])
                loss.backward()
                return loss

            losses.append(opt.step(closure))
        loss, accuracy = evaluate(net, test)
        trained = torch.stack(losses).mean()
        say(f"epoch {epoch + 1:3d}: train loss {trained:.4f}, test loss {loss:.4f}, test accuracy {accuracy:.2f} %")
        save(net, opt, args.checkpoints, epoch + 1)
    stop()


if __name__ == "__main__":
    main()
