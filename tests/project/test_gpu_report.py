"""``make gpu-report``: a trial on the CPU, parts that fail in every way, and how the page is put together."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from tolerances import PATIENCE

from tools.gpu_report import __main__ as command
from tools.gpu_report import counts, device, device_tests, page, parts
from tools.gpu_report.parts import Done, Part
from tools.gpu_report.result import Failure, Result, Table, shorten
from tools.gpu_report.settings import Settings

pytestmark = pytest.mark.product
ROOT = Path(__file__).parents[2]
CPU = Settings("cpu", "the CPU, a trial")
PARTS = ("machine", "tests", "passes-cpu", "gpt2", "counts-cpu")
# A time of milliseconds or microseconds, or a bandwidth.
TIMES = re.compile(r"\d (?:ms|µs|GB/s)|\| \d+\.\d+ \|")


# ---- a trial ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """The page of a run on the CPU."""
    out = tmp_path_factory.mktemp("gpu-report")
    options = ["--device", "cpu", "--tests", "tests/kernels/test_philox.py", "--out", str(out), "--no-compile"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu_report", *options, "--parts", *PARTS],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    text = (out / "index.md").read_text(encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr + text
    return text


def section(text, title):
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]


def test_a_trial_says_that_it_is_one_and_has_no_figure_of_time(trial):
    assert trial.startswith("# GPU report: the CPU, a trial\n\nEverything passed: ")
    assert "**A trial, no results.** It ran on a CPU" in trial
    assert not TIMES.findall(trial)
    assert trial.rstrip().endswith("## Failures\n\nNone.")


def test_a_trial_runs_every_pass_and_kind_of_step(trial):
    passes = {row[0]: row[1] for row in rows(section(trial, "Passes, backend cpu"))}
    assert passes["perturb"] == "16"
    assert passes["ordinary"] == "44"
    assert len(passes) == 14
    steps = [row[:2] for row in rows(section(trial, "Training steps: GPT-2 small"))]
    products = ["exact", "finite difference"]
    assert steps[2:] == [[method, kind] for method in ("sassha", "m-sassha") for kind in products]
    assert {row[0] for row in rows(section(trial, "Launches, copies and waits, backend cpu"))} == {
        "ordinary",
        "refresh, exact",
        "refresh, finite difference",
    }


def test_tests_are_counted_by_file(trial):
    ((name, passed, failed, skipped),) = rows(section(trial, "Tests"))
    assert (name, failed, skipped) == ("`tests/kernels/test_philox.py`", "0", "0")
    assert int(passed) > 3


# ---- what fails ---------------------------------------------------------------------------------------------------


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes a module that a part can name."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))

    def write(name, body):
        (tmp_path / f"{name}.py").write_text(f"import os, signal, time\ndef run(settings, **options):\n    {body}\n")
        return Part(f"Part {name}", name, {"word": "a=b"})

    return write


def test_a_part_that_raises_is_on_the_page_stops_no_other_and_makes_the_exit_code_1(modules, tmp_path, monkeypatch):
    good = "from tools.gpu_report.result import Result; return Result([f'got {options}'])"
    known = {
        "raises": modules("raises", "raise ValueError('no ```luck``` today')"),
        "dies": modules("dies", "print('last words', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"),
        "absent": Part("Part absent", "no_such_module"),
        "good": modules("good", good),
    }
    monkeypatch.setattr(command, "all_parts", lambda settings: known)
    assert command.main(["--device", "cpu", "--out", str(tmp_path / "out")]) == 1
    text = (tmp_path / "out" / "index.md").read_text(encoding="utf-8")
    assert "**3 failures**: Part raises (1), Part dies (1) and Part absent (1)." in text
    assert "got {'word': 'a=b'}" in text
    failures = section(text, "Failures")
    assert "ValueError: no ```luck``` today\n````" in failures
    assert "Traceback (most recent call last)" in failures
    assert "The process died of SIGSEGV. It said:\n\nlast words" in failures
    assert "No module named 'no_such_module'" in failures


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and ") Z " not in stat.read_text()  # dead, but nobody has asked for its exit code


def test_a_part_that_hangs_is_stopped_with_what_it_has_started(modules, tmp_path):
    note = tmp_path / "pid"
    started = f"pid = os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '600'); open({str(note)!r}, 'w').write(str(pid))"
    part = modules("hangs", f"{started}; time.sleep(600)")
    for patience in (3, 30, 300):  # until it has started something, which may take long on a busy machine
        done = parts.run(part, CPU, patience=patience)
        assert f"The process was stopped after {patience} s." in done.result.failures[0].text
        if note.exists() and note.read_text():
            break
    assert not is_running(int(note.read_text()))


def test_tests_that_do_not_exist_are_a_failure(tmp_path):
    options = ["--device", "cpu", "--parts", "tests", "--tests", "tests/absent.py", "--out", str(tmp_path)]
    assert command.main(options) == 1
    failures = section((tmp_path / "index.md").read_text(encoding="utf-8"), "Failures")
    assert re.search(r"### Tests: tests/absent\.py\s+```text\s+pytest ended with [45]:", failures)
    assert "file or directory not found: tests/absent.py" in failures


def test_an_unknown_part_is_refused_with_those_there_are(tmp_path, capsys):
    assert command.main(["--device", "cpu", "--parts", "pases", "--out", str(tmp_path)]) == 2
    assert "--parts has ['pases'], expected some of ['machine', 'tests', 'passes-cpu'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            device.Found(None, "2.13.0+cpu", None),
            "is a build without CUDA; `pip install torch==2.13.0+cu130",
        ),
        (device.Found(None, "2.13.0", "13.0"), "torch 2.13.0 has CUDA 13.0 but finds no GPU"),
    ],
)
def test_without_a_gpu_a_sentence_says_so_and_the_exit_code_is_2(found, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(device, "find", lambda: found)
    assert command.main(["--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert said in printed
    assert not (tmp_path / "out").exists()


def test_the_virtual_gpu_is_known_by_its_name_and_is_a_trial():
    found = device.Found("Virtual A100", "2.15.0", "13.2")
    settings = Settings("cuda", found.name, found.virtual)
    assert settings.trial
    assert device.pytest_options(settings)[-2:] == ["-p", "vgpu.plugin"]
    assert not Settings("cuda", "NVIDIA H100 80GB HBM3").trial


# ---- pieces -------------------------------------------------------------------------------------------------------

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_good"/>
<testcase classname="tests.test_a" name="test_bad[1]">
<failure message="short">def test_bad():\n&gt; assert 1 == 2</failure></testcase>
<testcase classname="tests.test_a" name="test_error"><error message="at setup"/></testcase>
<testcase classname="tests.test_a" name="test_not_here"><skipped message="why"/></testcase>
</testsuite></testsuites>"""


def test_every_failure_of_the_tests_is_read_with_its_text(tmp_path):
    report = tmp_path / "junit.xml"
    report.write_text(JUNIT)
    found = device_tests.read(report)
    assert (found.passed, found.skipped) == (1, 1)
    assert found.failures == [
        Failure("tests.test_a::test_bad[1]", "def test_bad():\n> assert 1 == 2"),
        Failure("tests.test_a::test_error", "at setup"),
    ]


def event(name, start):
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=start + 1))


def profiled(*events):
    inside = SimpleNamespace(name=counts.RANGE, time_range=SimpleNamespace(start=10, end=20))
    return SimpleNamespace(events=lambda: [inside, *(event(*e) for e in events)])


def test_a_profile_is_counted_within_the_step():
    found = counts.from_profile(
        profiled(
            ("cudaLaunchKernel", 9),
            ("cudaLaunchKernel", 10),
            ("cuLaunchKernelEx", 15),
            ("cudaMemcpyAsync", 16),
            ("Memcpy HtoD (Pinned -> Device)", 23),
            ("cudaStreamSynchronize", 17),
            ("cudaDeviceSynchronize", 21),
            ("aten::add", 12),
        )
    )
    assert found == Counter({"launches": 2, "host to device": 1, "waits": 1})


def test_a_profile_without_launches_is_no_zero():
    with pytest.raises(RuntimeError, match="the profiler saw no launch"):
        counts.from_profile(profiled(("aten::add", 12)))


def test_counters_of_the_virtual_gpu_are_taken_as_differences(monkeypatch):
    before = {"launch": 4, "torch": 10, "memcpy H2D pinned async": 1, "sync:stream": 2}
    after = {"launch": 7, "torch": 12, "memcpy H2D pinned async": 2, "memcpy H2D pinned bytes": 64}
    after |= {"sync:stream": 2, "implicit_sync:D2H pageable": 1, "memcpy D2H pageable async": 1, "launch:step": 1}
    readings = iter([before, after])
    monkeypatch.setattr(device, "virtual_counters", lambda: next(readings))
    found = counts.on_virtual_gpu(lambda: None)
    assert found == Counter({"launches": 5, "host to device": 1, "device to host": 1, "waits": 1})


def test_a_result_crosses_processes_as_it_is(tmp_path):
    result = Result(["a"], [Table(["x"], [["1"]], "t")], ["b"], [Failure("here", "text")])
    result.write(tmp_path / "result.json")
    assert Result.read(tmp_path / "result.json") == result
    settings = Settings("cuda", "card", tests=("tests/kernels/test_step.py",), compiled=False)
    assert Settings.from_json(settings.to_json()) == settings


def test_a_page_of_a_gpu_has_figures_and_the_time_that_each_part_took():
    done = Done(Part("Passes", "m"), Result(tables=[Table(["pass", "GB/s"], [["norm | a", "1,234"]])]), 12.3)
    text = page.write(Settings("cuda", "NVIDIA H100"), [done], "python -m tools.gpu_report")
    assert text.startswith("# GPU report: NVIDIA H100\n\nEverything passed: Passes.\n\n`python -m tools.gpu_report`, ")
    assert "| norm \\| a | 1,234 |" in text
    assert "This part took 12 s." in text
    assert "trial" not in text


def test_long_texts_keep_their_ends():
    text = "begin" + "x" * 1000 + "end"
    short = shorten(text, 100)
    assert short.startswith("begin")
    assert short.endswith("end")
    assert "... 908 characters left out ..." in short
    assert shorten("short", 100) == "short"
