"""The site that ``make docs`` builds: whole, with every public name, and good without a network."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from chromium import COMMAND, Chromium
from pages import DOCS, ROOT

pytestmark = pytest.mark.product
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
SHARED = ("mkdocs.yml", "sassha_fast", "CHANGELOG.md", "CONTRIBUTING.md")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from a copy of the pages."""
    if None in map(find_spec, ("mkdocs", "material", "mkdocstrings", "latex2mathml")):
        pytest.skip("mkdocs-material, mkdocstrings or latex2mathml is not installed")
    folder = tmp_path_factory.mktemp("docs")
    for name in SHARED:
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(DOCS, folder / "docs")
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


def test_formulas_are_typeset_by_the_browser(site):
    assert (site / "algorithm.html").read_text(encoding="utf-8").count("<math ") >= 9
    for page in site.glob("*.html"):
        prose = re.sub(r"<(pre|code|script)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.findall(r"arithmatex|\$[^$<]+\$|\\[a-z]+", prose), page.name


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
                for (let i = 0; i < 6000 && !document.querySelector('.md-search-result__link'); i++)
                    await new Promise(done => setTimeout(done, 50));
            })()"""
        )
        assert browser.evaluate("document.querySelectorAll('.md-search-result__link').length") > 0
