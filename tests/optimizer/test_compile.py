"""Compiled models: exact products on refreshes, compiled code on all other steps, nothing compiled twice."""

import pytest
import torch
import zoo
from torch._dynamo.testing import CompileCounterWithBackend
from training import assert_same_bits, closure_of, make_loss, make_net, snapshot

from sassha_fast import SASSHA


def compiled(name, backend="aot_eager"):
    """The model through AOTAutograd, whose backward has no double backward, and the number of its compilations."""
    torch._dynamo.reset()
    model, _ = zoo.make(name, torch.float32)
    counter = CompileCounterWithBackend(backend)
    fast = torch.compile(model, backend=counter)
    tokens = torch.randint(0, zoo.TOKENS, (4, 7))

    def loss():
        logits = fast(tokens).flatten(0, -2)
        return torch.nn.functional.cross_entropy(logits, tokens.roll(1, 1).flatten())

    return model, loss, counter


@pytest.mark.parametrize(
    ("hvp", "backend"), [("exact", "inductor"), ("exact", "aot_eager"), ("finite_difference", "aot_eager")]
)
def test_a_compiled_transformer_trains_and_compiles_once(hvp, backend):
    model, loss, counter = compiled("transformer_with_dropout", backend)
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


def test_a_compiled_step_runs_the_passes_as_they_are():
    """torch.compile has nothing to fuse in them: it calls them, compiles nothing twice, and changes no bit."""
    torch._dynamo.reset()
    results = []
    for compiled_step in (False, True):
        net = make_net()
        opt = SASSHA(net.parameters(), lr=0.05, rho=0.05, lazy_hessian=3)
        counter = CompileCounterWithBackend("aot_eager")
        step = torch.compile(opt.step, backend=counter) if compiled_step else opt.step
        loss = make_loss(net)
        for _ in range(7):
            step(closure_of(opt, loss))
        assert counter.frame_count <= 1
        results.append(snapshot(net))
    assert_same_bits(*results)


def test_a_compiled_model_runs_compiled_inside_a_closure():
    torch._dynamo.reset()
    runs = 0

    def count(module, example_inputs):
        def run(*args):
            nonlocal runs
            runs += 1
            return module(*args)

        return run

    net = make_net()
    fast = torch.compile(net, backend=count)
    opt = SASSHA(net.parameters(), lr=0.05, rho=0.05, lazy_hessian=3)
    seen = []
    for _ in range(4):
        before = runs
        opt.step(closure_of(opt, lambda: fast(torch.ones(4, 12)).square().sum()))
        seen.append(runs - before)
    assert seen == [0, 2, 2, 0]  # a refresh by exact products runs eagerly
