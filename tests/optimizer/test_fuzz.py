"""A small sample of the fuzzers, the same in every run; ``make fuzz`` runs many more."""

import fuzz
import pytest
import torch
from fuzz import BACKENDS, Finding, events_of, make_case, run_case, shrunk
from fuzz_cases import Action, Case, Spec
from fuzz_checkpoints import load_damaged, make_damaged

from sassha_fast import backends

pytestmark = [
    pytest.mark.usefixtures("native_ops"),
    pytest.mark.filterwarnings("ignore"),  # of sequences that nobody should write
]
SAMPLE, DAMAGED = range(40), range(120)


@pytest.fixture(autouse=True)
def _simulator(monkeypatch):
    monkeypatch.setattr(backends, "_REGISTRY", dict(backends._REGISTRY))
    fuzz.add_simulator()


@pytest.mark.parametrize("seed", SAMPLE)
def test_backends_agree_in_a_random_run(seed):
    run_case(make_case(seed))


@pytest.mark.parametrize("first", range(DAMAGED.start, DAMAGED.stop, 20))
def test_a_damaged_checkpoint_is_refused_by_name_or_the_run_goes_on(first):
    for seed in range(first, first + 20):
        load_damaged(seed)


def test_a_seed_gives_the_same_case_and_the_same_events():
    case = make_case(7)
    assert case == make_case(7)
    assert case.text() == make_case(7).text()
    assert make_damaged(7)[2] == make_damaged(7)[2]
    first, second = events_of(case, "cpu"), events_of(case, "cpu")
    assert [said for said, _ in first] == [said for said, _ in second]
    assert all(fuzz.same(a[key], b[key]) for (_, a), (_, b) in zip(first, second, strict=True) for key in a)


def two_steps():
    specs = (Spec((3, 5), "transposed", "float32", 0), Spec((7,), "contiguous", "float32", 0))
    actions = (Action("closure", {}), Action("reload", {}), Action("calls", {}))
    return Case(0, "SASSHA", {"rho": 0.05, "n_samples": 2}, ({"lr": 0.1},), specs, actions)


def test_a_backend_of_other_bits_is_found_and_the_case_made_smaller(monkeypatch):
    run_case(two_steps())
    right = backends._REGISTRY["foreach"].passes()

    class Wrong(right):
        def restore(self):
            super().restore()
            self.members.weights[0].view(-1)[0] += 1.0

    found = backends.Backend("wrong", "", lambda: Wrong, lambda device: None)
    monkeypatch.setitem(backends._REGISTRY, "wrong", found)

    def run(case):
        run_case(case, ("reference", "wrong"))

    specs = (Spec((7,), "contiguous", "float32", 0), Spec((3,), "contiguous", "float32", 0))
    actions = (Action("skip", {}), Action("calls", {}), Action("reload", {}))
    large = Case(0, "SASSHA", {"rho": 0.05, "n_samples": 2}, ({"lr": 0.1},), specs, actions)
    finding = fuzz.finding_of(large, run)
    assert finding is not None
    case, again = shrunk(large, finding, run)
    assert again.kind == finding.kind
    assert len(case.tensors) == 1
    assert "n_samples" not in case.options
    assert [a.kind for a in case.actions] == ["calls"]


def test_a_run_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    monkeypatch.setattr(fuzz.World, "act", lambda self, action: [None for _ in iter(int, 1)])
    with pytest.raises(Finding, match="hang on reference"):
        run_case(two_steps())


def test_an_error_that_says_nothing_is_found(monkeypatch):
    monkeypatch.setattr(fuzz.World, "act", lambda self, action: {}["step"])
    with pytest.raises(Finding, match="unclear KeyError"):
        run_case(two_steps())


def test_weights_that_an_exception_leaves_elsewhere_are_found(monkeypatch):
    def act(self, action):
        with torch.no_grad():
            self.params[0].add_(1.0)
        raise fuzz.Boom

    monkeypatch.setattr(fuzz.World, "act", act)
    with pytest.raises(Finding, match="parameter is not restored"):
        run_case(two_steps())


def test_all_backends_take_part():
    assert BACKENDS == ("reference", "foreach", "cpu", "cuda_sim")
    assert any(make_case(seed).triton for seed in SAMPLE)
