"""One of several processes that train by frameworks and then, on the same batches, in plain torch. Run by torchrun."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import lightning.pytorch as L
import torch
import torch.distributed as dist
from accelerate import Accelerator
from small_gpt import BATCH, METHODS, make_gpt, make_sequences, plain_loop, true_weights
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from training import state_of
from transformers import TrainerCallback, TrainingArguments

from examples.lib.launch import stop
from sassha_fast.integrations.huggingface import SasshaTrainer
from sassha_fast.integrations.lightning import SasshaCallback

STEPS, ACCUMULATE = 3, 2
FRAMEWORKS = ("lightning", "huggingface", "accelerate")


class LightningSeeding(L.Callback):
    """Random numbers of a step by its number."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % ACCUMULATE == 0:
            torch.manual_seed(trainer.global_step)


class Seeding(TrainerCallback):
    """The same."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(state.global_step)


class Module(L.LightningModule):
    """Takes down its batches."""

    def __init__(self, method):
        super().__init__()
        self.net, self.method, self.batches = make_gpt().train(), METHODS[method], {}

    def training_step(self, batch, batch_idx):
        self.batches[batch_idx] = batch
        return self.net(**batch).loss

    def configure_optimizers(self):
        kind, options = self.method
        return kind(self.parameters(), **options)


def by_lightning(method, rows, folder):
    module = Module(method)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATE,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LightningSeeding(), SasshaCallback()],
    )
    trainer.fit(module, DataLoader(rows, BATCH))
    return module.net, trainer.optimizers[0], list(module.batches.values())


class Noting(SasshaTrainer):
    """Takes down its batches."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.batches.append(inputs)
        return super().training_step(model, inputs, *args, **kwargs)


def by_huggingface(method, rows, folder):
    model = make_gpt()
    kind, options = METHODS[method]
    trainer = Noting(
        model,
        TrainingArguments(
            str(folder),
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATE,
            num_train_epochs=1,
            train_sampling_strategy="sequential",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="steps",  # the first process alone: M-SASSHA then shows its true weights there only
            save_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=rows,
        optimizers=(kind(model.parameters(), **options), None),
        callbacks=[Seeding()],
    )
    trainer.batches = []
    trainer.train()
    return model, trainer.optimizer.optimizer, trainer.batches


def by_accelerate(method, rows, folder):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    net = make_gpt().train()
    kind, options = METHODS[method]
    sassha = kind(net.parameters(), **options)
    model, opt, loader = accelerator.prepare(net, sassha, DataLoader(rows, BATCH))
    sassha.attach(model)
    batches, closures = [], []
    for batch in loader:
        batches.append(batch)
        with accelerator.accumulate(model):

            def closure(batch=batch):
                loss = model(**batch).loss
                accelerator.backward(loss)
                return loss

            closures.append(closure)
            if accelerator.sync_gradients:
                torch.manual_seed(len(batches) // ACCUMULATE - 1)
                opt.step(closures)
                closures = []
    true_weights(net, sassha)
    return net, sassha, batches


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = make_sequences(STEPS * ACCUMULATE * BATCH * dist.get_world_size())
    results = {}
    for framework in FRAMEWORKS:
        for method in METHODS:
            net, opt, batches = globals()[f"by_{framework}"](method, rows, folder)
            plain_opt, plain = plain_loop(
                method, batches, ACCUMULATE, by_tokens=framework == "huggingface", wrap=DistributedDataParallel
            )
            results[framework, method] = {
                "batches": batches,
                "weights": [p.detach().clone() for p in net.parameters()],
                "state": state_of(opt),
                "plain_weights": plain,
                "plain_state": state_of(plain_opt),
            }
    torch.save(results, folder / f"{dist.get_rank()}.pt")
    stop()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
