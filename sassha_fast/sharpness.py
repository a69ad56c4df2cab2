"""How sharp a minimum is: eigenvalues, trace and spectrum of the Hessian, and what perturbations do to the loss.

Measures of the paper's section on sharpness, for any model, loss and data: λmax and trace of the Hessian of the mean
loss, δL_grad and δL_avg, and the spectral density. Needs scipy (``pip install sassha_fast[sharpness]``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .contexts import frozen_batchnorm, refresh_context

__all__ = ["Sharpness", "SharpnessReport"]

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class SharpnessReport:
    """The measures of the paper at one point.

    Attributes:
        loss: The mean loss L.
        eigenvalue: λmax of its Hessian.
        trace: Trace of its Hessian.
        gradient_gap: δL_grad = L(x + ρ ∇L/‖∇L‖) − L(x).
        average_gap: δL_avg = E L(x + ρ z/‖z‖) − L(x) over Gaussian z.
        rho: ρ of both.
    """

    loss: float
    eigenvalue: float
    trace: float
    gradient_gap: float
    average_gap: float
    rho: float

    def __str__(self) -> str:
        """The measures in a line each."""
        return (
            f"loss     {self.loss:.6g}\nλmax     {self.eigenvalue:.6g}\ntrace    {self.trace:.6g}\n"
            f"δL_grad  {self.gradient_gap:.6g}\nδL_avg   {self.average_gap:.6g}  (both with ρ = {self.rho:g})"
        )


class Sharpness:
    """Sharpness of a mean loss at the present weights of a model.

    Every product with the Hessian is a pass over all data, so a subset is often enough. The model runs in the mode that
    it is in (call ``model.eval()`` for running statistics of BatchNorm and no dropout); statistics are not moved, and
    weights are put back bit for bit. With M-SASSHA, measure within ``opt.true_weights()``.

    Args:
        model: The network.
        loss_fn: ``loss_fn(model(x), y)``, the mean loss of a batch.
        data: Batches (x, y), as often as they are asked for: a list or a data loader without shuffling.
        progress: Show a progress bar for every measure (needs tqdm).
        seed: Of random directions.
    """

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
            raise ValueError("Sharpness: the model has no parameter that requires a gradient")
        self.sizes = [p.numel() for p in self.params]
        self.size = sum(self.sizes)

    # ---- loss, gradient, product ---------------------------------------------------------------------------------

    def _batches(self) -> Iterator[tuple[Tensor, int]]:
        """The loss of every batch and its number of examples."""
        found = False
        with frozen_batchnorm(self.model):
            for x, y in self.data:
                found = True
                yield self.loss_fn(self.model(x), y), len(y) if hasattr(y, "__len__") else 1
        if not found:
            raise ValueError("Sharpness: data has no batch")

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
        parts = ((self._flat(torch.autograd.grad(value, self.params)), n) for value, n in self._batches())
        gradient: Tensor = self._mean(parts)
        return gradient

    def product(self, v: Tensor) -> Tensor:
        """The Hessian of L times a vector."""
        parts = self._shaped(v)

        def products() -> Iterator[tuple[Tensor, int]]:
            for value, n in self._batches():
                grads = torch.autograd.grad(value, self.params, create_graph=True, materialize_grads=True)
                used = [(g, z) for g, z in zip(grads, parts, strict=True) if g.requires_grad]
                outputs, signs = [g for g, _ in used], [z for _, z in used]
                yield self._flat(torch.autograd.grad(outputs, self.params, signs, materialize_grads=True)), n

        with refresh_context(self.model):
            product: Tensor = self._mean(products())
        return product

    def _shaped(self, v: Tensor) -> list[Tensor]:
        """The parts of a vector in the shapes of the parameters."""
        return [part.view_as(p) for part, p in zip(torch.split(v, self.sizes), self.params, strict=True)]

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.detach().reshape(-1) for t in tensors])

    def _directions(self, n: int, *, signs: bool) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        like = self.params[0]
        for _ in self._bar(range(n)):
            v = torch.randn(self.size, generator=generator, dtype=torch.float64)
            yield (torch.where(v < 0, -1.0, 1.0) if signs else v).to(like)

    def _bar(self, steps: Iterable[Any]) -> Iterable[Any]:
        if not self.progress:
            return steps
        from tqdm import tqdm  # type: ignore[import-untyped]

        shown: Iterable[Any] = tqdm(steps)
        return shown

    # ---- Hessian -------------------------------------------------------------------------------------------------

    def eigenvalues(self, k: int = 1, *, tolerance: float = 1e-3) -> list[float]:
        """The k largest eigenvalues, by scipy's Lanczos iteration, the largest first."""
        from scipy.sparse.linalg import LinearOperator, eigsh  # type: ignore[import-untyped]

        like = self.params[0]

        def matvec(v: Any) -> Any:
            return self.product(torch.as_tensor(v).reshape(-1).to(like)).double().cpu().numpy()

        start = next(iter(self._directions(1, signs=False))).double().cpu().numpy()
        operator = LinearOperator((self.size, self.size), matvec=matvec, dtype="float64")
        values = eigsh(operator, k=k, which="LA", tol=tolerance, v0=start, return_eigenvectors=False)
        return sorted((float(value) for value in values), reverse=True)

    def trace(self, products: int = 60) -> float:
        """The trace by Hutch++: a third of the products finds the directions that matter, the rest is Hutchinson's.

        With at least as many products as parameters it is exact.
        """
        if products >= self.size:
            identity = torch.eye(self.size, dtype=self.params[0].dtype, device=self.params[0].device)
            return sum(float(self.product(e)[i]) for i, e in enumerate(identity))
        third = max(products // 3, 1)
        drawn = list(self._directions(2 * third, signs=True))
        sketch = torch.stack([self.product(v) for v in drawn[:third]], dim=1).double()
        basis, _ = torch.linalg.qr(sketch)
        like = self.params[0]

        def quadratic(v: Tensor) -> float:
            return float(v @ self.product(v.to(like)).double())

        found = sum(quadratic(q) for q in basis.unbind(1))
        rest = [v.double() - basis @ (basis.T @ v.double()) for v in drawn[third:]]
        return found + sum(map(quadratic, rest)) / len(rest)

    def spectral_density(
        self, steps: int = 40, probes: int = 1, *, points: int = 512, width: float = 0.01
    ) -> tuple[Tensor, Tensor]:
        """The density of eigenvalues, by stochastic Lanczos quadrature (Ghorbani et al., 2019).

        Args:
            steps: Of Lanczos, each a product.
            probes: Random vectors to average over.
            points: Of the grid.
            width: Standard deviation of the Gaussians that stand for eigenvalues, relative to the range.

        Returns:
            A grid of eigenvalues and the density there, whose integral is 1.
        """
        nodes, weights = [], []
        for v in self._directions(probes, signs=True):
            values, vectors = torch.linalg.eigh(self._tridiagonal(v, steps))
            nodes.append(values)
            weights.append(vectors[0].square() / probes)
        values, shares = torch.cat(nodes), torch.cat(weights)
        span = float(values.max() - values.min()) or 1.0
        sigma = width * span
        grid = torch.linspace(float(values.min()) - 5 * sigma, float(values.max()) + 5 * sigma, points).double()
        bumps = torch.exp(-0.5 * ((grid[:, None] - values) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        return grid, bumps @ shares

    def _tridiagonal(self, start: Tensor, steps: int) -> Tensor:
        """Lanczos' matrix, with full reorthogonalisation."""
        basis = [start.double() / start.double().norm()]
        diagonal: list[float] = []
        beside: list[float] = []
        for _ in range(min(steps, self.size)):
            w = self.product(basis[-1].to(self.params[0])).double()
            diagonal.append(float(w @ basis[-1]))
            for _ in range(2):  # once leaves rounding errors that make ghosts of eigenvalues
                known = torch.stack(basis)
                w = w - known.T @ (known @ w)
            norm = float(w.norm())
            if norm < 1e-10 * max(map(abs, diagonal)):
                break
            beside.append(norm)
            basis.append(w / norm)
        n = len(diagonal)
        off = torch.tensor(beside[: n - 1], dtype=torch.float64)
        return torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)

    # ---- perturbations -------------------------------------------------------------------------------------------

    @contextmanager
    def moved(self, direction: Tensor) -> Iterator[None]:
        """The weights x + direction within, x bit for bit afterwards."""
        kept = [p.detach().clone() for p in self.params]
        try:
            with torch.no_grad():
                torch._foreach_add_(self.params, self._shaped(direction))
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.params, kept)

    def _loss_at(self, direction: Tensor) -> float:
        with self.moved(direction):
            return self.loss()

    def gradient_gap(self, rho: float = 0.1) -> float:
        """δL_grad: what a step of length ρ along the gradient adds to the loss."""
        gradient = self.gradient()
        return self._loss_at(gradient * (rho / gradient.norm())) - self.loss()

    def average_gap(self, rho: float = 0.1, samples: int = 50) -> float:
        """δL_avg: what a random step of length ρ adds to the loss on average."""
        directions = self._directions(samples, signs=False)
        return sum(self._loss_at(v * (rho / v.norm())) for v in directions) / samples - self.loss()

    def report(self, rho: float = 0.1, *, products: int = 60, samples: int = 50) -> SharpnessReport:
        """All measures of the paper's table."""
        return SharpnessReport(
            self.loss(),
            self.eigenvalues()[0],
            self.trace(products),
            self.gradient_gap(rho),
            self.average_gap(rho, samples),
            rho,
        )
