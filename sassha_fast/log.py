"""A log of a run: loss and ``opt.stats`` of every step, in a CSV file that resumes with the run."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import chain, takewhile
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._core.closure import Accumulated, is_loss
from ._measure.log_file import COLUMNS, HEADER, columns, complete_lines, parsed, read_log
from .checks import check_count, shown
from .stats import Stats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLUMNS", "StatsLog", "read_log"]

# Rows whose numbers are still on a device: one transfer brings them all.
PENDING = 64

Row = list[Any]  # numbers, tensors of one element, and None for what is not known


class StatsLog:
    """Logs loss and statistics of an optimizer while it trains. The loop stays as it is::

        with StatsLog(opt, "run.csv") as log:
            train(model, opt)  # opt.step(closure) tells the loss; other loops call log.note(loss=loss) before the step
            log.plot("run.png")

    Steps count from 0, so that the loss of step t is that at the weights after t steps. A run that goes on from a
    checkpoint goes on in the file: rows at or after its first step are dropped, and the file becomes that of a run that
    was never interrupted. A line that was cut off is dropped too. Skipped steps have no row. What the optimizer does
    not have stays empty: of ``torch.optim.AdamW`` only the loss is logged.

    Numbers on a GPU are fetched in one transfer for many rows, when ``opt.state_dict()`` is taken, and at the end.
    Statistics are those of this process; give a path to one process only. Steps that a CUDA graph replays are not seen.

    Args:
        opt: Any optimizer of torch.
        path: Of the CSV file. None keeps the rows in memory.
        every: Log the steps that this divides. Steps that refresh the curvature are logged too.
        step: Number of the coming step, for optimizers that do not count (``torch.optim.SGD``) and other countings.
            None asks the optimizer's state; counts on a device are read once, skipped steps then count as well.
    """

    def __init__(
        self, opt: Optimizer, path: str | os.PathLike[str] | None = None, *, every: int = 1, step: int | None = None
    ) -> None:
        """Checks the file and hooks into the steps; see the class."""
        check_count("every", every, caller="StatsLog")
        if step is not None:
            check_count("step", step, least=0, caller="StatsLog")
        self.opt, self.path, self.every = opt, None if path is None else Path(path), every
        if self.path is not None and self.path.exists():
            complete_lines(self.path)  # before the first step, as an error there would cost one
        self._given, self._next = step, step  # the second is None where the optimizer counts
        self._last: int | None = None  # step of the last call, None where the file has to be cut
        self._file: IO[str] | None = None
        self._rows: list[list[float]] = []
        self._pending: list[Row] = []
        self._noted: Tensor | float | None = None
        self._losses: dict[int, Tensor | float] = {}
        self._seen = self._statistics()
        self._leader: dict[str, Any] = {}
        self._count = self._counted() or 0
        self._hooks = [
            opt.register_step_pre_hook(self._before_step),
            opt.register_step_post_hook(self._after_step),
            opt.register_state_dict_pre_hook(lambda _: self.flush()),
            opt.register_load_state_dict_post_hook(self._after_loading),
        ]

    # ---- what the user calls -------------------------------------------------------------------------------------

    def note(self, *, loss: Tensor | float) -> None:
        """Tells the loss of the coming step, without waiting for the device. It goes before that of a closure."""
        if not is_loss(loss):
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) and loss.dim() else shown(loss)
            raise ValueError(f"StatsLog.note: loss is {found}, expected one real number; pass loss.mean()")
        self._noted = _kept(loss)

    def flush(self) -> None:
        """Writes all rows to the file."""
        rows = _fetched(self._pending)
        self._pending = []  # only now: an interrupt while the device is waited for loses nothing
        if self._file is None:
            self._rows += [[math.nan if value is None else float(value) for value in row] for row in rows]
        else:
            self._file.writelines(",".join("" if v is None else repr(v) for v in row) + "\n" for row in rows)
            self._file.flush()

    def read(self) -> dict[str, list[float]]:
        """The log so far; see :func:`read_log`."""
        self.flush()
        if self.path is None:
            return columns(self._rows)
        return read_log(self.path) if self.path.exists() else columns([])

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draws loss, gaps and trace over the steps, and saves the picture if a path is given."""
        from .plots import plot_log

        figure = plot_log(self.read())
        if path is not None:
            figure.savefig(path)
        return figure

    def close(self) -> None:
        """Writes what is left and lets go of the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> StatsLog:
        """The log itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the log, whatever happened."""
        self.close()

    # ---- hooks ---------------------------------------------------------------------------------------------------

    def _before_step(self, opt: Optimizer, args: Any, kwargs: Any) -> Any:
        """Listens to closures: a hook after the step does not see what it returned."""
        self._losses = {}
        if len(args) > 1:
            return (args[0], self._watched(args[1]), *args[2:]), kwargs
        if "closure" in kwargs:
            return args, {**kwargs, "closure": self._watched(kwargs["closure"])}
        return None

    def _watched(self, closure: Any, key: int = 0) -> Any:
        if isinstance(closure, Sequence) and not isinstance(closure, str):  # micro-batches, whose losses add up
            return [self._watched(part, i) for i, part in enumerate(closure)]
        if not callable(closure) or isinstance(closure, Accumulated):  # of a trainer, which logs losses itself
            return closure

        def watched() -> Any:
            loss = closure()
            if key not in self._losses and is_loss(loss):  # of the first pass, at the weights themselves
                self._losses[key] = _kept(loss)
            return loss

        watched.__wrapped__ = closure  # type: ignore[attr-defined]
        return watched

    def _after_step(self, opt: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # nothing happens now
        before, self._seen = self._seen, self._statistics()
        noted, self._noted = self._noted, None
        step = self._number(before)
        if step is None:
            return
        if self._last is None:
            self._start(step)
        self._last = step
        row = dict.fromkeys(COLUMNS)
        row |= self._news(before)
        if step % self.every and row["trace"] is None:
            return
        loss = noted if noted is not None or not self._losses else sum(self._losses.values(), start=0.0)
        self._pending.append(list({**row, "step": step, "loss": loss}.values()))
        waits = any(isinstance(value, Tensor) and value.device.type != "cpu" for value in self._pending[-1])
        if not waits or len(self._pending) >= PENDING:
            self.flush()

    def _after_loading(self, opt: Optimizer) -> None:
        """The run goes on from somewhere else."""
        self.flush()
        self._last = None
        if self._given is None:
            self._next = None
        self._count = self._counted() or 0
        self._seen = self._statistics()

    # ---- statistics ----------------------------------------------------------------------------------------------

    def _statistics(self) -> tuple[Any, Any, Any, Any]:
        """What a step replaces where it has something new to tell."""
        stats = getattr(self.opt, "stats", None)
        if not isinstance(stats, Stats):
            return None, None, None, None
        return stats.scales, stats.ascent_gap, stats.trace, stats.skipped_steps

    def _news(self, before: tuple[Any, Any, Any, Any]) -> dict[str, Any]:
        """The statistics that the last step has replaced."""
        stats: Any = getattr(self.opt, "stats", None)
        ascended, measured, refreshed = (new is not old for new, old in zip(self._seen[:3], before[:3], strict=True))
        news: dict[str, Any] = {}
        if ascended:
            news |= {"grad_norm": stats.grad_norm, "predicted_gap": stats.predicted_gap}
        if measured:
            news["ascent_gap"] = stats.ascent_gap
        if refreshed:
            news |= {"trace": stats.trace, "negative_share": stats.negative_share}
        return news

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _number(self, before: tuple[Any, Any, Any, Any]) -> int | None:
        """The number of the step that was taken, None if it was skipped."""
        skipped = self._seen[3]
        if isinstance(skipped, int) and skipped != before[3]:
            return None
        if self._next is None:
            count = self._counted()
            if count is not None:
                if count == self._count:
                    return None
                self._count = count
                return count - 1
            self._next = self._first()
        self._next += 1
        return self._next - 1

    def _counted(self) -> int | None:
        """Steps that the optimizer has counted, None if it does not or if that is on a device."""
        if "ascents" in self.opt.param_groups[0]:  # SAM counts for a base optimizer that may not
            return int(self.opt.param_groups[0]["ascents"])
        count = self._leader.get("step")
        if count is not None and int(count) == self._count + 1:  # the usual step asks one parameter only
            return self._count + 1
        entries = [entry for entry in self.opt.state.values() if "step" in entry]
        if not entries or any(isinstance(e["step"], Tensor) and e["step"].device.type != "cpu" for e in entries):
            return None
        self._leader = max(entries, key=lambda entry: int(entry["step"]))
        return int(self._leader["step"])

    def _first(self) -> int:
        """The number of the step that was taken first, by an optimizer whose count the host does not have."""
        counts = [int(entry["step"]) for entry in self.opt.state.values() if "step" in entry]
        if counts:
            return max(max(counts) - 1, 0)
        if self.path is not None and self.path.exists() and len(complete_lines(self.path)) > 1:
            raise ValueError(
                f"StatsLog: {self.path} has rows, and {type(self.opt).__name__} does not count steps, so it is not "
                "known where this run goes on; pass step=, the number of the coming step (0 starts the file again)"
            )
        return 0

    def _start(self, step: int) -> None:
        """Drops rows at or after a step, and what was cut off."""
        if self.path is None:
            self._rows = [row for row in self._rows if row[0] < step]
            return
        if self._file is not None:
            self._file.close()
        known = complete_lines(self.path) if self.path.exists() else []
        kept = known[:1] + list(takewhile(lambda line: parsed(line)[0] < step, known[1:]))
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.truncate(sum(map(len, kept)))
        self._file = self.path.open("a", encoding="ascii", newline="")
        if not known:
            self._file.write(HEADER)


def _kept(loss: Tensor | float) -> Tensor | float:
    """A loss that later passes can't overwrite."""
    return loss.detach().clone().reshape(()) if isinstance(loss, Tensor) else float(loss)


def _fetched(rows: list[Row]) -> list[Row]:
    """Rows with plain numbers, by one transfer for every device and dtype."""
    places: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in chain.from_iterable(rows):
        if isinstance(value, Tensor):
            places.setdefault((value.device, value.dtype), []).append(value.detach().reshape(()))
    numbers = {place: iter(torch.stack(tensors).tolist()) for place, tensors in places.items()}
    return [[next(numbers[v.device, v.dtype]) if isinstance(v, Tensor) else v for v in row] for row in rows]
