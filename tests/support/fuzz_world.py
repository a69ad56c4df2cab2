"""What ``fuzz.py`` does with one optimizer: parameters in memory, a loss, and the actions of a case."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import torch
from cases import place
from fuzz_cases import CLASSES, Action, Case, Spec
from torch import Tensor, nn

from sassha_fast import MSASSHA, AdaHessian, SophiaH
from sassha_fast._core.step import Step


class Boom(Exception):
    """Raised by closures, on purpose."""


def _values(case: Case, i: int, spec: Spec) -> tuple[Tensor, Tensor]:
    """A parameter's first values and the coefficients of its part of the loss."""
    generator = torch.Generator().manual_seed(case.seed * 1000 + i)
    start = torch.randn(spec.shape, dtype=torch.float64, generator=generator) * case.magnitude
    return start.to(getattr(torch, spec.dtype)), torch.randn(spec.shape, dtype=torch.float64, generator=generator)


class World:
    """Parameters and an optimizer on one backend.

    Attributes:
        params: The parameters in order.
        opt: The optimizer.
        events: What came of each action: an error or None, and the bits of everything that is promised to be equal.
    """

    def __init__(self, case: Case, backend: str) -> None:
        """Builds both. Its errors are the constructor's."""
        torch.manual_seed(case.seed)
        self.case, self.backend = case, backend
        self.params, self.coefficients = [], []
        common: dict[torch.dtype, Tensor] = {}  # memory of slices
        used: dict[torch.dtype, int] = {}
        for i, spec in enumerate(case.tensors):
            start, coefficients = _values(case, i, spec)
            if spec.layout == "slice":
                memory = common.setdefault(start.dtype, torch.zeros(40000, dtype=start.dtype))
                first = used.get(start.dtype, 0)
                used[start.dtype] = first + start.numel()
                memory = memory[first : first + start.numel()].view(spec.shape).copy_(start)
            elif spec.layout == "overlapping":
                memory = self.params[-1].data
            else:
                memory = place(start, spec.layout)
            self.params.append(nn.Parameter(memory))
            self.coefficients.append(coefficients)
        self.opt = self._build(self.params)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.absent: set[int] = set()
        self.passes, self.trouble = 0, {}

    def _build(self, params: list[nn.Parameter]) -> Any:
        case, options = self.case, copy.deepcopy(self.case.options)
        groups = [dict(copy.deepcopy(group), params=[]) for group in case.groups]
        for p, spec in zip(params, case.tensors, strict=True):
            groups[spec.group]["params"].append(p)
        return CLASSES[case.method](groups, backend=self.backend, **options)

    # ---- passes -------------------------------------------------------------------------------------------------

    def loss(self, factor: float = 1.0) -> Tensor:
        """A polynomial of all parameters that are not absent, in double precision; the neighbours are coupled."""
        total, before = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
        for i, (p, c) in enumerate(zip(self.params, self.coefficients, strict=True)):
            if i not in self.absent:
                x = p.double()
                link = (x * c).sum() * 0.1
                total = total + (x * x * c * (0.5 * factor)).sum() + (x * x * x * x).sum() * 0.05 + link * before
                before = link
        return total

    def backward(self, *, create_graph: bool = False, scaled: bool = False, factor: float = 1.0) -> Tensor:
        """One pass, with the trouble of the action."""
        number, trouble = self.passes, self.trouble
        self.passes += 1
        if trouble.get("raises") == number:
            raise Boom
        value = self.loss(factor)
        if not value.requires_grad:
            return self.scaler.scale(value) if scaled else value  # without which the scaler has no scale
        bad = trouble["poison"] if trouble.get("at") == number and "poison" in trouble else None
        if bad is not None and trouble["of"] == "loss":
            value = value * bad
        (self.scaler.scale(value) if scaled else value).backward(create_graph=create_graph)
        if bad is not None and trouble["of"] == "grad":
            victim = next((p for p in self.params if p.grad is not None and p.numel()), None)
            if victim is not None:
                last = torch.arange(victim.numel()).view(victim.shape) == victim.numel() - 1
                victim.grad = torch.where(last, torch.tensor(bad, dtype=victim.dtype), victim.grad)
        return value.detach()

    def closure(self, *, scaled: bool = False, zeroes: bool = True, factor: float = 1.0) -> Callable[[], Tensor]:
        def run() -> Tensor:
            if zeroes:
                self.opt.zero_grad()
            return self.backward(scaled=scaled, factor=factor)

        return run

    # ---- actions ------------------------------------------------------------------------------------------------

    def act(self, action: Action) -> None:
        """Does it. What it raises is the event."""
        self.passes, self.trouble = 0, action.how
        if action.kind.startswith("scaled") and len(self.absent) >= len(self.params):
            return  # GradScaler asserts that there are gradients
        getattr(self, "do_" + action.kind.replace(" ", "_"))(**{k.replace(" ", "_"): v for k, v in action.how.items()})

    def do_closure(self, **how: Any) -> None:
        self.opt.step(self.closure())

    def do_parts(self, **how: Any) -> None:
        self.opt.step([self.closure(zeroes=False, factor=factor) for factor in (1.0, 0.25)])

    def do_other_batch(self, **how: Any) -> None:
        self.opt.step(self.closure(), hessian_closure=self.closure(factor=0.5))

    def do_scaled_closure(self, **how: Any) -> None:
        self.opt.step(self.closure(scaled=True), scaler=self.scaler)
        self.scaler.update()

    def do_calls(
        self,
        keeps_grads: bool = False,
        takes_products: bool = False,
        zeroes: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        **how: Any,
    ) -> None:
        """One step of a hand-written loop."""
        opt, scaled = self.opt, scaler is not None
        differences = getattr(opt, "hvp", "exact") != "exact"
        climbs = not isinstance(opt, MSASSHA) and (differences or not isinstance(opt, (AdaHessian, SophiaH)))
        if climbs:
            self.backward(scaled=scaled)
            opt.perturb_weights(zero_grad=not keeps_grads)
            if keeps_grads:
                opt.zero_grad()
        self.backward(create_graph=not differences and opt.hessian_due, scaled=scaled)
        for _ in range(opt.probes_due):
            opt.probe_weights()
            self.backward(scaled=scaled)
        if climbs:
            opt.unperturb(scaler) if scaled else opt.unperturb()
        elif takes_products or scaled:
            opt.take_products(scaler) if scaled else opt.take_products()
        scaler.step(opt) if scaled else opt.step()
        if zeroes:
            opt.zero_grad()

    def do_scaled_calls(self, **how: Any) -> None:
        self.do_calls(scaler=self.scaler, **how)
        self.scaler.update()

    def do_raw(self, calls: list[str]) -> None:
        """Calls in any order. Errors are part of it; the last one is the event."""
        opt, error = self.opt, None
        table: dict[str, Callable[[], object]] = {
            "backward": self.backward,
            "graph": lambda: self.backward(create_graph=True),
            "perturb": opt.perturb_weights,
            "unperturb": opt.unperturb,
            "probe": opt.probe_weights,
            "products": opt.take_products,
            "step": opt.step,
            "zero_grad": opt.zero_grad,
            "state_dict": opt.state_dict,
            "unscale": lambda: [p.grad.div_(2.0) for p in self.params if p.grad is not None and not p.grad.grad_fn],
            "clip": lambda: nn.utils.clip_grad_norm_([p for p in self.params if p.grad is not None], 0.1),
        }
        for call in calls:
            try:
                table[call]()
            except Exception as caught:
                error = caught
        if error is not None:
            raise error

    def do_skip(self) -> None:
        self.backward()
        self.opt.zero_grad()

    def do_reload(self) -> None:
        self.opt.load_state_dict(copy.deepcopy(self.opt.state_dict()))

    def do_resume(self) -> None:
        """Another optimizer goes on, from a file."""
        file = io.BytesIO()
        torch.save(self.opt.state_dict(), file)
        file.seek(0)
        new = self._build(self.params)
        new.load_state_dict(torch.load(file, weights_only=True))
        self.opt = new

    def do_copy(self) -> None:
        self.params, self.opt = copy.deepcopy((self.params, self.opt))

    def do_switch(self) -> None:
        self.opt.train() if self.opt.evaluating else self.opt.eval()

    def do_set(self, key: str, value: Any) -> None:
        if key in self.opt.param_groups[0]:
            self.opt.param_groups[0][key] = value
        else:
            setattr(self.opt, key, value)

    def do_absent(self, tensors: list[int]) -> None:
        self.absent = set(tensors)
        self.opt.zero_grad()

    def do_other_dtype(self) -> None:
        p = self.params[0]
        p.grad = None
        p.data = p.data.to(torch.float32 if p.dtype == torch.float64 else torch.float64)

    def settle(self) -> None:
        """After an error or calls in any order: back to x, without gradients."""
        if is_away(self.opt):
            try:
                self.opt.unperturb()
            except RuntimeError:  # it has restored all the same, or is M-SASSHA
                if is_away(self.opt):
                    self.backward()
                    self.opt.step()
        self.opt.zero_grad()

    # ---- what is compared ---------------------------------------------------------------------------------------

    def picture(self) -> dict[str, Any]:
        """Copies of everything that backends promise to agree in."""
        found: dict[str, Any] = {}
        for i, p in enumerate(self.params):
            found[f"parameter {i}"] = p.detach().clone()
            found[f"gradient {i}"] = None if p.grad is None else p.grad.detach().clone()
            for key, value in self.opt.state.get(p, {}).items():
                found[f"{key} {i}"] = value.detach().clone() if isinstance(value, Tensor) else value
        stats = self.opt.stats
        found["refreshes"] = (stats.refreshes, stats.partial_refreshes, stats.skipped_refreshes)
        found["skipped steps"] = float(stats.skipped_steps)
        found["scale"] = self.scaler.get_scale()
        return found


def is_away(opt: Any) -> bool:
    """Whether a step has moved the weights and not put them back."""
    step: Step | None = opt._current()
    return step is not None and step.is_away


def same(a: Any, b: Any) -> bool:
    """Equality of every bit; a NaN equals every NaN."""
    if isinstance(a, Tensor) != isinstance(b, Tensor):
        return False
    if not isinstance(a, Tensor):
        return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = a.contiguous().view(kind) == b.contiguous().view(kind)
    return bool((equal | (a.isnan() & b.isnan())).all())
