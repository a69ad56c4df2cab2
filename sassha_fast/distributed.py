"""Several processes: gradients and products are reduced together, once, and nothing twice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from .collectives import EarlyReduction, all_reduce_together
from .contexts import ModelContexts
from .sharding import is_sharded

__all__ = ["Reducing", "is_parallel"]


def is_parallel(group: Any = None) -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


class Reducing(ModelContexts):
    """What an optimizer knows of other processes."""

    grad_reduce: str
    perturb_sync: bool
    reduce_grads: bool | None
    _found_local: bool | None  # whether gradients turned out to be local, where nobody said so
    _synced_pass: bool  # whether DDP reduced the gradients of its last pass
    _reduced_before: list[Tensor] | None  # parameters that had gradients anywhere in the last reduction
    _early: EarlyReduction | None  # of the pass at hand
    _shadow_step: Callable[[], None]  # what a process without data does while others take a step

    def attach(self, model: nn.Module) -> None:
        """Names the model that closures run.

        BatchNorm statistics then move once per step. With ``DistributedDataParallel``, closures run without its
        reduction and the optimizer reduces gradients and products itself; in hand-written loops it sees which passes
        were reduced. Not part of checkpoints and copies; call it again on a new optimizer.
        """
        super().attach(model)
        if isinstance(model, DistributedDataParallel):
            model.register_forward_pre_hook(self._note_pass)

    def _note_pass(self, model: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._synced_pass = bool(model.require_backward_grad_sync)

    @property
    def _group(self) -> Any:
        """The processes that train one model."""
        return self._model.process_group if isinstance(self._model, DistributedDataParallel) else None

    @property
    def _parallel(self) -> bool:
        """Whether gradients are, or may have to be, reduced over processes. Those of shards are reduced already."""
        if self.reduce_grads is False or not is_parallel(self._group):
            return False
        return not any(is_sharded(p) for group in self.param_groups for p in group["params"][:1])

    def _reshard(self) -> None:
        """Lets FSDP2 modules that were left unsharded forget their copies of weights that have moved since."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and self._model is not None:
            for module in self._model.modules():
                if isinstance(module, fsdp.FSDPModule):
                    module.reshard()

    def _unsynced(self) -> AbstractContextManager[Any]:
        """For the passes of a closure: DDP leaves gradients alone."""
        if isinstance(self._model, DistributedDataParallel) and self.reduce_grads is not False:
            return self._model.no_sync()  # of one process too: its reducer can't handle a graph either
        if not self._parallel:
            return nullcontext()
        if self.reduce_grads is None:
            raise RuntimeError(
                f"{self._name}.step: this process is one of {dist.get_world_size()}, and it is not known whether the "
                f"closure reduces gradients; call opt.attach(ddp_model), or construct {self._name} with "
                "reduce_grads=True (its passes are local) or False (they are reduced, or processes train on their own)"
            )
        return nullcontext()

    def _grads_are_local(self, params: Sequence[Tensor]) -> bool:
        """Whether the gradients at hand are this process's own, and so have to be reduced."""
        if self.reduce_grads is not None:
            return self.reduce_grads
        if isinstance(self._model, DistributedDataParallel):
            return not self._synced_pass
        if self._found_local is None:
            self._found_local = self._find_out(params)
        return self._found_local

    def _find_out(self, params: Sequence[Tensor]) -> bool:
        """Compares the norms of gradients over processes: those that DDP has reduced are equal to the last bit."""
        squares = [p.grad.detach().double().square().sum() for p in params if p.grad is not None]
        norm = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=params[0].device)
        bounds = torch.stack((norm, -norm))
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self._group)
        if bounds[0] != -bounds[1]:
            return True
        if self.grad_reduce == "sum":
            raise RuntimeError(
                f"{self._name}: gradients are equal in all processes: DDP has reduced them, or all see the same batch, "
                "and with grad_reduce='sum' that makes a difference. "
                f"Construct {self._name} with reduce_grads=True or False"
            )
        return False  # and if all saw the same batch, the mean would not change it

    def _reducing_early(self, *, refresh: bool) -> AbstractContextManager[Any]:
        """For a pass whose gradients are reduced next: they travel while it runs.

        Not on refreshes, where products travel with them, nor the first time, when nobody knows yet which parameters
        there are.
        """
        if not self._parallel or refresh or self._reduced_before is None:
            return nullcontext()
        self._early = EarlyReduction(self._reduced_before, self._group)
        return self._early

    def _anywhere(self, present: Sequence[bool], device: torch.device) -> list[bool]:
        """What is so in any process."""
        bitmap = torch.tensor(present, dtype=torch.uint8, device=device)
        dist.all_reduce(bitmap, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(b) for b in bitmap.tolist()]

    @torch.no_grad()
    def _reduce(self, params: Sequence[Tensor], products: dict[int, Tensor] | None, coarse: bool = False) -> bool:
        """Reduces gradients, and products on a refresh, of all parameters that have some in any process.

        Args:
            params: All parameters, in the same order everywhere.
            products: By id of the parameter; filled up with zeros and replaced by their mean or sum.
            coarse: Whether those of this process are; see :class:`Curvature`.

        Returns:
            Whether those of any process are.
        """
        early, self._early = self._early, None
        if products is None and self._reduced_before is not None:  # the same collectives, whether there was time or not
            early = early or EarlyReduction(self._reduced_before, self._group)
            early.launch_all()
        else:
            early = None
        stale = early.stale if early is not None else []
        asked = stale if products is None else [coarse]
        there = self._anywhere([*(p.grad is not None for p in params), *asked], params[0].device)
        chosen = [p for p, present in zip(params, there, strict=False) if present]
        for p in chosen:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if products is not None and id(p) not in products:
                products[id(p)] = torch.zeros_like(p)
        left, mean = chosen, self.grad_reduce == "mean"
        if early is not None:
            stale_params = set(map(id, early.finish(there[len(params) :], mean=mean)))
            left = [p for p in chosen if id(p) not in early.places or id(p) in stale_params]
        tensors = [p.grad.detach() for p in left]  # type: ignore[union-attr]
        if products is not None:
            tensors += [products[id(p)] for p in chosen]
        all_reduce_together(tensors, self._group, mean=mean)
        self._reduced_before = chosen
        return products is not None and there[-1]

    # ---- uneven inputs ------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """See ``torch.distributed.algorithms.Join``: a process out of data takes the steps of the others."""
        if self.reduce_grads is None and not isinstance(self._model, DistributedDataParallel):
            raise RuntimeError(
                f"{self._name}.join_hook: it is not known who reduces gradients; call opt.attach(ddp_model) or "
                f"construct {self._name} with reduce_grads=True"
            )
        return _Shadow(self._shadow_step)

    @property
    def join_device(self) -> torch.device:
        """See ``torch.distributed.algorithms.Joinable``."""
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    @property
    def join_process_group(self) -> Any:
        """See ``torch.distributed.algorithms.Joinable``."""
        return self._group if self._group is not None else dist.group.WORLD


class _Shadow(JoinHook):
    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step

    def main_hook(self) -> None:
        """One step of the others."""
        self.step()
