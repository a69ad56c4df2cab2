"""Random cases of ``fuzz.py``: tensors, options and calls, all from one integer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH, schedules

# Defects that are known and mended elsewhere. A name here keeps the fuzzer away from them; without it, it looks again.
EXCLUDED: frozenset[str] = frozenset()

DTYPES = {"float32": 6, "float64": 2, "bfloat16": 2, "float16": 1}
METHODS = {"SASSHA": 6, "GSASSHA": 3, "MSASSHA": 4, "AdaHessian": 2, "SophiaH": 2, "SAM": 2}
CLASSES = {cls.__name__: cls for cls in (SASSHA, GSASSHA, MSASSHA, AdaHessian, SophiaH, SAM)}
RAW_CALLS = (
    *("backward", "backward", "graph", "graph", "perturb", "perturb", "unperturb", "unperturb", "probe", "products"),
    *("step", "step", "zero_grad", "state_dict", "unscale", "clip"),
)


class Spec(NamedTuple):
    """A parameter: its shape, its place in memory, its dtype and its group."""

    shape: tuple[int, ...]
    layout: str
    dtype: str
    group: int


class Action(NamedTuple):
    """Something that is done with an optimizer, and how."""

    kind: str
    how: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A run of an optimizer.

    Attributes:
        seed: Where it comes from, and the seed of its values.
        method: Name of the class.
        options: Arguments of the constructor.
        groups: Hyperparameters of each group.
        tensors: The parameters.
        actions: What is done with the optimizer.
        magnitude: Of the first values of the parameters.
        triton: Whether Triton's interpreter takes part, which is slow.
    """

    seed: int
    method: str
    options: dict[str, Any]
    groups: tuple[dict[str, Any], ...]
    tensors: tuple[Spec, ...]
    actions: tuple[Action, ...]
    magnitude: float = 1.0
    triton: bool = False

    @property
    def powers(self) -> set[float]:
        """Hessian powers that it may use. Backends promise equal bits for ½ and 1."""
        found = {group["hessian_power"] for group in self.groups if "hessian_power" in group}
        found |= {a.how["value"] for a in self.actions if a.how.get("key") == "hessian_power"}
        if "hessian_power_scheduler" in self.options:
            return {0.5, 1.0}
        own = self.options.get("hessian_power", 0.5)
        return found | {own / 2 if self.method == "AdaHessian" and "hessian_power" in self.options else own}

    @property
    def exact(self) -> bool:
        """Whether backends have to agree in every bit."""
        return self.powers <= {0.5, 1.0}

    def text(self) -> str:
        """For people."""
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        lines = [f"seed {self.seed}: {self.method}({options}), values of {self.magnitude:g}"]
        lines += [f"  group {g}: {group}" for g, group in enumerate(self.groups)]
        lines += [f"  tensor {i}: {s.dtype} {s.shape} {s.layout}, group {s.group}" for i, s in enumerate(self.tensors)]
        lines += [f"  action {i}: {a.kind} {a.how or ''}" for i, a in enumerate(self.actions)]
        return "\n".join(lines)


def _pick(rng: Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


# ---- tensors ------------------------------------------------------------------------------------------------------


def _shape(rng: Random) -> tuple[int, ...]:
    kind = rng.random()
    if kind < 0.12:
        return rng.choice([(), (0,), (1,), (1, 1), (3, 0)])
    if kind < 0.45:
        return (rng.choice([2, 3, 5, 7, 8, 9, 63, 127, 128, 129, 200, 257, rng.randrange(2, 400)]),)
    if kind < 0.75:
        return (rng.randrange(1, 14), rng.randrange(1, 40))
    if kind < 0.985:
        return (rng.randrange(1, 5), rng.randrange(1, 6), rng.randrange(1, 4), rng.randrange(1, 4))
    return (rng.randrange(5000, 20000),)


def _layout(rng: Random, shape: tuple[int, ...]) -> str:
    layouts = {"contiguous": 6, "misaligned": 1, "slice": 1}
    if len(shape) == 2:
        layouts |= {"transposed": 3, "gaps": 2}
    if len(shape) == 4:
        layouts |= {"channels_last": 6}
    return _pick(rng, layouts)


def _tensors(rng: Random, groups: int) -> tuple[Spec, ...]:
    mixed, common = rng.random() < 0.3, _pick(rng, DTYPES)
    found = []
    for _ in range(rng.choice([1, 1, 2, 2, 3, 4, 6, 9])):
        shape = _shape(rng)
        dtype = _pick(rng, DTYPES) if mixed else common
        found.append(Spec(shape, _layout(rng, shape), dtype, rng.randrange(groups)))
    return tuple(found)


# ---- options ------------------------------------------------------------------------------------------------------

# Every option with the values that it may have; the first is the default, and is left out.
ANY_METHOD: dict[str, tuple[Any, ...]] = {"max_grad_norm": (None, 0.5, 100.0, 0.0), "skip_nonfinite": (False, True)}
CURVED: dict[str, tuple[Any, ...]] = {
    "hvp": ("exact", "finite_difference", "central_difference"),
    "n_samples": (1, 2, 3),
    "maximize": (False, True),
    "stochastic_rounding": (False, True),
    "capturable": (False, True),
    "seed": (0, 7, 2**40 + 1),
}
ROOTED: dict[str, tuple[Any, ...]] = {
    "hessian_floor": (0.0, None, 1e-3),
    "clip_update": (None, 0.5, 0.0),
    "bias_correction": (True, False),
    "hessian_power_scheduler": (None, schedules.Constant(1.0)),
}
CLIMBING: dict[str, tuple[Any, ...]] = {
    "adaptive": (False, True),
    "adaptive_bias": (True, False),
    "perturb_eps": (1e-12, 0.0, 0.1),
    "rho_scheduler": (None, schedules.Linear(5, 0.0, 0.3)),
}
HYPERPARAMETERS: dict[str, tuple[Any, ...]] = {
    "lr": (0.01, 0.0, 1e-3, 0.3, torch.tensor(0.05)),
    "betas": ((0.9, 0.999), (0.0, 0.0), (0.5, 0.9), (0.99, 0.0)),
    "weight_decay": (0.0, 0.01, 2.0),
    "eps": (1e-4, 0.0, 1e-8, 1.0),
}
RHO: dict[str, tuple[Any, ...]] = {"rho": (0.05, 0.0, 0.0, 1.0, 30.0)}
SAM_BASES = (
    {"base_optimizer": torch.optim.SGD, "momentum": 0.875},
    {"base_optimizer": torch.optim.SGD},
    {"base_optimizer": torch.optim.AdamW},
    {"base_optimizer": torch.optim.Adagrad},
)


def _some(rng: Random, table: dict[str, tuple[Any, ...]], share: float) -> dict[str, Any]:
    """A few options of a table with values that are not the default."""
    return {key: rng.choice(values[1:]) for key, values in table.items() if rng.random() < share}


def _options(rng: Random, method: str) -> dict[str, Any]:
    found = _some(rng, ANY_METHOD, 0.2)
    if method in ("SASSHA", "GSASSHA", "MSASSHA", "SAM"):
        climbing = {k: v for k, v in CLIMBING.items() if method != "MSASSHA" or k != "perturb_eps"}
        found |= {"rho": rng.choice(RHO["rho"])} | _some(rng, climbing, 0.2)
    if method == "SAM":
        alpha = rng.choice([{}, {"alpha": 0.3}])
        return {**rng.choice(SAM_BASES), "lr": rng.choice([0.01, 0.1]), **found, **alpha}
    found |= {"lazy_hessian": rng.choice([1, 2, 3, 5])} | _some(rng, CURVED, 0.25) | _some(rng, HYPERPARAMETERS, 0.3)
    if method != "SophiaH":
        found |= _some(rng, ROOTED, 0.12)
        if rng.random() < 0.3:
            found["hessian_power"] = rng.choice([1.0, 0.5, 2.0 if method == "AdaHessian" else 1.0, 0.7])
    if method in ("SASSHA", "GSASSHA") and found.get("hvp", "exact") == "exact" and rng.random() < 0.15:
        found["hvp_point"] = "upstream"
    if method in ("SASSHA", "GSASSHA") and rng.random() < 0.15:
        found["curvature"] = rng.choice(["signed", "square"])
    if method == "GSASSHA":
        found["alpha"] = rng.choice([0.0, 0.1, 1.0])
    if method == "MSASSHA" and rng.random() < 0.3:
        found["sign"] = 1
    if method == "AdaHessian" and rng.random() < 0.3:
        found["spatial_averaging"] = False
    return found | _stored(rng, stochastic="stochastic_rounding" in found)


def _stored(rng: Random, *, stochastic: bool) -> dict[str, Any]:
    """How a third of the cases store state and weights."""
    if rng.random() < 0.67:
        return {}
    masters = {} if stochastic else {"master_weight_bits": rng.choice([None, 24, 24, 32])}
    return {"state_bits": rng.choice([32, 16, 8, 8]), "full_precision_below": rng.choice([0, 0, 50]), **masters}


def _groups(rng: Random, method: str, count: int) -> tuple[dict[str, Any], ...]:
    table = {"lr": HYPERPARAMETERS["lr"]} if method == "SAM" else {**HYPERPARAMETERS}
    if method in ("SASSHA", "GSASSHA", "MSASSHA", "SAM"):
        table |= RHO
    return tuple(_some(rng, table, 0.3) for _ in range(count))


# ---- actions ------------------------------------------------------------------------------------------------------


def _trouble(rng: Random) -> dict[str, Any]:
    """What goes wrong in the passes of an action: nothing in most."""
    kind = rng.random()
    at = rng.randrange(3)
    if kind < 0.12:
        return {"raises": at}
    if kind < 0.22:
        return {
            "poison": rng.choice([math.nan, math.inf, -math.inf, 1e300]),
            "of": rng.choice(["loss", "grad"]),
            "at": at,
        }
    return {}


def _action(rng: Random, method: str, tensors: int, excluded: frozenset[str]) -> Action:
    kind = _pick(
        rng,
        {
            **{
                "closure": 8,
                "calls": 8,
                "parts": 2,
                "scaled closure": 1,
                "scaled calls": 1,
                "other batch": 1,
                "raw": 3,
            },
            **{"skip": 1, "reload": 2, "resume": 1, "copy": 1, "set": 1, "absent": 1},
            **({"switch": 2} if method == "MSASSHA" else {}),
            # The state of SAM is its base optimizer's, whose errors are torch's own.
            **({} if method == "SAM" or "parameters that change shape or dtype" in excluded else {"other dtype": 1}),
        },
    )
    how: dict[str, Any] = {}
    if kind in ("closure", "parts", "scaled closure", "calls", "scaled calls", "other batch"):
        how = _trouble(rng)
    if kind == "raw":
        how = {"calls": [rng.choice(RAW_CALLS) for _ in range(rng.randrange(1, 8))]}
    elif kind == "calls":
        how |= {"keeps grads": rng.random() < 0.15, "takes products": rng.random() < 0.2, "zeroes": rng.random() < 0.8}
        how = {key: value for key, value in how.items() if value is not (key == "zeroes")}
    elif kind == "absent":
        how = {"tensors": sorted(rng.sample(range(tensors), rng.randrange(tensors + 1)))}
    elif kind == "set":
        table = {"lr": (0.1, 0.0), "weight_decay": (0.1, 0.0)}
        table |= {"max_grad_norm": (0.1, None), "skip_nonfinite": (True, False)}
        if method in ("SASSHA", "GSASSHA", "SAM", "MSASSHA"):
            table["rho"] = (0.0, 0.2)
        key = rng.choice(sorted(table))
        how = {"key": key, "value": rng.choice(table[key])}
    return Action(kind, how)


def _is_excluded(case: Case, excluded: frozenset[str]) -> bool:
    options, actions = case.options, case.actions
    if "perturb_eps 0" in excluded and options.get("perturb_eps") == 0.0:
        return True
    skips = options.get("skip_nonfinite") or any(a.how.get("key") == "skip_nonfinite" for a in actions)
    skips = skips or any(a.kind.startswith("scaled") for a in actions)
    if "capturable with skip_nonfinite" in excluded and options.get("capturable") and skips:
        return True
    coarse = any(s.layout == "channels_last" and s.dtype in ("bfloat16", "float16") for s in case.tensors)
    return "differences of 16-bit channels_last" in excluded and coarse and options.get("hvp", "exact") != "exact"


def make_case(seed: int, excluded: frozenset[str] = EXCLUDED) -> Case:
    """The case of a seed. Those that are excluded are replaced by the next of their own random numbers."""
    rng = Random(seed)
    while True:
        method = _pick(rng, METHODS)
        count = rng.choice([1, 1, 2, 3])
        tensors = _tensors(rng, count)
        used = sorted({s.group for s in tensors})
        tensors = tuple(s._replace(group=used.index(s.group)) for s in tensors)
        if "overlapping parameters" not in excluded and rng.random() < 0.05:
            tensors = (*tensors, tensors[-1]._replace(layout="overlapping"))
        actions = tuple(_action(rng, method, len(tensors), excluded) for _ in range(rng.randrange(2, 7)))
        small = sum(math.prod(s.shape) for s in tensors) < 400 and len(tensors) < 3 and len(actions) < 4
        groups = _groups(rng, method, len(used))
        triton = small and rng.random() < 0.3
        magnitude = rng.choice([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1e-30, 1e4, 1e15])
        case = Case(seed, method, _options(rng, method), groups, tensors, actions, magnitude, triton)
        if not _is_excluded(case, excluded):
            return case
