"""The bytes that passes move: what they declare, what their kernels touch, and what the documents say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sassha_fast import traffic
from sassha_fast._passes import layout as tables
from sassha_fast.formats import FULL, Format

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
FLOAT32 = {
    "norm": 4,
    "perturb": 16,
    "restore": 8,
    "probe": 8,
    "step": 24,
    "refresh_step": 32,
    "step_in_state": 24,
    "refresh_step_in_state": 32,
    "momentum_ascent": 12,
    "gap_sums": 8,
    "decompose": 12,
    "unseen_sums": 12,
    "fill_unseen": 16,
}


def test_passes_declare_the_fewest_bytes_that_the_algorithm_allows():
    assert {name: traffic.bytes_per_parameter(name) for name in traffic.PASSES} == FLOAT32
    assert traffic.bytes_per_parameter("step", torch.bfloat16) == 3 * 2 + 3 * 4
    assert traffic.bytes_per_parameter("step", torch.float64) == 48
    columns = {c for name in traffic.PASSES for side in traffic.columns_of(name, SMALLEST) for c in side}
    assert all(hasattr(tables, column.upper()) for column in columns)


SMALLEST = Format(8, 8)
BFLOAT16 = {
    "norm": 2,
    "perturb": 9,
    "restore": 4,
    "probe": 4,
    "step": 11,
    "refresh_step": 11 + 2 + 1,
    "step_in_state": 11,
    "refresh_step_in_state": 11 + 2 + 1,
    "momentum_ascent": 6,
    "gap_sums": 4,
    "decompose": 6,
    "unseen_sums": 5,
    "fill_unseen": 6,
}


def test_passes_declare_the_bytes_of_every_format():
    declared = {name: traffic.bytes_per_parameter(name, torch.bfloat16, SMALLEST) for name in traffic.PASSES}
    assert declared == BFLOAT16
    assert sum(BFLOAT16[name] for name in traffic.METHODS["SASSHA"][0]) == 22
    step = ("step", torch.float32)
    assert traffic.bytes_per_parameter(*step, Format(16)) == 3 * 4 + 3 * 2
    assert traffic.bytes_per_parameter(*step, Format(8)) == 3 * 4 + 3
    assert traffic.bytes_per_parameter("step", torch.float16, Format(32, 16)) == 3 * 2 + 3 * 4 + 2 * 2


def test_scales_add_six_bytes_for_every_group():
    assert traffic.scale_bytes_per_parameter("step", SMALLEST) == (4 + 2 + 4) / 32
    assert traffic.scale_bytes_per_parameter("refresh_step", SMALLEST) == (4 + 2 + 4 + 2) / 32
    assert traffic.scale_bytes_per_parameter("perturb", SMALLEST) == 0.0
    assert traffic.scale_bytes_per_parameter("step", Format(16, 8)) == 0.0


STEP = "ops.table_step(table, scalars, 1, 2, None, 0, False, False, {tallies}, {squares}, journal)"
KERNELS = {
    "norm": "ops.table_square_sums(table, sums, tables.GRAD, False)",
    "perturb": "ops.table_perturb(table, scales, False, 1, draw, journal)",
    "restore": "ops.table_restore(table, journal)",
    "step": STEP.format(tallies=None, squares=None),
    "refresh_step": STEP.format(tallies="tallies", squares=None),
    "step_in_state": STEP.format(tallies=None, squares="sums"),
    "refresh_step_in_state": STEP.format(tallies="tallies", squares="sums"),
    "momentum_ascent": "ops.table_momentum_ascent(table, scales, False, 1, draw)",
    "gap_sums": "ops.table_gap_sums(table, gap)",
    "decompose": "ops.table_decompose(table, torch.tensor([[0.3, 0.2]]))",
    "unseen_sums": "ops.table_unseen_sums(table, tallies, gap.view(1, 3))",
    "fill_unseen": "ops.table_fill_unseen(table, torch.tensor([[1.0, 1.0, 5.0]], dtype=torch.float64))",
}

STORED = {"": ("float32", FULL), ", 8-bit state and 24-bit x": ("bfloat16", SMALLEST)}
STORED |= {", 16-bit state": ("float32", Format(16)), ", 8-bit signed state": ("float16", Format(8, 16, signed=True))}
RUNS = {
    name + how: (name, kernel, dtype, stored)
    for name, kernel in KERNELS.items()
    for how, (dtype, stored) in STORED.items()
}

RUN = """
import json, os, sys, traceback
import torch
from sassha_fast import traffic
from sassha_fast._passes import layout as tables, library
from sassha_fast._passes.layout import StepScalars
from sassha_fast.formats import Format
library.load()
ops = torch.ops.sassha_fast


def made(column, dtype, stored):
    if column.endswith("_scale"):  # small, so that all change
        return torch.full((32,), 1e-6, dtype=torch.float32 if column == "exp_avg_scale" else torch.bfloat16)
    types = dict(zip(("exp_avg", "hessian"), stored.dtypes(dtype)), correction=stored.correction_dtype)
    found = types.get(column, dtype)
    return torch.rand(1000).to(found) if found.is_floating_point else torch.arange(1000).remainder(100).to(found)


def run(name, call, dtype, stored):
    scales, draw = torch.tensor([0.1]), torch.zeros(1, dtype=torch.int64)
    row = StepScalars(0.9, 0.9, 0.1, 0.99, 0.01, 0.5, 0.4, 0.5, 1.2, 1e-4, 0.1, 0.5)
    scalars = torch.tensor([row], dtype=torch.float64)
    journal, sums, gap, tallies = draw.new_zeros(2), *(torch.zeros(n, dtype=torch.float64) for n in (1, 3, 3))
    tallies = tallies.view(1, 3)
    kept = {}
    reads, writes = traffic.columns_of(name, stored)
    table = torch.zeros(1, tables.ROW_WORDS, dtype=torch.int64)
    ops.table_bind(table, tables.PARAM, [torch.rand(1000, dtype=dtype)])  # for size and dtype
    table[:, tables.PARAM], table[:, tables.FORMAT] = 0, stored.code
    for column in (*reads, *writes):
        kept[column] = kept[column] if column in kept else made(column, dtype, stored)
        table[:, getattr(tables, column.upper())] = kept[column].data_ptr()
    if name == "fill_unseen":  # an element to fill
        kept["grad"][3], kept["product"][3], kept["hessian"][3] = 0.0, 0.0, -0.0  # code 0 is no curvature, too
    before = {column: tensor.clone() for column, tensor in kept.items()}
    eval(call, globals(), locals())
    changed = {column for column, tensor in kept.items() if not torch.equal(tensor, before[column])}
    assert changed == set(writes), changed


found = {}
for key, (name, call, dtype, stored) in json.loads(sys.argv[1]).items():
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(write, 2)
        try:
            run(name, call, getattr(torch, dtype), Format(*stored))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as errors:
        said = errors.read()
    found[key] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ended():
    """How the process of every kernel ended, and what it said. They are forked, as importing torch takes seconds."""
    command = [sys.executable, "-c", RUN, json.dumps(RUNS)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", RUNS)
def test_kernels_touch_the_columns_that_they_declare_and_write_no_others(name, ended):
    """In a process of their own: every other column is a null pointer, which would end it."""
    code, said = ended[name]
    assert code == 0, said or f"ended by signal {-code}"


def rows(text, heading):
    """Cells of the table that begins with ``heading``."""
    table = text.split(heading)[1].split("\n\n")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]


def test_the_documents_state_the_bytes_of_every_pass():
    documented = {cells[0].strip("`"): int(cells[3]) for cells in rows(PAGE, "| pass | reads | writes |")[1:]}
    assert documented == FLOAT32


def test_the_documents_state_the_bytes_of_every_method():
    documented = {
        cells[0]: (int(cells[2]), int(cells[3])) for cells in rows(PAGE, "| method | passes of `step(closure)` |")[1:]
    }
    declared = {
        method: tuple(sum(map(traffic.bytes_per_parameter, passes)) for passes in kinds)
        for method, kinds in traffic.METHODS.items()
    }
    assert documented == declared
