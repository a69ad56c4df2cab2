"""The page that ``python -m bench.report`` makes, from runs that are made up here and from parts of them."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import COMMAND, Chromium
from made_up_run import entry, made_up

from bench.report.__main__ import main
from bench.report.elsewhere import parts
from bench.report.markup import digits, duration
from bench.report.page import write
from bench.report.records import read

pytestmark = pytest.mark.product
ROOT = Path(__file__).parents[2]
SECTIONS = ["machine", "passes", "speed", "cost", "refresh", "memory", "scaling", "gpu", "training"]
MEASURED = ["passes", "speed", "cost", "refresh", "memory", "scaling"]


def build(folder: Path, run: dict[str, object]) -> str:
    source, out = folder / "bench.json", folder / "report"
    source.write_text(json.dumps(run))
    assert main(["--json", str(source), "--out", str(out)]) == 0
    return (out / "index.html").read_text(encoding="utf-8")


def tree(page: str) -> ET.Element:
    """The page, which is well-formed XML but for its first line."""
    return ET.fromstring(page.removeprefix("<!doctype html>\n"))


def section(page: str, anchor: str) -> ET.Element:
    return next(found for found in tree(page).iter("section") if found.get("aria-labelledby") == anchor)


def words(element: ET.Element) -> str:
    return " ".join("".join(element.itertext()).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return build(folder, made_up())


def test_page_is_well_formed_and_complete(page):
    root = tree(page)
    found = [element.get("aria-labelledby") for element in root.iter("section")]
    assert found == SECTIONS
    identifiers = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(identifiers) == len(set(identifiers))
    links = [element.get("href") for element in root.iter("a")]
    assert {link for link in links if link.startswith("#")} == {f"#{name}" for name in identifiers}
    assert not [e for name in MEASURED for e in section(page, name).iter("p") if e.get("class") == "note"]
    assert not list(root.iter("script"))


def test_page_refers_to_nothing_outside_itself(page):
    root = tree(page)
    sources = [element.get(name) for element in root.iter() for name in ("src", "href") if element.get(name)]
    assert all(source.startswith(("data:", "#")) for source in sources)
    style = next(root.iter("style")).text
    assert "url(" not in style
    assert "@import" not in style


def test_every_image_has_an_alternative_and_a_png_beside_the_page(page, folder):
    for name in MEASURED:
        images = list(section(page, name).iter("img"))
        assert images, name
        assert all(len(image.get("alt")) > 20 for image in images)
    drawn = sum(len(list(section(page, name).iter("img"))) for name in MEASURED)
    pictures = list((folder / "report").glob("*.png"))
    assert len(pictures) == drawn
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_every_figure_and_table_names_its_command(page):
    root = tree(page)
    captions = [words(element) for element in root.iter("figcaption")]
    assert captions
    unnamed = [text for text in captions if not re.search(r"make \w+|sassha_fast\.traffic|paper alone", text)]
    assert not unnamed


SHOWN = {
    "share_of_roofline": lambda v: f"{v * 100:.0f} %",
    "gigabytes_per_second": digits,
    "bytes_per_parameter": lambda v: f"{v:g}",
    "ratio_to_fused_adamw": digits,
    "speedup_over_eager": digits,
    "gc": digits,
    "gc_low": digits,
    "gc_high": digits,
    "gc_ordinary": digits,
    "gc_refresh": digits,
    "mib_ordinary": digits,
    "mib_refresh": digits,
    "fit_intercept_us": digits,
    "fit_slope_ns": digits,
    "target": lambda v: f"{v:g}",
    "fit_r2": lambda v: f"{v:.4f}",
}
SECTION_OF = {"norm": "passes", "perturb": "passes", "hvp": "refresh", "scaling": "scaling"}


def home(info: dict[str, object], key: str) -> str:
    """The section that a note is shown in."""
    if info["bench"] == "step":
        return "passes" if "pass" in info else "speed"
    if info["bench"] == "train":
        return "memory" if key.startswith("mib") else "cost"
    return SECTION_OF[info["bench"]]


def test_every_noted_number_stands_in_its_section(page):
    texts = {name: words(section(page, name)) for name in SECTIONS}
    checked = 0
    for benchmark in made_up()["benchmarks"]:
        info = benchmark["extra_info"]
        if info["contender"] == "roofline":
            continue
        for key in SHOWN.keys() & info.keys():
            assert SHOWN[key](info[key]) in texts[home(info, key)], (info, key)
            checked += 1
    assert checked > 200


def test_a_changed_number_changes_the_page(page, tmp_path):
    run, kept = made_up(), []
    changes = [("norm", "share_of_roofline", 0.1234), ("step", "ratio_to_fused_adamw", 7.654), ("train", "gc", 5.678)]
    changes += [("train", "mib_refresh", 8765.4), ("hvp", "gc", 6.543), ("scaling", "fit_slope_ns", 43.21)]
    for bench, key, value in changes:
        found = (b for b in run["benchmarks"] if key in b["extra_info"] and b["extra_info"]["bench"] == bench)
        kept.append(next(found))
        kept[-1]["extra_info"][key] = value
    before, after = words(tree(page)), words(tree(build(tmp_path, run | {"benchmarks": kept})))
    for text in ("12 %", "7.65", "5.68", "8,765", "6.54", "43.2"):
        assert text in after
        assert text not in before


def test_the_paper_is_told_from_what_was_measured(page):
    cost = section(page, "cost")
    rows = {words(row[0]): [words(cell) for cell in row] for row in cost.iter("tr")}
    assert rows["method"][-1] == "paper ◆"
    assert [rows[name][-1] for name in ("SAM", "AdaHessian", "SASSHA exact", "M-SASSHA exact")] == [
        "2",
        "4",
        "2.3",
        "1.3",
    ]
    assert rows["SASSHA finite difference"][-1] == "–"
    assert rows["AdamW"] == ["AdamW", "1"]
    assert "theory, not a timing" in words(cost)


def test_gpu_figures_are_predictions(page):
    gpu = section(page, "gpu")
    assert "No GPU ran this." in words(gpu)
    captions = [words(caption) for caption in gpu.iter("figcaption")]
    assert all(caption.startswith(("Counted:", "Prediction:")) for caption in captions)
    assert len(captions) == 3


def test_a_quick_run_is_no_result(page, tmp_path):
    run = made_up()
    run["benchmarks"] = [
        b | {"stats": b["stats"] | {"rounds": 2}} for b in run["benchmarks"] if "pass" in b["extra_info"]
    ]
    warned = "A quick run, no results"
    assert warned in words(tree(build(tmp_path, run)))
    assert warned not in words(tree(page))


def test_text_of_the_machine_is_escaped(page):
    assert "Made-up &lt;CPU&gt; &amp; Co" in page
    assert "Made-up <CPU> & Co, 2 cores" in words(section(page, "machine"))


@pytest.mark.parametrize("bench", ["norm", "step", "hvp", "train", "scaling", None])
def test_a_part_of_the_benchmarks_gives_notes_with_the_command(bench, tmp_path):
    run = made_up()
    run["benchmarks"] = [b for b in run["benchmarks"] if b["extra_info"]["bench"] == bench]
    page = build(tmp_path, run)
    kept = {home(b["extra_info"], key) for b in run["benchmarks"] for key in SHOWN.keys() & b["extra_info"].keys()}
    for name in MEASURED:
        notes = [words(e) for e in section(page, name).iter("p") if e.get("class") == "note"]
        assert bool(notes) == (name not in kept), name
        assert all("make bench" in text for text in notes)


def test_notes_of_unknown_benchmarks_do_no_harm(tmp_path):
    run = made_up()
    run["benchmarks"] = [{"name": "x"}, {"name": "y", "extra_info": None, "stats": None}]
    run["benchmarks"].append(entry("step", "new", 1e-3, model="unheard <of>", calls="step", gc="much"))
    assert "unheard <of>" in words(section(build(tmp_path, run), "speed"))


def test_missing_json_names_the_path_and_the_remedy(tmp_path):
    command = [sys.executable, "-m", "bench.report", "--json", str(tmp_path / "absent.json"), "--out", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert str(tmp_path / "absent.json") in ran.stderr
    assert "make bench" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("text", ["{", "[]", '{"benchmarks": 3}'])
def test_a_file_of_another_kind_is_an_error_with_its_path(text, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main(["--json", str(path), "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert str(path) in said
    assert "make bench" in said


def test_numbers_have_three_figures():
    values = (123456.7, 1234.5, 45.67, 2.046, 0.5531, 0.01234, 0.0, -1.5, None)
    assert [digits(v) for v in values] == ["123,457", "1,234", "45.7", "2.05", "0.55", "0.012", "0", "−1.50", "–"]
    assert [duration(v) for v in (2.5, 0.0421, 3.2e-6, 4e-8)] == ["2.50 s", "42.1 ms", "3.20 µs", "40.0 ns"]


def test_tables_and_pictures_of_markdown_are_found():
    found = parts("# A\n\n| x | y |\n|---|--:|\n| `a` | 1 |\n\n![curve](b.png)\n## B\n| z |\n|---|\n| 2 |\n")
    assert [part.heading for part in found] == ["A", "A", "B"]
    assert found[0].rows == [["x", "y"], ["`a`", "1"]]
    assert (found[1].image, found[1].alt) == ("b.png", "curve")


def test_results_of_trainings_are_shown_where_they_exist(tmp_path, folder, page):
    assert "make demo" in words(section(page, "training"))
    root, dot = tmp_path / "root", (folder / "report" / "passes_bytes.png").read_bytes()
    for path in ("docs/cifar10.png", "build/demo/digits.png", "docs/cifar10.md"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(dot)
    table = "| optimizer | accuracy |\n|---|---|\n| SASSHA | 91.23 ± 0.10 |\n"
    (root / "docs/cifar10.md").write_text(f"# CIFAR-10\n\n{table}\n![curves](absent.png)\n")
    (tmp_path / "empty.json").write_text(json.dumps(made_up() | {"benchmarks": []}))
    shown = section(write(read(tmp_path / "empty.json"), tmp_path, root).read_text(), "training")
    assert "91.23 ± 0.10" in words(shown)
    assert len(list(shown.iter("img"))) == 2
    notes = [words(element) for element in shown.iter("p") if element.get("class") == "note"]
    assert [re.search(r"`?(absent.png|shakespeare)", text)[1] for text in notes] == ["absent.png", "shakespeare"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if COMMAND is None:
        if os.environ.get("CI_REQUIRE_CHROMIUM"):
            pytest.fail("CI_REQUIRE_CHROMIUM is set, but there is no chromium; apt install chromium")
        pytest.skip("no chromium; apt install chromium")
    with Chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


LOOK = """({
    over: document.documentElement.scrollWidth - innerWidth,
    broken: [...document.images].filter(image => !image.naturalWidth).map(image => image.alt),
    images: document.images.length,
    empty: [...document.querySelectorAll("section")].filter(s => s.innerText.length < 80 || s.offsetHeight < 60).length,
    narrow: [...document.images].map(image => image.getBoundingClientRect().width).filter(width => width < 250).length,
    width: innerWidth,
})"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390, 360])
def test_page_in_a_browser(width, dark, page, folder, browser):
    shown = folder / "report" / "index.html"
    browser.open(shown, width=width, dark=dark)
    browser.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    seen = browser.evaluate(LOOK)
    assert seen["width"] == width
    assert seen["over"] <= 0
    assert seen["images"] == page.count("<img ")
    assert seen["broken"] == []
    assert seen["empty"] == 0
    assert seen["narrow"] == 0
    assert browser.complaints() == []
    assert browser.requests() == [shown.resolve().as_uri()]
    dark_now = browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 28)"
    assert dark_now == dark


def test_the_browser_test_sees_what_is_wrong(browser, tmp_path):
    bad = tmp_path / "bad.html"
    wrong = "<div style='width:2000px'>wide</div><img src='none.png' alt=''><script>console.error('no')</script>"
    bad.write_text(f"<!doctype html><meta name=viewport content='width=device-width'><body>{wrong}")
    browser.open(bad, width=390)
    seen = browser.evaluate(LOOK)
    assert seen["over"] > 0
    assert len(seen["broken"]) == 1
    assert any("none.png" in request for request in browser.requests())
    assert any("console" in said or '"no"' in said for said in browser.complaints())
