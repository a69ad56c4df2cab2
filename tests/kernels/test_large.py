"""More than 2^31 elements in one tensor. Needs 14 GB and half a minute, so it is not part of ``make test``."""

import pytest
import torch
from cases import assert_same_bits

from sassha_fast import reference
from sassha_fast._passes.cpu import CpuPasses
from sassha_fast._passes.reference import Members

pytestmark = pytest.mark.slow
COUNT = 2**31 + 300
TAIL = 1000


@pytest.fixture
def all_threads(restore_threads):
    torch.set_num_threads(2)


@pytest.mark.usefixtures("all_threads", "native_ops")
def test_signs_past_two_to_the_31_are_those_of_the_reference(native_ops):
    signs = torch.empty(COUNT, dtype=torch.bfloat16)
    native_ops.rademacher_([signs], [3], 5, 7)
    expected = reference.rademacher(signs[-TAIL:], 3, 5, 7, first=COUNT - TAIL)
    assert_same_bits(signs[-TAIL:], expected)


@pytest.mark.usefixtures("all_threads", "native_ops")
def test_perturb_and_restore_reach_the_last_element():
    weight = torch.ones(COUNT, dtype=torch.float16)
    grad = torch.zeros(COUNT, dtype=torch.float16)
    grad[-1] = 1.0
    passes = CpuPasses(Members([weight], [0], [0], 1, ["w"]))
    passes.bind_grads([grad], overwrite=True)
    assert passes.square_sums(adaptive=False).tolist() == [1.0]
    passes.perturb(torch.tensor([0.5]), adaptive=False, take_grads=True, seed=0, draw=torch.zeros(1, dtype=torch.int64))
    assert weight[-2:].tolist() == [1.0, 1.5]
    passes.restore()
    assert weight[-2:].tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("all_threads")
def test_probe_reaches_the_last_element(native_ops):
    weight = torch.ones(COUNT, dtype=torch.float16)
    native_ops.probe_([weight], [1], torch.tensor(0.5, dtype=torch.float64), 9, 2)
    z = reference.rademacher(weight[-TAIL:], 1, 9, 2, first=COUNT - TAIL)
    assert_same_bits(weight[-TAIL:], 1.0 + 0.5 * z)
