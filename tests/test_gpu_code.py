"""What the machine code of the CUDA kernels says: the bytes they move, the width of each access, registers."""

import shutil
import sys
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OBJECTS = ROOT / "build" / "native"
sys.path.insert(0, str(ROOT / "bench"))
import prove_gpu  # noqa: E402
import sass  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here, so there is no machine code")
MAIN = {
    "square_sum": [("square_sum", "float", "")],
    "perturb": [("perturb", "float", ""), ("perturb", "float", "adaptive")],
    "restore": [("restore", "float", "")],
    "momentum_ascent": [("momentum_ascent", "float", ""), ("momentum_ascent", "float", "adaptive")],
    "gap_sums": [("gap_sums", "float", "")],
    "decompose": [("decompose", "float", "")],
    "probe": [("probe", "float", "")],
    **{
        name: [(name, "float", power) for power in prove_gpu.POWERS]
        for name in ("step", "refresh_step", "apart_step", "apart_refresh_step")
    },
}


@pytest.fixture(scope="module")
def kernels():
    found = prove_gpu.read_objects(OBJECTS, 80)
    assert len(found) == 95, sorted(found)
    return found


@pytest.mark.parametrize("name", MAIN)
def test_float32_passes_move_no_byte_more_than_the_algorithm_needs(name, kernels):
    for label in MAIN[name]:
        assert prove_gpu.bytes_per_parameter(kernels[label]) == prove_gpu.FLOOR[name], label


@pytest.mark.parametrize("name", MAIN)
def test_float32_passes_reach_three_quarters_of_the_threads(name, kernels):
    for label in MAIN[name]:
        assert prove_gpu.occupancy_of(kernels[label]) >= 0.75, label


def test_every_hot_loop_takes_128_bits_at_a_time(kernels):
    for label, kernel in kernels.items():
        if label[1]:  # the sums over chunks have no dtype and no vectors
            assert kernel.bytes > 0, label
            assert kernel.widest_only, label


def test_no_kernel_spills_registers(kernels):
    for label, kernel in kernels.items():
        assert (kernel.spills, kernel.stack) == (0, 0), label


def test_no_multiplication_is_contracted_with_an_addition(kernels):
    """The divisions and roots are built of FFMA, so what is counted is a kernel that has neither."""
    for label in chain.from_iterable(MAIN[name] for name in ("perturb", "momentum_ascent", "decompose", "probe")):
        assert not any(i.opcode.startswith("FFMA") for i in kernels[label].code), label


# ---- the reader ---------------------------------------------------------------------------------------------------

LISTING = """
        /*0000*/                   LDG.E R0, [R2.64] ;
        /*0010*/              @!P0 BRA 0x0050 ;
        /*0020*/                   LDG.E.128 R4, [R2.64] ;
        /*0030*/                   STG.E.64 [R2.64], R4 ;
        /*0040*/               @P0 BRA 0x0020 ;
        /*0050*/                   LDG.E.U16 R4, [R2.64] ;
        /*0060*/                   STL [R1], R4 ;
        /*0070*/               @P1 BRA 0x0050 ;
        /*0080*/                   EXIT ;
"""


def test_reader_finds_the_loop_that_moves_most():
    kernel = sass.Kernel("k", 80, 40, 0, 0, sass.instructions(LISTING))
    assert sorted(len(loop) for loop in sass.natural_loops(kernel.code)) == [3, 3]
    assert [i.opcode for i in kernel.hot_loop] == ["LDG.E.128", "STG.E.64", "BRA"]
    assert (kernel.bytes, kernel.widest_only, kernel.spills) == (24, False, 1)


def test_reader_is_not_misled_by_cold_code_that_jumps_back():
    """Code moved out of the way to the end of a function jumps backwards, but its target does not dominate it."""
    cold = LISTING.replace(
        "/*0020*/                   LDG.E.128 R4, [R2.64] ;", "/*0020*/               @P2 BRA 0x00a0 ;"
    )
    cold += (
        "        /*00a0*/                   LDG.E.128 R4, [R2.64] ;\n        /*00b0*/                   BRA 0x0030 ;\n"
    )
    kernel = sass.Kernel("k", 80, 40, 0, 0, sass.instructions(cold))
    assert {i.address for i in kernel.hot_loop} == {0x20, 0x30, 0x40, 0xA0, 0xB0}


@pytest.mark.parametrize("branch", ["BRA.U UP0, 0x0040", "BRA !P5, 0x0040", "BRA.DIV UR5, 0x0040"])
def test_reader_knows_conditions_among_operands(branch):
    inside = LISTING.replace("STG.E.64 [R2.64], R4 ;", f"{branch} ;")
    kernel = sass.Kernel("k", 80, 40, 0, 0, sass.instructions(inside))
    assert [i.address for i in kernel.hot_loop] == [0x20, 0x30, 0x40]


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "expected"),
    [(80, 32, 0, 1.0), (80, 40, 0, 0.75), (80, 41, 0, 0.625), (90, 64, 0, 0.5), (80, 32, 40 * 1024, 0.5)],
)
def test_occupancy_follows_the_published_limits(arch, registers, shared, expected):
    assert sass.occupancy(arch, registers, shared, 256) == expected


def test_the_document_has_a_row_for_every_kernel(kernels):
    text = sass.DOCUMENT.read_text()
    for arch in prove_gpu.ARCHS:
        part = text.split(f"### sm_{arch}\n")[1].split("###")[0].split("<!--")[0]
        assert part.count("\n| ") == 2 + sum(bool(label[1]) for label in kernels)
    assert "These are predictions from byte counts" in text
