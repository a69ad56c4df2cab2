"""Hyperparameters to begin with, found from a few batches and from those of AdamW, without moving a weight.

A step of AdamW has a size that hardly depends on the loss: every weight moves by about the learning rate. A step of
SASSHA is a gradient over the root of a curvature, so its size depends on network and loss: a loss times 64 has steps
eight times as long. So AdamW is run for some steps on the batches, on trial, and from the same gradients SASSHA's
updates are computed and measured. Where both would have moved the weights as far is the learning rate to begin with.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ._core.closure import Checked, Closure
from ._core.optimizer import FusedOptimizer
from ._measure.trial import Make, Rise, Trial, denominators, is_lower, last_quarter, unchanged
from .checks import check_count, check_number, check_positive, shown
from .msassha import MSASSHA
from .sassha import SASSHA
from .variant import Ascent

__all__ = ["Rise", "Suggestion", "suggest"]

LAZY = 4  # steps between refreshes beside AdamW: a curvature of many samples is told from few steps
INTERVAL = 10  # steps between refreshes of SASSHA, if nobody chooses others
LEAST_FALL = 1 / 3  # of the fall of AdamW's loss on trial, below which a note says so
MOST_LEAP = 0.5  # of the loss that training begins with, above the largest of AdamW's
HALVINGS = 4  # of a learning rate at which the loss rises on trial
WARM_UP = "# with a warm-up of 20 steps or more: LinearLR(opt, 0.1, total_iters=20)"


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
        options: What it was asked with besides; None if it was asked about an optimizer, which has them.
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
    options: dict[str, Any] | None

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
        return "\n".join([*lines, "", *self.notes(), self.line(), WARM_UP])

    def notes(self) -> list[str]:
        """What to know about these numbers, if anything."""
        found = []
        if self.adamw_loss > self.first_loss:
            found.append(f"AdamW's loss rose at {self.adamw_lr:g}: give a smaller adamw_lr.")
        if self.rises and not self.rises[0].is_modest(self.first_loss):
            rise = self.rises[0]
            found.append(
                f"Even rho={rise.rho:g} raises the loss by {rise.measured:.2g}, more than a twentieth of the "
                f"{self.first_loss:.2g} that it begins with: choose rho yourself if the loss may be near or below 0."
                if rise.is_predicted
                else f"Even rho={rise.rho:g} raises the loss by {rise.measured:.2g} where the gradient predicts "
                f"{rise.predicted:.2g}: compute the loss in float32 if it is in fewer bits, or give a smaller adamw_lr."
            )
        if not is_lower(self.loss, self.first_loss):
            found.append(
                f"The loss still rose on trial at {_short(self.lr)}, after {self.halvings} halvings: don't train with "
                "this; ask again with a smaller adamw_lr."
            )
        elif self.halvings:
            found.append(
                f"At {_short(self.lr * 2**self.halvings)} the loss rose on trial, so the learning rate was halved "
                f"{self.halvings} times: begin with a warm-up."
            )
        falls = self.first_loss - self.adamw_loss, self.first_loss - self.loss
        if is_lower(self.loss, self.first_loss) and falls[1] < LEAST_FALL * falls[0]:
            found.append(
                f"On trial the loss fell by {falls[1]:.2g} where AdamW's fell by {falls[0]:.2g}: before you train with "
                "these, try other learning rates, and a fifth of rho."
            )
        if self.eps_share > 0.1 and self.denominator == 0:
            found.append(
                "Most elements have no curvature, as a loss that is linear in pieces (L1, hinge) has none: SASSHA has "
                "nothing to divide by there. Take a smooth loss, such as Huber's, or AdamW."
            )
        elif self.eps_share > 0.1:
            found.append(
                f"eps={self.eps:g} is larger than the denominator that it is added to in {self.eps_share:.0%} of the "
                f"elements, whose median is {_short(self.denominator)}: the loss is of a small scale. Try "
                f"eps={_short(self.denominator / 100)} and ask again."
            )
        return found

    def line(self) -> str:
        """The line to paste. Where it was asked about an optimizer, what to change in the line that makes it."""
        rho = "" if self.rho is None else f"rho={self.rho:g}, "
        found = f"lr={_short(self.lr)}, {rho}weight_decay={_short(self.weight_decay)}"
        if self.options is None:
            return f"opt = {self.optimizer}(..., {found})  # and all else as it is"
        return (
            f"opt = {self.optimizer}({', '.join(['model.parameters()', found, *map(_argument, self.options.items())])})"
        )


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
    - ρ is found beside the loss at the start, so a constant that is added to the loss changes it: the nearer to 0 the
      loss begins, the smaller ρ.
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
    with _true_weights(target), unchanged(model, kept) as start:
        trial = Trial(model, make, batches, start, steps, interval, told)
        found = _found(name, trial, adamw_lr, adamw_weight_decay)
    return found if isinstance(target, FusedOptimizer) else replace(found, options=options)


def _found(name: str, trial: Trial, adamw_lr: float, adamw_decay: float) -> Suggestion:
    """All trials, one after the other."""
    first = trial.loss_before()
    adamw, own, losses, opt = trial.beside_adamw(adamw_lr)
    climbs = opt.variant.ascent is Ascent.GRADIENT and name != MSASSHA.__name__
    rises = trial.rises(opt.adaptive, first) if climbs else []
    rho = max((rise.rho for rise in rises if rise.is_modest(first)), default=rises[0].rho) if climbs else None
    lr = adamw_lr * adamw / own
    most = max(losses) + MOST_LEAP * abs(first)
    for halvings in range(HALVINGS + 1):
        loss = trial.with_it(lr, rho or 0.0, adamw_decay * adamw_lr / lr, most)
        if is_lower(loss, first) or halvings == HALVINGS:
            break
        lr /= 2
    trial.say("")
    powers, eps = denominators(opt)
    return Suggestion(
        name,
        lr,
        rho,
        adamw_decay * adamw_lr / lr,
        eps,
        adamw_lr,
        adamw_decay,
        adamw,
        own,
        tuple(rises),
        first,
        last_quarter(losses),
        loss,
        halvings,
        (powers < eps).double().mean().item(),
        powers.median().item(),
        trial.steps,
        None,
    )


# ---- what is asked for ------------------------------------------------------------------------------------------


def _made_for(target: Any, options: dict[str, Any]) -> tuple[nn.Module, Make]:
    """The model, and what makes new optimizers like the one that is asked about."""
    if isinstance(target, nn.Module):
        params = [p for p in target.parameters() if p.requires_grad]
        if not params or any(map(is_lazy, params)):
            what = "has no parameter that requires a gradient" if not params else "has lazy parameters"
            remedy = "unfreeze what is to be trained" if not params else "run a forward pass, which gives them shapes"
            raise ValueError(f"suggest: the model {what}; {remedy}, and ask again")
        schedules = {"rho_scheduler", "hessian_power_scheduler"}
        fixed = ({"lr", "rho", "weight_decay", "lazy_hessian"} | schedules) & options.keys()
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


def _true_weights(target: Any) -> AbstractContextManager[None]:
    return target.true_weights() if isinstance(target, MSASSHA) else nullcontext()


def _short(number: float) -> str:
    return f"{number:.2g}"


def _argument(option: tuple[str, Any]) -> str:
    name, value = option
    return f"{name}={value:g}" if isinstance(value, float) else f"{name}={value!r}"
