"""Settings of compact state and weights, and runs in them, which the tests of whole optimizers share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from training import closure_of, make_loss, make_net, three_calls

from sassha_fast import GSASSHA, MSASSHA, SASSHA, AdaHessian, SophiaH


class Setting(NamedTuple):
    """How the network and its optimizer store things."""

    dtype: torch.dtype
    state_bits: int = 32
    master_weight_bits: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Of the optimizer. Every parameter of two dimensions is compact, also those that end within a group."""
        kept = {"state_bits": self.state_bits, "master_weight_bits": self.master_weight_bits}
        return {**kept, "full_precision_below": 0}

    @property
    def name(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}-{self.state_bits}-{self.master_weight_bits}"


SEVEN = Setting(torch.bfloat16, 8, 24)
SETTINGS = [
    Setting(torch.float32),
    Setting(torch.float32, 16),
    Setting(torch.float32, 8),
    Setting(torch.bfloat16, 32, 24),
    Setting(torch.bfloat16, 8),
    Setting(torch.bfloat16, 16, 32),
    SEVEN,
    Setting(torch.float16, 8, 24),
]
COMPACT = SETTINGS[1:]
METHODS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "SASSHA": (SASSHA, {"lr": 0.03, "rho": 0.05}),
    "GSASSHA": (GSASSHA, {"lr": 0.03, "rho": 0.05}),
    "MSASSHA": (MSASSHA, {"lr": 0.03, "rho": 0.05}),
    "AdaHessian": (AdaHessian, {"lr": 0.03, "lazy_hessian": 10}),
    "SophiaH": (SophiaH, {"lr": 3e-3, "lazy_hessian": 10}),
}


def id_of(value: object) -> str | None:
    """Test ids of settings and dtypes."""
    return value.name if isinstance(value, Setting) else None


def built(setting: Setting, method: str = "SASSHA", seed: int = 0, **options: Any) -> tuple[nn.Module, Any]:
    """A network and its optimizer."""
    net = make_net(setting.dtype, seed)
    kind, given = METHODS[method]
    return net, kind(net.parameters(), **{**given, **setting.options, **options})


def train(net: nn.Module, opt: Any, steps: int, *, calls: bool = False) -> list[float]:
    """Losses of so many steps, from closures or by three calls."""
    loss = make_loss(net, next(net.parameters()).dtype)
    if calls:
        return [three_calls(opt, loss) for _ in range(steps)]
    return [float(opt.step(closure_of(opt, loss))) for _ in range(steps)]


def trained(
    setting: Setting, steps: int, method: str = "SASSHA", *, calls: bool = False, **options: Any
) -> tuple[nn.Module, Any, list[float]]:
    """The same after so many steps, and its losses."""
    net, opt = built(setting, method, **options)
    return net, opt, train(net, opt, steps, calls=calls)


def entries(opt: Any) -> list[dict[str, Any]]:
    """State of every parameter that has two dimensions."""
    return [opt.state[p] for group in opt.param_groups for p in group["params"] if p.dim() == 2]


def decoded(opt: Any) -> list[dict[str, Tensor]]:
    """m and D of every parameter in float32."""
    saved = opt.full_state_dict()["state"]
    return [{key: saved[i][key] for key in ("exp_avg", "exp_hessian_diag")} for i in sorted(saved)]
