"""What the machine allows: loops without arithmetic that move the bytes of each pass, and a copy."""

from __future__ import annotations

import ctypes
import math
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from kernels import tensors
from measure import Measured, Timed, stopwatch
from shapes import Shapes

COPY_BYTES = 8  # per float32 parameter: a read and a write
MOST_TENSORS = 500


@cache
def _library() -> ctypes.CDLL:
    source = Path(__file__).with_name("roofline.cpp")
    target = Path(tempfile.mkdtemp()) / "roofline.so"
    command = ["g++", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))


class Floors:
    """Loops with the reads and writes of each pass, over tensors of the same shapes in the CPU's memory."""

    def __init__(self, shapes: Shapes) -> None:
        self.lib = _library()
        self.shapes = shapes
        self.columns: dict[str, list[torch.Tensor]] = {}
        sizes = (ctypes.c_int64 * len(shapes))(*(math.prod(shape) for shape in shapes))
        self.rest = (sizes, ctypes.c_int64(len(shapes)))

    def _lists(self, names: str) -> list[ctypes.Array]:
        """Addresses of the columns with these letters; those that no pass asks for take no memory."""
        for name in names:
            if name not in self.columns:
                self.columns[name] = tensors(self.shapes, ord(name))
        kind = ctypes.c_void_p * len(self.shapes)
        return [kind(*(t.data_ptr() for t in self.columns[name])) for name in names]

    def of(self, name: str) -> Timed:
        """The loop of one pass."""
        if name in ("step", "refresh_step"):
            lists = self._lists("pbgmd")
            loop, products = self.lib.floor_step, self._lists("h")[0] if name == "refresh_step" else None
            return stopwatch(lambda: loop(*lists, products, *self.rest, torch.get_num_threads()))
        columns = {"norm": "g", "perturb": "pg", "restore": "pb", "probe": "p", "rademacher": "p"}[name]
        loop, lists = getattr(self.lib, f"floor_{name}"), self._lists(columns)
        return stopwatch(lambda: loop(*lists, *self.rest, torch.get_num_threads()))


def floors(shapes: Shapes, *names: str) -> dict[str, Timed]:
    """A copy, and where there are such loops the floor of each pass: contenders to run beside the passes.

    There are none for thousands of small tensors, where the loops' own overhead is no floor of anything.
    """
    if len(shapes) > MOST_TENSORS:
        return {}
    here, there = tensors(shapes, 0), tensors(shapes, 1)
    found = {"copy": stopwatch(lambda: torch._foreach_copy_(here, there))}
    if torch.get_default_device().type == "cpu":
        made = Floors(shapes)
        found |= {floor_name(name): made.of(name) for name in names}
    return found


def floor_of(name: str, measured: dict[str, Measured], size: int) -> Measured | None:
    """The floor of a pass that moves ``size`` bytes per parameter: its loop, else a copy of as many bytes."""
    if "copy" not in measured:
        return None
    return measured.get(floor_name(name), measured["copy"].scaled(size / COPY_BYTES))


def floor_name(name: str) -> str:
    return f"roofline {name}"
