"""Arguments of the optimizers: what holds for the whole optimizer, and what lives in its parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import is_
from typing import Any, NoReturn

from torch import Tensor

from .. import backends, schedules
from ..checks import (
    as_integer,
    as_number,
    check_choice,
    check_count,
    check_flag,
    check_number,
    check_positive,
    is_one_of,
    shown,
)
from ..variant import Sample, Variant
from .keys import CURVATURE


@dataclass(frozen=True)
class Options:
    """What holds for the whole optimizer. :class:`sassha_fast.SASSHA` documents the fields.

    Raises:
        ValueError: If a value is not one that it may have.
    """

    caller: str  # what errors call the optimizer
    variant: Variant
    lazy_hessian: int = 1
    n_samples: int = 1
    grad_reduce: str = "mean"
    reduce_grads: bool | None = None
    perturb_sync: bool = False
    seed: int = 0
    hvp: str = "exact"
    hvp_point: str = "perturbed"
    backend: str = "auto"
    bias_correction: bool = True
    hessian_power_scheduler: schedules.Schedule | schedules.Stepping | None = None
    rho_scheduler: schedules.Schedule | schedules.Stepping | None = None
    max_grad_norm: float | None = None
    skip_nonfinite: bool = False
    stochastic_rounding: bool = False
    capturable: bool = False
    unseen: str = "keep"
    state_bits: int = 32
    master_weight_bits: int | None = None
    full_precision_below: int = 4096

    def __post_init__(self) -> None:
        """Checks the values."""
        name = self.caller
        schedules.check_schedule("hessian_power_scheduler", self.hessian_power_scheduler, caller=name)
        schedules.check_schedule("rho_scheduler", self.rho_scheduler, caller=name)
        for count in ("lazy_hessian", "n_samples"):
            object.__setattr__(self, count, check_count(count, getattr(self, count), caller=name))
        check_choice("grad_reduce", self.grad_reduce, ("mean", "sum"), caller=name)
        check_choice("hvp", self.hvp, ("exact", "finite_difference", "central_difference"), caller=name)
        check_choice("unseen", self.unseen, ("keep", "zero"), caller=name)
        check_choice("hvp_point", self.hvp_point, ("perturbed", "upstream"), caller=name)
        if self.hvp != "exact" and self.hvp_point == "upstream":
            raise ValueError(
                f"{name}: hvp={self.hvp!r} has no hvp_point='upstream', which is about graphs; use 'perturbed'"
            )
        self._check_formats()
        backends.resolve(self.backend, caller=name)
        seed = as_integer(self.seed)
        if seed is None or not 0 <= seed < 2**63:
            raise ValueError(f"{name}: seed is {shown(self.seed)}, expected an integer from 0 to 2^63 − 1")
        object.__setattr__(self, "seed", seed)
        if self.max_grad_norm is not None:
            check_number("max_grad_norm", self.max_grad_norm, caller=name)
        check_flag("reduce_grads", self.reduce_grads, caller=name)
        for flag in ("perturb_sync", "bias_correction", "skip_nonfinite", "stochastic_rounding", "capturable"):
            check_flag(flag, getattr(self, flag), caller=name)
            object.__setattr__(self, flag, bool(getattr(self, flag)))

    def _check_formats(self) -> None:
        name = self.caller
        check_choice("state_bits", self.state_bits, (32, 16, 8), caller=name)
        check_choice("master_weight_bits", self.master_weight_bits, (None, 24, 32), caller=name)
        for bits in ("state_bits", "master_weight_bits"):  # 8.0 is one of them
            value = getattr(self, bits)
            object.__setattr__(self, bits, None if value is None else int(value))
        below = as_integer(self.full_precision_below)
        if below is None or below < 0:
            raise ValueError(
                f"{name}: full_precision_below is {shown(self.full_precision_below)}, expected a number of elements, 0 "
                "for every parameter of more than one dimension"
            )
        object.__setattr__(self, "full_precision_below", below)
        if self.master_weight_bits is not None and self.stochastic_rounding:
            raise ValueError(
                f"{name}: master_weight_bits={self.master_weight_bits} keeps what stochastic_rounding=True would throw "
                "away at random; leave one of them out"
            )

    @property
    def exact(self) -> bool:
        """Whether products come from a graph, not from differences of gradients."""
        return self.hvp == "exact"

    def refuse_in(self, group: Mapping[str, Any], hyperparameters: Iterable[str]) -> None:
        """Raises ValueError if a parameter group asks for another value of what holds for the whole optimizer.

        Groups of another optimizer may say what holds anyway, as torch's do with ``capturable=False``.
        Other keys of a group are its owner's, or a scheduler's.

        Args:
            group: As it was given.
            hyperparameters: Of the optimizer, among them those of SAM's base optimizer, whatever their names.
        """
        variant = self.variant
        chosen: dict[str, Any] = {"adaptive": variant.adaptive, "adaptive_bias": variant.adaptive_bias}
        chosen |= {"spatial_averaging": variant.by_filter, "curvature": variant.sample.name.lower()}
        free = {"variant", *hyperparameters} - {CURVATURE}  # a mark of checkpoints among AdaHessian's defaults
        for key in ({*OPTIONS, *chosen} - free) & group.keys():
            value = chosen[key] if key in chosen else getattr(self, key)
            if not is_one_of(group[key], (value,)):
                raise ValueError(
                    f"{self.caller}: a parameter group has {key}={shown(group[key])}, but {key} holds for the whole "
                    f"optimizer, where it is {shown(value)}; leave it out of the group and construct {self.caller} "
                    "with it, or an optimizer for these parameters alone"
                )

    @property
    def gradients_per_refresh(self) -> int:
        """Gradients at probes that a refresh by finite differences takes."""
        return 0 if self.exact else self.n_samples * (2 if self.hvp == "central_difference" else 1)


# Options that are attributes of an optimizer under their own names; assigning one checks it.
OPTIONS = tuple(field.name for field in fields(Options) if field.name != "caller")

# ---- hyperparameters of parameter groups ------------------------------------------------------------------------

Check = Callable[[str, Any, str], None]
ROUNDING = 1e-12  # of learning rates, which are of the order of 1


def _number(name: str, value: Any, caller: str) -> None:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{caller}: {name} is a tensor of shape {tuple(value.shape)}, expected one element")
    check_number(name, value, caller=caller)


def _rate(name: str, value: Any, caller: str) -> None:
    """Schedules of torch that end at 0 may end a rounding error below it."""
    number = as_number(value)
    _number(name, 0.0 if number is not None and -ROUNDING < number < 0.0 else value, caller)


def _number_or_none(name: str, value: Any, caller: str) -> None:
    if value is not None:
        _number(name, value, caller)


def _above_zero(name: str, value: Any, caller: str) -> None:
    check_positive(name, value, caller=caller)


def _betas(name: str, value: Any, caller: str) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ValueError(f"{caller}: betas is {value!r}, expected two numbers")
    for i, beta in enumerate(value):
        check_number(f"{name}[{i}]", beta, below=1.0, caller=caller)


def _flag(name: str, value: Any, caller: str) -> None:
    check_flag(name, value, caller=caller)


def _sign(name: str, value: Any, caller: str) -> None:
    if not is_one_of(value, (-1, 1)):
        raise ValueError(f"{caller}: {name} is {shown(value)}, expected -1 (against the momentum) or 1 (along it)")


def _anything(name: str, value: Any, caller: str) -> None:
    """For counters."""


# Every hyperparameter that a group may have: its default, and what checks it.
HYPERPARAMETERS: dict[str, tuple[Any, Check]] = {
    "lr": (0.15, _rate),
    "betas": ((0.9, 0.999), _betas),
    "weight_decay": (0.0, _number),
    "rho": (0.0, _number),
    "perturb_eps": (1e-12, _number),
    "eps": (1e-4, _number),
    "hessian_power": (0.5, _number),
    "hessian_floor": (0.0, _number_or_none),
    "clip_update": (None, _number_or_none),
    "maximize": (False, _flag),
    "power_step": (0, _anything),
    "rho_step": (0, _anything),
    # of some methods alone
    "alpha": (0.0, _number),
    "clip_threshold": (1.0, _above_zero),
    "sign": (-1, _sign),
    "evaluating": (False, _flag),
    "ascents": (0, _anything),
}
_CHOSEN_FLAGS = {"adaptive", "adaptive_bias", "spatial_averaging"}  # of constructors, which choose a variant by them
_COMMON = tuple(HYPERPARAMETERS)[: tuple(HYPERPARAMETERS).index("alpha")]


def check_group(group: Mapping[str, Any], names: Iterable[str], *, caller: str) -> None:
    """Raises ValueError unless the named hyperparameters of a parameter group are good."""
    for name in names:
        HYPERPARAMETERS[name][1](name, group[name], caller)


def _on_device(value: Any, capturable: bool) -> bool:
    """Whether reading it means to wait for a device. With ``capturable`` no tensor is read, wherever it is."""
    if isinstance(value, Tensor):
        return capturable or value.device.type != "cpu"
    return isinstance(value, (tuple, list)) and any(_on_device(part, capturable) for part in value)


def _may_change(value: Any) -> bool:
    """Whether a hyperparameter can become another one and stay the same object."""
    return isinstance(value, (Tensor, list)) or (isinstance(value, tuple) and any(map(_may_change, value)))


class CheckedGroups:
    """Hyperparameters of parameter groups, checked when they change.

    Who writes into ``param_groups`` tells nobody. So every step compares the objects that are there with those that
    were checked last, and looks only at new ones, and at those that may have changed in place.
    """

    def __init__(self, names: Sequence[str], caller: str) -> None:
        """Takes what may be in a group, and what errors call the optimizer."""
        self._names, self._caller = names, caller
        self._present: list[str] = []  # of these names, those that groups have had
        self._known: list[Any] = []
        self._is_settled = True  # whether none of them can change in place

    def expect(self, names: Container[str]) -> None:
        """Takes what every group has from the beginning, and may not lose."""
        self._present = [name for name in self._names if name in names]

    def check(self, groups: Sequence[Mapping[str, Any]], *, capturable: bool) -> None:
        """Raises ValueError unless all hyperparameters of the groups are good."""
        names = [name for name in self._names if groups and name in groups[0]]
        if names != self._present:
            names = [name for name in self._names if name in names or name in self._present]
        self._present = names
        try:
            values = [group[name] for group in groups for name in names]
        except KeyError:
            self._refuse_missing(groups, names)
        is_known = list(map(is_, values, self._known)) if len(values) == len(self._known) else [False] * len(values)
        if self._is_settled and all(is_known):
            return
        for position, (value, known) in enumerate(zip(values, is_known, strict=True)):
            if (known and not _may_change(value)) or _on_device(value, capturable):
                continue
            number, place = divmod(position, len(names))
            HYPERPARAMETERS[names[place]][1](names[place], value, f"{self._caller}: group {number}")
        self._known, self._is_settled = values, not any(map(_may_change, values))

    def _refuse_missing(self, groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> NoReturn:
        number, name = next((n, name) for n, group in enumerate(groups) for name in names if name not in group)
        raise ValueError(f"{self._caller}: group {number} has no {name!r}, which was taken out; give it one")


def arguments(
    caller: str,
    variant: Variant,
    own: Mapping[str, Any],
    further: Mapping[str, Any] | None = None,
    *,
    refused: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> tuple[Options, dict[str, Any]]:
    """Sorts the arguments of a constructor into options and defaults of parameter groups.

    Args:
        caller: What errors call the optimizer.
        variant: The method.
        own: Arguments of its signature and what the method fixes, by name. What is neither option nor hyperparameter
            is left to the caller.
        further: What was given as ``**options``; ``foreach`` and ``fused`` may be anywhere.
        refused: Arguments that the method does not have, and why.
        extra: Further hyperparameters of its groups.

    Raises:
        TypeError: If there is no such argument.
    """
    known = {*_COMMON, *OPTIONS, "foreach", "fused"} - {"variant"}
    for name in further or ():
        if name in (refused or {}):
            raise TypeError(f"{caller}: there is no argument {name!r}; {refused[name]}")  # type: ignore[index]
        if name not in known or name in own:
            raise TypeError(f"{caller}: there is no further argument {name!r}; help({caller}) lists them")
    given = {**own, **(further or {})}
    flags = {"foreach": given.pop("foreach", None), "fused": given.pop("fused", None)}
    for flag, value in flags.items():
        check_flag(flag, value, caller=caller)
    backend = backends.resolve(given.pop("backend", "auto"), **flags, caller=caller)
    for flag in _CHOSEN_FLAGS & given.keys():
        check_flag(flag, given[flag], caller=caller)
    wide = {name: given.pop(name) for name in OPTIONS if name in given}
    defaults = {name: given.get(name, HYPERPARAMETERS[name][0]) for name in _COMMON} | dict(extra or {})
    if variant.sample is Sample.SQUARE:  # the one whose hyperparameters don't tell, see state.py
        defaults[CURVATURE] = variant.sample.name.lower()
    return Options(caller, variant, backend=backend, **wide), defaults
