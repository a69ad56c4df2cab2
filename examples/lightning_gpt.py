"""SASSHA or M-SASSHA in Lightning, on a small GPT-2.

    python -m examples.lightning_gpt --optimizer m-sassha --accumulate 2 --precision bf16-mixed
    python -m examples.lightning_gpt --fp16

The second is float16 with a ``GradScaler``. Lightning's own scaler steps without a closure, so that loop is written by
hand: manual optimization, one call of ``step``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.amp import GradScaler
from torch.utils.data import DataLoader

from examples.lib.gpt2_rule import BATCH, OPTIMIZERS, arguments, build_model, sequences
from examples.lib.launch import stop
from sassha_fast.integrations.lightning import SasshaCallback


class GPT(pl.LightningModule):
    """As for any other optimizer of torch."""

    def __init__(self, optimizer: str, lr: float, rho: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = build_model().train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.net(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.net(**batch).loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.hparams.optimizer](self.parameters(), lr=self.hparams.lr, rho=self.hparams.rho)


class ScaledGPT(GPT):
    """float16 with a loss scale."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.scaler = GradScaler("cuda" if torch.cuda.is_available() else "cpu")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        opt = self.optimizers()

        def closure() -> Tensor:
            opt.zero_grad()
            with torch.autocast(self.device.type, dtype=torch.float16):
                loss = self.net(**batch).loss
            self.scaler.scale(loss).backward()
            return loss

        self.log("train_loss", opt.step(closure, scaler=self.scaler))  # the loss at x
        self.scaler.update()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["scaler"] = self.scaler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.scaler.load_state_dict(checkpoint["scaler"])


def main(given: list[str] | None = None) -> float:
    """Trains, and returns the validation loss."""
    p = arguments("lightning_gpt", __doc__.splitlines()[0])
    p.add_argument("--precision", default="32-true", help="also bf16-mixed; default: %(default)s")
    p.add_argument("--fp16", action="store_true", help="float16 with a GradScaler, by manual optimization")
    p.add_argument("--out", type=Path, default=Path("runs/lightning"))
    p.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    args = p.parse_args(given)

    module = (ScaledGPT if args.fp16 else GPT)(args.optimizer, args.lr, args.rho)
    trainer = pl.Trainer(
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        precision=args.precision,
        logger=CSVLogger(args.out, name="log"),
        log_every_n_steps=10,
        enable_model_summary=False,
        callbacks=[
            SasshaCallback(),
            ModelCheckpoint(args.out / "checkpoints", filename="last", enable_version_counter=False),
        ],
    )
    train = DataLoader(sequences(args.batches * BATCH, seed=1), BATCH, shuffle=True)
    trainer.fit(module, train, DataLoader(sequences(64, seed=2), BATCH), ckpt_path=args.resume)
    return float(trainer.callback_metrics["val_loss"])


if __name__ == "__main__":
    print(f"validation loss {main():.4f}")
    stop()
