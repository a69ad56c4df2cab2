"""Relatives of SASSHA on the same passes: G-SASSHA, AdaHessian, Sophia-H. Each fixes choices and adds no arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ._core.ascent import NoAscent
from ._core.descent import Preconditioned
from ._core.optimizer import FusedOptimizer, Params
from ._core.options import arguments, check_group
from .checks import check_number
from .sassha import SASSHA
from .variant import ADAHESSIAN, G_SASSHA, SOPHIA_H

__all__ = ["GSASSHA", "AdaHessian", "SophiaH"]


class GSASSHA(SASSHA):
    r"""G-SASSHA: SASSHA that also lowers GSAM's surrogate gap f(x+ε) − f(x).

    It descends along g̃ − α·g⊥ in place of g̃, where g⊥ is the component of the gradient at x that is orthogonal to the
    one at x + ε. With α = 0 it is SASSHA, bit for bit. After ``unperturb()`` the parameters' gradients are those to
    descend along, so that clipping and reduction over processes apply to them.

    Args:
        params: Parameters, named parameters or dicts of parameter groups.
        *args: Positional arguments of :class:`sassha_fast.SASSHA`.
        alpha: α, from 0.01 to 0.3 in the paper's search. May differ between parameter groups.
        **options: Keyword arguments of :class:`sassha_fast.SASSHA`.
    """

    preset = G_SASSHA

    def __init__(self, params: Params, *args: Any, alpha: float = 0.1, **options: Any) -> None:
        """Checks the arguments; see the class."""
        super().__init__(params, *args, **options)
        self.defaults["alpha"] = alpha
        for group in self.param_groups:
            group.setdefault("alpha", alpha)
            check_group(group, ["alpha"], caller=type(self).__name__)
        self._parts.checked.expect(self.defaults)


class AdaHessian(FusedOptimizer):
    r"""AdaHessian (Yao et al., 2021): division by the root mean square of Hessian diagonals, averaged over filters.

    :math:`D = β_2 D + (1-β_2) (\hat H^{(s)})^2` and :math:`x ← x(1-ηλ) - η \bar m / (\bar D^{k/2} + eps)`. A loop for
    ``torch.optim.AdamW`` needs a graph where ``opt.hessian_due`` says so, or ``opt.step(closure)``. The arguments up
    to ``seed`` are those of the SASSHA authors' implementation. Between refreshes D and its bias correction stay,
    where theirs averages the old estimate in again.

    Args:
        params: Parameters, named parameters or dicts of parameter groups.
        lr: Learning rate η.
        betas: Decay of the averages of gradient and squared curvature.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay λ.
        hessian_power: Exponent k of the root mean square. ``param_groups`` have k/2, the exponent of D.
        lazy_hessian: Steps from one refresh of the curvature to the next.
        n_samples: Probes averaged in a refresh.
        seed: Key of the probes.
        spatial_averaging: Average |ẑ⊙Hz| over each filter of a convolution (parameters of four dimensions).
        **options: Further arguments of :class:`sassha_fast.SASSHA` that are not about the ascent.
    """

    ascent_part = NoAscent
    descent_part = Preconditioned

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.15,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        hessian_power: float = 1.0,
        lazy_hessian: int = 1,
        n_samples: int = 1,
        seed: int = 0,
        *,
        spatial_averaging: bool = True,
        **options: Any,
    ) -> None:
        """Checks the arguments; see the class."""
        name = type(self).__name__
        check_number("hessian_power", hessian_power, caller=name)
        given = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "hessian_power": hessian_power / 2,
            "lazy_hessian": lazy_hessian,
            "n_samples": n_samples,
            "seed": seed,
            "spatial_averaging": spatial_averaging,
        }
        variant = replace(ADAHESSIAN, by_filter=bool(spatial_averaging))
        super().__init__(params, *arguments(name, variant, given, options, refused=_refused()))


class SophiaH(FusedOptimizer):
    r"""Sophia-H (Liu et al., 2024): clipped steps by signed Hessian diagonals, bounded from below.

    :math:`h = β_2 h + (1-β_2) \hat H` every k steps and
    :math:`x ← x(1-ηλ) - η \operatorname{clip}(m / \max(γ h, ε), 1)`, without bias corrections. A loop for
    ``torch.optim.AdamW`` needs a graph where ``opt.hessian_due`` says so, or ``opt.step(closure)``. The arguments up to
    ``seed`` are those of the SASSHA authors' implementation, which divides by γ max(h, 0) + ε instead.

    Args:
        params: Parameters, named parameters or dicts of parameter groups.
        lr: Learning rate η.
        betas: Decay of the averages of gradient and curvature.
        eps: Least denominator ε.
        weight_decay: Decoupled weight decay λ.
        lazy_hessian: Steps k from one refresh of the curvature to the next.
        n_samples: Probes averaged in a refresh.
        clip_threshold: γ: the smaller, the more elements move by η, as in signSGD.
        seed: Key of the probes.
        **options: Further arguments of :class:`sassha_fast.SASSHA` that are not about the ascent.
    """

    ascent_part = NoAscent
    descent_part = Preconditioned

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.965, 0.99),
        eps: float = 1e-15,
        weight_decay: float = 1e-1,
        lazy_hessian: int = 10,
        n_samples: int = 1,
        clip_threshold: float = 0.04,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Checks the arguments; see the class."""
        given = {
            "lr": lr,
            "betas": betas,
            "eps": 0.0,
            "hessian_floor": eps,
            "weight_decay": weight_decay,
            "hessian_power": 1.0,
            "lazy_hessian": lazy_hessian,
            "n_samples": n_samples,
            "seed": seed,
            "bias_correction": False,
            "clip_update": 1.0,
        }
        refused = _refused("clip_update", "hessian_floor", "bias_correction", "hessian_power")
        extra = {"clip_threshold": clip_threshold}
        name = type(self).__name__
        super().__init__(params, *arguments(name, SOPHIA_H, given, options, refused=refused, extra=extra))


def _refused(*fixed: str) -> dict[str, str]:
    """Arguments about an ascent, and those that a method has fixed."""
    names = ("rho", "rho_scheduler", "perturb_eps", "perturb_sync", "hvp_point", *fixed)
    return dict.fromkeys(names, "the method does without it, or has it fixed")
