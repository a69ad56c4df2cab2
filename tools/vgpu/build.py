"""Builds the stand-in ``libcudart.so.13`` and ``libcuda.so.1`` beside a torch, and the kernels they run."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .ptx.compile import compile_text, translate, translator_key
from .ptx.module import parse

DEVICE = Path(__file__).resolve().parent / "device"
DRIVER = ("driver.cpp", "driver_modules.cpp")
INCLUDES = ("nvidia/cu13/include", "triton/backends/nvidia/include")  # of torch's packages
NOT_SUPPORTED = 801  # cudaErrorNotSupported
WORKERS = 2  # compilers at a time
STUBS = """#include <string>
namespace vgpu {{ void report(const std::string&); }}
#define STUB(name) extern "C" int name() {{ vgpu::report(#name " is not there"); return {error}; }}
{stubs}
"""


def run(*command: str | Path, **options: object) -> str:
    """Runs a command and returns what it prints; what it says of errors is shown."""
    return subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def digest(*parts: bytes | str) -> str:
    """A short name for some content."""
    joined = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    return hashlib.sha1(joined).hexdigest()[:16]


# ---- stand-in libraries ---------------------------------------------------------------------------------------------


def _symbols(library: Path, *options: str) -> set[str]:
    """Names of dynamic symbols, without versions."""
    return {line.split()[-1].partition("@")[0] for line in run("nm", *options, library).splitlines() if line.strip()}


def _needed_of_driver(site: Path) -> set[str]:
    """Functions of the driver that torch's libraries and Triton's launcher are linked to."""
    names: set[str] = set()
    for library in [*(site / "torch" / "lib").glob("*.so"), *(site / "triton").rglob("*.so")]:
        names |= _symbols(library, "-D", "--undefined-only")
    for source in (site / "triton" / "backends" / "nvidia").rglob("*.c"):
        names |= set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", source.read_text()))
    # Functions of other libraries begin alike.
    header = next(site / folder / "cuda.h" for folder in INCLUDES if (site / folder / "cuda.h").exists())
    return names & set(re.findall(r"\bcu[A-Z]\w+", header.read_text()))


def _stubs(missing: set[str]) -> str:
    """Functions that must be there to load a library; a call is an error."""
    stubs = "\n".join(f"STUB({name})" for name in sorted(missing))
    return STUBS.format(error=NOT_SUPPORTED, stubs=stubs)


def _compile(sources: list[Path], site: Path, folder: Path) -> list[Path]:
    includes = [f"-I{site / folder}" for folder in INCLUDES]

    def compiled(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        run("g++", "-std=c++17", "-O2", "-g", "-fPIC", "-c", *includes, f"-I{DEVICE}", source, "-o", target)
        return target

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(compiled, sources))


def _link(objects: list[Path], needed: set[str], target: Path, *options: str) -> None:
    """Links a stand-in. What a real library has and this one has not is there as a stub."""
    have = set().union(*(_symbols(path, "--defined-only") for path in objects))
    stubs = target.with_suffix(".stubs.cpp")
    stubs.write_text(_stubs(needed - have))
    soname = f"-Wl,-soname,{target.name}"
    run("g++", "-std=c++17", "-O1", "-fPIC", "-shared", soname, *objects, stubs, "-o", target, *options)


def build_libraries(site: Path, folder: Path) -> None:
    """Builds both libraries for the torch in ``site``, unless they are there."""
    sources = sorted(DEVICE.glob("*.cpp"))
    contents = [path.read_bytes() for path in sorted(DEVICE.iterdir()) if path.is_file()]
    real = site / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    if not real.exists():
        raise SystemExit(f"vgpu: {real} is not there; the virtual GPU needs a torch that was built with CUDA 13")
    key, stamp = digest(*contents, Path(__file__).read_bytes(), str(real.stat().st_size)), folder / "key"
    if stamp.exists() and stamp.read_text() == key:
        return
    print("vgpu: building the stand-in libraries", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    objects = _compile(sources, site, folder)
    driver = [path for path in objects if f"{path.stem}.cpp" in DRIVER]
    runtime = [path for path in objects if path not in driver]
    # torch asks for its symbols with this version.
    version = folder / "version.map"
    version.write_text("libcudart.so.13 { global: *; };\n")
    exported = {name for name in _symbols(real, "-D", "--defined-only") if re.match(r"(__)?cuda", name)}
    _link(runtime, exported, folder / "libcudart.so.13", f"-Wl,--version-script={version}", "-ldl", "-lpthread")
    _link(driver, _needed_of_driver(site), folder / "libcuda.so.1", f"-L{folder}", "-l:libcudart.so.13", "-ldl")
    stamp.write_text(key)


# ---- kernels --------------------------------------------------------------------------------------------------------


def find_cuobjdump(site: Path) -> Path:
    """Triton brings it, and so does the CUDA toolkit."""
    nvcc = shutil.which("nvcc")
    folders = [site / "triton", *([Path(nvcc).resolve().parent] if nvcc else [])]
    for folder in folders:
        for path in folder.rglob("cuobjdump"):
            return path
    raise SystemExit("vgpu: cuobjdump was not found, neither in Triton nor beside nvcc; install the CUDA toolkit")


def read_ptx(cuobjdump: Path, compiled: Path) -> str:
    """The PTX in an object file; empty if it has no kernels."""
    text = run(cuobjdump, "-ptx", compiled)
    begin = re.search(r"^\.version", text, re.MULTILINE)
    return text[begin.start() :] if begin else ""


def build_kernels(texts: list[str], cache: Path) -> dict[str, Path]:
    """The shared object of every kernel in some PTX. Those whose C++ is the same are in the cache already."""
    cache.mkdir(parents=True, exist_ok=True)
    found: dict[str, Path] = {}
    waiting: dict[Path, str] = {}
    for text in filter(None, texts):
        index = cache / f"{digest(text, translator_key())}.index"
        if index.exists():
            lines = [line.split("\t") for line in index.read_text().splitlines()]
            kernels = {name: cache / file for name, file in lines}
            if all(path.exists() for path in kernels.values()):
                found |= kernels
                continue
        module = parse(text)
        translated = {name: translate(module, name) for name in module.entries}
        kernels = {name: cache / f"{digest(code, translator_key())}.so" for name, code in translated.items()}
        waiting |= {path: translated[name] for name, path in kernels.items() if not path.exists()}
        index.write_text("".join(f"{name}\t{path.name}\n" for name, path in kernels.items()))
        found |= kernels
    if waiting:
        print(f"vgpu: compiling {len(waiting)} kernels", flush=True)
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda item: compile_text(item[1], item[0]), waiting.items()))
    return found
