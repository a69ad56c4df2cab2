"""The passes over one list of parameters, in their plainest form: backend ``reference``.

An object of this class is bound to parameters of one device and lives as long as their addresses stand. Other
backends override the passes that they make faster; what they write has the same bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import formats, reference
from ..checks import lacks_memory
from ..formats import FULL, Format
from ..variant import Sample
from .accessors import address, dtype, is_contiguous, numel
from .layout import (
    JOURNAL_WORDS,
    PROBE_GRADIENT,
    SIGNED_PRODUCT,
    TALLY_WORDS,
    UNSEEN_WORDS,
    UPDATES,
    X_IN_BACKUP,
    Scalars,
    StepScalars,
)
from .shards import Shard


@dataclass(frozen=True)
class Members:
    """Parallel lists that describe parameters of one device.

    Attributes:
        weights: Their data, without autograd history and without a version counter of its own to move.
        indices: Position of each among all parameters of the optimizer: its stream of random numbers.
        groups: Parameter group of each.
        n_groups: Number of parameter groups of the optimizer.
        names: What to call each in an error.
        shards: Where each lies in its parameter, None if it is the whole of it; empty if all are.
        caller: What errors call the optimizer.
        format: How all of them and their state are stored.
    """

    weights: list[Tensor]
    indices: list[int]
    groups: list[int]
    n_groups: int
    names: list[str]
    shards: Sequence[Shard | None] = ()
    caller: str = "SASSHA"
    format: Format = FULL

    def shard(self, i: int) -> Shard | None:
        """Where member ``i`` lies in its parameter."""
        return self.shards[i] if self.shards else None

    def numbers(self, i: int) -> Tensor | None:
        """Global numbers of the elements of member ``i``, if it is a shard."""
        shard, weight = self.shard(i), self.weights[i]
        return None if shard is None else shard.numbers(tuple(weight.shape), weight.device)

    def take(self, positions: Sequence[int]) -> Members:
        """The members at ``positions``."""
        return Members(
            [self.weights[i] for i in positions],
            [self.indices[i] for i in positions],
            [self.groups[i] for i in positions],
            self.n_groups,
            [self.names[i] for i in positions],
            [self.shards[i] for i in positions] if self.shards else (),
            self.caller,
            self.format,
        )


class Products(NamedTuple):
    """Hessian-vector products of a list of parameters.

    Attributes:
        values: Of each parameter Hz, or what ``kinds`` says, up to the update's ``product_scale``; None for none.
        kinds: 0 for Hz, whose signs the update draws again itself; ``SIGNED_PRODUCT`` for Σ z⊙Hz over the probes;
            ``PROBE_GRADIENT`` for the gradient at x + ε + hz.
    """

    values: list[Tensor | None]
    kinds: list[int]

    @classmethod
    def signed(cls, values: Sequence[Tensor | None]) -> Products:
        """Sums of z⊙Hz."""
        return cls(list(values), [SIGNED_PRODUCT] * len(values))

    def take(self, positions: Sequence[int]) -> Products:
        """The products at ``positions``."""
        return Products([self.values[i] for i in positions], [self.kinds[i] for i in positions])

    def spread(self, positions: Sequence[int], length: int) -> Products:
        """A list of this length with the products at ``positions``, and none elsewhere."""
        if len(positions) == length:
            return self
        found = Products([None] * length, [0] * length)
        for i, value, kind in zip(positions, *self, strict=True):
            found.values[i], found.kinds[i] = value, kind
        return found


class Stepped(NamedTuple):
    """What an update found on its way.

    Attributes:
        tallies: On a refresh a float64 tensor [members, 3]: Σ z⊙Hz over the elements that were seen, how many of them
            are negative, and how many there are.
        square_sums: ‖m‖² per group (‖|x|⊙m‖² where ``adaptive``), where x is kept in state.
    """

    tallies: Tensor | None = None
    square_sums: Tensor | None = None


def check_grads(members: Members, grads: Sequence[Tensor]) -> None:
    """Raises unless each gradient has the device, dtype and shape of its parameter and is dense."""
    for name, weight, grad in zip(members.names, members.weights, grads, strict=True):
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"{members.caller}: the gradient of {name} is sparse ({grad.layout}), expected a dense one; make it "
                "so, for example by nn.Embedding(sparse=False)"
            )
        for what in ("device", "dtype", "shape"):
            found, expected = getattr(grad, what), getattr(weight, what)
            if found != expected:
                raise RuntimeError(
                    f"{members.caller}: the gradient of {name} has {what} {_plain(found)}, expected "
                    f"{_plain(expected)} like the parameter; it was computed before "
                    "the parameter changed: call zero_grad() and backward() again"
                )
        if lacks_memory(grad):
            raise RuntimeError(
                f"{members.caller}: the gradient of {name} has lost its memory: its storage has "
                f"{grad.untyped_storage().nbytes()} bytes; somebody has resized it since backward(): call "
                "zero_grad() and backward() again"
            )


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value


def forms_of(weights: list[Tensor]) -> tuple[list[int], list[torch.dtype], list[bool]]:
    """What kernels rely on beside the address of each."""
    return list(map(numel, weights)), list(map(dtype, weights)), list(map(is_contiguous, weights))


class Passes:
    """Norm, ascent, restore, probes and update over one list of parameters.

    Each pass that moves weights writes everything in a single call, and the journal with it. So an interrupt leaves
    all of it or none, and :attr:`x_in_backup` and :attr:`updates` say which.
    """

    name = "reference"
    sees_negatives = False  # whether gradients may have torch's negative bit

    @classmethod
    def takes(cls, weight: Tensor, stored: Format = FULL) -> bool:
        """Whether these passes work on a tensor as it lies in memory, if it is stored so."""
        del weight, stored
        return True

    def __init__(self, members: Members) -> None:
        """Binds the passes to ``members``."""
        self.members = members
        self._places, self._forms = list(map(address, members.weights)), forms_of(members.weights)
        self.grads: list[Tensor] = []
        self.backups: list[Tensor] = []
        self.exp_avgs: list[Tensor] = []
        self.hessians: list[Tensor] = []
        self.xs: list[Tensor] | None = None  # x of every member, where it is kept in state
        self.corrections: list[Tensor] | None = None
        self.exp_avg_scales: list[Tensor] | None = None
        self.hessian_scales: list[Tensor] | None = None
        self._rounding: tuple[int, Tensor | None] = (0, None)  # seed and draw with which the last update rounded state
        self.firsts: list[Tensor] = []
        self.products: Products | None = None  # of the last update
        self.found = Stepped()
        self._words = array("q", [0] * JOURNAL_WORDS)
        self.journal = torch.frombuffer(self._words, dtype=torch.int64)

    @property
    def x_in_backup(self) -> bool:
        """Whether the parameters hold x + ε of an ascent, and the backups x."""
        return self._words[X_IN_BACKUP] != 0

    @property
    def updates(self) -> int:
        """How many updates have run."""
        return self._words[UPDATES]

    def begin_call(self) -> None:
        """A call of the optimizer begins, in a capture of CUDA or outside of one. Only a device needs to know."""

    def kept(self) -> list[Tensor]:
        """Memory beside parameters and state that the next calls go on using."""
        return list(self.backups)

    def _write(self, tensors: list[Tensor], values: list[Tensor], word: int, value: int) -> None:
        """Copies values to their tensors and a number into the journal, in one call."""
        torch._foreach_copy_([*tensors, self.journal[word]], [*values, torch.tensor(value, device="cpu")])

    def bind_state(self, exp_avgs: list[Tensor], hessians: list[Tensor], xs: list[Tensor] | None = None) -> None:
        """Sets m and D of every member, and x where it is kept in state: the parameter then holds x + ε."""
        self.exp_avgs, self.hessians, self.xs = exp_avgs, hessians, xs

    def bind_compact(
        self, corrections: list[Tensor] | None, exp_avg_scales: list[Tensor] | None, hessian_scales: list[Tensor] | None
    ) -> None:
        """Sets what goes with m, D and x where :attr:`Members.format` stores them in fewer bits."""
        self.corrections, self.exp_avg_scales, self.hessian_scales = corrections, exp_avg_scales, hessian_scales

    def bind_firsts(self, firsts: list[Tensor]) -> None:
        """Sets the gradients of the first pass, for :meth:`gap_sums` and :meth:`decompose`."""
        self.firsts = firsts

    def holds(self, weights: list[Tensor], *, in_form: bool) -> bool:
        """Whether members are where and what they were when the passes were bound to them.

        Args:
            weights: The members as they are now.
            in_form: Whether to look at size, dtype and order of elements too.
        """
        return list(map(address, weights)) == self._places and (not in_form or forms_of(weights) == self._forms)

    def bind_grads(self, grads: list[Tensor], *, overwrite: bool = False) -> None:
        """Checks and sets the gradients that the coming pass reads; ``overwrite`` says that it may be an ascent."""
        del overwrite  # only a backend that writes into their memory needs to know whose it is
        check_grads(self.members, grads)
        self.grads = grads

    def square_sums(self, *, adaptive: bool) -> Tensor:
        """Squared gradient norm per group, in double; of |x| ⊙ g where ``adaptive``."""
        members = self.members
        sums = torch.zeros(members.n_groups, dtype=torch.float64, device=members.weights[0].device)
        for group, grad, weight in zip(members.groups, self.grads, members.weights, strict=True):
            sums[group] += reference.square_sum(grad, weight if adaptive else None)
        return sums

    def perturb(
        self, scales: Tensor, *, adaptive: bool, take_grads: bool | Sequence[bool], seed: int, draw: Tensor
    ) -> None:
        """Moves the parameters to x + ε and keeps x.

        Args:
            scales: ρ over the norm, float32, per group.
            adaptive: ASAM's ascent.
            take_grads: Gradients nobody else will read, whose memory may hold x from now on: all, none, or each.
            seed: Key of the rounding noise of reduced-precision parameters.
            draw: Draw of that noise, one int64 on the device.
        """
        del take_grads  # memory is no concern here
        members, moved = self.members, []
        for i, (weight, grad, group) in enumerate(zip(members.weights, self.grads, members.groups, strict=True)):
            noise, x = self._noise(i, seed, draw, reference.ASCENT_NOISE), self._corrected(i, weight)
            moved.append(reference.ascend(weight, grad, scales[group], adaptive=adaptive, noise=noise, weight=x))
        self.backups = [weight.clone() for weight in members.weights]
        self._write(members.weights, moved, X_IN_BACKUP, 1)
        self.grads = []

    def restore(self) -> None:
        """Puts x back, bit for bit, unless it is there already."""
        if self.x_in_backup:
            self._write(self.members.weights, self.backups, X_IN_BACKUP, 0)
        self.backups = []

    def forget_backups(self) -> None:
        """Gives up x of every member, which somebody else has put back."""
        self._words[X_IN_BACKUP] = 0
        self.backups = []

    def momentum_ascent(self, scales: Tensor, *, adaptive: bool, seed: int, draw: Tensor) -> None:
        """Writes x + ε into the parameters, from x in state and from m. Arguments as of :meth:`perturb`."""
        assert self.xs is not None
        for i, weight in enumerate(self.members.weights):
            noise, scale = self._noise(i, seed, draw, reference.ASCENT_NOISE), scales[self.members.groups[i]]
            x, m = self._corrected(i, self.xs[i]), self._momentum(i)
            weight.copy_(reference.ascend(self.xs[i], m, scale, adaptive=adaptive, noise=noise, weight=x))

    def show_x(self) -> None:
        """Writes x, which is kept in state, into the parameters."""
        assert self.xs is not None
        torch._foreach_copy_(self.members.weights, self.xs)

    def gap_sums(self) -> Tensor:
        """‖g‖², g·g̃ and ‖g̃‖² over all members, in double: of the first pass's gradients and the bound ones."""
        return torch.stack([reference.gap_sums(*pair) for pair in zip(self.grads, self.firsts, strict=True)]).sum(0)

    def decompose(self, scales: Tensor) -> None:
        """Makes of the bound gradients g̃ the descent g̃ − α g⊥, in place.

        Args:
            scales: α and g·g̃/‖g̃‖² per group, float32; see :func:`reference.gap_scales`.
        """
        for grad, first, group in zip(self.grads, self.firsts, self.members.groups, strict=True):
            grad.copy_(reference.descent(grad, first, scales[group]))
        self.firsts = []

    def rademacher(self, positions: Sequence[int], seed: int, draw: int) -> list[Tensor]:
        """Signs z for the members at ``positions``."""
        weights, indices, numbers = self.members.weights, self.members.indices, self.members.numbers
        return [reference.rademacher(weights[i], indices[i], seed, draw, numbers=numbers(i)) for i in positions]

    def probe(self, h: Tensor, seed: int, draw: int) -> None:
        """Adds h·z to every parameter. h is a 0-d float64 tensor on their device."""
        for i, (weight, index) in enumerate(zip(self.members.weights, self.members.indices, strict=True)):
            weight.copy_(reference.probe(weight, h, index, seed, draw, self.members.numbers(i)))

    def weight_square_sum(self) -> Tensor:
        """Σ x² over all members, in double."""
        return torch.stack([reference.square_sum(weight) for weight in self.updated]).sum()

    def signs_in_registers(self, position: int) -> bool:
        """Whether :meth:`step` can apply z itself to this member's product."""
        return self.members.shard(position) is None

    def step(
        self,
        scalars: Scalars,
        cohorts: Sequence[int],
        products: Products | None,
        seed: int,
        draw: int,
        *,
        restore: bool = False,
        noise_draw: Tensor | None = None,
        state_draw: Tensor | None = None,
        sample: Sample = Sample.ABS,
        zero_is_seen: bool = False,
        adaptive: bool = False,
    ) -> Stepped:
        """The update. Where x is kept in state it is updated there, and the parameter is left alone.

        Args:
            scalars: One per cohort.
            cohorts: Cohort of each member.
            products: On a refresh, those of the members.
            seed: Key of the signs of unsigned products.
            draw: Draw of those signs.
            restore: Take x from the backups of the ascent, which is undone on the way.
            noise_draw: Draw of the noise that rounds reduced-precision parameters stochastically, one int64 on the
                device; None rounds them to nearest.
            state_draw: Draw of the noise that rounds m and D where they have fewer bits, likewise.
            sample: What a refresh adds to D.
            zero_is_seen: Whether elements without gradient and product have no curvature, rather than the one they had.
            adaptive: Weigh m by |x| in the sum of squares.

        Returns:
            What it found on its way. :attr:`found` has it too, for those who were interrupted.
        """
        if restore:
            self.restore()
        self._rounding = seed, state_draw
        rows: list[tuple[Tensor, Tensor]] = []
        tallies, targets, values = [], [], []
        for i, weight in enumerate(self.updated):
            row = scalars[cohorts[i]]
            h = None if products is None else self._signed(products, i, seed, draw)
            noise = self._noise(i, seed, noise_draw, reference.UPDATE_NOISE)
            x = self._corrected(i, weight)
            tensors = (weight if x is None else x, self.grads[i], self._momentum(i), self._curvature(i))
            found = reference.step(*tensors, row, h, noise, sample, zero_is_seen=zero_is_seen)
            stored = self._stored(i, *found[:2], None if h is None else found[2])
            if isinstance(row.skip, Tensor) or row.skip:  # then nothing is encoded again
                skip = torch.as_tensor(row.skip, device=weight.device) != 0
                stored = [(target, torch.where(skip, target, value)) for target, value in stored]
            rows.append((stored[0][1], found[1]))
            targets += [target for target, _ in stored]
            values += [value for _, value in stored]
            if products is not None:
                tallies.append(tally(h, row, self.grads[i], zero_is_seen=zero_is_seen))
        xs, moments = (list(column) for column in zip(*rows, strict=True))
        sums = None if self.xs is None else self._momentum_sums(moments, xs, adaptive)
        self.found = Stepped(torch.stack(tallies) if products is not None else None, sums)
        self.products = products
        self._write(targets, values, UPDATES, self.updates + 1)
        return self.found

    # ---- what is stored in fewer bits -----------------------------------------------------------------------------

    def _corrected(self, i: int, weight: Tensor) -> Tensor | None:
        """x of one member in float32 where a correction lies beside it; None elsewhere."""
        return None if self.corrections is None else formats.weight_of(weight, self.corrections[i])

    def _momentum(self, i: int) -> Tensor:
        """m of one member in the dtype in which it is computed."""
        m, bits = self.exp_avgs[i], self.members.format.state_bits
        if bits != 8:
            return m if bits == 32 else m.to(torch.float32)
        assert self.exp_avg_scales is not None
        return _as_laid_out(formats.momentum_of(formats.flat(m), self.exp_avg_scales[i]), m)

    def _curvature(self, i: int) -> Tensor:
        """D of one member, likewise."""
        d, stored = self.hessians[i], self.members.format
        if stored.state_bits != 8:
            return d if stored.state_bits == 32 else d.to(torch.float32)
        assert self.hessian_scales is not None
        values = formats.curvature_of(formats.flat(d), self.hessian_scales[i], signed=stored.signed)
        return _as_laid_out(values, d)

    def _stored(self, i: int, x: Tensor, m: Tensor, d: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """What to write, and where, to store the next x, m and D of one member, if there is a new D; x is the first."""
        weight, bits = self.updated[i], self.members.format.state_bits
        pairs = [(weight, x)]
        if self.corrections is not None:
            p, correction = formats.encode_weight(x, weight.dtype, self.members.format.correction_bits)
            pairs = [(weight, p), (self.corrections[i], correction)]
        curvature = [] if d is None else self._stored_curvature(i, d)
        if bits == 32:
            return [*pairs, (self.exp_avgs[i], m), *curvature]
        noise, values = self._state_noise(i, formats.MOMENTUM_NOISE), formats.flat(_like(m, self.exp_avgs[i]))
        if bits == 16:
            pairs.append((formats.flat(self.exp_avgs[i]), formats.encode_momentum16(values, noise)))
        else:
            assert self.exp_avg_scales is not None
            codes, scales = formats.encode_momentum(values, noise)
            pairs += [(formats.flat(self.exp_avgs[i]), codes), (self.exp_avg_scales[i], scales)]
        return [*pairs, *curvature]

    def _stored_curvature(self, i: int, d: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The same for D alone."""
        hessian, stored = self.hessians[i], self.members.format
        if stored.state_bits == 32:
            return [(hessian, d)]
        noise, values = self._state_noise(i, formats.CURVATURE_NOISE), formats.flat(_like(d, hessian))
        if stored.state_bits == 16:
            return [(formats.flat(hessian), formats.encode_curvature16(values, noise))]
        assert self.hessian_scales is not None
        codes, scales = formats.encode_curvature(values, noise, signed=stored.signed)
        return [(formats.flat(hessian), codes), (self.hessian_scales[i], scales)]

    def _state_noise(self, i: int, domain: int) -> Tensor | int:
        """What m or D of one member is rounded with, numbered in the order of memory."""
        seed, draw = self._rounding
        if draw is None:
            return formats.NEAREST
        return reference.rounding_noise(formats.flat(self.exp_avgs[i]), self.members.indices[i], seed, draw, domain)

    def unseen_sums(self) -> Tensor:
        """After a refresh: what it did not see of every member.

        Returns:
            A float64 tensor [members, 3]: elements whose gradient and product are 0, elements whose curvature is known,
            and the sum of theirs. All are 0 for members without a product, or of which everything was seen.
        """
        tallies = self.found.tallies
        assert tallies is not None
        nothing = torch.zeros(UNSEEN_WORDS, dtype=torch.float64, device=tallies.device)
        sums = []
        for i, (product, grad, seen) in enumerate(zip(*self._refreshed(), tallies[:, 2], strict=True)):
            on_host = tallies.device.type == "cpu"
            if product is None or (on_host and seen == grad.numel()):
                sums.append(nothing)
                continue
            found = reference.unseen_sums(self._curvature(i), product, grad)
            sums.append(found if on_host else torch.where(seen < grad.numel(), found, nothing))
        return torch.stack(sums)

    def fill_unseen(self, sums: Tensor) -> None:
        """Gives elements that no refresh has seen yet the mean curvature of the others of their parameter."""
        for i, (product, grad, row) in enumerate(zip(*self._refreshed(), sums, strict=True)):
            if product is not None and (sums.device.type != "cpu" or bool(row[0])):
                d = reference.filled(self._curvature(i), product, grad, row)
                for target, value in self._stored_curvature(i, d):
                    target.copy_(value)

    def _refreshed(self) -> tuple[Sequence[Tensor | None], list[Tensor]]:
        """Products and gradients of the last update."""
        values: Sequence[Tensor | None] = [None] * len(self.grads) if self.products is None else self.products.values
        return values, self.grads

    def end_step(self) -> None:
        """Lets go of the gradients and products of an update."""
        self.grads, self.products = [], None

    @property
    def updated(self) -> list[Tensor]:
        """Where the update finds x and leaves the next one."""
        return self.members.weights if self.xs is None else self.xs

    def _momentum_sums(self, exp_avgs: Sequence[Tensor], xs: Sequence[Tensor], adaptive: bool) -> Tensor:
        sums = torch.zeros(self.members.n_groups, dtype=torch.float64, device=exp_avgs[0].device)
        for group, exp_avg, x in zip(self.members.groups, exp_avgs, xs, strict=True):
            sums[group] += reference.square_sum(exp_avg, x if adaptive else None)
        return sums

    def _noise(self, i: int, seed: int, draw: Tensor | None, domain: int) -> Tensor | None:
        """What one member is rounded with, if it is of reduced precision and ``draw`` asks for it."""
        weight = self.members.weights[i]
        if draw is None or weight.dtype == reference.compute_dtype(weight.dtype):
            return None
        return reference.rounding_noise(weight, self.members.indices[i], seed, draw, domain)

    def _signed(self, products: Products, i: int, seed: int, draw: int) -> Tensor | None:
        """z⊙Hz of one member, or the sum of such that is there already."""
        value, kind = products.values[i], products.kinds[i]
        if value is None or kind == SIGNED_PRODUCT:
            return value
        if kind == PROBE_GRADIENT:
            value = reference.finite_difference(value, self.grads[i])
        return value * reference.rademacher(value, self.members.indices[i], seed, draw)


def _as_laid_out(values: Tensor, like: Tensor) -> Tensor:
    """Values in the order of memory as a tensor of the shape and strides of another one without gaps."""
    out = torch.empty_strided(like.shape, like.stride(), dtype=values.dtype, device=values.device)
    formats.flat(out).copy_(values)
    return out


def _like(values: Tensor, like: Tensor) -> Tensor:
    """Values in memory of the order of another tensor without gaps."""
    if values.stride() == like.stride():
        return values
    return torch.empty_strided(like.shape, like.stride(), dtype=values.dtype, device=values.device).copy_(values)


def tally(h: Tensor | None, scalars: StepScalars, grad: Tensor, *, zero_is_seen: bool) -> Tensor:
    """One row of :attr:`Stepped.tallies`, of one member."""
    if h is None:
        return torch.zeros(TALLY_WORDS, dtype=torch.float64, device=grad.device)
    dtype = reference.compute_dtype(grad.dtype)
    s = reference.scalar_tensors(scalars, dtype, grad.device)
    unseen = reference.is_unseen(h, grad, zero_is_seen=zero_is_seen)
    h = h.to(dtype) * s.product_scale
    seen = torch.isfinite(h) & ~unseen & (s.skip == 0)  # a skipped step has seen nothing
    counted = torch.where(seen, h, torch.zeros_like(h))
    return torch.stack(
        (
            counted.to(torch.float64).sum(),
            (counted < 0).sum().to(torch.float64),
            seen.sum().to(torch.float64),
        )
    )
