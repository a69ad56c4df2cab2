"""``make matrix``: what is tried, how results are counted, kept and written, and that a stopped run goes on."""

import json

import pytest

from tools.matrix import __main__ as command
from tools.matrix import cells, environment, page, run
from tools.matrix.run import Outcome

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_good"/>
<testcase classname="tests.a" name="test_bad"><failure message="no"/></testcase>
<testcase classname="tests.a" name="test_error"><error message="setup"/></testcase>
<testcase classname="tests.a" name="test_elsewhere"><skipped message="why"/></testcase>
</testsuite></testsuites>"""


def outcome(**more):
    return Outcome("sassha_fast-1.0-py3-none-any.whl", "2026-01-01", {"CUDA": "13.2"}, **{"passed": 5, **more})


def test_every_torch_is_tried_on_every_python_that_has_it():
    names = [cell.name for cell in cells.all_cells()]
    assert len(names) == len(set(names))
    table = {(cell.torch[:4], cell.python) for cell in cells.all_cells() if not cell.frameworks}
    torches, pythons = ("2.10", "2.12", "2.14", "2.15"), ("3.10", "3.12", "3.13")
    assert table == {(t, p) for t in torches for p in pythons} - {("2.15", "3.10")}
    oldest, newest = (cell.frameworks for cell in cells.all_cells() if cell.frameworks)
    floors = (environment.ROOT / "pyproject.toml").read_text()
    assert all(f"{r.split('==')[0]}>={'.'.join(r.split('==')[1].split('.')[:2])}" in floors for r in oldest)
    assert all("==" not in requirement for requirement in newest)


def test_tests_of_cells_exist():
    for cell in cells.all_cells():
        assert all((environment.ROOT / path).exists() for path in cell.tests if path.startswith("tests/"))


def test_results_are_counted(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    found = outcome(passed=0)
    run.read_report(tmp_path / "report.xml", found)
    assert (found.passed, found.skipped, found.failures) == (1, 1, ["tests.a::test_bad", "tests.a::test_error"])
    assert not found.good
    assert not outcome(passed=0).good
    assert not outcome(error="pytest ended with 3").good
    assert outcome().good


def test_the_page_says_what_came_of_every_cell():
    first, second, third, *_ = (cell.name for cell in cells.all_cells())
    results = {first: outcome(), second: outcome(failures=["a"]), third: outcome(error="no\nmore")}
    text = page.markdown(results)
    for words in ("5 passed", "1 of 6 failed", "failed: no", "not run", "no such build", "| 13.2 |"):
        assert words in text
    assert "more" not in text


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """Cells that are tried in name only: a list of them, with results and page in a folder."""
    tried = []

    def try_cell(cell, wheel):
        tried.append(cell.name)
        return outcome(failures=["a"] if len(tried) == 2 else [])

    for module in (command, run, environment):
        monkeypatch.setattr(module, "HOME", tmp_path)
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(command, "try_cell", try_cell)
    monkeypatch.setattr(command, "build_wheel", lambda: tmp_path / "sassha_fast-1.0-py3-none-any.whl")
    monkeypatch.setattr(page, "PAGE", tmp_path / "install.md")
    (tmp_path / "install.md").write_text("<!-- matrix: begin -->\n<!-- matrix: end -->\n")
    return tried


def test_a_run_goes_on_where_it_was_stopped_and_repeats_what_failed(trial, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["matrix", "--cells", "torch 2.10"])
    assert command.main() == 1
    assert len(trial) == 3
    assert "1 of 6 failed" in (tmp_path / "install.md").read_text()
    assert "not good: torch 2.10.0 Python 3.13" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "results.json").read_text())) == 3
    assert command.main() == 0
    assert trial[3:] == ["torch 2.10.0 Python 3.13"]


def test_a_python_that_is_not_there_is_named():
    with pytest.raises(RuntimeError, match=r"Python 9\.9 was not found"):
        environment.find_python("9.9")
