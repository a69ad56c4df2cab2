"""Algorithm 1 of the paper in plain torch operations: the oracle of every test, on any device and dtype.

Every elementary operation is rounded on its own: only ``mul``, ``add``, ``sub``, ``div``, ``sqrt``, ``abs`` and
``where``, with scalars as 0-d tensors. Fused forms (``alpha=``, ``addcdiv``, ``lerp``) contract a multiplication and
an addition into one rounding on some devices and not on others, so none is used.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from ctypes import c_float
from typing import Any

import torch
from torch import Tensor

from ._passes.layout import StepScalars
from .variant import Sample

__all__ = [
    "ascend",
    "ascent_scales",
    "completed",
    "compute_dtype",
    "descent",
    "filled",
    "finite_difference",
    "gap_scales",
    "gap_sums",
    "is_unknown",
    "mean_sample",
    "philox",
    "probe",
    "rademacher",
    "root",
    "rounding_noise",
    "sampled",
    "scalar_tensors",
    "square_sum",
    "step",
    "stochastic_round",
    "unseen_sums",
]

# Keep signs, the rounding of an ascent and the rounding of an update on different Philox keys.
ASCENT_NOISE, UPDATE_NOISE = 0x53525244, 0x55504454


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parameters of ``dtype`` are computed and their state is kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- random bits ------------------------------------------------------------------------------------------------


def philox(blocks: Tensor, index: int, draw: int | Tensor, seed: int, domain: int = 0) -> Tensor:
    """Philox4x32-10 of each block number.

    Args:
        blocks: int64 block numbers, the low half of the counter.
        index: Position of the parameter among all parameters.
        draw: Number of the draw, also as a 0-d tensor on the blocks' device.
        seed: The key.
        domain: Mixed into the upper key word to separate independent uses.

    Returns:
        int64 tensor of shape ``(*blocks.shape, 4)`` with four 32-bit words per block.
    """
    low = 0xFFFFFFFF
    c0, c1 = blocks & low, (blocks >> 32) & low
    c2, c3 = torch.full_like(blocks, index & low), torch.zeros_like(blocks) + (draw & low)
    key0, key1 = seed & low, ((seed >> 32) & low) ^ domain
    for _ in range(10):
        # int64 products wrap, but the bits of both halves are right.
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((odd >> 32) & low) ^ c1 ^ key0, odd & low, ((even >> 32) & low) ^ c3 ^ key1, even & low
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    return torch.stack((c0, c1, c2, c3), dim=-1)


def rademacher(like: Tensor, index: int, seed: int, draw: int, first: int = 0, numbers: Tensor | None = None) -> Tensor:
    """Signs z ∈ {−1, +1} in the shape and dtype of ``like``, numbered by logical element.

    One Philox call gives 128 of them. For a part of a tensor, ``first`` is the global number of its first element, or
    ``numbers`` those of all.
    """
    n = like.numel()
    if numbers is not None and n > 0:
        first, last = int(numbers.min()), int(numbers.max())
        words = philox(torch.arange(first // 128, last // 128 + 1, device=like.device), index, draw, seed).reshape(-1)
        offsets = numbers - first // 128 * 128
        return (1 - 2 * ((words[offsets // 32] >> (offsets % 32)) & 1)).to(like.dtype)
    begin, end = first // 128, -(-(first + n) // 128)
    words = philox(torch.arange(begin, max(end, begin), device=like.device), index, draw, seed)
    bits = (words.unsqueeze(-1) >> torch.arange(32, device=like.device)) & 1
    bits = bits.reshape(-1)[first - 128 * begin :][:n]
    return (1 - 2 * bits).to(like.dtype).reshape(like.shape)


def rounding_noise(like: Tensor, index: int, seed: int, draw: int | Tensor, domain: int) -> Tensor:
    """Sixteen random bits (int32) for each element of ``like``, eight elements a Philox call."""
    n = like.numel()
    words = philox(torch.arange(-(-n // 8), device=like.device), index, draw, seed, domain)
    halves = (words.unsqueeze(-1) >> torch.arange(0, 32, 16, device=like.device)) & 0xFFFF
    return halves.reshape(-1)[:n].to(torch.int32).reshape(like.shape)


def stochastic_round(value: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """Rounds float32 values to a neighbour in ``dtype`` at random, so that the expectation is kept."""
    bits = value.contiguous().view(torch.int32)
    if dtype == torch.bfloat16:
        rounded = ((bits + noise) & -0x10000).view(torch.float32)
        usable = torch.isfinite(value) & torch.isfinite(rounded)
    elif dtype == torch.float16:
        normal = ((bits + (noise & 0x1FFF)) & -0x2000).view(torch.float32)  # 13 bits are discarded
        magnitude = value.abs()
        steps = torch.floor(magnitude * 2.0**24 + noise.to(torch.float32) * 2.0**-16)  # subnormals: steps of 2^-24
        rounded = torch.where(magnitude >= 2.0**-14, normal, torch.copysign(steps * 2.0**-24, value))
        usable = rounded.abs() <= 65504.0
    else:
        raise ValueError(f"stochastic_round: dtype is {dtype}, expected torch.bfloat16 or torch.float16")
    return torch.where(usable, rounded, value).to(dtype)


# ---- ascent -----------------------------------------------------------------------------------------------------


def square_sum(grad: Tensor, param: Tensor | None = None) -> Tensor:
    """‖g‖², or ‖|x| ⊙ g‖² where ``param`` is given, summed in double."""
    g = grad.to(compute_dtype(grad.dtype))  # of a momentum, that is what it is
    if param is not None:
        g = param.to(g.dtype).abs() * g
    g = g.to(torch.float64)
    return (g * g).sum()


def ascent_scales(
    square_sums: Tensor,
    rho: Sequence[float | Tensor] | Tensor,
    perturb_eps: Sequence[float] | Tensor,
    *,
    on_device: bool = False,
) -> Tensor:
    """ρ / ‖g‖ per group, rounded to float32 for every dtype; 0 where the norm or the scale is not finite.

    The scale is not where the norm is 0, or next to nothing, and ``perturb_eps`` is 0.

    Rounding hides the order in which the squares were added, which no two backends share. On the CPU these few
    numbers are computed in Python, where they cost less than the calls of torch would, unless ``on_device``
    forbids to read a tensor from the host. Elsewhere ρ and ``perturb_eps`` may be float64 tensors that are there.
    """
    if square_sums.device.type == "cpu" and not on_device and not isinstance(rho, Tensor):
        total = sum(square_sums.tolist())
        norm = math.sqrt(total) if math.isfinite(total) else math.inf
        pairs = zip(map(float, rho), perturb_eps, strict=True)
        quotients = [r / (norm + e) if norm + e > 0.0 else 0.0 for r, e in pairs]
        largest = torch.finfo(torch.float32).max
        kept = array("f", [q if abs(q) <= largest else 0.0 for q in quotients])
        return torch.frombuffer(kept, dtype=torch.float32)  # in half the time of torch.tensor
    norms = square_sums.sum().sqrt()
    radii, offsets = _column(rho, square_sums.device), _column(perturb_eps, square_sums.device)
    scales = (radii / (norms + offsets)).to(torch.float32)
    return torch.where(torch.isfinite(norms) & torch.isfinite(scales), scales, torch.zeros_like(scales))


def _column(values: Sequence[float | Tensor] | Tensor, device: torch.device) -> Tensor:
    """Numbers and 0-d tensors as one float64 tensor."""
    if isinstance(values, Tensor):
        return values
    return torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device).reshape(()) for v in values])


def ascend(
    param: Tensor,
    grad: Tensor,
    scale: Tensor,
    *,
    adaptive: bool = False,
    noise: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """x + ε with ε = ρ g/‖g‖, or ε = ρ x²⊙g/‖|x|⊙g‖ (ASAM). ``scale`` is ρ over the norm.

    M-SASSHA has the momentum of the last step in place of g, and −ρ in place of ρ.

    Reduced-precision parameters are rounded stochastically with ``noise``: rounding to nearest would lose most of ε.
    ``weight`` is x where it is known in more bits than ``param`` has.
    """
    dtype = compute_dtype(param.dtype)
    x, g, scale = (param if weight is None else weight).to(dtype), grad.to(dtype), scale.to(dtype)
    eps = scale * g
    if adaptive:
        eps = eps * (x * x)
    moved = x + eps
    if param.dtype != dtype:
        if noise is None:
            raise ValueError(f"ascend: a {param.dtype} parameter needs noise for stochastic rounding")
        moved = stochastic_round(moved, param.dtype, noise)
    # Selected, never multiplied: with a scale of 0 the gradient may be infinite, and 0·inf is NaN.
    return torch.where(scale == 0, param, moved)


# ---- gap --------------------------------------------------------------------------------------------------------


def gap_sums(grad: Tensor, first: Tensor) -> Tensor:
    """‖g‖², g·g̃ and ‖g̃‖², summed in double. ``first`` is g, the gradient at x, and ``grad`` is g̃."""
    dtype = compute_dtype(grad.dtype)
    g2, g = grad.to(dtype).double(), first.to(dtype).double()
    return torch.stack(((g * g).sum(), (g * g2).sum(), (g2 * g2).sum()))


def gap_scales(sums: Tensor, alpha: Sequence[float] | Tensor) -> Tensor:
    """α and g·g̃/‖g̃‖² per group, in float32 for every dtype; α = 0 where the quotient is not finite.

    Rounding hides the order of summation, as in :func:`ascent_scales`.
    """
    share = (sums[1] / sums[2]).to(torch.float32).expand(len(alpha))
    rows = torch.stack((_column(alpha, sums.device).to(torch.float32), share), dim=1)
    return torch.where(torch.isfinite(share).unsqueeze(1), rows, torch.zeros_like(rows))


def descent(grad: Tensor, first: Tensor, scales: Tensor) -> Tensor:
    """g̃ − α g⊥, where g⊥ = g − (g·g̃/‖g̃‖²) g̃ is the part of g that is orthogonal to g̃ (GSAM)."""
    dtype = compute_dtype(grad.dtype)
    g2, g = grad.to(dtype), first.to(dtype)
    alpha, share = scales.to(dtype)
    taken = g2 - alpha * (g - share * g2)
    return torch.where(alpha == 0, grad, taken.to(grad.dtype))  # selected: g may be infinite


# ---- root -------------------------------------------------------------------------------------------------------


def root(value: Tensor) -> Tensor:
    """√value, correctly rounded.

    ``torch.sqrt`` on the CPU may go through a vector library whose last bit is wrong: in 20 % of float32 values and
    1 % of float64 values, as seen with MKL on AMD. Kernels use the processor's instruction, which is right.
    """
    if value.dtype == torch.float32:
        # The root of a 24-bit number is never close enough to a midpoint for a last-bit error in double to matter.
        return value.to(torch.float64).sqrt().to(torch.float32)
    small, large = value < 2.0**-700, value > 2.0**700  # keep the residual below away from under- and overflow
    one = torch.ones_like(value)
    value = value * torch.where(small, 2.0**500 * one, torch.where(large, 2.0**-500 * one, one))
    near = value.sqrt()
    # value − near², exactly: near² as a sum of two doubles (Dekker), from halves of 26 bits (Veltkamp).
    split = near * 134217729.0
    high = split - (split - near)
    low = near - high
    square = near * near
    error = ((high * high - square) + (high * low + high * low)) + low * low
    residual = (value - square) - error
    # The nearest double is the one whose square misses by less than near times half the gap, twice.
    above, below = torch.nextafter(near, near + torch.inf), torch.nextafter(near, torch.zeros_like(near))
    exact = torch.where(residual > near * (above - near), above, near)
    exact = torch.where(residual <= -near * (near - below), below, exact)
    exact = torch.where((near > 0) & torch.isfinite(near), exact, near)
    return exact * torch.where(small, 2.0**-250 * one, torch.where(large, 2.0**250 * one, one))


# ---- step -------------------------------------------------------------------------------------------------------


def probe(param: Tensor, h: Tensor, index: int, seed: int, draw: int, numbers: Tensor | None = None) -> Tensor:
    """x + h z, rounded to the parameter's dtype; h is a 0-d tensor. ``numbers`` as for :func:`rademacher`."""
    x = param.to(compute_dtype(param.dtype))
    z = rademacher(x, index, seed, draw, numbers=numbers)
    return (x + h.to(x.dtype) * z).to(param.dtype)


def finite_difference(probed: Tensor, grad: Tensor) -> Tensor:
    """h·Hz = ∇f(x+ε+hz) − ∇f(x+ε), in the compute dtype. The update divides by h."""
    dtype = compute_dtype(grad.dtype)
    return probed.to(dtype) - grad.to(dtype)


def scalar_tensors(scalars: StepScalars, dtype: torch.dtype, device: torch.device) -> Any:
    """The same fields as 0-d tensors, rounded once: a Python number may enter an operation in double."""

    def rounded(value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(device, dtype)
        # As a cast in C does it: what is out of range becomes infinite, where torch would raise.
        cast = c_float(value).value if dtype == torch.float32 else value
        return torch.full((), cast, dtype=dtype, device=device)

    return StepScalars(*map(rounded, scalars))


def sampled(h: Tensor, sample: Sample) -> Tensor:
    """What the average D takes of h = z⊙Hz. Adding 0 makes +0 of −0, which would say that no curvature is known."""
    if sample is Sample.SIGNED:
        return h + 0.0
    return h.abs() if sample is Sample.ABS else h * h


def is_unknown(hessian: Tensor) -> Tensor:
    """Where no curvature is known yet: where D is −0, with which it starts."""
    return (hessian == 0) & torch.signbit(hessian)


def is_unseen(product: Tensor, grad: Tensor, *, zero_is_seen: bool = False) -> Tensor:
    """Where the batch had nothing to tell, as of a token that is not in it: gradient and product are 0."""
    return torch.zeros_like(product, dtype=torch.bool) if zero_is_seen else (product == 0) & (grad == 0)


def unseen_sums(hessian: Tensor, product: Tensor, grad: Tensor) -> Tensor:
    """Elements that a refresh did not see, elements whose curvature is known, and the sum of theirs, in double."""
    known = ~is_unknown(hessian)
    total = torch.where(known, hessian, torch.zeros_like(hessian)).to(torch.float64).sum()
    return torch.stack((is_unseen(product, grad).sum().double(), known.sum().double(), total))


def filled(hessian: Tensor, product: Tensor, grad: Tensor, sums: Tensor) -> Tensor:
    """D, where elements that no refresh has seen get the mean of the others. ``sums`` are of :func:`unseen_sums`.

    The mean is rounded to float32 for every dtype, which hides the order of summation, as in :func:`ascent_scales`.
    """
    mean = (sums[2] / sums[1]).to(torch.float32).to(hessian.dtype)
    wanted = is_unknown(hessian) & is_unseen(product, grad) & (sums[0] > 0) & (sums[1] > 0)
    return torch.where(wanted, mean, hessian)


def completed(
    hessian: Tensor, product: Tensor, grad: Tensor, seen: Tensor, s: StepScalars, sample: Sample, mean: Tensor
) -> Tensor:
    """z⊙Hz of a batch that is not the gradient's, with what is known in place of what that batch did not show.

    Where the gradient is 0 as well, the update sees by itself that there is nothing to tell. Elsewhere it would take
    this 0 for a curvature, and divide by eps. The stand-in is the product with which D weighs as it did before, or the
    mean of the parameter's samples where nothing is known yet.
    """
    estimate = torch.where(is_unknown(hessian), mean, hessian * (s.kept / s.first))
    stand_in = (torch.sqrt(estimate) if sample is Sample.SQUARE else estimate) / s.product_scale
    return torch.where(seen | (grad == 0), product.to(hessian.dtype), stand_in)


def mean_sample(product: Tensor, seen: Tensor, s: StepScalars, sample: Sample) -> Tensor:
    """The mean of what D takes of the products that were seen, NaN if none was; rounded as in :func:`filled`."""
    samples = sampled(product * s.product_scale, sample)
    counted = seen & torch.isfinite(samples)
    total = torch.where(counted, samples, torch.zeros_like(samples)).to(torch.float64).sum()
    return (total / counted.sum()).to(torch.float32).to(samples.dtype)


def refreshed(hessian: Tensor, sample: Tensor, unseen: Tensor, s: StepScalars) -> Tensor:
    """D after a refresh with finite samples.

    All D of a parameter weigh the same: (1−β2^r) after r refreshes. So the first sample of an element, whenever it
    comes, gets all of that weight, and D of an element that was not seen grows by as much as the weight does.
    """
    averaged = s.beta2 * hessian + s.one_minus_beta2 * sample
    known = torch.where(is_unknown(hessian), s.first * sample, averaged)
    return torch.where(unseen, hessian * s.kept, known)


def step(
    x: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    hessian: Tensor,
    scalars: StepScalars,
    curvature: Tensor | None = None,
    noise: Tensor | None = None,
    sample: Sample = Sample.ABS,
    *,
    zero_is_seen: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Lines 7 to 16 of Algorithm 1 for one parameter.

    Args:
        x: The unperturbed parameter.
        grad: g̃, the gradient at x + ε.
        exp_avg: m of the last step.
        hessian: D of the last refresh. It starts at −0, which says that no curvature is known yet.
        scalars: See :class:`StepScalars`.
        curvature: On a refresh Σ z⊙Hz over the probes, up to ``scalars.product_scale``; None otherwise.
        noise: Rounds the next x of a reduced-precision parameter stochastically; None rounds to nearest.
        sample: What a refresh adds to D: |Ĥ|, Ĥ or Ĥ².
        zero_is_seen: Whether an element whose gradient and product are both 0 has no curvature. Else it was not seen,
            like a token that is not in the batch.

    Returns:
        The next x, m and D.
    """
    dtype = compute_dtype(x.dtype)
    s = scalar_tensors(scalars, dtype, x.device)
    g, x_now = grad.to(dtype), x.to(dtype)
    bias2 = s.bias2

    # m = β1 m + (1−β1) g̃
    m = s.beta1 * exp_avg + s.one_minus_beta1 * (s.grad_scale * g)
    # D = β2 D + (1−β2) |Ĥ|, where Ĥ is finite and was seen
    d = hessian
    if curvature is not None:
        h = sampled(curvature.to(dtype) * s.product_scale, sample)
        finite = torch.isfinite(h)
        d = torch.where(finite, refreshed(d, h, is_unseen(curvature, g, zero_is_seen=zero_is_seen), s), d)
        bias2 = torch.where(finite, s.bias2, s.bias2_kept)
    # D̄ = max(D / (1−β2^t), floor)^power
    d_bar = d / bias2
    d_bar = torch.where(d_bar < s.floor, s.floor, d_bar)
    if scalars.power == 0.5:
        d_bar = root(d_bar)
    elif scalars.power != 1.0:
        d_bar = d_bar.pow(s.power)
    # x ← x(1−ηλ) − η m̄ / (D̄ + eps)
    ratio = torch.clamp(m / (d_bar + s.eps), -s.clip, s.clip)
    moved = x_now * s.decay - s.step_size * ratio
    rounded = moved.to(x.dtype) if noise is None or x.dtype == dtype else stochastic_round(moved, x.dtype, noise)
    # No weight moves before its curvature is known, and nothing at all where gradients overflowed.
    x_next = torch.where(is_unknown(d), x, rounded)
    results = (x_next, m, d)
    if isinstance(scalars.skip, Tensor) or scalars.skip:
        results = tuple(torch.where(s.skip != 0, a, b) for a, b in zip((x, exp_avg, hessian), results, strict=True))  # type: ignore[assignment]
    return results
