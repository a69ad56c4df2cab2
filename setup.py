"""Builds the native library with ninja on torch's stable ABI and packs it into one wheel for every Python 3.

The library holds no Python symbols: it is loaded with ``torch.ops.load_library``, so neither the Python version nor
(from 2.10 on) the torch version is part of what it depends on.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools

# Without isolation nobody else looks at pyproject.toml's requirement; the first that is missed is bdist_wheel.
if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(f"setup.py: setuptools is {setuptools.__version__}, expected 77 or later: pip install 'setuptools>=77'")

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
# csrc/cpu/*.cpp, compiled once per instruction set.
KERNELS = ["norm", "perturb", "gap", "unseen", "probe", "step", "compact"]
ISAS = {"generic": []}
if platform.machine() in ("x86_64", "AMD64"):
    ISAS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    ISAS["avx512"] = [
        "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512",
    ]  # fmt: skip


# csrc/cuda/*.cu. No contraction and rounded division and roots, as everywhere.
CUDA_SOURCES = ["ops", "norm", "perturb", "gap", "unseen", "probe", "step", "compact"]
CUDA_FLAGS = [
    "-std=c++17", "-O3", "-fmad=false", "--prec-div=true", "--prec-sqrt=true", "-ftz=false",
    "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall", f"-DTORCH_TARGET_VERSION={TORCH_FLOOR}",
]  # fmt: skip
CUDA_ARCHS = "75,80,86,89,90,100,120"
GCC_FLOOR = 11
CUDA_FLOOR = (12, 8)  # the first release that knows sm_100 and sm_120
# The same kernels for g++ on csrc/cuda/sim.h: a library for the tests, which is no part of the package.
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -ffunction-sections"
SIM_FLAGS = ["-O2", "-DSASSHA_SIM", "-DSASSHA_NAMESPACE=sassha_fast_sim", "-DSASSHA_DISPATCH=CPU"]


def find_compiler() -> str:
    """The C++ compiler, with what CXX has before and behind it, such as ``ccache g++``."""
    compiler = os.environ.get("CXX", "g++")
    command = shlex.split(compiler) or [""]
    if shutil.which(command[0]) is None:
        sys.exit(
            f"setup.py: the C++ compiler {compiler!r} was not found; install g++ (11 or later), set CXX, or set "
            "SASSHA_NATIVE=0 to install without kernels: backend foreach, the same bits and slower"
        )
    about = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    version = subprocess.run([*command, "-dumpversion"], capture_output=True, text=True).stdout.strip()
    if not version[:1].isdigit():
        sys.exit(f"setup.py: {compiler!r} does not tell its version as a C++ compiler does; set CXX to g++ 11 or later")
    if "Free Software Foundation" in about and int(version.split(".")[0]) < GCC_FLOOR:
        sys.exit(f"setup.py: {compiler} is g++ {version}, expected {GCC_FLOOR} or later; set CXX to a newer one")
    return compiler


def host_compiler() -> str:
    """The same for nvcc, which takes a name alone: the last word of CXX that is a program."""
    return next(word for word in reversed(shlex.split(find_compiler())) if shutil.which(word))


def native() -> bool:
    """Whether the native library is to be built: SASSHA_NATIVE=0 leaves it out."""
    wanted = os.environ.get("SASSHA_NATIVE", "1")
    if wanted not in ("0", "1"):
        sys.exit(f"setup.py: SASSHA_NATIVE is {wanted!r}, expected 0 or 1")
    return wanted == "1"


def nvcc_version(nvcc: str) -> tuple[int, int]:
    """Its release, such as (13, 0)."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def find_nvcc() -> str | None:
    """The CUDA compiler, None if there is to be no CUDA, or the end of the build if SASSHA_CUDA=1 can't be had."""
    wanted = os.environ.get("SASSHA_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        sys.exit(f"setup.py: SASSHA_CUDA is {wanted!r}, expected auto, 0 or 1")
    if wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=str(Path(home) / "bin") if home else None)
    problem = "nvcc was not found; install the CUDA toolkit, or set CUDA_HOME or PATH"
    if nvcc is not None:
        version = nvcc_version(nvcc)
        if version >= CUDA_FLOOR:
            return nvcc
        problem = f"{nvcc} is release {version[0]}.{version[1]}, expected {CUDA_FLOOR[0]}.{CUDA_FLOOR[1]} or later"
    if wanted == "1":
        sys.exit(f"setup.py: SASSHA_CUDA=1, but {problem}")
    print(f"setup.py: building without CUDA: {problem}")
    return None


def architectures() -> list[str]:
    """What SASSHA_CUDA_ARCHS asks for, such as ["80", "90"]."""
    archs = os.environ.get("SASSHA_CUDA_ARCHS", CUDA_ARCHS).replace(";", ",").split(",")
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}a?", arch):
            sys.exit(f"setup.py: SASSHA_CUDA_ARCHS has {arch!r}, expected numbers such as {CUDA_ARCHS}")
    return sorted(archs, key=lambda arch: int(arch.rstrip("a")))


def arch_flags() -> list[str]:
    """Machine code for every architecture of SASSHA_CUDA_ARCHS, and PTX of the newest for those to come."""
    archs = architectures()
    newest = archs[-1]
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return [*codes, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def find_needed() -> str:
    """Folder of ninja. Ends the build where ninja or torch is missing, which an isolated environment always lacks."""
    try:
        import torch  # noqa: F401
        from ninja import BIN_DIR
    except ImportError as error:
        sys.exit(
            f"setup.py: {error.name} can't be imported here; install torch (2.10 or later), ninja and 'setuptools>=77' "
            "and build beside them: pip install --no-build-isolation ."
        )
    return str(BIN_DIR)


class Ninja:
    """The text of a build.ninja: rules to compile and link, header dependencies left to the compilers."""

    def __init__(self) -> None:
        from torch.utils.cpp_extension import include_paths, library_paths

        includes = " ".join(f"-isystem {self.quote(path)}" for path in include_paths())
        self.libs = " ".join(f"-L{self.quote(path)}" for path in library_paths()) + " -ltorch -ltorch_cpu -lc10"
        self.lines = [
            "ninja_required_version = 1.3",
            f"cxx = {find_compiler()}",
            f"flags = {' '.join(COMMON)} {includes} {os.environ.get('CXXFLAGS', '')}",
            *self.rule("compile", "$cxx -MMD -MF $out.d $flags $more -c $in -o $out", depfile=True),
            *self.rule("link", "$cxx -shared -Wl,-s -o $out $in $libs"),
        ]
        self.nvcc = find_nvcc()
        if self.nvcc is not None:
            # nvcc runs its own host compiler. CUDA's runtime is torch's, found by csrc/cuda/runtime.cpp.
            self.lines += [
                f"nvcc = {self.nvcc} -ccbin {host_compiler()}",
                f"cuda_flags = {' '.join([*CUDA_FLAGS, *arch_flags()])} {includes}",
                *self.rule("cuda", "$nvcc -MD -MF $out.d $cuda_flags -c $in -o $out", depfile=True),
                # Through libtorch a torch with CUDA brings libtorch_cuda and the current stream; nothing else of it is
                # referred to, so the linker must be told to keep it.
                *self.rule("cuda_link", "$cxx -shared -Wl,-s,--no-as-needed -o $out $in $libs"),
            ]

    @staticmethod
    def quote(path: str | Path) -> str:
        return str(path).replace("$", "$$").replace(":", "$:").replace(" ", "$ ")

    @staticmethod
    def rule(name: str, command: str, depfile: bool = False) -> list[str]:
        lines = [f"rule {name}", f"  command = {command}", f"  description = {name} $out"]
        return lines + (["  depfile = $out.d", "  deps = gcc"] if depfile else [])

    def compile(self, source: Path, name: str, more: str = "", rule: str = "compile") -> str:
        self.lines.append(f"build {name}.o: {rule} {self.quote(source)}")
        if more:
            self.lines.append(f"  more = {more}")
        return f"{name}.o"

    def link(self, target: Path, objects: list[str], rule: str = "link") -> None:
        self.lines += [f"build {self.quote(target)}: {rule} {' '.join(objects)}", f"  libs = {self.libs}"]


def write_ninja(build_dir: Path, target: Path) -> Path:
    """Writes build.ninja for the library, the default, and for tests: the simulator, as a library and a program, and
    the library's CPU half under sanitizers.
    """
    ninja, csrc = Ninja(), ROOT / "csrc"
    shared = [(csrc / f"{name}.cpp", name) for name in ("ops", "bind")]
    objects = [ninja.compile(source, name) for source, name in shared]
    objects += [ninja.compile(csrc / "cpu" / f"{name}.cpp", f"cpu_{name}") for name in ("ops", "isa")]
    for isa, isa_flags in ISAS.items():
        for kernel in KERNELS:
            more = f"-DSASSHA_ISA={isa} {' '.join(isa_flags)}"
            objects.append(ninja.compile(csrc / "cpu" / f"{kernel}.cpp", f"cpu_{kernel}_{isa}", more))
    objects.append(ninja.compile(csrc / "glibc.cpp", "glibc"))
    if ninja.nvcc is not None:
        major, minor = nvcc_version(ninja.nvcc)
        about = f"-DSASSHA_CUDA_BUILT={major * 1000 + minor * 10} -DSASSHA_CUDA_LEAST={architectures()[0].rstrip('a')}"
        objects.append(ninja.compile(csrc / "cuda" / "runtime.cpp", "runtime", about))
        objects += [ninja.compile(csrc / "cuda" / f"{name}.cu", f"cuda_{name}", rule="cuda") for name in CUDA_SOURCES]
    ninja.link(target, objects, rule="link" if ninja.nvcc is None else "cuda_link")
    sim_flags = " ".join(SIM_FLAGS)
    sim = [ninja.compile(source, f"sim_{name}", sim_flags) for source, name in shared]
    for name in CUDA_SOURCES:
        sim.append(ninja.compile(csrc / "cuda" / f"{name}.cu", f"sim_cuda_{name}", f"{sim_flags} -x c++"))
    sim.append(ninja.compile(ROOT / "tests" / "support" / "sim.cpp", "sim_sim", sim_flags))
    ninja.link(Path("_cuda_sim.so"), sim)
    watched = f"-O1 -DSASSHA_SIM {SANITIZERS}"
    main = [ninja.compile(ROOT / "tests" / "support" / "sim_main.cpp", "watched_main", watched)]
    for name in CUDA_SOURCES[1:]:
        main.append(ninja.compile(csrc / "cuda" / f"{name}.cu", f"watched_{name}", f"{watched} -x c++"))
    ninja.lines += ninja.rule("program", f"$cxx {SANITIZERS} -Wl,--gc-sections -o $out $in")
    ninja.lines.append(f"build cuda_sim_watched: program {' '.join(main)}")
    careful = f"-O1 -g1 {SANITIZERS}"
    cpu = [ninja.compile(source, f"careful_{name}", careful) for source, name in shared]
    cpu += [ninja.compile(csrc / "cpu" / f"{name}.cpp", f"careful_cpu_{name}", careful) for name in ("ops", "isa")]
    for isa, isa_flags in ISAS.items():
        more = f"{careful} -DSASSHA_ISA={isa} {' '.join(isa_flags)}"
        cpu += [ninja.compile(csrc / "cpu" / f"{name}.cpp", f"careful_{name}_{isa}", more) for name in KERNELS]
    ninja.lines += ninja.rule("careful_link", f"$cxx -shared {SANITIZERS} -o $out $in $libs")
    ninja.link(Path("_native_sanitized.so"), cpu, rule="careful_link")
    text = "\n".join([*ninja.lines, f"default {ninja.quote(target)}"]) + "\n"
    build_dir.mkdir(parents=True, exist_ok=True)
    path = build_dir / "build.ninja"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


class NinjaBuild(build_ext):
    """Builds sassha_fast/_native.so, in the source tree for an editable install, else in the build tree."""

    def run(self) -> None:
        if not native():
            print("setup.py: SASSHA_NATIVE=0, so the native library is left out")
            return
        ninja = Path(find_needed()) / "ninja"
        package = (
            ROOT / "sassha_fast"
            if self.inplace or self.editable_mode
            else Path(self.build_lib).resolve() / "sassha_fast"
        )
        package.mkdir(parents=True, exist_ok=True)
        path = write_ninja(ROOT / "build" / "native", package / LIBRARY)
        done = subprocess.run([str(ninja), "-C", str(path.parent)])
        if done.returncode:
            sys.exit(f"setup.py: the native library did not build; {find_compiler()} has said why above")

    def get_outputs(self) -> list[str]:
        return [str(Path(self.build_lib) / "sassha_fast" / LIBRARY)] if native() else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file()]


class AnyPythonWheel(bdist_wheel):
    """Tags the wheel py3-none-<platform>: native code, but none that knows Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2] if native() else "any")


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return native()


if __name__ == "__main__":  # tools/prove_gpu.py reads the flags
    setup(distclass=NativeDistribution, cmdclass={"build_ext": NinjaBuild, "bdist_wheel": AnyPythonWheel})
