"""One training run: epochs, checkpoints, log, progress. What is trained, and by which optimizer, is for the caller.

A run that was stopped and resumed is the run that was not: batches and random numbers are functions of seed, epoch and
step, and everything else is in the checkpoint.
"""

from __future__ import annotations

import csv
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from tqdm import tqdm

from sassha_fast.log import StatsLog

Batch = tuple[Tensor, Tensor]
REDRAW = 0.5  # seconds between two looks at loss and accuracy, for which the device has to finish what it is at
COLUMNS = ("epoch", "step", "lr", "train_loss", "train_accuracy", "loss", "accuracy", "per_second", "seconds")


@dataclass(frozen=True)
class Data:
    """Batches of a task.

    Attributes:
        steps: Batches in an epoch.
        train: The batches of an epoch, from a step on, of this process.
        validation: All batches of the validation set.
        unit: What is counted: ``"images"`` or ``"tokens"``.
    """

    steps: int
    train: Callable[[int, int], Iterator[Batch]]
    validation: Callable[[], Iterator[Batch]]
    unit: str


@dataclass
class Progress:
    """Where a run is, and the sums of the epoch that it is in: of losses, of right answers, of what was answered."""

    step: int = 0
    loss: float = 0.0
    correct: float = 0.0
    count: int = 0
    seconds: float = 0.0

    @property
    def sums(self) -> tuple[float, float, float]:
        return self.loss, self.correct, float(self.count)

    @sums.setter
    def sums(self, values: Sequence[float]) -> None:
        self.loss, self.correct, self.count = values[0], values[1], int(values[2])


class Stopped(SystemExit):
    """The run was interrupted and has saved its state."""


class Run:
    """A network in training.

    Args:
        model: The network, on its device.
        opt: Its optimizer, which takes ``step(closure)``.
        schedule: Of the learning rate, a step at a time; ``ReduceLROnPlateau`` an epoch at a time.
        data: The batches.
        out: Folder of ``log.csv`` and ``checkpoint.pt``.
        epochs: How many.
        seed: Of dropout.
        amp: Forward passes in bfloat16.
        full_products: But for steps that refresh the curvature.
        compiled: Run the network through ``torch.compile``.
        save_every: Steps between checkpoints within an epoch; 0 leaves those at its end.
        quiet: No progress bar.
        grad_clip: Norm for optimizers that do not clip themselves.
        stats: Log loss, gap and trace of every step to ``stats.csv``, and draw them.
    """

    def __init__(
        self,
        model: nn.Module,
        opt: Optimizer,
        schedule: LRScheduler | ReduceLROnPlateau,
        data: Data,
        out: Path,
        *,
        epochs: int,
        seed: int = 0,
        amp: bool = False,
        full_products: bool = False,
        compiled: bool = False,
        save_every: int = 0,
        quiet: bool = False,
        grad_clip: float | None = None,
        stats: bool = False,
    ) -> None:
        self.net, self.opt, self.schedule, self.data, self.out = model, opt, schedule, data, out
        self.epochs, self.seed, self.amp, self.save_every, self.quiet = epochs, seed, amp, save_every, quiet
        self.device = next(model.parameters()).device
        self.parallel = dist.is_initialized()
        self.first = not self.parallel or dist.get_rank() == 0
        forward = torch.compile(model) if compiled else model
        self.model = DistributedDataParallel(forward) if self.parallel else forward
        self.clip = None if hasattr(opt, "attach") else grad_clip
        if hasattr(opt, "attach"):
            opt.attach(self.model)
        self.full_products = full_products
        self.stats = stats and self.first
        self.progress = Progress()
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # those of ``progress``, not read yet
        self.stop = False

    # ---- training ------------------------------------------------------------------------------------------------

    def train(self) -> list[dict[str, float]]:
        """Trains to the end, and returns the rows of the log."""
        self.out.mkdir(parents=True, exist_ok=True)
        self._keep_rows(self.progress.step)
        with self._stopping(), self._logged():
            for epoch in range(self.progress.step // self.data.steps, self.epochs):
                self._epoch(epoch)
        return self.rows()

    @contextmanager
    def _logged(self) -> Iterator[None]:
        if not self.stats:
            yield
            return
        with StatsLog(self.opt, self.out / "stats.csv", step=self.progress.step) as log:
            yield
            log.plot(self.out / "stats.png")

    def _epoch(self, epoch: int) -> None:
        at = self.progress
        begun, before = time.perf_counter(), at.count
        drawn = begun
        first = at.step - epoch * self.data.steps
        self.sums = torch.tensor(at.sums, dtype=torch.float64, device=self.device)
        self.model.train()
        with tqdm(total=self.data.steps, initial=first, disable=self.quiet or not self.first, leave=False) as bar:
            bar.set_description(f"epoch {epoch + 1}/{self.epochs}")
            for x, y in self.data.train(epoch, first):
                self._step(x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True))
                if not bar.disable and time.perf_counter() - drawn > REDRAW:
                    self._read()
                    drawn = time.perf_counter()
                    bar.set_postfix_str(self._speed(drawn - begun, at.count - before), refresh=False)
                bar.update()
                if self.save_every and at.step % self.save_every == 0 and at.step % self.data.steps:
                    begun, before = self._pause(begun), at.count
                    self.save()
                if self.stop:
                    self._pause(begun)
                    self.save()
                    raise Stopped(f"\nstopped after step {at.step}; go on with --resume")
        self._pause(begun)
        self._finish(epoch)

    def _read(self) -> None:
        """Waits for the device, and has its sums here."""
        self.progress.sums = self.sums.tolist()

    def _pause(self, begun: float) -> float:
        """The time since ``begun`` counts as training; what follows does so from the time that is returned on."""
        self._read()
        now = time.perf_counter()
        self.progress.seconds += now - begun
        return now

    def _speed(self, seconds: float, count: int) -> str:
        at = self.progress
        mean = (at.loss / at.count, 100 * at.correct / at.count)
        return f"loss {mean[0]:.4f}, accuracy {mean[1]:.2f} %, {count / seconds:,.0f} {self.data.unit}/s"

    def _step(self, x: Tensor, y: Tensor) -> None:
        seen: list[tuple[Tensor, Tensor]] = []

        def closure() -> Tensor:
            self.opt.zero_grad()
            loss, correct = self._loss(x, y)
            loss.backward()
            seen.append((loss.detach(), correct))
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
            return loss

        at = self.progress
        rank, size = (dist.get_rank(), dist.get_world_size()) if self.parallel else (0, 1)
        torch.manual_seed((self.seed << 40) + at.step * size + rank)
        self.opt.step(closure)
        if not isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step()
        loss, correct = seen[0]  # the pass at x, before any ascent
        sums = torch.stack([loss.double() * y.numel(), correct.double(), torch.full_like(correct, y.numel()).double()])
        if self.parallel:
            dist.all_reduce(sums)
        at.step += 1
        self.sums += sums

    def _loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and number of right answers."""
        full = self.full_products and torch.is_grad_enabled() and getattr(self.opt, "hessian_due", False)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp and not full):
            logits = self.model(x).flatten(0, -2)
        loss = F.cross_entropy(logits.float(), y.flatten())
        return loss, (logits.detach().argmax(-1) == y.flatten()).sum()

    def _finish(self, epoch: int) -> None:
        """The end of an epoch: evaluation, log, checkpoint."""
        at = self.progress
        loss, accuracy = self.evaluate()
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(loss)
        row = {
            "epoch": epoch + 1,
            "step": at.step,
            "lr": float(self.opt.param_groups[0]["lr"]),
            "train_loss": at.loss / at.count,
            "train_accuracy": 100 * at.correct / at.count,
            "loss": loss,
            "accuracy": accuracy,
            "per_second": at.count / at.seconds,
            "seconds": at.seconds,
        }
        self.progress = Progress(step=at.step)
        if self.first:
            self._append(row)
            if not self.quiet:
                tqdm.write(
                    f"epoch {epoch + 1:3d}: train loss {row['train_loss']:.4f}, loss {loss:.4f}, "
                    f"accuracy {accuracy:.2f} %, {row['per_second']:,.0f} {self.data.unit}/s"
                )
        self.save()

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Mean loss and accuracy in percent on the validation set, at the true weights."""
        total = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.model.eval()
        with self.true_weights():
            for x, y in self.data.validation():
                y = y.to(self.device)
                loss, correct = self._loss(x.to(self.device), y)
                total += torch.stack([loss.double() * y.numel(), correct.double(), total.new_tensor(y.numel())])
        loss_sum, right, count = total.tolist()
        return loss_sum / count, 100 * right / count

    def true_weights(self) -> AbstractContextManager[Any]:
        """M-SASSHA's parameters hold x + ε between steps; all others hold x."""
        return self.opt.true_weights() if hasattr(self.opt, "true_weights") else nullcontext()

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Ctrl-C ends the run after the step that it is in. With several processes it ends it at once."""
        if self.parallel:
            yield
            return

        def ask(_: int, __: FrameType | None) -> None:
            self.stop = True
            signal.signal(signal.SIGINT, before)  # a second one does not wait

        before = signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    # ---- checkpoint and log --------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes the checkpoint: at any time there is a whole one."""
        if not self.first:
            return
        with self.true_weights():
            content = {"model": self.net.state_dict(), "opt": self.opt.state_dict()}
            content |= {"schedule": self.schedule.state_dict(), "progress": vars(self.progress)}
            partial = self.out / "checkpoint.pt.partial"
            torch.save(content, partial)
        os.replace(partial, self.out / "checkpoint.pt")

    def resume(self) -> bool:
        """Loads the checkpoint of the folder, if there is one."""
        path = self.out / "checkpoint.pt"
        if not path.exists():
            return False
        content = torch.load(path, map_location=self.device)
        self.net.load_state_dict(content["model"])
        self.opt.load_state_dict(content["opt"])
        if hasattr(self.opt, "train"):  # saved at its true weights
            self.opt.train()
        self.schedule.load_state_dict(content["schedule"])
        self.progress = Progress(**content["progress"])
        return True

    def rows(self) -> list[dict[str, float]]:
        """The log, an epoch a row."""
        path = self.out / "log.csv"
        if not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]  # a killed run may leave half a line, or half a number
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(whole)]

    def _keep_rows(self, step: int) -> None:
        """Drops what the log has beyond the checkpoint."""
        kept = [row for row in self.rows() if row["step"] <= step]
        if self.first:
            partial = self.out / "log.csv.partial"
            partial.write_text("".join([",".join(COLUMNS) + "\n", *map(_line, kept)]))
            os.replace(partial, self.out / "log.csv")  # at no moment is there a log without its rows

    def _append(self, row: dict[str, float]) -> None:
        with (self.out / "log.csv").open("a") as file:
            file.write(_line(row))


def _line(row: dict[str, float]) -> str:
    """A row of the log."""
    values = [f"{row[key]:.0f}" if key in ("epoch", "step") else repr(float(row[key])) for key in COLUMNS]
    return ",".join(values) + "\n"
