"""SASSHA: its arguments, and the parts that it is made of."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from . import schedules
from ._core.ascent import GradientAscent
from ._core.descent import Preconditioned
from ._core.optimizer import FusedOptimizer, Params
from ._core.options import arguments
from .checks import check_choice
from .variant import SASSHA_, Sample, Variant

__all__ = ["SASSHA"]


class SASSHA(FusedOptimizer):
    r"""Sharpness-aware second-order optimization with a stable Hessian approximation (SASSHA, ICML 2025).

    A drop-in replacement for the authors' optimizer, and for ``torch.optim.AdamW`` in all that is not specific to
    the method. One step is three calls::

        loss_fn(model).backward()
        opt.perturb_weights(zero_grad=True)
        loss_fn(model).backward(create_graph=opt.hessian_due)
        opt.unperturb()
        opt.step()
        opt.zero_grad()

    Args:
        params: Parameters, named parameters or dicts of parameter groups.
        hessian_power_scheduler: A function of the step number (:mod:`sassha_fast.schedules`) or an object with
            ``step()`` that gives ``hessian_power`` at each step. May also be assigned later.
        lr: Learning rate η, a float or a 0-d tensor.
        betas: Decay of the averages of gradient and curvature.
        weight_decay: Decoupled weight decay λ.
        rho: Radius ρ of the ascent.
        lazy_hessian: Steps k from one refresh of the curvature to the next.
        n_samples: Probes averaged in a refresh.
        perturb_eps: Added to the gradient norm.
        eps: Added to the denominator.
        adaptive: ASAM's scale-invariant ascent.
        grad_reduce: ``"mean"`` or ``"sum"`` over processes, of gradients and products.
        seed: Key of the probes.
        hessian_power: Exponent of the curvature: ½ in the paper.
        hvp: How Hessian-vector products are computed: ``"exact"``, by double backward; ``"finite_difference"``, from
            one more gradient, without a graph; ``"central_difference"``, from two.
        hvp_point: Where the Hessian is taken. ``"perturbed"`` follows the paper: at x + ε. ``"upstream"`` does what
            the authors' image code does, which restores x first and so mixes activations of x + ε with weights x.
        backend: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"triton"``, ``"foreach"`` or ``"reference"``.
        bias_correction: False leaves both moving averages uncorrected, as the authors' language-model code does.
        rho_scheduler: Like ``hessian_power_scheduler``, for ``rho``.
        curvature: What a product h = z⊙Hz adds to the average D: ``"abs"``, as in the paper; ``"signed"``, h itself
            (No-Abs); ``"square"``, h².
        hessian_floor: Least value of D in a denominator (clipping). None lets a signed D be negative.
        adaptive_bias: Whether ``adaptive`` covers parameters of one dimension, biases and weights of norms, too.
        max_grad_norm: Scales the gradient at x + ε down to this norm, in the update itself; its norm is one more read.
        clip_update: Bound of every element of m̄/(D̄ + eps).
        unseen: What a refresh makes of elements whose gradient and product are both exactly 0, as rows of an embedding
            whose tokens are not in the batch. ``"keep"`` keeps their curvature, and gives those that were never seen
            the mean of their parameter; ``"zero"`` takes it for a curvature of 0, as the authors' code does.
        skip_nonfinite: Skip a step whose gradient at x + ε is not finite: weights and state stay as they were.
        stochastic_rounding: Round updates of bfloat16 and float16 parameters at random, so that small ones are not
            lost. The same on all backends.
        state_bits: Bits of m and D: 32, 16 (bfloat16) or 8, with a scale for every 32 elements. They are rounded at
            random, by the number of the step, so that averages do not stand still.
        master_weight_bits: Bits of the weights of bfloat16 and float16 parameters: None for those that they have, 24 or
            32 for a correction of 8 or 16 bits beside each, which the optimizer keeps.
        full_precision_below: Parameters with fewer elements, and those of one dimension, are kept in float32 whatever
            the two arguments above say. They are few, and the most sensitive.
        capturable: Keep step counts and bias corrections on the device and read ``Tensor`` learning rates and radii
            there, so that ordinary steps never wait for the device and can be captured in a CUDA graph. Whether a step
            refreshes is still decided on the host; see :meth:`replayed`.
        reduce_grads: Whether gradients and products are reduced over processes here: True if the passes are local (as
            in the authors' loop, under ``no_sync``), False if they are reduced already. None finds out, from an
            attached ``DistributedDataParallel`` or by comparing gradients in the first step.
        perturb_sync: Climb along the gradient of all processes; False climbs in each along its own (m-sharpness).
        maximize: Maximize the objective instead.
        foreach: torch's name for ``backend="foreach"``.
        fused: torch's name for the backend with kernels.

    Attributes:
        stats (Stats): What the last step saw; see :class:`sassha_fast.Stats`.

    ``lr``, ``betas``, ``weight_decay``, ``rho``, ``perturb_eps``, ``eps``, ``hessian_power``, ``hessian_floor``,
    ``clip_update`` and ``maximize`` may differ between parameter groups.
    """

    ascent_part = GradientAscent
    descent_part = Preconditioned
    preset: Variant = SASSHA_

    def __init__(
        self,
        params: Params,
        hessian_power_scheduler: schedules.Schedule | schedules.Stepping | None = None,
        lr: float | Tensor = 0.15,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        rho: float = 0.0,
        lazy_hessian: int = 10,
        n_samples: int = 1,
        perturb_eps: float = 1e-12,
        eps: float = 1e-4,
        adaptive: bool = False,
        grad_reduce: str = "mean",
        seed: int = 0,
        *,
        hessian_power: float = 0.5,
        hvp: str = "exact",
        hvp_point: str = "perturbed",
        backend: str = "auto",
        bias_correction: bool = True,
        rho_scheduler: schedules.Schedule | schedules.Stepping | None = None,
        curvature: str = "abs",
        hessian_floor: float | None = 0.0,
        adaptive_bias: bool = True,
        max_grad_norm: float | None = None,
        clip_update: float | None = None,
        unseen: str = "keep",
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        state_bits: int = 32,
        master_weight_bits: int | None = None,
        full_precision_below: int = 4096,
        capturable: bool = False,
        reduce_grads: bool | None = None,
        perturb_sync: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        """Checks the arguments; see the class."""
        given = dict(locals())  # every argument by its name
        name = type(self).__name__
        check_choice("curvature", curvature, tuple(sample.name.lower() for sample in Sample), caller=name)
        axes = {"adaptive": bool(adaptive), "adaptive_bias": bool(adaptive_bias), "sample": Sample[curvature.upper()]}
        super().__init__(params, *arguments(name, replace(self.preset, **axes), given))  # type: ignore[arg-type]
