"""What compilers make of the Triton kernels for one GPU of each vendor; ``make prove-triton`` does all targets."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import document

ROOT = Path(__file__).parents[2]
TARGETS = ("sm_80", "gfx942")
FLOORS = {"norm": 4, "perturb": 16, "restore": 8, "rademacher": 4, "probe": 8, "step": 24, "refresh": 32}
FLOORS |= {"momentum ascent": 12, "gap sums": 8, "decompose": 12, "step in state": 24, "refresh in state": 32}
FLOORS |= {"unseen sums": 12, "fill unseen": 16}
SUMS = ("norm", "gap sums", "unseen sums")  # which write no parameter
# Of bfloat16 parameters: every 8-bit stream is a byte, whatever it holds. Scales of groups are not counted.
COMPACT = {"perturb": 9, "momentum ascent": 6, "step": 11, "refresh": 14, "unseen sums": 5, "fill unseen": 6}
COMPACT |= {"step in state": 11, "refresh in state": 14}
COMPACT = {f"{kernel}, 8-bit state, 24-bit x": floor for kernel, floor in COMPACT.items()}
PHILOX_MULTIPLIES = 20  # of one call


def prove(kernels, *dtypes):
    # Compiling needs kernels that were not made for the interpreter.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tools.prove_triton", "--json", "--targets", *TARGETS]
    command += ["--dtypes", *dtypes, "--kernels", *kernels]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {(f["target"], f["kernel"], f["dtype"]): f for f in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def figures():
    return prove(FLOORS, "float32", "bfloat16")


@pytest.fixture(scope="module")
def compact_figures():
    return prove(COMPACT, "bfloat16")


@pytest.mark.parametrize("kernel", FLOORS)
@pytest.mark.parametrize("target", TARGETS)
def test_full_chunks_move_the_bytes_of_the_algorithm_in_words_of_128_bits(figures, target, kernel):
    found = figures[target, kernel, "float32"]
    words = found["loads"] + found["stores"]
    assert (found["ptx_loads"], found["ptx_stores"]) == (found["loads"], found["stores"])
    assert found["stores"] > 0 or kernel in SUMS
    # 256 threads move a chunk of 2048 parameters; less than the floor would be access in shorter words.
    assert FLOORS[kernel] <= 16 * words * 256 / 2048 <= 1.1 * FLOORS[kernel]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_spills_contracts_approximates_or_leaves_its_floor(figures, target, dtype):
    for kernel in FLOORS:
        found = figures[target, kernel, dtype]
        assert (found["spills"], found["contracted"], found["approximate"]) == (0, 0, 0), found
        assert found["floor"] <= found["bytes"] <= 1.1 * found["floor"], found


@pytest.mark.parametrize("kernel", COMPACT)
@pytest.mark.parametrize("target", TARGETS)
def test_compact_state_moves_its_bytes_in_words_of_128_bits(compact_figures, target, kernel):
    found = compact_figures[target, kernel, "bfloat16"]
    assert (found["spills"], found["contracted"], found["approximate"]) == (0, 0, 0), found
    assert (found["ptx_loads"], found["ptx_stores"]) == (found["loads"], found["stores"])
    # 128 threads: a word of 8-bit codes is sixteen elements.
    assert 16 * (found["loads"] + found["stores"]) * 128 / 2048 == COMPACT[kernel] == found["bytes"] == found["floor"]


@pytest.mark.parametrize("target", TARGETS)
def test_one_philox_call_serves_many_elements(figures, target):
    # A thread has eight elements: of at most two rows of signs, or of one call of noise in each of the two paths.
    assert figures[target, "probe", "float32"]["philox_multiplies"] <= 2 * PHILOX_MULTIPLIES
    assert figures[target, "perturb", "bfloat16"]["philox_multiplies"] <= 2 * PHILOX_MULTIPLIES + 2


def figures_of_the_page(prove_triton, text):
    """What the table on the page was made of, as far as it shows."""
    targets = re.search(r"\| moved \| (.*) \|", text)[1].split(" | ")
    parked = dict(re.findall(r"^(.*): scalar registers that wait in .*: (\d+)\.$", text, re.MULTILINE))
    shared = int(re.search(r"Shared memory \(at most (\d+) bytes\)", text)[1])
    found = []
    for column, target in enumerate(targets, start=4):
        for row in document.read_table(text):
            kernel, dtype, floor, moved = row[:4]
            size, least = (0 if cell == "-" else int(cell) for cell in (moved, floor))
            waits = int(parked.get(f"{kernel}, {dtype}, {target}", 0))
            numbers = {"spills": 0, "parked": waits, "loads": 0, "stores": 0, "ptx_loads": 0, "ptx_stores": 0}
            numbers |= {"philox_multiplies": 0, "contracted": 0, "approximate": 0, "shared": shared}
            registers = int(row[column])
            found.append(
                prove_triton.Figures(kernel, dtype, target, registers=registers, bytes=size, floor=least, **numbers)
            )
    return found, targets


def test_what_is_written_is_what_stands_on_the_pages(tmp_path, monkeypatch):
    from tools import prove_triton

    pages = []
    for name, section in (("SUMMARY", "triton kernels"), ("TABLES", "prove_triton")):
        pages.append(tmp_path / getattr(document, name).name)
        pages[-1].write_text(getattr(document, name).read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(prove_triton, name, pages[-1])
        document.section(pages[-1], section, "gone")
    text = document.read_section(document.TABLES, "prove_triton")
    monkeypatch.setattr(prove_triton.triton, "__version__", re.search(r"Compiled by Triton (\S+) for", text)[1])
    prove_triton.write(*figures_of_the_page(prove_triton, text))
    for page, original in zip(pages, (document.SUMMARY, document.TABLES), strict=True):
        assert page.read_text(encoding="utf-8") == original.read_text(encoding="utf-8")
