"""Packages that only measuring and drawing need, imported when they are asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["extra"]


def extra(module: str, user: str) -> Any:
    """Imports a module that only measuring and drawing need, or says who needs it and how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{user} needs {package}, which can't be imported ({error}); pip install {package}"
        ) from error
