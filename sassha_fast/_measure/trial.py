"""Steps of AdamW and of ours that are measured and taken back: what ``suggest`` asks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor, nn
from torch.optim import SGD

from .._core.closure import Closure
from .._core.compact import curvature
from .._core.contexts import RandomState
from .._core.keys import BIAS2
from .._core.optimizer import FusedOptimizer
from ..reference import is_unknown
from ..sam import SAM

RADII = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # that are tried for ρ
ADAPTIVE = 10.0  # how much larger they are where ε is scaled by the weights
TOLERANCE = 0.25  # by which the rise of the loss may miss its first-order prediction
MOST_RISE = 0.05  # of the loss that training begins with
MOST_BATCHES = 4  # on which it is measured
BETAS, EPS = (0.9, 0.999), 1e-8  # of AdamW

Make = Callable[[float, float, float], FusedOptimizer]  # of learning rate, ρ and weight decay


@dataclass(frozen=True)
class Rise:
    """How an ascent raises the loss: a row of the table behind a suggested ρ.

    Attributes:
        rho: Its length.
        predicted: ρ‖g‖, the rise to first order.
        measured: The rise.
    """

    rho: float
    predicted: float
    measured: float

    def is_modest(self, loss: float) -> bool:
        """Whether the gradient tells it to within a quarter, and it is at most a twentieth of the loss at the start."""
        return self.is_predicted and self.measured <= MOST_RISE * abs(loss)

    @property
    def is_predicted(self) -> bool:
        """Whether the gradient tells it to within a quarter."""
        return abs(self.measured - self.predicted) <= TOLERANCE * self.predicted


# ---- all as it was ----------------------------------------------------------------------------------------------


@contextmanager
def unchanged(model: nn.Module, kept: list[Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Puts weights, buffers, gradients and random numbers back, whatever happens. Gives tensors with their copies."""
    copies = [(tensor, tensor.detach().clone()) for tensor in kept]
    known = set(map(id, kept))
    every = [*kept, *(p for p in model.parameters() if id(p) not in known)]
    grads = [tensor.grad for tensor in every]
    random = RandomState(tensor.device for tensor in kept)
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    modes = [(module, module.training) for module in model.modules()]
    records = torch.is_grad_enabled()
    trained = [(param, param.requires_grad) for param in model.parameters()]

    def put_back() -> None:
        torch.set_grad_enabled(records)
        for tensor, grad in zip(every, grads, strict=True):
            tensor.grad = grad
        random.restore()
        for module, training in modes:
            module.training = training
        for param, requires_grad in trained:
            param.requires_grad = requires_grad
        for module, before in buffers:  # a forward pass may have put others in their place
            module._buffers.update(before)
        _write(copies)

    try:
        for tensor in every:
            tensor.grad = None
        yield copies
        put_back()
    except BaseException:
        try:
            put_back()
        except BaseException:  # another interrupt, which does not keep the rest from coming back
            put_back()
            raise
        raise


@torch.no_grad()
def _write(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Writes copies back into the tensors that they are of."""
    for tensor, copy in copies:
        # Buffers that nobody can write to, such as an expanded mask, are still what they were.
        if not (tensor.is_inference() or _repeats(tensor)) or not torch.equal(tensor, copy):
            tensor.copy_(copy)
    torch.clear_autocast_cache()


def _repeats(tensor: Tensor) -> bool:
    """Whether elements share memory, as those of an expanded tensor do."""
    return tensor.layout == torch.strided and any(
        n > 1 and not s for n, s in zip(tensor.shape, tensor.stride(), strict=True)
    )


# ---- trials -----------------------------------------------------------------------------------------------------


class _AdamW:
    """AdamW's updates, which are measured before they are made."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params, self.count = params, 0
        self.m = [torch.zeros_like(p, dtype=_float(p)) for p in params]
        self.v = [torch.zeros_like(p, dtype=_float(p)) for p in params]

    def updates(self, grads: list[Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters, each with what one step takes off it at a learning rate of 1."""
        self.count += 1
        beta1, beta2 = BETAS
        for p, grad, m, v in zip(self.params, grads, self.m, self.v, strict=True):
            if grad is None:
                continue
            g = grad.to(m.dtype)
            m.lerp_(g, 1 - beta1)
            v.lerp_(g * g, 1 - beta2)
            root = (v / (1 - beta2**self.count)).sqrt_().add_(EPS)
            yield p, m / (1 - beta1**self.count) / root


class Trial:
    """The steps that are taken back."""

    def __init__(
        self,
        model: nn.Module,
        make: Make,
        batches: list[Closure],
        start: list[tuple[Tensor, Tensor]],
        steps: int,
        interval: int,
        told: bool,
    ) -> None:
        self.model, self.make, self.batches = model, make, batches
        self.start, self.steps, self.interval, self.told = start, steps, interval, told
        self.params = list(make(1.0, 0.0, 0.0).get_params())

    def loss_before(self) -> float:
        """The mean loss at the start, of those batches that the last quarter of the steps takes: some are easier."""
        losses, random = [], RandomState(p.device for p in self.params)
        for number, closure in enumerate(self.batches[: self.steps]):
            with torch.enable_grad():
                loss = self.cleared(closure)()
            losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))
            if not math.isfinite(losses[-1]):
                name = f"closures[{number}]" if len(self.batches) > 1 else "closures"
                raise FloatingPointError(
                    f"suggest: the loss of {name} is {losses[-1]} at the weights as they are, before any step; look at "
                    "its batch, and at the model"
                )
        _write(self.start)  # buffers may have moved
        random.restore()
        return last_quarter(list(islice(cycle(losses), self.steps)))

    def beside_adamw(self, lr: float) -> tuple[float, float, list[float], FusedOptimizer]:
        """Steps of AdamW: the sizes of its updates and of ours at a learning rate of 1, the losses, our optimizer."""
        opt = self.make(1.0, 0.0, 0.0)
        adamw = _AdamW(self.params)
        squares, losses = [0.0, 0.0], []
        for number, closure in enumerate(islice(cycle(self.batches), self.steps)):
            self.say(f"AdamW, step {number + 1} of {self.steps}")
            before = [p.detach().clone() for p in self.params]
            losses.append(self.stepped(opt, closure, f"AdamW with learning rate {lr:g}"))
            grads = [p.grad for p in self.params]
            with torch.no_grad():
                for p, x in zip(self.params, before, strict=True):
                    squares[1] += _square_sum(p - x)
                    p.copy_(x)
                for p, update in adamw.updates(grads):
                    squares[0] += _square_sum(update)
                    p.sub_((lr * update).to(p.dtype))
        elements = self.steps * sum(p.numel() for p in self.params)
        sizes = [math.sqrt(square / elements) for square in squares]
        if not all(0.0 < size < math.inf for size in sizes):
            raise RuntimeError(
                f"suggest: updates of size {sizes[0]:g} by AdamW and {sizes[1]:g} by {type(opt).__name__} can't be "
                "compared; do the closures run backward passes of this model's loss?"
            )
        return (*sizes, losses, opt)  # type: ignore[return-value]

    def rises(self, adaptive: bool, loss: float) -> list[Rise]:
        """The rise of the loss for one ρ after the other, as long as it is modest."""
        found: list[Rise] = []
        batches = self.batches[:MOST_BATCHES]
        for radius in RADII:
            rho = radius * ADAPTIVE if adaptive else radius
            self.say(f"rho {rho:g}")
            sam = SAM(self.params, SGD, rho=rho, lr=0.0, adaptive=adaptive, reduce_grads=False)
            sam.parts.reducer.model = self.model
            random = RandomState(p.device for p in self.params)
            rows = []
            for closure in batches:
                sam.step(self.cleared(closure))
                rows.append((sam.stats.predicted_gap.item(), sam.stats.ascent_gap.item()))
            random.restore()  # every ρ sees the same networks
            found.append(Rise(rho, *(sum(column) / len(rows) for column in zip(*rows, strict=True))))
            if not found[-1].is_modest(loss):
                break
        return found

    def with_it(self, lr: float, rho: float, decay: float, most: float) -> float:
        """The loss that as many steps come to with the suggestion; infinite if it was above ``most`` on the way.

        A network may die in a leap, with a loss that is that of guessing again soon after. Curvatures are as old here
        as they are in training: what leaps with old ones may not with new ones.
        """
        _write(self.start)
        opt = self.make(lr, rho, decay)
        opt.lazy_hessian = self.interval
        losses = []
        for number, closure in enumerate(islice(cycle(self.batches), self.steps)):
            self.say(f"{type(opt).__name__}, step {number + 1} of {self.steps}")
            try:
                losses.append(self.stepped(opt, closure, ""))
            except FloatingPointError:
                return math.inf
            if losses[-1] > most:
                return math.inf
        return last_quarter(losses)

    def stepped(self, opt: FusedOptimizer, closure: Closure, who: str) -> float:
        """The loss of one step."""
        loss = float(opt.step(self.cleared(closure)))  # type: ignore[arg-type]
        if not math.isfinite(loss):
            raise FloatingPointError(f"suggest: the loss became {loss} in steps of {who}; give a smaller adamw_lr")
        return loss

    def cleared(self, closure: Closure) -> Closure:
        """A closure that begins without gradients, whatever it zeroes."""

        def run() -> Tensor | float:
            for p in self.params:
                p.grad = None
            return closure()

        return run

    def say(self, what: str) -> None:
        """Tells how far it is, on one line that is written again and again."""
        if self.told:
            print(f"\r{f'suggest: {what}' if what else '':<50}", end="" if what else "\r", file=sys.stderr, flush=True)


def denominators(opt: FusedOptimizer) -> tuple[Tensor, float]:
    """All powers of the curvature that updates are divided by, but for what is unknown, and the eps added to them."""
    found = []
    for group in opt.param_groups:
        for p in group["params"]:
            entry = opt.state.get(p)
            if entry and entry[BIAS2]:
                d = curvature(entry)
                known = d[~is_unknown(d)] / entry[BIAS2]
                found.append(known.abs().pow(group["hessian_power"]).flatten().cpu())
    return torch.cat(found), float(opt.param_groups[0]["eps"])


def is_lower(loss: float, before: float) -> bool:
    """Whether a loss has not risen, but for noise."""
    return loss <= before + MOST_RISE * abs(before)


def last_quarter(losses: list[float]) -> float:
    """Its mean."""
    last = losses[3 * len(losses) // 4 :]
    return sum(last) / len(last)


def _square_sum(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _float(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32
