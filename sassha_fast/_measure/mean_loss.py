"""The mean loss of a model over data as a function of its weights: value, gradient and products with its Hessian."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._core.contexts import frozen_batchnorm, refresh_context
from ..extras import extra

Loss = Callable[[Any, Any], Tensor]


class MeanLoss:
    """The mean loss over all examples. :class:`sassha_fast.sharpness.Sharpness` documents the arguments."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        data: Iterable[tuple[Any, Any]],
        *,
        progress: bool = False,
        seed: int = 0,
    ) -> None:
        """Checks that there are parameters and data; see the class."""
        if iter(data) is data:
            raise TypeError(
                f"Sharpness: data is a {type(data).__name__} that runs out after one pass; pass a list or a data loader"
            )
        self.model, self.loss_fn, self.data, self.progress, self.seed = model, loss_fn, data, progress, seed
        self.params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        if not self.params:
            raise ValueError("Sharpness: the model has no parameter that requires a gradient; call requires_grad_()")
        if progress:
            extra("tqdm", "Sharpness(progress=True)")
        self.sizes = [p.numel() for p in self.params]
        self.size = sum(self.sizes)

    # ---- loss, gradient, product ---------------------------------------------------------------------------------

    def _batches(self) -> Iterator[tuple[Tensor, int]]:
        """The loss of every batch and its number of examples."""
        found = False
        with frozen_batchnorm(self.model):
            for x, y in self.data:
                found = True
                value = self.loss_fn(self.model(self._placed(x)), self._placed(y))
                yield value, len(y) if hasattr(y, "__len__") else 1
        if not found:
            raise ValueError("Sharpness: data has no batch; pass at least one pair (x, y)")

    def _placed(self, value: Any) -> Any:
        """A tensor on the model's device; whatever else a batch is made of stays where it is."""
        return value.to(self.params[0].device, non_blocking=True) if isinstance(value, Tensor) else value

    def _mean(self, parts: Iterable[tuple[Any, int]]) -> Any:
        total: Any = 0.0
        count = 0
        for part, n in parts:
            total, count = total + part * n, count + n
        return total / count

    @torch.no_grad()
    def loss(self) -> float:
        """The mean loss."""
        return float(self._mean((value.double(), n) for value, n in self._batches()))

    def gradient(self) -> Tensor:
        """∇L as one vector."""
        parts = (
            (self._flat(torch.autograd.grad(value, self.params, materialize_grads=True)), n)
            for value, n in self._batches()
        )
        gradient: Tensor = self._mean(parts)
        return gradient

    def product(self, v: Tensor) -> Tensor:
        """The Hessian of L times a vector."""
        parts = self._shaped(v)

        def products() -> Iterator[tuple[Tensor, int]]:
            for value, n in self._batches():
                grads = torch.autograd.grad(value, self.params, create_graph=True, materialize_grads=True)
                used = [(g, z) for g, z in zip(grads, parts, strict=True) if g.requires_grad]
                if not used:  # a loss that is linear in the weights
                    yield torch.zeros_like(v), n
                    continue
                outputs, signs = [g for g, _ in used], [z for _, z in used]
                yield self._flat(torch.autograd.grad(outputs, self.params, signs, materialize_grads=True)), n

        with refresh_context(self.model):
            product: Tensor = self._mean(products())
        return product

    # ---- vectors -------------------------------------------------------------------------------------------------

    def _shaped(self, v: Tensor) -> list[Tensor]:
        """The parts of a vector in the shapes of the parameters."""
        if v.shape != (self.size,):
            raise ValueError(
                f"Sharpness: a vector has shape {tuple(v.shape)}, expected ({self.size},), one element per weight in "
                "the order of model.parameters()"
            )
        return [part.view_as(p).to(p) for part, p in zip(torch.split(v, self.sizes), self.params, strict=True)]

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.detach().reshape(-1) for t in tensors])

    def _directions(self, n: int, *, signs: bool) -> Iterator[Tensor]:
        """Random vectors, the same in every call: Gaussian or of signs."""
        generator = torch.Generator().manual_seed(self.seed)
        like = self.params[0]
        for _ in range(n):
            v = torch.randn(self.size, generator=generator, dtype=torch.float64, device="cpu")
            yield (torch.where(v < 0, -1.0, 1.0) if signs else v).to(like)

    @contextmanager
    def moved(self, direction: Tensor) -> Iterator[None]:
        """The weights x + direction within, x bit for bit afterwards."""
        offsets = self._shaped(direction)
        kept = [p.detach().clone() for p in self.params]
        try:
            with torch.no_grad():
                torch._foreach_add_(self.params, offsets)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.params, kept)

    def _loss_at(self, direction: Tensor) -> float:
        with self.moved(direction):
            return self.loss()

    @contextmanager
    def _bar(self, name: str, total: int | None = None) -> Iterator[Callable[[], object]]:
        """A progress bar under a name, if there shall be one; gives the function that moves it by one."""
        if not self.progress:
            yield lambda: None
            return
        with extra("tqdm", "Sharpness(progress=True)").tqdm(total=total, desc=name) as bar:
            yield bar.update
