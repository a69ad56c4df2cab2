"""What a refresh brought, where a device tells it late. Here a CPU does as if it were one."""

import copy

import pytest
import torch
from training import assert_same_bits

from sassha_fast import MSASSHA, SASSHA
from sassha_fast._core import outcome

INTERVAL = 3


class Event:
    """Is over when somebody waits for it."""

    def __init__(self, waits):
        self.waits, self.over = waits, False

    def query(self):
        return self.over

    def synchronize(self):
        self.waits.append(self)
        self.over = True


@pytest.fixture
def waits(monkeypatch):
    """Waits for reports, which all come late."""
    found = []
    monkeypatch.setattr(outcome, "sent", lambda report: (report.clone(), Event(found)))
    return found


class Run:
    """A parameter whose products are all lost in the refreshes of some steps."""

    def __init__(self, fails=(), method=SASSHA, **options):
        self.p = torch.nn.Parameter(torch.linspace(0.5, 1.5, 40))
        self.opt = method([self.p], lr=0.01, rho=0.05, lazy_hessian=INTERVAL, **options)
        self.fails, self.t, self.due = fails, 0, []

    def backward(self, graph=False):
        (self.p**4).sum().backward(create_graph=graph)

    def step(self):
        opt = self.opt
        self.due.append(opt.hessian_due)
        if isinstance(opt, SASSHA):
            self.backward()
            opt.perturb_weights()
        self.backward(opt.hessian_due)
        if opt.hessian_due and self.t in self.fails:
            self.p.grad.register_hook(lambda grad: grad * torch.inf)
        if isinstance(opt, SASSHA):
            opt.unperturb()
        opt.step()
        opt.zero_grad()
        self.t += 1
        return self

    def steps(self, n):
        for _ in range(n):
            self.step()
        return self

    @property
    def state(self):
        return self.opt.state[self.p]


@pytest.mark.parametrize("capturable", [False, True], ids=["eager", "capturable"])
def test_a_refresh_does_not_wait_and_the_next_update_does(waits, capturable):
    run = Run(capturable=capturable)
    for expected in (0, 1, 1, 1, 2):
        run.step()
        assert len(waits) == expected


@pytest.mark.parametrize("capturable", [False, True], ids=["eager", "capturable"])
@pytest.mark.parametrize("method", [SASSHA, MSASSHA])
def test_refreshes_that_succeed_have_the_bits_of_those_that_are_known_at_once(monkeypatch, waits, method, capturable):
    late = Run(method=method, capturable=capturable).steps(8)
    monkeypatch.undo()
    at_once = Run(method=method, capturable=capturable).steps(8)
    assert_same_bits([late.p.detach()], [at_once.p.detach()])
    assert late.opt.stats.refreshes == at_once.opt.stats.refreshes == 3


@pytest.mark.parametrize("capturable", [False, True], ids=["eager", "capturable"])
def test_a_failed_refresh_is_repeated_two_steps_later_whether_or_not_somebody_looks(waits, capturable):
    for looks in (False, True):
        run = Run(fails=(3,), capturable=capturable)
        for _ in range(8):
            run.step()
            if looks:
                assert run.opt.stats.skipped_refreshes == int(run.t > 3)
        assert run.due == [True, False, False, True, False, True, False, False]
        assert (run.opt.stats.refreshes, run.opt.stats.skipped_refreshes) == (2, 1)


def test_a_failed_refresh_leaves_curvature_and_correction_as_they_were(waits):
    run = Run(fails=(3,)).steps(3)
    before = copy.deepcopy(dict(run.state))
    run.step()
    run.opt.state_dict()
    assert_same_bits([run.state["exp_hessian_diag"]], [before["exp_hessian_diag"]])
    assert run.state["bias_correction2"] == before["bias_correction2"]


def test_nothing_moves_before_the_first_refresh_that_succeeds(waits):
    run = Run(fails=(0,))
    before = run.p.detach().clone()
    run.steps(2)
    assert_same_bits([run.p.detach()], [before])
    run.step()
    assert run.due == [True, False, True]
    assert (run.p != before).all()


def test_a_checkpoint_knows_what_the_refresh_brought(waits):
    """It is saved right after a refresh that failed: both runs repeat it at once."""
    run = Run(fails=(3,)).steps(4)
    saved = copy.deepcopy(run.opt.state_dict())
    resumed = Run()
    with torch.no_grad():
        resumed.p.copy_(run.p)
    resumed.opt.load_state_dict(saved)
    run.steps(3)
    resumed.steps(3)
    assert run.due[4:] == resumed.due == [True, False, False]
    assert_same_bits([run.p.detach()], [resumed.p.detach()])


def test_copies_of_stats_are_complete(waits):
    run = Run().step()
    assert copy.deepcopy(run.opt.stats).refreshes == 1
