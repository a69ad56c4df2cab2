"""Damaged checkpoints of every optimizer: each is refused by name and changes nothing, or the run goes on with it.

``python tests/support/fuzz_checkpoints.py --seed 123 --cases 1`` prints and loads one, ``make fuzz`` many.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from random import Random
from typing import Any

import numpy as np
import torch
from fuzz import Finding, Hang, limited, prepare
from fuzz_world import same
from test_old_checkpoint import Problem, by_closure
from torch import Tensor

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH

SECONDS = 20.0
BACKENDS = ("reference", "cpu")
EIGHT = {"state_bits": 8, "full_precision_below": 0}
METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    "SASSHA": (SASSHA, {"rho": 0.05, "lazy_hessian": 2}),
    "SASSHA, capturable": (SASSHA, {"rho": 0.05, "lazy_hessian": 2, "capturable": True}),
    "SASSHA, 8 bits": (SASSHA, {"rho": 0.05, "lazy_hessian": 2, **EIGHT}),
    "SASSHA, masters": (SASSHA, {"rho": 0.05, "lazy_hessian": 2, **EIGHT, "master_weight_bits": 24}),
    "SophiaH, 8 bits": (SophiaH, {"lazy_hessian": 2, **EIGHT}),
    "MSASSHA, masters": (MSASSHA, {"rho": 0.1, "state_bits": 16, "full_precision_below": 0, "master_weight_bits": 32}),
    "SASSHA of the authors": (SASSHA, {"rho": 0.05, "lazy_hessian": 2}),
    "GSASSHA": (GSASSHA, {"rho": 0.05, "alpha": 0.3}),
    "MSASSHA": (MSASSHA, {"rho": 0.1, "lazy_hessian": 2}),
    "MSASSHA of the authors": (MSASSHA, {"rho": 0.1, "lazy_hessian": 2}),
    "AdaHessian": (AdaHessian, {}),
    "SophiaH": (SophiaH, {"lazy_hessian": 2}),
    "SAM over SGD": (SAM, {"base_optimizer": torch.optim.SGD, "momentum": 0.875, "nesterov": True}),
    "SAM over AdamW": (SAM, {"base_optimizer": torch.optim.AdamW, "amsgrad": True}),
    "SAM over NAdam": (SAM, {"base_optimizer": torch.optim.NAdam}),
    "SAM over Adagrad": (SAM, {"base_optimizer": torch.optim.Adagrad}),
}
JUNK: tuple[Callable[[], Any], ...] = (
    *(
        lambda value=value: value
        for value in (None, True, False, 0, 1, -1, 2, 0.5, -0.5, math.nan, math.inf, -math.inf)
    ),
    *(lambda value=value: value for value in (1e300, 1e-320, 2**31, 2**63, 10**400, 1 + 2j, "", "0.1", "text", b"x")),
    *(lambda value=value: value for value in ((), (0.5, 0.5), Fraction(1, 3), object)),
    *(list, dict, lambda: [1, [2, [3]]], lambda: {"a": {"b": 1}}, lambda: {0: 1}),
    *(lambda: np.float32(0.5), lambda: np.int64(3), lambda: np.ones(2), lambda: np.bool_(True)),
    *(lambda: torch.tensor(0.5), lambda: torch.tensor(3), lambda: torch.ones(2, 3), lambda: torch.tensor(math.nan)),
    *(lambda: torch.zeros(0), lambda: torch.zeros(2, device="meta"), lambda: torch.tensor(0.5, requires_grad=True)),
)
DAMAGES: tuple[Callable[[Tensor], Any], ...] = (
    *(lambda t, value=value: _with_last(t, value) for value in (math.nan, math.inf, -math.inf, -1.0, 1e300, -0.0)),
    *(lambda t: t.to("meta"), lambda t: t.to(torch.complex64), lambda t: t.to(torch.int32), lambda t: t.to(torch.bool)),
    *(lambda t: t.half(), lambda t: t.float(), lambda t: t.double(), lambda t: t.tolist(), lambda t: t.unsqueeze(0)),
    *(lambda t: t.reshape(-1), lambda t: t.flatten()[:1], lambda t: t.clone().requires_grad_() * 1.0, lambda t: -t),
    *(lambda t: t.to_sparse(), lambda t: t.mT.contiguous().mT if t.dim() > 1 else t, lambda t: t.reshape(-1).numpy()),
    *(lambda t: torch.nn.Parameter(t.clone()), lambda t: t.expand(2, *t.shape)),
)


def _with_last(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    if changed.numel():
        changed.view(-1)[-1] = value
    return changed


# ---- checkpoints --------------------------------------------------------------------------------------------------


def build(name: str, backend: str) -> tuple[Problem, Any]:
    problem, (method, options) = Problem(), METHODS[name]
    if "full_precision_below" in options:  # float64 is never compact
        dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.bfloat16)
        pairs = zip(problem.params, dtypes, strict=True)
        problem.params = [torch.nn.Parameter(p.detach().to(dtype)) for p, dtype in pairs]
    return problem, method(problem.groups(), lr=2.0**-7, backend=backend, **options)


@cache
def checkpoint(name: str) -> dict[str, Any]:
    """What the method saves after three steps, in the authors' form if it is theirs."""
    problem, opt = build(name, "reference")
    for _ in range(3):
        by_closure(opt, problem.loss)
    saved = copy.deepcopy(opt.state_dict())
    if name == "SASSHA of the authors":
        for entry in saved["state"].values():
            entry["hessian step"] = entry.pop("hessian_step")
            entry["bias_correction2"] **= 0.5
            entry["e_w"] = torch.zeros_like(entry["exp_avg"])
    if name == "MSASSHA of the authors":
        renamed = {"exp_avg": "grad_momentum", "exp_hessian_diag": "hess_momentum"}
        kept = ("step", "hessian_step", *renamed)
        for i, entry in saved["state"].items():
            saved["state"][i] = {renamed.get(key, key): entry[key] for key in kept}
        for group in saved["param_groups"]:
            del group["perturb_eps"], group["evaluating"]
            group["norm_factor"] = [torch.tensor(0.25)]
    return saved


def _nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in nested dicts and lists."""
    yield path
    if isinstance(value, (dict, list, tuple)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _nodes(value[key], (*path, key))


def _replaced(value: Any, path: tuple[Any, ...], new: Callable[[Any], Any]) -> Any:
    if not path:
        return new(value)
    if isinstance(value, dict):
        return {key: _replaced(v, path[1:], new) if key == path[0] else v for key, v in value.items()}
    changed = [_replaced(v, path[1:], new) if i == path[0] else v for i, v in enumerate(value)]
    return type(value)(changed)


def _damage(rng: Random, value: Any) -> tuple[str, Callable[[Any], Any]]:
    """A random change of a value, by name."""
    number = rng.randrange(1 << 30)
    if isinstance(value, Tensor) and rng.random() < 0.7:
        k = number % len(DAMAGES)
        return f"tensor damage {k}", DAMAGES[k]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        keys = sorted(value, key=str)
        a, b = rng.choice(keys), rng.choice(keys)
        return rng.choice(
            [
                (f"without {a!r}", lambda d: {k: v for k, v in d.items() if k != a}),
                (f"{a!r} renamed", lambda d: {(f"{k}x" if k == a else k): v for k, v in d.items()}),
                (f"{a!r} as text", lambda d: {(str(k) if k == a else k): v for k, v in d.items()}),
                (f"{a!r} and {b!r} exchanged", lambda d: {**d, a: d[b], b: d[a]}),
                ("one key more", lambda d: {**d, "more": 1}),
            ]
        )
    if isinstance(value, list) and value and rng.random() < 0.8:
        return rng.choice(
            [
                ("without the last", lambda v: v[:-1]),
                ("the first twice", lambda v: [v[0], *v]),
                ("the first in place of the last", lambda v: [*v[:-1], v[0]]),
                ("reversed", lambda v: v[::-1]),
                ("a tuple", tuple),
            ]
        )
    if isinstance(value, (int, float)) and rng.random() < 0.3:
        return rng.choice([("negative", lambda v: -v), ("one more", lambda v: v + 1), ("text", str), ("float", float)])
    k = number % len(JUNK)
    return f"junk {k}", lambda v: JUNK[k]()


def make_damaged(seed: int) -> tuple[str, dict[str, Any], list[tuple[tuple[Any, ...], str]]]:
    """The method, the damaged checkpoint, and what was done to it where."""
    rng = Random(seed)
    name = rng.choice(list(METHODS))
    saved: Any = copy.deepcopy(checkpoint(name))
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        paths = list(_nodes(saved))
        path = rng.choice(paths)
        value = saved
        for key in path:
            value = value[key]
        what, change = _damage(rng, value)
        try:
            saved = _replaced(saved, path, change)
        except Exception:  # a change that this value can't take, such as a sparse integer
            continue
        done.append((path, what))
    return name, saved, done


# ---- one checkpoint -----------------------------------------------------------------------------------------------


def _picture(problem: Problem, opt: Any) -> dict[str, Any]:
    found: dict[str, Any] = {f"parameter {i}": p.detach().clone() for i, p in enumerate(problem.params)}
    for i, p in enumerate(problem.params):
        for key, value in opt.state.get(p, {}).items():
            found[f"{key} of {i}"] = value.detach().clone() if isinstance(value, Tensor) else value
    for g, group in enumerate(opt.param_groups):
        for key, value in group.items():
            found[f"{key} of group {g}"] = tuple(map(id, value)) if key == "params" else copy.deepcopy(value)
    return found


def _differs(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    if a.keys() != b.keys():
        return f"keys {sorted(a.keys() ^ b.keys())}"
    return next((key for key in a if not key.startswith("params") and not same(a[key], b[key])), None)


def load_damaged(seed: int) -> str:
    """Loads one. Returns "refused" or "loaded"; raises Finding for anything else."""
    name, saved, done = make_damaged(seed)
    said, runs = {}, {}
    for backend in BACKENDS:
        problem, opt = build(name, backend)
        for _ in range(seed % 3):
            by_closure(opt, problem.loss)
        before = _picture(problem, opt)
        try:
            opt.load_state_dict(saved)
            said[backend] = ""
        except ValueError as error:
            said[backend] = str(error)
            _check_message(name, str(error), done)
            changed = _differs(_picture(problem, opt), before)
            if changed is not None:
                raise Finding("changed by a refused checkpoint", f"{changed}, {error}") from error
        except Exception as error:
            raise Finding(f"unclear {type(error).__name__} of load_state_dict", str(error)) from error
        try:
            if getattr(opt, "evaluating", False):
                opt.train()
            opt.state_dict()
            by_closure(opt, problem.loss)
            by_closure(opt, problem.loss)
        except Exception as error:
            raise Finding(f"{type(error).__name__} after load_state_dict", str(error)) from error
        runs[backend] = _picture(problem, opt)
    if len(set(said.values())) > 1:
        raise Finding("another error on another backend", str(said))
    powers = {group.get("hessian_power", 0.5) for group in opt.param_groups}
    changed = _differs(*runs.values())
    if powers <= {0.5, 1.0} and changed is not None:
        raise Finding("backends differ after load_state_dict", changed)
    return "refused" if said["cpu"] else "loaded"


def _check_message(name: str, text: str, done: list[tuple[tuple[Any, ...], str]]) -> None:
    """A message has the caller, and the name of something on the way to what was changed."""
    if not text.startswith(f"{name.split(' ')[0].rstrip(',')}.load_state_dict: ") or len(text) > 1000:
        raise Finding("a message without its caller, or endless", text[:300])
    words = {str(key) for path, what in done for key in (*path, *what.replace("'", " ").split())}
    words |= {f"group {path[1]}" for path, _ in done if len(path) > 1 and path[0] == "param_groups"}
    # A number that was changed to another parameter's may be found there.
    numbers = {"belongs to no parameter", "an integer that no other parameter has"}
    words |= numbers if any("params" in path for path, _ in done) else set()
    words |= {"group", "lacks", "found"} if any(len(path) < 3 for path, _ in done) else set()
    if not any(word in text for word in words):
        raise Finding("a message that does not name the key", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next ones follow")
    parser.add_argument("--cases", type=int, default=1000, help="at most so many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new case after so many")
    given = parser.parse_args()
    prepare()
    started, results, kinds = time.monotonic(), Counter(), Counter()
    for seed in range(given.seed, given.seed + given.cases):
        if time.monotonic() - started > given.seconds:
            break
        try:
            with limited(SECONDS, f"seed {seed}"):
                results[load_damaged(seed)] += 1
        except (Finding, Hang) as finding:
            kind = finding.kind if isinstance(finding, Finding) else "hang"
            kinds[kind] += 1
            if kinds[kind] <= 5:
                print(f"\nseed {seed}, {make_damaged(seed)[0]}, {make_damaged(seed)[2]}\n  {finding}", flush=True)
        if (seed - given.seed) % 500 == 499:
            print(f"{seed - given.seed + 1} checkpoints, {sum(kinds.values())} went wrong", flush=True)
        if given.cases == 1:
            print(f"seed {seed}: {make_damaged(seed)[0]}, {make_damaged(seed)[2]}: {dict(results)}")
    total = sum(results.values()) + sum(kinds.values())
    print(f"\n{total} damaged checkpoints: {dict(results)}; {sum(kinds.values())} went wrong: {dict(kinds)}")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
