"""SASSHA or M-SASSHA in ``transformers.Trainer``, on a small GPT-2.

python -m examples.huggingface_gpt --optimizer m-sassha --accumulate 2 --bf16
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import TrainingArguments

from examples.gpt2_rule import BATCH, build_model, sequences
from sassha_fast import MSASSHA, SASSHA
from sassha_fast.integrations.huggingface import SasshaTrainer

OPTIMIZERS = {"sassha": SASSHA, "m-sassha": MSASSHA}


def main(given: list[str] | None = None) -> float:
    """Trains, and returns the validation loss."""
    p = argparse.ArgumentParser(prog="examples.huggingface_gpt", description=__doc__.splitlines()[0])
    p.add_argument("--optimizer", choices=list(OPTIMIZERS), default="sassha")
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--rho", type=float, default=0.05)
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batches", type=int, default=32, help="of an epoch; default: %(default)s")
    p.add_argument("--accumulate", type=int, default=1, help="batches of a step; default: %(default)s")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--out", type=Path, default=Path("runs/huggingface"))
    p.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    args = p.parse_args(given)

    trainer = SasshaTrainer(
        build_model(),
        TrainingArguments(
            str(args.out),
            learning_rate=args.lr,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=args.accumulate,
            bf16=args.bf16,
            use_cpu=not torch.cuda.is_available(),
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_steps=10,
            report_to=[],
        ),
        train_dataset=sequences(args.batches * BATCH, seed=1),
        eval_dataset=sequences(64, seed=2),
        optimizer_cls_and_kwargs=(OPTIMIZERS[args.optimizer], {"rho": args.rho}),
    )
    trainer.train(resume_from_checkpoint=args.resume)
    return float(trainer.evaluate()["eval_loss"])


if __name__ == "__main__":
    print(f"validation loss {main():.4f}")
