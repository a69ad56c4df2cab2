"""Per-tensor questions that are asked of every tensor at every step, as C functions to ``map`` over a list.

Properties come as ``attrgetter``, which asks a tensor a fifth faster than the descriptor's ``__get__`` does. Of methods
it would have to make a bound one first.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from functools import cache, wraps
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

P = ParamSpec("P")
R = TypeVar("R")

address = torch._C.TensorBase.data_ptr
is_contiguous = torch._C.TensorBase.is_contiguous
is_neg = torch._C.TensorBase.is_neg
numel = torch._C.TensorBase.numel  # a method, which costs half of what a property does
dtype: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
device_of: Callable[[Tensor], torch.device] = attrgetter("device")
grad: Callable[[Tensor], Tensor | None] = attrgetter("grad")
version: Callable[[Tensor], int] = attrgetter("_version")
requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")
record_stream = torch._C.TensorBase.record_stream
storage_of: Callable[[Tensor], Any] = torch._C.TensorBase.untyped_storage
storage_address: Callable[[Any], int] = attrgetter("_cdata")
storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
is_resizable: Callable[[Any], bool] = torch._C.StorageBase.__dict__["resizable"]
# Of the tensor itself, by graphs that have saved it too, where torch can tell.
uses: Callable[[Tensor], int] = getattr(torch._C.TensorBase, "_use_count", lambda tensor: 0)


def resolved(tensor: Tensor) -> Tensor:
    """A tensor whose memory holds its values: not their opposites under torch's negative bit, nor nothing, as of zeros.

    Kernels read memory, and torch hands an operator a copy instead that is gone when it returns.
    """
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if not tensor.is_neg():
        return tensor
    with torch.set_grad_enabled(tensor.requires_grad):  # a refresh differentiates it
        return tensor.resolve_neg()


def clear_grads(params: Iterable[Tensor]) -> None:
    """Leaves parameters without a gradient."""
    any(map(setattr, params, repeat("grad"), repeat(None)))  # for all p: p.grad = None


def noted(gradient: Tensor | None) -> tuple[Tensor, int] | None:
    """A gradient with its version, to ask later whether it :func:`is_changed`."""
    return None if gradient is None else (gradient, gradient._version)


def is_changed(gradient: Tensor | None, before: tuple[Tensor, int] | None) -> bool:
    """Whether a gradient is not what was noted: changed in place, or in other memory. A detached one is the same."""
    if gradient is None or before is None:
        return (gradient is None) != (before is None)
    return gradient.data_ptr() != before[0].data_ptr() or gradient._version != before[1]


def stream_of(device: torch.device) -> int:
    """The current stream of a GPU, by its address."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))


@cache
def _silence_records() -> None:
    """Has torch's warning of records that change nothing where nobody sees it, as it comes once in a process.

    Only the allocator knows which stream a tensor is from, and that of ``cudaMallocAsync`` warns if it is this one.
    """
    if torch.cuda.is_available() and torch.cuda.get_allocator_backend() == "cudaMallocAsync":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.empty(1, device="cuda").record_stream(torch.cuda.current_stream())


def used_here(tensors: Iterable[Tensor | None]) -> None:
    """Tells torch's allocator that the current stream works on tensors that are dropped next.

    They may come from another stream, as gradients of a pass there do, and their memory would be handed out there
    before this stream has read it. For tensors of this stream it is nothing to torch.
    """
    given = (tensor for tensor in tensors if tensor is not None)
    first = next(given, None)
    if first is None or not (first.is_cuda or torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return  # all are on the CPU, most likely, and there is no stream to wait for anyway
    there = [first, *given]
    devices = set(map(device_of, there))
    _silence_records()
    streams = {device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"}
    if len(devices) == len(streams) == 1:
        any(map(record_stream, there, repeat(*streams.values())))  # for all of them
        return
    for tensor in there:
        if tensor.is_cuda:
            tensor.record_stream(streams[tensor.device])


_tracer: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def _idle_counts() -> tuple[int, int]:
    param = torch.zeros(1, requires_grad=True, device="cpu")
    param.grad = torch.zeros(1, device="cpu")
    grads = [p.grad for p in (param,) if p.grad is not None]
    return next(map(sys.getrefcount, grads)), next(map(uses, grads))


# sys.getrefcount and ``uses``, mapped over a list, of a gradient that nobody else holds
IDLE_REFCOUNT, IDLE_USES = _idle_counts()


def is_own(tensor: Tensor) -> bool:
    """Whether nobody else holds the memory of a tensor: no view, no parameter, no array of NumPy."""
    if tensor.layout is not torch.strided:
        return True  # which another error names
    return are_own([tensor])


def are_own(tensors: list[Tensor]) -> bool:
    """Whether nobody but the tensors themselves holds the memory of any of them.

    It is asked before every ascent, as gradients may come from elsewhere at any step.
    """
    try:
        storages = list(map(storage_of, tensors))
    except RuntimeError:  # one has none, such as a sparse one
        return False
    uses = map(storage_uses, map(storage_address, storages))  # the tensor's, and that of ``storages``
    return max(uses, default=0) <= 2 and all(map(is_resizable, storages))


def no_grad(method: Callable[P, R]) -> Callable[P, R]:
    """``torch.no_grad`` for methods that are called every step: the same switch with a tenth of the overhead.

    Compiled code calls such a method as it is, like those of ``torch.optim`` under the same decorator: the passes are
    fused already, so there is nothing to gain by tracing them.
    """

    @wraps(method)
    def without_grad(*args: P.args, **kwargs: P.kwargs) -> R:
        before = torch.is_grad_enabled()
        try:
            try:
                torch._C._set_grad_enabled(False)
                return method(*args, **kwargs)
            finally:
                torch._C._set_grad_enabled(before)
        except BaseException:  # an interrupt may have come before the line above
            torch._C._set_grad_enabled(before)
            raise

    untraced: Callable[P, R] = torch._disable_dynamo(without_grad)  # type: ignore[attr-defined]

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling() or _tracer() is not None:
            return untraced(*args, **kwargs)
        return without_grad(*args, **kwargs)  # nobody traces: the switch that keeps tracers out costs microseconds

    return call


def ranged(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Shows a method under a readable name in ``torch.profiler`` and NVTX, and costs next to nothing without them."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def shown(*args: P.args, **kwargs: P.kwargs) -> R:
            if not torch._C._autograd._profiler_enabled():
                return method(*args, **kwargs)
            with torch.profiler.record_function(f"SASSHA.{name}"):
                return method(*args, **kwargs)

        return shown

    return decorate


def hooked(on_error: Callable[[Any], None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """What torch puts around ``step``, hooks and a range in profilers, where there is a hook or a profiler.

    Its range takes tens of microseconds also without a profiler, as long as a pass over a small network does. The
    class has to keep torch from framing the method too (``Optimizer._patch_step_function``).

    Args:
        on_error: Called with the optimizer if a hook or the step raises.
    """

    def decorate(step: Callable[P, R]) -> Callable[P, R]:
        framed = Optimizer.profile_hook_step(step)

        @wraps(step)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            opt: Any = args[0]
            if getattr(type(opt).step, "hooked", False):  # a subclass has a step of its own, which torch has framed
                return step(*args, **kwargs)
            is_watched = (
                opt._optimizer_step_pre_hooks
                or torch_optimizer._global_optimizer_pre_hooks
                or torch._C._autograd._profiler_enabled()
            )
            try:
                if is_watched:
                    return framed(*args, **kwargs)
                result = step(*args, **kwargs)
                others = torch_optimizer._global_optimizer_post_hooks
                for hook in chain(opt._optimizer_step_post_hooks.values(), others.values()):
                    hook(opt, args, kwargs)
            except BaseException:
                on_error(opt)
                raise
            return result

        return call

    return decorate


def weights_moved(params: list[Tensor]) -> None:
    """Tells autograd that weights changed, and autocast that its copies of them are stale."""
    torch._C._increment_version(params)  # what torch.autograd.graph.increment_version calls
    torch.clear_autocast_cache()
