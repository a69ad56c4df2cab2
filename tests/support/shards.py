"""Scenarios of shards, FSDP2 and tensor parallelism, and of checkpoints that move between kinds of parameters."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from replicas import OPTIONS, SEVEN, WORDS, labelled, part_loss, results
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from training import closure_of, make_net, three_calls

from sassha_fast import GSASSHA, MSASSHA, SASSHA, backends


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be in shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def simulated() -> str:
    """The name of a backend that runs the CUDA kernels on the CPU."""
    from sim import SimPasses

    backend = backends.Backend("cuda_sim", "the CUDA kernels on the CPU", lambda: SimPasses, lambda device: None)
    return backends._REGISTRY.setdefault("cuda_sim", backend).name


def sharded_net(mesh: Any, dtype: torch.dtype, **options: Any) -> nn.Module:
    net = make_net(dtype)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def whole_results(net: nn.Module, opt: SASSHA) -> dict[str, Any]:
    found = results(net, opt)
    found["params"] = [whole(p) for p in found["params"]]
    if opt.state_bits < 32:  # scales are those of shards
        found["state"] = list(opt.full_state_dict()["state"].values())
    found["state"] = [{key: whole(v) if isinstance(v, Tensor) else v for key, v in e.items()} for e in found["state"]]
    found["trace"], found["norm"] = opt.stats.trace.item(), opt.stats.grad_norm.item()
    return found


def shards(
    steps: int = 30,
    dtype: torch.dtype = torch.float64,
    by_calls: bool = False,
    fsdp: dict[str, Any] | None = None,
    keep: bool = False,
    method: type[Any] = SASSHA,
    **options: Any,
) -> dict[str, Any]:
    """FSDP2: each process on its part of the batch and with its shards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = sharded_net(init_device_mesh("cpu", (size,)), dtype, **(fsdp or {}))
    if keep:
        net.set_reshard_after_backward(False)
    opt = method(net.parameters(), **{**OPTIONS, "hvp": "finite_difference", **options})
    opt.attach(net)
    loss = part_loss(net, dtype, rank, size)
    for _ in range(steps):
        if by_calls:
            three_calls(opt, loss)
        else:
            opt.step(closure_of(opt, loss))
    return whole_results(net, opt)


def rare_words(shared: bool) -> dict[str, Any]:
    """Products from a row whose words are in the shard of the first process alone, and then from rows without a label.

    Without ``shared`` this process has whole parameters and is by itself.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(8, 4), nn.Flatten(), nn.Linear(8, 3)).double()
    if shared:
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    opt = SASSHA(net.parameters(), **{**OPTIONS, "hvp": "finite_difference", "lazy_hessian": 1}, reduce_grads=shared)
    opt.attach(net)
    counts, traces = [], []
    for rows in (1, 0):

        def loss(rows: int = rows) -> Tensor:
            return F.cross_entropy(net(WORDS), labelled(rows), reduction="sum")

        opt.step(closure_of(opt, lambda: loss(4)), hessian_closure=closure_of(opt, loss))
        counts.append((opt.stats.refreshes, opt.stats.skipped_refreshes))
        traces.append(opt.stats.trace.item())
    return {"counts": counts, "traces": traces}


class Collectives(TorchDispatchMode):
    """Counts collectives by kind, whoever asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def collectives(method: type[Any]) -> dict[str, Any]:
    """Collectives by kind of one pass alone, of a step that refreshes and of an ordinary one."""
    size = dist.get_world_size()
    net = sharded_net(init_device_mesh("cpu", (size,)), torch.float64)
    opt = method(net.parameters(), **OPTIONS, hvp="finite_difference")
    loss = part_loss(net, torch.float64, dist.get_rank(), size)
    closure = closure_of(opt, loss)

    def counted(run: Callable[[], object]) -> dict[str, int]:
        with Collectives() as mode:
            run()
        return dict(mode.counts)

    closure()  # creates what FSDP2 creates lazily
    return {
        "pass": counted(closure),
        "refresh": counted(lambda: opt.step(closure)),
        "ordinary": counted(lambda: opt.step(closure)),
    }


def two_dimensional() -> dict[str, Any]:
    """Tensor parallelism over two processes, FSDP2 over the two others of each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    net = make_net(torch.float64)
    parallelize_module(net, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["data"])
    opt = SASSHA(net.parameters(), **OPTIONS, hvp="finite_difference")
    loss = part_loss(net, torch.float64, mesh["data"].get_local_rank(), 2)
    for _ in range(12):
        opt.step(closure_of(opt, loss))
    return {**whole_results(net, opt), "probes": signs_of(opt)}


def signs_of(opt: SASSHA) -> list[Tensor]:
    """The probes of all parameters, put together from their shards."""
    params = opt.parts.params.all
    for p in params:
        p.grad = torch.zeros_like(p)
    plan, _ = opt.parts.params.gather(opt.parts.options)
    parts = plan.rademacher(range(len(params)), 5, 6)
    return [
        DTensor.from_local(z, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()).full_tensor()
        for z, p in zip(parts, params, strict=True)
    ]


def probes() -> dict[str, Any]:
    net = sharded_net(init_device_mesh("cpu", (dist.get_world_size(),)), torch.float32)
    return {"probes": signs_of(SASSHA(net.parameters()))}


def exact_shards() -> dict[str, Any]:
    """The error of exact products, which FSDP2 does not have."""
    net = sharded_net(init_device_mesh("cpu", (dist.get_world_size(),)), torch.float32)
    opt = SASSHA(net.parameters(), **OPTIONS)
    before = [whole(p.detach()).clone() for p in net.parameters()]
    try:
        opt.step(closure_of(opt, part_loss(net, torch.float32, 0, 1)))
    except RuntimeError as error:
        return {"messages": [str(error)], "params": [whole(p.detach()) for p in net.parameters()], "before": before}
    return {"messages": []}


# ---- checkpoints --------------------------------------------------------------------------------------------------

CHECKPOINTED = {**OPTIONS, "hvp": "finite_difference", "lazy_hessian": 4}


def prepared(kind: str) -> tuple[nn.Module, nn.Module, Any]:
    """A network, the model that runs it and their optimizer: in shards, replicated, or alone.

    ``+m`` is for M-SASSHA, and ``+seven`` for weights and state in 7 bytes.
    """
    kind, *variant = kind.split("+")
    options = {**CHECKPOINTED, **SEVEN} if "seven" in variant else CHECKPOINTED
    dtype = torch.bfloat16 if "seven" in variant else torch.float64
    net = make_net(dtype)
    if kind == "shards":
        net = model = sharded_net(init_device_mesh("cpu", (dist.get_world_size(),)), dtype)
    else:
        model = DDP(net) if kind == "replicas" and dist.get_world_size() > 1 else net
    params = net.parameters()
    opt = MSASSHA(params, **options) if "m" in variant else SASSHA(params, **options, perturb_sync=True)
    opt.attach(model)
    return net, model, opt


def go_on(model: nn.Module, opt: SASSHA, steps: int) -> None:
    """Steps on the joined batch, which is every process's, so that their number does not matter."""
    for _ in range(steps):
        opt.step(closure_of(opt, part_loss(model, opt.param_groups[0]["params"][0].dtype, 0, 1)))


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    kind: str,
    folder: Path,
    asynchronously: bool = False,
    evaluating: bool = False,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    net, model, opt = prepared(kind)
    go_on(model, opt, 5)
    with opt.true_weights() if evaluating else nullcontext(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="MSASSHA: the model's state_dict")
        weights, state = get_state_dict(net, opt, options=options)
        if evaluating:  # the weights are views of parameters that train() writes again
            weights = {key: value.clone() for key, value in weights.items()}
    content = {"model": weights, "optimizer": state}
    if asynchronously:
        written = dcp.async_save(content, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
        go_on(model, opt, 1)  # training goes on while the file is written
        written.result()
    else:
        dcp.save(content, checkpoint_id=folder)
        go_on(model, opt, 5)
    return whole_results(net, opt)


def resume(kind: str, folder: Path, used: bool = False, options: StateDictOptions | None = None) -> dict[str, Any]:
    net, model, opt = prepared(kind)
    if used:
        go_on(model, opt, 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="MSASSHA: the model's state_dict")
        weights, state = get_state_dict(net, opt, options=options)
        content = {"model": weights, "optimizer": state}
        dcp.load(content, checkpoint_id=folder)
        loaded = {"model_state_dict": content["model"], "optim_state_dict": content["optimizer"]}
        set_state_dict(net, opt, **loaded, options=options)
    if isinstance(opt, MSASSHA):
        opt.train()
    go_on(model, opt, 5)
    return whole_results(net, opt)


def moved() -> dict[str, Any]:
    """Compact state of shards that ``full_state_dict=True`` brings into a whole network, used or new, and back."""
    options = StateDictOptions(full_state_dict=True)
    net, model, opt = prepared("shards+seven")
    go_on(model, opt, 5)
    expected = whole_results(net, opt)
    content = get_state_dict(net, opt, options=options)
    whole_net, whole_model, whole_opt = prepared("replicas+seven")
    go_on(whole_model, whole_opt, 3)
    set_state_dict(whole_net, whole_opt, model_state_dict=content[0], optim_state_dict=content[1], options=options)
    found = whole_results(whole_net, whole_opt)
    masters = [
        {key: whole(x) for key, x in o.master_weights(n).items()} for o, n in ((opt, net), (whole_opt, whole_net))
    ]
    codes = get_state_dict(whole_net, whole_opt, options=options)
    try:
        set_state_dict(net, opt, model_state_dict=codes[0], optim_state_dict=codes[1], options=options)
        message = ""
    except ValueError as error:
        message = str(error)
    wide = SASSHA(whole_net.parameters(), **CHECKPOINTED)  # which is the remedy
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the checkpoint has bits of")
        wide.load_state_dict(whole_opt.state_dict())
    content = get_state_dict(whole_net, wide, options=options)
    set_state_dict(net, opt, model_state_dict=content[0], optim_state_dict=content[1], options=options)
    back = whole_results(net, opt)
    return {"expected": expected, "found": found, "masters": masters, "message": message, "back": back}


def checkpoint_scenario(name: str) -> Callable[[], dict[str, Any]]:
    """``save:shards:folder`` and ``resume:replicas:folder``, with ``async``, ``used`` and ``flat`` as variants."""
    verb, kind, folder = name.split("|")[0].split(":", 2)
    options = FLAT if verb.endswith("_flat") else None
    if verb.startswith("save"):
        return lambda: save(kind, Path(folder), verb == "save_async", verb == "save_evaluating", options)
    return lambda: resume(kind, Path(folder), verb == "resume_used", options)


SHARDS: dict[str, Callable[[], dict[str, Any]]] = {
    "shards": shards,
    "shards_rare_words": lambda: {"shared": rare_words(True), "alone": rare_words(False)},
    "shards_by_calls": lambda: shards(by_calls=True),
    "shards_central": lambda: shards(hvp="central_difference"),
    "shards_clipped": lambda: shards(12, max_grad_norm=0.1, adaptive=True),
    "shards_momentum": lambda: shards(method=MSASSHA),
    "shards_gap": lambda: shards(method=GSASSHA, alpha=0.3),
    "shards_reference": lambda: shards(12, backend="reference"),
    "shards_simulated": lambda: shards(12, backend=simulated()),
    "shards_triton": lambda: shards(12, backend="triton"),
    "shards_collectives": lambda: collectives(SASSHA),
    "shards_collectives_momentum": lambda: collectives(MSASSHA),
    "shards_seven": lambda: shards(12, torch.bfloat16, **SEVEN),
    "shards_cpu": lambda: shards(12),
    "shards_kept": lambda: shards(12, keep=True),
    "shards_offloaded": lambda: shards(12, fsdp={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "shards_one_step": lambda: shards(1, torch.float32),
    "shards_mixed": lambda: shards(
        12,
        torch.float32,
        fsdp={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ),
    "moved": moved,
    "probes": probes,
    "exact_shards": exact_shards,
    "two_dimensional": two_dimensional,
}
