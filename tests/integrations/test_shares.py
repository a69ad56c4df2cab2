"""The share of a batch that a pass of a trainer takes: the first rows of all that is in it."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from sassha_fast.integrations.shares import first_rows, least_rows, taken_share

Pair = namedtuple("Pair", ["x", "y"])


def rows(n=8):
    return torch.arange(n * 3).view(n, 3)


def test_tensors_are_cut_in_whatever_they_are_held_by():
    x, y = rows(), torch.arange(8)
    batch = {"x": x, "more": [y, (x, OrderedDict(deep=y))], "pair": Pair(x, y), "length": 7, "name": "a", "none": None}
    found = first_rows(batch, 1 / 4, caller="test")
    assert torch.equal(found["x"], x[:2])
    assert torch.equal(found["more"][1][1]["deep"], y[:2])
    assert torch.equal(found["more"][0], y[:2])
    assert isinstance(found["more"][1], tuple)
    assert isinstance(found["more"][1][1], OrderedDict)
    assert isinstance(found["pair"], Pair)
    assert torch.equal(found["pair"].y, y[:2])
    assert (found["length"], found["name"], found["none"]) == (7, "a", None)
    assert len(batch["x"]) == 8
    assert found["x"].data_ptr() == x.data_ptr()


def test_dicts_that_are_none_and_lists_of_something_for_each_row():
    batch = UserDict(x=rows(), files=[f"{i}.png" for i in range(8)], scale=torch.tensor(2.0), names=("a", "b"))
    found = first_rows(batch, 0.5, caller="test")
    assert isinstance(found, UserDict)
    assert found["files"] == ["0.png", "1.png", "2.png", "3.png"]
    assert found["scale"] == 2.0
    assert found["names"] == ("a", "b")
    assert len(batch["files"]) == 8


def test_lists_of_what_is_no_tensor_are_cut_by_rows_and_others_entry_by_entry():
    pairs, ragged = [(1, 2)] * 6, [list(range(n)) for n in range(6)]
    batch = {"x": rows(6), "pairs": pairs, "ragged": ragged, "size": [4, 4], "both": [rows(6)] * 6}
    found = first_rows(batch, 1 / 2, caller="test")
    assert found["pairs"] == pairs[:3]
    assert found["ragged"] == ragged[:3]
    assert found["size"] == [4, 4]
    assert [len(x) for x in found["both"]] == [3] * 6


class Fields(MutableMapping):
    """Entries of its own, which a copy shares."""

    def __init__(self, **fields):
        self.fields = fields

    def __getitem__(self, key):
        return self.fields[key]

    def __setitem__(self, key, value):
        self.fields[key] = value

    def __delitem__(self, key):
        del self.fields[key]

    def __iter__(self):
        return iter(self.fields)

    def __len__(self):
        return len(self.fields)


def test_a_batch_whose_copy_is_itself_is_refused_and_stays_whole():
    batch = Fields(x=rows(), y=torch.arange(8))
    with pytest.raises(ValueError, match="test: a batch holds a Fields, of which no share can be taken"):
        first_rows(batch, 1 / 4, caller="test")
    assert [len(value) for value in batch.values()] == [8, 8]
    with pytest.raises(ValueError, match="test: a batch holds a mappingproxy, of which no share can be taken"):
        first_rows(MappingProxyType({"x": rows()}), 1 / 4, caller="test")


@pytest.mark.parametrize(
    "make", [lambda x: x.to_sparse(), lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)]
)
def test_tensors_whose_rows_can_not_be_taken_are_refused(make):
    with pytest.raises(ValueError, match=r"test: a batch holds a (Nested)?Tensor, of which no share can be taken"):
        first_rows([make(rows().float())], 1 / 4, caller="test")


@pytest.mark.parametrize(
    ("n", "share", "kept"), [(8, 1 / 4, 2), (3, 1 / 4, 1), (1, 1 / 4, 1), (10, 1 / 3, 3), (7, 1, 7)]
)
def test_at_least_one_row_is_left_and_two_for_batchnorm_where_there_are_two(n, share, kept):
    assert len(first_rows(rows(n), share, caller="test")) == kept
    assert taken_share(rows(n), share, caller="test") == kept / n
    two = least_rows(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
    assert (two, least_rows(torch.nn.LayerNorm(3))) == (2, 1)
    assert len(first_rows(rows(n), share, caller="test", least=two)) == max(kept, min(n, 2))
    assert taken_share(rows(n), share, caller="test", least=two) == max(kept, min(n, 2)) / n


def test_what_can_not_be_cut_is_named():
    @dataclass
    class Graph:
        nodes: torch.Tensor

    with pytest.raises(ValueError, match="test: a batch has tensors of 4 and 8 rows, so that no share of it"):
        first_rows((rows(8), rows(4)), 1 / 2, caller="test")
    with pytest.raises(ValueError, match="test: a batch has no tensor with rows"):
        first_rows({"a": torch.tensor(1.0)}, 1 / 2, caller="test")
    with pytest.raises(ValueError, match="test: a batch holds a Graph, of which no share can be taken"):
        first_rows([rows(8), Graph(rows(8))], 1 / 2, caller="test")
    with pytest.raises(ValueError, match="so that no share of it can be taken"):
        first_rows(pack_sequence([torch.zeros(3), torch.zeros(2)]), 1 / 2, caller="test")
    with pytest.raises(ValueError, match="tensors of 0 rows"):
        first_rows(rows(0), 1 / 2, caller="test")


def sequences(n=8, time=12):
    return [torch.randn(time, 4) for _ in range(n)]


def zipped(*rows):
    return tuple(zip(*rows, strict=True))


@pytest.mark.parametrize(
    "batch",
    [
        zipped(*[(x, i % 3) for i, x in enumerate(sequences())]),
        zipped(*[(x, torch.tensor(1)) for x in sequences()]),
        zipped(*[(x, "cat") for x in sequences()]),
        zipped(*[(x, x[:, 0].long()) for x in sequences()]),
        {"x": sequences(), "y": [0] * 8},
        {"x": sequences(), "tags": [x[:, 0].long() for x in sequences()]},
        [{"ids": torch.arange(12), "mask": torch.ones(12)} for _ in range(8)],
        [{"x": x, "y": 1} for x in sequences()],
        [(x, 1) for x in sequences()],
        [Pair(x, 1) for x in sequences()],
        ([x[:1] for x in sequences()], [{"label": torch.tensor([1])} for _ in range(8)]),
        zipped((sequences(1)[0], 1)),
        [{"x": sequences(1)[0], "y": 1}],
    ],
    ids=[
        "sequences and numbers",
        "sequences and scalars",
        "sequences and text",
        "sequences and tags",
        "dict of lists with numbers",
        "dict of lists with tags",
        "dicts",
        "dicts with numbers",
        "tuples",
        "named tuples",
        "one row each",
        "a single row",
        "a single dict",
    ],
)
def test_lists_that_may_be_the_rows_are_not_cut_along_another_dimension(batch):
    with pytest.raises(ValueError, match=r"test: a batch has a list of \d .*nothing tells which of these are the rows"):
        first_rows(batch, 1 / 4, caller="test")
    with pytest.raises(
        ValueError, match=r"let collate_fn stack or pad rows to one tensor, name every tensor in a dict"
    ):
        taken_share(batch, 1 / 4, caller="test")


@pytest.mark.parametrize(
    "batch",
    [
        (rows(), rows()),
        [rows()],
        {"views": [rows()] * 3},
        {"views": [rows()] * 8, "names": ["a"] * 8},
        {"views": [rows()] * 2, "names": ["a"] * 8, "size": (224, 224)},
        ([[rows(), rows()], [rows(), rows()]], torch.arange(8)),
        {"loaders": {"a": (rows(), torch.arange(8)), "b": (rows(), torch.arange(8))}},
        ([rows(), torch.arange(8)], 3, [1, 2]),
    ],
    ids=[
        "inputs and targets alike",
        "one column",
        "views",
        "as many views as rows",
        "views, names, size",
        "pairs of pairs",
        "two loaders",
        "unlike columns",
    ],
)
def test_lists_of_columns_are_cut_by_rows(batch):
    assert taken_share(batch, 1 / 4, caller="test") == 1 / 4
    found = first_rows(batch, 1 / 4, caller="test")
    tensors = torch.utils._pytree.tree_leaves(found)
    assert {len(leaf) for leaf in tensors if isinstance(leaf, torch.Tensor)} == {2}


def test_a_shape_is_no_list_of_something_for_each_row():
    x = rows(2)
    assert first_rows((x, x.shape), 1 / 2, caller="test")[1] == x.shape
