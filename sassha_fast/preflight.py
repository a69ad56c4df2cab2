"""A look at a model before training: which of its modules have a double backward, which exact products need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ._core.contexts import KINKED, RandomState, RunningStatistics, frozen_batchnorm, refresh_context

__all__ = ["ModelReport", "check_model"]


@dataclass(frozen=True)
class ModelReport:
    """What :func:`check_model` found. ``print(report)`` says what to do.

    Attributes:
        without: Modules without a double backward, by name, with torch's reason.
        stubborn: Those among them that have none inside ``refresh_context()`` either.
        kinked: Modules whose second derivative jumps (ReLU and its kind).
        sparse: Modules that give sparse gradients, which no optimizer of this package takes.
    """

    without: dict[str, str] = field(default_factory=dict)
    stubborn: dict[str, str] = field(default_factory=dict)
    kinked: list[str] = field(default_factory=list)
    sparse: list[str] = field(default_factory=list)

    @property
    def exact_works(self) -> bool:
        """Whether ``hvp="exact"`` works with closures, or with ``refresh_context()`` in hand-written loops."""
        return not self.stubborn and not self.sparse

    def __str__(self) -> str:
        """The findings in words."""
        lines = [f"{name}: no double backward ({reason})" for name, reason in self.without.items()]
        lines += [f"{name}: sparse gradients; construct it with sparse=False" for name in self.sparse]
        if not lines:
            lines.append("Every module has a double backward: hvp='exact' works everywhere.")
        elif self.sparse and not self.without:
            pass
        elif not self.stubborn:
            lines.append(
                "hvp='exact' works with opt.step(closure), and in hand-written loops with all passes of a refresh step "
                "inside opt.refresh_context()."
            )
        else:
            lines.append(f"Even in refresh_context() there is none for {sorted(self.stubborn)}: take another "
                         "implementation of them, or hvp='finite_difference'.")  # fmt: skip
        if self.kinked:
            lines.append(
                f"{len(self.kinked)} modules have kinks, such as {self.kinked[0]!r}: hvp='finite_difference' sees "
                "curvature there that autograd ignores, so its D comes out larger."
            )
        return "\n".join(lines)


def check_model(model: nn.Module, *sample: Any) -> ModelReport:
    """Runs a model once and differentiates each of its modules twice, alone.

    Weights, gradients, BatchNorm statistics and random numbers are left as they were.

    Args:
        model: The network, in the mode and on the device in which it will be trained.
        *sample: What its ``forward`` takes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"check_model: model is {type(model).__name__}, expected a torch.nn.Module")
    random = RandomState(p.device for p in model.parameters())
    statistics = RunningStatistics.of(model)
    calls: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
    hooks = [
        module.register_forward_pre_hook(_recorder(calls, name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            model(*sample)
    finally:
        for hook in hooks:
            hook.remove()
    try:
        with frozen_batchnorm(model):
            without = _failures(calls)
            with refresh_context(model):
                stubborn = {name: why for name, why in _failures(calls).items() if name in without}
    finally:
        random.restore()
        statistics.restore()
    kinked = [name for name, module in model.named_modules() if isinstance(module, KINKED)]
    sparse = [name or type(m).__name__ for name, m in model.named_modules() if getattr(m, "sparse", False) is True]
    return ModelReport(without, stubborn, kinked, sparse)


def _recorder(calls: dict[str, Any], name: str) -> Any:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(name, (module, args, kwargs))

    return record


def _failures(calls: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]) -> dict[str, str]:
    """The modules that fail although all modules inside them pass, with the reason."""
    failing: dict[str, str] = {}
    for name in sorted(calls, key=lambda n: -n.count(".") if n else 1):  # the innermost first, the model itself last
        inside = f"{name}." if name else ""
        if any(other.startswith(inside) for other in failing):
            continue
        reason = _why_not(*calls[name])
        if reason is not None:
            failing[name or type(calls[name][0]).__name__] = reason
    return failing


def _why_not(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """None if the module can be differentiated twice, else torch's reason."""
    with torch.enable_grad():
        args = tuple(_leaf(a) for a in args)
        inputs = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        inputs += [p for p in module.parameters() if p.requires_grad]
        outputs = module(*args, **kwargs)
        loss = sum((o.double() ** 2).sum() for o in _tensors(outputs) if o.requires_grad)
        if not inputs or not isinstance(loss, Tensor):
            return None
        if any(node.name() == "CheckpointFunctionBackward" for node in _graph((loss,))):
            return "activation checkpointing with use_reentrant=True: gradients have no graph; use use_reentrant=False"
        try:
            first = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
            if _refuses(first):
                return "marked once_differentiable: autograd would take its second derivative for zero"
            second = sum((g.double() ** 2).sum() for g in first if g is not None and g.requires_grad)
            if isinstance(second, Tensor):
                torch.autograd.grad(second, inputs, allow_unused=True)
        except (RuntimeError, NotImplementedError) as error:
            return str(error).splitlines()[0]
    return None


def _refuses(grads: tuple[Tensor | None, ...]) -> bool:
    """Whether the graph of the gradients has a node that only raises. Autograd may pass by it in silence."""
    return any(node.name().endswith("::Error") for node in _graph(grads))


def _graph(tensors: tuple[Tensor | None, ...]) -> Iterator[Any]:
    """All nodes of the graph of some tensors."""
    waiting = [t.grad_fn for t in tensors if t is not None and t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        following = {edge[0] for edge in node.next_functions if edge[0] is not None} - seen
        seen |= following
        waiting += following


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []
