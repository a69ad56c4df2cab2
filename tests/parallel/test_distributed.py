"""Several processes on gloo: equal replicas, equal to one process, and no byte too many."""

import re
from pathlib import Path

import processes
import pytest
import replicas
import torch
from pages import ROOT
from tolerances import DIFFERENCES_FACTOR, PROCESSES_RTOL
from training import assert_same_bits, assert_same_state, closure_of, make_batch, make_net

from sassha_fast import GSASSHA, MSASSHA, SASSHA, reference
from sassha_fast._parallel.reducer import is_parallel

LONG = ("drift", "two_dimensional")
IN_THREE = ["closure", "closure_sync", "closure_sync_fd", "local", "synced_fd", "half_fd", "closure_fd"]
IN_THREE += ["uneven", "shards", "probes", "seven"]
IN_FOUR = ["probes", "two_dimensional"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    names = [name for name in processes.SCENARIOS if name not in LONG]
    return processes.run(2, names, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return processes.run(3, IN_THREE, tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return processes.run(4, IN_FOUR, tmp_path_factory.mktemp("four"))


@pytest.fixture(params=[2, 3])
def several(request):
    return request.getfixturevalue({2: "two", 3: "three"}[request.param])


def alone(steps=30, dtype=torch.float64, factor=1.0, method=SASSHA, **options):
    """One process on the joined batch."""
    net = make_net(dtype)
    opt = method(net.parameters(), **{**replicas.OPTIONS, **options})
    loss = replicas.part_loss(net, dtype, 0, 1)
    for _ in range(steps):
        opt.step(closure_of(opt, lambda: loss() * factor))
    return replicas.results(net, opt)


def assert_close(found, expected, dtype=torch.float64):
    for a, b in zip(found["params"], expected["params"], strict=True):
        assert (a - b).norm() <= PROCESSES_RTOL[dtype] * b.norm()


def assert_same_run(found, expected):
    assert_same_bits(found["params"], expected["params"])
    assert_same_state(found["state"], expected["state"])


def test_words_that_no_process_has_in_its_products_keep_their_curvature_as_in_one(two):
    first, second = two["rare_words"]
    assert_same_bits(first["params"], second["params"])
    assert_same_state(first["state"], second["state"])
    assert_close(first, replicas.rare_words(1, 0))


def test_products_that_show_nothing_in_any_process_are_no_refresh(two):
    first, second = two["nothing_in_products"]
    assert first["counts"] == second["counts"] == [(1, 0), (2, 0), (2, 1), (3, 1)]
    assert_same_bits(first["params"], second["params"])
    assert_same_state(first["state"], second["state"])


def test_shards_agree_on_what_a_part_has_shown(two):
    """A process whose shard had nothing to tell counted by itself, and would have refreshed by itself at last."""
    for rank in two["shards_rare_words"]:
        assert rank["shared"]["counts"] == rank["alone"]["counts"] == [(1, 0), (1, 1)]
        assert rank["shared"]["traces"] == pytest.approx(rank["alone"]["traces"], rel=1e-9)


def test_whoever_joins_a_group_ends_by_stop():
    """A process that returns instead may abort at its exit, seldom, and more often where the machine is busy."""
    joining = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in ("bench", "docs", "examples", "tests", "tools")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".md")
        and path != Path(__file__)
        and path.name != "test_ddp_graph.py"  # a group of one, in the process of the tests
    }
    joining = {name: text for name, text in joining.items() if "init_process_group(" in text}
    assert joining.keys() == {"examples/lib/launch.py", "tests/support/processes.py", "tests/support/trainers.py"}
    assert [
        name for name, text in joining.items() if not re.search(r"^(    stop\(\)|def stop\(\).*)$", text, re.M)
    ] == []


def test_replicas_are_equal_to_the_last_bit(several):
    for ranks in several.values():
        if "params" in ranks[0]:
            for other in ranks[1:]:
                assert_same_bits(other["params"], ranks[0]["params"])
            if "state" in ranks[0]:
                assert_same_state(ranks[1]["state"], ranks[0]["state"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("closure_sync", {}),
        ("closure_sync_fd", {"hvp": "finite_difference"}),
        ("synced_fd", {"hvp": "finite_difference"}),
    ],
)
def test_global_ascent_equals_one_process_on_the_joined_batch(several, name, options):
    found = several[name][0]
    assert found["refreshes"] == 3
    assert_close(found, alone(**options))


def test_an_ascent_from_another_batch_equals_one_process_on_the_joined_batches(two):
    net = make_net(torch.float64)
    opt = SASSHA(net.parameters(), **replicas.OPTIONS)
    loss = replicas.part_loss(net, torch.float64, 0, 1)
    half = replicas.part_loss(net, torch.float64, 0, 1, rows=replicas.ROWS // 2)
    for _ in range(30):
        opt.step(closure_of(opt, loss), ascent_closure=closure_of(opt, half))
    assert_close(two["ascent_sync"][0], replicas.results(net, opt))
    assert_same_run(two["ascent"][0], two["ascent_by_hand"][0])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("momentum", {"method": MSASSHA}),
        ("momentum_fd", {"method": MSASSHA, "hvp": "finite_difference"}),
        ("shards_momentum", {"method": MSASSHA, "hvp": "finite_difference"}),
        ("gap_sync", {"method": GSASSHA, "alpha": 0.3}),
        ("shards_gap", {"method": GSASSHA, "alpha": 0.3, "hvp": "finite_difference"}),
    ],
)
def test_variants_equal_one_process_on_the_joined_batch(two, name, options):
    expected = alone(**options)
    assert two[name][0]["refreshes"] == 3
    assert_close(two[name][0], expected)
    if options["method"] is MSASSHA:
        for found, wanted in zip(two[name][0]["state"], expected["state"], strict=True):
            assert (found["weight"] - wanted["weight"]).norm() <= PROCESSES_RTOL[torch.float64] * wanted[
                "weight"
            ].norm()


def test_one_step_in_float32_equals_one_process(two):
    assert_close(two["one_step_sync"][0], alone(1, torch.float32), torch.float32)


def test_sums_are_the_joined_loss_times_the_processes(two):
    assert_close(two["closure_sum"][0], alone(3, factor=2.0))


def test_the_authors_loop_equals_the_closure(several):
    assert_same_run(several["local"][0], several["closure"][0])
    assert any((a != b).any() for a, b in zip(several["local"][0]["params"], alone()["params"], strict=True))


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("local_found_out", "local"),
        ("local_told", "local"),
        ("bucket_view", "local"),
        ("local_sync", "closure_sync"),
        ("momentum_by_hand", "momentum"),
        ("gap_local", "gap"),
        ("gap_bucket_view", "gap"),
        ("synced_fd_found_out", "synced_fd"),
        ("synced_bucket_view_fd", "synced_fd"),
    ],
)
def test_who_reduces_does_not_matter_nor_who_says_so(two, name, same):
    assert_same_run(two[name][0], two[same][0])


def test_a_second_pass_reduced_by_ddp_is_not_reduced_again(several):
    """Local ascent, global descent, of which DDP or we do the reduction."""
    assert_close(several["half_fd"][0], several["closure_fd"][0])


@pytest.mark.parametrize("name", ["different", "different_fd"])
def test_processes_that_use_other_parameters_agree(two, name):
    found = two[name][0]
    start = [p.detach() for p in replicas.TwoHeads().double().parameters()]
    moved = [bool((a != b).any()) for a, b in zip(found["params"], start, strict=True)]
    assert moved == [True] * 6 + [False] * 2
    assert [entry.get("step") for entry in found["state"]] == [8, 8, 8, 8, 7, 7, None, None]


def test_a_layer_that_is_frozen_in_all_processes_rests_until_it_is_trained_again(two):
    found = two["frozen_sync"][0]
    net = make_net(torch.float64)
    opt = SASSHA(net.parameters(), **{**replicas.OPTIONS, "lazy_hessian": 4})
    assert_close(found, replicas.freezing(net, opt, replicas.part_loss(net, torch.float64, 0, 1)))
    for name in ("frozen", "frozen_sync"):
        assert_same_bits(two[name][0]["seen"][:1], two[name][0]["seen"][1:])
        assert [entry["step"] for entry in two[name][0]["state"]] == [6, 6, 9, 9, 9, 9]


def test_a_layer_that_one_process_has_frozen_is_trained_by_the_others_in_all(two):
    """That replicas are equal is tested with all others."""
    found = two["frozen_in_one"]
    assert not torch.equal(*found[1]["seen"])
    assert [entry["step"] for entry in found[1]["state"]] == [9] * 6


def test_a_gradient_of_a_layer_that_was_frozen_since_is_reduced(two):
    one, other = two["frozen_late"]
    assert_same_bits(one["params"], other["params"])
    assert not torch.equal(one["params"][0], make_net(torch.float64)[0].weight)


def test_gradients_that_were_replaced_after_they_were_reduced_are_not_reduced_again(two):
    for found in two["replaced_after_metric"]:
        assert_same_bits(found["params"], two["replaced"][0]["params"])


@pytest.mark.parametrize("name", ["seven", "seven_momentum", "eight_local", "shards_seven"])
def test_compact_state_trains_in_several_processes(two, name):
    """Replicas are equal to the bit, see above; here they have moved, and refreshed."""
    found, started = two[name][0], make_net(two[name][0]["params"][0].dtype)
    assert found["refreshes"] == 3
    for p, start in zip(found["params"], started.parameters(), strict=True):
        assert not torch.equal(p, start)


@pytest.mark.parametrize("name", ["uneven", "uneven_sync", "uneven_momentum"])
def test_a_process_without_data_takes_the_steps_of_the_others(two, name):
    for rank in two[name]:
        assert {entry["step"] for entry in rank["state"]} == {4}


def test_a_process_without_data_knows_lost_products_from_curvatures_of_zero(two):
    """That replicas are equal is tested with all others."""
    first, second = two["uneven_amp"]
    assert first["unknown"] == second["unknown"] > 0
    assert first["params"][0].abs().max() < 10


def test_a_process_without_data_takes_the_steps_of_sam(two):
    assert [rank["ascents"] for rank in two["uneven_sam"]] == [4, 4]


@pytest.mark.parametrize("name", ["broken_closure", "broken_local"])
def test_a_process_whose_gradient_is_not_a_number_makes_all_skip_the_step(two, name):
    for rank in two[name]:
        assert rank["skipped"] == 1
        assert {entry["step"] for entry in rank["state"]} == {5}
        assert all(torch.isfinite(p).all() for p in rank["params"])


def test_overflow_in_one_process_lowers_the_scale_of_all(two):
    assert [rank["scale"] for rank in two["scaled"]] == [1024.0, 1024.0]
    assert [rank["scale"] for rank in two["scaled_overflow"]] == [512.0, 512.0]
    assert [rank["skipped"] for rank in two["scaled_overflow"]] == [1, 1]


def test_bytes_sent_are_those_of_ddp_and_nothing_for_the_hessian_between_refreshes(two):
    """A bitmap and the gradients, once with local ascent and twice with global; products beside them on a refresh.

    Ordinary steps send gradients while the pass runs, and the bitmap, which then has a byte for every bucket, after it.
    On a refresh it has two: whether products of 0 are lost ones, and whether they are of other batches.
    """
    local, synced = two["traffic"][0], two["traffic_sync"][0]
    bitmap, grads = local["n"], local["bytes"]
    assert local["traffic"] == [[bitmap + 2, 2 * grads], [grads, bitmap + 1], [grads, bitmap + 1]]
    assert synced["traffic"] == [
        [bitmap, grads, bitmap + 2, 2 * grads],
        [grads, bitmap + 1, grads, bitmap + 1],
        [grads, bitmap + 1, grads, bitmap + 1],
    ]


def test_gradients_travel_while_the_backward_pass_computes_others(two):
    """On an ordinary step, all buckets but the last are under way before the first layer's gradient is there."""
    found = two["overlap"][0]
    assert found["launched"] == [(5, 6)]
    assert_close(found, {"params": two["overlap_off"][0]["params"]})


def test_gradients_of_several_micro_batches_travel_during_the_last(two):
    found = two["overlap_accumulated"][0]
    assert found["launched"] == [(0, 6), (5, 6)]
    assert_close(found, {"params": two["overlap_accumulated_off"][0]["params"]})


def test_a_closure_with_several_backward_passes_sends_its_gradients_again(two):
    assert_close(two["grown"][0], alone(12, hvp="finite_difference"))
    assert two["grown"][0]["stale"]


@pytest.mark.parametrize("way", ["changed_in_place", "changed_by_others"])
def test_gradients_that_a_closure_changes_after_its_backward_pass_are_those_that_travel(two, way):
    first, second = two[way]
    assert first["moved"] == second["moved"] == 0.0
    assert_same_run(first, second)


def test_gradients_that_a_closure_clips_travel_clipped(two):
    first, second = two["changed_by_clipping"]
    assert max(first["norms"]) <= 1e-3 * (1 + 1e-6)
    assert_same_run(first, second)


def test_buffers_of_the_first_process_are_those_of_all_in_the_passes_of_a_closure(two):
    first, second = two["buffers"]
    assert first["seen"] == second["seen"]
    assert first["after"] == second["after"] == 101


def test_what_ddp_can_not_do_and_what_nobody_reduces_is_said(two):
    for found in two["refused_by_attached_models"]:
        assert "the attached DDP model has static_graph=True" in found["static"]
        assert "Join was given the DDP model beside the optimizer" in found["join"]
        assert "parameters of the attached model, 2.weight among them, belong to another optimizer" in found["others"]


def test_what_is_ambiguous_is_refused_and_leaves_the_weights(two):
    closure, summed, join = two["ambiguous"][0]["messages"]
    assert "one of 2" in closure
    assert "call opt.attach(ddp_model)" in closure
    assert "gradients are equal in all processes" in summed
    assert "it is not known who reduces gradients" in join
    assert_same_bits(two["ambiguous"][0]["params"], [p.detach() for p in make_net().parameters()])


# ---- shards -------------------------------------------------------------------------------------------------------


def with_and_without_ddp():
    for method in (SASSHA, GSASSHA, MSASSHA):
        nets = [make_net(), make_net()]
        for net, model in zip(nets, (nets[0], torch.nn.parallel.DistributedDataParallel(nets[1])), strict=True):
            opt = method(net.parameters(), lr=0.03, rho=0.05, lazy_hessian=2)
            opt.attach(model)
            x, y = make_batch()

            def closure(opt=opt, model=model, x=x, y=y):
                opt.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                return loss

            for _ in range(5):
                opt.step(closure)
        assert_same_bits(list(nets[1].parameters()), list(nets[0].parameters()))


def test_ddp_of_one_process_equals_no_ddp():
    processes.start(1, with_and_without_ddp)


def test_shards_equal_one_process_and_ddp(several):
    found, expected = several["shards"][0], alone(hvp="finite_difference")
    assert found["refreshes"] == 3
    assert_close(found, expected)
    assert_close(found, several["closure_sync_fd"][0])


def test_one_step_of_shards_in_float32_equals_one_process(two):
    found, expected = two["shards_one_step"][0], alone(1, torch.float32, hvp="finite_difference")
    for a, b in zip(found["params"], expected["params"], strict=True):
        assert (a - b).norm() <= DIFFERENCES_FACTOR * PROCESSES_RTOL[torch.float32] * b.norm()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shards_central", {"hvp": "central_difference"}),
        ("shards_clipped", {"hvp": "finite_difference", "steps": 12, "max_grad_norm": 0.1, "adaptive": True}),
    ],
)
def test_options_hold_for_shards(two, name, options):
    assert_close(two[name][0], alone(**options))


@pytest.mark.parametrize("name", ["shards_collectives", "shards_collectives_momentum"])
def test_shards_send_what_fsdp_sends_for_their_passes_and_a_vector_of_norms(two, name):
    """A refresh has a probe's pass, and also reduces the norm of the weights, what was seen and what was not."""
    found, passes = two[name][0], 1 if name.endswith("momentum") else 2
    gathers, scatters = found["pass"]["_allgather_base_"], found["pass"]["_reduce_scatter_base_"]
    assert found["pass"] == {"_allgather_base_": gathers, "_reduce_scatter_base_": scatters}
    for step, n, norms in (("ordinary", passes, 1), ("refresh", passes + 1, 4)):
        expected = {"_allgather_base_": n * gathers, "_reduce_scatter_base_": n * scatters, "allreduce_": norms}
        assert found[step] == expected


@pytest.mark.parametrize(
    "name", ["shards_reference", "shards_simulated", "shards_triton", "shards_kept", "shards_offloaded"]
)
def test_backend_policy_and_copies_left_unsharded_do_not_matter(two, name):
    assert_same_run(two[name][0], two["shards_cpu"][0])


def test_the_calls_equal_the_closure_on_shards(two):
    assert_same_run(two["shards_by_calls"][0], two["shards"][0])


def test_mixed_precision_of_shards_trains(two):
    found = two["shards_mixed"][0]
    start = [p.detach() for p in make_net().parameters()]
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in found["params"])
    assert all((p != q).any() for p, q in zip(found["params"], start, strict=True))


@pytest.mark.parametrize("processes_name", ["two", "three", "four"])
def test_probes_do_not_depend_on_the_sharding(request, processes_name):
    expected = [reference.rademacher(p, i, 5, 6) for i, p in enumerate(make_net().parameters())]
    for rank in request.getfixturevalue(processes_name)["probes"]:
        assert_same_bits(rank["probes"], expected)


def test_a_mesh_of_two_dimensions_equals_one_process(four):
    found = four["two_dimensional"][0]
    assert_close(found, alone(12, hvp="finite_difference"))
    expected = [reference.rademacher(p.double(), i, 5, 6) for i, p in enumerate(make_net().parameters())]
    assert_same_bits(found["probes"], expected)


def test_exact_products_of_shards_are_refused_and_leave_the_weights(two):
    found = two["exact_shards"][0]
    assert "construct SASSHA with hvp='finite_difference'" in found["messages"][0]
    assert_same_bits(found["params"], found["before"])


def test_one_process_is_not_parallel():
    assert not is_parallel()


@pytest.mark.slow
def test_replicas_do_not_drift_over_a_thousand_steps(tmp_path):
    first, second = processes.run(2, ["drift"], tmp_path)["drift"]
    assert_same_run(first, second)
