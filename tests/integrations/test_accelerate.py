"""Loops with Accelerate: what ``prepare`` returns takes closures like the optimizer itself, bit for bit."""

# Imports that need a framework follow its importorskip.
# ruff: noqa: E402

import pytest
import torch
from torch.utils.data import DataLoader
from training import assert_same_bits, assert_same_state, snapshot, state_of

pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState
from small_gpt import BATCH, METHODS, make_batches, make_gpt, make_sequences, plain_loop, true_weights


def forget_settings():
    """An Accelerator shares its settings with all others of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _fresh_accelerator():
    forget_settings()
    yield
    forget_settings()


class Loop:
    """A loop with Accelerate, random numbers seeded by the number of the step."""

    def __init__(self, method, accumulate=1, precision="no", **options):
        kind, settings = METHODS[method]
        self.accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate
        )
        self.net = make_gpt().train()
        self.sassha = kind(self.net.parameters(), **settings, **options)
        self.model, self.opt = self.accelerator.prepare(self.net, self.sassha)
        self.sassha.attach(self.model)
        self.steps = 0

    def run(self, batches):
        rows = make_sequences(batches * BATCH)
        loader = self.accelerator.prepare(DataLoader(rows, BATCH))
        closures = []
        for batch in loader:
            with self.accelerator.accumulate(self.model):
                closures.append(self.closure(batch))
                if self.accelerator.sync_gradients:
                    torch.manual_seed(self.steps)
                    self.opt.step(closures)
                    self.steps += 1
                    closures = []
        return self

    def closure(self, batch):
        def run():
            loss = self.model(**batch).loss
            self.accelerator.backward(loss)
            return loss

        return run


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_a_prepared_loop_equals_the_plain_one_bit_for_bit(method, accumulate):
    expected_opt, expected = plain_loop(method, make_batches(3 * accumulate), accumulate)
    loop = Loop(method, accumulate).run(3 * accumulate)
    assert loop.steps == 3
    assert_same_bits(true_weights(loop.net, loop.sassha), expected)
    assert_same_state(state_of(loop.sassha), state_of(expected_opt))


def test_bfloat16_equals_the_plain_loop_under_autocast():
    _, expected = plain_loop("sassha_exact", make_batches(2), autocast=True)
    assert_same_bits(snapshot(Loop("sassha_exact", precision="bf16").run(2).net), expected)


def test_a_closure_that_zeroes_gradients_goes_through_the_prepared_optimizer():
    loop = Loop("sassha_exact")
    batch = make_batches(1)[0]

    def closure():
        loop.opt.zero_grad()
        return loop.closure(batch)()

    torch.manual_seed(0)
    loop.opt.step(closure)
    assert_same_bits(snapshot(loop.net), plain_loop("sassha_exact", [batch])[1])


@pytest.mark.parametrize("method", ["sassha_exact", "m_sassha_exact"])
def test_a_resumed_loop_equals_the_uninterrupted_one_bit_for_bit(method, tmp_path):
    expected = Loop(method).run(3).run(3)
    weights, state = snapshot(expected.net), state_of(expected.sassha)
    forget_settings()
    first = Loop(method).run(3)
    true_weights(first.net, first.sassha)
    first.accelerator.save_state(str(tmp_path))
    forget_settings()
    second = Loop(method)
    with torch.no_grad():
        second.net.transformer.wte.weight.zero_()
    second.accelerator.load_state(str(tmp_path))
    if method.startswith("m_"):
        second.sassha.train()
    second.steps = 3
    second.run(3)
    assert_same_bits(snapshot(second.net), weights)
    assert_same_state(state_of(second.sassha), state)


@pytest.mark.product
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("accelerate_gpt", ["--optimizer=m-sassha", "--accumulate=2", "--precision=bf16", "--epochs=2"]),
        ("huggingface_gpt", ["--optimizer=m-sassha", "--accumulate=2", "--bf16", "--epochs=2"]),
        ("lightning_gpt", ["--optimizer=m-sassha", "--accumulate=2", "--precision=bf16-mixed", "--epochs=2"]),
        ("lightning_gpt", ["--fp16", "--epochs=4"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value),
)
def test_the_example_learns_and_resumes(example, options, tmp_path):
    if example.startswith("lightning"):
        pytest.importorskip("lightning")
    main = pytest.importorskip(f"examples.{example}").main
    sizes = ["--batches", "8", "--out", str(tmp_path / "out")]
    first = main([*options, *sizes])
    assert first < 4.05  # ln 64 = 4.16 without learning
    resume = {
        "accelerate": [],  # goes on from what is there
        "huggingface": ["--resume"],
        "lightning": ["--resume", str(tmp_path / "out" / "checkpoints" / "last.ckpt")],
    }[example.split("_")[0]]
    forget_settings()
    assert main([*options, *sizes, "--epochs=6", *resume]) < first
