"""The pages: their code runs, and figures that several of them have are the same."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from pages import DOCS, PAGES, ROOT, blocks
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

import sassha_fast

# Blocks that no test can run, by page; each says why in a comment above it. A new one has to be added here.
NOT_RUN = {"compile.md": ["needs a GPU"]}

PROCESSES = re.compile(r"^<!-- processes: (\d+) -->$", re.MULTILINE)


def readers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What pages take for granted: a model, a loss, data, and a folder to write to."""
    monkeypatch.chdir(folder)
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    layers = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3)
    loader = [
        (torch.randn(16, 12, generator=generator), torch.randint(0, 3, (16,), generator=generator)) for _ in range(3)
    ]

    def evaluate(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            loss = sum(F.cross_entropy(model(x), y).item() for x, y in loader)
        model.train()
        return loss

    def closure(x: torch.Tensor, y: torch.Tensor) -> Any:
        """A closure for a batch, of whatever model and optimizer the page has by then."""

        def run() -> torch.Tensor:
            given["opt"].zero_grad()
            loss = F.cross_entropy(given["model"](x), y)
            loss.backward()
            return loss

        return run

    given = {
        "__name__": "__main__",
        "torch": torch,
        "sassha_fast": sassha_fast,
        "model": nn.Sequential(*layers),
        "sharded_model": nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 3)),
        "loss_fn": F.cross_entropy,
        "loader": loader,
        "x": loader[0][0],
        "y": loader[0][1],
        "epochs": 1,
        "evaluate": evaluate,
        "closure": closure,
        "device": "cpu",
        "folder": folder,
        "path": folder / "checkpoint.pt",
        "monkeypatch": monkeypatch,
    }
    return given


def run_page(page: Path, folder: Path) -> None:
    """Runs all blocks of a page in one namespace. An error says where it is."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        namespace = readers(folder, monkeypatch)
        for block in blocks(page):
            if block.reason is not None:
                continue
            try:
                block.run(namespace)
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                line = [frame.lineno for frame in frames if frame.filename == str(page)] or [block.line]
                raise AssertionError(f"{page.name}, line {line[-1]}: {type(error).__name__}: {error}") from error


def run_as_one_of(page: Path, folder: Path) -> None:
    """A process of a page about several."""
    torch.manual_seed(0)
    run_page(page, folder)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, tmp_path):
    asked = PROCESSES.search(page.read_text(encoding="utf-8"))
    if asked is None:
        run_page(page, tmp_path)
    else:
        processes.start(int(asked[1]), run_as_one_of, page, tmp_path)


def test_blocks_that_are_not_run_are_few_and_say_why():
    found = {page.name: [b.reason for b in blocks(page) if b.reason is not None] for page in PAGES}
    assert {name: reasons for name, reasons in found.items() if reasons} == NOT_RUN


def test_a_block_that_raises_is_named_by_page_and_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\na = 1\n```\n\n<!-- setup:\nb = 2\n-->\n\n```python\n\nassert a == b\n```\n")
    first, hidden, last = blocks(page)
    assert (first.line, hidden.line, last.line) == (4, 8, 12)
    namespace: dict[str, Any] = {}
    first.run(namespace)
    hidden.run(namespace)
    with pytest.raises(AssertionError) as caught:
        last.run(namespace)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].lineno == 13


# ---- figures ---------------------------------------------------------------------------------------------------------

RANGE = re.compile(r"\b\d+\.\d+ to \d+(?:\.\d+)?\b")


def test_ranges_of_measurements_are_those_of_the_page_on_cost():
    """New runs of the benchmarks change that page; what other pages repeat of it has to follow."""
    sources = [DOCS / "cost.md", DOCS / "methods.md", ROOT / "sassha_fast" / "_core" / "optimizer.py"]
    known = set(RANGE.findall("".join(path.read_text(encoding="utf-8") for path in sources)))
    for page in (ROOT / "README.md", *(DOCS / f"{name}.md" for name in ("choosing", "kernels", "errors", "migrating"))):
        assert set(RANGE.findall(page.read_text(encoding="utf-8"))) <= known, page.name
