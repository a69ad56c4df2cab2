"""SASSHA in Lightning's automatic optimization: one callback, and the module stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial, wraps
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from .._core.optimizer import FusedOptimizer
from ..msassha import MSASSHA
from .replay import Batch, MicroBatch, Replay, TrueWeights, numbers
from .shares import check_use, checked_share, first_rows, least_rows

__all__ = ["SasshaCallback"]


class SasshaCallback(Callback):  # type: ignore[misc]
    """What ``lightning.Trainer`` needs for an optimizer that takes several gradients in a step.

    ``configure_optimizers`` returns any optimizer of this package, and the trainer gets the callback::

        trainer = Trainer(callbacks=[SasshaCallback()], accumulate_grad_batches=4, precision="bf16-mixed")

    - Passes at x + ε and at probes cover all micro-batches of ``accumulate_grad_batches``, each with the random numbers
      of its first pass. They are not seen by ``self.log`` and by torchmetrics of the module; the loss that Lightning
      reports is that at x.
    - ``gradient_clip_val`` becomes the optimizer's ``max_grad_norm``, which clips the gradient at x + ε alone.
    - M-SASSHA's true weights are what is validated, saved, averaged and left at the end.
    - Loggers get ``opt.stats`` under ``sassha/``.

    With manual optimization the loop is yours, and only the last two remain. Shares are refused then.

    Args:
        log_stats: Whether loggers get the statistics, every ``log_every_n_steps`` steps.
        ascent_share: Share of the rows of every batch, such as 1/4, that the ascent is taken from. Lightning's own pass
            is then on these rows, and what it reports and logs is of them.
        hessian_share: The same for the products of refreshes.
    """

    def __init__(
        self, *, log_stats: bool = True, ascent_share: float | None = None, hessian_share: float | None = None
    ) -> None:
        """Connects nothing yet."""
        self.log_stats = log_stats
        self.ascent_share = checked_share("ascent_share", ascent_share, caller="SasshaCallback")
        self.hessian_share = checked_share("hessian_share", hessian_share, caller="SasshaCallback")
        self._opts: list[FusedOptimizer] = []
        self._replay: Replay | None = None
        self._handles: list[Any] = []
        self._forward, self._backward = ExitStack(), ExitStack()  # contexts of Lightning's own passes
        self._clip: float | None = None
        self._note: Callable[..., None] | None = None  # called when Lightning runs a training step
        self._last: MicroBatch | None = None  # of the step at hand
        self._module: LightningModule | None = None  # that is being fitted
        self._averaged = False  # whether another callback takes averages of M-SASSHA's weights after a batch
        self._logged = 0

    # ---- the beginning and the end of a fit ---------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Connects the optimizers; refuses what can't work with several gradients in a step."""
        if sum(isinstance(other, SasshaCallback) for other in trainer.callbacks) > 1:
            raise ValueError("SasshaCallback: it is in callbacks twice, and both would run all passes; leave one")
        self._opts = [opt for opt in trainer.optimizers if isinstance(opt, FusedOptimizer)]
        if not self._opts:
            names = ", ".join(type(opt).__name__ for opt in trainer.optimizers) or "nothing"
            raise TypeError(
                f"SasshaCallback: configure_optimizers returned {names}, expected an optimizer of sassha_fast; return "
                "one, or leave the callback out"
            )
        if pl_module.automatic_optimization:
            _check_automatic(trainer, pl_module)
            self._take_over_clipping(trainer, self._opts[0])
            check_use(self._opts[0], self.ascent_share, self.hessian_share, caller="SasshaCallback")
            self._replay = Replay(self._opts[0], self.ascent_share, self.hessian_share)
            self._module = pl_module
            self._handles.append(self._opts[0].register_step_pre_hook(self._before_step))
        elif self.ascent_share is not None or self.hessian_share is not None:
            raise ValueError(
                f"SasshaCallback: shares of batches are for passes that Lightning runs, and {type(pl_module).__name__} "
                "has automatic_optimization=False; leave ascent_share and hessian_share out, and pass "
                "ascent_closure= and hessian_closure= to opt.step"
            )
        self._averaged = any(isinstance(opt, MSASSHA) for opt in self._opts) and _averages(trainer, self)
        for opt in self._opts:
            if isinstance(opt, MSASSHA):  # before attach(), whose hook warns of perturbed weights
                self._handles += TrueWeights(opt, pl_module).handles
            if opt.model is None:
                opt.attach(trainer.strategy.model)
        self._logged = trainer.global_step

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves trainer and module as they were."""
        self._release(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same after an error or an interrupt."""
        self._backward.__exit__(type(exception), exception, exception.__traceback__)
        self._release(trainer)

    def _release(self, trainer: Trainer) -> None:
        self._forward.close()
        self._show_true_weights()
        for handle in self._handles:
            handle.remove()
        if self._clip is not None:
            trainer.gradient_clip_val, self._clip = self._clip, None
        self._handles, self._opts, self._replay, self._module = [], [], None, None
        self._note = self._last = None

    def _take_over_clipping(self, trainer: Trainer, opt: FusedOptimizer) -> None:
        """Lightning would clip every pass: differences of clipped gradients are no products."""
        clip = trainer.gradient_clip_val
        if not clip:
            return
        if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            raise ValueError(
                f"SasshaCallback: gradient_clip_algorithm is 'value' (gradient_clip_val={clip}), which would clip "
                f"every gradient that a step of {type(opt).__name__} takes; use gradient_clip_algorithm='norm', or "
                f"clip_update= of {type(opt).__name__}, which bounds every element of the update"
            )
        if opt.max_grad_norm not in (None, clip):
            raise ValueError(
                f"SasshaCallback: gradient_clip_val is {clip}, but max_grad_norm of {type(opt).__name__} is "
                f"{opt.max_grad_norm}; give only one of them"
            )
        opt.max_grad_norm, self._clip, trainer.gradient_clip_val = float(clip), clip, None

    # ---- passes -------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Goes to x + ε if validation or a checkpoint has shown the true weights, and keeps the batch for the step."""
        for opt in self._opts:
            if isinstance(opt, MSASSHA):
                opt.train()
        if self._replay is None:
            return
        self._forward.close()  # of a batch that was skipped
        if batch_idx % trainer.accumulate_grad_batches == 0:  # where Lightning zeroes gradients
            self._replay.clear()
        with_index = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)
        given = (batch, batch_idx) if with_index else (batch,)
        opt, parts = self._replay.opt, trainer.accumulate_grad_batches
        kept: list[Batch] = []

        def note(*args: Any) -> None:
            """When Lightning runs the step: hooks of the module may draw numbers and change the batch before."""
            if not kept:
                kept.append(Batch(args, "SasshaCallback"))
                part.note_random()

        def again(share: float) -> Tensor | None:
            with _unheard(pl_module), _sharing(pl_module, share):
                output = trainer.strategy.training_step(*(kept[0].again() if kept else given))
                loss = output["loss"] if isinstance(output, Mapping) else output
                if loss is None:
                    return None
                loss = loss / parts
                trainer.strategy.backward(loss, opt)
            return loss.detach()  # type: ignore[no-any-return]

        part = self._replay.begin(again)
        self._note = note
        self._forward.enter_context(self._replay.forward_context())
        self._forward.enter_context(_sharing(pl_module, self._replay.first_share, note))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Lets the backward pass of a micro-batch that no step follows make what a refresh needs."""
        if self._replay is not None and self._replay.parts:  # else it is a pass of the optimizer
            self._backward.enter_context(self._replay.backward_context())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes it."""
        self._backward.close()

    def _before_step(self, opt: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replaces Lightning's closure, which knows the last micro-batch alone, by closures of all."""
        replay = self._replay
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if replay is None or not replay.parts or closure is None:
            return None
        self._forward.close()
        self._last = replay.parts[-1]
        self._last.run_first(partial(self._run_first, closure))
        rest = {key: value for key, value in kwargs.items() if key != "closure"}
        closures, others = replay.closures()
        return (args[0], closures, *args[2:]), {**rest, **others}

    def _run_first(self, closure: Any, share: float) -> Any:
        """Lightning's closure, on a share of its batch."""
        assert self._module is not None
        with _sharing(self._module, share, self._note):
            loss = closure()
        if self._last is not None:
            self._last.check_grads("SasshaCallback", "on_before_optimizer_step")
        return loss

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Takes down the gradients before hooks see them that might change them to no effect."""
        if self._last is not None:
            self._last.note_grads()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Takes down the loss of a micro-batch that no step followed yet; after a step, tells loggers of it."""
        self._forward.close()
        if self._averaged:
            self._show_true_weights()
        if self._replay is not None and self._replay.parts:
            self._replay.ran(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)
        step = trainer.global_step
        if not self.log_stats or step == self._logged or step % trainer.log_every_n_steps:
            return
        self._logged = step
        for logger in trainer.loggers:
            logger.log_metrics(numbers(self._opts[0].stats), step=step - 1)  # Lightning counts from 0 there

    # ---- true weights -------------------------------------------------------------------------------------------

    def _show_true_weights(self) -> None:
        for opt in self._opts:
            if isinstance(opt, MSASSHA):
                opt.eval()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the true weights, until the next training batch."""
        self._show_true_weights()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Likewise."""
        self._show_true_weights()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the true weights in the module."""
        self._show_true_weights()


def _check_automatic(trainer: Trainer, pl_module: LightningModule) -> None:
    """Raises where Lightning's automatic optimization can't give several gradients in a step."""
    plugin = trainer.precision_plugin
    if getattr(plugin, "scaler", None) is not None:
        raise ValueError(
            f"SasshaCallback: {type(plugin).__name__} (precision {plugin.precision!r}) has a GradScaler, and Lightning "
            "then steps without a closure, so that there is no gradient at x + ε; use precision='bf16-mixed', or "
            "automatic_optimization=False with opt.step(closure, scaler=scaler) as in examples/lightning_gpt.py"
        )
    if is_overridden("configure_gradient_clipping", pl_module):
        raise ValueError(
            f"SasshaCallback: {type(pl_module).__name__} overrides configure_gradient_clipping, which would clip the "
            "gradient of the ascent and not that of the descent; remove it and pass max_grad_norm= to the optimizer"
        )
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"SasshaCallback: training_step of {type(pl_module).__name__} takes dataloader_iter, which gives every "
            "batch once, while a step needs it again at x + ε; let it take batch"
        )


def _averages(trainer: Trainer, callback: SasshaCallback) -> bool:
    """Whether callbacks average weights. Raises if they come first, when the parameters still hold x + ε."""
    found = [other for other in trainer.callbacks if isinstance(other, (WeightAveraging, StochasticWeightAveraging))]
    for other in found:
        if trainer.callbacks.index(other) < trainer.callbacks.index(callback):
            name = type(other).__name__
            raise ValueError(
                f"SasshaCallback: {name} comes before it and would average x + ε of M-SASSHA instead of the true "
                f"weights; pass callbacks=[SasshaCallback(), {name}(...), ...]"
            )
    return bool(found)


@contextmanager
def _unheard(pl_module: LightningModule) -> Iterator[None]:
    """For passes that are run again: ``log`` does nothing, and metrics of the module are as before afterwards."""
    listeners = [m for m in pl_module.modules() if isinstance(m, LightningModule)]
    metrics = [(m, _frozen(m)) for m in pl_module.modules() if isinstance(m, Metric)]
    for module in listeners:
        module.log = _ignore
    try:
        yield
    finally:
        for module in listeners:
            del module.log
        for metric, attributes in metrics:
            metric.__dict__.update(attributes)


@contextmanager
def _sharing(pl_module: LightningModule, share: float, note: Callable[..., None] | None = None) -> Iterator[None]:
    """Lets ``training_step`` of the module see a share of the batch that it is given, and ``note`` all of it before."""
    if share == 1.0 and note is None:
        yield
        return
    own = vars(pl_module).get("training_step")  # of a compiled module
    whole, least = pl_module.training_step, least_rows(pl_module)

    @wraps(whole)
    def training_step(batch: Any, *rest: Any) -> Any:
        if note is not None:
            note(batch, *rest)
        part = batch if share == 1.0 else first_rows(batch, share, caller="SasshaCallback", least=least)
        return whole(part, *rest)

    pl_module.training_step = training_step
    try:
        yield
    finally:
        if own is None:
            del pl_module.training_step
        else:
            pl_module.training_step = own


def _ignore(*args: Any, **kwargs: Any) -> None:
    """In place of ``log``."""


def _frozen(metric: Metric) -> dict[str, Any]:
    """Copies of what an update of a metric changes."""
    names = (*metric._defaults, "_computed", "_forward_cache", "_update_count")
    values = {name: getattr(metric, name) for name in names}
    return {name: value.clone() if isinstance(value, Tensor) else copy(value) for name, value in values.items()}
