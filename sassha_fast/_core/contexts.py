"""Contexts in which several passes of one step see the same network: random numbers, BatchNorm, double backward."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode

R = TypeVar("R")
MakesContext: TypeAlias = "Callable[[], AbstractContextManager[Any]]"

KINKED = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.Hardtanh, nn.Hardswish)  # their derivative jumps


BACKWARD = ("gradient", "retain_graph", "create_graph", "inputs")  # arguments of Tensor.backward


class CreateGraph(TorchFunctionMode):
    """Adds ``create_graph=True`` to every ``loss.backward()``, so that closures need not know of refreshes."""

    def __exit__(self, *error: Any) -> None:
        """Leaves it, unless an interrupt within torch's own use of modes has taken it away."""
        depth = torch._C._len_torch_function_stack()
        if depth and torch._C._get_function_stack_at(depth - 1) is self:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the function."""
        kwargs = kwargs or {}
        if func is not Tensor.backward:
            return func(*args, **kwargs)

        given = {**dict(zip(BACKWARD, args[1:], strict=False)), **kwargs, "create_graph": True}
        given["retain_graph"] = given.get("retain_graph") or None  # a graph that is to be differentiated again is kept

        def with_graph() -> Any:
            warnings.filterwarnings("ignore", message="Using backward")  # of a cycle, which the optimizer cuts
            return func(args[0], **given)

        return within([warnings.catch_warnings], with_graph)


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

    def track(value: bool) -> None:
        for module in batch_norms:  # without statistics to track they use the batch and leave the buffers alone
            module.track_running_stats = value

    try:
        try:
            track(False)
            yield
        finally:
            track(True)
    except BaseException:  # of the pass, or an interrupt at any line here
        try:
            track(True)
        finally:
            others.restore()
        raise
    others.restore()


class Switch:
    """A context of the whole process that threads share: the first one in enters it, the last one out leaves it.

    Each on its own would put back what it found, and so what another had switched.
    """

    def __init__(self, make: MakesContext) -> None:
        """Takes what makes the context."""
        self._make = make
        self._lock = threading.RLock()  # which only its owner can release
        self._users: set[object] = set()
        self._entered: AbstractContextManager[Any] | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        """The context, for one user."""
        user = object()
        try:
            self._enter(user)
            yield
            self._leave(user)
        except BaseException:  # of the pass, or an interrupt at any line here
            self._leave(user)
            raise

    def _enter(self, user: object) -> None:
        def enter() -> None:
            self._users.add(user)
            if self._entered is None:
                # In one line, so that what is switched, by making it or by entering it, is known to be.
                self._entered = ((made := self._make()).__enter__(), made)[1]

        self._alone(enter)

    def _leave(self, user: object) -> None:
        """May be called twice."""

        def leave() -> None:
            self._users.discard(user)
            if not self._users and self._entered is not None:
                self._entered.__exit__(None, None, None)
                self._entered = None

        self._alone(leave)

    def _alone(self, change: Callable[[], None]) -> None:
        """Calls a function while no other thread does.

        Not by ``with self._lock``: an interrupt that arrives when its block is done keeps the lock, and every other
        thread then waits for ever.
        """
        try:
            self._lock.acquire()
            change()
            self._lock.release()
        except BaseException:
            with suppress(RuntimeError):  # it is not ours yet, or no longer
                self._lock.release()
            raise


_MATH_ATTENTION = Switch(partial(sdpa_kernel, SDPBackend.MATH))
_EAGER = Switch(lambda: torch.compiler.set_stance("force_eager"))
_NO_CUDNN = Switch(partial(torch.backends.cudnn.flags, enabled=False))


def refresh_contexts(model: nn.Module | None = None) -> list[MakesContext]:
    """What makes the contexts in which everything has a double backward.

    These are eager execution, mathematical attention and RNNs without cuDNN. Compiled code, flash attention and
    cuDNN's RNNs have none.

    Args:
        model: The network, if it is known. cuDNN stays on for one without RNNs.
    """
    contexts: list[MakesContext] = [_MATH_ATTENTION.on]
    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and importing it takes seconds
        contexts.append(_EAGER.on)
    if model is None or any(isinstance(module, nn.RNNBase) for module in model.modules()):
        contexts.append(_NO_CUDNN.on)
    return contexts


@contextmanager
def refresh_context(model: nn.Module | None = None) -> Iterator[None]:
    """All contexts of :func:`refresh_contexts`."""
    stack = ExitStack()
    try:
        for make in refresh_contexts(model):
            stack.enter_context(make())
        yield
        stack.close()
    except BaseException:  # of the pass, or an interrupt at any line here
        stack.close()
        raise


def within(contexts: Iterable[MakesContext], run: Callable[[], R]) -> R:
    """Runs a function within contexts, which are made here, and leaves them whatever interrupts it.

    A ``with`` statement does not: an interrupt that arrives when its block is done finds nobody to leave the context.
    """
    stack, modes = ExitStack(), torch._C._len_torch_function_stack()
    try:
        for make in contexts:
            stack.enter_context(make())
        result = run()
        stack.close()
        return result
    except BaseException:
        try:
            stack.__exit__(*sys.exc_info())  # what is left already is not left again
        finally:
            stack.close()  # which a second interrupt may have kept it from
            # One that was entered as the interrupt arrived is on torch's stack, but not yet on ours.
            while torch._C._len_torch_function_stack() > modes:
                torch._C._pop_torch_function_stack()
        raise
