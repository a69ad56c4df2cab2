"""Scenarios of replicas: each process trains the whole model on its part of the batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from training import closure_of, make_net

from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA
from sassha_fast._parallel import collectives
from sassha_fast.reference import is_unknown

ROWS = 24  # of the joined batch: two, three and four processes share it evenly
OPTIONS = {"lr": 0.03, "rho": 0.05, "lazy_hessian": 10, "weight_decay": 0.01}
SEVEN = {"state_bits": 8, "master_weight_bits": 24, "full_precision_below": 0, "lazy_hessian": 4}  # of bfloat16


def batch(dtype: torch.dtype, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Every ``parts``-th row of the joined batch."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS, 12, generator=generator).to(dtype), torch.randint(0, 3, (ROWS,), generator=generator)
    return x[part::parts], y[part::parts]


def part_loss(net: nn.Module, dtype: torch.dtype, part: int, parts: int, rows: int = ROWS) -> Callable[[], Tensor]:
    """The loss of this part of the first rows of the joined batch."""
    x, y = (t[: rows // parts] for t in batch(dtype, part, parts))
    return lambda: F.cross_entropy(net(x).double(), y)


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
    method: type[Any] = SASSHA,
    **options: Any,
) -> dict[str, Any]:
    """Trains a small network, each process on its part of the batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net(dtype)
    model = DDP(net, **(ddp or {}))
    opt = method(net.parameters(), **{**OPTIONS, **options})
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
        elif way == "ascent":  # along the gradient of half of the batch
            half = part_loss(model, dtype, rank, size, rows=ROWS // 2)
            opt.step(closure_of(opt, loss), ascent_closure=closure_of(opt, half))
        elif way == "ascent by hand":
            with model.no_sync():
                part_loss(model, dtype, rank, size, rows=ROWS // 2)().backward()
                opt.perturb_weights()
                loss().backward(create_graph=opt.hessian_due)
            opt.unperturb()
            opt.step()
            opt.zero_grad()
        elif way == "one_pass":  # M-SASSHA
            with model.no_sync():
                loss().backward(create_graph=opt.hessian_due)
            opt.step()
            opt.zero_grad()
    return results(net, opt)


def nano_loop(steps: int = 6, parts: int = 2) -> dict[str, Any]:
    """M-SASSHA in a loop that sets ``require_backward_grad_sync`` for the last micro-batch, and clips."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net(torch.float64)
    model = DDP(net)
    opt = MSASSHA(net.parameters(), **{**OPTIONS, "lazy_hessian": 3})
    opt.attach(model)
    x, y = batch(torch.float64, rank, size)
    for _ in range(steps):
        due = opt.hessian_due
        for i in range(parts):
            model.require_backward_grad_sync = i == parts - 1 and not due
            loss = F.cross_entropy(model(x[i::parts]), y[i::parts]) / parts
            loss.backward(create_graph=due)
        opt.take_products()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        opt.step()
        opt.zero_grad(set_to_none=True)
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


WORDS = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])  # of four rows; the products of a step see every second one


def rare_words(parts: int, part: int) -> dict[str, Any]:
    """Products from rows that lack most words of the gradients' batch. ``parts`` is 1 for one process alone."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3)).double()
    model: nn.Module = DDP(net) if parts > 1 else net
    opt = SASSHA(net.parameters(), **{**OPTIONS, "lazy_hessian": 2}, perturb_sync=True)
    opt.attach(model)
    y = torch.arange(4) % 3

    def loss(rows: Tensor) -> Callable[[], Tensor]:
        mine = rows[part::parts]
        return lambda: F.cross_entropy(model(WORDS[mine]), y[mine])

    for t in range(6):
        products = closure_of(opt, loss(torch.tensor([t % 2, t % 2 + 2])))
        opt.step(closure_of(opt, loss(torch.arange(4))), hessian_closure=products)
    return results(net, opt)


def labelled(rows: int) -> Tensor:
    """Labels of the four rows of ``WORDS``, all but the first of which are to be ignored."""
    return torch.where(torch.arange(4) < rows, torch.arange(4) % 3, -100)


def nothing_in_products() -> dict[str, Any]:
    """Counts after steps whose products have labels in every process, in one of them, in none, and in all again."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3)).double()
    opt = SASSHA(net.parameters(), **{**OPTIONS, "lazy_hessian": 1})
    opt.attach(DDP(net))
    counts = []
    for rows in (2, 2 if rank == 0 else 0, 0, 1):

        def loss(rows: int = rows) -> Tensor:
            return F.cross_entropy(opt.model(WORDS), labelled(rows), reduction="sum")

        opt.step(closure_of(opt, lambda: loss(4)), hessian_closure=closure_of(opt, loss))
        counts.append((opt.stats.refreshes, opt.stats.skipped_refreshes))
    return {**results(net, opt), "counts": counts}


def watch_early(opt: Any, allowed: bool = True) -> list[collectives.EarlyReduction]:
    """What travels during the latest pass that sends gradients; with ``allowed`` off, nothing ever does."""
    reducer, under_way = opt.parts.reducer, []
    start = reducer.early

    def early() -> collectives.EarlyReduction | None:
        sent = start() if allowed else None
        under_way[:] = [] if sent is None else [sent]
        return sent

    reducer.early = early
    return under_way


def overlap(early: bool, accumulated: bool = False) -> dict[str, Any]:
    """Small buckets, and how many are under way when the gradient of the first layer is there."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before, collectives.BUCKET_BYTES = collectives.BUCKET_BYTES, 2000
    try:
        net = make_net(torch.float64)
        model = DDP(net)
        opt = SASSHA(net.parameters(), **OPTIONS)
        opt.attach(model)
        under_way = watch_early(opt, allowed=early)
        loss, launched = part_loss(model, torch.float64, rank, size), []

        def note(grad: Tensor) -> None:
            launched.extend((sent.launched, len(sent.buckets)) for sent in under_way)

        net[0].weight.register_hook(note)
        x, y = batch(torch.float64, rank, size)

        def half(i: int) -> Tensor:
            value = F.cross_entropy(model(x[i::2]), y[i::2]) / 2
            value.backward()
            return value

        halves = [partial(half, i) for i in range(2)]
        for _ in range(2):
            opt.step(halves if accumulated else closure_of(opt, loss))
        return {**results(net, opt), "launched": launched}
    finally:
        collectives.BUCKET_BYTES = before


def grown() -> dict[str, Any]:
    """A closure that accumulates over two halves by itself: what was sent after the first is out of date."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net(torch.float64)
    model = DDP(net)
    opt = SASSHA(net.parameters(), **OPTIONS, hvp="finite_difference", perturb_sync=True)
    opt.attach(model)
    x, y = batch(torch.float64, rank, size)
    stale, under_way = [], watch_early(opt)

    def closure() -> Tensor:
        opt.zero_grad()
        halves = [F.cross_entropy(model(x[i::2]), y[i::2]) / 2 for i in range(2)]
        for half in halves:
            half.backward()
        for sent in under_way:
            stale.extend(sent.stale)
        return sum(h.detach() for h in halves)

    for _ in range(12):
        opt.step(closure)
    return {**results(net, opt), "stale": any(stale)}


def uneven(method: type[Any] = SASSHA, **options: Any) -> dict[str, Any]:
    """Process 0 has three batches, every other one more than the one before it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net(torch.float64)
    model = DDP(net)
    opt = method(net.parameters(), **{**OPTIONS, "lazy_hessian": 2}, **options)
    opt.attach(model)
    loss = part_loss(model, torch.float64, rank, size)
    with Join([opt]):
        for _ in range(3 + rank):
            opt.step(closure_of(opt, loss))
    return results(net, opt)


def uneven_amp() -> dict[str, Any]:
    """Under autocast a process without data has to know that products of 0 are lost ones."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net()
    model = DDP(net)
    opt = SASSHA(net.parameters(), **{**OPTIONS, "lazy_hessian": 1, "eps": 1e-9})
    opt.attach(model)
    x, y = batch(torch.float32, rank, size)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x).float(), y)

    with Join([opt]):
        for _ in range(rank):
            opt.step(closure_of(opt, loss))
    unknown = sum(is_unknown(entry["exp_hessian_diag"]).sum().item() for entry in opt.state.values())
    return {**results(net, opt), "unknown": unknown}


def uneven_sam() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net(torch.float64)
    model = DDP(net)
    opt = SAM(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    opt.attach(model)
    loss = part_loss(model, torch.float64, rank, size)
    with Join([opt]):
        for _ in range(3 + rank):
            opt.step(closure_of(opt, loss))
    return {"params": results(net, opt)["params"], "ascents": opt.param_groups[0]["ascents"]}


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


def changed_after_backward(way: str) -> dict[str, Any]:
    """A closure masks, or clips, gradients after its backward pass. ``moved`` is how far masked weights went."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net(torch.float64)
    model = DDP(net)
    opt = SASSHA(net.parameters(), **{**OPTIONS, "weight_decay": 0.0})
    opt.attach(model)
    loss, before, norms = part_loss(model, torch.float64, rank, size), net[0].weight[0].detach().clone(), []

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss()
        value.backward()
        grad = net[0].weight.grad
        if way == "in place":
            grad[0] = 0.0
        elif way == "replaced":
            net[0].weight.grad = grad * (torch.arange(len(grad)) > 0).unsqueeze(1)
        else:
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        return value

    for _ in range(5):
        opt.step(closure)
        norms.append(torch.stack([p.grad.norm() for p in net.parameters()]).norm().item())
    moved = (net[0].weight[0] - before).abs().max().item()
    return {**results(net, opt), "moved": moved, "norms": norms}


def buffers() -> dict[str, Any]:
    """A buffer that one process sets is that of all in the passes of a closure, as in DDP's own training."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = nn.Sequential(make_net(torch.float64), nn.BatchNorm1d(3)).double()
    model, seen = DDP(net), []
    opt = SASSHA(net.parameters(), **OPTIONS)
    opt.attach(model)
    x, y = batch(torch.float64, rank, size)

    def loss() -> Tensor:
        out = model(x)
        seen.append(net[1].num_batches_tracked.item())
        return F.cross_entropy(out, y)

    for _ in range(3):
        if rank == 0:
            net[1].num_batches_tracked.fill_(100)
        opt.step(closure_of(opt, loss))
    return {"seen": seen, "after": net[1].num_batches_tracked.item()}


def refused_by_attached_models() -> dict[str, Any]:
    """What DDP can't do, and what nobody would reduce."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, str] = {}

    def said(name: str, ddp: dict[str, Any], act: Callable[[SASSHA, DDP, Callable[[], Tensor]], object]) -> None:
        net = make_net()
        model = DDP(net, **ddp)
        opt = SASSHA((net if name != "others" else net[0]).parameters(), **OPTIONS)
        opt.attach(model)
        before = [p.detach().clone() for p in net.parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                act(opt, model, closure_of(opt, part_loss(model, torch.float32, rank, size)))
            except (RuntimeError, UserWarning) as error:
                found[name] = str(error)
        assert all(map(torch.equal, before, net.parameters()))

    def joined(opt: SASSHA, model: DDP, closure: Callable[[], Tensor]) -> None:
        with Join([model, opt]):
            opt.step(closure)

    said("static", {"static_graph": True}, lambda opt, model, closure: opt.step(closure))
    said("join", {}, joined)
    said("others", {}, lambda opt, model, closure: opt.step(closure))
    return found


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


def frozen(only: int | None = None, **options: Any) -> dict[str, Any]:
    """The first layer is frozen for steps 3 to 5, in all processes or in one, and trained again afterwards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net(torch.float64)
    model = DDP(net)
    opt = SASSHA(net.parameters(), **{**OPTIONS, "lazy_hessian": 4}, **options)
    opt.attach(model)
    return freezing(net, opt, part_loss(model, torch.float64, rank, size), only in (None, rank))


def freezing(net: nn.Module, opt: Any, loss: Callable[[], Tensor], freezes: bool = True) -> dict[str, Any]:
    """Nine steps, of which steps 3 to 5 may be without the first layer, whose weights after steps 2 and 5 are kept."""
    seen = []
    for t in range(9):
        if freezes:
            net[0].requires_grad_(not 3 <= t <= 5)
        opt.step(closure_of(opt, loss))
        if t in (2, 5):
            seen.append(net[0].weight.detach().clone())
    return {**results(net, opt), "seen": seen}


def frozen_late() -> dict[str, Any]:
    """In a loop by hand a layer is frozen as its gradient is there, which belongs to the step all the same."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net(torch.float64)
    model = DDP(net)
    opt = SAM(net.parameters(), torch.optim.SGD, lr=0.1, rho=0.0)
    opt.attach(model)
    with model.no_sync():
        part_loss(model, torch.float64, rank, size)().backward()
    net[0].requires_grad_(False)
    opt.step()
    return {"params": results(net, opt)["params"]}


def replaced(metric: bool) -> dict[str, Any]:
    """In a loop by hand gradients are clipped by others in their place, after a metric whose graph is dropped."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = make_net(torch.float64)
    opt = SASSHA(net.parameters(), reduce_grads=True, grad_reduce="sum", **{**OPTIONS, "lazy_hessian": 3})
    loss = part_loss(net, torch.float64, rank, size)
    for _ in range(5):
        loss().backward()
        opt.perturb_weights()
        loss().backward(create_graph=opt.hessian_due)
        opt.unperturb()
        if metric:
            loss().mul(2)
        for p in net.parameters():
            p.grad = p.grad.clamp(-0.02, 0.02)
        opt.step()
        opt.zero_grad()
    return results(net, opt)


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


REPLICAS: dict[str, Callable[[], dict[str, Any]]] = {
    "closure": lambda: train(),
    "closure_sync": lambda: train(perturb_sync=True),
    "ascent": lambda: train("ascent", lazy_hessian=3, steps=8),
    "ascent_by_hand": lambda: train("ascent by hand", lazy_hessian=3, steps=8),
    "ascent_sync": lambda: train("ascent", perturb_sync=True),
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
    "nothing_in_products": nothing_in_products,
    "rare_words": lambda: rare_words(dist.get_world_size(), dist.get_rank()),
    "overlap": lambda: overlap(True),
    "overlap_off": lambda: overlap(False),
    "overlap_accumulated": lambda: overlap(True, accumulated=True),
    "overlap_accumulated_off": lambda: overlap(False, accumulated=True),
    "grown": grown,
    "uneven": lambda: uneven(),
    "uneven_sync": lambda: uneven(perturb_sync=True),
    "uneven_momentum": lambda: uneven(MSASSHA),
    "uneven_amp": uneven_amp,
    "uneven_sam": uneven_sam,
    "momentum": lambda: train(method=MSASSHA),
    "momentum_fd": lambda: train(method=MSASSHA, hvp="finite_difference"),
    "momentum_by_hand": lambda: train("one_pass", method=MSASSHA),
    "nano_loop": nano_loop,
    "gap": lambda: train(method=GSASSHA, alpha=0.3),
    "gap_local": lambda: train("local", method=GSASSHA, alpha=0.3),
    "gap_sync": lambda: train(method=GSASSHA, alpha=0.3, perturb_sync=True),
    "gap_bucket_view": lambda: train("local", method=GSASSHA, alpha=0.3, ddp={"gradient_as_bucket_view": True}),
    "broken_closure": lambda: broken_rank("closure"),
    "broken_local": lambda: broken_rank("local"),
    "scaled": lambda: scaled(False),
    "scaled_overflow": lambda: scaled(True),
    "traffic": lambda: traffic(False),
    "traffic_sync": lambda: traffic(True),
    "changed_in_place": partial(changed_after_backward, "in place"),
    "changed_by_others": partial(changed_after_backward, "replaced"),
    "changed_by_clipping": partial(changed_after_backward, "clipped"),
    "buffers": buffers,
    "refused_by_attached_models": refused_by_attached_models,
    "ambiguous": ambiguous,
    "frozen": lambda: frozen(),
    "frozen_sync": lambda: frozen(perturb_sync=True),
    "frozen_in_one": lambda: frozen(only=1),
    "frozen_late": frozen_late,
    "replaced": partial(replaced, False),
    "replaced_after_metric": partial(replaced, True),
    "seven": lambda: train(steps=12, dtype=torch.bfloat16, **SEVEN),
    "seven_momentum": lambda: train(steps=12, dtype=torch.bfloat16, method=MSASSHA, **SEVEN),
    "eight_local": lambda: train("local", steps=12, **{**SEVEN, "master_weight_bits": None, "dtype": torch.float32}),
    "drift": lambda: train("local", steps=1000, dtype=torch.float32, lr=1e-3),
}
