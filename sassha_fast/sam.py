"""SAM, ASAM and GSAM on optimizers of torch: the ascent of SASSHA, and the descent of somebody else."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import override

from . import backends, schedules
from ._core.ascent import GradientAscent
from ._core.descent import Delegated
from ._core.optimizer import FusedOptimizer, Params
from ._core.options import HYPERPARAMETERS, Options
from ._core.state import Check, Schema, check_checkpoint, copied, elements, finite_number, step_count
from .checks import as_number, check_flag, refuse_saved, shown
from .variant import Variant

__all__ = ["SAM"]


class SAM(FusedOptimizer):
    r"""Sharpness-aware minimization (Foret et al., 2021) with a given optimizer for the descent.

    ``SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)``. One step is the three calls of
    :class:`sassha_fast.SASSHA`, or ``opt.step(closure)``, which replays random numbers, moves BatchNorm statistics once
    and knows of other processes. ``adaptive=True`` is ASAM, ``alpha`` above 0 is GSAM. Norm and ascent are SASSHA's
    fused passes and restored weights are the original ones, bit for bit.

    Args:
        params: Parameters, named parameters or dicts of parameter groups.
        base_optimizer: Class of the optimizer that descends: any whose ``step`` needs no closure, as LBFGS's does, and
            that has no hyperparameter ``rho``, ``alpha`` or ``perturb_eps``, as RMSprop, ASGD and Adadelta have.
        rho: Radius of the ascent. May differ between parameter groups.
        adaptive: ASAM's scaling of ε by the weights.
        adaptive_bias: Whether it covers parameters of one dimension too.
        alpha: Weight of GSAM's orthogonal component.
        perturb_eps: Added to the gradient norm.
        rho_scheduler: A function of the step number, or an object with ``step()``, that gives ``rho``.
        max_grad_norm: Scales the gradient at x + ε down to this norm.
        skip_nonfinite: Skip a step whose gradient at x + ε is not finite.
        grad_reduce: ``"mean"`` or ``"sum"`` over processes.
        reduce_grads: Whether gradients are reduced over processes here; see :class:`sassha_fast.SASSHA`.
        perturb_sync: Climb along the gradient of all processes.
        backend: Of norm and ascent.
        seed: Key of the rounding of reduced-precision parameters.
        **options: Arguments of the base optimizer.
    """

    ascent_part = GradientAscent
    descent_part = Delegated
    checked_hyperparameters = ("rho", "perturb_eps", "alpha")  # the base optimizer checks its own

    def __init__(
        self,
        params: Params,
        base_optimizer: type[Optimizer],
        rho: float = 0.05,
        adaptive: bool = False,
        *,
        adaptive_bias: bool = True,
        alpha: float = 0.0,
        perturb_eps: float = 1e-12,
        rho_scheduler: schedules.Schedule | schedules.Stepping | None = None,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        grad_reduce: str = "mean",
        reduce_grads: bool | None = None,
        perturb_sync: bool = False,
        backend: str = "auto",
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Checks the arguments; see the class."""
        name = type(self).__name__
        if not isinstance(base_optimizer, type) or not issubclass(base_optimizer, Optimizer):
            raise TypeError(f"{name}: base_optimizer is {base_optimizer!r}, expected a class such as torch.optim.SGD")
        check_flag("adaptive", adaptive, caller=name)
        check_flag("adaptive_bias", adaptive_bias, caller=name)
        chosen = Options(
            name,
            Variant(adaptive=bool(adaptive), adaptive_bias=bool(adaptive_bias), gap=True),
            rho_scheduler=rho_scheduler,
            max_grad_norm=max_grad_norm,
            skip_nonfinite=skip_nonfinite,
            grad_reduce=grad_reduce,
            reduce_grads=reduce_grads,
            perturb_sync=perturb_sync,
            backend=backends.resolve(backend, caller=name),
            seed=seed,
        )
        if _needs_closure(base_optimizer):
            raise TypeError(
                f"{name}: {base_optimizer.__name__}.step needs a closure, as it runs passes of its own, but SAM's "
                "descent has the gradient at x + ε alone; use a base optimizer whose step() needs none"
            )
        params = params if isinstance(params, (Tensor, dict)) else list(params)  # type: ignore[assignment]
        theirs = base_optimizer([_small(params)], **options).defaults
        own = {"rho": rho, "perturb_eps": perturb_eps, "alpha": alpha, "rho_step": 0, "ascents": 0}
        taken = sorted(theirs.keys() & own.keys())
        if taken:
            raise TypeError(
                f"{name}: {base_optimizer.__name__} has hyperparameters {taken} of its own, which SAM's would replace; "
                "use another base optimizer, or a subclass with other names for them"
            )
        super().__init__(params, chosen, {**theirs, **own})
        self._use(base_optimizer(self.param_groups, **options))

    def _use(self, base: Optimizer) -> None:
        """Takes the base optimizer. Groups and state are its own, so schedulers and checkpoints see one of each."""
        self.base_optimizer = base
        self._parts.descent = Delegated(base)
        self.param_groups, self.state = base.param_groups, base.state

    def _schema(self) -> Schema:
        """What checkpoints hold, which follows from the base optimizer."""
        name, base = self._parts.options.caller, BaseSchema(self.base_optimizer, self._parts.options.caller)
        return Schema(
            name,
            base.writer,
            required=base.required | {"rho", "ascents"},
            hyperparameters=self.checked_hyperparameters,
            fields=base.fields,
            check_group=base.check_group,
            closed=False,
        )

    @override
    def _load(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of a SAM with the same base optimizer. Hyperparameters that SAM does not have are left."""
        phantoms = HYPERPARAMETERS.keys() - self.defaults.keys()  # which 0.1.0 wrote, and schedulers took for real
        saved = [{key: g[key] for key in g if key not in phantoms} for g in state_dict["param_groups"]]
        loaded = check_checkpoint({**state_dict, "param_groups": saved}, self.param_groups, 1, self._schema())
        # torch would go on with the very tensors of the checkpoint.
        state = {
            index: {key: copied(value) for key, value in entry.items()} for index, entry in loaded["state"].items()
        }
        groups = [{key: copied(value) for key, value in group.items()} for group in loaded["param_groups"]]
        self.base_optimizer.load_state_dict({"state": state, "param_groups": groups})
        self._take_over(self.base_optimizer.state, self.base_optimizer.param_groups)
        self._use(self.base_optimizer)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "base_optimizer": self.base_optimizer}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "base_optimizer" in state:
            self._use(state["base_optimizer"])


def _needs_closure(base_optimizer: type[Optimizer]) -> bool:
    """Whether its ``step`` can't be called without an argument."""
    _, *rest = inspect.signature(base_optimizer.step).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in rest)


def _small(params: Any) -> Tensor:
    """A tensor of one element with the dimensions of the first parameter: some optimizers take only matrices."""
    first = next(iter(params), None)
    while isinstance(first, (dict, tuple, list)):
        first = next(iter(first["params"]), None) if isinstance(first, dict) else first[-1]
    dimensions = first.dim() if isinstance(first, Tensor) and not is_lazy(first) else 1
    return torch.zeros([1] * dimensions, requires_grad=True, device="cpu")


class BaseSchema:
    """What a checkpoint holds for the base optimizer. It is asked by taking a step with a small parameter.

    Attributes:
        writer: Who writes such checkpoints.
        required: Its hyperparameters that are numbers. Flags are added from one release of torch to the next.
    """

    def __init__(self, base: Optimizer, caller: str) -> None:
        """Looks at the base optimizer, which is left as it is."""
        self._base, self._caller = base, caller
        self._kept: dict[tuple[int, int, torch.dtype, torch.device], dict[str, Any]] = {}
        self.writer = f"{caller} over {type(base).__name__}"
        self.required = frozenset(key for key, value in base.defaults.items() if as_number(value) is not None)

    def check_group(self, saved: Mapping[str, Any], live: Mapping[str, Any], number: int) -> None:
        """Raises ValueError unless the base optimizer can take steps with a saved group.

        Nothing is said of a base optimizer that can't even take a step with the live group here.
        """
        for key in self._base.defaults:
            expected = _unlike(saved[key], live[key])
            if expected is not None:
                refuse_saved(f"{key!r} of group {number}", saved[key], expected, caller=self._caller)
        for param in live["params"]:
            if is_lazy(param):
                continue  # has no state either
            kind = (number, param.dim(), param.dtype, param.device)
            if kind not in self._kept:
                self._kept[kind] = self._asked(saved, live, number, param)

    def _asked(self, saved: Mapping[str, Any], live: Mapping[str, Any], number: int, param: Tensor) -> dict[str, Any]:
        """What the base optimizer keeps of such a parameter; nothing, if it can't be asked."""
        try:
            self._step(live, param)
        except Exception:
            return {}
        try:
            return self._step(saved, param)
        except Exception as error:
            raise ValueError(
                f"{self._caller}.load_state_dict: {type(self._base).__name__} refuses the hyperparameters of group "
                f"{number}: {shown(error)}; the checkpoint is damaged, so load another"
            ) from error

    def fields(self, saved: Mapping[str, Any], number: int, param: Tensor) -> dict[str, Check]:
        """What the state of such a parameter may hold, of a group that was checked."""
        kept = self._kept[number, param.dim(), param.dtype, param.device]
        return {key: _check_like(key, value, dimensions=param.dim()) for key, value in kept.items()}

    def _step(self, group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
        """The state that the base optimizer makes for a parameter of two elements along every dimension."""
        small = torch.zeros([2] * param.dim(), dtype=param.dtype, device=param.device, requires_grad=True)
        small.grad = torch.zeros_like(small)
        given = {key: group[key] for key in self._base.defaults}
        known = inspect.signature(type(self._base)).parameters
        named = {key: value for key, value in given.items() if key in known}
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            warnings.simplefilter("ignore")
            base = type(self._base)([small], **named)
            base.param_groups[0].update(given)
            base.step()
        return dict(base.state[small])


def _unlike(saved: Any, live: Any) -> str | None:
    """What was expected of a saved hyperparameter, None if it is good: the kind of the live one, and finite."""
    if isinstance(live, (tuple, list)):
        if not isinstance(saved, (tuple, list)) or len(saved) != len(live):
            return f"{len(live)} values"
        return next((found for pair in zip(saved, live, strict=True) if (found := _unlike(*pair))), None)
    number = as_number(saved)
    if as_number(live) is not None:
        return None if number is not None and math.isfinite(number) else "a finite number"
    if isinstance(live, bool) or live is None:  # None is a flag left open, or a number that is not set
        is_number = live is None and number is not None and math.isfinite(number)
        return None if saved is None or isinstance(saved, bool) or is_number else "True, False or None"
    return None if isinstance(saved, type(live)) else f"a {type(live).__name__}"


def _check_like(key: str, kept: Any, *, dimensions: int) -> Check:
    """What a value of the base optimizer's state may be, given one that it has made itself."""
    if key == "step":
        return step_count
    if isinstance(kept, Tensor) and kept.is_floating_point() and tuple(kept.shape) == (2,) * dimensions:
        return lambda value, param: elements(value, param, param.dtype)
    if as_number(kept) is not None:
        return finite_number
    return lambda value, param: None if isinstance(value, type(kept)) else f"a {type(kept).__name__}"
