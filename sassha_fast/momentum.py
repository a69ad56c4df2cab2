"""M-SASSHA: the ascent of the next step comes from the momentum of this one, so a step costs one gradient.

The parameters hold x + ε from one step to the next. x lives in the optimizer's state, so nothing is ever subtracted
again: the update works on x, and the parameter is derived from it.
"""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from . import reference
from .accessors import no_grad
from .base import Params, SecondOrder
from .passes import Stepped
from .plan import Plan
from .sharding import local
from .state import ASCENT_DRAW, ASCENT_SCALE, WEIGHT, from_upstream_momentum
from .variant import M_SASSHA

__all__ = ["MSASSHA"]


class MSASSHA(SecondOrder):
    r"""M-SASSHA: SASSHA with the normalised momentum of the last step as perturbation, at one gradient per step.

    A loop for ``torch.optim.AdamW`` needs a graph on refreshes and the true weights for evaluation::

        for x, y in loader:
            loss_fn(model(x), y).backward(create_graph=opt.hessian_due)
            opt.step()
            opt.zero_grad()
        with opt.true_weights():  # or opt.eval() before and opt.train() after
            evaluate(model)

    or ``opt.step(closure)``, which needs no word about graphs. The arguments up to ``maximize`` are the authors', in
    their order; the rest is that of :class:`sassha_fast.SASSHA`. Their default of ``hessian_power`` is 1, the paper's
    and ours ½.

    Args:
        params: Parameters, named parameters or dicts of parameter groups; several groups are fine.
        lr: Learning rate η.
        betas: Decay of the averages of gradient and curvature.
        weight_decay: Decoupled weight decay λ.
        lazy_hessian: Steps k from one refresh of the curvature to the next.
        rho: Radius ρ of the ascent.
        n_samples: Probes averaged in a refresh.
        eps: Added to the denominator.
        hessian_power: Exponent of the curvature.
        seed: Key of the probes.
        maximize: Maximize the objective instead.
        sign: Sign of ε = sign·ρ·m/‖m‖. The paper speaks of the negative momentum and the authors' code subtracts it, as
            Momentum-SAM does: −1. With +1 ε points along m, like SASSHA's ascent.
        adaptive: ASAM's scaling of ε by the weights.
        adaptive_bias: Whether it covers parameters of one dimension too.
        **options: Further arguments of :class:`sassha_fast.SASSHA`, but for ``hvp_point`` and ``perturb_sync``.
    """

    _collector = "take_products"
    _probe_recipe = "probe_weights() and a backward pass, probes_due times, before step()"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.15,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-2,
        lazy_hessian: int = 10,
        rho: float = 0.3,
        n_samples: int = 1,
        eps: float = 1e-4,
        hessian_power: float = 0.5,
        seed: int = 0,
        maximize: bool = False,
        *,
        sign: int = -1,
        adaptive: bool = False,
        adaptive_bias: bool = True,
        **options: Any,
    ) -> None:
        """Checks the arguments; see the class."""
        if sign not in (-1, 1):
            raise ValueError(f"MSASSHA: sign is {sign!r}, expected -1 (against the momentum) or 1 (along it)")
        for name in ("hvp_point", "perturb_sync", "numbers"):
            if name in options:
                raise TypeError(
                    f"MSASSHA: there is no argument {name!r}; it is about the first pass, which is left out"
                )
        super().__init__(
            params,
            replace(M_SASSHA, adaptive=bool(adaptive), adaptive_bias=bool(adaptive_bias)),
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
            lazy_hessian=lazy_hessian,
            rho=rho,
            n_samples=n_samples,
            eps=eps,
            hessian_power=hessian_power,
            seed=seed,
            maximize=maximize,
            numbers={"sign": sign, "evaluating": False},
            **options,
        )

    def _reset(self) -> None:
        super()._reset()
        self._climbed: Plan | None = None  # whose parameters were moved by the last step, if nothing was since

    # ---- which weights the parameters hold ----------------------------------------------------------------------

    @property
    def evaluating(self) -> bool:
        """Whether the parameters hold the true weights x, as after :meth:`eval`."""
        return any(group["evaluating"] for group in self.param_groups)

    @property
    def perturbed(self) -> bool:
        """Whether the parameters hold x + ε: from the first step on, outside of :meth:`eval`."""
        return not self.evaluating and any(WEIGHT in entry for entry in self.state.values())

    @no_grad
    def eval(self) -> None:
        """Writes the true weights x into the parameters, bit for bit: for evaluation, export, and changes by hand."""
        self._refuse_probes("eval")
        if self.evaluating:
            return
        plan = self._plan_of(self._moved_params())
        if plan is not None:
            plan.bind_state(self._states(plan))
            plan.settle()
            self._moved(plan)
        self._climbed = None
        self._set_evaluating(True)

    @no_grad
    def train(self) -> None:
        """Writes x + ε into the parameters again, bit for bit; what was changed since :meth:`eval` is the new x."""
        if not self.evaluating:
            return
        self._refuse_probes("train")
        self._adopt_weights()
        self._derive(self._moved_params())
        self._set_evaluating(False)

    @contextmanager
    def true_weights(self) -> Iterator[None]:
        """The true weights x within, x + ε again afterwards, if that is what there was before."""
        before = self.evaluating
        self.eval()
        try:
            yield
        finally:
            if not before:
                self.train()

    def move_back_from_momentumAscent(self) -> None:
        """The authors' name of :meth:`eval`."""
        self.eval()

    def move_up_to_momentumAscent(self) -> None:
        """The authors' name of :meth:`train`."""
        self.train()

    def attach(self, model: nn.Module) -> None:
        """Names the model; see :meth:`SASSHA.attach`.

        From then on a warning says so where its ``state_dict`` is taken, or where it runs in evaluation mode, while
        its weights are perturbed.
        """
        super().attach(model)
        guard = _Guard(self)
        model.register_state_dict_pre_hook(guard.on_state_dict)  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(guard.on_forward)

    def _set_evaluating(self, value: bool) -> None:
        for group in self.param_groups:
            group["evaluating"] = value

    def _adopt_weights(self) -> None:
        """Makes what the parameters hold the true weights."""
        for p in self._moved_params():
            local(self.state[p][WEIGHT]).copy_(local(p.data))

    def _refuse_probes(self, caller: str) -> None:
        if self._ascent is not None:
            raise RuntimeError(f"MSASSHA.{caller}: the weights are at a probe; call take_products() or step() first")

    def _moved_params(self) -> list[Tensor]:
        """Parameters whose true weights live apart."""
        return [p for p in self._parameters() if WEIGHT in self.state.get(p, ())]

    def _plan_of(self, params: Sequence[Tensor]) -> Plan | None:
        wanted = set(map(id, params))
        key = tuple(id(p) in wanted for p in self._parameters())
        return self._plan(None if all(key) else key) if any(key) else None

    # ---- the ascent ---------------------------------------------------------------------------------------------

    def _settle(self, plan: Plan, states: list[dict[str, Any]], stepped: Stepped) -> None:
        """After the update: ε of the next step, from m and ‖m‖, which the update has added up."""
        assert stepped.square_sums is not None
        radii = zip(self._next_rho(), self.param_groups, strict=True)
        offsets = [group["perturb_eps"] for group in self.param_groups]
        signed = [rho * group["sign"] for rho, group in radii]
        scales = reference.ascent_scales(stepped.square_sums, signed, offsets, on_device=self.capturable)
        draw = self._draw(plan)
        plan.count_draw(draw)
        plan.momentum_ascent(scales, self.seed)
        self.stats.square_sums, self.stats.scales = stepped.square_sums, scales
        on_host = scales.device.type == "cpu" and not self.capturable
        values: Sequence[Any] = scales.tolist() if on_host else scales.unbind()
        number = draw.clone() if isinstance(draw, Tensor) else draw
        for entry, group in zip(states, plan.groups, strict=True):
            entry[ASCENT_SCALE], entry[ASCENT_DRAW] = values[group], number
        self._ascent = None  # probes, if there were any, are overwritten
        self._moved(plan)
        self._climbed = plan

    def _derive(self, params: Iterable[Tensor]) -> None:
        """Writes x + ε into parameters again, each with the ε of its own last step."""
        buckets: list[tuple[dict[int, Any], Any, list[Tensor]]] = []  # scales by group, draw, parameters
        groups = {id(p): g for g, group in enumerate(self.param_groups) for p in group["params"]}
        for p in params:
            scale, draw, group = self.state[p][ASCENT_SCALE], self.state[p][ASCENT_DRAW], groups[id(p)]
            for scales, number, members in buckets:
                if _same(number, draw) and _same(scales.setdefault(group, scale), scale):
                    members.append(p)
                    break
            else:
                buckets.append(({group: scale}, draw, [p]))
        for scales, draw, members in buckets:
            plan = self._plan_of(members)
            assert plan is not None
            plan.bind_state(self._states(plan))
            plan.count_draw(draw)
            device = plan.draws[0].device
            values = [torch.as_tensor(scales.get(g, 0.0), device=device) for g in range(plan.n_groups)]
            plan.momentum_ascent(torch.stack([v.to(torch.float32) for v in values]), self.seed)
            self._moved(plan)
        self._climbed = None

    def _undo_ascent(self, *, tell_autograd: bool = True) -> None:
        """Leaves the probes, if the weights are at one, for x + ε."""
        del tell_autograd  # always
        ascent, self._ascent = self._ascent, None
        if ascent is not None:
            self._derive(ascent.params)

    # ---- a step -------------------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if self.evaluating:
            raise RuntimeError(
                "MSASSHA.step: the parameters hold the true weights since eval(), so the gradients are not those at "
                "x + ε; call opt.train() before the forward pass"
            )
        changed = self._changed(self._climbed) if self._ascent is None else None
        if changed is not None:
            raise RuntimeError(
                f"MSASSHA.step: {changed} changed in place while holding x + ε, and the update of x would lose that; "
                "change weights within `with opt.true_weights():`. opt.eval() goes back to x now"
            )
        if self._probe is not None and self._curvature is None:
            self.take_products()

    @no_grad
    def take_products(self, scaler: GradScaler | None = None) -> None:
        """On a refresh, takes the products now: before gradients are clipped or unscaled.

        :meth:`step` does it by itself where neither happens between the last backward pass and it.

        Args:
            scaler: The ``torch.amp.GradScaler`` that scaled the loss, whose scale the products carry too.
        """
        try:
            self._take_products(scaler)
        finally:
            self._undo_ascent()

    @no_grad
    def probe_weights(self) -> None:
        """Moves the weights to the next finite-difference probe; the gradients there complete the product.

        Call it, and a backward pass after it, ``probes_due`` times between the backward pass and :meth:`step`.
        """
        if self._ascent is None and self.probes_due:
            self._ascend((), zero_grad=False)
        super().probe_weights()

    def _ascend(self, rho: Sequence[float | Tensor], *, zero_grad: bool) -> None:
        """Starts probing: the way back is to derive x + ε again."""
        plan, _ = self._gather()
        if plan is None:
            raise RuntimeError("MSASSHA.probe_weights: no parameter has a gradient; run loss.backward() first")
        plan.bind_state(self._states(plan))
        self._time = self._clock()
        self._weight_norm = plan.weight_norm()
        self._ascent = plan
        self._moved(plan)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    @no_grad
    def state_dict(self) -> dict[str, Any]:
        """See ``torch.optim.Optimizer.state_dict``. It has x, so it may be taken whatever the parameters hold."""
        if self.evaluating:
            self._adopt_weights()
        kept, self.state = self.state, defaultdict(dict, {p: _plain(entry) for p, entry in self.state.items()})
        try:
            return super().state_dict()
        finally:
            self.state = kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this optimizer, or of the authors', and writes x or x + ε into the parameters.

        Which of both is what the parameters held when it was taken. A checkpoint of the authors' optimizer has no x:
        the parameters have to hold it, as after their ``move_back_from_momentumAscent``.
        """
        super().load_state_dict(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        super()._load(from_upstream_momentum(state_dict, self.param_groups, self.lazy_hessian))
        params = self._moved_params()
        if self.evaluating:
            for p in params:
                local(p.data).copy_(local(self.state[p][WEIGHT]))
            plan = self._plan_of(params)
            if plan is not None:
                self._moved(plan)
        else:
            self._derive(params)


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """State with numbers for what a capturable optimizer keeps on the device."""
    if WEIGHT not in entry:
        return entry
    return {**entry, ASCENT_SCALE: float(entry[ASCENT_SCALE]), ASCENT_DRAW: int(entry[ASCENT_DRAW])}


def _same(a: Any, b: Any) -> bool:
    """Equality of numbers, without reading those on a device: a tensor is equal to itself."""
    return a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b


class _Guard:
    """Warns of a model whose parameters hold x + ε. Copies of the model are not guarded."""

    def __init__(self, opt: MSASSHA | None = None) -> None:
        self.opt = None if opt is None else weakref.ref(opt)

    def __deepcopy__(self, memo: Any) -> _Guard:
        return _Guard()

    def __reduce__(self) -> tuple[type[_Guard], tuple[()]]:
        return _Guard, ()

    def _warn(self, what: str) -> None:
        opt = None if self.opt is None else self.opt()
        if opt is not None and opt.perturbed:
            warnings.warn(
                f"MSASSHA: {what} while its parameters hold x + ε, not the true weights; use `with "
                "opt.true_weights():`, or opt.eval() before and opt.train() after",
                stacklevel=4,
            )

    def on_state_dict(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._warn("the model's state_dict is taken")

    def on_forward(self, model: nn.Module, args: Any) -> None:
        if not model.training:
            self._warn("the model is evaluated")
