"""Who follows "Coming from AdamW" alone arrives where AdamW does, or further: its code on digits."""

import pytest
import torch
from pages import DOCS, blocks
from torch.nn import functional as F

pytest.importorskip("sklearn")

from examples import first_hour
from examples.digits import build_model, evaluate, load_splits

EPOCHS = 6


def test_the_code_of_the_page_reaches_adamws_validation_loss_in_as_many_steps(capsys):
    _, validation, _ = load_splits(torch.device("cpu"))
    loader = first_hour.data(17)
    torch.manual_seed(0)
    model = build_model()
    start = [p.detach().clone() for p in model.parameters()]
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, EPOCHS * len(loader))
    for _ in range(EPOCHS):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            schedule.step()
    adamw_loss, _ = evaluate(model, validation)
    with torch.no_grad():
        for p, x in zip(model.parameters(), start, strict=True):
            p.copy_(x)
    namespace = {"torch": torch, "model": model, "loader": loader, "loss_fn": F.cross_entropy, "epochs": EPOCHS}
    ask, train = blocks(DOCS / "adamw.md")
    ask.run(namespace)
    assert f"lr={namespace['found'].lr:.2g}" in capsys.readouterr().out
    train.run(namespace)
    assert evaluate(model, validation)[0] < adamw_loss < 1.0


def test_the_pictures_of_right_and_wrong_are_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    first_hour.main(["--out", str(tmp_path), "--steps", "40"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("right: learning rate")
    assert lines[-1].startswith("wrong: learning rate")
    assert {path.name for path in tmp_path.iterdir()} == {"right.png", "wrong.png"}
