"""``transformers.Trainer`` with the mixin is the plain torch loop, bit for bit."""

# Imports that need a framework follow its importorskip.
# ruff: noqa: E402

import json
from functools import partial

import pytest
import torch
from training import assert_same_bits, assert_same_state, snapshot, state_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file
from small_gpt import BATCH, LENGTH, METHODS, Passes, make_batches, make_gpt, make_sequences, plain_loop
from transformers import Trainer, TrainerCallback, TrainingArguments

from sassha_fast import MSASSHA, SASSHA
from sassha_fast.integrations.huggingface import SasshaMixin, SasshaTrainer


class Seeding(TrainerCallback):
    """Random numbers of a step by its number, as in the plain loop."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(state.global_step)


def arguments(folder, **settings):
    return TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH,
            "num_train_epochs": 1,
            "train_sampling_strategy": "sequential",
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "save_strategy": "no",
            "logging_steps": 1,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "dataloader_pin_memory": False,
            **settings,
        },
    )


def trainer_of(method, folder, batches, *, kind=SasshaTrainer, callbacks=(), options=None, dropout=0.1, **settings):
    """A trainer whose optimizer has the parameters in one group, like the plain loop's."""
    model = make_gpt(dropout)
    optimizer, given = METHODS[method]
    rows = make_sequences(batches * BATCH)
    return kind(
        model,
        arguments(folder, **settings),
        train_dataset=rows,
        eval_dataset=rows[:BATCH],
        optimizers=(optimizer(model.parameters(), **{**given, **(options or {})}), None),
        callbacks=[Seeding(), *callbacks],
    )


def optimizer_of(trainer):
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_training_equals_the_plain_loop_bit_for_bit_in_as_many_passes(method, accumulate, tmp_path):
    passes = Passes()
    batches = make_batches(3 * accumulate)
    expected_opt, expected = plain_loop(method, batches, accumulate, by_tokens=True, wrap=passes)
    trainer = trainer_of(method, tmp_path, 3 * accumulate, gradient_accumulation_steps=accumulate)
    taken = Passes(trainer.model)
    trainer.train()
    assert trainer.state.global_step == 3
    assert_same_bits(snapshot(trainer.model), expected)
    assert_same_state(state_of(optimizer_of(trainer)), state_of(expected_opt))
    assert taken.count == passes.count


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("method", "shares"),
    [
        ("sassha_exact", {"ascent_share": 1 / 2, "hessian_share": 1 / 4}),
        ("sassha_differences", {"ascent_share": 1 / 4}),
        ("m_sassha_exact", {"hessian_share": 1 / 2}),
    ],
    ids=str,
)
def test_shares_of_batches_equal_the_plain_loop_bit_for_bit_in_as_many_passes(method, shares, accumulate, tmp_path):
    passes = Passes()
    by_closure = {name.replace("share", "closure"): share for name, share in shares.items()}
    batches = make_batches(3 * accumulate)
    expected_opt, expected = plain_loop(method, batches, accumulate, by_tokens=True, wrap=passes, shares=by_closure)
    kind = partial(SasshaTrainer, **shares)
    trainer = trainer_of(method, tmp_path, 3 * accumulate, kind=kind, gradient_accumulation_steps=accumulate)
    taken = Passes(trainer.model)
    trainer.train()
    assert_same_bits(snapshot(trainer.model), expected)
    assert_same_state(state_of(optimizer_of(trainer)), state_of(expected_opt))
    assert taken.count == passes.count


def test_with_a_share_the_logged_loss_is_that_of_its_rows_on_the_scale_of_the_whole_batch(tmp_path):
    trainer = trainer_of("sassha_exact", tmp_path, 1, kind=partial(SasshaTrainer, ascent_share=1 / 4), dropout=0.0)
    part = {key: value[:1] for key, value in make_batches(1)[0].items()}
    expected = trainer.model(**part).loss.item() * (LENGTH - 1) / LENGTH  # labels are shifted, and all are counted
    trainer.train()
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert logged == [pytest.approx(expected, rel=1e-3)]


def test_shares_that_can_not_be_are_refused(tmp_path):
    with pytest.raises(ValueError, match="SasshaTrainer: ascent_share is 2, expected a fraction of the batch"):
        SasshaTrainer(make_gpt(), arguments(tmp_path), ascent_share=2)
    with pytest.raises(ValueError, match="SasshaTrainer: ascent_share is for the pass of an ascent, which MSASSHA"):
        trainer_of("m_sassha_exact", tmp_path, 1, kind=partial(SasshaTrainer, ascent_share=1 / 2)).train()
    share = SasshaTrainer(make_gpt(), arguments(tmp_path), ascent_share=torch.tensor(0.5)).ascent_share
    assert (type(share), share) == (float, 0.5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # another name from 5.23 on
@pytest.mark.parametrize("method", ["sassha_exact", "m_sassha_exact"])
@pytest.mark.parametrize("setting", [{"gradient_checkpointing": True}, {"torch_compile_backend": "aot_eager"}], ids=str)
def test_checkpointed_and_compiled_models_train_alike(method, setting, tmp_path):
    trainer = trainer_of(method, tmp_path, 3, **setting)
    trainer.train()
    assert_same_bits(snapshot(trainer.model), plain_loop(method, make_batches(3), by_tokens=True)[1])


def test_all_passes_of_an_exact_refresh_use_the_same_attention(tmp_path):
    """Without dropout ordinary passes take a fused kernel of other last bits, which has no double backward."""
    _, expected = plain_loop("sassha_exact", make_batches(2), 2, by_tokens=True, dropout=0.0)
    trainer = trainer_of("sassha_exact", tmp_path, 2, gradient_accumulation_steps=2, dropout=0.0)
    trainer.train()
    assert_same_bits(snapshot(trainer.model), expected)


@pytest.mark.parametrize("method", ["sassha_exact", "m_sassha_differences"])
def test_bfloat16_equals_the_plain_loop_under_autocast(method, tmp_path):
    _, expected = plain_loop(method, make_batches(4), 2, by_tokens=True, autocast=True)
    _, other = plain_loop(method, make_batches(4), 2, by_tokens=True)
    trainer = trainer_of(method, tmp_path, 4, gradient_accumulation_steps=2, bf16=True)
    trainer.train()
    assert_same_bits(snapshot(trainer.model), expected)
    assert not torch.equal(expected[0], other[0])


@pytest.mark.parametrize("method", ["sassha_exact", "sassha_differences", "m_sassha_exact"])
def test_the_loss_falls_over_sixty_steps(method, tmp_path):
    options = {"lr": 0.02, "lazy_hessian": 10}
    trainer = trainer_of(method, tmp_path, 12, num_train_epochs=5, options=options, logging_steps=5)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 12
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(method, tmp_path):
    """It stops in the middle of an epoch and of a refresh interval."""
    expected = trainer_of(method, tmp_path / "whole", 5)
    expected.train()
    first = trainer_of(method, tmp_path / "parts", 5, max_steps=3, save_strategy="steps", save_steps=3)
    first.train()
    trainer = trainer_of(method, tmp_path / "parts", 5)
    with torch.no_grad():
        trainer.model.transformer.wte.weight.zero_()
    trainer.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    assert trainer.state.global_step == 5
    assert_same_bits(snapshot(trainer.model), snapshot(expected.model))
    assert_same_state(state_of(optimizer_of(trainer)), state_of(optimizer_of(expected)))
    assert not torch.equal(snapshot(first.model)[0], snapshot(expected.model)[0])


def test_max_grad_norm_clips_the_gradient_of_the_descent_alone(tmp_path):
    clip = 0.3
    for method in ("sassha_exact", "m_sassha_differences"):
        _, expected = plain_loop(method, make_batches(3), by_tokens=True, max_grad_norm=clip)
        _, other = plain_loop(method, make_batches(3), by_tokens=True)
        trainer = trainer_of(method, tmp_path, 3, max_grad_norm=clip)
        trainer.train()
        assert_same_bits(snapshot(trainer.model), expected)
        assert not torch.equal(expected[0], other[0])


class Watching(TrainerCallback):
    """Takes the parameters as evaluation and as training sees them."""

    def __init__(self):
        self.evaluated, self.trained = [], []

    def on_prediction_step(self, args, state, control, model=None, **kwargs):
        self.evaluated.append(snapshot(model))

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.trained.append(snapshot(model))


@pytest.mark.parametrize("evaluating", [True, False])
def test_m_sassha_shows_its_true_weights_in_evaluation_and_checkpoints_and_trains_on_the_others(evaluating, tmp_path):
    watching = Watching()
    trainer = trainer_of(
        "m_sassha_exact",
        tmp_path,
        3,
        callbacks=[watching],
        eval_strategy="steps" if evaluating else "no",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
    )
    trainer.train()
    for step in (1, 2, 3):
        _, truth = plain_loop("m_sassha_exact", make_batches(step), by_tokens=True)
        saved = load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        names = [name for name, _ in trainer.model.named_parameters()]
        assert_same_bits([saved[name] for name in names], truth)
        if evaluating:
            assert_same_bits(watching.evaluated[step - 1], truth)
        if step < 3:
            assert not torch.equal(watching.trained[step][0], truth[0])
    assert_same_bits(snapshot(trainer.model), truth)


class Loading(TrainerCallback):
    """Writes other weights into the model after the second step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            model.load_state_dict(make_gpt(seed=9).state_dict())


def test_weights_loaded_while_the_parameters_are_perturbed_are_the_new_true_weights(tmp_path):
    trainer = trainer_of("m_sassha_exact", tmp_path, 2, callbacks=[Loading()])
    trainer.train()
    assert_same_bits(snapshot(trainer.model), snapshot(make_gpt(seed=9)))


def test_the_best_model_of_m_sassha_is_what_was_saved(tmp_path):
    trainer = trainer_of(
        "m_sassha_exact",
        tmp_path,
        5,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that it is not the last one
    )
    trainer.train()
    assert not trainer.state.best_model_checkpoint.endswith("-5")
    best = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    assert_same_bits(snapshot(trainer.model), [best[name] for name, _ in trainer.model.named_parameters()])


def test_logs_have_the_statistics_and_stay_json(tmp_path):
    trainer = trainer_of("sassha_exact", tmp_path, 3, eval_strategy="epoch", save_strategy="epoch")
    trainer.train()
    history = json.loads(
        (tmp_path / "checkpoint-3" / "trainer_state.json").read_text(),
        parse_constant=lambda name: pytest.fail(f"{name} is no JSON"),
    )["log_history"]
    rows = [row for row in history if "loss" in row]
    assert len(rows) == 3
    assert rows[-1]["sassha/ascent_gap"] == optimizer_of(trainer).stats.ascent_gap.item() > 0
    assert rows[-1]["sassha/refreshes"] == 2
    assert rows[0]["grad_norm"] == pytest.approx(rows[0]["sassha/grad_norm"])
    assert not any("sassha/trace" in row for row in history if "eval_loss" in row)


def test_class_and_arguments_give_the_groups_and_the_learning_rate_of_the_training_arguments(tmp_path):
    trainer = SasshaTrainer(
        make_gpt(),
        arguments(tmp_path, learning_rate=0.005, weight_decay=0.1, max_grad_norm=1.0),
        train_dataset=make_sequences(BATCH),
        optimizer_cls_and_kwargs=(MSASSHA, {"rho": 0.1}),
    )
    trainer.train()
    opt = optimizer_of(trainer)
    assert isinstance(opt, MSASSHA)
    assert [group["weight_decay"] for group in opt.param_groups] == [0.1, 0.0]
    assert {group["lr"] for group in opt.param_groups} == {0.005}
    assert {group["rho"] for group in opt.param_groups} == {0.1}
    assert opt.max_grad_norm == 1.0
    assert opt.stats.refreshes == 1


def test_the_mixin_fits_other_trainers(tmp_path):
    class Counting(Trainer):
        calls = 0

        def compute_loss(self, *args, **kwargs):
            self.calls += 1
            return super().compute_loss(*args, **kwargs)

    class Both(SasshaMixin, Counting):
        pass

    trainer = trainer_of("sassha_differences", tmp_path, 2, kind=Both)
    trainer.train()
    assert trainer.calls == 3 + 2  # x, x + ε and a probe; then x and x + ε
    assert_same_bits(snapshot(trainer.model), plain_loop("sassha_differences", make_batches(2), by_tokens=True)[1])


def test_a_micro_batch_that_failed_is_not_part_of_the_next_step(tmp_path):
    """As with ``auto_find_batch_size``, which goes on with smaller batches."""

    class Failing(SasshaTrainer):
        calls = 0

        def compute_loss(self, *args, **kwargs):
            self.calls += 1
            if self.calls == 1:
                raise MemoryError("too large")
            return super().compute_loss(*args, **kwargs)

        def training_step(self, *args, **kwargs):
            try:
                return super().training_step(*args, **kwargs)
            except MemoryError:
                return super().training_step(*args, **kwargs)

    trainer = trainer_of("m_sassha_exact", tmp_path, 2, kind=Failing)
    trainer.train()
    assert trainer.calls == 3
    assert_same_bits(snapshot(trainer.model), plain_loop("m_sassha_exact", make_batches(2), by_tokens=True)[1])


def test_what_can_not_work_names_the_remedy(tmp_path):
    def refused(message, error, **given):
        settings = given.pop("settings", {})
        trainer = SasshaTrainer(
            make_gpt(), arguments(tmp_path, **settings), train_dataset=make_sequences(BATCH), **given
        )
        with pytest.raises(error, match=message):
            trainer.train()

    refused("no optimizer was given", TypeError)
    refused("the optimizer is SGD", TypeError, optimizer_cls_and_kwargs=(torch.optim.SGD, {}))
    clipping = (SASSHA, {"max_grad_norm": 2.0})
    refused("give one of them", ValueError, optimizer_cls_and_kwargs=clipping, settings={"max_grad_norm": 1.0})
    trainer = trainer_of("sassha_exact", tmp_path, 1)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")  # as with fp16=True on a GPU
    with pytest.raises(ValueError, match="use bf16=True, or a loop of your own"):
        trainer.train()


@pytest.mark.filterwarnings("ignore:.*rho is .* but the weights were not perturbed")
def test_without_the_mixin_a_refresh_says_what_is_missing(tmp_path):
    for method, message in (("m_sassha_exact", "no gradient has a graph"), ("sassha_differences", "probe_weights")):
        with pytest.raises(RuntimeError, match=message):
            trainer_of(method, tmp_path, 1, kind=Trainer).train()
