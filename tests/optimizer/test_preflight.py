"""check_model names what has no double backward, and changes nothing."""

import pytest
import torch
import zoo
from training import assert_same_bits, snapshot

from sassha_fast import ModelReport, check_model


class Hopeless(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x**2


class Cube(torch.nn.Module):
    def forward(self, x):
        return Hopeless.apply(x)


def test_attention_is_named_with_its_remedy():
    model, _ = zoo.make("transformer_with_dropout", torch.float32)
    report = check_model(model, torch.randint(0, zoo.TOKENS, (4, 7)))
    assert sorted(report.without) == ["blocks.0.attention", "blocks.1.attention"]
    assert report.exact_works
    assert "refresh_context()" in str(report)


def test_a_module_that_no_context_helps_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(Cube()), torch.nn.ReLU())
    report = check_model(model, torch.randn(2, 3))
    assert list(report.stubborn) == ["1.0"]
    assert not report.exact_works
    assert "hvp='finite_difference'" in str(report)
    assert report.kinked == ["2"]


@pytest.mark.parametrize("name", ["cnn_with_batchnorm", "lstm"])
def test_models_that_are_fine_are_said_to_be(name):
    model, _ = zoo.make(name, torch.float32)
    sample = torch.randn(6, 3, 8, 8) if name.startswith("cnn") else torch.randint(0, zoo.TOKENS, (4, 7))
    report = check_model(model, sample)
    assert report == ModelReport(kinked=["2", "5"] if name.startswith("cnn") else [])
    assert "works everywhere" in str(report)


def test_nothing_is_changed():
    model, _ = zoo.make("cnn_with_batchnorm", torch.float32)
    weights, buffers, state = snapshot(model), [b.clone() for b in model.buffers()], torch.get_rng_state()
    check_model(model, torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert_same_bits(snapshot(model), weights)
    assert all(map(torch.equal, model.buffers(), buffers))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_something_that_is_no_model_is_refused():
    with pytest.raises(TypeError, match="model is str"):
        check_model("model")
