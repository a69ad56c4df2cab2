"""The authors' loop, in the style of their code, and ours are one algorithm."""

import sys
from pathlib import Path

import pytest
import torch
from tolerances import EAGER_RTOL
from training import make_loss, make_net, snapshot, three_calls

from sassha_fast import SASSHA, reference

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from eager import EagerSASSHA

OPTIONS = {"lr": 0.03, "rho": 0.05, "weight_decay": 0.01, "lazy_hessian": 10}


class SameProbes(EagerSASSHA):
    """The eager loop with our probes."""

    def probes(self, params):
        draw = self.state[params[0]]["hessian step"] - 1
        order = self.all_params()
        index = {id(p): i for i, p in enumerate(order)}
        return [reference.rademacher(p, index[id(p)], 0, draw) for p in params]


def eager_steps(opt, loss, steps):
    for _ in range(steps):
        loss().backward()
        opt.perturb_weights(zero_grad=True)
        loss().backward(create_graph=True)
        opt.unperturb()
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_25_steps_at_the_upstream_point_equal_the_eager_loop(backend):
    dtype = torch.float64
    expected = make_net(dtype)
    eager_steps(SameProbes(expected.parameters(), **OPTIONS), make_loss(expected, dtype), 25)
    found = make_net(dtype)
    opt = SASSHA(found.parameters(), hvp_point="upstream", backend=backend, **OPTIONS)
    loss = make_loss(found, dtype)
    for _ in range(25):
        three_calls(opt, loss, create_graph=True)
    for a, b in zip(snapshot(found), snapshot(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=EAGER_RTOL, atol=EAGER_RTOL * b.abs().max().item())


def test_the_point_of_the_hessian_matters():
    """At the paper's point the trajectory is another one: the difference that hvp_point names is real."""
    dtype = torch.float64
    results = []
    for point in ("perturbed", "upstream"):
        net = make_net(dtype)
        opt = SASSHA(net.parameters(), hvp_point=point, **{**OPTIONS, "rho": 0.5})
        loss = make_loss(net, dtype)
        for _ in range(3):
            three_calls(opt, loss)
        results.append(torch.cat([p.flatten() for p in snapshot(net)]))
    assert (results[0] - results[1]).abs().max() > 1e-4
