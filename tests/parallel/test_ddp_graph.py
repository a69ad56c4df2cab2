"""A backward pass with a graph that DDP would reduce: an error says what to do, and what it says works."""

import processes
import pytest
import replicas
import torch
from tolerances import PROCESSES_RTOL
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from training import assert_same_bits, make_batch, make_net, snapshot

from sassha_fast import MSASSHA, SASSHA, AdaHessian, SophiaH


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Returns(nn.Module):
    """A model that returns logits and loss, as language models do."""

    def __init__(self, kind):
        super().__init__()
        self.net, self.kind = make_net(), kind

    def forward(self, x, y):
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        return {"tensor": loss, "tuple": (logits, loss), "dict": {"out": [logits, loss]}}[self.kind]


def loss_of(output):
    while not isinstance(output, torch.Tensor):
        output = list(output.values())[-1] if isinstance(output, dict) else output[-1]
    return output


@pytest.mark.parametrize("method", [MSASSHA, AdaHessian, SophiaH])
@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict"])
def test_a_graph_that_ddp_would_reduce_is_refused_before_ddp_fails(one_process, method, kind):
    model = DDP(Returns(kind))
    opt = method(model.module.parameters())
    opt.attach(model)
    before, batch = snapshot(model), make_batch()
    said = rf"^{method.__name__}: DDP would reduce this backward pass.*`with ddp_model\.no_sync\(\):`"
    with pytest.raises(RuntimeError, match=said):
        loss_of(model(*batch)).backward(create_graph=opt.hessian_due)
    assert_same_bits(snapshot(model), before)
    assert not opt.state
    opt.zero_grad()
    loss_of(model(*batch)).backward()  # DDP waits for the end of the pass that it was told of
    opt.zero_grad()
    with model.no_sync():  # the remedy
        loss_of(model(*batch)).backward(create_graph=opt.hessian_due)
    opt.step()
    assert opt.stats.refreshes == 1


def test_the_second_pass_of_sassha_is_held_to_the_same_and_the_first_is_not(one_process):
    model = DDP(Returns("tuple"))
    opt = SASSHA(model.module.parameters(), rho=0.05)
    opt.attach(model)
    batch = make_batch()
    loss_of(model(*batch)).backward()
    opt.perturb_weights()
    with pytest.raises(RuntimeError, match="SASSHA: DDP would reduce"):
        loss_of(model(*batch)).backward(create_graph=True)


@pytest.mark.parametrize("way", ["ordinary", "no_sync", "no_grad", "differences"])
def test_other_passes_are_left_alone(one_process, way):
    model, batch = DDP(Returns("dict")), make_batch()
    opt = MSASSHA(model.module.parameters(), hvp="finite_difference" if way == "differences" else "exact")
    opt.attach(model)
    if way == "no_sync":
        with model.no_sync():
            loss_of(model(*batch)).backward(create_graph=True)
    elif way == "no_grad":
        with torch.no_grad():
            model(*batch)
    else:
        loss_of(model(*batch)).backward()


def test_a_loop_that_turns_the_reduction_on_for_its_last_micro_batch_equals_one_process(one_process, tmp_path):
    found = processes.run(2, ["nano_loop"], tmp_path)["nano_loop"]
    assert_same_bits(found[0]["params"], found[1]["params"])
    assert found[0]["refreshes"] == 2
    for a, b in zip(found[0]["params"], replicas.nano_loop()["params"], strict=True):
        assert (a - b).norm() <= PROCESSES_RTOL[torch.float64] * b.norm()
