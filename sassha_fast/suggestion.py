"""Hyperparameters to begin with, found from a few batches and from those of AdamW, without moving a weight.

A step of AdamW has a size that hardly depends on the loss: every weight moves by about the learning rate. A step of
SASSHA is a gradient over the root of a curvature, so its size depends on network and loss: a loss times 64 has steps
eight times as long. So AdamW is run for some steps on the batches, on trial, and from the same gradients SASSHA's
updates are computed and measured. Where both would have moved the weights as far is the learning rate to begin with.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import SGD

from ._core.closure import Checked, Closure
from ._core.compact import curvature
from ._core.contexts import RandomState
from ._core.keys import BIAS2
from ._core.optimizer import FusedOptimizer
from .checks import check_count, check_number, check_positive, shown
from .msassha import MSASSHA
from .reference import is_unknown
from .sam import SAM
from .sassha import SASSHA
from .variant import Ascent

__all__ = ["Rise", "Suggestion", "suggest"]

RADII = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # that are tried for ρ
ADAPTIVE = 10.0  # how much larger they are where ε is scaled by the weights
TOLERANCE = 0.25  # by which the rise of the loss may miss its first-order prediction
MOST_RISE = 0.05  # of the loss that training begins with
MOST_BATCHES = 4  # on which it is measured
LAZY = 4  # steps between refreshes beside AdamW: a curvature of many samples is told from few steps
INTERVAL = 10  # steps between refreshes of SASSHA, if nobody chooses others
MOST_LEAP = 0.5  # of the loss that training begins with, above the largest of AdamW's
HALVINGS = 4  # of a learning rate at which the loss rises on trial
BETAS, EPS = (0.9, 0.999), 1e-8  # of AdamW


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
        is_predicted = abs(self.measured - self.predicted) <= TOLERANCE * self.predicted
        return is_predicted and self.measured <= MOST_RISE * abs(loss)


@dataclass(frozen=True)
class Suggestion:
    """What :func:`suggest` found. ``print(suggestion)`` shows a table and the line to paste.

    Attributes:
        optimizer: Name of the class that it is for.
        lr: Learning rate.
        rho: Radius of the ascent; None if the method has none of its own.
        weight_decay: That takes off the same share of a weight in every step as AdamW's.
        eps: Of the denominator, as it was given.
        adamw_lr: AdamW's learning rate, as it was given.
        adamw_weight_decay: AdamW's weight decay, as it was given.
        adamw_size: Root mean square of AdamW's updates on trial, for a learning rate of 1.
        size: That of the optimizer's.
        rises: What was measured for ρ.
        first_loss: Mean loss before all trials, of the batches that the next two are of.
        adamw_loss: Mean loss of the last quarter of AdamW's steps.
        loss: The same of as many steps of the optimizer with the suggestion; infinite if it leapt on the way.
        halvings: How often the learning rate was halved because the loss rose on trial.
        eps_share: Share of the elements in which ``eps`` is larger than the power of the curvature it is added to.
        denominator: Median of these powers.
        steps: Of AdamW on trial.
    """

    optimizer: str
    lr: float
    rho: float | None
    weight_decay: float
    eps: float
    adamw_lr: float
    adamw_weight_decay: float
    adamw_size: float
    size: float
    rises: tuple[Rise, ...]
    first_loss: float
    adamw_loss: float
    loss: float
    halvings: int
    eps_share: float
    denominator: float
    steps: int

    def __str__(self) -> str:
        """A table, notes, and the line to paste."""
        rho = "" if self.rho is None else f"{self.rho:g}"
        rows = [
            ("", "AdamW", self.optimizer),
            ("learning rate", _short(self.adamw_lr), _short(self.lr)),
            ("size of an update at lr 1", _short(self.adamw_size), _short(self.size)),
            ("weight decay", _short(self.adamw_weight_decay), _short(self.weight_decay)),
            ("rho", "", rho),
            (f"loss in {self.steps} steps, from {self.first_loss:.4g}", f"{self.adamw_loss:.4g}", f"{self.loss:.4g}"),
        ]
        lines = [f"{a:<34} {b:>10} {c:>10}" for a, b, c in rows]
        if self.rises:
            lines += ["", f"{'rise of the loss by rho':<34} {'predicted':>10} {'measured':>10}"]
            lines += [f"{rise.rho:<34g} {rise.predicted:>10.3g} {rise.measured:>10.3g}" for rise in self.rises]
        return "\n".join([*lines, "", *self.notes(), self.line()])

    def notes(self) -> list[str]:
        """What to know about these numbers, if anything."""
        found = []
        if self.adamw_loss > self.first_loss:
            found.append(f"AdamW's loss rose at {self.adamw_lr:g}: give a smaller adamw_lr.")
        if self.rises and not self.rises[0].is_modest(self.first_loss):
            rise = self.rises[0]
            found.append(
                f"Even rho={rise.rho:g} raises the loss by {rise.measured:.2g} where the gradient predicts "
                f"{rise.predicted:.2g}: compute the loss in float32 if it is in fewer bits, or give a smaller adamw_lr."
            )
        if not _is_lower(self.loss, self.first_loss):
            found.append(
                f"The loss still rose on trial at {_short(self.lr)}, after {self.halvings} halvings: don't train with "
                "this; ask again with a smaller adamw_lr."
            )
        elif self.halvings:
            found.append(
                f"At {_short(self.lr * 2**self.halvings)} the loss rose on trial, so the learning rate was halved "
                f"{self.halvings} times: begin with a warm-up."
            )
        if self.eps_share > 0.1:
            found.append(
                f"eps={self.eps:g} is larger than the denominator that it is added to in {self.eps_share:.0%} of the "
                f"elements, whose median is {_short(self.denominator)}: the loss is of a small scale. Try "
                f"eps={_short(self.denominator / 100)} and ask again."
            )
        return found

    def line(self) -> str:
        """The line to paste."""
        rho = "" if self.rho is None else f"rho={self.rho:g}, "
        eps = "" if self.eps == 1e-4 or self.optimizer == "SophiaH" else f", eps={_short(self.eps)}"
        decay = f"weight_decay={_short(self.weight_decay)}"
        return f"opt = {self.optimizer}(model.parameters(), lr={_short(self.lr)}, {rho}{decay}{eps})"


def suggest(
    target: nn.Module | FusedOptimizer,
    closures: Closure | Sequence[Closure],
    *,
    adamw_lr: float = 1e-3,
    adamw_weight_decay: float = 1e-2,
    steps: int = 32,
    progress: bool | None = None,
    **options: Any,
) -> Suggestion:
    """Finds learning rate, ρ and weight decay to begin with, from those of AdamW.

    It runs ``steps`` of AdamW on the batches, in turns, and measures SASSHA's updates beside it; then the rise of the
    loss for some ρ; then as many steps of SASSHA with what it found. Together that takes about as long as 80 steps of
    SASSHA. Weights, buffers, gradients, random numbers and the optimizer's state are afterwards as they were before,
    bit for bit, whatever happened. It needs memory for six copies of the weights, and one process::

        batches = [batch for batch, _ in zip(loader, range(8))]
        print(sassha_fast.suggest(model, [closure(x, y) for x, y in batches], adamw_lr=3e-4))

    - The learning rate is that at which both move the weights as far, in the root mean square over the steps. Where
      the loss rises with it on trial, or leaps on its way, it is halved.
    - ρ is the largest of 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5 that, after AdamW's steps, raises the loss by what ρ‖g‖
      predicts to within a quarter, and by no more than a twentieth of the loss at the start. Beyond it the gradient
      does not know the way up.
    - Both decay weights by λ·lr in a step, so λ is AdamW's times AdamW's learning rate over the new one.
    - A loss times c gives 1/√c of the learning rate. ``eps`` is absolute: multiply it by √c too.

    Args:
        target: The model, for SASSHA; or an optimizer of this package, with its options and the model attached.
        closures: A function as for ``step``, or several, each of another batch; eight tell enough. Their losses are not
            scaled by a ``GradScaler``.
        adamw_lr: A learning rate that is good for AdamW: the better it is, the better the suggestion.
        adamw_weight_decay: AdamW's weight decay.
        steps: Steps of AdamW on trial.
        progress: Whether to tell stderr how far it is; None does so in a terminal.
        **options: Of :class:`sassha_fast.SASSHA`, such as ``eps`` and ``hvp``, if the target is a model.
    """
    check_positive("adamw_lr", adamw_lr, caller="suggest")
    check_number("adamw_weight_decay", adamw_weight_decay, caller="suggest")
    check_count("steps", steps, caller="suggest")
    model, make = _made_for(target, options)
    batches = _checked(closures)
    name = type(target).__name__ if isinstance(target, FusedOptimizer) else SASSHA.__name__
    told = sys.stderr.isatty() if progress is None else progress
    opt = make(1.0, 0.0, 0.0)
    if any(group["maximize"] for group in opt.param_groups):
        raise ValueError(
            "suggest: maximize is True, but trials compare losses that are to fall; ask with closures of the negative "
            "objective and without maximize"
        )
    kept = [*opt.get_params(), *model.buffers()]
    interval = target.lazy_hessian if isinstance(target, FusedOptimizer) else INTERVAL
    with _true_weights(target), _unchanged(model, kept) as start:
        trial = _Trial(name, model, make, batches, start, steps, interval, told)
        return trial.suggestion(adamw_lr, adamw_weight_decay)


# ---- what is asked for ------------------------------------------------------------------------------------------

Make = Callable[[float, float, float], FusedOptimizer]  # of learning rate, ρ and weight decay


def _made_for(target: Any, options: dict[str, Any]) -> tuple[nn.Module, Make]:
    """The model, and what makes new optimizers like the one that is asked about."""
    if isinstance(target, nn.Module):
        params = [p for p in target.parameters() if p.requires_grad]
        if not params or any(map(is_lazy, params)):
            what = "has no parameter that requires a gradient" if not params else "has lazy parameters"
            remedy = "unfreeze what is to be trained" if not params else "run a forward pass, which gives them shapes"
            raise ValueError(f"suggest: the model {what}; {remedy}, and ask again")
        fixed = {"lr", "rho", "weight_decay", "lazy_hessian", "rho_scheduler"} & options.keys()
        if fixed:
            raise TypeError(f"suggest: {sorted(fixed)} can't be given; leave out what is to be found, and schedules")
        model = target

        def make(lr: float, rho: float, decay: float) -> FusedOptimizer:
            return SASSHA(params, lr=lr, rho=rho, weight_decay=decay, lazy_hessian=LAZY, **options)

    elif isinstance(target, FusedOptimizer) and target.parts.descent.has_curvature:
        if options:
            raise TypeError(f"suggest: {sorted(options)} can't be given beside an optimizer, which has its own")
        if target.model is None:
            raise TypeError(
                f"suggest: no model is attached to {type(target).__name__}, whose buffers would have to be put back; "
                "call opt.attach(model) before"
            )
        model = target.model
        target.__getstate__()  # raises while the weights are perturbed

        def make(lr: float, rho: float, decay: float) -> FusedOptimizer:
            return _like(target, lr, rho, decay)

    else:
        raise TypeError(
            f"suggest: target is a {type(target).__name__}, expected a torch.nn.Module, or an optimizer of sassha_fast "
            "that has a curvature"
        )
    if isinstance(model, DistributedDataParallel):
        raise TypeError(
            "suggest: the model is a DistributedDataParallel, but one process is enough; call it with the model inside "
            "before it is wrapped, and give all processes what it found"
        )

    def made(lr: float, rho: float, decay: float) -> FusedOptimizer:
        opt = make(lr, rho, decay)
        opt.reduce_grads = False
        opt.parts.reducer.model = model  # as attach() does, but without leaving hooks
        return opt

    return model, made


def _like(opt: FusedOptimizer, lr: float, rho: float, decay: float) -> FusedOptimizer:
    """A new optimizer of the same parameters, kind and options. M-SASSHA's updates are SASSHA's."""
    kind: type[FusedOptimizer] = SASSHA if isinstance(opt, MSASSHA) else type(opt)
    spares = any(group["weight_decay"] for group in opt.param_groups)  # groups without decay stay without
    groups = []
    for group in opt.param_groups:
        own = {"lr": lr, "weight_decay": 0.0 if spares and not group["weight_decay"] else decay}
        groups.append({**group, **own, **({"rho": rho} if "rho" in group else {})})
    state = opt.__getstate__()
    chosen = state["options"]
    variant = replace(chosen.variant, ascent=Ascent.GRADIENT) if isinstance(opt, MSASSHA) else chosen.variant
    lazy = min(LAZY, chosen.lazy_hessian)
    chosen = replace(
        chosen, variant=variant, lazy_hessian=lazy, rho_scheduler=None, hessian_power_scheduler=None, capturable=False
    )
    found = kind.__new__(kind)
    found.__setstate__(
        {"defaults": dict(opt.defaults), "state": defaultdict(dict), "param_groups": groups, "options": chosen}
    )
    if type(opt) is kind:  # what a class of the user's keeps beside what ours has
        known = {*vars(found), *dir(kind)}
        vars(found).update((name, value) for name, value in vars(opt).items() if name not in known)
    return found


def _checked(closures: Any) -> list[Closure]:
    given = [closures] if callable(closures) else closures
    if not isinstance(given, Sequence) or not given or not all(map(callable, given)):
        raise TypeError(
            f"suggest: closures is {shown(closures)}, expected a function that runs the forward pass and "
            "loss.backward() and returns the loss, or a list of them, one for each batch"
        )
    if len(given) == 1:
        return [Checked(given[0], "suggest: closures")]
    return [Checked(closure, f"suggest: closures[{i}]") for i, closure in enumerate(given)]


# ---- all as it was ----------------------------------------------------------------------------------------------


def _true_weights(target: Any) -> AbstractContextManager[None]:
    return target.true_weights() if isinstance(target, MSASSHA) else nullcontext()


@contextmanager
def _unchanged(model: nn.Module, kept: list[Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Puts weights, buffers, gradients and random numbers back, whatever happens. Gives tensors with their copies."""
    copies = [(tensor, tensor.detach().clone()) for tensor in kept]
    known = set(map(id, kept))
    every = [*kept, *(p for p in model.parameters() if id(p) not in known)]
    grads = [tensor.grad for tensor in every]
    random = RandomState(tensor.device for tensor in kept)
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    modes = [(module, module.training) for module in model.modules()]
    trained = [(param, param.requires_grad) for param in model.parameters()]

    def put_back() -> None:
        for module, training in modes:
            module.training = training
        for param, requires_grad in trained:
            param.requires_grad = requires_grad
        for module, before in buffers:  # a forward pass may have put others in their place
            module._buffers.update(before)
        _write(copies)
        for tensor, grad in zip(every, grads, strict=True):
            tensor.grad = grad
        random.restore()

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
        tensor.copy_(copy)
    torch.clear_autocast_cache()


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


class _Trial:
    """The steps that are taken back."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        make: Make,
        batches: list[Closure],
        start: list[tuple[Tensor, Tensor]],
        steps: int,
        interval: int,
        told: bool,
    ) -> None:
        self.name, self.model, self.make, self.batches = name, model, make, batches
        self.start, self.steps, self.interval, self.told = start, steps, interval, told
        self.params = list(make(1.0, 0.0, 0.0).get_params())

    def suggestion(self, adamw_lr: float, adamw_decay: float) -> Suggestion:
        """All trials, one after the other."""
        first = self.loss_before()
        adamw, own, losses, opt = self.beside_adamw(adamw_lr)
        last = _last_quarter(losses)
        climbs = opt.variant.ascent is Ascent.GRADIENT and self.name != MSASSHA.__name__
        rises = self.rises(opt.adaptive, first) if climbs else []
        rho = max((rise.rho for rise in rises if rise.is_modest(first)), default=rises[0].rho) if climbs else None
        lr = adamw_lr * adamw / own
        most = max(losses) + MOST_LEAP * abs(first)
        for halvings in range(HALVINGS + 1):
            found = self.with_it(lr, rho or 0.0, adamw_decay * adamw_lr / lr, most)
            if _is_lower(found, first) or halvings == HALVINGS:
                break
            lr /= 2
        self.say("")
        denominators, eps = _denominators(opt)
        return Suggestion(
            self.name,
            lr,
            rho,
            adamw_decay * adamw_lr / lr,
            float(opt.param_groups[0]["eps"]),
            adamw_lr,
            adamw_decay,
            adamw,
            own,
            tuple(rises),
            first,
            last,
            found,
            halvings,
            (denominators < eps).double().mean().item(),
            denominators.median().item(),
            self.steps,
        )

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
        return _last_quarter(list(islice(cycle(losses), self.steps)))

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
        return _last_quarter(losses)

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


def _denominators(opt: FusedOptimizer) -> tuple[Tensor, float]:
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


def _is_lower(loss: float, before: float) -> bool:
    """Whether a loss has not risen, but for noise."""
    return loss <= before + MOST_RISE * abs(before)


def _last_quarter(losses: list[float]) -> float:
    """Its mean."""
    last = losses[3 * len(losses) // 4 :]
    return sum(last) / len(last)


def _square_sum(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _float(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _short(number: float) -> str:
    return f"{number:.2g}"
