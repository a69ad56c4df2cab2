"""Torch's own CUDA operators: queued on the current stream, and run by the CPU kernel on the device's memory.

:func:`install` comes before anything touches a CUDA tensor. Sizes and strides of results come from the meta kernel, so
queueing waits for nothing.
"""

from __future__ import annotations

import ctypes
import faulthandler
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .library import LAUNCH_FAILURE, PYTHON_OPERATOR, library, report

# What torch does without a kernel, or with the runtime alone: allocation, views, and reading a number.
KEPT = frozenset(
    (
        *("empty", "empty_strided", "resize_", "resize_as_", "set_", "set_data", "record_stream", "copy_"),
        *("pin_memory", "_pin_memory", "is_pinned", "is_set_to", "_has_compatible_shallow_copy_type"),
        *("alias", "detach", "view", "as_strided", "_reshape_alias", "unfold", "view_as_real", "view_as_complex"),
        *("lift", "lift_fresh", "_efficientzerotensor", "_local_scalar_dense"),
    )
)
# No registration of their own for CUDA, or one that would choose a kernel of cudnn.
ADDED = ("aten::convolution", "aten::_fused_sdp_choice")
MATH_ATTENTION = 0  # of torch.nn.attention.SDPBackend: in operators that the CPU has too

# ---- the queue ------------------------------------------------------------------------------------------------------

_waiting: dict[int, tuple[Callable[[], None], str, bool]] = {}  # by number: what to run, its name, whether to keep it
_numbers = iter(range(1, 1 << 62))


@PYTHON_OPERATOR
def _run(number: int) -> int:
    function, label, kept = _waiting[number]
    if not kept:
        del _waiting[number]
    try:
        function()
    except BaseException as error:
        traceback.print_exc()
        report(f"torch operator {label}: {error!r}")
        return LAUNCH_FAILURE
    return 0


def _stream() -> int:
    return torch._C._cuda_getCurrentRawStream(0)


def _is_capturing() -> bool:
    return bool(library().vgpu_is_capturing(_stream()))


def _enqueue(function: Callable[[], None], label: str) -> None:
    number = next(_numbers)
    _waiting[number] = (function, label, _is_capturing())  # a graph runs it again and again
    if library().vgpu_enqueue_python(_stream(), number, label.encode()):
        raise RuntimeError(f"virtual GPU: {label} failed; its errors tell why")


# ---- arguments ------------------------------------------------------------------------------------------------------


class Place:
    """Where a CUDA tensor lies. It keeps nothing alive: memory that is freed too early is seen."""

    __slots__ = ("address", "bytes", "dtype", "label", "shape", "stride")

    def __init__(self, tensor: Tensor, label: str) -> None:
        """Takes the place of a tensor; ``label`` is the operator that will use it."""
        self.address, self.dtype, self.label = tensor.data_ptr(), tensor.dtype, label
        self.shape, self.stride = tuple(tensor.shape), tuple(tensor.stride())
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        self.bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0

    def on_host(self) -> Tensor:
        """A CPU tensor over the bytes of the device."""
        if self.bytes == 0:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        bytes_at = library().vgpu_bytes_at(self.address, self.bytes, f"torch operator {self.label}".encode())
        if bytes_at == 0:
            raise RuntimeError(f"{self.label}: its memory is not allocated")
        buffer = (ctypes.c_char * self.bytes).from_address(bytes_at)
        return torch.frombuffer(buffer, dtype=self.dtype).as_strided(self.shape, self.stride)


def _is_wrapped_number(tensor: Tensor) -> bool:
    """Whether it is a Python number that torch made a tensor of, whose dtype does not count. A clone would not be."""
    if tensor.dim() or tensor.dtype not in (torch.float64, torch.int64):
        return False
    small = torch.zeros((), dtype=torch.float16 if tensor.dtype.is_floating_point else torch.int8, device="cpu")
    return torch.result_type(small, tensor) != tensor.dtype


_generators: dict[int, tuple[int, torch.Generator]] = {}


def _on_cpu(generator: torch.Generator) -> torch.Generator:
    """A generator of the CPU with the same seed; the same one until it is seeded anew."""
    if generator.device.type == "cpu":
        return generator
    seed = generator.initial_seed()
    known = _generators.get(id(generator))
    if known is None or known[0] != seed:
        known = _generators[id(generator)] = (seed, torch.Generator("cpu").manual_seed(seed))
    return known[1]


def _is_cuda(argument: object) -> bool:
    """Whether it is a tensor on the device, or the device."""
    if isinstance(argument, Tensor):
        return argument.is_cuda
    return isinstance(argument, torch.device) and argument.type == "cuda"


def _as_meta(argument: Any) -> Any:
    """An argument of the meta kernel, which tells the shapes of results."""
    if isinstance(argument, Tensor):
        if argument.is_cuda:
            return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device="meta")
        return argument if argument.dim() == 0 else argument.to("meta")
    return torch.device("meta") if _is_cuda(argument) else argument


def _layout(argument: Any) -> Any:
    """All that the meta kernel may know of an argument; the argument itself where that is all of it.

    Raises:
        TypeError: If it may know more, such as the value of a tensor on the host.
    """
    if not isinstance(argument, Tensor):
        hash(argument)
        return type(argument), argument
    if not argument.is_cuda:
        raise TypeError("a tensor on the host")
    return argument.shape, argument.stride(), argument.dtype, argument.is_conj(), argument.is_neg()


def _snapshot(argument: Any, label: str) -> Any:
    """An argument as it is now: places of the device, copies of what the host may change before it is used."""
    if isinstance(argument, Tensor):
        if argument.is_cuda:
            return Place(argument, label)
        return argument if _is_wrapped_number(argument) else argument.clone()
    if isinstance(argument, torch.Generator):
        return _on_cpu(argument)
    return torch.device("cpu") if _is_cuda(argument) else argument


def _on_host(argument: Any) -> Any:
    return argument.on_host() if isinstance(argument, Place) else argument


def _is_mixed(tensors: Sequence[Tensor]) -> bool:
    """Whether some are on the device, and others, that are no numbers, on the host."""
    return any(t.is_cuda for t in tensors) and any(t.dim() and not t.is_cuda for t in tensors)


# ---- operators ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class New:
    """A result that is new memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Given:
    """A result that is one of the arguments, by its place among them."""

    place: int


@dataclass(frozen=True)
class Outline:
    """What an operator returns, before it runs.

    Attributes:
        results: For each result a :class:`New`, a :class:`Given`, or what it is if it is no tensor.
        spec: How results are nested.
        shapes: What the arguments are resized to, by their places, such as those of ``out=``.
    """

    results: tuple[Any, ...]
    spec: Any
    shapes: dict[int, tuple[int, ...]]


class QueuedOperator:
    """An operator of torch that runs when the queue of its stream does."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        """Reads the schema."""
        self._op = op
        self.label = op._name.removeprefix("aten::")
        self._packet = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::"))
        self._is_tensor = [str(argument.type) == "Tensor" for argument in op._schema.arguments]
        names = [argument.name for argument in op._schema.arguments]
        self._outlines: dict[tuple[Any, ...], Outline] = {}
        self._is_random = torch.Tag.nondeterministic_seeded in op.tags or "generator" in names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Queues the operator and returns its results, which are memory that will be written."""
        if self.label.startswith("_foreach_") and _is_mixed(args[0]):
            return self._by_device(args, kwargs)
        # torch hands a wrapped number to Python as a number: the overload for scalars is the same then.
        number = any(t and isinstance(a, (int, float, complex)) for t, a in zip(self._is_tensor, args, strict=False))
        op = self._packet if number else self._op
        flat, spec = tree_flatten((list(args), kwargs))
        if self._is_random:
            return self._run_now(op, flat, spec, "it draws random numbers")
        try:
            outline = self._outline(op, flat, spec)
        except Exception as error:  # sizes that depend on data; a wrong argument is wrong on the CPU as well
            return self._run_now(op, flat, spec, f"the meta kernel says: {str(error)[:100]}")
        return self._queue(op, flat, spec, outline)

    def _outline(self, op: Any, flat: list[Any], spec: Any) -> Outline:
        """What the meta kernel says. It takes longer than all the rest, so it is asked once for the same layouts."""
        try:
            key = (op is self._op, str(spec), *map(_layout, flat))
        except TypeError:
            return self._ask(op, flat, spec)
        if key not in self._outlines:
            self._outlines[key] = self._ask(op, flat, spec)
        return self._outlines[key]

    def _ask(self, op: Any, flat: list[Any], spec: Any) -> Outline:
        with torch.device("cpu"):
            metas = [_as_meta(argument) for argument in flat]
            meta_args, meta_kwargs = tree_unflatten(metas, spec)
            results, results_spec = tree_flatten(op(*meta_args, **meta_kwargs))
        places = {id(meta): place for place, meta in enumerate(metas) if isinstance(meta, Tensor)}

        def outlined(meta: Any) -> Any:
            if not isinstance(meta, Tensor):
                return meta
            if id(meta) in places:
                return Given(places[id(meta)])
            return New(tuple(meta.shape), tuple(meta.stride()), meta.dtype)

        shapes = {
            place: tuple(meta.shape)
            for place, (argument, meta) in enumerate(zip(flat, metas, strict=True))
            if _is_cuda(argument) and isinstance(argument, Tensor) and argument.shape != meta.shape
        }
        return Outline(tuple(map(outlined, results)), results_spec, shapes)

    def _by_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
        """A list of tensors of host and device: torch takes one after the other then, here those of each are taken."""
        results: dict[int, Tensor] = {}
        for on_device in (False, True):
            at = [i for i, tensor in enumerate(args[0]) if tensor.is_cuda == on_device]
            mine = [[a[i] for i in at] if isinstance(a, (list, tuple)) and len(a) == len(args[0]) else a for a in args]
            if not on_device and any(map(_is_cuda, tree_flatten(mine)[0])):
                raise RuntimeError(f"virtual GPU: {self.label} of host tensors with those of the device is not there")
            results |= dict(zip(at, self._op(*mine, **kwargs) or (), strict=False))
        return [results[i] for i in sorted(results)] or None

    def _queue(self, op: Any, flat: list[Any], spec: Any, outline: Outline) -> Any:
        for place, shape in outline.shapes.items():
            flat[place].resize_(shape)

        def allocated(result: Any) -> Any:
            if isinstance(result, New):
                return torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="cuda")
            return flat[result.place] if isinstance(result, Given) else result

        results = [*map(allocated, outline.results)]
        pairs = zip(results, outline.results, strict=True)
        new = [Place(result, self.label) if isinstance(kind, New) else None for result, kind in pairs]
        arguments = [_snapshot(argument, self.label) for argument in flat]

        def run() -> None:
            with torch.no_grad(), torch.device("cpu"):
                args, kwargs = tree_unflatten([_on_host(argument) for argument in arguments], spec)
                for place, value in zip(new, tree_flatten(op(*args, **kwargs))[0], strict=True):
                    if place is not None and place.bytes:
                        self._write(place, value)

        _enqueue(run, self.label)
        return tree_unflatten(results, outline.spec)

    def _write(self, place: Place, value: Tensor) -> None:
        if value.dtype != place.dtype or tuple(value.shape) != place.shape:
            found, expected = f"{value.dtype} {tuple(value.shape)}", f"{place.dtype} {place.shape}"
            raise RuntimeError(f"{self.label}: the CPU kernel gives {found}, the meta kernel {expected}")
        place.on_host().copy_(value)

    def _run_now(self, op: Any, flat: list[Any], spec: Any, why: str) -> Any:
        """Waits for the stream and runs: sizes that depend on data, random numbers."""
        if _is_capturing():
            raise RuntimeError(f"virtual GPU: {self.label} can't be captured: {why}")
        library().vgpu_flush(_stream())
        with torch.no_grad(), torch.device("cpu"):
            on_host = [_on_host(_snapshot(argument, self.label)) for argument in flat]
            args, kwargs = tree_unflatten(on_host, spec)
            outs = op(*args, **kwargs)
        given = {id(host): argument for host, argument in zip(on_host, flat, strict=True) if _is_cuda(argument)}

        def on_device(out: Any) -> Any:
            if not isinstance(out, Tensor):
                return out
            if id(out) in given:
                return given[id(out)]
            result = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="cuda")
            Place(result, self.label).on_host().copy_(out)
            return result

        return tree_map(on_device, outs)


# ---- installation ---------------------------------------------------------------------------------------------------


def _overload(name: str) -> torch._ops.OpOverload | None:
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)


def _makes_view(op: torch._ops.OpOverload) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def _copy_operator() -> Callable[..., Tensor]:
    """``copy_``: torch's own, by the runtime, unless it would take a kernel."""
    original = torch.library.get_kernel("aten::copy_", "CUDA")
    by_kernel = QueuedOperator(torch.ops.aten.copy_.default)
    is_dense = torch.ops.aten.is_non_overlapping_and_dense

    def is_plain(to: Tensor, source: Tensor) -> bool:
        if to.dtype != source.dtype or to.shape != source.shape or source.is_conj():
            return False
        if to.is_contiguous() and source.is_contiguous():
            return True
        return to.stride() == source.stride() and is_dense(to) and is_dense(source)

    def copy_(keys: Any, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not (to.is_cuda and source.is_cuda) or is_plain(to, source):
            return original.call_boxed(keys, to, source, non_blocking)
        if to.numel():
            by_kernel(to, source, non_blocking)
        return to

    return copy_


@cache
def install() -> torch.library.Library:
    """Replaces the CUDA kernels of all aten operators that this torch has. The replacement lasts as long as it."""
    faulthandler.enable()
    library().vgpu_watch_host_accesses()
    library().vgpu_set_python(_run)
    torch.backends.cudnn.enabled = False  # its operators have no twin on the CPU
    replaced = torch.library.Library("aten", "IMPL")
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every replacement
        for name in sorted({*(name for name in names if name.startswith("aten::")), *ADDED}):
            op, short = _overload(name), name.removeprefix("aten::")
            if op is None or short.partition(".")[0] in KEPT or _makes_view(op):
                continue
            chosen = (lambda *_, **__: MATH_ATTENTION) if short == "_fused_sdp_choice" else QueuedOperator(op)
            replaced.impl(short, chosen, "CUDA")
        replaced.impl("copy_", _copy_operator(), "CUDA", with_keyset=True)
    return replaced
