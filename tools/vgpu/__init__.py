"""A virtual GPU under a real CUDA build of torch: see README.md.

Under ``tools/vgpu/run.py`` this package is importable as ``vgpu``. ``import vgpu.operators`` gives torch's own
operators, ``-p vgpu.plugin`` does it for pytest and makes every error of the virtual GPU a failure.
"""

from .counters import Counts, counters, counting
from .library import flush, is_running, set_lazy, set_seed, take_errors, trace, tracing

__all__ = [
    "Counts",
    "counters",
    "counting",
    "flush",
    "is_running",
    "set_lazy",
    "set_seed",
    "take_errors",
    "trace",
    "tracing",
]
