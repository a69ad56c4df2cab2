"""The spectrum of the Hessian of a mean loss: largest eigenvalues, trace and density."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import check_count, check_positive
from ..extras import extra
from .mean_loss import MeanLoss


@dataclass(frozen=True)
class SpectralDensity:
    """The density of eigenvalues; ``grid, density = ...`` unpacks the first two.

    Attributes:
        grid: Eigenvalues, evenly spaced.
        density: The density there, whose integral is 1.
        nodes: Nodes of the quadrature, which the density smooths: the outermost are the extreme eigenvalues.
        weights: Their weights, whose sum is 1.
        sigma: Standard deviation of the Gaussians that stand for nodes.
        size: Number of eigenvalues.
    """

    grid: Tensor
    density: Tensor
    nodes: Tensor
    weights: Tensor
    sigma: float
    size: int

    def __iter__(self) -> Iterator[Tensor]:
        """Grid and density."""
        return iter((self.grid, self.density))

    @property
    def largest(self) -> float:
        """λmax, once Lanczos' iteration has converged to it."""
        return float(self.nodes.max())

    @property
    def resolution(self) -> float:
        """The height of a single eigenvalue: what is far below it tells nothing."""
        return 1.0 / (self.size * self.sigma * math.sqrt(2 * math.pi))


class Spectrum(MeanLoss):
    """What products with the Hessian tell of it. Every one is a pass over all data."""

    def eigenpairs(self, k: int = 1, *, tolerance: float = 1e-3) -> tuple[list[float], Tensor]:
        """The k largest eigenvalues and their eigenvectors, by scipy's Lanczos iteration.

        Args:
            k: How many.
            tolerance: Relative error of the eigenvalues at which to stop.

        Returns:
            The eigenvalues, the largest first, and a matrix whose rows are eigenvectors of length 1, in the order of
            ``model.parameters()``. The largest element of each is positive.
        """
        check_count("k", k, caller="Sharpness.eigenpairs")
        check_positive("tolerance", tolerance, caller="Sharpness.eigenpairs")
        if k > self.size:
            raise ValueError(f"Sharpness.eigenpairs: k is {k}, but there are {self.size} eigenvalues; ask for fewer")
        with self._bar("eigenvalues", self.size if k == self.size else None) as tick:
            if k == self.size:  # Lanczos' iteration stops short of all of them
                values, vectors = torch.linalg.eigh(self._dense(tick))
            else:
                values, vectors = self._largest(k, tolerance, tick)
        order = torch.argsort(values, descending=True)
        rows = vectors.T[order]
        peaks = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
        return values[order].tolist(), (rows * peaks.sign()).to(self.params[0])

    def eigenvalues(self, k: int = 1, *, tolerance: float = 1e-3) -> list[float]:
        """The k largest eigenvalues, the largest first; see :meth:`eigenpairs`."""
        return self.eigenpairs(k, tolerance=tolerance)[0]

    def _largest(self, k: int, tolerance: float, tick: Callable[[], object]) -> tuple[Tensor, Tensor]:
        linalg = extra("scipy.sparse.linalg", "Sharpness.eigenpairs")

        def matvec(v: Any) -> Any:
            tick()
            return self.product(torch.as_tensor(v, device="cpu").reshape(-1).to(self.params[0])).double().cpu().numpy()

        start = next(self._directions(1, signs=False)).double().cpu().numpy()
        operator = linalg.LinearOperator((self.size, self.size), matvec=matvec, dtype="float64")
        values, vectors = linalg.eigsh(operator, k=k, which="LA", tol=tolerance, v0=start)
        return torch.from_numpy(values), torch.from_numpy(vectors)

    def _dense(self, tick: Callable[[], object]) -> Tensor:
        """The Hessian itself, on the CPU."""
        rows = []
        for i in range(self.size):
            unit = torch.zeros(self.size, dtype=self.params[0].dtype, device=self.params[0].device)
            unit[i] = 1.0
            rows.append(self.product(unit).double().cpu())
            tick()
        return torch.stack(rows)

    def trace(self, products: int = 60) -> float:
        """The trace by Hutch++: a third of the products finds the directions that matter, the rest is Hutchinson's.

        With at least as many products as parameters it is exact; with fewer it depends on the seed, and errs by some
        per cent where the spectrum falls slowly.

        Args:
            products: Passes over all data, of which it takes three at least.
        """
        check_count("products", products, caller="Sharpness.trace")
        if products >= self.size:
            with self._bar("trace", self.size) as tick:
                return float(self._dense(tick).trace())
        third = max(products // 3, 1)
        drawn = list(self._directions(2 * third, signs=True))
        like = self.params[0]
        with self._bar("trace", 3 * third) as tick:

            def product(v: Tensor) -> Tensor:
                tick()
                return self.product(v.to(like)).double()

            basis, _ = torch.linalg.qr(torch.stack([product(v) for v in drawn[:third]], dim=1))
            found = sum(float(q @ product(q)) for q in basis.unbind(1))
            rest = [v.double() - basis @ (basis.T @ v.double()) for v in drawn[third:]]
            return found + sum(float(v @ product(v)) for v in rest) / len(rest)

    def spectral_density(
        self, steps: int = 40, probes: int = 1, *, points: int = 512, width: float = 0.01
    ) -> SpectralDensity:
        """The density of eigenvalues, by stochastic Lanczos quadrature (Ghorbani et al., 2019).

        Args:
            steps: Of Lanczos, each a product.
            probes: Random vectors to average over.
            points: Of the grid.
            width: Standard deviation of the Gaussians that stand for eigenvalues, relative to the range.

        Returns:
            A grid of eigenvalues and the density there, whose integral is 1.
        """
        caller = "Sharpness.spectral_density"
        check_count("steps", steps, caller=caller)
        check_count("probes", probes, caller=caller)
        check_positive("width", width, caller=caller)
        needed = math.ceil((1 + 10 * width) / width) + 1  # a wider grid than the Gaussians misses their mass
        if points < needed:
            raise ValueError(
                f"{caller}: points is {points}, too few for Gaussians of width {width:g}; pass at least {needed}, or a "
                "larger width"
            )
        nodes, weights = [], []
        with self._bar("spectral density", min(steps, self.size) * probes) as tick:
            for v in self._directions(probes, signs=True):
                found, vectors = torch.linalg.eigh(self._tridiagonal(v, steps, tick))
                nodes.append(found)
                weights.append(vectors[0].square() / probes)
        values, shares = torch.cat(nodes), torch.cat(weights)
        span = float(values.max() - values.min()) or 1.0
        sigma = width * span
        ends = float(values.min()) - 5 * sigma, float(values.max()) + 5 * sigma
        grid = torch.linspace(*ends, points, dtype=torch.float64, device="cpu")
        bumps = torch.exp(-0.5 * ((grid[:, None] - values) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        return SpectralDensity(grid, bumps @ shares, values, shares, sigma, self.size)

    def _tridiagonal(self, start: Tensor, steps: int, tick: Callable[[], object]) -> Tensor:
        """Lanczos' matrix, with full reorthogonalisation."""
        steps = min(steps, self.size)
        basis = start.new_empty(steps, self.size, dtype=torch.float64)
        basis[0] = start.double() / start.double().norm()
        diagonal: list[float] = []
        beside: list[float] = []
        for n in range(steps):
            w = self.product(basis[n].to(self.params[0])).double()
            tick()
            diagonal.append(float(w @ basis[n]))
            for _ in range(2):  # once leaves rounding errors that make ghosts of eigenvalues
                known = basis[: n + 1]
                w = w - known.T @ (known @ w)
            norm = float(w.norm())
            if n + 1 == steps or norm <= 1e-10 * max(map(abs, diagonal)):
                break
            beside.append(norm)
            basis[n + 1] = w / norm
        off = torch.tensor(beside, dtype=torch.float64, device="cpu")
        return (
            torch.diag(torch.tensor(diagonal, dtype=torch.float64, device="cpu"))
            + torch.diag(off, 1)
            + torch.diag(off, -1)
        )
