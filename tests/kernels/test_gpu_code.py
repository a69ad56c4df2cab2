"""What the machine code of the CUDA kernels says: the bytes they move, the width of each access, registers."""

import shutil
from pathlib import Path

import pytest

from sassha_fast import traffic
from tools import document, prove_gpu, sass

ROOT = Path(__file__).parents[2]
OBJECTS = ROOT / "build" / "native"

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here, so there is no machine code")
# Passes without a division or a root, which are built of FFMA.
PLAIN = ("perturb", "momentum_ascent", "decompose", "probe")


@pytest.fixture(scope="module")
def kernels():
    found = prove_gpu.read_objects(OBJECTS, 80)
    assert len(found) == 104, sorted(found)
    return found


@pytest.fixture(scope="module")
def compact_kernels():
    found = prove_gpu.read_objects(OBJECTS, 80, prove_gpu.COMPACT_SOURCES)
    assert len(found) == 70, sorted(found)
    return found


def test_kernels_over_fewer_bits_move_the_least_bytes_in_whole_vectors_beside_scales_without_spills(compact_kernels):
    found = {label: wrong for label, kernel in compact_kernels.items() if (wrong := prove_gpu.shortcomings(kernel))}
    assert found == {}


def test_the_smallest_format_moves_9_11_and_14_bytes_a_parameter(compact_kernels):
    least = {"compact_perturb": ("32+8", 9), "compact_step": ("8+8", 11), "compact_refresh_step": ("8+8", 14)}
    for name, (variant, moved) in least.items():
        assert prove_gpu.bytes_per_parameter(compact_kernels[name, "bfloat16", variant]) == moved


def test_every_kernel_moves_the_least_bytes_in_whole_vectors_without_spills_and_has_enough_of_them_in_flight(kernels):
    assert {label: found for label, kernel in kernels.items() if (found := prove_gpu.shortcomings(kernel))} == {}


def test_the_least_bytes_of_float32_are_those_of_the_other_backends():
    names = {"square_sum": "norm"}
    for name in prove_gpu.FLOOR.keys() - {"rademacher"}:
        assert prove_gpu.floor(name, "float") == traffic.bytes_per_parameter(names.get(name, name))


def test_no_multiplication_is_contracted_with_an_addition(kernels):
    for label, kernel in kernels.items():
        if label[0] in PLAIN and label[1] == "float":
            assert not any(i.opcode.startswith("FFMA") for i in kernel.code), label


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


def test_reader_counts_bytes_that_are_asked_for_before_any_is_used():
    loads = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   IADD3 R2, P0, R2, 0x10, RZ ;
        /*0020*/                   LDG.E.128 R8, [R2.64+0x20] ;
        /*0030*/                   {} ;
        /*0040*/                   LDG.E.64 R12, [R2.64] ;
        /*0050*/                   FADD R4, R4, R8 ;
        /*0060*/                   STG.E.128 [R2.64], R4 ;
        /*0070*/               @P0 BRA 0x0000 ;
        /*0080*/                   EXIT ;
    """
    for between, expected in {
        "MOV R30, R31": 40,
        "FMUL R30, R3, R13": 40,
        "FMUL R30, R3, R11.reuse": 32,
        "PRMT R30, R5, 0x10, RZ": 32,
        "STG.E.128 [R40.64], R8": 32,
        "LDG.E R30, [R6.64]": 32,
    }.items():
        kernel = sass.Kernel("k", 80, 40, 0, 0, sass.instructions(loads.format(between)))
        assert kernel.bytes_ahead == expected, between


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
    text = document.TABLES.read_text(encoding="utf-8")
    for arch in prove_gpu.ARCHS:
        part = text.split(f"### sm_{arch}\n")[1].split("###")[0].split("<!--")[0]
        assert part.count("\n| ") == 2 + sum(bool(label[1]) for label in kernels)
    assert "These are predictions from byte counts" in text


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """Copies of the pages that the provers write."""
    for name in ("SUMMARY", "TABLES"):
        page = getattr(document, name)
        copy = tmp_path / page.name
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(prove_gpu, name, copy)
    return tmp_path / "gpu.md", tmp_path / "gpu-tables.md"


def test_what_is_written_is_what_stands_on_the_pages(pages):
    """Written from the rows of the long tables, both pages come out as they are."""
    long = {}
    for part in document.read_section(document.TABLES, "cuda kernels").split("### sm_")[1:]:
        arch, _, rows = part.partition("\n")
        long[int(arch)] = document.read_table(rows)
    assert tuple(long) == prove_gpu.ARCHS
    before = [page.read_text(encoding="utf-8") for page in pages]
    for page, name in ((pages[0], "cuda passes"), (pages[1], "cuda kernels"), (pages[1], "cuda predictions")):
        document.section(page, name, "gone")
    prove_gpu.write(long)
    assert [page.read_text(encoding="utf-8") for page in pages] == before


def test_rows_of_machine_code_fill_the_short_table(kernels):
    rows = prove_gpu.kernel_rows(kernels)
    short = document.read_table(prove_gpu.short_table({80: rows, 90: rows}))
    assert [row[0] for row in short] == list(prove_gpu.SHORT)
    for name, *_, registers, _ in short:
        power = "half" if "step" in name else ""
        kernel = kernels[prove_gpu.SHORT[name].removesuffix(" (half)"), "float", power]
        assert registers == f"{kernel.registers} / {kernel.registers}"


def test_a_page_without_markers_is_named(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Nothing\n")
    with pytest.raises(RuntimeError, match=r"page\.md has no markers <!-- cuda kernels: begin -->"):
        document.section(page, "cuda kernels", "text")
