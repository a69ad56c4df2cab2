"""The benchmarks run, and what they write is what reports are drawn from; how they count is right."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tolerances import PATIENCE

pytest.importorskip("pytest_benchmark")

pytestmark = pytest.mark.product
ROOT = Path(__file__).parents[2]
FILES = [f"bench/bench_{word}.py" for word in ("norm", "perturb", "step", "compact", "scaling")]
PASS_KEYS = {"pass", "model", "parameters", "tensors", "bytes_per_parameter", "gigabytes_per_second"}
FIT_KEYS = {"fit_intercept_us", "fit_slope_ns", "fit_r2"}


def load_measure():
    spec = importlib.util.spec_from_file_location("bench_measure", ROOT / "bench" / "measure.py")
    module = sys.modules["bench_measure"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


measure = load_measure()


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    """``extra_info`` of all benchmarks of a quick run, on one thread: others may be busy while tests run."""
    target = tmp_path_factory.mktemp("bench") / "quick.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        *FILES,
        "--quick",
        f"--benchmark-json={target}",
        "-p",
        "no:cacheprovider",
    ]
    # In what looks like a worker of pytest-xdist, pytest-benchmark measures nothing.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment = {**inherited, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(target.read_text(encoding="utf-8"))["benchmarks"]
    assert all(entry["stats"]["median"] > 0 for entry in found)
    return [entry["extra_info"] for entry in found]


def chosen(entries, **wanted):
    return [entry for entry in entries if wanted.items() <= entry.items()]


def test_every_number_that_a_benchmark_records_is_finite_and_positive(entries):
    assert all({"bench", "contender", "threads", "device"} <= entry.keys() for entry in entries)
    for entry in entries:
        for key, value in entry.items():
            if isinstance(value, float):
                assert math.isfinite(value), (key, entry)
                # A line through single rounds may fall where the machine was busy.
                assert value > 0 or key in FIT_KEYS, (key, entry)


def test_state_in_fewer_bits_is_timed_beside_float32(entries):
    found = {entry["contender"]: entry for entry in chosen(entries, bench="compact")}
    assert found["float32"]["ratio_to_float32"] == 1.0
    assert found["float32"]["bytes_per_parameter"] == 44
    smallest = found["bfloat16, 24-bit weights, 8-bit state"]
    assert smallest["bytes_per_parameter"] == 22 + (4 + 2 + 4) / 32
    assert smallest["target"] == 0.8


@pytest.mark.parametrize("name", ["norm", "perturb", "restore", "step", "refresh_step"])
def test_every_pass_is_beside_its_roofline(name, entries):
    ours, roofline = (
        chosen(entries, **{"pass": name, "model": "gpt", "contender": who}) for who in ("sassha cpu", "roofline")
    )
    assert len(ours) == len(roofline) == 1
    assert ours[0].keys() >= PASS_KEYS | {"share_of_roofline", "ratio_low", "ratio_high"}
    assert roofline[0]["share_of_roofline"] == 1.0


@pytest.mark.parametrize("model", ["gpt", "resnet20", "small"])
def test_optimizers_are_beside_fused_adamw_and_the_eager_loop(model, entries):
    found = {e["contender"]: e for e in chosen(entries, bench="step", model=model) if "us_per_tensor" in e}
    expected = {"sassha cpu", "sassha foreach", "eager loop", "adamw fused", "adamw foreach", "adamw for-loop"}
    assert found.keys() >= expected | {"sam", "adahessian", "sophia-h"}
    assert found["adamw fused"]["ratio_to_fused_adamw"] == found["eager loop"]["speedup_over_eager"] == 1.0
    assert all(e["ratio_low"] <= e["ratio"] == e["ratio_to_fused_adamw"] <= e["ratio_high"] for e in found.values())


@pytest.mark.parametrize(("axis", "sizes"), [("parameters", [10**4, 10**5, 10**6]), ("tensors", [1, 10, 100, 1000])])
@pytest.mark.parametrize("calls", ["three calls", "step op"])
def test_a_series_has_one_line_for_all_its_sizes(axis, sizes, calls, entries):
    series = chosen(entries, axis=axis, contender="sassha cpu", calls=calls)
    assert sorted(entry[axis] for entry in series) == sizes
    for key in FIT_KEYS:
        assert len({entry[key] for entry in series}) == 1


def test_threads_are_counted_where_they_were_set(entries):
    found = chosen(entries, axis="threads", contender="sassha cpu", calls="step op")
    assert sorted(entry["threads"] for entry in found) == [1, 2]


def rounds(*seconds):
    return measure.Measured("a", list(seconds))


def test_a_ratio_is_taken_round_by_round():
    found = measure.ratio(rounds(2.0, 6.0, 40.0), rounds(1.0, 2.0, 10.0))
    assert found == measure.Ratio(median=3.0, low=2.5, high=3.5)
    assert str(found) == "3.00 x (2.50 to 3.50)"


@pytest.mark.parametrize(
    ("values", "expected"),
    [([7.0], (7.0, 7.0, 7.0)), ([1.0, 3.0], (2.0, 1.5, 2.5)), ([5.0, 1.0, 2.0, 4.0, 3.0], (3.0, 2.0, 4.0))],
)
def test_quartiles_are_interpolated(values, expected):
    assert measure.spread(values) == measure.Ratio(*expected)


def test_a_cycle_is_the_weighted_sum_of_its_rounds():
    assert measure.together("b", (0.75, 0.25), (rounds(4.0, 8.0), rounds(8.0, 4.0))).seconds == [5.0, 7.0]


def test_a_fit_finds_a_line_over_decades():
    sizes = [10**k for k in range(4, 9)]
    found = measure.fit(sizes, [5e-5 + 2e-9 * n for n in sizes])
    assert found.intercept == pytest.approx(5e-5)
    assert found.slope == pytest.approx(2e-9)
    assert found.r2 == pytest.approx(1.0)


def test_a_fit_weighs_relative_errors():
    """A tenth more at the largest size moves the intercept by less than it moves the slope."""
    sizes = [10**k for k in range(4, 9)]
    seconds = [5e-5 + 2e-9 * n for n in sizes]
    seconds[-1] *= 1.1
    found = measure.fit(sizes, seconds)
    assert found.intercept == pytest.approx(5e-5, rel=0.02)
    assert 2e-9 < found.slope < 2.2e-9
    assert 0.99 < found.r2 < 1.0


def test_contenders_take_turns_and_warm_up():
    calls = []

    def contender(name):
        return lambda: calls.append(name) or float(len(calls))

    found = measure.interleave({"a": contender("a"), "b": contender("b")}, rounds=2, warmup=1)
    assert calls == ["a", "b"] * 3
    assert found["a"].seconds == [3.0, 5.0]
    assert found["b"].median == 5.0
