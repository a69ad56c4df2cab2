"""The operators' contract: schemas, errors, structs shared with Python, and instruction sets."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import place
from tolerances import PATIENCE

from sassha_fast import formats, reference
from sassha_fast._passes import layout as tables
from sassha_fast._passes.layout import StepScalars

pytestmark = pytest.mark.usefixtures("native_ops")
OPS = torch.ops.sassha_fast
ROOT = Path(__file__).resolve().parents[2]


def some(dtype=torch.float32):
    return [torch.rand(5, dtype=dtype), torch.rand(0, dtype=dtype), torch.rand(10, 13, dtype=dtype)]


def arguments(dtype=torch.float32):
    """Valid arguments of the operators on lists."""
    h = torch.tensor(0.1, dtype=torch.float64)
    return {"rademacher_": [some(dtype), [1, 2, 3], 4, 5], "probe_": [some(dtype), [1, 2, 3], h, 4, 5]}


LISTS = {"rademacher_": "outs", "probe_": "params"}


def fails_with(op, args, *parts):
    with pytest.raises(RuntimeError) as error:
        getattr(OPS, op)(*args)
    message = str(error.value)
    for part in (f"sassha_{op.rstrip('_')}:", *parts):
        assert part in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", LISTS)
def test_operator_passes_opcheck(op, dtype):
    # No operator is differentiable, so test_autograd_registration only sees that none claims to be.
    torch.library.opcheck(getattr(OPS, op).default, tuple(arguments(dtype)[op]))


# ---- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", LISTS)
def test_wrong_dtype_names_operator_list_and_index(op):
    args = arguments()[op]
    args[0][2] = torch.zeros(10, 13, dtype=torch.int32)
    fails_with(op, args, f"{LISTS[op]}[2] must be a dense float32, float64, bfloat16 or float16 tensor on the CPU")


@pytest.mark.parametrize("op", LISTS)
def test_wrong_number_of_integers_names_operator_and_list(op):
    args = arguments()[op]
    args[1] = [0, 0]
    fails_with(op, args, "indices has 2 entries, expected 3")


@pytest.mark.parametrize("layout", ["gaps", "transposed"])
@pytest.mark.parametrize("op", LISTS)
def test_random_numbers_need_memory_in_logical_order(op, layout):
    args = arguments()[op]
    args[0][2] = place(args[0][2], layout)
    fails_with(op, args, f"{LISTS[op]}[2] is not contiguous")


@pytest.mark.parametrize("op", LISTS)
def test_expanded_tensor_is_rejected(op):
    args = arguments()[op]
    args[0][2] = torch.zeros(10, 1).expand(10, 13)
    fails_with(op, args, f"{LISTS[op]}[2] is not contiguous")


# ---- structs ------------------------------------------------------------------------------------------------------


def header(name):
    return re.sub(r"//[^\n]*", "", (ROOT / "csrc" / name).read_text())


def fields(struct):
    body = re.search(rf"struct {struct} \{{(.*?)\}};", header("params.h"), re.DOTALL).group(1)
    return re.findall(r"(\w+);", body)


def test_columns_of_the_table_are_the_fields_of_row():
    names = fields("Row")
    assert [getattr(tables, name.upper()) for name in names] == list(range(tables.ROW_WORDS))


def test_the_journal_has_the_fields_of_the_struct():
    assert [getattr(tables, name.upper()) for name in fields("Journal")] == list(range(tables.JOURNAL_WORDS))


def test_step_scalars_have_the_fields_of_the_struct():
    assert list(StepScalars._fields) == fields("StepScalars")


def test_flags_and_noise_domains_agree_with_the_headers():
    flags = dict(re.findall(r"(k\w+) = (\d+),", re.search(r"enum Flag.*?\}", header("params.h"), re.DOTALL).group(0)))
    assert {k: int(v) for k, v in flags.items()} == {
        "kOwnsBuffer": tables.OWNS_BUFFER,
        "kSignedProduct": tables.SIGNED_PRODUCT,
        "kProbeGradient": tables.PROBE_GRADIENT,
    }
    domains = dict(re.findall(r"(k\w+Noise) = (0x\w+)u", header("philox.h")))
    assert {k: int(v, 16) for k, v in domains.items()} == {
        "kAscentNoise": reference.ASCENT_NOISE,
        "kUpdateNoise": reference.UPDATE_NOISE,
        "kMomentumNoise": formats.MOMENTUM_NOISE,
        "kCurvatureNoise": formats.CURVATURE_NOISE,
    }


# ---- instruction sets ---------------------------------------------------------------------------------------------

DIGESTS = """
import hashlib, sys, torch
sys.path[:0] = {folders!r}
from cases import CASES, DTYPES, build, bits
from sassha_fast._passes import library as ops
assert ops.load() is None
import test_norm, test_perturb, test_probe, test_step
print(torch.ops.sassha_fast.cpu_isa())
def digest(name, tensors):
    # The payload of a NaN is nobody's promise.
    data = [bits(torch.where(t.isnan(), torch.full_like(t, torch.nan), t)).numpy().tobytes() for t in tensors]
    print(name, hashlib.sha256(b"".join(data)).hexdigest())
for case in CASES:
    if case.name not in ("sizes", "misaligned", "empties"):
        continue
    for dtype in DTYPES:
        for flag in (False, True):
            lists = build(case, dtype)
            digest("norm", [test_norm.sums_by("native", lists.weights, lists.grads, flag)])
            test_perturb.perturb_by("native", lists.weights, lists.grads, test_perturb.SCALES, flag)
            digest("perturb", lists.weights)
        h = torch.tensor(0.1, dtype=torch.float64)
        torch.ops.sassha_fast.probe_(lists.weights, list(range(len(lists.weights))), h, 2, 3)
        digest("probe", lists.weights)
        torch.ops.sassha_fast.rademacher_(lists.weights, list(range(len(lists.weights))), 2, 3)
        digest("rademacher", lists.weights)
        for mode in test_step.MODES:
            for power in (0.5, 1.0, 0.7):
                lists = build(case, dtype, nonfinite=True)
                tally = test_step.step_by("native_restored", lists, test_step.scalars_for(power, mode), mode)
                digest("step", [*lists.weights, *lists.exp_avgs, *lists.hessians, *([] if tally is None else [tally])])
"""


def run_with_isa(isa, code):
    env = {**os.environ, "SASSHA_CPU_ISA": isa, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=PATIENCE)


def test_instruction_sets_give_the_same_bits():
    widest = OPS.cpu_isa()
    if widest == "generic":
        pytest.skip("this processor runs the generic kernels only")
    folders = [str(ROOT / "tests" / name) for name in ("support", "kernels")]
    outputs = {}
    for isa in {"generic", "avx2", widest}:
        done = run_with_isa(isa, DIGESTS.format(folders=folders))
        assert done.returncode == 0, done.stderr
        chosen, *outputs[isa] = done.stdout.splitlines()
        assert chosen == isa
        assert len(outputs[isa]) > 100
    for isa, lines in outputs.items():
        assert lines == outputs["generic"], isa


def test_unknown_instruction_set_is_named_in_the_error():
    code = "import torch; from sassha_fast._passes import library; library.load(); torch.ops.sassha_fast.cpu_isa()"
    done = run_with_isa("sse9", code)
    assert done.returncode != 0
    assert "SASSHA_CPU_ISA=sse9 is not available on this machine" in done.stderr
