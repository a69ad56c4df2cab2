"""SASSHA or M-SASSHA in a loop of your own with Accelerate, on a small GPT-2.

    python -m examples.accelerate_gpt --optimizer m-sassha --accumulate 2 --precision bf16
    accelerate launch --num_processes 2 -m examples.accelerate_gpt

A step takes one closure for every micro-batch. They scale by ``accelerator.backward``, as in any loop with Accelerate,
and zero nothing. Gradients are clipped by ``max_grad_norm`` of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from examples.lib.gpt2_rule import BATCH, OPTIMIZERS, arguments, build_model, sequences
from examples.lib.launch import stop
from sassha_fast import MSASSHA


def main(given: list[str] | None = None) -> float:
    """Trains, and returns the validation loss."""
    p = arguments("accelerate_gpt", __doc__.splitlines()[0])
    p.add_argument("--precision", choices=["no", "bf16"], default="no")
    p.add_argument("--out", type=Path, help="folder of a checkpoint, written at the end and loaded at the beginning")
    args = p.parse_args(given)

    accelerator = Accelerator(mixed_precision=args.precision, gradient_accumulation_steps=args.accumulate)
    net = build_model()
    sassha = OPTIMIZERS[args.optimizer](net.parameters(), lr=args.lr, rho=args.rho, max_grad_norm=1.0)
    loader = DataLoader(sequences(args.batches * BATCH, seed=1), BATCH, shuffle=True)
    model, opt, train, test = accelerator.prepare(net, sassha, loader, DataLoader(sequences(64, seed=2), BATCH))
    sassha.attach(model)  # what prepare() returned: of several processes, the passes then run without its reduction
    if args.out is not None and args.out.exists():
        accelerator.load_state(str(args.out))
        if isinstance(sassha, MSASSHA):  # saved at its true weights
            sassha.train()

    closures: list[Callable[[], Tensor]] = []
    for _ in range(args.epochs):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):

                def closure(batch: dict[str, Tensor] = batch) -> Tensor:
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    return loss

                closures.append(closure)
                if accelerator.sync_gradients:
                    opt.step(closures)
                    closures = []

    model.eval()
    with torch.no_grad(), sassha.true_weights() if isinstance(sassha, MSASSHA) else nullcontext():
        losses = [model(**batch).loss for batch in test]
        if args.out is not None:
            accelerator.save_state(str(args.out))
    return float(torch.stack(losses).mean())


if __name__ == "__main__":
    print(f"validation loss {main():.4f}")
    stop()
