"""``examples.compact``: what it trains, keeps, goes on with and writes, in steps of digits."""

import json
import sys

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from examples import compact

pytestmark = pytest.mark.product

STEPS = 6


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Checkpoints in a folder of the test, every second step."""
    monkeypatch.setattr(compact, "CHECKPOINTS", tmp_path)
    monkeypatch.setattr(compact, "SAVE_EVERY", 2)
    monkeypatch.setattr(compact, "MEASURE", 3)


def run(tmp_path, monkeypatch, *arguments):
    paths = ["--results", str(tmp_path / "runs.jsonl"), "--page", str(tmp_path / "page.md")]
    monkeypatch.setattr(sys, "argv", ["compact", "digits", "--steps", str(STEPS), *paths, *arguments])
    compact.main()
    return [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]


def test_what_has_been_run_is_kept_and_the_page_has_a_row_for_each(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- digits: begin -->\n<!-- digits: end -->\nafter\n")
    first = run(tmp_path, monkeypatch, "--seeds", "1", "--only", "float32", "8-bit state")
    assert [row["run"] for row in first] == [["digits", name, 0, STEPS] for name in ("float32", "8-bit state")]
    assert all([point[0] for point in row["curve"]] == [2, 4, 6] for row in first)
    rows = run(tmp_path, monkeypatch, "--seeds", "1")
    assert rows[:2] == first
    assert {row["run"][1] for row in rows} == set(compact.SETTINGS)
    assert len(rows) == len(compact.SETTINGS)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    for name in compact.SETTINGS:
        assert f"| {name} | 1 | " in text
    assert (tmp_path / "page-digits.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["float32", "8-bit state", "bfloat16, 24-bit masters, 8-bit state"])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch, name):
    args = type("Args", (), {"steps": STEPS})
    task, setting = compact.digits(args), compact.SETTINGS[name]
    with setting.code():
        whole = compact.train(task, setting, 0, tmp_path / "whole.pt")
        kept, batch, calls = tmp_path / "run.pt", task.batch, iter(range(100))

        def stopping(seed, step):
            if next(calls) == 5:
                raise KeyboardInterrupt
            return batch(seed, step)

        stopped = compact.Task(**{**vars(task), "batch": stopping})
        with pytest.raises(KeyboardInterrupt):
            compact.train(stopped, setting, 0, kept)
        assert kept.exists()
        assert compact.train(task, setting, 0, kept) == whole
    assert not kept.exists()
