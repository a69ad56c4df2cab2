"""What a CUDA graph can capture of a step: what replays would do as a step does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .options import HYPERPARAMETERS, Options
from .params import Parameters


def check_capture(params: Parameters, options: Options, name: str, *, has_curvature: bool, is_due: bool) -> None:
    """Raises if replays of a graph that is being captured would do something else than steps.

    Args:
        params: The parameters, of which there are some.
        options: Of the optimizer.
        name: What errors call the call.
        has_curvature: Whether the optimizer takes products.
        is_due: Whether it does so in this step.
    """
    if not has_curvature:
        raise RuntimeError(
            f"{name}: a CUDA graph is being captured, but {options.caller} counts its steps on the host; capture "
            "the passes without it"
        )
    if not options.capturable:
        raise RuntimeError(
            f"{name}: a CUDA graph is being captured, but step counts and learning rates are read on the host, so "
            f"that every replay would repeat this very step; construct {options.caller} with capturable=True"
        )
    if is_due:
        raise RuntimeError(
            f"{name}: a CUDA graph is being captured, but this step refreshes the curvature, which replays can't "
            "schedule; capture ordinary steps (not opt.hessian_due) and run refreshes between the replays"
        )
    _check_tensors(params, name)


def _check_tensors(params: Parameters, name: str) -> None:
    """Raises if replays would go on with what a hyperparameter that is a tensor is now."""
    device = params.all[0].device
    for number, group in enumerate(params.groups):
        for key in (key for key in HYPERPARAMETERS if key in group):
            values = group[key] if isinstance(group[key], Sequence) else (group[key],)
            on_host = key in ("betas", "hessian_power")
            found = [v for v in values if isinstance(v, Tensor) and (on_host or v.device.type == "cpu")]
            if found:
                remedy = "give a number" if on_host else f"make it on {device}, or give a number"
                raise RuntimeError(
                    f"{name}: a CUDA graph is being captured, but {key} of group {number} is a tensor on "
                    f"{found[0].device}, which replays can't read; {remedy}"
                )
