"""Contexts in which several passes of one step see the same network: random numbers, BatchNorm, double backward."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

__all__ = [
    "KINKED",
    "CreateGraph",
    "ModelContexts",
    "RandomState",
    "RunningStatistics",
    "frozen_batchnorm",
    "refresh_context",
]


KINKED = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.Hardtanh, nn.Hardswish)  # their derivative jumps


class CreateGraph(TorchFunctionMode):
    """Adds ``create_graph=True`` to every ``loss.backward()``, so that closures need not know of refreshes."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See ``torch.overrides``."""
        kwargs = kwargs or {}
        if func is not Tensor.backward:
            return func(*args, **kwargs)
        with warnings.catch_warnings():  # of the cycle that a graph makes, which the optimizer cuts
            warnings.filterwarnings("ignore", message="Using backward")
            return func(*args, **{**kwargs, "create_graph": True})


class RandomState:
    """The state of the random number generators of the CPU and of the devices that parameters are on."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """Remembers the present state."""
        self.cpu = torch.get_rng_state()
        self.devices = {
            device: torch.get_device_module(device).get_rng_state(device)
            for device in set(devices)
            if device.type not in ("cpu", "meta")
        }

    def restore(self) -> None:
        """Goes back to the state that was remembered."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.get_device_module(device).set_rng_state(state, device)


def _moving_norms(model: nn.Module) -> list[_NormBase]:
    """Layers whose running statistics a forward pass moves."""
    return [m for m in model.modules() if isinstance(m, _NormBase) and m.training and m.track_running_stats]


class RunningStatistics:
    """Copies of the running statistics of a model, to go back to."""

    def __init__(self, norms: Iterable[_NormBase]) -> None:
        """Copies the statistics of these layers."""
        self.buffers = [buffer for module in norms for buffer in module.buffers(recurse=False)]
        self.copies = [buffer.clone() for buffer in self.buffers]

    @classmethod
    def of(cls, model: nn.Module) -> RunningStatistics:
        """Copies all statistics of a model that a forward pass would move."""
        return cls(_moving_norms(model))

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the copies back."""
        for buffer, copy in zip(self.buffers, self.copies, strict=True):
            buffer.copy_(copy)


@contextmanager
def frozen_batchnorm(model: nn.Module) -> Iterator[None]:
    """Lets BatchNorm of every kind normalise by the batch, as in training, without moving its running statistics."""
    norms = _moving_norms(model)
    batch_norms = [module for module in norms if isinstance(module, _BatchNorm)]
    others = RunningStatistics(module for module in norms if not isinstance(module, _BatchNorm))
    for module in batch_norms:  # in training they then use the batch and leave the buffers alone
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in batch_norms:
            module.track_running_stats = True
        others.restore()


@contextmanager
def refresh_context(model: nn.Module | None = None) -> Iterator[None]:
    """Everything that has a double backward: eager execution, mathematical attention, RNNs without cuDNN.

    Compiled code, flash attention and cuDNN's RNNs have none.

    Args:
        model: The network, if it is known. cuDNN stays on for one without RNNs.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if model is None or any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


class ModelContexts(Optimizer):
    """What an optimizer offers to closures and hand-written loops around the passes of a step."""

    hvp: str
    _random: RandomState | None  # of the step's first pass, for replay_rng
    _model: nn.Module | None

    @property
    def _name(self) -> str:
        """What errors call the optimizer."""
        return type(self).__name__

    def attach(self, model: nn.Module) -> None:
        """Names the model that closures run: its BatchNorm statistics then move once per step.

        Not part of checkpoints and copies; call it again on a new optimizer.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"{self._name}.attach: model is {type(model).__name__}, expected a torch.nn.Module")
        self._model = model
        kinked = sorted({type(module).__name__ for module in model.modules() if isinstance(module, KINKED)})
        if kinked and self.hvp != "exact":
            warnings.warn(
                f"{self._name}.attach: finite differences see curvature at the kinks of {', '.join(kinked)} that exact "
                "products ignore; D comes out 1.2 to 2 times larger. Tune lr for it, or use hvp='exact'",
                stacklevel=2,
            )

    def frozen_batchnorm(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """For the second pass of hand-written loops: BatchNorm uses the batch and keeps its running statistics."""
        target = self._model if model is None else model
        if target is None:
            raise ValueError(f"{self._name}.frozen_batchnorm: no model is known; pass it, or call attach(model) before")
        return frozen_batchnorm(target)

    def refresh_context(self) -> AbstractContextManager[None]:
        """For all passes of a refresh step in hand-written loops: only operations that have a double backward."""
        return refresh_context(self._model)

    @contextmanager
    def replay_rng(self) -> Iterator[None]:
        """For both passes of hand-written loops: the second one draws the random numbers (dropout) of the first."""
        if self._random is None:
            self._random = RandomState(p.device for group in self.param_groups for p in group["params"])
        else:
            self._random.restore()
        yield
