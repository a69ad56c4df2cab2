"""Networks in bfloat16 or float16, but for the parts that need float32."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .checks import is_one_of, shown

__all__ = ["cast_model"]

Model = TypeVar("Model", bound=nn.Module)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def cast_model(model: Model, dtype: torch.dtype) -> Model:
    """Converts a network in place, as ``model.to(dtype)`` does, but leaves norms with running statistics in float32.

    These are BatchNorm, and InstanceNorm that tracks statistics: averages of many batches that move by less than
    bfloat16 can show. Their weights and biases stay with them, as torch's kernels want one dtype for all four; they
    take input of any dtype. Tensors elsewhere are converted if they are of real floating point.

    ``model.to(dtype)`` converts the statistics as well, and autocast leaves all weights in float32, at 4 bytes each.

    Args:
        model: The network. Construct the optimizer after this.
        dtype: ``torch.bfloat16``, or float16, float32 or float64.

    Returns:
        The network itself.

    Raises:
        TypeError: If ``model`` is no network.
        ValueError: If ``dtype`` is no such dtype.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"cast_model: model is {shown(model)}, expected a torch.nn.Module")
    if not is_one_of(dtype, DTYPES):
        raise ValueError(f"cast_model: dtype is {shown(dtype)}, expected one of {list(DTYPES)}")
    if dtype not in (torch.bfloat16, torch.float16):
        return _cast(model, dtype)
    norms = [module for module in model.modules() if _has_statistics(module)]
    exact = [[t.detach().clone() for t in _tensors(norm)] for norm in norms]
    _cast(model, dtype)
    with torch.no_grad():
        for norm, values in zip(norms, exact, strict=True):
            for tensor, value in zip(_tensors(norm.float()), values, strict=True):
                tensor.copy_(value)
    return model


def _cast(model: Model, dtype: torch.dtype) -> Model:
    """``model.to(dtype)``, which would also take the imaginary parts of complex tensors, where there are none."""
    if not any(t.is_complex() for t in (*model.parameters(), *model.buffers()) if not is_lazy(t)):
        return model.to(dtype)
    kinds = {torch.bfloat16: nn.Module.bfloat16, torch.float16: nn.Module.half, torch.float32: nn.Module.float}
    return kinds.get(dtype, nn.Module.double)(model)


def _tensors(norm: nn.Module) -> list[Tensor]:
    """Weights and statistics of a norm; none of a lazy one, which has yet to see its input."""
    return [t for t in (*norm.parameters(), *norm.buffers()) if not is_lazy(t)]


def _has_statistics(module: nn.Module) -> bool:
    """Whether a module is a norm with running statistics."""
    return getattr(module, "running_mean", None) is not None and getattr(module, "running_var", None) is not None
