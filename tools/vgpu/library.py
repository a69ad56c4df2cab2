"""The stand-in runtime from Python: control, errors and trace."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

# Returns a cudaError_t. Called by the runtime when a torch operator's turn has come.
PYTHON_OPERATOR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
LAUNCH_FAILURE = 719

_TEXT, _NUMBER, _HANDLE = ctypes.c_char_p, ctypes.c_uint64, ctypes.c_void_p
_SIGNATURES = {
    "vgpu_set_python": ([PYTHON_OPERATOR], None),
    "vgpu_enqueue_python": ([_HANDLE, _NUMBER, _TEXT], ctypes.c_int),
    "vgpu_is_capturing": ([_HANDLE], ctypes.c_int),
    "vgpu_bytes_at": ([_NUMBER, _NUMBER, _TEXT], _NUMBER),
    "vgpu_set_lazy": ([ctypes.c_int], None),
    "vgpu_seed": ([_NUMBER], None),
    "vgpu_flush": ([_HANDLE], ctypes.c_int),
    "vgpu_flush_all": ([], ctypes.c_int),
    "vgpu_pending": ([_HANDLE], _NUMBER),
    "vgpu_watch_host_accesses": ([], None),
    "vgpu_report": ([_TEXT], None),
    "vgpu_set_tracing": ([ctypes.c_int], None),
    "vgpu_errors": ([], _NUMBER),
    "vgpu_read_counters": ([_HANDLE, _NUMBER], _NUMBER),
    "vgpu_read_trace": ([_HANDLE, _NUMBER], _NUMBER),
    "vgpu_take_errors": ([_HANDLE, _NUMBER], _NUMBER),
    "vgpu_readable": ([_TEXT, _HANDLE, _NUMBER], _NUMBER),
}


def is_running() -> bool:
    """Whether this process has the virtual GPU."""
    return "VGPU_KERNELS" in os.environ


@cache
def library() -> ctypes.CDLL:
    """The stand-in runtime, which is loaded already: run.py preloads it."""
    if not is_running():
        raise RuntimeError("vgpu: this process has no virtual GPU; start it by tools/vgpu/run.py COMMAND")
    loaded = ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    return loaded


def read_text(function: Callable[..., int], *arguments: object) -> str:
    """What a function of the library writes into a buffer of the size that it asks for."""
    while True:
        size = function(*arguments, None, 0)
        buffer = ctypes.create_string_buffer(size + 1)
        if function(*arguments, ctypes.addressof(buffer), size) <= size:
            return buffer.raw[:size].decode()


def readable(kernel: str) -> str:
    """A kernel's mangled name as a person would write it."""
    return read_text(library().vgpu_readable, kernel.encode())


def flush() -> None:
    """Runs all work that is queued, without counting as a wait. What is captured stays captured."""
    library().vgpu_flush_all()


def take_errors() -> list[str]:
    """Errors since the last call, and forgets them: a test that provokes one takes it, or the plugin fails the test."""
    return read_text(library().vgpu_take_errors).split("\0")[:-1]


def report(error: str) -> None:
    """Adds an error."""
    library().vgpu_report(error.encode())


def set_lazy(lazy: bool) -> None:
    """Whether work waits until somebody needs it, or runs at once (VGPU_POLICY)."""
    library().vgpu_set_lazy(lazy)


def set_seed(seed: int) -> None:
    """Chooses the orders of streams, blocks and warps to come (VGPU_SEED)."""
    library().vgpu_seed(seed)


def trace() -> list[str]:
    """Lines of the trace: what was queued, run, recorded and waited for, in order."""
    return read_text(library().vgpu_read_trace).splitlines()


@contextmanager
def tracing() -> Iterator[None]:
    """Traces a block, which ends by reading :func:`trace`."""
    library().vgpu_set_tracing(1)
    try:
        yield
    finally:
        library().vgpu_set_tracing(0)
