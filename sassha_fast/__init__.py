"""SASSHA, the sharpness-aware second-order optimizer, on fused multi-tensor kernels."""

from . import backends, schedules
from .optimizer import SASSHA
from .stats import Stats

__all__ = ["SASSHA", "Stats", "__version__", "backends", "schedules"]

__version__ = "0.1.0"
