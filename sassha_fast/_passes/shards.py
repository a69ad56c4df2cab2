"""Parameters in shards (DTensor): the part of each that lies here, and the global number of its elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies in this process: itself, unless it is a DTensor."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "_local_tensor")


@dataclass(frozen=True)
class Shard:
    """A box of elements of a parameter.

    Attributes:
        shape: Of the whole parameter.
        offset: Where the box begins in each dimension.
        replicas: How many processes hold the same box.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    replicas: int

    def numbers(self, size: tuple[int, ...], device: torch.device) -> Tensor:
        """The row-major number of every element of a box of this size in the whole parameter."""
        numbers = torch.zeros((), dtype=torch.int64, device=device)
        stride = 1
        for d in reversed(range(len(self.shape))):
            along = torch.arange(self.offset[d], self.offset[d] + size[d], device=device) * stride
            numbers = numbers + along.view(-1, *[1] * (len(self.shape) - 1 - d))
            stride *= self.shape[d]
        return numbers.expand(size)


def shard_of(param: Tensor) -> Shard | None:
    """Where the local part of a DTensor lies; None for a plain tensor."""
    if not is_sharded(param):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    given: Any = param
    _, offset = compute_local_shape_and_global_offset(given.shape, given.device_mesh, given.placements)
    replicas = _root(given.device_mesh).size() // given.device_mesh.size()
    for size, placement in zip(given.device_mesh.shape, given.placements, strict=True):
        replicas *= size if placement.is_replicate() else 1
    return Shard(tuple(given.shape), tuple(offset), replicas)


def _root(mesh: Any) -> Any:
    """The mesh that this one was cut from: the processes beyond it hold copies."""
    return mesh._get_root_mesh()


def group_of(params: list[Tensor], caller: str) -> Any:
    """The processes that share sharded parameters, None if there are none of these.

    Raises:
        RuntimeError: If parameters lie on different meshes.
    """
    meshes: list[Any] = [getattr(p, "device_mesh", None) for p in params if is_sharded(p)]
    if not meshes:
        return None
    roots = {_root(mesh) for mesh in meshes}
    if len(roots) > 1:
        raise RuntimeError(
            f"{caller}: parameters lie on {len(roots)} device meshes, whose norms have no common process group; "
            "shard all of them over one mesh"
        )
    mesh = roots.pop()
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
