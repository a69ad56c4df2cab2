"""Builds the native library with ninja on torch's stable ABI and packs it into one wheel for every Python 3.

The library holds no Python symbols: it is loaded with ``torch.ops.load_library``, so neither the Python version nor
(from 2.10 on) the torch version is part of what it depends on.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARY = "_native.so"
TORCH_FLOOR = "0x020a000000000000"  # 2.10, the first release with every function of the stable ABI that is used here

# Flags that no kernel may lose: contraction off is what makes all backends equal bit for bit. The two others change
# no value; they tell the compiler that nobody reads errno or the exception flags, without which nothing vectorises.
# GCC mistakes the tail of a block, whose length it can't bound, for an endless loop, and minds the calling convention
# of functions that are always inlined.
QUIET = ["-Wno-unknown-pragmas", "-Wno-aggressive-loop-optimizations", "-Wno-psabi"]
NUMERICS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
COMMON = [
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *QUIET,
    f"-DTORCH_TARGET_VERSION={TORCH_FLOOR}", *NUMERICS,
]  # fmt: skip
KERNELS = ["norm", "perturb", "probe", "step"]  # csrc/cpu/*.cpp, compiled once per instruction set
ISAS = {"generic": []}
if platform.machine() in ("x86_64", "AMD64"):
    ISAS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    ISAS["avx512"] = [
        "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512",
    ]  # fmt: skip


def find_compiler() -> str:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        sys.exit(f"setup.py: the C++ compiler {compiler!r} was not found; install g++ (11 or later) or set CXX")
    return compiler


def write_ninja(build_dir: Path, target: Path) -> Path:
    """Writes build.ninja: one rule to compile, one to link, header dependencies left to the compiler."""
    from torch.utils.cpp_extension import include_paths, library_paths

    def quote(path: str | Path) -> str:
        return str(path).replace("$", "$$").replace(":", "$:").replace(" ", "$ ")

    includes = " ".join(f"-isystem {quote(path)}" for path in include_paths())
    lines = [
        "ninja_required_version = 1.3",
        f"cxx = {find_compiler()}",
        f"flags = {' '.join(COMMON)} {includes} {os.environ.get('CXXFLAGS', '')}",
        "rule compile",
        "  command = $cxx -MMD -MF $out.d $flags $isa -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $out",
        "rule link",
        "  command = $cxx -shared -o $out $in $libs",
        "  description = link $out",
    ]
    objects = []

    def compile_one(source: Path, name: str, isa: str = "") -> None:
        objects.append(f"{name}.o")
        lines.append(f"build {name}.o: compile {quote(source)}")
        if isa:
            lines.append(f"  isa = {isa}")

    csrc = ROOT / "csrc"
    compile_one(csrc / "ops.cpp", "ops")
    for name in ("ops", "table", "launch", "isa"):
        compile_one(csrc / "cpu" / f"{name}.cpp", f"cpu_{name}")
    for isa, isa_flags in ISAS.items():
        for kernel in KERNELS:
            compile_one(
                csrc / "cpu" / f"{kernel}.cpp", f"cpu_{kernel}_{isa}", f"-DSASSHA_ISA={isa} {' '.join(isa_flags)}"
            )
    lines.append(f"build {quote(target)}: link {' '.join(objects)}")
    lines.append("  libs = " + " ".join(f"-L{quote(path)}" for path in library_paths()) + " -ltorch -ltorch_cpu -lc10")
    lines.append(f"default {quote(target)}")
    text = "\n".join(lines) + "\n"
    build_dir.mkdir(parents=True, exist_ok=True)
    path = build_dir / "build.ninja"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


class NinjaBuild(build_ext):
    """Builds sassha_fast/_native.so, in the source tree for an editable install, else in the build tree."""

    def run(self) -> None:
        package = (
            ROOT / "sassha_fast"
            if self.inplace or self.editable_mode
            else Path(self.build_lib).resolve() / "sassha_fast"
        )
        package.mkdir(parents=True, exist_ok=True)
        path = write_ninja(ROOT / "build" / "native", package / LIBRARY)
        from ninja import BIN_DIR

        subprocess.run([str(Path(BIN_DIR) / "ninja"), "-C", str(path.parent)], check=True)

    def get_outputs(self) -> list[str]:
        return [str(Path(self.build_lib) / "sassha_fast" / LIBRARY)]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file()]


class AnyPythonWheel(bdist_wheel):
    """Tags the wheel py3-none-<platform>: native code, but none that knows Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(distclass=NativeDistribution, cmdclass={"build_ext": NinjaBuild, "bdist_wheel": AnyPythonWheel})
