"""``make prove-gpu``: compiles the CUDA kernels for several architectures and writes what their code says.

Fails where a kernel spills, accesses memory in less than 128 bits, moves more bytes than the algorithm needs, or has
too few of them in flight. Needs nvcc and no GPU. The tables go to docs/gpu-tables.md, a short one to docs/gpu.md.
``read_objects`` serves the test that checks what `make build` has compiled.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bench.shapes import count, gpt
from sassha_fast import traffic
from sassha_fast.formats import GROUP, Format
from tools.document import ROOT, SUMMARY, TABLES, section, table
from tools.sass import MAX_WARPS, WARP, Kernel, occupancy, read

ARCHS = (80, 90, 100)
SOURCES = ("norm", "perturb", "gap", "unseen", "probe", "step")  # csrc/cuda/*.cu with kernels
COMPACT_SOURCES = ("compact",)  # of passes over fewer bits, which are checked and have no rows on the pages
THREADS = 256  # kThreads in csrc/cuda/multi_tensor.cuh
ITEM = {"float": 4, "double": 8, "bfloat16": 2, "float16": 2}
POWERS = ("half", "one", "general")
# Of float16 with corrections nvcc decodes one of the parameters' two vectors before it asks for the rest.
IN_FLIGHT_FLOAT16 = {80: 36 << 10, 90: 36 << 10, 100: 24 << 10}
IN_FLIGHT = 40 << 10  # kBytesInFlight there: bytes that threads of a multiprocessor must have asked for
# What the algorithm can't do without: accesses to numbers of the parameters' dtype, and of the state's.
FLOOR = {
    "square_sum": (1, 0),
    "perturb": (4, 0),
    "restore": (2, 0),
    "momentum_ascent": (2, 1),
    "gap_sums": (2, 0),
    "decompose": (3, 0),
    "unseen_sums": (2, 1),
    "fill_unseen": (2, 2),
    "probe": (2, 0),
    "rademacher": (1, 0),
    "step": (3, 3),
    "refresh_step": (4, 4),
    "step_in_state": (3, 3),
    "refresh_step_in_state": (4, 4),
}
# Vectors of an operand that a thread takes in one turn of the hot loop, where it is not one: kAhead in csrc/cuda.
PAIRS = ("square_sum", "restore", "momentum_ascent", "probe")
# The kernels of the short table, as the long ones name them, by pass; power ½, which is the default.
SHORT = {
    "norm": "square_sum",
    "perturb": "perturb",
    "restore": "restore",
    "probe": "probe",
    "rademacher": "rademacher",
    "step": "step (half)",
    "step, refresh": "refresh_step (half)",
    "momentum ascent": "momentum_ascent",
    "step, x in state": "step_in_state (half)",
    "step, x in state, refresh": "refresh_step_in_state (half)",
    "gap sums": "gap_sums",
    "decompose": "decompose",
}
HEADER = ["kernel", "dtype", "registers", "shared", "spills", "128-bit loads / stores", "nothing narrower"]
HEADER += ["bytes per parameter", "occupancy", "in flight"]
# Of enum State in csrc/formats.h. A run-time switch tells codes of D with a sign from those without.
STATE_BITS = (32, 16, 8)
COMPACT = "compact_"  # begins the names of passes over fewer bits; their variant is bits of state + bits of correction
RUN = 16  # elements that a thread takes at once there: kRun in csrc/cuda/stored.cuh
# Bandwidth by the vendor's data sheet, GB/s.
GPUS = {"A100 80 GB SXM": 2039, "H100 SXM": 3350}
# What moves in one step: names of FLOOR.
STEPS = {
    "ordinary step, `step(closure)`": ("square_sum", "perturb", "step"),
    "ordinary step, three calls": ("square_sum", "perturb", "restore", "step"),
    "refresh, exact products, three calls": ("square_sum", "perturb", "restore", "refresh_step"),
    "M-SASSHA, ordinary step": ("step_in_state", "momentum_ascent"),
    "M-SASSHA, refresh": ("refresh_step_in_state", "momentum_ascent"),
    "G-SASSHA, ordinary step, `step(closure)`": ("square_sum", "perturb", "gap_sums", "decompose", "step"),
}


def label(kernel: Kernel) -> tuple[str, str, str]:
    """Pass, dtype and variant of a kernel by its mangled name."""
    name = re.search(r"cuda\d+([a-z_]+)_kernel", kernel.name)
    assert name is not None, kernel.name
    types = {"If": "float", "Id": "double", "INS_7Float16E": "float16", "INS_8BFloat16E": "bfloat16"}
    arguments = kernel.name[name.end() :]
    stored = re.search(r"StoredI(f|NS_7Float16E|NS_8BFloat16E)LNS_5StateE(\d)ELNS_10CorrectionE(\d)E", arguments)
    if stored:
        dtype = {"f": "float", "NS_7Float16E": "float16", "NS_8BFloat16E": "bfloat16"}[stored[1]]
        return name[1], dtype, f"{STATE_BITS[int(stored[2])]}+{8 * int(stored[3])}"
    dtype = next((types[code] for code in types if arguments.startswith(code)), "")
    flag = "Lb1E" in arguments  # of an update whether x is kept in state, of the other passes ASAM's scaling
    power = re.search(r"PowerE(\d)E", arguments)
    if power:
        return f"{name[1]}_in_state" if flag else name[1], dtype, POWERS[int(power[1])]
    return name[1], dtype, "adaptive" if flag else ""


def stored_as(name: str, dtype: str, variant: str) -> tuple[str, torch.dtype, Format]:
    """A kernel over fewer bits as ``traffic.py`` names it."""
    state, correction = map(int, variant.split("+"))
    return name.removeprefix(COMPACT), getattr(torch, {"float": "float32"}.get(dtype, dtype)), Format(state, correction)


def floor(name: str, dtype: str, variant: str = "") -> int:
    """Bytes per parameter that a pass can't do without."""
    if name.startswith(COMPACT):
        return traffic.bytes_per_parameter(*stored_as(name, dtype, variant))
    params, state = FLOOR[name]
    params += (name, variant) == ("square_sum", "adaptive")  # which reads the parameters as well
    return params * ITEM[dtype] + state * max(ITEM[dtype], ITEM["float"])


def bytes_per_parameter(kernel: Kernel) -> float:
    """Bytes of global memory in the hot loop for each element."""
    name, dtype, variant = label(kernel)
    if name.startswith(COMPACT):
        return (kernel.bytes - sum(kernel.narrow)) / RUN  # beside the scales of groups
    powers_of_doubles = name in ("step", "step_in_state") and (dtype, variant) == ("double", "general")
    vectors = 2 if name in PAIRS or powers_of_doubles else 1
    return kernel.bytes / (vectors * (16 // ITEM[dtype]))


def all_wide(kernel: Kernel) -> bool:
    """Whether all goes in words of 128 bits, but for the scales of groups: one of each that the pass takes."""
    name, dtype, variant = label(kernel)
    if not name.startswith(COMPACT):
        return kernel.widest_only
    passed, _, stored = stored_as(name, dtype, variant)
    return sum(kernel.narrow) == traffic.scale_bytes_per_parameter(passed, stored) * GROUP


def occupancy_of(kernel: Kernel) -> float:
    """Theoretical occupancy with the launchers' block size."""
    return occupancy(kernel.arch, kernel.registers, kernel.shared, THREADS)


def bytes_in_flight(kernel: Kernel) -> int:
    """Bytes that the resident threads of a multiprocessor have asked for when the first of them wait."""
    return round(occupancy_of(kernel) * MAX_WARPS[kernel.arch] * WARP) * kernel.bytes_ahead


def shortcomings(kernel: Kernel) -> list[str]:
    """What is wrong with a kernel, for a pass bound by memory."""
    name, dtype, variant = label(kernel)
    found = []
    if kernel.spills or kernel.stack:
        found.append(f"{kernel.spills} accesses to {kernel.stack} bytes of local memory")
    if dtype:  # the sums over chunks have none
        if not all_wide(kernel):
            found.append(f"accesses of less than 128 bits: {list(kernel.narrow)} bytes")
        moved, least = bytes_per_parameter(kernel), floor(name, dtype, variant)
        if moved != least:
            found.append(f"{moved:g} bytes per parameter, expected {least}")
        flying = IN_FLIGHT_FLOAT16[kernel.arch] if name.startswith(COMPACT) and dtype == "float16" else IN_FLIGHT
        if name != "rademacher" and bytes_in_flight(kernel) < flying:  # which reads nothing
            found.append(f"{bytes_in_flight(kernel)} bytes in flight, expected {flying}")
    return found


def read_objects(build: Path, arch: int, sources: Sequence[str] = SOURCES) -> dict[tuple[str, str, str], Kernel]:
    """The kernels that ninja has compiled for an architecture."""
    kernels = [kernel for name in sources for kernel in read(build / f"cuda_{name}.o", arch)]
    return {label(kernel): kernel for kernel in kernels}


def compile_for(arch: int, into: Path) -> dict[tuple[str, str, str], Kernel]:
    """Compiles the kernels for one architecture with the flags of setup.py."""
    from torch.utils.cpp_extension import include_paths

    spec = importlib.util.spec_from_file_location("build_script", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    includes = [argument for path in include_paths() for argument in ("-isystem", path)]
    for name in (*SOURCES, *COMPACT_SOURCES):
        source, out = ROOT / "csrc" / "cuda" / f"{name}.cu", into / f"cuda_{name}.o"
        command = ["nvcc", *build.CUDA_FLAGS, f"-arch=sm_{arch}", *includes, "-cubin", str(source), "-o", str(out)]
        subprocess.run(command, check=True)
    return read_objects(into, arch, (*SOURCES, *COMPACT_SOURCES))


def kernel_rows(kernels: dict[tuple[str, str, str], Kernel]) -> list[list[object]]:
    rows: list[list[object]] = []
    for (name, dtype, variant), kernel in sorted(kernels.items(), key=lambda item: (item[0][1] != "float", item[0])):
        if not dtype or name.startswith(COMPACT):
            continue
        rows.append(
            [
                name + (f" ({variant})" if variant else ""),
                dtype,
                kernel.registers,
                kernel.shared,
                kernel.spills,
                f"{kernel.accesses('LDG', 16)} / {kernel.accesses('STG', 16)}",
                "yes" if all_wide(kernel) else "no",
                f"{bytes_per_parameter(kernel):g}",
                f"{occupancy_of(kernel):.0%}",
                f"{bytes_in_flight(kernel) / 1024:.0f} KB" if name != "rademacher" else "writes only",
            ]
        )
    return rows


def short_table(long: Mapping[int, Sequence[Sequence[object]]]) -> str:
    """One row for every pass on float32, out of the rows of all architectures."""
    found = {arch: {row[0]: row for row in rows if row[1] == "float"} for arch, rows in long.items()}
    archs = ", ".join(f"sm_{arch}" for arch in long)
    rows: list[list[object]] = []
    for shown, kernel in SHORT.items():
        columns = {name: [rows[kernel][i] for rows in found.values()] for i, name in enumerate(HEADER)}
        same = [" / ".join(dict.fromkeys(map(str, columns[name]))) for name in ("bytes per parameter", "spills")]
        widest = "yes" if set(columns["nothing narrower"]) == {"yes"} else "no"
        flying = " / ".join(str(cell).removesuffix(" KB") for cell in columns["in flight"])
        flying = "writes only" if "only" in flying else flying
        rows.append([shown, *same, widest, " / ".join(map(str, columns["registers"])), flying])
    header = ["pass", "bytes per parameter", "spills", "128-bit words only", f"registers: {archs}"]
    return table([*header, f"KB in flight: {archs}"], rows)


def predictions() -> str:
    rows: list[list[object]] = []
    for what, parameters in ((f"{count(gpt()) / 1e6:.0f} M (`bench/shapes.py`)", count(gpt())), ("1,000 M", 10**9)):
        for step, passes in STEPS.items():
            moved = sum(floor(name, "float") for name in passes)
            times = [f"{moved * parameters / speed / 1e3:,.0f} µs" for speed in GPUS.values()]
            rows.append([what, step, moved, *times])
    return table(["float32 parameters", "step", "bytes per parameter", *GPUS], rows)


def write(long: Mapping[int, Sequence[Sequence[object]]]) -> None:
    """Writes the rows of all architectures, and what follows from them."""
    parts = [part for arch, rows in long.items() for part in (f"### sm_{arch}", table(HEADER, rows))]
    section(TABLES, "cuda kernels", "\n\n".join(parts))
    section(TABLES, "cuda predictions", predictions())
    section(SUMMARY, "cuda passes", short_table(long))


def main() -> None:
    long, wrong = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for arch in ARCHS:
            kernels = compile_for(arch, Path(folder))
            long[arch] = kernel_rows(kernels)
            wrong += [
                f"sm_{arch}: {' '.join(filter(None, name))}: {', '.join(found)}"
                for name, kernel in kernels.items()
                if (found := shortcomings(kernel))
            ]
            least = min(bytes_in_flight(k) for (name, dtype, _), k in kernels.items() if dtype and name != "rademacher")
            print(f"prove-gpu: sm_{arch} read, at least {least / 1024:.0f} KB in flight", flush=True)
    write(long)
    if wrong:
        sys.exit("prove-gpu: " + "\nprove-gpu: ".join(wrong))


if __name__ == "__main__":
    main()
