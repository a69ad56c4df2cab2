"""M-SASSHA: the ascent of the next step comes from the momentum of this one, so a step costs one gradient.

The parameters hold x + ε from one step to the next. x lives in the optimizer's state, so nothing is ever subtracted
again: the update works on x, and the parameter is derived from it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from typing_extensions import override

from ._core.ascent import MomentumAscent
from ._core.descent import Preconditioned
from ._core.keys import ASCENT_DRAW, ASCENT_SCALE, WEIGHT
from ._core.optimizer import FusedOptimizer, Params
from ._core.options import arguments
from ._core.step import Phase
from ._core.upstream import from_upstream_momentum
from ._passes.accessors import no_grad
from .variant import M_SASSHA

__all__ = ["MSASSHA"]


class MSASSHA(FusedOptimizer):
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

    ascent_part = MomentumAscent
    descent_part = Preconditioned

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
        own = dict(locals())  # every argument by its name
        variant = replace(M_SASSHA, adaptive=bool(adaptive), adaptive_bias=bool(adaptive_bias))
        refused = dict.fromkeys(("hvp_point", "perturb_sync"), "it is about the first pass, which is left out")
        extra = {"sign": sign, "evaluating": False}
        name = type(self).__name__
        super().__init__(params, *arguments(name, variant, own, options, refused=refused, extra=extra))

    @property
    def _momentum(self) -> MomentumAscent:
        ascent = self._parts.ascent
        assert isinstance(ascent, MomentumAscent)
        return ascent

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
        self._momentum.recover(self.parts)
        try:
            self._momentum.show_x(self.parts)
            self._set_evaluating(True)
        except BaseException:  # an interrupt: all stays as it was
            self._derive()
            raise

    @no_grad
    def train(self) -> None:
        """Writes x + ε into the parameters again, bit for bit; what was changed since :meth:`eval` is the new x."""
        if not self.evaluating:
            return
        self._refuse_probes("train")
        self._momentum.adopt(self.parts)
        try:
            self._derive()
        except BaseException:  # an interrupt: x is known, so the way leads on, unless a parameter no longer fits it
            self._derive_or_stay()
            raise

    def _derive(self) -> None:
        """Writes x + ε into the parameters. What they hold is no longer x, whatever an interrupt leaves in them."""
        self._set_evaluating(False)  # first: with x + ε in the parameters, adopting them again would lose x
        self._momentum.derive(self.parts)
        self._momentum.watch(self.parts)

    def _derive_or_stay(self) -> None:
        """Writes x + ε into the parameters, or leaves x in all of them."""
        try:
            self._derive()
        except BaseException:
            self._momentum.put_back(self.parts)
            self._set_evaluating(True)
            raise

    @contextmanager
    def true_weights(self) -> Iterator[None]:
        """The true weights x within, x + ε again afterwards, if that is what there was before."""
        before = self.evaluating
        try:
            try:
                self.eval()
                yield
            finally:
                self._go_back(before)
        except BaseException:  # maybe an interrupt, which has kept the weights from coming back
            self._go_back(before)
            raise

    def _go_back(self, evaluating: bool) -> None:
        """Writes x + ε into the parameters, unless they held x before."""
        if not evaluating:
            self.train()

    def move_back_from_momentumAscent(self) -> None:
        """The authors' name of :meth:`eval`."""
        self.eval()

    def move_up_to_momentumAscent(self) -> None:
        """The authors' name of :meth:`train`."""
        self.train()

    @override
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

    def _refuse_probes(self, caller: str) -> None:
        step = self._current()
        if step is not None and step.is_away:
            name = self._parts.options.caller
            raise RuntimeError(f"{name}.{caller}: the weights are at a probe; call take_products() or step() first")

    # ---- a step -------------------------------------------------------------------------------------------------

    @override
    def perturb_weights(self, zero_grad: bool = True) -> None:
        """Not a call of M-SASSHA, whose parameters are at x + ε already. Raises RuntimeError."""
        raise RuntimeError(
            f"{self._parts.options.caller}.perturb_weights: the parameters hold x + ε from one step to the next, so a "
            "step is loss.backward(create_graph=opt.hessian_due) and opt.step()"
        )

    @override
    def unperturb(self, scaler: GradScaler | None = None) -> None:
        """Not a call of M-SASSHA; :meth:`take_products` and :meth:`eval` are. Raises RuntimeError."""
        raise RuntimeError(
            f"{self._parts.options.caller}.unperturb: products are taken by take_products(scaler), and the true "
            "weights shown by eval()"
        )

    @override
    @no_grad
    def probe_weights(self) -> None:
        """Moves the weights to the next finite-difference probe; the gradients there complete the product.

        Call it, and a backward pass after it, ``probes_due`` times between the backward pass and :meth:`step`.
        """
        self._refuse_in_closure("probe_weights")
        self._momentum.refuse_evaluating(self.parts, "probe_weights")
        self._momentum.recover(self.parts)
        step = self._current()
        if step is None or step.phase is Phase.COLLECTED:
            step = self._begin()
        if not step.is_away and step.probes_due:
            step.climb(zero_grad=False, caller="probe_weights")
        super().probe_weights()

    @override
    @no_grad
    def take_products(self, scaler: GradScaler | None = None) -> None:
        """On a refresh, takes the products now: before gradients are clipped or unscaled.

        :meth:`step` does it by itself where neither happens between the backward pass and it.

        Args:
            scaler: The ``torch.amp.GradScaler`` that scaled the loss, whose scale the products carry too.
        """
        self._momentum.refuse_evaluating(self.parts, "take_products")
        super().take_products(scaler)

    @override
    def _check_ready(self, *, closure: bool) -> None:
        self._momentum.refuse_evaluating(self.parts, "step")
        step = self._current()
        if step is not None and step.is_away:
            if closure:
                self._refuse_probes("step")
            return  # it takes the products and writes over the probe, so nobody has to come back from that before
        self._momentum.recover(self.parts)
        changed = self._momentum.changed(self.parts)
        if changed is not None:
            self._momentum.refuse_changed(self._parts, changed)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    @override
    @no_grad
    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer, as in ``torch.optim``. It has x, whatever the parameters hold."""
        if self.evaluating:
            self._momentum.adopt(self.parts)
        self.parts.params.wait_for_refresh()  # which may write into the state, so before copies of it are made
        with self._state_as({p: _plain(entry) for p, entry in self.state.items()}):
            return super().state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this optimizer, or of the authors', and writes x or x + ε into the parameters.

        Which of both is what the parameters held when it was taken. A checkpoint of the authors' optimizer has no x:
        the parameters have to hold it, as after their ``move_back_from_momentumAscent``.
        """
        super().load_state_dict(state_dict)

    @override
    def _load(self, state_dict: dict[str, Any]) -> None:
        lazy_hessian = self._parts.options.lazy_hessian
        self._momentum.recover(self.parts)
        # Parameters whose state the checkpoint does not have keep their x, or what somebody has loaded over x + ε.
        shown = [] if self.evaluating else self._momentum.untouched(self.parts)
        before = self.state
        try:
            if shown:
                self._momentum.show_x(self.parts, shown)
            super()._load(from_upstream_momentum(state_dict, self.param_groups, lazy_hessian))
            self._show_loaded()
        except BaseException:  # the parameters follow whichever state there is
            if self.state is not before:
                self._show_loaded()
            elif shown:
                self._momentum.derive(self.parts, shown)
                self._momentum.watch(self.parts, shown)
            raise

    def _show_loaded(self) -> None:
        """Writes x or x + ε of a checkpoint into the parameters, as its groups say."""
        if self.evaluating:
            self._momentum.show_x(self.parts)
        else:
            self._momentum.derive(self.parts)
            self._momentum.remember(self.parts)

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Builds again what a copy left out, and notices from now on if anybody else changes the parameters."""
        super().__setstate__(state)
        if not self.evaluating:
            self._momentum.remember(self.parts)


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """State with numbers for what a capturable optimizer keeps on the device."""
    if WEIGHT not in entry:
        return entry
    return {**entry, ASCENT_SCALE: float(entry[ASCENT_SCALE]), ASCENT_DRAW: int(entry[ASCENT_DRAW])}


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
                f"{type(opt).__name__}: {what} while its parameters hold x + ε, not the true weights; use `with "
                "opt.true_weights():`, or opt.eval() before and opt.train() after",
                stacklevel=4,
            )

    def on_state_dict(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._warn("the model's state_dict is taken")

    def on_forward(self, model: nn.Module, args: Any) -> None:
        if not model.training:
            self._warn("the model is evaluated")
