"""``examples.cheaper`` and ``examples.rates``: what they run, keep and report, in seconds."""

import json

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

from examples import cheaper, rates
from examples.digits import load_splits

pytestmark = pytest.mark.product


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def page(folder, name, *parts):
    path = folder / "docs" / name
    path.parent.mkdir()
    path.write_text("".join(f"before\n<!-- {part}: begin -->\nold\n<!-- {part}: end -->\nafter\n" for part in parts))
    return path


@pytest.mark.parametrize("variant", cheaper.VARIANTS)
def test_every_variant_takes_the_rows_it_says(variant, monkeypatch):
    seen = []
    original = cheaper.Passes.__call__

    def noting(self, x, y, share, *, clipped=False):
        seen.append((share, clipped))
        return original(self, x, y, share, clipped=clipped)

    monkeypatch.setattr(cheaper.Passes, "__call__", noting)
    monkeypatch.setattr(cheaper, "alignment", lambda *_: [])
    chosen = cheaper.VARIANTS[variant]
    row = cheaper.train(chosen, (variant, 0.06, 0, 3), load_splits(torch.device("cpu")))
    first = [(chosen.ascent, chosen.ascent < 1), (1.0, False)]
    products = [(chosen.products, False)] if chosen.products < 1 else []
    assert seen[: 2 + len(products)] == [*first, *products]  # the first step refreshes
    assert seen[2 + len(products) :][:2] == first
    assert 2 < row["highest"] < 2.5
    assert row["at"] < 3


def test_clipped_elements_are_those_above_the_limit():
    net = torch.nn.Linear(3, 2)
    passes = cheaper.Passes(net, torch.optim.SGD(net.parameters(), 0.1), clip=0.5)
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    passes(x, y, 1.0)
    before = torch.cat([p.grad.flatten() for p in net.parameters()])
    passes(x, y, 1.0, clipped=True)
    after = torch.cat([p.grad.flatten() for p in net.parameters()])
    limit = 0.5 * before.square().mean().sqrt().item()
    torch.testing.assert_close(after, before.clamp(-limit, limit))
    assert not torch.equal(after, before)


def test_runs_of_cheaper_steps_are_kept_and_reported(tmp_path, monkeypatch):
    few = {name: cheaper.VARIANTS[name] for name in ("whole", "quarter")}
    sizes = {"EPOCHS": 1, "STEPS": 17, "EARLY_STEPS": 8, "SEEDS": (0, 1), "EARLY_RATES": (0.06, 10.0)}
    for name, value in {"ROOT": tmp_path, "VARIANTS": few, **sizes}.items():
        monkeypatch.setattr(cheaper, name, value)
    written = page(tmp_path, "cheaper.md", "digits", "leaps")
    cheaper.main([])
    kept = tmp_path / "docs" / "results" / "cheaper.jsonl"
    before, text = kept.read_text(), written.read_text()
    rows = [json.loads(line) for line in before.splitlines()]
    assert [(row["steps"], "test" in row) for row in rows] == [(8, False)] * 8 + [(17, True)] * 4
    assert "old" not in text
    assert "| whole batch | 0 of 2 | 2 of 2 |" in text
    assert "| quarter for both | 0 of 2 | 2 of 2 |" in text
    cheaper.main([])
    assert (kept.read_text(), written.read_text()) == (before, text)
    kept.write_text("".join(before.splitlines(keepends=True)[:-1]))
    cheaper.main(["--report"])
    assert len(kept.read_text().splitlines()) == 11
    ends = [
        line.split("|")[-2].strip() for line in written.read_text().splitlines() if " ± " in line or "| 1 |" in line
    ]
    assert ends == ["2", "1"]


def test_suggested_rates_stand_beside_the_best_of_a_grid_for_means_and_sums(tmp_path, monkeypatch):
    def few(folder):
        train, validation, build = rates.load_digits(folder)
        return train[:20], validation, build

    monkeypatch.setattr(rates, "ROOT", tmp_path)
    monkeypatch.setattr(rates, "TRIALS", {"digits": rates.Trial("Digits", few)})
    monkeypatch.setattr(rates, "GRID", (0.001, 0.1))
    monkeypatch.setattr(rates, "ADAMW_RATES", (1e-9, 3e-3))
    monkeypatch.setattr(rates, "POWER_RATES", (1e-9, 0.1))
    monkeypatch.setattr(rates, "POWER_RADII", (0.05,))
    written = page(tmp_path, "adamw.md", "rates", "whole power")
    rates.main([])
    text = written.read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "| Digits" in line]
    assert [rows[2][i] for i in (1, 3)] == ["0.003", "0.1"]
    losses = [float(rows[2][i].split(" ± ")[0]) for i in (2, 5)]
    assert losses[1] < losses[0] < 2.3
    rows = rows[:2]
    assert [(row[1], row[2], row[7]) for row in rows] == [("mean", "0.003", "0.1"), ("sum", "0.003", "0.01")]
    lr_mean, lr_sum = (float(row[4]) for row in rows)
    assert lr_mean / lr_sum == pytest.approx(8, rel=0.05)
    kept = tmp_path / "docs" / "results" / "rates.jsonl"
    before = kept.read_text()
    assert len(before.splitlines()) == 2 + 2 * 4 + 2 * (2 + 2)  # two rates of each, and two seeds more
    rates.main([])
    assert (kept.read_text(), written.read_text()) == (before, text)
    kept.write_text("".join(before.splitlines(keepends=True)[:-1]))
    rates.main(["--report"])
    assert written.read_text().count("| Digits") == 2
