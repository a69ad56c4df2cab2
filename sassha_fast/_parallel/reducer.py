"""Several processes: gradients and products are reduced together, once, and nothing twice."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._passes.accessors import resolved
from .._passes.shards import is_sharded, local
from ..checks import user_level
from .collectives import EarlyReduction, all_reduce_together


def is_parallel(group: Any = None) -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


class Reducer:
    """What an optimizer knows of other processes and of the model that they train.

    Attributes:
        caller: What errors call the optimizer.
        model: The model that ``attach`` named.
        reduced: Parameters that had gradients anywhere in the last reduction, None before the first.
    """

    def __init__(self, caller: str) -> None:
        """Knows of no model."""
        self.caller = caller
        self.model: nn.Module | None = None
        self.reduced: list[Tensor] | None = None
        self._has_looked = False  # for parameters of other optimizers
        self._found_local: bool | None = None  # whether gradients turned out to be local, where nobody said so
        self._synced_pass = False  # whether DDP reduced the gradients of its last pass

    def attach(self, model: nn.Module) -> None:
        """Names the model. Of a ``DistributedDataParallel`` it then sees which passes were reduced."""
        self.model = model
        if isinstance(model, DistributedDataParallel):
            model.register_forward_pre_hook(self._note_pass)

    def _note_pass(self, model: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._synced_pass = bool(model.require_backward_grad_sync)

    @property
    def group(self) -> Any:
        """The processes that train one model."""
        return self.model.process_group if isinstance(self.model, DistributedDataParallel) else None

    def is_needed(self, params: Sequence[Tensor], reduce_grads: bool | None) -> bool:
        """Whether gradients are, or may have to be, reduced over processes. Those of shards are reduced already."""
        if reduce_grads is False or not is_parallel():
            return False
        return is_parallel(self.group) and not any(map(is_sharded, params))

    def begin_step(self, params: Sequence[Tensor], reduce_grads: bool | None, *, joins: bool) -> None:
        """Before the passes of a closure, which run without DDP's reduction.

        Buffers come from DDP's first process at the first forward pass, as in its own training; it leaves them alone
        after passes that it did not reduce. Within ``Join`` they can't, as processes without data run no pass.
        """
        model = self.model
        if not isinstance(model, DistributedDataParallel) or reduce_grads is False:
            return
        if joins and model._join_config.enable:
            raise RuntimeError(
                f"{self.caller}.step: Join was given the DDP model beside the optimizer, and both would answer for a "
                "process without data; use Join([opt]) alone, which reduces gradients itself"
            )
        model.require_forward_param_sync = not joins
        if not self._has_looked and is_parallel(self.group):
            self._warn_of_others(model, params)
        self._has_looked = True

    def _warn_of_others(self, model: DistributedDataParallel, params: Sequence[Tensor]) -> None:
        """Warns of parameters that nobody may reduce: those of another optimizer."""
        mine = set(map(id, params))
        others = [name for name, p in model.module.named_parameters() if p.requires_grad and id(p) not in mine]
        if others:
            warnings.warn(
                f"{self.caller}.step: {len(others)} parameters of the attached model, {others[0]} among them, belong "
                f"to another optimizer, and {self.caller} reduces the gradients of its own alone: train them by an "
                "optimizer of sassha_fast with a closure of its own, or reduce their gradients before its step",
                stacklevel=user_level(),
            )

    def reshard(self) -> None:
        """Lets FSDP2 modules that were left unsharded forget their copies of weights that have moved since."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and self.model is not None:
            for module in self.model.modules():
                if isinstance(module, fsdp.FSDPModule):
                    module.reshard()

    def unsynced(self, params: Sequence[Tensor], reduce_grads: bool | None) -> AbstractContextManager[Any]:
        """For the passes of a closure: DDP leaves gradients alone."""
        if isinstance(self.model, DistributedDataParallel) and reduce_grads is not False:
            if self.model.static_graph:
                raise RuntimeError(
                    f"{self.caller}.step: the attached DDP model has static_graph=True, and its reducer can't leave "
                    "the passes of a closure alone; construct DistributedDataParallel without static_graph"
                )
            return self.model.no_sync()  # of one process too: its reducer can't handle a graph either
        if reduce_grads is None and self.is_needed(params, reduce_grads):
            raise RuntimeError(
                f"{self.caller}.step: this process is one of {dist.get_world_size()}, and it is not known whether the "
                f"closure reduces gradients; call opt.attach(ddp_model), or construct {self.caller} with "
                "reduce_grads=True (its passes are local) or False (they are reduced, or processes train on their own)"
            )
        return nullcontext()

    def grads_are_local(self, params: Sequence[Tensor], reduce_grads: bool | None, grad_reduce: str) -> bool:
        """Whether the gradients at hand are this process's own, and so have to be reduced."""
        if reduce_grads is not None:
            return reduce_grads
        if isinstance(self.model, DistributedDataParallel):
            return not self._synced_pass
        if self._found_local is None:
            self._found_local = self._find_out(params, grad_reduce)
        return self._found_local

    def _find_out(self, params: Sequence[Tensor], grad_reduce: str) -> bool:
        """Compares the norms of gradients over processes: those that DDP has reduced are equal to the last bit."""
        squares = [p.grad.detach().double().square().sum() for p in params if p.grad is not None]
        norm = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=params[0].device)
        bounds = torch.stack((norm, -norm))
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self.group)
        if bounds[0] != -bounds[1]:
            return True
        if grad_reduce == "sum":
            raise RuntimeError(
                f"{self.caller}: gradients are equal in all processes: DDP has reduced them, or all see the same "
                "batch, and with grad_reduce='sum' that makes a difference. "
                f"Construct {self.caller} with reduce_grads=True or False"
            )
        return False  # and if all saw the same batch, the mean would not change it

    def early(self) -> EarlyReduction | None:
        """For a pass whose gradients are reduced next: they travel while it runs.

        None the first time, when nobody knows yet which parameters there are.
        """
        return None if self.reduced is None else EarlyReduction(self.reduced, self.group)

    def _anywhere(self, present: Sequence[bool], device: torch.device) -> list[bool]:
        """What is so in any process."""
        bitmap = torch.tensor(present, dtype=torch.uint8, device=device)
        dist.all_reduce(bitmap, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(b) for b in bitmap.tolist()]

    def reduce(
        self,
        params: Sequence[Tensor],
        products: list[Tensor | None] | None,
        *,
        mean: bool,
        coarse: bool = False,
        seen: Sequence[Tensor | None] | None = None,
        early: EarlyReduction | None = None,
    ) -> tuple[bool, Sequence[Tensor | None] | None]:
        """Reduces gradients, and products on a refresh, of all parameters that have some in any process.

        Args:
            params: All parameters, in the same order everywhere.
            products: Of each parameter; filled up with zeros and replaced by their mean or sum.
            mean: Divide by the number of processes.
            coarse: Whether products of this process that are 0 may have been lost to rounding.
            seen: Of products of another batch than the gradients', what it has to tell of; see :func:`seen_in`.
            early: What was sent while the pass ran.

        Returns:
            Whether those of any process may; and what the batches of all have to tell of, if there were others in any.
        """
        if products is None and self.reduced is not None:  # the same collectives, whether there was time or not
            early = early or EarlyReduction(self.reduced, self.group)
            early.launch_all()
        else:
            early = None
        stale = early.stale if early is not None else []
        asked = stale if products is None else [coarse, seen is not None]
        # Processes agree on what has gradients alone: of a layer that one of them has frozen, it has none to send.
        present = [p.grad is not None for p in params]
        there = self._anywhere([*present, *asked], params[0].device)
        chosen = [i for i, is_present in enumerate(there[: len(params)]) if is_present]
        for i in chosen:
            grad = params[i].grad
            if grad is None:
                params[i].grad = torch.zeros_like(params[i])
            elif grad.is_neg():
                params[i].grad = resolved(grad)
            if products is not None and products[i] is None:
                products[i] = torch.zeros_like(params[i])
        if products is not None:
            seen = self._seen_anywhere(params, products, seen, chosen) if there[-1] else None
        left = [params[i] for i in chosen]
        self.reduced = left
        if early is not None:
            stale_params = set(map(id, early.finish(there[len(params) :], mean=mean)))
            left = [p for p in left if id(p) not in early.places or id(p) in stale_params]
        tensors: list[Tensor] = [p.grad.detach() for p in left]  # type: ignore[union-attr]
        if products is not None:
            tensors += [products[i] for i in chosen]  # type: ignore[misc]
        all_reduce_together(tensors, self.group, mean=mean)
        return products is not None and there[-2], seen

    def _seen_anywhere(
        self,
        params: Sequence[Tensor],
        products: Sequence[Tensor | None],
        seen: Sequence[Tensor | None] | None,
        chosen: Sequence[int],
    ) -> list[Tensor | None]:
        """What the batch of any process has to tell of. Products and gradients are still those of this process."""
        own = seen or seen_in(products, [p.grad for p in params])
        found: list[Tensor | None] = [None] * len(params)
        for i in chosen:
            mask = own[i]
            found[i] = torch.zeros_like(params[i], dtype=torch.uint8) if mask is None else mask.to(torch.uint8)
        all_reduce_together([found[i] for i in chosen], self.group, mean=False, op=dist.ReduceOp.MAX)  # type: ignore[misc]
        return [None if mask is None else mask.bool() for mask in found]


def seen_in(products: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The elements whose product, or gradient in the same batch, is not 0: the others are of what the batch lacks."""
    found: list[Tensor | None] = []
    for product, grad in zip(products, grads, strict=True):
        mask = None if product is None else local(product) != 0
        found.append(mask if mask is None or grad is None else mask | (local(grad.detach()) != 0))
    return found
