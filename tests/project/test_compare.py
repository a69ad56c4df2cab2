"""``examples.compare``: what it chooses, counts, reports and keeps, on tasks of seconds."""

import json
import sys
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")
pytest.importorskip("scipy")
from PIL import Image

from examples import compare
from examples.lib import tasks, trials

pytestmark = pytest.mark.product


@pytest.fixture(autouse=True)
def little(monkeypatch):
    """One thread, sequences and batches of a few."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    sizes = {"HELD_OUT": 1, "SEQUENCES": 4, "LENGTH": 16, "LAYERS": 1, "WIDTH": 8, "MEASURED": 1}
    for name, value in {**sizes, "BATCH": 16, "VALIDATION": 16, "FEW": 8, "WIDTHS": (4, 8)}.items():
        monkeypatch.setattr(tasks, name, value)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def play(tmp_path):
    path = tmp_path / "play.txt"
    path.write_text("to be, or not to be: that is the question.\n" * 15)
    return path


@pytest.fixture
def tree(tmp_path):
    """48 + 16 pictures of two classes: dark and bright noise."""
    folder, draw = tmp_path / "pictures", np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for name, low in (("bright", 128), ("dark", 0)):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(low, low + 128, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{i:02d}.png")
    return folder


def little_task(name, load, **options):
    given = {
        "epochs": 2,
        "grid_epochs": 1,
        "decay": 1e-5,
        "rates": {"sgd": (1e-6, 0.05), "sassha-quarter": (1e-6, 0.05)},
        "radii": (0.01, 0.02),
    }
    return trials.Task(name, "Little", load, **{**given, **options})


def page_of(folder, task):
    """An empty page of a task."""
    page = folder / "docs" / f"{task.name}.md"
    page.parent.mkdir(exist_ok=True)
    names = [*(f"table {noise:.0%}" for noise in task.noises), "grid"]
    page.write_text("".join(f"before\n<!-- {name}: begin -->\nold\n<!-- {name}: end -->\nafter\n" for name in names))
    return page


def compared(task, data, folder, monkeypatch, *more):
    """A comparison in this process, and its results."""
    monkeypatch.setattr(compare, "ROOT", folder)
    monkeypatch.setattr(tasks, "TASKS", {task.name: task})
    monkeypatch.setattr(tasks, "CACHE", folder / "cache")
    monkeypatch.setattr(sys, "argv", ["compare", task.name, "--data", str(data), "--jobs", "1", *more])
    compare.main()
    return (folder / "docs" / "results" / f"{task.name}.jsonl").read_text()


def test_the_comparison_chooses_reports_and_resumes(play, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "SEEDS", (0, 1))
    task = little_task("shakespeare", tasks.load_text, stops_early=True)
    page = page_of(tmp_path, task)
    results = compared(task, play, tmp_path, monkeypatch)
    rows = [json.loads(line) for line in results.splitlines()]
    assert len(rows) == 2 + 3 + 4  # two rates of both, another radius of one, and two seeds of both
    assert [row["epochs"] for row in rows] == [1] * 5 + [2] * 4
    assert all(set(row) >= {"test_loss", "eigenvalue", "trace"} for row in rows[5:])
    text_ = page.read_text()
    assert "old" not in text_
    assert text_.count("before\n") == text_.count("after\n") == 2
    begins = ("| SGD | 0.05 |", "| SASSHA from quarters | 0.05 |")
    shown = [line for line in text_.splitlines() if line.startswith(begins)]
    assert [line.split("|")[-2].strip() for line in shown] == ["2", "2"]
    assert (tmp_path / "docs" / "shakespeare.png").stat().st_size > 10_000
    assert compared(task, play, tmp_path, monkeypatch) == results
    assert page.read_text() == text_
    kept = tmp_path / "docs" / "results" / "shakespeare.jsonl"
    stopped = "".join(results.splitlines(keepends=True)[:-1])
    kept.write_text(stopped)
    assert compared(task, play, tmp_path, monkeypatch, "--report") == stopped
    shown = [line for line in page.read_text().splitlines() if line.startswith(begins)]
    assert [line.split("|")[-2].strip() for line in shown] == ["2", "1"]
    assert "Runs that are missing: SASSHA from quarters (1); `make compare` runs them." in page.read_text()
    again = [json.loads(line) for line in compared(task, play, tmp_path, monkeypatch).splitlines()]
    assert [{**row, "seconds": 0} for row in again] == [{**row, "seconds": 0} for row in rows]


def test_the_comparison_of_pictures_has_wrong_labels_in_training_alone(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "SEEDS", (0,))
    few = {"rates": {"sgd": (0.05,), "sassha-quarter": (0.05,)}, "grid_epochs": 2}
    task = little_task("cifar10", partial(tasks.load_pictures, size=32), noises=(0.0, 0.5), **few)
    page_of(tmp_path, task)
    rows = [json.loads(line) for line in compared(task, tree, tmp_path, monkeypatch).splitlines()]
    assert [row["noise"] for row in rows] == [0.0] * 5 + [0.5] * 2
    assert all(row["best"]["step"] == 4 for row in rows)
    clean, wrong = (task.load(tree, noise, 0) for noise in (0.0, 0.5))
    for a, b in zip(clean.data.train(0, 0), wrong.data.train(0, 0), strict=True):
        assert torch.equal(a[0], b[0])
        assert not torch.equal(a[1], b[1])
    for a, b in zip([*clean.data.validation(), *clean.test], [*wrong.data.validation(), *wrong.test], strict=True):
        assert torch.equal(a[1], b[1])


def test_the_comparison_has_a_row_of_what_suggest_says_of_the_best_adamw(play, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "SEEDS", (0,))
    task = little_task("shakespeare", tasks.load_text, rates={"adamw": (1e-6, 1e-3), "sassha": (0.1,)}, radii=(0.01,))
    page = page_of(tmp_path, task)
    results = compared(task, play, tmp_path, monkeypatch)
    rows = {row["method"]: row for row in map(json.loads, results.splitlines())}
    assert rows["suggestion"]["lr"] == rows["adamw"]["lr"]
    found, row = rows["suggestion"]["found"], rows["sassha-suggested"]
    assert (row["lr"], row["rho"], row["epochs"]) == (found["lr"], found["rho"], task.epochs)
    assert row["curve"] != rows["sassha"]["curve"]
    titles = [line.split("|")[1].strip() for line in page.read_text().splitlines() if line.startswith("| ")]
    assert titles[:5] == ["optimizer", "AdamW", "SASSHA", "SASSHA as suggested", "optimizer"]
    assert compared(task, play, tmp_path, monkeypatch) == results


def test_runs_count_their_gradients(play):
    given = tasks.load_text(play, 0.0, 0)
    x, y = next(given.data.train(0, 0))
    product = trials.PRODUCT
    expected = {"sgd": (1, 1), "sam": (2, 2), "sassha": (2 + product, 2), "m-sassha": (1 + product, 1)}
    expected["sassha-quarter"] = (1.25 + (1 + product) / 4, 1.25)
    for method, counts in expected.items():
        run = trials.Trained(trials.Cell("shakespeare", 0.0, method, 0.01, 0.01, 0, 1), given, 0.0)
        for count in counts:
            before = run.gradients
            run.step(x, y)
            assert run.gradients - before == pytest.approx(count), method


def test_a_run_that_diverges_is_kept_as_lost(play, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "SEEDS", (0,))
    task = little_task("shakespeare", tasks.load_text, rates={"sgd": (1e20,)})
    page = page_of(tmp_path, task)
    rows = [json.loads(line) for line in compared(task, play, tmp_path, monkeypatch).splitlines()]
    assert [(row["diverged"], row["best"]) for row in rows] == [(True, None)] * 2
    assert "| SGD | **1e+20: lost** |" in page.read_text()
    assert "| SGD | 1e+20 |" in page.read_text()
    assert "| 1 lost |" in page.read_text()


def test_a_part_of_the_comparison_can_be_run_alone(play, tmp_path, monkeypatch):
    task = little_task("shakespeare", tasks.load_text, rates={"sgd": (0.05,), "adamw": (0.001,)})
    page = page_of(tmp_path, task)
    results = compared(task, play, tmp_path, monkeypatch, "--seed", "1", "--noise", "0", "--method", "adamw")
    rows = [json.loads(line) for line in results.splitlines()]
    assert [(row["method"], row["seed"]) for row in rows] == [("sgd", 100), ("adamw", 100), ("adamw", 1)]
    assert "| SGD | 0.05 |" not in page.read_text()


def test_a_page_without_runs_says_so(play, tmp_path, monkeypatch):
    task = little_task("shakespeare", tasks.load_text, noises=(0.0, 0.2))
    page = page_of(tmp_path, task)
    (tmp_path / "docs" / "results").mkdir()
    (tmp_path / "docs" / "results" / "shakespeare.jsonl").write_text("")
    assert compared(task, play, tmp_path, monkeypatch, "--report") == ""
    assert page.read_text().count("Nothing of this has been run yet") == 2
