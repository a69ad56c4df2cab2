"""Who follows "Coming from AdamW" alone arrives where AdamW does, or further: its code on digits."""

import pytest
import torch
from pages import DOCS, blocks
from torch.nn import functional as F

pytest.importorskip("sklearn")

from examples import first_hour
from examples.digits import build_model, evaluate, load_splits
from sassha_fast import SASSHA

EPOCHS = 6


class Digits:
    """A network that every optimizer begins with, its data, and what the page takes for granted."""

    def __init__(self):
        _, self.validation, _ = load_splits(torch.device("cpu"))
        self.loader = first_hour.data(17)
        torch.manual_seed(0)
        self.model = build_model()
        self.start = [p.detach().clone() for p in self.model.parameters()]
        named = {"model": self.model, "loader": self.loader, "loss_fn": F.cross_entropy, "epochs": EPOCHS}
        self.namespace = {"torch": torch, **named}

    def restart(self):
        with torch.no_grad():
            for p, x in zip(self.model.parameters(), self.start, strict=True):
                p.copy_(x)

    def loss(self):
        return evaluate(self.model, self.validation)[0]

    def adamw(self, lr):
        """Its validation loss, after as many steps."""
        self.restart()
        opt = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, EPOCHS * len(self.loader))
        for _ in range(EPOCHS):
            for x, y in self.loader:
                opt.zero_grad()
                F.cross_entropy(self.model(x), y).backward()
                opt.step()
                schedule.step()
        loss = self.loss()
        self.restart()
        return loss


def test_the_code_of_the_page_reaches_adamws_validation_loss_in_as_many_steps(capsys):
    digits = Digits()
    adamw_loss = digits.adamw(1e-3)
    ask, train, _ = blocks(DOCS / "adamw.md")
    ask.run(digits.namespace)
    assert f"lr={digits.namespace['found'].lr:.2g}" in capsys.readouterr().out
    train.run(digits.namespace)
    assert digits.loss() < adamw_loss < 1.0


def test_the_whole_power_as_the_page_has_it_reaches_adamw_at_its_best_learning_rate():
    digits = Digits()
    adamw_loss = min(map(digits.adamw, (1e-3, 3e-3, 1e-2, 3e-2)))
    *_, whole = blocks(DOCS / "adamw.md")
    namespace = {**digits.namespace, "SASSHA": SASSHA}
    whole.run(namespace)
    for _ in range(EPOCHS):
        for x, y in digits.loader:

            def closure(x=x, y=y):
                digits.model.zero_grad()
                loss = F.cross_entropy(digits.model(x), y)
                loss.backward()
                return loss

            namespace["opt"].step(closure)
            namespace["schedule"].step()
    assert digits.loss() < adamw_loss < 0.2


def test_the_pictures_of_right_and_wrong_are_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    first_hour.main(["--out", str(tmp_path), "--steps", "40"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("right: learning rate")
    assert lines[-1].startswith("wrong: learning rate")
    assert {path.name for path in tmp_path.iterdir()} == {"right.png", "wrong.png"}
