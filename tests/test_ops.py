"""The operators' contract: schemas, errors, structs shared with Python, and instruction sets."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import REDUCED, place

from sassha_fast import reference, tables
from sassha_fast.scalars import StepScalars

pytestmark = pytest.mark.usefixtures("native_ops")
OPS = torch.ops.sassha_fast
ROOT = Path(__file__).resolve().parent.parent
SCALARS = torch.tensor([StepScalars(0.9, 0.9, 0.1, 0.99, 0.01, 0.5, 0.4, 1e-4, 0.1, 0.5)], dtype=torch.float64)


def some(dtype=torch.float32):
    return [torch.rand(5, dtype=dtype), torch.rand(0, dtype=dtype), torch.rand(10, 13, dtype=dtype)]


def arguments(dtype=torch.float32):
    """Valid arguments of every public operator."""
    state = reference.compute_dtype(dtype)
    step = (some(dtype), some(dtype), some(dtype), some(state), some(state))
    scales = torch.tensor([0.1, 0.2])
    return {
        "square_sums": [some(dtype), some(dtype), [0, 1, 0], 2],
        "perturb_": [some(dtype), some(dtype), some(dtype), scales, [0, 1, 0], [4, 5, 6], True, 1, torch.tensor([2])],
        "restore_": [some(dtype), some(dtype)],
        "rademacher_": [some(dtype), [1, 2, 3], 4, 5],
        "probe_": [some(dtype), [1, 2, 3], 0.1, 4, 5],
        "step_": [*step, SCALARS, [0, 0, 0], [1, 2, 3], 4, torch.tensor([5])],
        "refresh_step_": [*step, some(dtype), SCALARS, [0, 0, 0], [1, 2, 3], False, 4, 5, None, 1],
        "momentum_ascent_": [
            *(some(dtype), some(dtype), some(state)),
            *(scales, [0, 1, 0], [4, 5, 6], False, 1, torch.tensor([2])),
        ],
        "gap_sums": [some(dtype), some(dtype)],
        "decompose_": [some(dtype), some(dtype), torch.tensor([[0.1, 0.2], [0.3, 0.4]]), [0, 1, 0]],
    }


PUBLIC = list(arguments())
# Names of the leading tensor lists in the operators' errors; the first sets the shapes.
LISTS = {
    "square_sums": ["grads", "params"],
    "perturb_": ["params", "grads", "backups"],
    "restore_": ["params", "backups"],
    "rademacher_": ["outs"],
    "probe_": ["params"],
    "step_": ["params", "backups", "grads", "exp_avgs", "hessians"],
    "refresh_step_": ["params", "backups", "grads", "exp_avgs", "hessians", "products"],
    "momentum_ascent_": ["params", "weights", "exp_avgs"],
    "gap_sums": ["grads", "firsts"],
    "decompose_": ["grads", "firsts"],
}
EVERY_LIST = [(op, i) for op, names in LISTS.items() for i in range(len(names))]
LATER_LISTS = [(op, i) for op, i in EVERY_LIST if i > 0]
STATE = ("exp_avgs", "hessians")
NEED_ROW_MAJOR = [
    *((op, torch.float32) for op in ("rademacher_", "probe_", "refresh_step_")),
    *((op, dtype) for op in ("perturb_", "step_", "momentum_ascent_") for dtype in REDUCED),
]


def fails_with(op, args, *parts):
    with pytest.raises(RuntimeError) as error:
        getattr(OPS, op)(*args)
    message = str(error.value)
    for part in (f"sassha_{op.rstrip('_')}:", *parts):
        assert part in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", PUBLIC)
def test_operator_passes_opcheck(op, dtype):
    # No operator is differentiable, so test_autograd_registration only sees that none claims to be.
    torch.library.opcheck(getattr(OPS, op).default, tuple(arguments(dtype)[op]))


# ---- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "position"), EVERY_LIST)
def test_wrong_dtype_names_operator_list_and_index(op, position):
    args = arguments()[op]
    args[position][2] = torch.zeros(10, 13, dtype=torch.int32)
    fails_with(op, args, f"{LISTS[op][position]}[2]", "float32" if position == 0 else "is Int, expected Float")


@pytest.mark.parametrize(("op", "position"), [(op, i) for op, i in LATER_LISTS if LISTS[op][i] in STATE])
def test_state_of_reduced_parameters_must_be_float32(op, position):
    args = arguments(torch.bfloat16)[op]
    args[position] = some(torch.bfloat16)
    fails_with(op, args, f"{LISTS[op][position]}[0] is BFloat16, expected Float beside params[0]")


@pytest.mark.parametrize(("op", "position"), LATER_LISTS)
def test_wrong_shape_names_operator_list_index_and_both_shapes(op, position):
    args = arguments()[op]
    args[position][2] = torch.zeros(13, 10)
    fails_with(op, args, f"{LISTS[op][position]}[2] has shape (13, 10), expected (10, 13)")


@pytest.mark.parametrize(("op", "position"), LATER_LISTS)
def test_wrong_strides_name_operator_list_and_index(op, position):
    args = arguments()[op]
    args[position][2] = place(args[position][2], "transposed")
    fails_with(op, args, f"{LISTS[op][position]}[2] has other strides")


@pytest.mark.parametrize(("op", "position"), LATER_LISTS)
def test_wrong_list_length_names_operator_and_list(op, position):
    args = arguments()[op]
    args[position].append(torch.zeros(1))
    fails_with(op, args, f"{LISTS[op][position]} has 4 entries, expected 3")


@pytest.mark.parametrize(
    ("op", "position", "name"),
    [
        ("square_sums", 2, "groups"),
        ("perturb_", 4, "groups"),
        ("perturb_", 5, "indices"),
        ("rademacher_", 1, "indices"),
        ("probe_", 1, "indices"),
        ("step_", 6, "cohorts"),
        ("step_", 7, "indices"),
        ("refresh_step_", 7, "cohorts"),
        ("refresh_step_", 8, "indices"),
    ],
)
def test_wrong_number_of_integers_names_operator_and_list(op, position, name):
    args = arguments()[op]
    args[position] = [0, 0]
    fails_with(op, args, f"{name} has 2 entries, expected 3")


@pytest.mark.parametrize("op", PUBLIC)
def test_memory_with_gaps_names_operator_list_and_index(op):
    args = arguments()[op]
    args[0][2] = place(args[0][2], "gaps")
    fails_with(op, args, f"{LISTS[op][0]}[2] has gaps or overlaps in memory")


@pytest.mark.parametrize("op", PUBLIC)
def test_expanded_tensor_is_rejected_as_overlapping(op):
    args = arguments()[op]
    args[0][2] = torch.zeros(10, 1).expand(10, 13)
    fails_with(op, args, f"{LISTS[op][0]}[2] has gaps or overlaps in memory")


@pytest.mark.parametrize(("op", "dtype"), NEED_ROW_MAJOR, ids=str)
def test_random_numbers_need_memory_in_logical_order(op, dtype):
    args = arguments(dtype)[op]
    for i in range(len(LISTS[op])):
        args[i][2] = place(args[i][2], "transposed")
    fails_with(op, args, f"{LISTS[op][0]}[2] is not contiguous")


@pytest.mark.parametrize(("op", "position"), [("step_", 5), ("refresh_step_", 6)])
@pytest.mark.parametrize("wrong", [SCALARS[0], SCALARS[:, :-1], SCALARS.float(), SCALARS.t()], ids=range(4))
def test_scalars_of_another_shape_or_dtype_are_rejected(op, position, wrong):
    args = arguments()[op]
    args[position] = wrong
    fails_with(op, args, "scalars must be a contiguous float64 tensor", f"[cohorts, {len(StepScalars._fields)}]")


@pytest.mark.parametrize("bad", [-1, 1])
@pytest.mark.parametrize(("op", "position"), [("step_", 6), ("refresh_step_", 7)])
def test_cohort_without_a_row_of_scalars_is_rejected(op, position, bad):
    args = arguments()[op]
    args[position] = [0, 0, bad]
    fails_with(op, args, f"cohort {bad} has no row in scalars, which has 1")


@pytest.mark.parametrize("bad", [-1, 2])
@pytest.mark.parametrize(("op", "position"), [("square_sums", 2), ("perturb_", 4)])
def test_group_out_of_range_is_rejected(op, position, bad):
    args = arguments()[op]
    args[position] = [0, 0, bad]
    fails_with(op, args, f"group {bad}")


@pytest.mark.parametrize("wrong", [torch.ones(2, dtype=torch.float64), torch.ones(4)[::2]], ids=["dtype", "strides"])
def test_scales_must_be_contiguous_float32(wrong):
    args = arguments()["perturb_"]
    args[3] = wrong
    fails_with("perturb_", args, "scales must be a contiguous float32 tensor")


# ---- structs ------------------------------------------------------------------------------------------------------


def header(name):
    return re.sub(r"//[^\n]*", "", (ROOT / "csrc" / name).read_text())


def fields(struct):
    body = re.search(rf"struct {struct} \{{(.*?)\}};", header("params.h"), re.DOTALL).group(1)
    return re.findall(r"(\w+);", body)


def test_columns_of_the_table_are_the_fields_of_row():
    names = fields("Row")
    assert [getattr(tables, name.upper()) for name in names] == list(range(tables.ROW_WORDS))


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
    }


# ---- instruction sets ---------------------------------------------------------------------------------------------

DIGESTS = """
import hashlib, sys, torch
sys.path.insert(0, {tests!r})
from cases import CASES, DTYPES, build, bits
from sassha_fast import ops
assert ops.load() is None
import test_norm, test_perturb, test_probe, test_step
print(torch.ops.sassha_fast.cpu_isa())
def digest(name, tensors):
    # The payload of a NaN is nobody's promise.
    data = [bits(torch.where(t.isnan(), torch.full_like(t, torch.nan), t)).numpy().tobytes() for t in tensors]
    print(name, hashlib.sha256(b"".join(data)).hexdigest())
for case in CASES:
    if case.name not in ("sizes", "misaligned", "scalars"):
        continue
    for dtype in DTYPES:
        for flag in (False, True):
            lists = build(case, dtype)
            digest("norm", [test_norm.sums_by("ops", lists.weights, lists.grads, flag)])
            test_perturb.perturb_by("ops", lists.weights, lists.grads, test_perturb.SCALES, flag)
            digest("perturb", lists.weights)
        torch.ops.sassha_fast.probe_(lists.weights, list(range(len(lists.weights))), 0.1, 2, 3)
        digest("probe", lists.weights)
        torch.ops.sassha_fast.rademacher_(lists.weights, list(range(len(lists.weights))), 2, 3)
        digest("rademacher", lists.weights)
        for mode in test_step.MODES:
            for power in (0.5, 1.0, 0.7):
                lists = build(case, dtype, nonfinite=True)
                tally = test_step.step_by("ops", lists, test_step.scalars_for(power, mode), mode)
                digest("step", [*lists.weights, *lists.exp_avgs, *lists.hessians, *([] if tally is None else [tally])])
"""


def run_with_isa(isa, code):
    env = {**os.environ, "SASSHA_CPU_ISA": isa, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


def test_instruction_sets_give_the_same_bits():
    widest = OPS.cpu_isa()
    if widest == "generic":
        pytest.skip("this processor runs the generic kernels only")
    outputs = {}
    for isa in {"generic", "avx2", widest}:
        done = run_with_isa(isa, DIGESTS.format(tests=str(ROOT / "tests")))
        assert done.returncode == 0, done.stderr
        chosen, *outputs[isa] = done.stdout.splitlines()
        assert chosen == isa
        assert len(outputs[isa]) > 100
    for isa, lines in outputs.items():
        assert lines == outputs["generic"], isa


def test_unknown_instruction_set_is_named_in_the_error():
    code = "import torch; from sassha_fast import ops; ops.load(); torch.ops.sassha_fast.cpu_isa()"
    done = run_with_isa("sse9", code)
    assert done.returncode != 0
    assert "SASSHA_CPU_ISA=sse9 is not available on this machine" in done.stderr
