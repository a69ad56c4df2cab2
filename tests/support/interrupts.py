"""What the tests of interrupted steps share: a small training run, pictures of all it consists of, and a tracer."""

from __future__ import annotations

import copy
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

import sassha_fast
from sassha_fast import MSASSHA
from sassha_fast._core import contexts

PACKAGE = Path(sassha_fast.__file__).parent
Call = Callable[..., Any]
Picture = dict[str, Any]


class Net(nn.Module):
    """Few elements in two dtypes, with statistics and random numbers that closures have to replay.

    With ``odd`` one parameter is in another order than the kernels', and one has gaps, so that they don't take it.
    """

    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.linear, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False)
        self.rough = nn.Parameter(torch.randn(2, 3).bfloat16())
        filters = torch.randn(2, 3, 1, 2)
        self.filters = nn.Parameter(filters.to(memory_format=torch.channels_last) if odd else filters)
        self.gaps = nn.Parameter(torch.randn(2, 6)[:, ::2]) if odd else None
        self.x = torch.randn(4, 3)

    def groups(self) -> list[dict[str, Any]]:
        other = [self.filters] if self.gaps is None else [self.filters, self.gaps]
        return [{"params": [*self.linear.parameters(), self.rough]}, {"params": other, "weight_decay": 0.05}]

    def loss(self) -> Tensor:
        out = self.linear(self.x)
        if self.training:
            out = self.norm(out) * torch.rand(2)
        total = out.sin().sum() + self.rough.float().sin().sum() + self.filters.sin().sum()
        return total if self.gaps is None else total + self.gaps.sin().sum()


class Large(nn.Module):
    """So many elements that most of a step's time is spent in kernels."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.params = nn.ParameterList(torch.randn(2**18) for _ in range(8))
        self.factor = torch.rand(2**18)

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.params)}]

    def loss(self) -> Tensor:
        return torch.stack([(p * p * self.factor).sum() for p in self.params]).sum()


class Run:
    """A network that trains, by hand-written calls or by closures; random numbers are those of the step's number."""

    def __init__(self, net: Net | Large, method: type[Any], way: str, options: dict[str, Any]) -> None:
        self.net, self.way, self.t = net, way, 0
        self.opt = method(net.groups(), **options)
        if way.endswith("closure"):
            self.opt.attach(self.net)
        else:  # statistics and random numbers are then the user's business
            self.net.eval()

    def step(self, call: Call = lambda function, *arguments: function(*arguments)) -> None:
        """A step, of which every call of the optimizer goes through ``call``."""
        torch.default_generator.manual_seed(self.t)  # torch.manual_seed takes longer than a step
        opt, loss = self.opt, self.net.loss
        if self.way == "closure":
            call(opt.step, self.closure)
        elif self.way == "ascent closure":
            call(self.step_apart, self.closure)
        else:
            if not isinstance(opt, MSASSHA):
                loss().backward()
                call(opt.perturb_weights)
            loss().backward(create_graph=opt.hvp == "exact" and opt.hessian_due)
            for _ in range(opt.probes_due):
                call(opt.probe_weights)
                loss().backward()
            if not isinstance(opt, MSASSHA):
                call(opt.unperturb)
            elif self.way == "calls with take_products":
                call(opt.take_products)
            call(opt.step)
            call(opt.zero_grad)
        self.t += 1

    def step_apart(self, closure: Call) -> None:
        """A step whose ascent has a closure of its own."""
        self.opt.step(closure, ascent_closure=closure)

    def closure(self) -> Tensor:
        self.opt.zero_grad()
        loss = self.net.loss()
        loss.backward()
        return loss

    def continued(self, other: Run) -> None:
        """Goes to where another run is."""
        self.t = other.t
        with torch.no_grad():
            for module in (nn.Module.parameters, nn.Module.buffers):
                for mine, theirs in zip(module(self.net), module(other.net), strict=True):
                    mine.copy_(theirs)
        self.opt.load_state_dict(copy.deepcopy(other.opt.state_dict()))


def raw(t: Tensor) -> bytes:
    t = t.detach().contiguous()
    return (t.view(torch.int16) if t.dtype == torch.bfloat16 else t).numpy().tobytes()


def is_fresh(entry: dict[str, Any]) -> bool:
    """State that says no more than none: no step, no momentum, no known curvature."""
    return entry["step"] == 0 and not entry["exp_avg"].any() and not entry["bias_correction2"]


def picture(net: nn.Module, opt: Any) -> Picture:
    """Everything that a step moves, bit for bit, by name."""
    saved = opt.state_dict()
    found: Picture = {f"parameter {i}": held for i, held in enumerate(parameters(opt))}
    found |= {f"buffer {name}": raw(b) for name, b in net.named_buffers()}
    found["random numbers"] = raw(torch.get_rng_state())
    for i, entry in saved["state"].items():
        if not is_fresh(entry):
            found |= {f"{key} of {i}": raw(v) if isinstance(v, Tensor) else v for key, v in entry.items()}
    for g, group in enumerate(saved["param_groups"]):
        found |= {f"{key} of group {g}": value for key, value in group.items()}
    return found


def parameters(opt: Any) -> list[bytes]:
    """What the parameters hold."""
    return [raw(p) for group in opt.param_groups for p in group["params"]]


def true_weights(seen: Picture) -> list[bytes]:
    """x in a picture: M-SASSHA keeps it in its state from the first step on."""
    held = [name for name in seen if name.startswith("parameter ")]
    return [seen.get(f"weight of {i}", seen[name]) for i, name in enumerate(held)]


def differences(a: Picture, b: Picture) -> str:
    """What differs between two pictures, of whichever parameters and groups."""
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return ", ".join(dict.fromkeys(re.sub(r"( of( group)?)? \d+$", "", name) for name in names))


def come_back(opt: Any) -> bool:
    """Takes the way back that is public, if the weights are perturbed. Returns whether they were."""
    try:
        opt.state_dict()
    except RuntimeError:
        with suppress(RuntimeError):  # on a refresh it restores and then says that there are no products
            opt.take_products() if isinstance(opt, MSASSHA) else opt.unperturb()
        return True
    return False


def held_switches() -> list[str]:
    """Switches of the whole process that another thread would wait for."""
    found = []

    def look() -> None:
        for name, switch in vars(contexts).items():
            if isinstance(switch, contexts.Switch):
                if switch._lock.acquire(blocking=False):
                    switch._lock.release()
                else:
                    found.append(name)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found


class Surroundings:
    """Switches of torch and Python outside of the optimizer, which a step may turn only for itself."""

    SDPA = ("flash", "mem_efficient", "math", "cudnn")

    def __init__(self, net: Net) -> None:
        self.net, self.filters = net, list(warnings.filters)
        self.before = self.now()

    def now(self) -> dict[str, Any]:
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        return {
            "grad mode": torch.is_grad_enabled(),
            "function modes": torch._C._len_torch_function_stack(),
            "attention kernels": [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in self.SDPA],
            "cuDNN": torch.backends.cudnn.enabled,
            "stance of torch.compile": dynamo and dynamo._stance.stance,
            "warning filters": len(warnings.filters),
            "locks of switches": held_switches(),
            "BatchNorm's statistics": self.net.norm.track_running_stats,
        }

    def changed(self) -> list[str]:
        now = self.now()
        return [name for name, value in self.before.items() if value != now[name]]

    def restore(self) -> None:
        torch.set_grad_enabled(True)
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        for name, enabled in zip(self.SDPA, self.before["attention kernels"], strict=True):
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)
        torch.backends.cudnn.enabled = self.before["cuDNN"]
        if self.before["stance of torch.compile"]:
            torch.compiler.set_stance(self.before["stance of torch.compile"])
        warnings.filters[:] = self.filters
        self.net.norm.track_running_stats = True


class Tracer:
    """Counts the lines of the package that calls run through, or raises at one of them.

    A target is (number of the call in its step, file, line, how many times the line runs before).
    """

    def __init__(self, target: tuple[int, str, int, int] | None = None, exception: BaseException | None = None) -> None:
        self.target, self.exception = target, exception
        self.seen: Counter[tuple[int, str, int]] = Counter()
        self.names: list[str] = []
        self.fired = False

    def __call__(self, function: Call, *arguments: Any) -> Any:
        self.names.append(function.__name__)
        if self.target is not None and self.target[0] != len(self.names) - 1:
            return function(*arguments)
        sys.settrace(self._enter)
        try:
            return function(*arguments)
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not is_ours(frame.f_code):
            return None
        wanted = self.target is None or frame.f_code.co_filename == self.target[1]
        return self._line if wanted else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "line":
            return self._line
        key = (len(self.names) - 1, frame.f_code.co_filename, frame.f_lineno)
        if self.target is None:
            self.seen[key] += 1
        elif key == self.target[:3]:
            self.seen[key] += 1
            if self.seen[key] == self.target[3] and not self.fired:
                self.fired = True
                assert self.exception is not None
                raise self.exception
        return self._line

    def targets(self) -> Iterator[tuple[int, str, int, int]]:
        """The first and the last time that every line of every call runs."""
        for (call, file, line), count in self.seen.items():
            for times in sorted({1, count}):
                yield call, file, line, times


_OURS: dict[CodeType, bool] = {}


def is_ours(code: CodeType) -> bool:
    if code not in _OURS:
        path = Path(code.co_filename)
        _OURS[code] = PACKAGE in path.parents and "triton_kernels" not in path.parts
    return _OURS[code]
