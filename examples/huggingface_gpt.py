"""SASSHA or M-SASSHA in ``transformers.Trainer``, on a small GPT-2.

python -m examples.huggingface_gpt --optimizer m-sassha --accumulate 2 --bf16
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import TrainingArguments

from examples.lib.gpt2_rule import BATCH, OPTIMIZERS, arguments, build_model, sequences
from examples.lib.launch import stop
from sassha_fast.integrations.huggingface import SasshaTrainer


def main(given: list[str] | None = None) -> float:
    """Trains, and returns the validation loss."""
    p = arguments("huggingface_gpt", __doc__.splitlines()[0])
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
    stop()
