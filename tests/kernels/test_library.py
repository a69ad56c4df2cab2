"""The native library: operators for both devices, and nothing that torch's stable ABI does not promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sassha_fast._passes import library as ops

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("native_ops")
HAS_CUDA = ops.load() is None and torch._C._dispatch_has_kernel_for_dispatch_key("sassha_fast::table_step", "CUDA")
needs_cuda_build = pytest.mark.skipif(not HAS_CUDA, reason="the library was built without CUDA (no nvcc here)")


def schemas():
    csrc = ROOT / "csrc"
    text = "".join((csrc / name).read_text() for name in ("ops.cpp", "table_ops.h", "list_ops.h"))
    return re.findall(r'm\.def\(\s*"(\w+)\(', text)


@needs_cuda_build
def test_every_operator_has_a_kernel_for_both_devices():
    names = schemas()
    assert len(names) == 17
    for name in names:
        keys = ("CompositeExplicitAutograd",) if name in ("cpu_isa", "table_chunks") else ("CPU", "CUDA")
        for key in keys:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sassha_fast::{name}", key), (name, key)


def dynamic(*options):
    done = subprocess.run(["readelf", "-W", *options, str(ops.LIBRARY)], capture_output=True, text=True, check=True)
    return done.stdout


def test_library_needs_nothing_but_torch_and_the_c_libraries():
    needed = set(re.findall(r"NEEDED.*\[(.+?)\]", dynamic("-d")))
    allowed = {
        "libtorch.so",
        "libtorch_cpu.so",
        "libc10.so",
        "libstdc++.so.6",
        "libm.so.6",
        "libgcc_s.so.1",
        "libc.so.6",
    }
    allowed |= {"libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    assert needed <= allowed
    # A torch with CUDA brings the current stream along with libtorch.
    assert "libtorch.so" in needed or not HAS_CUDA


def test_undefined_symbols_are_the_stable_abi_or_the_c_libraries():
    undefined, weak = set(), set()
    for line in dynamic("--dyn-syms").splitlines():
        fields = line.split()
        if "UND" in fields and len(fields) > 7:
            (weak if fields[4] == "WEAK" else undefined).add(fields[7].split("@")[0])
    versioned = {line.split()[7].split("@")[0] for line in dynamic("--dyn-syms").splitlines() if "@" in line}
    stable = re.compile(r"^(aoti_torch_|torch_|_ZNSt|_ZNKSt|_ZSt|_ZTVN10__cxxabiv1|_Zn|_Zd|__cxa_|__gxx_|_Unwind_)")
    foreign = {name for name in undefined - versioned if not stable.match(name)}
    assert foreign == set()
    assert not any(name.startswith(("cuda", "cu", "__cuda")) for name in undefined)
    optional = {"aoti_torch_get_current_cuda_stream"} if HAS_CUDA else set()
    assert {name for name in weak if name.startswith(("aoti", "torch"))} == optional


@needs_cuda_build
def test_cuda_kernels_are_in_the_library():
    assert ".nv_fatbin" in dynamic("-S")


RUNTIME = """
static int registered = 0;
int cudaRuntimeGetVersion(int* version) { *version = RUNTIME; return 0; }
int cudaDriverGetVersion(int* version) { *version = 13020; return 0; }
void** __cudaRegisterFatBinary(void* code) { registered += code != 0; return 0; }
int stand_in_registered(void) { return registered; }
"""


@needs_cuda_build
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no runtime of CUDA")
def test_the_runtime_is_the_one_that_torch_was_built_for():
    major, minor = map(int, torch.version.cuda.split("."))
    assert ops.cuda_versions().runtime == 1000 * major + 10 * minor


@needs_cuda_build
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a runtime of its own, and no stand-in")
@pytest.mark.parametrize("runtime", ["older", "same", "newer", "none"])
def test_kernels_register_with_the_runtime_that_torch_has_loaded_unless_it_is_too_old(runtime, tmp_path):
    built = ops.cuda_versions().built
    version = {"older": built - 1000, "same": built, "newer": built + 1000, "none": 0}[runtime]
    source, library = tmp_path / "runtime.c", tmp_path / "libcudart.so.99"
    source.write_text(RUNTIME)
    compiler = os.environ.get("CC", "gcc")
    subprocess.run([compiler, "-shared", "-fPIC", f"-DRUNTIME={version}", source, "-o", library], check=True)
    code = f"""
import ctypes, torch
runtime = ctypes.CDLL({str(library)!r}, mode={"ctypes.RTLD_GLOBAL" if runtime == "same" else "ctypes.RTLD_LOCAL"})
from sassha_fast._passes import library
assert library.load() is None
versions = library.cuda_versions()
print(versions.built, versions.runtime, versions.driver, runtime.stand_in_registered())
"""
    if runtime == "none":
        code = code.replace("runtime = ctypes", "runtime = None and ctypes").replace(
            "runtime.stand_in_registered()", "0"
        )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    found = [int(word) for word in done.stdout.split()]
    assert found[:2] == [built, version]
    assert found[2] == (0 if runtime == "none" else 13020)
    assert (found[3] > 0) == (runtime in ("same", "newer"))


def test_the_library_loads_beside_glibc_2_28_as_torch_does():
    newest = max(tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_(\d+(?:\.\d+)+)", dynamic("-V")))
    assert newest <= (2, 28)
