"""SASSHA, the sharpness-aware second-order optimizer, on fused multi-tensor kernels."""

from . import backends, schedules
from .optimizer import SASSHA
from .preflight import ModelReport, check_model
from .stats import Stats

__all__ = ["SASSHA", "ModelReport", "Stats", "__version__", "backends", "check_model", "schedules"]

__version__ = "0.1.0"
