"""Checkpoints of torch.distributed.checkpoint: saved by some processes, loaded by more, fewer or one."""

import processes
import pytest
import torch
from tolerances import CURVATURE_RTOL, MOMENTUM_BOUND, PROCESSES_RTOL
from training import assert_same_bits, assert_same_state


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Everything that is saved goes on for five steps; everything that is resumed takes the same five."""
    folder = tmp_path_factory.mktemp("checkpoints")
    by_two, replicated, meanwhile, by_three, by_one, perturbed, settled = (f"{folder}/{name}" for name in "abcdefg")
    seven, flat = f"{folder}/seven", f"{folder}/flat"
    plan = [
        (2, {"saved_by_two": f"save:shards:{by_two}", "saved_by_replicas": f"save:replicas:{replicated}"}),
        (2, {"asynchronous": f"save_async:shards:{meanwhile}", "two_by_two": f"resume:shards:{by_two}"}),
        (2, {"two_used": f"resume_used:shards:{by_two}", "replicas_by_two": f"resume:replicas:{by_two}"}),
        (2, {"two_by_replicas": f"resume:shards:{replicated}", "two_meanwhile": f"resume:shards:{meanwhile}"}),
        (2, {"m_saved": f"save:shards+m:{perturbed}", "m_settled": f"save_evaluating:shards+m:{settled}"}),
        (2, {"m_resumed": f"resume:shards+m:{perturbed}", "m_from_settled": f"resume_used:shards+m:{settled}"}),
        (3, {"three_by_two": f"resume:shards:{by_two}", "saved_by_three": f"save:shards:{by_three}"}),
        (3, {"m_by_three": f"resume:shards+m:{perturbed}"}),
        (1, {"one_by_two": f"resume:alone:{by_two}", "saved_by_one": f"save:alone:{by_one}"}),
        (1, {"m_by_one": f"resume:alone+m:{settled}"}),
        (2, {"seven_saved": f"save:shards+seven:{seven}", "seven_resumed": f"resume_used:shards+seven:{seven}"}),
        (2, {"flat_saved": f"save_flat:shards+seven:{flat}", "flat_resumed": f"resume_flat:shards+seven:{flat}"}),
        (2, {"moved": "moved"}),
        (2, {"two_by_three": f"resume:shards:{by_three}", "two_by_one": f"resume:shards:{by_one}"}),
    ]
    found, sizes = {}, []
    for size, named in plan:  # neighbours of one size share their processes
        if sizes and sizes[-1][0] == size:
            sizes[-1][1].update(named)
        else:
            sizes.append((size, dict(named)))
    for size, named in sizes:
        results = processes.run(size, list(named.values()), tmp_path_factory.mktemp("results"))
        found.update({label: results[scenario] for label, scenario in named.items()})
    return found


def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(runs):
    for resumed, saved in (
        ("two_by_two", "saved_by_two"),
        ("two_used", "saved_by_two"),
        ("two_meanwhile", "saved_by_two"),
        ("m_resumed", "m_saved"),
        ("m_from_settled", "m_saved"),
        ("m_settled", "m_saved"),
        ("seven_resumed", "seven_saved"),
        ("flat_resumed", "flat_saved"),
    ):
        for found, expected in zip(runs[resumed], runs[saved], strict=True):
            assert_same_bits(found["params"], expected["params"])
            assert_same_state(found["state"], expected["state"])


@pytest.mark.parametrize(
    ("resumed", "saved"),
    [
        ("three_by_two", "saved_by_two"),
        ("one_by_two", "saved_by_two"),
        ("replicas_by_two", "saved_by_two"),
        ("two_by_replicas", "saved_by_replicas"),
        ("two_by_three", "saved_by_three"),
        ("two_by_one", "saved_by_one"),
        ("m_by_three", "m_saved"),
        ("m_by_one", "m_saved"),
    ],
)
def test_checkpoints_move_between_numbers_of_processes_and_kinds_of_parameters(runs, resumed, saved):
    """All train on the same batch, so only the order of summation of norms and gradients differs."""
    found, expected = runs[resumed][0], runs[saved][0]
    for a, b in zip(found["params"], expected["params"], strict=True):
        assert (a - b).norm() <= PROCESSES_RTOL[torch.float64] * b.norm()
    assert [entry["step"] for entry in found["state"]] == [10] * 6
    assert [entry["hessian_step"] for entry in found["state"]] == [10] * 6


def test_compact_state_moves_from_shards_into_a_whole_network_and_back(runs):
    for moved in runs["moved"]:
        assert_same_bits(moved["found"]["params"], moved["expected"]["params"])
        sharded, whole = moved["masters"]
        assert all(torch.equal(sharded[key], whole[key]) for key in sharded)
        assert "is in shards, and its state in the checkpoint has codes of the whole parameter" in moved["message"]
        for target in ("found", "back"):
            for entry, wanted in zip(moved[target]["state"], moved["expected"]["state"], strict=True):
                m, d = wanted["exp_avg"], wanted["exp_hessian_diag"]
                assert (entry["exp_avg"] - m).abs().max() <= MOMENTUM_BOUND * m.abs().max()
                assert torch.allclose(entry["exp_hessian_diag"], d, rtol=2 * CURVATURE_RTOL, atol=0.0)
