"""The native library: operators for both devices, and nothing that torch's stable ABI does not promise."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from sassha_fast._passes import library as ops

pytestmark = pytest.mark.usefixtures("native_ops")
HAS_CUDA = ops.load() is None and torch._C._dispatch_has_kernel_for_dispatch_key("sassha_fast::table_step", "CUDA")
needs_cuda_build = pytest.mark.skipif(not HAS_CUDA, reason="the library was built without CUDA (no nvcc here)")


def schemas():
    csrc = Path(__file__).parents[1] / "csrc"
    text = "".join((csrc / name).read_text() for name in ("ops.cpp", "table_ops.h", "list_ops.h"))
    return re.findall(r'm\.def\(\s*"(\w+)\(', text)


@needs_cuda_build
def test_every_operator_has_a_kernel_for_both_devices():
    names = schemas()
    assert len(names) == 14
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
