"""Scenarios that run in several processes on gloo. Each returns what its process saw; tests compare the returns."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from training import make_net

from sassha_fast import SASSHA

ROWS = 24  # of the joined batch: two, three and four processes share it evenly
OPTIONS = {"lr": 0.03, "rho": 0.05, "lazy_hessian": 10, "weight_decay": 0.01}


def batch(dtype: torch.dtype, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Every ``parts``-th row of the joined batch."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS, 12, generator=generator).to(dtype), torch.randint(0, 3, (ROWS,), generator=generator)
    return x[part::parts], y[part::parts]


def part_loss(net: nn.Module, dtype: torch.dtype, part: int, parts: int) -> Callable[[], Tensor]:
    x, y = batch(dtype, part, parts)
    return lambda: F.cross_entropy(net(x).double(), y)


def closure_of(opt: SASSHA, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    return closure


def results(net: nn.Module, opt: SASSHA) -> dict[str, Any]:
    return {
        "params": [p.detach().clone() for p in net.parameters()],
        "state": [copy.deepcopy(dict(opt.state.get(p, {}))) for p in net.parameters()],
        "refreshes": opt.stats.refreshes,
        "skipped": opt.stats.skipped_steps,
    }


def by_hand(
    opt: SASSHA, model: DDP, loss: Callable[[], Tensor], first_synced: bool = False, second_synced: bool = False
) -> None:
    """The authors' loop, whose passes are both local, and loops in which DDP reduces some."""

    def backward(synced: bool, **kwargs: bool) -> None:
        if synced:
            loss().backward(**kwargs)
        else:
            with model.no_sync():
                loss().backward(**kwargs)

    backward(first_synced)
    opt.perturb_weights(zero_grad=True)
    backward(second_synced, **({"create_graph": opt.hessian_due} if opt.hvp == "exact" else {}))
    for _ in range(opt.probes_due):
        opt.probe_weights()
        backward(second_synced)
    opt.unperturb()
    opt.step()
    opt.zero_grad()


def train(
    way: str = "closure",
    steps: int = 30,
    dtype: torch.dtype = torch.float64,
    attach: bool = True,
    ddp: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains a small network, each process on its part of the batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net(dtype)
    model = DDP(net, **(ddp or {}))
    opt = SASSHA(net.parameters(), **{**OPTIONS, **options})
    if attach:
        opt.attach(model)
    loss = part_loss(model, dtype, rank, size)
    for _ in range(steps):
        if way == "closure":
            opt.step(closure_of(opt, loss))
        elif way == "local":
            by_hand(opt, model, loss)
        elif way == "synced":
            by_hand(opt, model, loss, True, True)
        elif way == "half":
            by_hand(opt, model, loss, False, True)
    return results(net, opt)


class TwoHeads(nn.Module):
    """A network of which each process uses another head in turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(12, 8), nn.ModuleList(nn.Linear(8, 3) for _ in range(2))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.body(x)))


def different_parameters(hvp: str) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    net = TwoHeads().double()
    model = DDP(net, find_unused_parameters=True)
    opt = SASSHA(net.parameters(), **{**OPTIONS, "lazy_hessian": 3}, hvp=hvp)
    opt.attach(model)
    x, y = batch(torch.float64, rank, size)
    for t in range(8):
        head = (rank + t) % 2 if t != 4 else 0
        opt.step(closure_of(opt, lambda head=head: F.cross_entropy(model(x, head), y)))
    return results(net, opt)


def uneven(perturb_sync: bool) -> dict[str, Any]:
    """Process 0 has three batches, every other one more than the one before it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net(torch.float64)
    model = DDP(net)
    opt = SASSHA(net.parameters(), **{**OPTIONS, "lazy_hessian": 2}, perturb_sync=perturb_sync)
    opt.attach(model)
    loss = part_loss(model, torch.float64, rank, size)
    with Join([opt]):
        for _ in range(3 + rank):
            opt.step(closure_of(opt, loss))
    return results(net, opt)


def broken_rank(way: str) -> dict[str, Any]:
    """In step 3 the last process has a gradient that is not a number."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net(torch.float64)
    model = DDP(net)
    opt = SASSHA(net.parameters(), **OPTIONS, skip_nonfinite=True)
    opt.attach(model)
    base, t = part_loss(model, torch.float64, rank, size), 0

    def loss() -> Tensor:
        return base() * (float("nan") if t == 3 and rank == size - 1 else 1.0)

    for t in range(6):  # noqa: B007
        if way == "closure":
            opt.step(closure_of(opt, loss))
        else:
            by_hand(opt, model, loss)
    return results(net, opt)


def ambiguous() -> dict[str, Any]:
    """Errors where it is not known who reduces."""
    net = make_net()
    messages = []
    loss = part_loss(net, torch.float32, 0, 1)  # the same batch everywhere
    opt = SASSHA(net.parameters(), **OPTIONS)
    try:
        opt.step(closure_of(opt, loss))
    except RuntimeError as error:
        messages.append(str(error))
    opt = SASSHA(net.parameters(), **OPTIONS, grad_reduce="sum")
    loss().backward()
    opt.perturb_weights()
    loss().backward(create_graph=True)
    try:
        opt.unperturb()
    except RuntimeError as error:
        messages.append(str(error))
    try:
        SASSHA(net.parameters()).join_hook()
    except RuntimeError as error:
        messages.append(str(error))
    return {"messages": messages, "params": [p.detach().clone() for p in net.parameters()]}


def scaled(overflow: bool) -> dict[str, Any]:
    """GradScaler in the authors' loop: all processes see the same overflow."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net()
    model = DDP(net)
    opt = SASSHA(net.parameters(), **OPTIONS)
    opt.attach(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
    base = part_loss(model, torch.float32, rank, size)
    for t in range(4):
        bad = float("inf") if overflow and t == 2 and rank == 0 else 1.0
        with model.no_sync():
            scaler.scale(base()).backward()
            opt.perturb_weights()
            scaler.scale(base() * bad).backward(create_graph=opt.hessian_due)
        opt.unperturb(scaler=scaler)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return {**results(net, opt), "scale": scaler.get_scale()}


class Counted:
    """Counts the collectives and bytes of everything that runs inside."""

    def __enter__(self) -> Counted:
        self.calls: list[int] = []
        self.original = dist.all_reduce

        def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(tensor.numel() * tensor.element_size())
            return self.original(tensor, *args, **kwargs)

        dist.all_reduce = all_reduce
        return self

    def __exit__(self, *args: object) -> None:
        dist.all_reduce = self.original


def traffic(perturb_sync: bool) -> dict[str, Any]:
    """Bytes of each collective of a refresh step and of an ordinary one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net()
    model = DDP(net)
    opt = SASSHA(net.parameters(), **OPTIONS, perturb_sync=perturb_sync)
    opt.attach(model)
    loss = part_loss(model, torch.float32, rank, size)
    seen = []
    for _ in range(3):
        with Counted() as counted:
            opt.step(closure_of(opt, loss))
        seen.append(counted.calls)
    return {"traffic": seen, "bytes": sum(p.numel() * 4 for p in net.parameters()), "n": len(list(net.parameters()))}


# ---- shards -------------------------------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be in shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_net(mesh: Any, dtype: torch.dtype, **options: Any) -> nn.Module:
    net = make_net(dtype)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def whole_results(net: nn.Module, opt: SASSHA) -> dict[str, Any]:
    found = results(net, opt)
    found["params"] = [whole(p) for p in found["params"]]
    found["state"] = [{key: whole(v) if isinstance(v, Tensor) else v for key, v in e.items()} for e in found["state"]]
    found["trace"], found["norm"] = opt.stats.trace.item(), opt.stats.grad_norm.item()
    return found


def shards(
    steps: int = 30,
    dtype: torch.dtype = torch.float64,
    by_calls: bool = False,
    fsdp: dict[str, Any] | None = None,
    keep: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """FSDP2: each process on its part of the batch and with its shards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = sharded_net(init_device_mesh("cpu", (size,)), dtype, **(fsdp or {}))
    if keep:
        net.set_reshard_after_backward(False)
    opt = SASSHA(net.parameters(), **{**OPTIONS, "hvp": "finite_difference", **options})
    opt.attach(net)
    loss = part_loss(net, dtype, rank, size)
    for _ in range(steps):
        if not by_calls:
            opt.step(closure_of(opt, loss))
            continue
        loss().backward()
        opt.perturb_weights()
        loss().backward()
        for _ in range(opt.probes_due):
            opt.probe_weights()
            loss().backward()
        opt.unperturb()
        opt.step()
        opt.zero_grad()
    return whole_results(net, opt)


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
    params = opt._parameters()
    for p in params:
        p.grad = torch.zeros_like(p)
    plan, _ = opt._gather()
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

CHECKPOINTED = {**OPTIONS, "hvp": "finite_difference", "perturb_sync": True, "lazy_hessian": 4}


def prepared(kind: str) -> tuple[nn.Module, nn.Module, SASSHA]:
    """A network, the model that runs it and their optimizer: in shards, replicated, or alone."""
    net = make_net(torch.float64)
    if kind == "shards":
        net = model = sharded_net(init_device_mesh("cpu", (dist.get_world_size(),)), torch.float64)
    else:
        model = DDP(net) if kind == "replicas" and dist.get_world_size() > 1 else net
    opt = SASSHA(net.parameters(), **CHECKPOINTED)
    opt.attach(model)
    return net, model, opt


def go_on(model: nn.Module, opt: SASSHA, steps: int) -> None:
    """Steps on the joined batch, which is every process's, so that their number does not matter."""
    for _ in range(steps):
        opt.step(closure_of(opt, part_loss(model, torch.float64, 0, 1)))


def save(kind: str, folder: Path, asynchronously: bool = False) -> dict[str, Any]:
    net, model, opt = prepared(kind)
    go_on(model, opt, 5)
    weights, state = get_state_dict(net, opt)
    content = {"model": weights, "optimizer": state}
    if asynchronously:
        written = dcp.async_save(content, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
        go_on(model, opt, 1)  # training goes on while the file is written
        written.result()
    else:
        dcp.save(content, checkpoint_id=folder)
        go_on(model, opt, 5)
    return whole_results(net, opt)


def resume(kind: str, folder: Path, used: bool = False) -> dict[str, Any]:
    net, model, opt = prepared(kind)
    if used:
        go_on(model, opt, 3)
    weights, state = get_state_dict(net, opt)
    content = {"model": weights, "optimizer": state}
    dcp.load(content, checkpoint_id=folder)
    set_state_dict(net, opt, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    go_on(model, opt, 5)
    return whole_results(net, opt)


def checkpoint_scenario(name: str) -> Callable[[], dict[str, Any]]:
    """``save:shards:folder`` and ``resume:replicas:folder``, with ``async`` and ``used`` as variants."""
    verb, kind, folder = name.split("|")[0].split(":", 2)
    if verb.startswith("save"):
        return lambda: save(kind, Path(folder), asynchronously=verb == "save_async")
    return lambda: resume(kind, Path(folder), used=verb == "resume_used")


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "closure": lambda: train(),
    "closure_sync": lambda: train(perturb_sync=True),
    "closure_sync_fd": lambda: train(perturb_sync=True, hvp="finite_difference"),
    "closure_sum": lambda: train(steps=3, perturb_sync=True, grad_reduce="sum"),
    "local": lambda: train("local"),
    "local_sync": lambda: train("local", perturb_sync=True),
    "local_found_out": lambda: train("local", attach=False),
    "local_told": lambda: train("local", attach=False, reduce_grads=True),
    "synced_fd": lambda: train("synced", hvp="finite_difference"),
    "synced_fd_found_out": lambda: train("synced", attach=False, hvp="finite_difference"),
    "half_fd": lambda: train("half", hvp="finite_difference"),
    "closure_fd": lambda: train(hvp="finite_difference"),
    "one_step_sync": lambda: train(steps=1, dtype=torch.float32, perturb_sync=True),
    "bucket_view": lambda: train("local", ddp={"gradient_as_bucket_view": True}),
    "synced_bucket_view_fd": lambda: train("synced", hvp="finite_difference", ddp={"gradient_as_bucket_view": True}),
    "different": lambda: different_parameters("exact"),
    "different_fd": lambda: different_parameters("finite_difference"),
    "uneven": lambda: uneven(False),
    "uneven_sync": lambda: uneven(True),
    "broken_closure": lambda: broken_rank("closure"),
    "broken_local": lambda: broken_rank("local"),
    "scaled": lambda: scaled(False),
    "scaled_overflow": lambda: scaled(True),
    "traffic": lambda: traffic(False),
    "traffic_sync": lambda: traffic(True),
    "ambiguous": ambiguous,
    "shards": shards,
    "shards_by_calls": lambda: shards(by_calls=True),
    "shards_central": lambda: shards(hvp="central_difference"),
    "shards_clipped": lambda: shards(12, max_grad_norm=0.1, adaptive=True),
    "shards_reference": lambda: shards(12, backend="reference"),
    "shards_cpu": lambda: shards(12),
    "shards_kept": lambda: shards(12, keep=True),
    "shards_offloaded": lambda: shards(12, fsdp={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "shards_one_step": lambda: shards(1, torch.float32),
    "shards_mixed": lambda: shards(
        12,
        torch.float32,
        fsdp={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ),
    "probes": probes,
    "exact_shards": exact_shards,
    "two_dimensional": two_dimensional,
    "drift": lambda: train("local", steps=1000, dtype=torch.float32, lr=1e-3),
}


def _plain(name: str) -> str:
    return name.replace("/", "_")


def work(rank: int, size: int, port: int, names: list[str], folder: str) -> None:
    """One process: runs the scenarios and saves what each returned."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    try:
        for name in names:
            scenario = checkpoint_scenario(name) if ":" in name else SCENARIOS[name]
            torch.save(scenario(), Path(folder) / f"{_plain(name)}.{rank}.pt")
    finally:
        dist.destroy_process_group()


def run(size: int, names: list[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What every process returned, by scenario."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(work, (size, port, names, str(folder)), nprocs=size, start_method="spawn")
    return {
        name: [torch.load(folder / f"{_plain(name)}.{rank}.pt", weights_only=False) for rank in range(size)]
        for name in names
    }
