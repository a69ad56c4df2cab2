"""What training a network takes in memory, in every setting of compact state, beside AdamW."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from .checks import shown
from .formats import GROUP, Format, format_of, groups_of

__all__ = ["Bill", "bills", "count_of", "report"]


class Bill(NamedTuple):
    """Bytes of one way to train, activations not counted.

    Attributes:
        name: Of the way.
        weights: Of the parameters.
        gradients: Of their gradients. The ascent's backup of the weights lies there, too.
        state: Of m, D, scales and corrections; of AdamW's averages and masters.
    """

    name: str
    weights: int
    gradients: int
    state: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.state


# By name: dtype of weights and gradients, and the optimizer's arguments.
SETTINGS: tuple[tuple[str, torch.dtype, dict[str, Any]], ...] = (
    ("SASSHA, float32", torch.float32, {}),
    ("SASSHA, float32, state_bits=16", torch.float32, {"state_bits": 16}),
    ("SASSHA, float32, state_bits=8", torch.float32, {"state_bits": 8}),
    ("SASSHA, bfloat16", torch.bfloat16, {}),
    ("SASSHA, bfloat16, master_weight_bits=32", torch.bfloat16, {"master_weight_bits": 32}),
    (
        "SASSHA, bfloat16, master_weight_bits=24, state_bits=8",
        torch.bfloat16,
        {"master_weight_bits": 24, "state_bits": 8},
    ),
)


def count_of(text: str) -> int:
    """A number of parameters, such as ``125000000``, ``1.5e9``, ``350M`` or ``7B``.

    Raises:
        ValueError: If it is no such number.
    """
    found = re.fullmatch(r"(\d+(?:[.,_]\d+)*(?:e\d+)?)\s*([kmbt]?)", text.strip().lower())
    number = float(found[1].replace(",", "").replace("_", "")) if found and found[1].count(".") < 2 else 0.0
    if found is None or number < 1:
        raise ValueError(f"--memory is {shown(text)}, expected a number of parameters, such as 125000000, 350M or 7B")
    return int(number * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}[found[2]])


def _stored_bytes(elements: int, dtype: torch.dtype, stored: Format) -> int:
    """Bytes of the state of one parameter."""
    m, d = stored.dtypes(dtype)
    scales = 6 * groups_of(elements) if stored.state_bits == 8 else 0
    return elements * (m.itemsize + d.itemsize + stored.correction_bits // 8) + scales


def bills(model: nn.Module | int, *, full_precision_below: int = 4096) -> list[Bill]:
    """What each setting takes, and AdamW, from ``torch.optim`` in float32 and with float32 masters of bfloat16.

    Args:
        model: A network, of whose parameters those that need gradients count; or a number of parameters, as if all
            were in large matrices.
        full_precision_below: The optimizer's argument.
    """
    shapes: Iterable[torch.Size | tuple[int, ...]]
    if isinstance(model, nn.Module):
        shapes = [p.shape for p in model.parameters() if p.requires_grad]
    else:
        shapes = [(model // GROUP, GROUP)]
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    n = sum(t.numel() for t in tensors)
    found = [
        Bill("AdamW, float32", 4 * n, 4 * n, 8 * n),
        Bill("AdamW, bfloat16 and float32 masters", 2 * n, 2 * n, 12 * n),
    ]
    for name, dtype, options in SETTINGS:
        state = 0
        for t in tensors:
            stored = format_of(t.to(dtype), **options, below=full_precision_below)
            state += _stored_bytes(t.numel(), dtype, stored)
        found.append(Bill(name, dtype.itemsize * n, dtype.itemsize * n, state))
    return found


def report(model: nn.Module | int) -> str:
    """:func:`bills` as a table, in gigabytes and in bytes for each parameter."""
    rows = bills(model)
    n = max(rows[0].weights // 4, 1)
    unit, name = (2**30, "GiB") if n >= 10**8 else (2**20, "MiB")
    width = max(len(row.name) for row in rows)
    lines = [f"{n:,} parameters; activations are not counted", ""]
    lines.append(f"{name:<{width}}  weights  gradients    state    total  bytes a parameter")
    for row in rows:
        parts = [value / unit for value in (row.weights, row.gradients, row.state, row.total)]
        columns = f"{parts[0]:7.1f}  {parts[1]:9.1f}  {parts[2]:7.1f}  {parts[3]:7.1f}"
        lines.append(f"{row.name:<{width}}  {columns}  {row.total / n:17.2f}")
    lines += [
        "",
        "The backup of the ascent lies in the memory of the gradients. A step that refreshes the curvature, one in",
        "lazy_hessian, takes the size of the gradients once more. M-SASSHA keeps another copy of the weights.",
    ]
    return "\n".join(lines)
