"""How sharp a minimum is: spectrum of the Hessian, what perturbations do to the loss, and the landscape around.

Measures of the paper's section on sharpness, for any model, loss and data: λmax and trace of the Hessian of the mean
loss, δL_grad and δL_avg, the spectral density, and the loss along lines and planes. :mod:`sassha_fast.plots` draws
them. Needs scipy (``pip install scipy``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._measure.spectrum import SpectralDensity, Spectrum
from .checks import check_count, check_positive

__all__ = ["Curve", "Sharpness", "SharpnessReport", "SpectralDensity", "Surface"]


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


@dataclass(frozen=True)
class Curve:
    """The loss along a line: ``losses[i]`` is L(x + ``steps[i]``·``direction``).

    Attributes:
        steps: Multiples of the direction, from −radius to radius.
        losses: The loss at each, in float64.
        direction: The direction, as one vector.
        kind: ``"random"``, ``"gradient"``, ``"eigenvector"`` or ``"given"``.
    """

    steps: Tensor
    losses: Tensor
    direction: Tensor
    kind: str


@dataclass(frozen=True)
class Surface:
    """The loss on a plane: ``losses[i, j]`` is L(x + ``steps[i]``·``directions[0]`` + ``steps[j]``·``directions[1]``).

    Attributes:
        steps: Multiples of the directions, from −radius to radius.
        losses: The loss at each pair, in float64.
        directions: Both directions, as rows.
        kind: ``"random"``, ``"eigenvectors"`` or ``"given"``.
    """

    steps: Tensor
    losses: Tensor
    directions: Tensor
    kind: str


class Sharpness(Spectrum):
    """Sharpness of a mean loss at the present weights of a model.

    Every product with the Hessian is a pass over all data, so a subset is often enough. The model runs in the mode that
    it is in (call ``model.eval()`` for running statistics of BatchNorm and no dropout); statistics are not moved, and
    weights are put back bit for bit, also if a measure is interrupted. With M-SASSHA, measure within
    ``opt.true_weights()``.

    Args:
        model: The network.
        loss_fn: ``loss_fn(model(x), y)``, the mean loss of a batch.
        data: Batches (x, y), as often as they are asked for: a list or a data loader without shuffling. Tensors are
            moved to the model's device.
        progress: Show a progress bar for every measure (needs tqdm).
        seed: Of random directions.
    """

    # ---- perturbations -------------------------------------------------------------------------------------------

    def gradient_gap(self, rho: float = 0.1) -> float:
        """δL_grad: what a step of length ρ along the gradient adds to the loss."""
        check_positive("rho", rho, caller="Sharpness.gradient_gap")
        return self._loss_at(rho * self._ascent_direction("gradient_gap")) - self.loss()

    def average_gap(self, rho: float = 0.1, samples: int = 50) -> float:
        """δL_avg: what a random step of length ρ adds to the loss on average."""
        check_positive("rho", rho, caller="Sharpness.average_gap")
        check_count("samples", samples, caller="Sharpness.average_gap")
        total = 0.0
        with self._bar("average gap", samples) as tick:
            for v in self._directions(samples, signs=False):
                total += self._loss_at(v * (rho / v.norm()))
                tick()
        return total / samples - self.loss()

    def _ascent_direction(self, caller: str) -> Tensor:
        gradient = self.gradient()
        norm = float(gradient.norm())
        if not 0.0 < norm < float("inf"):
            raise ValueError(
                f"Sharpness.{caller}: the gradient has norm {norm}, so there is no direction along it; measure "
                "average_gap, or the curve along another direction"
            )
        return gradient / norm

    def report(self, rho: float = 0.1, *, products: int = 60, samples: int = 50) -> SharpnessReport:
        """All measures of the paper's table."""
        check_positive("rho", rho, caller="Sharpness.report")
        check_count("products", products, caller="Sharpness.report")
        check_count("samples", samples, caller="Sharpness.report")
        return SharpnessReport(
            self.loss(),
            self.eigenvalues()[0],
            self.trace(products),
            self.gradient_gap(rho),
            self.average_gap(rho, samples),
            rho,
        )

    # ---- landscape -----------------------------------------------------------------------------------------------

    def filter_normalised(self, direction: Tensor) -> Tensor:
        """Gives each filter of a direction the norm of the filter of the weights (Li et al., 2018).

        So that networks can be compared whose weights have different scales. A filter is what makes one output: a
        slice of the first dimension. Parameters of one dimension (biases, weights of norms) do not move.
        """
        parts = []
        for d, p in zip(self._shaped(direction), self.params, strict=True):
            if p.dim() < 2:
                parts.append(torch.zeros_like(d))
                continue
            rows, weights = d.flatten(1), p.detach().flatten(1)
            norms = rows.norm(dim=1, keepdim=True)
            scales = weights.norm(dim=1, keepdim=True) / torch.where(norms == 0, 1.0, norms)
            parts.append(rows * scales)
        return self._flat(parts)

    def curve(self, direction: str | Tensor = "random", radius: float = 1.0, points: int = 41) -> Curve:
        """The loss along a line through the weights.

        Args:
            direction: ``"random"``, normalised by filters, so that at 1 the step is as long as the weights are;
                ``"gradient"`` or ``"eigenvector"`` (of λmax), of length 1; or a vector, which is taken as it is.
            radius: How far to go in both directions.
            points: On the line; if odd, the weights themselves are among them.
        """
        caller = "Sharpness.curve"
        check_positive("radius", radius, caller=caller)
        check_count("points", points, least=2, caller=caller)
        kind = direction if isinstance(direction, str) else "given"
        if isinstance(direction, Tensor):
            vector = self._flat(self._shaped(direction))
        elif direction == "random":
            vector = self._random_directions(caller, 1)[0]
        elif direction == "gradient":
            vector = self._ascent_direction("curve")
        elif direction == "eigenvector":
            vector = self.eigenpairs()[1][0]
        else:
            raise ValueError(
                f"{caller}: direction is {direction!r}, expected 'random', 'gradient', 'eigenvector' or a vector"
            )
        steps = _symmetric(radius, points)
        losses = []
        with self._bar(f"curve ({kind})", points) as tick:
            for t in steps.tolist():
                losses.append(self._loss_at(t * vector))
                tick()
        return Curve(steps, torch.tensor(losses, dtype=torch.float64, device="cpu"), vector, kind)

    def surface(
        self, directions: str | tuple[Tensor, Tensor] = "random", radius: float = 1.0, points: int = 21
    ) -> Surface:
        """The loss on a plane through the weights, which takes points² passes over all data.

        Args:
            directions: ``"random"``, two of them, normalised by filters; ``"eigenvectors"`` of the two largest
                eigenvalues, of length 1; or two vectors, which are taken as they are.
            radius: How far to go in all directions.
            points: On each side; if odd, the weights themselves are among them.
        """
        caller = "Sharpness.surface"
        check_positive("radius", radius, caller=caller)
        check_count("points", points, least=2, caller=caller)
        kind = directions if isinstance(directions, str) else "given"
        if not isinstance(directions, str) and len(directions) == 2:
            plane = torch.stack([self._flat(self._shaped(v)) for v in directions])
        elif directions == "random":
            plane = self._random_directions(caller, 2)
        elif directions == "eigenvectors":
            plane = self.eigenpairs(2)[1]
        else:
            raise ValueError(
                f"{caller}: directions is {directions!r}, expected 'random', 'eigenvectors' or two vectors"
            )
        steps = _symmetric(radius, points)
        losses = torch.empty(points, points, dtype=torch.float64, device="cpu")
        with self._bar(f"surface ({kind})", points**2) as tick:
            for i, s in enumerate(steps.tolist()):
                for j, t in enumerate(steps.tolist()):
                    losses[i, j] = self._loss_at(s * plane[0] + t * plane[1])
                    tick()
        return Surface(steps, losses, plane, kind)

    def _random_directions(self, caller: str, n: int) -> Tensor:
        found = torch.stack([self.filter_normalised(v) for v in self._directions(n, signs=False)])
        if not bool(found.any()):
            raise ValueError(
                f"{caller}: a direction normalised by filters is 0, as there is no weight of two dimensions that is "
                "not 0; pass 'gradient' or vectors"
            )
        return found


def _symmetric(radius: float, points: int) -> Tensor:
    """From −radius to radius, both and an odd grid's 0 exactly."""
    return torch.arange(1 - points, points, 2, dtype=torch.float64, device="cpu") / (points - 1) * radius
