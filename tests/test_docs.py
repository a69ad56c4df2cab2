"""The documentation: its code runs, its messages are those of the sources, and the site is whole without a network."""

from __future__ import annotations

import ast
import os
import re
import shutil
import struct
import subprocess
import sys
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from chromium import COMMAND, Chromium
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

# ---- code -----------------------------------------------------------------------------------------------------------

# Blocks that no test can run, by page; each says why in a comment above it. A new one has to be added here.
NOT_RUN = {"compile.md": ["needs a GPU"]}

SETUP = re.compile(r"^<!-- setup:\n(.*?)^-->", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^(?:<!-- not run: ([^\n]*) -->\n\n)?```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


PROCESSES = re.compile(r"^<!-- processes: (\d+) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """Code of a page, and the line that it starts in."""

    page: Path
    line: int
    code: str
    reason: str | None = None  # why it is not run

    def run(self, namespace: dict[str, Any]) -> None:
        """Executes the code under the page's name and lines."""
        exec(compile("\n" * (self.line - 1) + self.code, str(self.page), "exec"), namespace)


def blocks(page: Path) -> list[Block]:
    """The Python of a page in order: what readers see, and what a comment sets up for it."""
    text = page.read_text(encoding="utf-8")

    def at(match: re.Match[str], group: int, reason: str | None = None) -> Block:
        return Block(page, text.count("\n", 0, match.start(group)) + 1, match[group], reason)

    shown = [at(m, 3, m[1]) for m in FENCE.finditer(text) if m[2] in ("python", "py")]
    return sorted([at(m, 1) for m in SETUP.finditer(text)] + shown, key=lambda block: block.line)


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


def run_as_one_of(rank: int, size: int, page: Path, folder: Path) -> None:
    """A process of a page about several."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    try:
        torch.manual_seed(0)
        run_page(page, folder)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, tmp_path):
    asked = PROCESSES.search(page.read_text(encoding="utf-8"))
    if asked is None:
        run_page(page, tmp_path)
    else:
        size = int(asked[1])
        arguments = (size, page, tmp_path)
        torch.multiprocessing.start_processes(run_as_one_of, arguments, nprocs=size, start_method="spawn")


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


# ---- messages -------------------------------------------------------------------------------------------------------

# Raised for nobody who uses the library as documented.
INTERNAL = {
    ("base.py", "NotImplementedError", ""): "subclasses that climb replace the method",
    ("log_file.py", "ValueError", ""): "caught where it is called, and raised again with a message",
    ("reference.py", "ValueError", "stochastic_round: dtype is {}, expected torch.bfloat16 or torch.float16"): (
        "only for those who call functions of the reference by themselves"
    ),
    ("reference.py", "ValueError", "ascend: a {} parameter needs noise for stochastic rounding"): (
        "only for those who call functions of the reference by themselves"
    ),
}
REASON = "reason"  # why a backend does not run: part of a message


@dataclass(frozen=True)
class Message:
    """A message of the sources; placeholders are ``{}``."""

    file: str
    line: int
    kind: str
    text: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.kind, self.text

    def fits(self, kind: str, text: str) -> bool:
        """Whether a message that somebody saw may be this one."""
        pattern = ".*?".join(map(re.escape, self.text.split("{}")))
        return kind == self.kind and re.fullmatch(pattern, text) is not None


def template(node: ast.expr) -> str | None:
    """A string constant or f-string, with ``{}`` for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value.replace("{}", "") if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def messages_of(path: Path) -> Iterator[Message]:
    """What a module raises and warns of, and the reasons that it gives for backends."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    explaining = [
        function
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and (function.name.endswith("_why_not") or (path.name, function.name) == ("ops.py", "load"))
    ]
    for function in explaining if path.name in ("backends.py", "ops.py") else ():
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                ends = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
                for text in filter(None, map(template, ends)):
                    yield Message(path.name, node.lineno, REASON, text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            call = node.exc if isinstance(node.exc, ast.Call) else None
            kind = ast.unparse(call.func if call is not None else node.exc)
            text = template(call.args[0]) if call is not None and call.args else ""
            assert text is not None, f"{path.name}:{node.lineno}: the message is no string; teach this test to read it"
            yield Message(path.name, node.lineno, kind, text)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
            text = template(node.args[0])
            assert text is not None, f"{path.name}:{node.lineno}: the warning is no string; teach this test to read it"
            category = ast.unparse(node.args[1]) if len(node.args) > 1 else "UserWarning"
            yield Message(path.name, node.lineno, category, text)


@cache
def messages() -> tuple[Message, ...]:
    """All messages of the package that users may see."""
    found = [m for path in sorted((ROOT / "sassha_fast").rglob("*.py")) for m in messages_of(path)]
    return tuple(m for m in found if m.key not in INTERNAL)


def quoted() -> list[tuple[int, str, str]]:
    """Messages on the page: line, kind and text."""
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    lines = []
    for match in FENCE.finditer(text):
        if match[2] == "text":
            first = text.count("\n", 0, match.start(3)) + 1
            lines += [(first + i, line) for i, line in enumerate(match[3].splitlines()) if line]
    return [(number, *line.split(": ", 1)) for number, line in lines]  # type: ignore[misc]


def source_of(kind: str, text: str) -> Message | None:
    """The message of the sources that a quoted one is: of those that fit, the one that fills in least."""
    fitting = [m for m in messages() if m.fits(kind, text)]
    return max(fitting, key=lambda m: len(m.text.replace("{}", "")), default=None)


def test_every_message_of_the_sources_is_explained():
    explained = {source_of(kind, text) for _, kind, text in quoted()}
    missing = {m.key: m for m in messages() if m.text not in {e.text for e in explained if e is not None}}.values()
    assert not missing, "docs/errors.md lacks\n" + "\n".join(
        f"  {m.file}:{m.line}: {m.kind}: {m.text}" for m in missing
    )


def test_every_message_on_the_page_exists():
    stale = [f"errors.md:{line}: {kind}: {text}" for line, kind, text in quoted() if source_of(kind, text) is None]
    assert not stale, "no source says\n" + "\n".join(stale)


def test_what_is_left_out_exists():
    found = {m.key for path in (ROOT / "sassha_fast").rglob("*.py") for m in messages_of(path)}
    assert INTERNAL.keys() <= found


def test_messages_are_read_from_the_sources(tmp_path):
    path = tmp_path / "backends.py"
    path.write_text(
        "def f(a):\n    raise ValueError(f'a is {a!r}, ' 'expected 1')\n"
        "def g():\n    warnings.warn('careful', stacklevel=2)\n"
        "def _x_why_not(d):\n    return None if d else f'no {d}'\n"
    )
    found = {(m.kind, m.text) for m in messages_of(path)}
    assert found == {("ValueError", "a is {}, expected 1"), ("UserWarning", "careful"), (REASON, "no {}")}
    error = next(m for m in messages_of(path) if m.kind == "ValueError")
    assert error.fits("ValueError", "a is 'b', expected 1")
    assert not error.fits("ValueError", "a is 'b', expected 2")
    assert not error.fits("TypeError", "a is 'b', expected 1")


# ---- figures --------------------------------------------------------------------------------------------------------

RANGE = re.compile(r"\b\d+\.\d+ to \d+(?:\.\d+)?\b")


def test_ranges_of_measurements_are_those_of_the_readme():
    """New runs of the benchmarks change the README; what other pages repeat of it has to follow."""
    sources = [ROOT / "README.md", DOCS / "methods.md", ROOT / "sassha_fast" / "contexts.py"]
    known = set(RANGE.findall("".join(path.read_text(encoding="utf-8") for path in sources)))
    for name in ("index.md", "choosing.md", "kernels.md", "errors.md", "migrating.md"):
        assert set(RANGE.findall((DOCS / name).read_text(encoding="utf-8"))) <= known, name


# ---- the site -------------------------------------------------------------------------------------------------------

MODULES = (
    "__init__",
    "sharpness",
    "plots",
    "log",
    "schedules",
    "backends",
    "traffic",
    "variant",
    "reference",
    "integrations/lightning",
    "integrations/huggingface",
)
PICTURES = ("cifar10.png", "shakespeare.png")  # `make compare` draws them, in hours
SHARED = ("mkdocs.yml", "sassha_fast", "CHANGELOG.md", "CONTRIBUTING.md")


def pixel() -> bytes:
    """A picture of one grey pixel, in the place of one that is not drawn yet."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0\x80")) + chunk(b"IEND", b"")
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from a copy of the pages."""
    if find_spec("mkdocs") is None or find_spec("material") is None or find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs-material and mkdocstrings are not installed")
    folder = tmp_path_factory.mktemp("docs")
    for name in SHARED:
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(DOCS, folder / "docs")
    for name in PICTURES:
        if not (DOCS / name).exists():
            (folder / "docs" / name).write_bytes(pixel())
    before = os.times()
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder / "site")],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert seconds < 20, f"building took {seconds:.0f} s of processor time"
    return folder / "site"


def test_every_page_is_built_and_asks_for_nothing_online(site):
    assert {page.stem for page in DOCS.glob("*.md")} <= {page.stem for page in site.glob("*.html")}
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?([^\s\">]+)", text)
        assert not [address for address in loaded if address.startswith(("http:", "https:", "//"))], page.name


def public(path: str) -> Iterator[tuple[str, str]]:
    """The names in ``__all__`` of a module, which is not imported: it may need packages that are not installed."""
    module = ".".join(["sassha_fast", *path.removesuffix("__init__").split("/")]).rstrip(".")
    for node in ast.parse((ROOT / "sassha_fast" / f"{path}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            yield from ((module, name) for name in ast.literal_eval(node.value))


def test_every_public_name_is_in_the_reference(site):
    text = "".join(page.read_text(encoding="utf-8") for page in site.glob("api*.html"))
    anchors = set(re.findall(r"\bid=\"?([\w.]+)", text))
    names = [f"{module}.{name}" for path in MODULES for module, name in public(path)]
    assert not [name for name in names if name not in anchors]


def test_docstrings_leave_no_markup_behind(site):
    for page in site.glob("api*.html"):
        text = re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))
        assert not re.findall(r":(?:class|func|meth|mod|math|attr):|\\(?:hat|bar)|\w::\s", text), page.name


def test_the_site_opens_from_disk_fits_a_phone_and_can_be_searched(site, tmp_path):
    if COMMAND is None:
        assert not os.environ.get("CI_REQUIRE_CHROMIUM"), "there is no chromium; apt install chromium"
        pytest.skip("no chromium; apt install chromium")
    with Chromium(tmp_path / "profile") as browser:
        for name in ("index.html", "errors.html", "choosing.html", "api.html"):
            browser.open(site / name, width=500)
            assert browser.evaluate("document.documentElement.scrollWidth") <= 500, name
            assert not browser.complaints()
            assert all(address.startswith("file:") for address in browser.requests())
        browser.open(site / "index.html", width=1280)
        browser.evaluate(
            """(async () => {
                const field = document.querySelector('input.md-search__input');
                field.focus();
                field.value = 'GradScaler';
                field.dispatchEvent(new Event('keyup', {bubbles: true}));
                for (let i = 0; i < 200 && !document.querySelector('.md-search-result__link'); i++)
                    await new Promise(done => setTimeout(done, 50));
            })()"""
        )
        assert browser.evaluate("document.querySelectorAll('.md-search-result__link').length") > 0
