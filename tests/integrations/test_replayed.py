"""What users of Lightning and Hugging Face do around a training step that runs again: hooks, batches, callbacks."""

# Imports that need a framework follow its importorskip.
# ruff: noqa: E402

from collections import UserDict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("transformers")
L = pytest.importorskip("lightning.pytorch")

from small_gpt import make_gpt, make_sequences
from transformers import TrainerCallback, TrainingArguments

from sassha_fast import MSASSHA, SASSHA
from sassha_fast.integrations.huggingface import SasshaTrainer
from sassha_fast.integrations.lightning import SasshaCallback
from sassha_fast.integrations.replay import Batch
from sassha_fast.log import StatsLog

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:DeprecationWarning"),
]


class Net(L.LightningModule):
    def __init__(self, method=SASSHA):
        super().__init__()
        torch.manual_seed(0)
        self.drop, self.linear, self.method, self.masks = nn.Dropout(0.5), nn.Linear(4, 1), method, []

    def training_step(self, batch, batch_idx):
        x = self.drop(batch["x"])
        self.masks.append((batch_idx, (x != 0).flatten().tolist()))
        return (self.linear(x) - batch["y"]).square().mean()

    def configure_optimizers(self):
        return self.method(self.parameters(), lr=0.05, rho=0.05, lazy_hessian=100)


def fit(module, *callbacks, parts=1, batches=4):
    rows = [{"x": torch.ones(4), "y": torch.zeros(1)} for _ in range(2 * batches)]
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=parts,
        callbacks=[*callbacks] or [SasshaCallback()],
    )
    trainer.fit(module, DataLoader(rows, batch_size=2))
    return module


@pytest.mark.parametrize("parts", [1, 2])
def test_random_numbers_that_a_hook_draws_before_a_step_leave_its_passes_alike(parts):
    class Draws(Net):
        def on_train_batch_start(self, batch, batch_idx):
            self.factor = torch.rand(())

    masks = fit(Draws(), parts=parts).masks
    for number in range(4):
        mine = [mask for batch, mask in masks if batch == number]
        assert len(mine) == 2
        assert mine[0] == mine[1]


@pytest.mark.parametrize("method", [SASSHA, MSASSHA])
def test_gradients_that_a_hook_changes_to_no_effect_are_refused(method):
    class Clips(Net):
        def on_before_optimizer_step(self, optimizer):
            nn.utils.clip_grad_norm_(self.parameters(), 1e-3)

    if method is MSASSHA:  # whose only gradient it is
        fit(Clips(method))
        return
    with pytest.raises(
        RuntimeError, match=r"on_before_optimizer_step changed gradients, which are those of the ascent"
    ):
        fit(Clips(method))


def test_a_hook_that_looks_at_gradients_is_welcome():
    class Looks(Net):
        def on_before_optimizer_step(self, optimizer):
            self.norm = nn.utils.get_total_norm([p.grad for p in self.parameters()])

    assert fit(Looks()).norm > 0


def test_a_step_that_changes_its_batch_in_place_is_warned_of_and_one_that_empties_it_is_not():
    class Doubles(Net):
        def training_step(self, batch, batch_idx):
            batch["x"].mul_(2.0)
            return super().training_step(batch, batch_idx)

    class Pops(Net):
        def training_step(self, batch, batch_idx):
            y = batch.pop("y")
            return super().training_step({"x": batch.pop("x"), "y": y}, batch_idx)

    class Scales(Net):
        def on_train_batch_start(self, batch, batch_idx):
            batch["x"].mul_(2.0)

    with pytest.warns(UserWarning, match="training_step changed a tensor of its batch in place"):
        fit(Doubles())
    assert len(fit(Pops(), parts=2).masks) == 8
    assert len(fit(Scales()).masks) == 8


def test_a_log_that_begins_after_the_adapter_does_not_disturb_it(tmp_path):
    class Logs(L.Callback):
        def on_train_start(self, trainer, pl_module):
            self.log = StatsLog(trainer.optimizers[0])

    logs = Logs()
    fit(Net(), SasshaCallback(), logs)
    assert len(logs.log.read()["step"]) == 4


def test_the_adapter_given_twice_is_refused():
    with pytest.raises(ValueError, match="it is in callbacks twice"):
        fit(Net(), SasshaCallback(), SasshaCallback())


class Args:
    """A trainer of Hugging Face over a few sequences."""

    def __init__(self, path, trainer=SasshaTrainer, callbacks=(), **options):
        arguments = TrainingArguments(
            output_dir=str(path),
            per_device_train_batch_size=4,
            max_steps=2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        chosen = (SASSHA, {"rho": 0.05, "lr": 0.01, "lazy_hessian": 100})
        self.trainer = trainer(
            make_gpt(0.0),
            arguments,
            train_dataset=make_sequences(16),
            optimizer_cls_and_kwargs=chosen,
            callbacks=[*callbacks],
            **options,
        )


def test_gradients_that_a_callback_of_hugging_face_changes_to_no_effect_are_refused(tmp_path):
    class Zeroes(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for p in model.parameters():
                p.grad.zero_()

    with pytest.raises(RuntimeError, match="on_pre_optimizer_step changed gradients"):
        Args(tmp_path, callbacks=[Zeroes()]).trainer.train()


def test_inputs_that_a_loss_changes_in_place_are_warned_of_and_those_that_it_takes_out_are_not(tmp_path):
    class Shifts(SasshaTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            inputs["input_ids"].add_(0)
            return super().compute_loss(model, inputs, *args, **kwargs)

    class Pops(SasshaTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            return super().training_step(model, inputs, *args, **kwargs)

        def compute_loss(self, model, inputs, *args, **kwargs):
            labels = inputs.pop("labels")
            return super().compute_loss(model, {**inputs, "labels": labels}, *args, **kwargs)

    with pytest.warns(UserWarning, match="changed a tensor of its batch in place"):
        Args(tmp_path, Shifts).trainer.train()
    Args(tmp_path, Pops).trainer.train()


def test_containers_of_a_batch_are_new_every_time_and_its_tensors_the_same():
    tensor = torch.ones(2)
    given = {"a": [tensor, (tensor,)], "b": UserDict(c=tensor), "d": "text"}
    batch = Batch(given, "caller")
    first = batch.again()
    first["a"].clear()
    first["b"].pop("c")
    again = batch.again()
    assert again["a"][0] is again["a"][1][0] is again["b"]["c"] is tensor
    assert isinstance(again["b"], UserDict)
    assert again["d"] == "text"
    given["b"]["c"].add_(1.0)
    with pytest.warns(UserWarning, match="caller: training_step changed a tensor of its batch in place"):
        batch.again()
