"""What the last step saw, at no extra cost: the fused passes have the numbers at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor
from torch.amp import GradScaler

__all__ = ["Stats"]

OF_A_STEP = ("ascent_gap", "descent_norm", "square_sums", "scales")  # that an ordinary step replaces


def _unknown() -> Tensor:
    return torch.tensor(float("nan"), dtype=torch.float64, device="cpu")


class _Count:
    """A count of refreshes. On a device the last one is not counted before somebody asks."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    @overload
    def __get__(self, stats: None, owner: type) -> int: ...
    @overload
    def __get__(self, stats: Stats, owner: type) -> int: ...
    def __get__(self, stats: Stats | None, owner: type) -> int:
        if stats is None:
            return 0  # where it starts
        stats.count_late()
        count: int = vars(stats)[self._name]
        return count

    def __set__(self, stats: Stats, value: int) -> None:
        vars(stats)[self._name] = value


@dataclass
class Stats:
    """Numbers of the most recent step and refresh.

    Tensors live on the parameters' device. Reading one waits for the device, as does a count of refreshes after one.

    Attributes:
        trace: Σ z⊙Hz of the last refresh, an estimate of the trace of the Hessian.
        negative_share: Share of elements of z⊙Hz below zero.
        ascent_gap: The increase of the loss that the ascent caused. Only closures see it: NaN after the three calls.
        refreshes: Refreshes that succeeded.
        partial_refreshes: Those among them in which some products were not finite, or lost to rounding.
        skipped_steps: Steps left out because their gradients had overflowed; a tensor with ``capturable``.
        skipped_refreshes: Refreshes without a finite product, without a graph, or from a batch that showed nothing.
        descent_norm: Norm of the gradient at x + ε before clipping, where ``max_grad_norm`` or a check asked for it.
        square_sums: Squared norm of the first gradient, per group (of |x|⊙g with ``adaptive``).
        scales: Length of ε over length of g, per group.
        late: Counts the last refresh, if that is still to be done.
        replayed: Memory that all CUDA graphs write their numbers into, by name.
    """

    trace: Tensor = field(default_factory=_unknown)
    negative_share: Tensor = field(default_factory=_unknown)
    ascent_gap: Tensor = field(default_factory=_unknown)
    refreshes: _Count = _Count()
    partial_refreshes: _Count = _Count()
    skipped_refreshes: _Count = _Count()
    skipped_steps: int | Tensor = 0
    descent_norm: Tensor = field(default_factory=_unknown)
    square_sums: Tensor = field(default_factory=_unknown)
    scales: Tensor = field(default_factory=_unknown)
    late: Callable[[], Any] | None = field(default=None, repr=False)
    replayed: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def count_late(self) -> None:
        """Counts the last refresh, if that is still to be done; waits for the device then."""
        late, self.late = self.late, None
        if late is not None:
            late()

    def tensors(self) -> list[Tensor]:
        """The numbers that are tensors."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def __getstate__(self) -> dict[str, Any]:
        """For copies: what is to be counted is counted before."""
        self.count_late()
        return {**vars(self), "late": None, "replayed": {}}

    # ---- CUDA graphs --------------------------------------------------------------------------------------------

    def of_step(self) -> dict[str, Tensor]:
        """The numbers that an ordinary step replaces."""
        return {name: getattr(self, name) for name in OF_A_STEP}

    def end_capture(self, before: dict[str, Tensor]) -> None:
        """Has a graph write the numbers of the step that was captured where all graphs write them.

        Nothing has happened yet, so the numbers from before the step are put back.
        """
        for name, old in before.items():
            new, there = getattr(self, name), self.replayed.get(name)
            if new is old:
                continue
            if there is None or (there.shape, there.dtype, there.device) != (new.shape, new.dtype, new.device):
                self.replayed[name] = new  # kept from now on, so that the graph uses its memory for nothing else
            else:
                there.copy_(new)
        self.set_step(before)

    def set_step(self, numbers: dict[str, Tensor]) -> None:
        """Takes these numbers for those of the last step."""
        for name, value in numbers.items():
            setattr(self, name, value)

    @property
    def grad_norm(self) -> Tensor:
        """‖g‖ of the first gradient (‖|x|⊙g‖ with ``adaptive``)."""
        return self.square_sums.sum().sqrt()

    @property
    def predicted_gap(self) -> Tensor:
        """ε·g, the first-order prediction of the increase of the loss that the ascent causes: ρ‖g‖."""
        return (self.scales.abs() * self.square_sums).sum()

    def divide_by(self, scaler: GradScaler) -> None:
        """Takes the loss scale of a scaler out of the numbers of the ascent, without waiting for the device."""
        scale = scaler._get_scale_async()
        if scaler.is_enabled() and scale is not None:
            self.square_sums = self.square_sums / (scale * scale).to(self.square_sums.device)
            self.scales = self.scales * scale.to(self.scales.device)

    def count_skipped(self, skip: Tensor) -> None:
        """Adds a step that may have been skipped, on the device and in place, so that a captured graph counts too."""
        if not isinstance(self.skipped_steps, Tensor):
            self.skipped_steps = torch.full_like(skip, float(self.skipped_steps))
        self.skipped_steps.add_(skip)
