"""Lightning's automatic optimization with the callback is the plain torch loop, bit for bit."""

# Imports that need a framework follow its importorskip.
# ruff: noqa: E402

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader
from training import assert_same_bits, assert_same_state, snapshot, state_of

pytest.importorskip("transformers")
L = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision
from small_gpt import BATCH, METHODS, Passes, make_batches, make_gpt, make_sequences, plain_loop
from torchmetrics import MeanMetric

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA
from sassha_fast.integrations.lightning import SasshaCallback

pytestmark = [
    # Lightning of advice: few workers, no logger, no validation, a checkpoint folder that exists.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:DeprecationWarning"),
]


class Seeding(L.Callback):
    """Random numbers of a step by its number, as in the plain loop. Goes before SasshaCallback."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % trainer.accumulate_grad_batches == 0:
            torch.manual_seed(trainer.global_step)


class Memory(Logger):
    """A logger that keeps what it gets."""

    name = version = "memory"

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params):
        pass


class GPT(L.LightningModule):
    def __init__(self, kind, options, dropout=0.1):
        super().__init__()
        self.net, self.kind, self.options = make_gpt(dropout).train(), kind, options
        self.mean = MeanMetric()
        self.losses, self.validated = [], []

    def training_step(self, batch, batch_idx):
        loss = self.net(**batch).loss
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch, batch_idx):
        self.validated.append(snapshot(self.net))
        self.net(**batch)

    def configure_optimizers(self):
        return self.kind(self.parameters(), **self.options)


def fit(module, batches, *, callbacks=(SasshaCallback,), validate=False, ckpt_path=None, folder=None, **settings):
    trainer = L.Trainer(
        accelerator="cpu",
        logger=settings.pop("logger", False),
        enable_checkpointing=settings.pop("enable_checkpointing", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=[Seeding(), *(kind() if isinstance(kind, type) else kind for kind in callbacks)],
        **{"max_epochs": 1, **settings},
    )
    rows = make_sequences(batches * BATCH)
    loader = DataLoader(rows, batch_size=BATCH)
    trainer.fit(module, loader, DataLoader(rows[:BATCH], BATCH) if validate else None, ckpt_path=ckpt_path)
    return trainer


def optimizer_of(trainer):
    return trainer.optimizers[0]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_a_fit_equals_the_plain_loop_bit_for_bit_in_as_many_passes(method, accumulate):
    passes = Passes()
    expected_opt, expected = plain_loop(method, make_batches(3 * accumulate), accumulate, wrap=passes)
    module = GPT(*METHODS[method])
    taken = Passes(module.net)
    trainer = fit(module, 3 * accumulate, accumulate_grad_batches=accumulate)
    assert trainer.global_step == 3
    assert_same_bits(snapshot(module.net), expected)
    assert_same_state(state_of(optimizer_of(trainer)), state_of(expected_opt))
    assert taken.count == passes.count


SHARES = [
    ("sassha_exact", {"ascent_share": 1 / 4}),
    ("sassha_exact", {"ascent_share": 1 / 2, "hessian_share": 1 / 4}),
    ("sassha_differences", {"ascent_share": 1 / 4, "hessian_share": 1 / 2}),
    ("m_sassha_exact", {"hessian_share": 1 / 4}),
]


def closures_by_share(shares):
    return {name.replace("share", "closure"): share for name, share in shares.items()}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("method", "shares"), SHARES, ids=str)
def test_shares_of_batches_equal_the_plain_loop_bit_for_bit_in_as_many_passes(method, shares, accumulate):
    passes = Passes()
    expected_opt, expected = plain_loop(
        method, make_batches(3 * accumulate), accumulate, wrap=passes, shares=closures_by_share(shares)
    )
    module = GPT(*METHODS[method])
    taken = Passes(module.net)
    trainer = fit(module, 3 * accumulate, callbacks=[SasshaCallback(**shares)], accumulate_grad_batches=accumulate)
    assert_same_bits(snapshot(module.net), expected)
    assert_same_state(state_of(optimizer_of(trainer)), state_of(expected_opt))
    assert taken.count == passes.count
    assert "training_step" not in vars(module)


def test_with_a_share_lightning_reports_the_loss_of_these_rows_at_x():
    module = GPT(*METHODS["sassha_exact"], dropout=0.0)
    rows = make_batches(1)[0]
    expected = module.net(**{key: value[:1] for key, value in rows.items()}).loss.item()
    fit(module, 1, callbacks=[SasshaCallback(ascent_share=1 / 4)])
    assert module.losses == [pytest.approx(expected)]
    assert module.mean.compute().item() == pytest.approx(expected)


def test_while_a_schedule_has_rho_at_zero_the_whole_batch_is_lightnings_own_pass():
    kind, options = METHODS["sassha_exact"]
    options = {**options, "rho_scheduler": lambda step: 0.05 if step > 1 else 0.0}
    _, expected = plain_loop(
        "sassha_exact", make_batches(3), rho_scheduler=options["rho_scheduler"], shares={"ascent_closure": 1 / 4}
    )
    module = GPT(kind, options)
    fit(module, 3, callbacks=[SasshaCallback(ascent_share=1 / 4)])
    assert_same_bits(snapshot(module.net), expected)
    assert len(module.losses) == 3


def test_statistics_of_batchnorm_are_those_of_whole_batches_beside_a_share():
    class Small(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 1))

        def training_step(self, batch, batch_idx):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return SASSHA(self.parameters(), lr=0.01, rho=0.1, lazy_hessian=2)

    rows = torch.randn(32, 4)
    module = Small()
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2,
        callbacks=[SasshaCallback(ascent_share=1 / 2, hessian_share=1 / 2)],
    )
    trainer.fit(module, DataLoader(rows, batch_size=4))
    plain = Small().net
    opt = SASSHA(plain.parameters(), lr=0.01, rho=0.1, lazy_hessian=2)
    opt.attach(plain)

    def micro(part):
        return lambda: (plain(part).square().mean() / 2).backward() or 0.0

    for pair in rows.split(8):
        whole, halves = pair.split(4), [part[:2] for part in pair.split(4)]
        others = {name: list(map(micro, halves)) for name in ("ascent_closure", "hessian_closure")}
        opt.step(list(map(micro, whole)), **others)
    assert module.net[1].num_batches_tracked == 8
    assert_same_bits([*snapshot(module.net), module.net[1].running_var], [*snapshot(plain), plain[1].running_var])


def test_shares_that_can_not_be_are_refused():
    with pytest.raises(ValueError, match=r"SasshaCallback: ascent_share is 4, expected a fraction .* such as 1/4"):
        SasshaCallback(ascent_share=4)
    with pytest.raises(ValueError, match="hessian_share is 0, expected"):
        SasshaCallback(hessian_share=0)
    with pytest.raises(ValueError, match="ascent_share is for the pass of an ascent, which MSASSHA does without"):
        fit(GPT(*METHODS["m_sassha_exact"]), 1, callbacks=[SasshaCallback(ascent_share=1 / 4)])
    options = {"base_optimizer": torch.optim.SGD, "lr": 0.1}
    with pytest.raises(ValueError, match="hessian_share is for products of the Hessian, which SAM does without"):
        fit(GPT(SAM, options), 1, callbacks=[SasshaCallback(hessian_share=1 / 4)])
    with pytest.raises(ValueError, match=r"^SasshaCallback: ascent_share gives .* which GSASSHA with alpha above 0"):
        fit(GPT(GSASSHA, {"lr": 0.1}), 1, callbacks=[SasshaCallback(ascent_share=1 / 4)])


@pytest.mark.parametrize("share", [{"ascent_share": 1 / 4}, {"hessian_share": 1 / 4}], ids=str)
def test_shares_are_refused_where_the_passes_are_not_those_of_lightning(share):
    module = GPT(*METHODS["sassha_exact"])
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="GPT has automatic_optimization=False; leave ascent_share and hessian_share"):
        fit(module, 1, callbacks=[SasshaCallback(**share)])


def test_a_share_may_be_a_tensor_of_one_number():
    nets = [GPT(*METHODS["sassha_exact"]) for _ in range(2)]
    for module, share in zip(nets, (1 / 4, torch.tensor(1 / 4)), strict=True):
        fit(module, 2, callbacks=[SasshaCallback(ascent_share=share, hessian_share=share)])
    assert_same_bits(snapshot(nets[1]), snapshot(nets[0]))


def test_all_passes_of_an_exact_refresh_use_the_same_attention():
    """Without dropout ordinary passes take a fused kernel of other last bits, which has no double backward."""
    _, expected = plain_loop("sassha_exact", make_batches(2), 2, dropout=0.0)
    module = GPT(*METHODS["sassha_exact"], dropout=0.0)
    fit(module, 2, accumulate_grad_batches=2)
    assert_same_bits(snapshot(module.net), expected)


@pytest.mark.parametrize("method", ["sassha_exact", "m_sassha_differences"])
def test_bfloat16_equals_the_plain_loop_under_autocast(method):
    _, expected = plain_loop(method, make_batches(4), 2, autocast=True)
    _, other = plain_loop(method, make_batches(4), 2)
    module = GPT(*METHODS[method])
    fit(module, 4, accumulate_grad_batches=2, precision="bf16-mixed")
    assert_same_bits(snapshot(module.net), expected)
    assert not torch.equal(expected[0], other[0])


def test_an_epoch_that_ends_before_its_micro_batches_steps_with_those_it_has():
    module = GPT(*METHODS["sassha_exact"])
    trainer = fit(module, 3, accumulate_grad_batches=2)
    assert trainer.global_step == 2
    assert optimizer_of(trainer).state[module.net.transformer.wte.weight]["step"] == 2


@pytest.mark.parametrize("method", ["sassha_exact", "sassha_differences", "m_sassha_exact"])
def test_the_loss_falls_over_sixty_steps(method):
    kind, options = METHODS[method]
    module = GPT(kind, {**options, "lr": 0.02, "lazy_hessian": 10})
    fit(module, 12, max_epochs=5)
    assert len(module.losses) == 60
    assert sum(module.losses[-5:]) < 0.9 * sum(module.losses[:5])


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_fit_equals_the_uninterrupted_one_bit_for_bit(method, tmp_path):
    expected = GPT(*METHODS[method])
    expected_trainer = fit(expected, 3, max_epochs=2)

    def saving():
        return {
            "callbacks": (SasshaCallback, L.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)),
            "enable_checkpointing": True,
            "folder": tmp_path,
        }

    first = GPT(*METHODS[method])
    fit(first, 3, **saving())
    module = GPT(*METHODS[method])
    with torch.no_grad():
        module.net.transformer.wte.weight.zero_()
    trainer = fit(module, 3, max_epochs=2, ckpt_path=tmp_path / "epoch=0.ckpt", **saving())
    assert trainer.global_step == 6
    assert_same_bits(snapshot(module.net), snapshot(expected.net))
    assert_same_state(state_of(optimizer_of(trainer)), state_of(optimizer_of(expected_trainer)))
    assert not torch.equal(snapshot(first.net)[0], snapshot(expected.net)[0])


def test_gradient_clip_val_clips_the_gradient_of_the_descent_alone():
    clip = 0.3
    for method in ("sassha_exact", "m_sassha_differences"):
        _, expected = plain_loop(method, make_batches(3), max_grad_norm=clip)
        _, other = plain_loop(method, make_batches(3))
        module = GPT(*METHODS[method])
        trainer = fit(module, 3, gradient_clip_val=clip)
        assert_same_bits(snapshot(module.net), expected)
        assert not torch.equal(expected[0], other[0])
        assert trainer.gradient_clip_val == clip  # as before the fit


def test_logs_metrics_and_outputs_are_those_at_x_once_per_batch():
    memory = Memory()
    module = GPT(*METHODS["sassha_differences"])
    fit(module, 4, logger=memory, log_every_n_steps=1)
    losses = [row["loss_step"] for _, row in memory.rows if "loss_step" in row]
    assert losses == module.losses
    assert len(losses) == 4
    mean = sum(losses) / 4
    assert next(row["loss_epoch"] for _, row in memory.rows if "loss_epoch" in row) == pytest.approx(mean)
    assert module.mean.update_count == 4
    assert module.mean.compute().item() == pytest.approx(mean)


def test_loggers_get_the_statistics_of_every_logged_step():
    memory = Memory()
    module = GPT(*METHODS["sassha_exact"])
    trainer = fit(module, 8, logger=memory, log_every_n_steps=2, accumulate_grad_batches=2)
    rows = [(step, row) for step, row in memory.rows if "sassha/trace" in row]
    assert [step for step, _ in rows] == [1, 3]
    last = rows[-1][1]
    stats = optimizer_of(trainer).stats
    assert last["sassha/ascent_gap"] == stats.ascent_gap.item()
    assert last["sassha/ascent_gap"] > 0
    assert last["sassha/refreshes"] == 2
    assert "sassha/descent_norm" not in last  # nobody asked for it, so it is not known
    quiet = Memory()
    module = GPT(*METHODS["sassha_exact"])
    fit(module, 2, logger=quiet, callbacks=[SasshaCallback(log_stats=False)], log_every_n_steps=1)
    assert not any("sassha/trace" in row for _, row in quiet.rows)


class Watching(L.Callback):
    """Takes the parameters as training batches see them."""

    def __init__(self):
        self.seen = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.seen.append((snapshot(pl_module.net), optimizer.perturbed))


def test_m_sassha_shows_its_true_weights_in_validation_and_checkpoints_and_trains_on_the_others(tmp_path):
    saving = L.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    watching = Watching()
    module = GPT(*METHODS["m_sassha_exact"])
    fit(
        module,
        3,
        callbacks=(watching, SasshaCallback, saving),
        validate=True,
        val_check_interval=1,
        enable_checkpointing=True,
        folder=tmp_path,
    )
    for step in (1, 2, 3):
        _, truth = plain_loop("m_sassha_exact", make_batches(step))
        saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        names = [f"net.{name}" for name, _ in module.net.named_parameters()]
        assert_same_bits([saved["state_dict"][name] for name in names], truth)
        assert_same_bits(module.validated[step - 1], truth)
        if step < 3:
            assert watching.seen[step][1]
            assert not torch.equal(watching.seen[step][0][0], truth[0])
    assert_same_bits(snapshot(module.net), truth)
    copied = copy.deepcopy(module)
    module.state_dict(), copied.state_dict()  # no hook is left that would touch the optimizer


@pytest.mark.parametrize("method", ["sassha_exact", "m_sassha_exact"])
def test_averages_are_those_of_the_true_weights(method):
    averaged = AveragedModel(make_gpt(), avg_fn=get_ema_avg_fn(0.5))
    for step in (1, 2, 3):
        net = make_gpt()
        with torch.no_grad():
            for p, x in zip(net.parameters(), plain_loop(method, make_batches(step))[1], strict=True):
                p.copy_(x)
        averaged.update_parameters(net)
    module = GPT(*METHODS[method])
    averaging = L.callbacks.EMAWeightAveraging(decay=0.5)
    trainer = fit(module, 3, callbacks=(SasshaCallback, averaging), validate=True)
    assert_same_bits(snapshot(module.net), snapshot(averaged.module))  # Lightning leaves the average there
    assert_same_bits(module.validated[0], snapshot(averaged.module))
    assert_same_state(state_of(optimizer_of(trainer)), state_of(plain_loop(method, make_batches(3))[0]))


def test_stochastic_weight_averaging_averages_the_true_weights():
    class Recording(L.Callback):
        def __init__(self):
            self.seen = []

        def on_train_epoch_start(self, trainer, pl_module):
            with optimizer_of(trainer).true_weights():
                self.seen.append(snapshot(pl_module.net))

    module, recording = GPT(*METHODS["m_sassha_exact"]), Recording()
    averaging = L.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, device=None)
    fit(module, 2, callbacks=(SasshaCallback, averaging, recording), max_epochs=3)
    assert len(recording.seen) == 3  # Lightning takes the weights that epochs begin with
    for found, *terms in zip(snapshot(module.net), *recording.seen, strict=True):
        torch.testing.assert_close(found, sum(terms) / 3)


def test_averages_of_m_sassha_that_come_too_early_are_refused():
    for averaging in (L.callbacks.EMAWeightAveraging(), L.callbacks.StochasticWeightAveraging(swa_lrs=0.01)):
        with pytest.raises(ValueError, match=r"pass callbacks=\[SasshaCallback\(\), \w+Averaging"):
            fit(GPT(*METHODS["m_sassha_exact"]), 1, callbacks=(averaging, SasshaCallback))


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_what_can_not_work_names_the_remedy():
    kind, options = METHODS["sassha_exact"]

    class Clipping(GPT):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            pass

    class Iterating(GPT):
        def training_step(self, dataloader_iter):
            pass

    def refused(message, module=None, error=ValueError, **settings):
        with pytest.raises(error, match=message):
            fit(module or GPT(kind, options), 1, **settings)

    scaling = MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu"))
    refused(r"MixedPrecision \(precision '16-mixed'\) .* use precision='bf16-mixed', or automatic", plugins=[scaling])
    refused("use gradient_clip_algorithm='norm'", gradient_clip_val=1.0, gradient_clip_algorithm="value")
    refused("give only one", GPT(kind, {**options, "max_grad_norm": 2.0}), gradient_clip_val=1.0)
    refused("Clipping overrides configure_gradient_clipping", Clipping(kind, options))
    refused("let it take batch", Iterating(kind, options))
    refused("returned SGD, expected", GPT(torch.optim.SGD, {"lr": 0.1}), TypeError)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_batch_without_loss_raises_and_leaves_the_weights():
    class Skipping(GPT):
        def training_step(self, batch):
            return None if self.losses else super().training_step(batch, 0)

    module = Skipping(*METHODS["sassha_exact"])
    _, expected = plain_loop("sassha_exact", make_batches(1))
    with pytest.raises(RuntimeError, match="returned None instead of a loss"):
        fit(module, 2)
    assert_same_bits(snapshot(module.net), expected)


def test_batchnorm_moves_once_per_micro_batch():
    class Normed(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

        def training_step(self, batch):  # without batch_idx
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return SASSHA(self.parameters(), lr=0.01, rho=0.05, lazy_hessian=2)

    module = Normed()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2,
        callbacks=[SasshaCallback()],
    )
    trainer.fit(module, DataLoader(torch.randn(32, 4), batch_size=4))
    assert trainer.global_step == 4
    assert module.net[1].num_batches_tracked == 8


def test_without_the_callback_a_fit_is_the_plain_loop_and_accumulation_warns():
    module = GPT(*METHODS["sassha_exact"])
    fit(module, 3, callbacks=())
    assert_same_bits(snapshot(module.net), plain_loop("sassha_exact", make_batches(3))[1])
    with pytest.warns(UserWarning, match=r"added to gradients that were there before.* callbacks=\[SasshaCallback"):
        fit(GPT(*METHODS["sassha_exact"]), 2, callbacks=(), accumulate_grad_batches=2)


def test_the_core_imports_no_framework():
    code = "import sassha_fast, sys; print({'lightning', 'transformers', 'accelerate'} & set(sys.modules))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "set()"


def test_m_sassha_is_true_again_after_an_interrupted_fit():
    class Breaking(GPT):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise ArithmeticError("stop")
            return super().training_step(batch, batch_idx)

    module = Breaking(*METHODS["m_sassha_exact"])
    with pytest.raises(ArithmeticError):
        fit(module, 3)
    assert issubclass(module.kind, MSASSHA)
    assert_same_bits(snapshot(module.net), plain_loop("m_sassha_exact", make_batches(2))[1])
