"""SASSHA in ``transformers.Trainer``: the trainer's own passes are the first gradient of a step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback

from .._core.optimizer import FusedOptimizer
from ..msassha import MSASSHA
from .replay import Batch, Replay, TrueWeights, numbers
from .shares import check_use, checked_share, first_rows, least_rows, taken_share

__all__ = ["SasshaMixin", "SasshaTrainer"]

_Trainer: Any = Trainer if TYPE_CHECKING else object


class SasshaMixin(_Trainer):  # type: ignore[misc]
    """Gives any subclass of ``transformers.Trainer`` the steps of SASSHA and its family.

    ``class MyTrainer(SasshaMixin, Seq2SeqTrainer): ...`` is a trainer whose optimizer may be any of this package. Where
    the trainer steps, its gradients are those at x; passes at x + ε and at probes run ``training_step`` again on all
    micro-batches of ``gradient_accumulation_steps``, each with the random numbers of its first pass.

    - ``max_grad_norm`` of the training arguments becomes that of the optimizer, which clips the gradient at x + ε. The
      logged ``grad_norm`` is that at x, of this process.
    - M-SASSHA's true weights are what is evaluated, saved and left at the end.
    - Logs get ``opt.stats`` under ``sassha/``.

    Args:
        *args: Of the trainer.
        ascent_share: Share of the rows of every micro-batch, such as 1/4, that the ascent is taken from. The trainer's
            own pass is then on these rows, and so are the logged ``loss`` and ``grad_norm``.
        hessian_share: The same for the products of refreshes.
        **kwargs: Of the trainer.
    """

    optimizer_cls_and_kwargs: Any
    _replay: Replay | None = None
    _handles: list[Any]

    def __init__(
        self, *args: Any, ascent_share: float | None = None, hessian_share: float | None = None, **kwargs: Any
    ) -> None:
        """Checks the shares; see the class."""
        name = type(self).__name__
        self.ascent_share = checked_share("ascent_share", ascent_share, caller=name)
        self.hessian_share = checked_share("hessian_share", hessian_share, caller=name)
        super().__init__(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        """Builds the optimizer; its learning rate is that of the training arguments unless ``lr`` says otherwise."""
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            raise TypeError(
                f"{type(self).__name__}: no optimizer was given (args.optim={str(self.args.optim)!r} is not one of "
                "sassha_fast); pass optimizer_cls_and_kwargs=(SASSHA, {'rho': 0.1, ...}) or optimizers=(opt, None)"
            )
        if self.optimizer_cls_and_kwargs is not None:
            kind, options = self.optimizer_cls_and_kwargs
            self.optimizer_cls_and_kwargs = kind, {"lr": self.args.learning_rate, **options}
        return super().create_optimizer(*args, **kwargs)  # type: ignore[no-any-return]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """See ``transformers.Trainer.train``. Afterwards the model has the true weights."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._disconnect()

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """See ``transformers.Trainer.training_step``; remembers how to do it again."""
        replay = self._connected(model)
        whole, batch = partial(super().training_step, model), Batch(inputs, type(self).__name__)

        def run(share: float) -> Any:
            inputs = batch.again()
            if share == 1.0:
                return whole(inputs, *args, **kwargs)
            name, least = type(self).__name__, least_rows(model)
            taken = taken_share(inputs, share, caller=name, least=least)

            def scaled(items: Any) -> Any:
                """What a sum over tokens is divided by, those of all micro-batches: for as many rows as are taken."""
                return None if items is None else items * taken

            part = first_rows(inputs, share, caller=name, least=least)
            return whole(part, *map(scaled, args), **{key: scaled(value) for key, value in kwargs.items()})

        replay.begin(run)
        try:
            with replay.unsynced(), replay.forward_context(), replay.backward_context():
                loss = run(replay.first_share)
        except BaseException:  # such as lack of memory, after which auto_find_batch_size tries smaller batches
            replay.clear()
            raise
        replay.ran(loss)
        return loss  # type: ignore[no-any-return]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """See ``transformers.Trainer.log``. Logs of training get the statistics."""
        if self._replay is not None and "loss" in logs:
            logs = {**logs, **numbers(self._replay.opt.stats)}
        super().log(logs, *args, **kwargs)

    def _clip_grad_norm(self, model: Any) -> Tensor:
        """The norm alone: the gradient at x is not the one to clip, and the optimizer clips the other one itself."""
        return get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

    # ---- connection to the optimizer ----------------------------------------------------------------------------

    def _connected(self, model: Any) -> Replay:
        """What collects the micro-batches of the optimizer, which exists once training has begun."""
        opt = self.optimizer
        while isinstance(opt, AcceleratedOptimizer):
            opt = opt.optimizer
        if self._replay is not None and self._replay.opt is opt:
            return self._replay
        self._check(opt)
        clip = self.args.max_grad_norm
        if clip and clip > 0:
            if opt.max_grad_norm not in (None, clip):
                raise ValueError(
                    f"{type(self).__name__}: max_grad_norm is {clip} in the training arguments and {opt.max_grad_norm} "
                    f"in {type(opt).__name__}; give one of them (0 turns that of the training arguments off)"
                )
            opt.max_grad_norm = float(clip)
        check_use(opt, self.ascent_share, self.hessian_share, caller=type(self).__name__)
        replay = self._replay = Replay(opt, self.ascent_share, self.hessian_share)
        self._handles = [opt.register_step_pre_hook(self._before_step)]
        self._listen(_First(replay))
        if isinstance(opt, MSASSHA):  # before attach(), whose hook warns of perturbed weights
            self._handles += TrueWeights(opt, self.model).handles
        if opt.model is None:
            opt.attach(model)
        return replay

    def _check(self, opt: Optimizer) -> None:
        """Raises where the trainer and the optimizer can't work together."""
        name = type(self).__name__
        if not isinstance(opt, FusedOptimizer):
            raise TypeError(
                f"{name}: the optimizer is {type(opt).__name__}, expected one of sassha_fast; pass "
                "optimizer_cls_and_kwargs=(SASSHA, {...}), or use transformers.Trainer"
            )
        if self.accelerator.scaler is not None:
            raise ValueError(
                f"{name}: fp16=True scales losses with a GradScaler, which steps without the passes at x + ε; use "
                "bf16=True, or a loop of your own with opt.step(closure, scaler=accelerator.scaler)"
            )
        if not hasattr(super(), "_clip_grad_norm"):
            raise RuntimeError(
                f"{name}: this version of transformers clips gradients where it can't be left out; install "
                "transformers 5.22 or later"
            )

    def _listen(self, *first: TrainerCallback) -> None:
        """Puts a callback of ours in place of the one that is there."""
        others = [callback for callback in self.callback_handler.callbacks if not isinstance(callback, _First)]
        self.callback_handler.callbacks[:] = [*first, *others]

    def _disconnect(self) -> None:
        replay, self._replay = self._replay, None
        if replay is None:
            return
        if isinstance(replay.opt, MSASSHA):
            replay.opt.eval()
        for handle in self._handles:
            handle.remove()
        self._listen()

    def _before_step(self, opt: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gives the trainer's ``step()`` the passes that it does not know of."""
        replay = self._replay
        if replay is None or not replay.parts:
            return None
        replay.parts[-1].check_grads(type(self).__name__, "on_pre_optimizer_step")
        rest = {key: value for key, value in kwargs.items() if key != "closure"}
        closures, others = replay.closures()
        return (args[0], closures), {**rest, **others}


class _First(TrainerCallback):  # type: ignore[misc]
    """Comes before all other callbacks: those that change gradients then would change them to no effect."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Takes down the gradients."""
        if self.replay.parts:
            self.replay.parts[-1].note_grads()


class SasshaTrainer(SasshaMixin, Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` for optimizers of this package::

        trainer = SasshaTrainer(
            model, TrainingArguments(...), train_dataset=data, optimizer_cls_and_kwargs=(SASSHA, {"rho": 0.1})
        )
        trainer.train()

    See :class:`SasshaMixin`.
    """
