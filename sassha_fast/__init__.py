"""SASSHA, the sharpness-aware second-order optimizer, on fused multi-tensor kernels."""

from . import backends, schedules
from ._version import __version__
from .casting import cast_model
from .msassha import MSASSHA
from .preflight import ModelReport, check_model
from .relatives import GSASSHA, AdaHessian, SophiaH
from .sam import SAM
from .sassha import SASSHA
from .stats import Stats
from .suggestion import Suggestion, suggest

__all__ = [
    "GSASSHA",
    "MSASSHA",
    "SAM",
    "SASSHA",
    "AdaHessian",
    "ModelReport",
    "SophiaH",
    "Stats",
    "Suggestion",
    "__version__",
    "backends",
    "cast_model",
    "check_model",
    "schedules",
    "suggest",
]
