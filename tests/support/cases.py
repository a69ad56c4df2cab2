"""The tensor lists that the passes of every backend are tested on, and the comparison of bits."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from sim import SimPasses
from torch import Tensor

from sassha_fast._passes.cpu import CpuPasses
from sassha_fast._passes.cuda import CudaPasses
from sassha_fast._passes.foreach import ForeachPasses
from sassha_fast._passes.reference import Members, Passes, Products, Stepped
from sassha_fast._passes.triton import TritonPasses
from sassha_fast.formats import FULL, Format
from sassha_fast.reference import compute_dtype

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
REDUCED = (torch.bfloat16, torch.float16)
DEVICE = os.environ.get("SASSHA_TEST_DEVICE", "cpu")  # see conftest.py
PASSES: dict[str, type[Passes]] = {"reference": Passes, "foreach": ForeachPasses}
if DEVICE == "cpu":
    PASSES |= {"native": CpuPasses, "cuda_sim": SimPasses, "triton": TritonPasses}
else:
    PASSES |= {"native": CudaPasses, "triton": TritonPasses}

# ---- comparison ---------------------------------------------------------------------------------------------------


def bits(tensor: Tensor) -> Tensor:
    """The elements in logical order as integers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def assert_same_bits(actual: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor], what: str = "it") -> None:
    """Equal dtype, shape and bits: −0 is not +0. A NaN equals every NaN, as its payload is nobody's promise."""
    if not isinstance(actual, Tensor):
        assert len(actual) == len(expected), f"{what}: {len(actual)} tensors, expected {len(expected)}"
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(a, e, f"{what}[{i}]")
        return
    assert isinstance(expected, Tensor)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    wrong = (bits(actual) != bits(expected)) & ~(actual.isnan() & expected.isnan())
    if wrong.any():
        first = wrong.flatten().nonzero()[0]
        a, e = (t.flatten()[first].item() for t in (actual, expected))
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ, first {int(first)}: {a!r}, expected {e!r}"
        )


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies with the same strides where the tensors are dense."""
    return [t.clone() for t in tensors]


# ---- cases --------------------------------------------------------------------------------------------------------


class Spec(NamedTuple):
    """One tensor of a case. A dtype of None is the dtype under test."""

    shape: tuple[int, ...]
    layout: str = "contiguous"
    dtype: torch.dtype | None = None


# Whose boundary a case probes, where it is not everybody's.
LOOPS = ("reference", "foreach", "native", "cuda_sim")
KERNELS = ("native", "cuda_sim")


@dataclass(frozen=True)
class Case:
    """A named list of tensors, and the runners that have a boundary there; without names all have one."""

    name: str
    specs: tuple[Spec, ...]
    runners: tuple[str, ...] = ()

    @property
    def row_major(self) -> bool:
        """Whether memory order is logical order, as random numbers in registers need it."""
        return all(spec.layout in ("contiguous", "misaligned") for spec in self.specs)


def _flat(*sizes: int) -> tuple[Spec, ...]:
    return tuple(Spec((n,)) for n in sizes)


CASES = (
    # Around a Philox block (128) and a piece of the CPU's loop (16384).
    Case("sizes", _flat(0, 1, 3, 127, 128, 129, 16383, 16384, 16385, 50000), LOOPS),
    # Around a vector of any dtype (2, 4, 8), and what blocks of threads take at once.
    Case("chunks", _flat(2, 4, 5, 7, 8, 9, 2047, 2048, 2049, 4096), LOOPS),
    # Around a chunk of the CUDA kernels (8192).
    Case("large_chunks", _flat(8191, 8192, 8193, 24577), LOOPS),
    Case("misaligned", (Spec((1000,), "misaligned"), Spec((4, 5001), "misaligned"), Spec((2,), "misaligned")), LOOPS),
    # Triton's interpreter takes some 20 ms for a chunk (2048), so all that is contiguous is in one list there: around a
    # Philox block, around a chunk, of which only full ones at aligned addresses are read in words, and two and a bit.
    Case(
        "tiles",
        (*_flat(1, 128, 2047, 4097, 2048), Spec((129,), "misaligned"), Spec((2049,), "misaligned")),
        ("triton",),
    ),
    # An empty tensor at either end and in the middle, and scalars.
    Case("empties", (*_flat(0, 130), Spec((3, 0)), Spec(()), Spec((1, 1)), *_flat(129, 0))),
    Case("all_empty", _flat(0, 0)),
    Case("several", _flat(*((37 * i) % 271 for i in range(40))), ("reference", "foreach", "triton")),
    Case("many", _flat(*((37 * i) % 271 for i in range(300))), KERNELS),
    Case("channels_last", (Spec((5, 8, 3, 7), "channels_last"), Spec((64, 33, 3, 3), "channels_last"), Spec((9,)))),
    Case("transposed", (Spec((130, 7), "transposed"), Spec((129, 128), "transposed"))),
    Case("gaps", (Spec((6, 50), "gaps"), Spec((200,)), Spec((129, 130), "gaps"))),
    Case("only_gaps", (Spec((6, 50), "gaps"),)),
    Case(
        "mixed_dtypes", tuple(Spec((n,), dtype=DTYPES[i % 4]) for i, n in enumerate((3, 129, 500, 64, 0, 17000, 9, 1)))
    ),
)
BY_NAME = {case.name: case for case in CASES}
# What these check is the walk over the list, which knows two ways: types computed in place, and converted ones.
_WALKS = ("empties", "all_empty", "several", "many", "only_gaps")


def _dtypes(case: Case) -> tuple[torch.dtype, ...]:
    if case.name == "mixed_dtypes":  # names its own
        return (torch.float32,)
    return (torch.float32, torch.bfloat16) if case.name in _WALKS else DTYPES


PAIRS = [(case, dtype) for case in CASES for dtype in _dtypes(case)]


def runs_of(*, walk: bool = False) -> list[tuple[Case, torch.dtype, str]]:
    """Every case and dtype with every runner that it is for.

    Triton walks over one map of chunks in all passes, so its long walk is left to the pass that asks for ``walk``; and
    what is dense in another order is a list like any other to it, so one such layout is enough elsewhere.
    """
    return [
        (case, dtype, runner)
        for case, dtype in PAIRS
        for runner in case.runners or PASSES
        if runner in PASSES and (walk or runner != "triton" or case.name not in ("several", "channels_last"))
    ]


def sizes_for(runner: str) -> Case:
    """The sizes around every boundary of a runner."""
    return BY_NAME["tiles" if runner == "triton" else "sizes"]


def pair_id(value: object) -> str | None:
    """Test ids of a case and of a dtype."""
    if isinstance(value, Case):
        return value.name
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def place(values: Tensor, layout: str) -> Tensor:
    """``values`` in memory of the given layout."""
    if layout == "misaligned":
        return values.new_empty(values.numel() + 1)[1:].view(values.shape).copy_(values)
    if layout == "channels_last":
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout == "gaps":
        rows, columns = values.shape
        return values.new_empty(rows, 2 * columns)[:, ::2].copy_(values)
    return values.contiguous()


class Lists(NamedTuple):
    """Parallel lists, as a pass takes them."""

    weights: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    hessians: list[Tensor]
    products: list[Tensor]


def build(
    case: Case, dtype: torch.dtype, *, seed: int = 0, nonfinite: bool = False, device: str | torch.device = DEVICE
) -> Lists:
    """Values for a case: curvature has unknown (−0), zero and positive elements, products some exact zeros.

    Args:
        case: Shapes and layouts.
        dtype: Where a tensor of the case names none.
        seed: Of the values, the same on every device.
        nonfinite: Puts inf, −inf and NaN into the products.
        device: Where to put them.
    """
    lists = Lists([], [], [], [], [])
    for spec, values in zip(case.specs, _values(case, dtype, seed, nonfinite), strict=True):
        for column, (tensors, value) in enumerate(zip(lists, values, strict=True)):
            layout = "contiguous" if spec.layout == "gaps" and column > 0 else spec.layout
            tensors.append(place(value.clone().to(device), layout))
    return lists


@cache
def _values(case: Case, dtype: torch.dtype, seed: int, nonfinite: bool) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator("cpu").manual_seed(seed)
    out = []
    for position, spec in enumerate(case.specs):
        kind = spec.dtype or dtype
        state = compute_dtype(kind)
        number = torch.arange(torch.Size(spec.shape).numel(), device="cpu").reshape(spec.shape) + position

        def normal(scale: float, dtype: torch.dtype, shape: tuple[int, ...] = spec.shape) -> Tensor:
            return (torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") * scale).to(dtype)

        hessian = normal(1.0, state).square()
        hessian[number % 7 == 0] = -0.0
        hessian[number % 7 == 1] = 0.0
        product = normal(2.0, kind)
        product[number % 5 == 0] = 0.0
        if nonfinite:
            for remainder, value in ((3, torch.inf), (5, torch.nan), (8, -torch.inf)):
                product[number % 11 == remainder] = value
        out.append((normal(1.0, kind), normal(0.1, kind), normal(0.1, state), hessian, product))
    return out


def groups_of(n: int) -> list[int]:
    """Parameter groups 0 and 2 by turns; group 1 stays empty."""
    return [2 * (i % 2) for i in range(n)]


N_GROUPS = 3


def indices_of(n: int) -> list[int]:
    """Random streams that are not just positions."""
    return [3 * i + 5 for i in range(n)]


def members_of(weights: list[Tensor], stored: Format = FULL) -> Members:
    """Describes the weights to a class of passes."""
    n = len(weights)
    names = [f"weight {i}" for i in range(n)]
    return Members(weights, indices_of(n), groups_of(n), N_GROUPS, names, format=stored)


# ---- layouts that kernels do not take -----------------------------------------------------------------------------


class MixedPasses:
    """The parts that a plan makes of such a list, behind the interface of one: kernels, and the reference's way."""

    def __init__(self, kind: type[Passes], members: Members) -> None:
        taken = [i for i, weight in enumerate(members.weights) if kind.takes(weight, members.format)]
        odd = [i for i, weight in enumerate(members.weights) if not kind.takes(weight, members.format)]
        self.size = len(members.weights)
        self.parts = [(made(members.take(at)), at) for made, at in ((kind, taken), (Passes, odd)) if at]

    def _each(self, name: str, *lists: Sequence | None, **options: object) -> None:
        for passes, at in self.parts:
            getattr(passes, name)(*(None if column is None else [column[i] for i in at] for column in lists), **options)

    def _merged(self, columns: Sequence[Sequence]) -> list:
        found = {
            i: value
            for (_, at), column in zip(self.parts, columns, strict=True)
            for i, value in zip(at, column, strict=True)
        }
        return [found[i] for i in range(self.size)]

    def bind_state(self, *columns: Sequence[Tensor] | None) -> None:
        self._each("bind_state", *columns)

    def bind_compact(self, *columns: Sequence[Tensor] | None) -> None:
        self._each("bind_compact", *columns)

    def bind_grads(self, grads: Sequence[Tensor], **options: bool) -> None:
        self._each("bind_grads", grads, **options)

    def bind_firsts(self, firsts: Sequence[Tensor]) -> None:
        self._each("bind_firsts", firsts)

    def perturb(self, scales: Tensor, *, take_grads: bool | Sequence[bool], **options: object) -> None:
        for passes, at in self.parts:
            taken = take_grads if isinstance(take_grads, bool) else [take_grads[i] for i in at]
            passes.perturb(scales, take_grads=taken, **options)

    def restore(self) -> None:
        self._each("restore")

    def show_x(self) -> None:
        self._each("show_x")

    def momentum_ascent(self, scales: Tensor, **options: object) -> None:
        for passes, _ in self.parts:
            passes.momentum_ascent(scales, **options)

    def decompose(self, scales: Tensor) -> None:
        for passes, _ in self.parts:
            passes.decompose(scales)

    def probe(self, *args: object) -> None:
        for passes, _ in self.parts:
            passes.probe(*args)

    def square_sums(self, **options: bool) -> Tensor:
        return sum(passes.square_sums(**options) for passes, _ in self.parts)

    def gap_sums(self) -> Tensor:
        return sum(passes.gap_sums() for passes, _ in self.parts)

    def unseen_sums(self) -> Tensor:
        return torch.stack(self._merged([passes.unseen_sums() for passes, _ in self.parts]))

    def fill_unseen(self, sums: Tensor) -> None:
        for passes, at in self.parts:
            passes.fill_unseen(sums[at].contiguous())

    def weight_square_sum(self) -> Tensor:
        return sum(passes.weight_square_sum() for passes, _ in self.parts)

    @property
    def backups(self) -> list[Tensor]:
        return self._merged([passes.backups for passes, _ in self.parts])

    def signs_in_registers(self, position: int) -> bool:
        return next(p.signs_in_registers(at.index(position)) for p, at in self.parts if position in at)

    def rademacher(self, positions: Sequence[int], seed: int, draw: int) -> list[Tensor]:
        drawn = self._merged([p.rademacher(range(len(at)), seed, draw) for p, at in self.parts])
        return [drawn[i] for i in positions]

    def step(
        self, scalars: object, cohorts: Sequence[int], products: Products | None, *args: int, **options: object
    ) -> Stepped:
        found = [
            passes.step(
                scalars,
                [cohorts[i] for i in at],
                None if products is None else products.take(at),
                *args,
                **options,
            )
            for passes, at in self.parts
        ]
        tallies = None if products is None else torch.stack(self._merged([stepped.tallies for stepped in found]))
        squares = [stepped.square_sums for stepped in found]
        return Stepped(tallies, None if squares[0] is None else sum(squares))


def passes_over(runner: str, members: Members) -> Passes | MixedPasses:
    """The passes of a runner over a list of any layout."""
    kind = PASSES[runner]
    takes_all = all(kind.takes(weight, members.format) for weight in members.weights)
    return kind(members) if takes_all else MixedPasses(kind, members)
