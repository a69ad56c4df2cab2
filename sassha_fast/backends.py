"""The backends: what there is, what runs here and why not, and which one a device gets."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from ._passes import library
from ._passes.foreach import ForeachPasses
from ._passes.reference import Passes
from ._version import __version__
from .checks import is_one_of, shown

__all__ = ["Backend", "available", "choose", "names", "report", "resolve"]


@dataclass(frozen=True)
class Backend:
    """One way to run the passes.

    Attributes:
        name: What users write.
        summary: One line for the report.
        passes: Loads the class that runs the passes.
        why_not: None if it runs on a device of this type, else the reason.
        home: The type of device that the report asks about.
    """

    name: str
    summary: str
    passes: Callable[[], type[Passes]]
    why_not: Callable[[str], str | None]
    home: str = "cpu"


def _load_cpu() -> type[Passes]:
    from ._passes.cpu import CpuPasses

    return CpuPasses


def _cpu_why_not(device_type: str) -> str | None:
    if device_type != "cpu":
        return f"its kernels run on the CPU, not on {device_type}"
    return library.load()


def _load_cuda() -> type[Passes]:
    from ._passes.cuda import CudaPasses

    return CudaPasses


def _cuda_why_not(device_type: str) -> str | None:
    if device_type != "cuda":
        return f"its kernels run on CUDA devices, not on {device_type}"
    reason = library.load()
    if reason is not None:
        return reason
    if not torch._C._dispatch_has_kernel_for_dispatch_key("sassha_fast::table_step", "CUDA"):
        return f"{library.LIBRARY.name} was built without CUDA; build it again with SASSHA_CUDA=1 and nvcc"
    if torch.version.hip is not None:
        return "its kernels are built for CUDA, and this torch is for ROCm"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return _cuda_fit_why_not(library.cuda_versions(), torch.cuda.get_device_capability())


def _shown_cuda(version: int) -> str:
    """13020 as "CUDA 13.2"."""
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _cuda_fit_why_not(versions: library.CudaVersions, capability: tuple[int, int]) -> str | None:
    """Why kernels that were built elsewhere do not run with this torch, driver and GPU."""
    built, name = _shown_cuda(versions.built), library.LIBRARY.name
    for what, version in (("torch has", versions.runtime), ("the driver knows", versions.driver)):
        if version and versions.built // 1000 > version // 1000:
            return (
                f"{name} was built with {built}, but {what} {_shown_cuda(version)}; use a wheel or an nvcc of that one"
            )
    if 10 * capability[0] + capability[1] < versions.least:
        return (
            f"{name} has code for GPUs from sm_{versions.least} on, and this one is sm_{capability[0]}{capability[1]}; "
            f"build it again with SASSHA_CUDA_ARCHS={capability[0]}{capability[1]}"
        )
    return None


def _load_triton() -> type[Passes]:
    from ._passes.triton import TritonPasses

    return TritonPasses


def _triton_why_not(device_type: str) -> str | None:
    """Decided without importing triton, which takes longer than all else that is imported."""
    if find_spec("triton") is None:
        return "triton is not installed; `pip install triton`"
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    language = sys.modules.get("triton.language")
    if language is not None and interpreting != (type(language.zeros).__name__ == "InterpretedFunction"):
        return "TRITON_INTERPRET has changed since triton was imported; set it before the start"
    if device_type == "cpu" and not interpreting:
        return "its kernels run on GPUs; set TRITON_INTERPRET=1 before the start to interpret them on the CPU"
    if device_type == "cuda" and interpreting:
        return "TRITON_INTERPRET=1 is set, so its kernels are interpreted on the CPU"
    if device_type not in ("cpu", "cuda"):
        return f"its kernels run on GPUs of NVIDIA and AMD, not on {device_type}"
    return None if device_type == "cpu" or torch.cuda.is_available() else "torch finds no GPU"


def _everywhere(device_type: str) -> str | None:
    del device_type
    return None


_REGISTRY = {
    backend.name: backend
    for backend in (
        Backend("cpu", "C++ kernels, one parallel pass over all tensors", _load_cpu, _cpu_why_not),
        Backend("cuda", "CUDA kernels, one launch per pass and dtype", _load_cuda, _cuda_why_not, home="cuda"),
        Backend("triton", "Triton kernels, GPUs of NVIDIA and AMD", _load_triton, _triton_why_not, home="cuda"),
        Backend("foreach", "torch._foreach_* operations, any device", lambda: ForeachPasses, _everywhere),
        Backend("reference", "plain torch operations, the oracle of the tests", lambda: Passes, _everywhere),
    )
}
_FUSED = ("cpu", "cuda", "triton")  # what "fused" tries, in order
_PREFERENCE = (*_FUSED, "foreach")  # what "auto" tries


def names() -> list[str]:
    """Names of all backends."""
    return list(_REGISTRY)


def available(device_type: str = "cpu") -> list[str]:
    """Names of the backends that run on a device of this type."""
    return [name for name, backend in _REGISTRY.items() if backend.why_not(device_type) is None]


def resolve(backend: str, *, foreach: bool | None = None, fused: bool | None = None, caller: str = "SASSHA") -> str:
    """The backend that ``backend`` and torch's ``foreach`` and ``fused`` flags ask for together.

    Raises:
        ValueError: For an unknown name, or flags that contradict each other or ``backend``.
    """
    if not is_one_of(backend, ("auto", "fused", *_REGISTRY)):
        raise ValueError(f"{caller}: backend is {shown(backend)}, expected 'auto', 'fused' or one of {names()}")
    if foreach and fused:
        raise ValueError(f"{caller}: foreach=True and fused=True exclude each other; set one of them, or backend=")
    asked = backend
    if foreach:
        asked = "foreach"
    elif fused:
        asked = "fused"
    elif foreach is False and fused is False:
        asked = "reference"
    if backend not in ("auto", asked):
        raise ValueError(
            f"{caller}: backend={backend!r} contradicts foreach={foreach}, fused={fused}; leave the flags at None"
        )
    return asked


def choose(backend: str, device: torch.device, *, caller: str = "SASSHA") -> type[Passes]:
    """The passes of a backend for a device.

    ``"auto"`` takes the fastest that runs there, ``"fused"`` the kernels of the device. A backend named by the user
    raises if it does not run.
    """
    if backend == "auto":
        backend = next(name for name in _PREFERENCE if _suits(name, device.type))
    if backend == "fused":
        running = [name for name in _FUSED if _suits(name, device.type)]
        at_home = [name for name in _FUSED if _REGISTRY[name].home == device.type]
        backend = (running or at_home or list(_FUSED))[0]
    reason = _REGISTRY[backend].why_not(device.type)
    if reason is not None:
        raise RuntimeError(
            f"{caller}: backend {backend!r} can't run parameters on {device}: {reason}. "
            f"Use backend='auto' or one of {available(device.type)}"
        )
    return _REGISTRY[backend].passes()


def _suits(name: str, device_type: str) -> bool:
    """Whether "auto" takes a backend: where it runs, except in an interpreter, which is for tests."""
    interpreted = name == "triton" and device_type == "cpu"
    return not interpreted and _REGISTRY[name].why_not(device_type) is None


def report() -> str:
    """A table of backends for people: which run here, each on the devices it is for, and why the others do not."""
    lines = [f"sassha_fast {__version__}, torch {torch.__version__}, Python {platform.python_version()}"]
    for name, backend in _REGISTRY.items():
        reason = backend.why_not(backend.home)
        status = "ok" if reason is None else f"unavailable: {reason}"
        if name == "cpu" and reason is None:
            status += f" ({torch.ops.sassha_fast.cpu_isa()}, {torch.get_num_threads()} threads)"
        lines.append(f"  {name:<10} {backend.summary:<50} {status}")
    chosen = choose("auto", torch.device("cpu")).name
    on_gpu = next(name for name in _PREFERENCE if _suits(name, "cuda"))
    lines.append(
        f"backend='auto' takes {chosen!r} for parameters on the CPU, {on_gpu!r} on GPUs, 'foreach' for other devices"
    )
    return "\n".join(lines)
