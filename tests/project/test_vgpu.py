"""The virtual GPU itself: PTX by hand through its translator and its executor. Neither CUDA nor its torch is needed."""

import ctypes
import math
import platform
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEVICE = ROOT / "tools" / "vgpu" / "device"
sys.path.append(str(ROOT / "tools"))

from vgpu import mutants  # noqa: E402
from vgpu.environment import Environment  # noqa: E402
from vgpu.ptx.compile import compile_text, translate  # noqa: E402
from vgpu.ptx.module import parse  # noqa: E402

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="fibers are x86-64 assembly")
KERNELS = parse((ROOT / "tests" / "support" / "vgpu_kernels.ptx").read_text())
ILLEGAL_ADDRESS, LAUNCH_FAILURE = 700, 719


class Harness:
    """Device memory and launches. Arguments are packed as ``struct`` says, with their natural alignment."""

    def __init__(self, folder):
        self.folder, self.path = folder, folder / "harness.so"
        sources = [DEVICE / f"{name}.cpp" for name in ("crash", "executor", "fiber", "log", "memory")]
        command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-I{DEVICE}", *sources]
        subprocess.run([*command, ROOT / "tests" / "support" / "vgpu_harness.cpp", "-ldl", "-o", self.path], check=True)
        self.library = ctypes.CDLL(str(self.path))
        for function in ("harness_allocate", "harness_count"):
            getattr(self.library, function).restype = ctypes.c_uint64
        self.library.harness_take_error.restype = ctypes.c_char_p

    @cache  # noqa: B019  # one harness
    def compiled(self, name):
        path = self.folder / f"{name}.so"
        compile_text(translate(KERNELS, name), path)
        return str(path).encode()

    def allocate(self, size):
        return self.library.harness_allocate(ctypes.c_uint64(size))

    def free(self, address):
        self.library.harness_free(ctypes.c_uint64(address))

    def tensor(self, kinds, *values):
        """Memory that holds values, and no byte more."""
        data = struct.pack(kinds, *values)
        address = self.allocate(len(data))
        self.library.harness_write(ctypes.c_uint64(address), data, ctypes.c_uint64(len(data)))
        return address

    def read(self, address, kinds):
        buffer = ctypes.create_string_buffer(struct.calcsize(kinds))
        self.library.harness_read(ctypes.c_uint64(address), buffer, ctypes.c_uint64(len(buffer)))
        return list(struct.unpack(kinds, buffer.raw))

    def launch(self, part, kinds, *arguments, threads=32, blocks=1):
        """Launches the kernel whose name contains ``part``; returns its outcome and the text of its error."""
        (name,) = [entry for entry in KERNELS.entries if part in entry]
        params = struct.pack(f"@{kinds}16x", *arguments)
        outcome = self.library.harness_launch(self.compiled(name), name.encode(), blocks, threads, params)
        return outcome, self.library.harness_take_error().decode()


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    return Harness(tmp_path_factory.mktemp("vgpu"))


def f32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


# ---- instructions -------------------------------------------------------------------------------------------------


def test_threads_beyond_n_write_nothing(gpu):
    x, y = gpu.tensor("50f", *range(50)), gpu.tensor("50f", *[1.0] * 50)
    assert gpu.launch("scaled_sum", "QQfi", y, x, 0.5, 49, blocks=2) == (0, "")
    assert gpu.read(y, "50f") == [0.5 * i + 1 for i in range(49)] + [1.0]


def test_bytes_of_global_memory_are_counted(gpu):
    x, y = gpu.tensor("32f", *range(32)), gpu.tensor("32f", *range(32))
    before = [gpu.library.harness_count(name) for name in (b"bytes:loaded", b"bytes:stored")]
    gpu.launch("scaled_sum", "QQfi", y, x, 1.0, 32)
    after = [gpu.library.harness_count(name) for name in (b"bytes:loaded", b"bytes:stored")]
    assert [a - b for a, b in zip(after, before, strict=True)] == [32 * 8, 32 * 4]


def test_vectors_are_loaded_and_stored_in_their_order(gpu):
    source, to = gpu.tensor("128f", *range(128)), gpu.allocate(512)
    assert gpu.launch("pairs", "QQ", to, source) == (0, "")
    assert gpu.read(to, "128f") == [4 * i + k for i in range(32) for k in (2, 3, 0, 1)]


def test_lanes_exchange_values(gpu):
    out = gpu.allocate(32 * 12)
    assert gpu.launch("lanes", "Qi", out, -1) == (0, "")
    expected = [value for i in range(32) for value in (sum(range(32)), i ^ 1, i - 1 if i % 8 else -1)]
    assert gpu.read(out, "96i") == expected


@pytest.mark.parametrize("seed", range(4))
def test_a_barrier_holds_all_warps(gpu, seed):
    gpu.library.harness_seed(ctypes.c_uint64(seed))  # another order of warps
    out = gpu.allocate(256)
    assert gpu.launch("reversed", "Qi", out, -1, threads=64) == (0, "")
    assert gpu.read(out, "64i") == list(reversed(range(64)))


def test_integers_are_those_of_ptx(gpu):
    a, b = 0xF1234568, 0x0BADCAFE
    signed = a - (1 << 32)
    out = gpu.allocate(60)
    assert gpu.launch("integers", "QII", out, a, b) == (0, "")
    inserted = (a & ~(0xFFF << 8)) | ((b & 0xFFF) << 8)
    assert [hex(value) for value in gpu.read(out, "15I")] == [
        hex(value & 0xFFFFFFFF)
        for value in (
            a * b >> 32,
            signed * b >> 32,
            ((b << 32 | a) << 12) >> 32,
            -1,  # signs alone
            0,
            0x56,
            inserted,
            0x0BCAF145,  # bytes 1, 3, 5 and 7 of both, from below
            a ^ b ^ 0x0F0F0F0F,
            a.bit_count(),
            4,
            a,
            a,
            (a >> 16 | a << 16),
            1,  # less as a signed number, not as an unsigned one
        )
    ]


def test_numbers_are_rounded_one_by_one(gpu):
    x, y = f32(-3.14159), f32(-0.7)
    out = gpu.allocate(36)
    assert gpu.launch("numbers", "Qff", out, x, y) == (0, "")
    *numbers, power = gpu.read(out, "7f4xf")
    half = struct.unpack("e", struct.pack("e", x))[0]
    assert numbers == [half, -3.140625, -3.0, f32(x * x + y), f32(math.sqrt(f32(x / y))), x, 6.0]
    assert gpu.read(out + 28, "i") == [2**31 - 1]  # infinity saturates
    assert power == f32(f32(x * x) * x)


def test_an_unknown_instruction_is_refused_by_name():
    (name,) = [entry for entry in KERNELS.entries if "unknown" in entry]
    with pytest.raises(NotImplementedError, match=r"test7unknown.*PTX line \d+: dp4a"):
        translate(KERNELS, name)


# ---- errors -------------------------------------------------------------------------------------------------------


def test_an_access_beyond_an_allocation_is_reported_with_its_place(gpu):
    x, y = gpu.tensor("64f", *range(64)), gpu.tensor("40f", *range(40))
    outcome, error = gpu.launch("scaled_sum", "QQfi", y, x, 1.0, 41, blocks=2)
    assert outcome == ILLEGAL_ADDRESS
    assert error.startswith(f"kernel test::scaled_sum: load of 4 bytes at {y + 160:#x}, 0 bytes beyond the end of ")
    assert f"(160 bytes at {y:#x}), PTX line " in error
    assert error.endswith("block (1,0,0), thread (8,0,0)")


def test_an_access_to_freed_memory_is_reported(gpu):
    x, y = gpu.tensor("32f", *range(32)), gpu.tensor("32f", *range(32))
    gpu.free(x)
    outcome, error = gpu.launch("scaled_sum", "QQfi", y, x, 1.0, 32)
    assert outcome == ILLEGAL_ADDRESS
    assert f"(128 bytes at {x:#x}), which was freed" in error


def test_a_null_pointer_is_reported(gpu):
    outcome, error = gpu.launch("pairs", "QQ", gpu.allocate(512), 0)
    assert outcome == ILLEGAL_ADDRESS
    assert "test::pairs: load of 16 bytes at 0x" in error
    assert "a null pointer" in error


def test_a_misaligned_access_is_reported(gpu):
    source, to = gpu.allocate(1024), gpu.allocate(1024)
    outcome, error = gpu.launch("pairs", "QQ", to + 4, source)
    assert outcome == ILLEGAL_ADDRESS
    assert "kernel test::pairs: misaligned store of 8 bytes at 0x" in error
    assert f"(1024 bytes at {to:#x}), PTX line " in error


def test_a_thread_that_does_not_reach_a_barrier_is_named(gpu):
    outcome, error = gpu.launch("reversed", "Qi", gpu.allocate(256), 37, threads=64)
    assert outcome == LAUNCH_FAILURE
    assert error.startswith("kernel test::reversed: threads wait for a barrier or shuffle that not all reach: 63 at a")
    assert "block (0,0,0)" in error
    assert error.endswith("thread (37,0,0) has ended")


def test_a_lane_outside_of_its_mask_is_reported(gpu):
    outcome, error = gpu.launch("lanes", "QI", gpu.allocate(384), 0xFFFFFFFB)
    assert outcome == ILLEGAL_ADDRESS
    assert "kernel test::lanes: shuffle " in error
    assert "mask 0xfffffffb" in error


def test_too_many_threads_for_the_launch_bounds_are_reported(gpu):
    outcome, error = gpu.launch("pairs", "QQ", gpu.allocate(2048), gpu.allocate(2048), threads=96)
    assert outcome != 0
    assert error == "kernel test::pairs: 96 threads, its launch bounds are 64"


def test_a_shared_access_out_of_bounds_is_reported(gpu):
    outcome, error = gpu.launch("reversed", "Qi", gpu.allocate(512), -1, threads=96)
    assert outcome == ILLEGAL_ADDRESS
    assert "kernel test::reversed: store of 4 bytes at 0x" in error
    assert "of shared memory, which has 256 bytes" in error


def test_freeing_twice_is_reported(gpu):
    x = gpu.allocate(100)
    gpu.free(x)
    gpu.free(x)
    assert f"free of device address {x:#x}" in gpu.library.harness_take_error().decode()


def test_host_code_that_touches_device_memory_dies_with_its_address(gpu):
    code = f"""
import ctypes, faulthandler
library = ctypes.CDLL({str(gpu.path)!r})
library.harness_allocate.restype = ctypes.c_uint64
faulthandler.enable()
library.harness_watch()
address = library.harness_allocate(ctypes.c_uint64(96))
print(hex(address + 8), flush=True)
ctypes.string_at(address + 8, 4)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -11
    address = done.stdout.strip()
    said = f"VGPU ERROR: host code touches device address {address}, at offset 8 of allocation 1 (96 bytes at "
    assert said in done.stderr
    assert "string_at" in done.stderr  # Python's own handler goes on to say where


# ---- the copy of the project --------------------------------------------------------------------------------------


def test_a_command_leaves_the_copy_of_another_one_alone(tmp_path):
    """What has not changed is not written again, what is gone from the project is gone from the copy."""
    copy = Environment(tmp_path, "2.0.0", tmp_path / "src")
    copy.copy_project()
    source = copy.source / "sassha_fast" / "sassha.py"
    kernel = copy.source / "sassha_fast" / "triton_kernels" / "step.py"
    assert source.read_text() == (ROOT / "sassha_fast" / "sassha.py").read_text()
    assert kernel.read_text() == (ROOT / "triton_kernels" / "step.py").read_text()
    built = [copy.source / "sassha_fast" / "_native.so", copy.source / "build" / "native" / "ops.o"]
    for path in built:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    left_over = copy.source / "tests" / "test_left_over.py"
    left_over.touch()
    kernel.write_text("changed")
    before = source.stat()
    copy.copy_project()
    assert (source.stat().st_ino, source.stat().st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
    assert kernel.read_text() == (ROOT / "triton_kernels" / "step.py").read_text()
    assert all(path.exists() for path in built)
    assert not left_over.exists()


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.what.partition(":")[0])
def test_the_list_of_mutants_is_up_to_date(mutant, tmp_path):
    """What each changes is there once, and its tests are."""
    folder = tmp_path / "sassha_fast" / Path(mutant.file).parent
    folder.mkdir(parents=True)
    before = (ROOT / "sassha_fast" / mutant.file).read_text()
    (tmp_path / "sassha_fast" / mutant.file).write_text(before)
    mutants.mutate(mutant, tmp_path)
    after = (tmp_path / "sassha_fast" / mutant.file).read_text()
    assert after != before
    compile(after, mutant.file, "exec")
    assert (ROOT / mutant.tests[0]).is_file()
