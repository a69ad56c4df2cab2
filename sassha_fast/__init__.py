"""SASSHA, the sharpness-aware second-order optimizer, on fused multi-tensor kernels."""

from . import backends, schedules
from .family import GSASSHA, AdaHessian, SophiaH
from .momentum import MSASSHA
from .optimizer import SASSHA
from .preflight import ModelReport, check_model
from .sam import SAM
from .stats import Stats

__all__ = [
    "GSASSHA",
    "MSASSHA",
    "SAM",
    "SASSHA",
    "AdaHessian",
    "ModelReport",
    "SophiaH",
    "Stats",
    "__version__",
    "backends",
    "check_model",
    "schedules",
]

__version__ = "0.1.0"
