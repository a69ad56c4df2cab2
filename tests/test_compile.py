"""Compiled models: exact products on refreshes, compiled code on all other steps, nothing compiled twice."""

import pytest
import torch
import zoo
from test_closure import closure_of
from torch._dynamo.testing import CompileCounterWithBackend

from sassha_fast import SASSHA


def compiled(name):
    """The model through AOTAutograd, whose backward has no double backward, and the number of its compilations."""
    torch._dynamo.reset()
    model, _ = zoo.make(name, torch.float32)
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(model, backend=counter)
    tokens = torch.randint(0, zoo.TOKENS, (4, 7))

    def loss():
        logits = fast(tokens).flatten(0, -2)
        return torch.nn.functional.cross_entropy(logits, tokens.roll(1, 1).flatten())

    return model, loss, counter


@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
def test_a_compiled_transformer_trains_and_compiles_once(hvp):
    model, loss, counter = compiled("transformer_with_dropout")
    opt = SASSHA(model.parameters(), lr=0.05, rho=0.05, lazy_hessian=3, hvp=hvp)
    opt.attach(model)
    losses, compilations = [], []
    for _ in range(10):
        losses.append(opt.step(closure_of(opt, loss)).item())
        compilations.append(counter.frame_count)
    assert opt.stats.refreshes == 4
    assert losses[-1] < losses[0]
    assert compilations[-1] == compilations[1] > 0


def test_a_hand_written_refresh_of_compiled_code_needs_the_context():
    model, loss, _ = compiled("transformer_with_dropout")
    opt = SASSHA(model.parameters(), rho=0.05)
    loss().backward()
    opt.perturb_weights()
    with opt.refresh_context():
        loss().backward(create_graph=True)
    opt.unperturb()
    opt.step()
    assert opt.stats.refreshes == 1
