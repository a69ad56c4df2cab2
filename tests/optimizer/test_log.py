"""The log of a run against what the run showed, and a resumed log against one that was never interrupted."""

import copy
import math

import pytest
import torch
from training import DEVICE, closure_of, make_batch, make_loss, make_net, three_calls

from sassha_fast import MSASSHA, SAM, SASSHA
from sassha_fast._measure.log_file import HEADER, columns, complete_lines, parsed
from sassha_fast.log import COLUMNS, StatsLog, read_log

OPTIMIZERS = {
    "SASSHA": lambda params: SASSHA(params, lr=0.02, rho=0.1, lazy_hessian=3),
    "capturable SASSHA": lambda params: SASSHA(params, lr=0.02, rho=0.1, lazy_hessian=3, capturable=True),
    "M-SASSHA": lambda params: MSASSHA(params, lr=0.02, rho=0.1, lazy_hessian=3),
    "SAM": lambda params: SAM(params, torch.optim.SGD, lr=0.02),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02),
}


def make(name="SASSHA"):
    net = make_net().to(DEVICE)
    opt = OPTIMIZERS[name](net.parameters())
    return net, opt, closure_of(opt, make_loss(net))


def nan_equal(a, b):
    return len(a) == len(b) and all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True))


# ---- what is logged -----------------------------------------------------------------------------------------------


def test_rows_are_what_every_step_showed_and_traces_are_on_refreshes_only(tmp_path):
    _, opt, closure = make()
    expected = {name: [] for name in COLUMNS}
    with StatsLog(opt, tmp_path / "run.csv"):
        for step in range(7):
            due = opt.hessian_due
            expected["loss"].append(float(opt.step(closure)))
            expected["step"].append(step)
            for name in ("grad_norm", "predicted_gap", "ascent_gap"):
                expected[name].append(float(getattr(opt.stats, name)))
            for name in ("trace", "negative_share"):
                expected[name].append(float(getattr(opt.stats, name)) if due else math.nan)
    found = read_log(tmp_path / "run.csv")
    assert list(found) == list(COLUMNS)
    for name in COLUMNS:
        assert nan_equal(found[name], expected[name]), name
    assert [math.isnan(value) for value in found["trace"]] == [False, True, True] * 2 + [False]


def test_three_calls_are_logged_with_the_loss_that_was_noted():
    net, opt, _ = make()
    log, loss = StatsLog(opt), make_loss(net)
    losses = []
    for _ in range(4):
        log.note(loss=loss())
        losses.append(three_calls(opt, loss))
    found = log.read()
    assert found["loss"] == losses
    assert all(map(math.isnan, found["ascent_gap"]))  # which three calls do not know
    assert all(value > 0 for value in found["predicted_gap"])


def test_a_noted_loss_goes_before_that_of_a_closure_and_is_used_once():
    _, opt, closure = make()
    log = StatsLog(opt)
    log.note(loss=7.5)
    opt.step(closure)
    second = float(opt.step(closure))
    assert log.read()["loss"] == [7.5, second]


def test_the_loss_of_micro_batches_is_their_sum_at_the_weights_themselves():
    net, opt, _ = make()
    x, y = make_batch()
    log = StatsLog(opt)

    def part(rows):
        def closure():
            loss = torch.nn.functional.cross_entropy(net(x[rows]), y[rows]) / 2
            loss.backward()
            return loss

        return closure

    returned = [float(opt.step(closure=[part(slice(0, 16)), part(slice(16, 32))])) for _ in range(3)]
    assert log.read()["loss"] == pytest.approx(returned, rel=1e-6)


def test_of_an_optimizer_without_statistics_only_the_loss_is_logged(tmp_path):
    _, opt, closure = make("AdamW")
    with StatsLog(opt, tmp_path / "run.csv") as log:
        losses = [opt.step(closure).item() for _ in range(3)]
        assert len(log.plot().axes) == 1
    lines = (tmp_path / "run.csv").read_text().splitlines()
    assert lines[1:] == [f"{step},{loss!r},,,,," for step, loss in enumerate(losses)]


def test_every_thins_the_rows_but_keeps_refreshes():
    _, opt, closure = make()
    log = StatsLog(opt, every=4)
    for _ in range(10):
        opt.step(closure)
    assert log.read()["step"] == [0, 3, 4, 6, 8, 9]  # refreshes at 0, 3, 6, 9


def test_a_skipped_step_has_no_row():
    net = make_net().to(DEVICE)
    opt = SASSHA(net.parameters(), lr=0.02, rho=0.1, skip_nonfinite=True)
    closure, broken = closure_of(opt, make_loss(net)), [True, False, True, False]
    log = StatsLog(opt)

    def sometimes():
        loss = closure()
        if now:
            net[0].weight.grad.fill_(math.inf)
        return loss

    for now in broken:  # noqa: B007 the closure reads it
        opt.step(sometimes)
    assert opt.stats.skipped_steps == 2
    assert log.read()["step"] == [0, 1]


def test_a_radius_of_zero_leaves_no_gap_of_an_earlier_step_behind():
    net = make_net().to(DEVICE)
    opt = SASSHA(net.parameters(), lr=0.02, rho_scheduler=lambda step: 0.1 if step == 0 else 0.0)
    log, closure = StatsLog(opt), closure_of(opt, make_loss(net))
    for _ in range(3):
        opt.step(closure)
    assert [math.isnan(value) for value in log.read()["predicted_gap"]] == [False, True, True]


def test_numbers_on_a_device_are_not_read_step_by_step_and_an_interrupt_loses_none():
    _, opt, closure = make("AdamW")
    log = StatsLog(opt, every=2)
    for _ in range(6):
        log.note(loss=torch.zeros((), device="meta"))  # whose numbers can't be read at all
        opt.step(closure)
    for written_by in (log.flush, opt.state_dict):  # a checkpoint and the log agree
        with pytest.raises(NotImplementedError):
            written_by()
    assert [row[0] for row in log._pending] == [0, 2, 4]


# ---- going on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("log_first", [True, False])
def test_a_resumed_log_is_that_of_an_uninterrupted_run(tmp_path, name, every, log_first):
    whole, parts = tmp_path / "whole.csv", tmp_path / "parts.csv"
    net, opt, closure = make(name)
    with StatsLog(opt, whole, every=every):
        for _ in range(11):
            opt.step(closure)

    net, opt, closure = make(name)
    with StatsLog(opt, parts, every=every):
        for _ in range(5):
            opt.step(closure)
        saved = copy.deepcopy((net.state_dict(), opt.state_dict()))
        for _ in range(3):  # beyond the checkpoint
            opt.step(closure)
    with parts.open("a") as file:
        file.write("8,0.12")  # killed while writing

    net, opt, closure = make(name)
    net.load_state_dict(saved[0])
    if not log_first:
        opt.load_state_dict(saved[1])
    with StatsLog(opt, parts, every=every):
        if log_first:
            opt.load_state_dict(saved[1])
        for _ in range(6):
            opt.step(closure)
    assert parts.read_bytes() == whole.read_bytes()
    assert len(whole.read_bytes().splitlines()) > 5


@pytest.mark.parametrize("path", [None, "run.csv"])
def test_a_run_that_goes_back_to_a_checkpoint_logs_the_steps_again(tmp_path, path):
    net, opt, closure = make()
    log = StatsLog(opt, path and tmp_path / path)
    for _ in range(4):
        opt.step(closure)
    saved = copy.deepcopy((net.state_dict(), opt.state_dict()))
    opt.step(closure)
    before = log.read()
    net.load_state_dict(saved[0])
    opt.load_state_dict(saved[1])
    opt.step(closure)
    after = log.read()
    log.close()
    assert after["step"] == [0, 1, 2, 3, 4]
    assert after["loss"] == before["loss"]


def test_an_optimizer_that_does_not_count_needs_the_step_to_go_on(tmp_path):
    path = tmp_path / "run.csv"

    def run(steps, **options):
        net = make_net().to(DEVICE)
        opt = torch.optim.SGD(net.parameters(), lr=0.01)
        closure = closure_of(opt, make_loss(net))
        with StatsLog(opt, path, **options):
            for _ in range(steps):
                opt.step(closure)

    run(4)
    kept = path.read_bytes()
    with pytest.raises(ValueError, match=r"SGD does not count steps.*pass step="):
        run(1)
    assert path.read_bytes() == kept
    run(3, step=2)
    assert read_log(path)["step"] == [0, 1, 2, 3, 4]
    run(1, step=0)
    assert read_log(path)["step"] == [0]


def test_a_header_that_was_cut_off_starts_again(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text(HEADER[:9])
    assert read_log(path)["step"] == []
    _, opt, closure = make("AdamW")
    with StatsLog(opt, path):
        opt.step(closure)
    assert path.read_text().startswith(HEADER + "0,")


# ---- the file -----------------------------------------------------------------------------------------------------


def test_files_that_are_no_logs_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "results.csv"
    _, opt, _ = make("AdamW")
    for text, message in (("epoch,accuracy\n1,2\n", "not a log's header"), (HEADER + "0,1\n0,,,,,,\n", "line 2 of")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            StatsLog(opt, path)
        assert path.read_text() == text


def test_lines_are_read_as_numbers_with_nan_for_what_is_empty(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text(HEADER + "0,1.5,,inf,,-2,\n1,2.5")
    assert complete_lines(path) == [HEADER.encode(), b"0,1.5,,inf,,-2,\n"]
    row = parsed(b"0,1.5,,inf,,-2,\n")
    assert nan_equal(row, [0.0, 1.5, math.nan, math.inf, math.nan, -2.0, math.nan])
    assert columns([row])["loss"] == [1.5]
    assert read_log(path)["trace"] == [-2.0]


def test_a_closed_log_lets_go_of_the_optimizer_also_after_an_error(tmp_path):
    _, opt, closure = make()

    def train():
        with StatsLog(opt, tmp_path / "run.csv"):
            opt.step(closure)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    opt.step(closure)
    assert read_log(tmp_path / "run.csv")["step"] == [0]
    assert not opt._optimizer_step_post_hooks


def test_a_closure_that_raises_leaves_no_row_and_the_next_step_is_logged():
    _, opt, closure = make()
    log = StatsLog(opt)

    def broken():
        closure()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        opt.step(broken)
    loss = float(opt.step(closure))
    assert log.read()["step"] == [0]
    assert log.read()["loss"] == [loss]


def test_logging_changes_no_bit_of_a_run():
    plain, opt, closure = make()
    for _ in range(5):
        opt.step(closure)
    logged, opt, closure = make()
    log = StatsLog(opt)
    for _ in range(5):
        opt.step(closure)
    log.read()
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), logged.parameters(), strict=True))


def test_bad_arguments_are_named():
    _, opt, _ = make()
    with pytest.raises(ValueError, match="StatsLog: every is 0, expected an integer of at least 1"):
        StatsLog(opt, every=0)
    with pytest.raises(ValueError, match="StatsLog: step is -1"):
        StatsLog(opt, step=-1)
    with pytest.raises(ValueError, match=r"loss is a tensor of shape \(2,\).*loss.mean"):
        StatsLog(opt).note(loss=torch.ones(2))
