"""``make prove-gpu``: compiles the CUDA kernels for several architectures and writes what their code says.

Needs nvcc and no GPU. ``read_objects`` serves the test that checks what `make build` has compiled.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

from sass import ROOT, Kernel, occupancy, read, section, table
from shapes import count, gpt

ARCHS = (80, 90, 100)
SOURCES = ("norm", "perturb", "gap", "probe", "step")  # csrc/cuda/*.cu with kernels
THREADS = 256  # kThreads in csrc/cuda/multi_tensor.cuh
ITEM = {"float": 4, "double": 8, "bfloat16": 2, "float16": 2}
POWERS = ("half", "one", "general")
# Bytes per float32 parameter that the algorithm can't do without.
FLOOR = {
    "square_sum": 4,
    "perturb": 16,
    "restore": 8,
    "momentum_ascent": 12,
    "gap_sums": 8,
    "decompose": 12,
    "probe": 8,
    "step": 24,
    "refresh_step": 32,
    "apart_step": 24,
    "apart_refresh_step": 32,
}
# Bandwidth by the vendor's data sheet, GB/s.
GPUS = {"A100 80 GB SXM": 2039, "H100 SXM": 3350}
# What moves in one step: names of FLOOR.
STEPS = {
    "ordinary step, `step(closure)`": ("square_sum", "perturb", "step"),
    "ordinary step, three calls": ("square_sum", "perturb", "restore", "step"),
    "refresh, exact products, three calls": ("square_sum", "perturb", "restore", "refresh_step"),
    "M-SASSHA, ordinary step": ("apart_step", "momentum_ascent"),
    "M-SASSHA, refresh": ("apart_refresh_step", "momentum_ascent"),
    "G-SASSHA, ordinary step, `step(closure)`": ("square_sum", "perturb", "gap_sums", "decompose", "step"),
}


def label(kernel: Kernel) -> tuple[str, str, str]:
    """Pass, dtype and variant of a kernel by its mangled name."""
    name = re.search(r"cuda\d+([a-z_]+)_kernel", kernel.name)
    assert name is not None, kernel.name
    types = {"If": "float", "Id": "double", "INS_7Float16E": "float16", "INS_8BFloat16E": "bfloat16"}
    arguments = kernel.name[name.end() :]
    dtype = next((types[code] for code in types if arguments.startswith(code)), "")
    flag = "Lb1E" in arguments  # of an update whether x lives apart, of the other passes ASAM's scaling
    power = re.search(r"PowerE(\d)E", arguments)
    if power:
        return f"apart_{name[1]}" if flag else name[1], dtype, POWERS[int(power[1])]
    return name[1], dtype, "adaptive" if flag else ""


def bytes_per_parameter(kernel: Kernel) -> float:
    """Bytes of global memory in the hot loop for each element; a turn of it takes one vector of parameters."""
    _, dtype, _ = label(kernel)
    return kernel.bytes / (16 // ITEM[dtype])


def occupancy_of(kernel: Kernel) -> float:
    """Theoretical occupancy with the launchers' block size."""
    return occupancy(kernel.arch, kernel.registers, kernel.shared, THREADS)


def read_objects(build: Path, arch: int) -> dict[tuple[str, str, str], Kernel]:
    """The kernels that ninja has compiled for an architecture."""
    kernels = [kernel for name in SOURCES for kernel in read(build / f"cuda_{name}.o", arch)]
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
    for name in SOURCES:
        source, out = ROOT / "csrc" / "cuda" / f"{name}.cu", into / f"cuda_{name}.o"
        command = ["nvcc", *build.CUDA_FLAGS, f"-arch=sm_{arch}", *includes, "-cubin", str(source), "-o", str(out)]
        subprocess.run(command, check=True)
    return read_objects(into, arch)


def kernel_rows(kernels: dict[tuple[str, str, str], Kernel]) -> list[list[object]]:
    rows: list[list[object]] = []
    for (name, dtype, variant), kernel in sorted(kernels.items(), key=lambda item: (item[0][1] != "float", item[0])):
        if not dtype:
            continue
        rows.append(
            [
                name + (f" ({variant})" if variant else ""),
                dtype,
                kernel.registers,
                kernel.shared,
                kernel.spills,
                f"{kernel.accesses('LDG', 16)} / {kernel.accesses('STG', 16)}",
                "yes" if kernel.widest_only else "no",
                f"{bytes_per_parameter(kernel):g}",
                f"{occupancy_of(kernel):.0%}",
            ]
        )
    return rows


def predictions() -> str:
    rows: list[list[object]] = []
    for what, parameters in ((f"{count(gpt()) / 1e6:.0f} M (`bench/shapes.py`)", count(gpt())), ("1,000 M", 10**9)):
        for step, passes in STEPS.items():
            moved = sum(FLOOR[name] for name in passes)
            times = [f"{moved * parameters / speed / 1e3:,.0f} µs" for speed in GPUS.values()]
            rows.append([what, step, moved, *times])
    return table(["float32 parameters", "step", "bytes per parameter", *GPUS], rows)


def main() -> None:
    header = ["kernel", "dtype", "registers", "shared", "spills", "128-bit loads / stores", "nothing narrower"]
    header += ["bytes per parameter", "occupancy"]
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for arch in ARCHS:
            parts += [f"### sm_{arch}", table(header, kernel_rows(compile_for(arch, Path(folder))))]
            print(f"prove-gpu: sm_{arch} read", flush=True)
    section("cuda kernels", "\n\n".join(parts))
    section("cuda predictions", predictions())


if __name__ == "__main__":
    main()
