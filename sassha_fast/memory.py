"""What training a network takes in memory, in every setting of compact state, beside AdamW."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .checks import as_integer, shown
from .formats import Format, format_of, groups_of

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


MOST = 10**18  # parameters, a million times as many as anybody has


def count_of(text: str) -> int:
    """A number of parameters, such as ``125000000``, ``125,000,000``, ``1.5e9``, ``350M`` or ``7B``.

    Raises:
        ValueError: If it is no such number. A comma that does not part thousands may be a decimal one.
    """
    digits = r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+(?:_\d+)*)(?:\.\d+(?:_\d+)*)?"
    found = re.fullmatch(rf"({digits}(?:e\d{{1,3}})?)\s*([kmbt]?)", text.strip().lower())
    number = Decimal(0)
    if found:
        number = Decimal(found[1].replace(",", "").replace("_", ""))
        number *= {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}[found[2]]
    if not 1 <= number <= MOST:
        raise ValueError(
            f"--memory is {shown(text)}, expected a number of parameters, such as 125000000, 350M or 1.5B, and no more "
            "than 10^18; a comma parts thousands, as in 125,000,000, and a point the decimals"
        )
    return int(number)


def _stored_bytes(elements: int, dtype: torch.dtype, stored: Format) -> int:
    """Bytes of the state of one parameter."""
    m, d = stored.dtypes(dtype)
    scales = 6 * groups_of(elements) if stored.state_bits == 8 else 0
    return elements * (m.itemsize + d.itemsize + stored.correction_bits // 8) + scales


def _tensors_of(model: Any) -> list[tuple[int, Tensor]]:
    """Elements of every parameter, and a tensor of its shape; of a number, and a matrix."""
    if isinstance(model, nn.Module):
        for name, p in model.named_parameters():
            if is_lazy(p):
                raise ValueError(
                    f"sassha_fast.memory: {name!r} has no shape before the first forward pass of its lazy module; run "
                    "one"
                )
        return [(p.numel(), torch.empty(p.shape, device="meta")) for p in model.parameters() if p.requires_grad]
    count = as_integer(model)
    if count is None:
        raise TypeError(
            f"sassha_fast.memory: model is {shown(model)}, expected a torch.nn.Module or a whole number of parameters"
        )
    if not 1 <= count <= MOST:
        raise ValueError(
            f"sassha_fast.memory: model is {shown(model)}, expected a number of parameters from 1 to 10^18"
        )
    return [(count, torch.empty(1, 1, device="meta"))]


def bills(model: nn.Module | int, *, full_precision_below: int = 4096) -> list[Bill]:
    """What each setting takes, and AdamW, from ``torch.optim`` in float32 and with float32 masters of bfloat16.

    Args:
        model: A network, of whose parameters those that need gradients count; or a number of parameters, as if all
            were in large matrices.
        full_precision_below: The optimizer's argument.

    Raises:
        TypeError: If ``model`` is neither.
        ValueError: If it is no number of parameters, or if parameters have no shape yet.
    """
    below = as_integer(full_precision_below)
    if below is None or below < 0:
        raise ValueError(
            f"sassha_fast.memory: full_precision_below is {shown(full_precision_below)}, expected a number of elements"
        )
    tensors = _tensors_of(model)
    n = sum(size for size, _ in tensors)
    found = [
        Bill("AdamW, float32", 4 * n, 4 * n, 8 * n),
        Bill("AdamW, bfloat16 and float32 masters", 2 * n, 2 * n, 12 * n),
    ]
    for name, dtype, options in SETTINGS:
        state = 0
        for size, t in tensors:
            stored = format_of(t.to(dtype), **options, below=below if isinstance(model, nn.Module) else 0)
            state += _stored_bytes(size, dtype, stored)
        found.append(Bill(name, dtype.itemsize * n, dtype.itemsize * n, state))
    return found


def report(model: nn.Module | int) -> str:
    """:func:`bills` as a table, in gigabytes and in bytes for each parameter."""
    rows = bills(model)
    n = max(rows[0].weights // 4, 1)
    unit, name = (2**30, "GiB") if n >= 10**8 else (2**20, "MiB") if n >= 10**5 else (2**10, "KiB")
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
