"""What can be known about the Triton kernels without a GPU: they are compiled for every target and read.

    python -m tools.prove_triton                 the whole matrix; writes docs/gpu-tables.md, a sentence to docs/gpu.md
    python -m tools.prove_triton --json --targets sm_80 gfx942 --dtypes float32

Checked for every kernel: no spilled register, full chunks move in words of 128 bits only, and what they move is what
the algorithm needs (DESIGN §3) with a tenth to spare. ``TRITON_INTERPRET`` must not be set.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from sassha_fast.triton_kernels import access, math
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tools.document import SUMMARY, TABLES
from tools.document import section as write_section
from tools.triton_matrix import DTYPES, KERNELS, TYPES, Kernel

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (75, 80, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
CHUNK, WORD = access.CHUNK.value, 16
SLACK = 1.1


@dataclass(frozen=True)
class Figures:
    """What the assembly of a kernel says.

    Attributes:
        registers: Vector registers of a thread.
        spills: Registers, instructions and bytes of memory that spilling takes.
        parked: Scalar registers kept in lanes of a vector register (AMD), which costs no memory.
        loads: 128-bit loads of a thread in the path of full chunks.
        stores: 128-bit stores there.
        ptx_loads: The same in PTX; equals ``loads`` on AMD, which has none.
        ptx_stores: The same in PTX.
        philox_multiplies: High halves of 32-bit products in PTX, of which a Philox call takes 20.
        contracted: Multiplications fused with additions: in PTX, and in binaries of kernels that do not divide.
        approximate: Divisions and roots that may not be correctly rounded, and operations that flush subnormals.
        shared: Bytes of shared memory of a program.
        bytes: Bytes per parameter in the path of full chunks.
        floor: Bytes per parameter that the algorithm needs.
    """

    kernel: str
    dtype: str
    target: str
    registers: int
    spills: int
    parked: int
    loads: int
    stores: int
    ptx_loads: int
    ptx_stores: int
    philox_multiplies: int
    contracted: int
    approximate: int
    shared: int
    bytes: float
    floor: int

    def faults(self) -> list[str]:
        """What is wrong with it."""
        found = []
        if self.spills:
            found.append(f"{self.spills} spills")
        if self.contracted:
            found.append(f"{self.contracted} contractions")
        if self.approximate:
            found.append(f"{self.approximate} approximate operations")
        if self.floor and (self.loads, self.stores) != (self.ptx_loads, self.ptx_stores):
            found.append(f"{self.loads}+{self.stores} words in the binary, {self.ptx_loads}+{self.ptx_stores} in PTX")
        if self.bytes < self.floor:  # the rest moves in shorter words
            found.append(f"only {self.bytes:g} of {self.floor} bytes per parameter in words of 128 bits")
        if self.floor and self.bytes > SLACK * self.floor:
            found.append(f"{self.bytes:g} bytes per parameter, {self.floor} would do")
        return [f"{self.kernel}, {self.dtype}, {self.target}: {fault}" for fault in found]


# ---- compiling and reading ----------------------------------------------------------------------------------------


def compiled(function: object, constants: dict[str, object], types: dict[str, str] | None, target: GPUTarget) -> object:
    """The kernel for a target, with the options of a launch."""
    known = {**TYPES, **(types or {})}
    signature = {name: "constexpr" if name in constants else known[name] for name in function.arg_names}
    attributes = {
        (i,): [["tt.divisibility", WORD]] for i, name in enumerate(function.arg_names) if signature[name][0] == "*"
    }
    options = access.launch_options(constants.get("T"), target.warp_size, constants.get("FORMAT", 0))
    return triton.compile(ASTSource(function, signature, constants, attributes), target=target, options=options)


def _tool(name: str, option: str, binary: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([TOOLS / name, option, file.name], capture_output=True, text=True, check=True).stdout


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"prove_triton: no {pattern!r} in the compiler's output")
    return int(found[1])


def _nvidia(asm: dict, *, divides: bool) -> dict[str, int]:
    sass, usage, ptx = _tool("nvdisasm", "-c", asm["cubin"]), _tool("cuobjdump", "-res-usage", asm["cubin"]), asm["ptx"]
    word = r"\.(?:v4\.b32|v2\.b64)\b"
    return {
        "registers": _number(r"REG:(\d+)", usage),
        "spills": _number(r"LOCAL:(\d+)", usage) + _count(r"\b(?:LDL|STL)\b", sass),
        "parked": 0,
        "loads": _count(r"\bLDG\.E[.\w]*\.128\b", sass),
        "stores": _count(r"\bSTG\.E[.\w]*\.128\b", sass),
        "ptx_loads": _count(r"\bld\.global[.\w:]*?" + word, ptx),
        "ptx_stores": _count(r"\bst\.global[.\w:]*?" + word, ptx),
        "philox_multiplies": _count(r"\bmul\.hi\.u32\b", ptx) + _count(r"\bmul\.wide\.u32\b", ptx),
        # The library's floor flushes subnormals. The rounding of float16 takes it of magnitudes: it would be 0 anyway.
        "approximate": _count(r"\b(?:div|sqrt|rcp|rsqrt)\.(?:approx|full)|(?<!\bcvt\.rmi)\.ftz\b", ptx),
        "contracted": _count(r"\bfma\.rn\b", ptx) + (0 if divides else _count(r"\b[FD]FMA\b", sass)),
    }


def _amd(asm: dict, *, divides: bool) -> dict[str, int]:
    text = asm["amdgcn"]
    loads, stores = (_count(rf"\b(?:global|buffer)_{what}_dwordx4\b", text) for what in ("load", "store"))
    memory = _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
    return {
        "registers": _number(r"\.vgpr_count:\s+(\d+)", text),
        "spills": _number(r"\.vgpr_spill_count:\s+(\d+)", text) + memory,
        "parked": _number(r"\.sgpr_spill_count:\s+(\d+)", text),
        "loads": loads,
        "stores": stores,
        "ptx_loads": loads,
        "ptx_stores": stores,
        "philox_multiplies": _count(r"\bv_mul_hi_u32\b", text),
        "approximate": _count(r"!fpmath|\bafn\b|\barcp\b|\bfast\b", asm["llir"]),
        "contracted": 0 if divides else _count(r"\bv_(?:pk_)?(?:fma|mac|mad|fmac)_f(?:32|64)", text),
    }


def figures(kernel: Kernel, dtype: str, target: str) -> Figures:
    """Compiles a kernel and reads what came out."""
    constants = {**kernel.constants, **({"T": DTYPES[dtype]} if kernel.floor(dtype) else {})}
    built = compiled(kernel.function, constants, kernel.types, TARGETS[target])
    read_binary = _amd if target.startswith("gfx") else _nvidia
    read = read_binary(built.asm, divides=kernel.divides())
    if kernel.constants.get("POWER") == math.ANY.value:  # the library's has fused steps in PTX too
        read["contracted"] = read["approximate"] = 0
    threads = access.threads_of(DTYPES[dtype], kernel.stored.code)
    moved = (read["loads"] + read["stores"]) * WORD * threads / CHUNK
    return Figures(
        kernel.name,
        dtype,
        target,
        **read,
        shared=built.metadata.shared,
        bytes=moved,
        floor=kernel.floor(dtype),
    )


def matrix(targets: Sequence[str], dtypes: Sequence[str], kernels: Sequence[str]) -> list[Figures]:
    """Figures of the named kernels."""
    return [
        figures(kernel, dtype, target)
        for target in targets
        for kernel in KERNELS
        for dtype in dtypes
        if kernel.name in kernels and dtype in kernel.dtypes
    ]


NOTES = """\
How to read it, and where these kernels differ from the CUDA ones:

- A program is 256 threads on a chunk of 2048 parameters, 512 in float64, so a thread has two words of 128 bits of every
  stream of float32 or float64 at once, and one of bfloat16 or float16. Where there are streams of 8 bits it is 128
  threads, so that a thread has one word of these and two of bfloat16 or float16. All loads of a chunk are in flight
  together, which is where the registers go. A thread that takes one word at a time needs fewer. No GPU has timed either
  choice.
- The path for the last chunk of a tensor and for addresses that are no multiple of 16 bytes accesses single elements
  under a mask. Both paths call the same functions, so the code, not the registers, is about twice that of one path.
  Programs decide by the addresses in their own row: nothing is specialised on alignment.
- "Moved" counts the words of the path of full chunks. Beside them a program reads 12 bytes that say which chunk is its
  own, its row of the table and its scalars, less than 0.2 bytes per parameter, from caches after the first program;
  with 8-bit state also the scales of groups, 3/16 of a byte per parameter of m and D together, and what it writes of
  them.
- Shared memory (at most {shared} bytes) regroups elements where loads and stores differ in width: bfloat16 and float16
  beside float32 state, 8-bit streams beside any other, and last chunks. Full float32 and float64 chunks do without.
- Squares are added in double, as everywhere. On GPUs with one double unit in 64 these, and not memory, may be
  what the norm, the sums of the gap and an update apart wait for.
- A general power is `pow` of the vendor's device library, as in CUDA: its last bits are the vendor's. Powers ½ and 1
  are bit for bit the reference.
- Updates of all kinds of products share one kernel: signs that a product does not need are computed and not used.
"""

# ---- the report ---------------------------------------------------------------------------------------------------


def section(found: Sequence[Figures], targets: Sequence[str]) -> str:
    """The figures as a section of docs/gpu-tables.md."""
    cells = {(f.kernel, f.dtype, f.target): f for f in found}
    lines = [
        "## Triton",
        "",
        f"Compiled by Triton {triton.__version__} for each target, without a GPU; `make prove-triton` writes this "
        "section and fails if a kernel spills, contracts, approximates, moves a full chunk in anything but words of "
        "128 bits (`ld.global.v4.b32` or `v2.b64` in PTX and `LDG.E.128` in SASS, `global_load_dwordx4` or "
        "`buffer_load_dwordx4` on gfx942, and the same for stores), or moves more than a tenth above the floor. "
        "The last columns are registers of a thread.",
        "",
        "| kernel | dtype | floor, bytes per parameter | moved | " + " | ".join(targets) + " |",
        "|---|---|---|---|" + "---|" * len(targets),
    ]
    for name, dtype in dict.fromkeys((f.kernel, f.dtype) for f in found):
        row = [cells[name, dtype, target] for target in targets]
        moved = sorted({f"{f.bytes:g}" if f.floor else "-" for f in row})
        registers = " | ".join(str(f.registers) for f in row)
        lines.append(f"| {name} | {dtype} | {row[0].floor or '-'} | {' or '.join(moved)} | {registers} |")
    spills, contracted = sum(f.spills for f in found), sum(f.contracted for f in found)
    lines += ["", f"{len(found)} kernels compiled; spills: {spills}; contractions: {contracted}.", ""]
    for f in found:
        if f.parked:
            where = f"{f.kernel}, {f.dtype}, {f.target}"
            lines += [f"{where}: scalar registers that wait in vector registers, not in memory: {f.parked}.", ""]
    lines.append(NOTES.format(shared=max(f.shared for f in found)))
    return "\n".join(lines)


def summary(found: Sequence[Figures], targets: Sequence[str]) -> str:
    """The figures in a sentence, for docs/gpu.md."""
    spills, contracted = sum(f.spills for f in found), sum(f.contracted for f in found)
    most = max(found, key=lambda f: f.registers)
    return (
        f"Triton {triton.__version__} compiled {len(found)} kernels for {', '.join(targets)}: {spills} spills, "
        f"{contracted} contractions, full chunks in words of 128 bits alone and at the bytes of the "
        f"algorithm; at most {most.registers} registers ({most.kernel}, {most.dtype}, {most.target})."
    )


def write(found: Sequence[Figures], targets: Sequence[str]) -> None:
    """Puts both between their markers."""
    write_section(TABLES, "prove_triton", section(found, targets))
    write_section(SUMMARY, "triton kernels", summary(found, targets))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    names = [kernel.name for kernel in KERNELS]
    parser.add_argument("--kernels", nargs="+", default=names, choices=names)
    parser.add_argument("--json", action="store_true", help="print the figures and write nothing")
    arguments = parser.parse_args()
    asked = (arguments.targets, arguments.dtypes, arguments.kernels)
    found = matrix(*asked)
    if arguments.json:
        print(json.dumps([asdict(f) for f in found]))
        return 0
    faults = [fault for f in found for fault in f.faults()]
    for fault in faults:
        print(fault)
    if not faults:
        print(section(found, arguments.targets))
        if asked == (list(TARGETS), list(DTYPES), names):
            write(found, arguments.targets)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
