"""Parameters that share memory: a step would move an element twice, and not find back."""

import pytest
import torch
from torch import nn
from training import assert_same_bits

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH


def sam(params, **options):
    return SAM(params, torch.optim.SGD, lr=0.1, **options)


METHODS = [SASSHA, MSASSHA, GSASSHA, AdaHessian, SophiaH, sam]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "cut",
    [
        lambda room: (room[:4], room[3:]),
        lambda room: (room, room[5:6]),
        lambda room: (room.view(2, 4).t(), room.view(2, 4)[1]),
        lambda room: (room[::2], room[2:5]),
    ],
    ids=["ends that overlap", "one within another", "a transposed one", "one with gaps"],
)
def test_parameters_that_share_elements_are_refused_by_name(method, cut):
    a, b = (nn.Parameter(view) for view in cut(torch.randn(8)))
    with pytest.raises(ValueError, match=r"'first' and 'second' share memory, so a step would move their elements"):
        method([("first", a), ("second", b)])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_the_same_parameter_twice_in_a_group_is_refused():
    p = nn.Parameter(torch.randn(3))
    with pytest.raises(ValueError, match="parameter 0 of group 0 and parameter 1 of group 0 share memory"):
        SASSHA([p, p])


@pytest.mark.parametrize("backend", ["reference", "foreach", "cpu"])
def test_views_between_each_other_share_no_element_and_are_restored(backend):
    room = torch.randn(6, 4)
    params = [nn.Parameter(room[:, ::2]), nn.Parameter(room[:, 1::2]), nn.Parameter(room.new_zeros(0))]
    before = room.clone()
    opt = SASSHA(params, lr=0.1, rho=0.1, backend=backend)
    (room_of(params) ** 2).sum().backward()
    opt.perturb_weights()
    assert not torch.equal(room, before)
    (room_of(params) ** 2).sum().backward(create_graph=True)
    opt.unperturb()
    assert_same_bits([room], [before])


def room_of(params):
    return torch.cat([p.flatten() for p in params])


def test_memory_that_is_shared_later_is_refused_before_anything_moves():
    a, b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
    opt = SASSHA([a, b], lr=0.1, rho=0.1)
    a.data = b.data
    before = b.detach().clone()
    ((a * b) ** 2).sum().backward()
    with pytest.raises(ValueError, match="share memory"):
        opt.perturb_weights()
    assert_same_bits([b], [before])


def test_two_that_overlap_within_a_wider_one_are_refused_by_name():
    room = torch.randn(4, 4)
    views = {"wide": room[:, 0], "left": room[1, 1:3], "right": room[1, 2:4]}
    with pytest.raises(ValueError, match=r"'left' and 'right' share memory"):
        SASSHA([(name, nn.Parameter(view)) for name, view in views.items()])


def test_many_that_lie_between_each_other_are_taken_and_one_more_is_not():
    room = torch.randn(3, 300)
    columns = [nn.Parameter(room[:, i]) for i in range(300)]
    SASSHA(columns)
    with pytest.raises(ValueError, match="parameter 150 of group 0 and parameter 300 of group 0 share memory"):
        SASSHA([*columns, nn.Parameter(room[2, 150:151])])
