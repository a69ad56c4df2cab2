"""AdamW, SAM and SASSHA side by side on real data: the 8x8 handwritten digits that scikit-learn ships.

The same small network is trained from the same starting points on the same batches. The table at the end shows where
each optimizer arrived (accuracy on the test images, training loss), what it paid (milliseconds and gradient
computations per step) and how sharp a minimum it found (trace and largest eigenvalue of the Hessian of the training
loss). A picture and a page with both are written to ``build/demo``.

Run it with ``python -m examples.digits``, and with ``--label-noise 0.2`` to see what wrong training labels change.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from examples.lib.noise import with_noise
from examples.lib.story import Story, tell
from sassha_fast import SASSHA, backends
from sassha_fast.sharpness import Curve, Sharpness

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"examples.digits: {error}; pip install scikit-learn tqdm matplotlib")

# The warning is about a reference cycle of parameters and gradients; SASSHA detaches the gradients itself.
warnings.filterwarnings("ignore", r"Using backward\(\) with create_graph=True", UserWarning)

BATCH = 64
TRAIN, VALIDATION = 17 * BATCH, 349  # whole batches, so that all steps cost the same; the other 360 are for the test
CLASSES = 10
RHO = 0.1  # radius of the ascent, of SAM and of SASSHA
LAZY = 10  # SASSHA's default: it refreshes its curvature every so many steps
GRID = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)  # learning rates that --lr-search tries for every optimizer
SEARCH_SEEDS = (1000, 1001, 1002)  # not those of the comparison

Loss = Callable[[], Tensor]
Split = tuple[Tensor, Tensor]


def adamw_step(opt: AdamW, loss_fn: Loss) -> Tensor:
    loss = loss_fn()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def sam_step(opt: SGD, loss_fn: Loss) -> Tensor:
    """Foret et al. 2021: the gradient at x + ρ g/‖g‖ drives a step of SGD from x."""
    loss = loss_fn()
    loss.backward()
    params = opt.param_groups[0]["params"]
    origin = [p.detach().clone() for p in params]
    with torch.no_grad():
        scale = RHO / (nn.utils.get_total_norm([p.grad for p in params]) + 1e-12)
        for p in params:
            p.add_(p.grad * scale)
    opt.zero_grad()
    loss_fn().backward()
    with torch.no_grad():
        for p, x in zip(params, origin, strict=True):
            p.copy_(x)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def sassha_step(opt: SASSHA, loss_fn: Loss) -> Tensor:
    loss = loss_fn()
    loss.backward()
    opt.perturb_weights(zero_grad=True)
    loss_fn().backward(create_graph=opt.hessian_due)
    opt.unperturb()
    opt.step()
    opt.zero_grad()
    return loss.detach()


# How to build each optimizer from parameters, learning rate and backend, with its customary weight decay; its step.
CONTENDERS: dict[str, tuple[Callable[..., Optimizer], Callable[..., Tensor]]] = {
    "AdamW": (lambda params, lr, _: AdamW(params, lr, weight_decay=1e-2, fused=True), adamw_step),
    "SAM": (lambda params, lr, _: SGD(params, lr, momentum=0.9, weight_decay=5e-4, fused=True), sam_step),
    "SASSHA": (lambda params, lr, b: SASSHA(params, None, lr, weight_decay=1e-3, rho=RHO, backend=b), sassha_step),
}
# Learning rates, each the best of GRID in validation accuracy by --lr-search: with clean labels, with 20% label noise.
PRESETS = {"AdamW": (0.003, 0.003), "SAM": (0.1, 0.1), "SASSHA": (0.1, 0.03)}

ROW = "{:<9}  {:>16}  {:>10}  {:>7}  {:>7}  {:>15}  {:>13}"
NOTES = """
GC/step: time of a step in gradient computations, one being a forward and backward pass of the same network and batch.
Hessian trace and λmax: sharpness at the end, on the training images. They shrink together with the training loss, so
compare them between optimizers that reached a similar loss. ± is the standard deviation over seeds."""


def load_splits(device: torch.device) -> tuple[Split, Split, Split]:
    """Training, validation and test images with their labels: the same split in every run."""
    pixels, labels = load_digits(return_X_y=True)
    rest, test = train_test_split(range(len(labels)), train_size=TRAIN + VALIDATION, random_state=0, stratify=labels)
    train, validation = train_test_split(rest, train_size=TRAIN, random_state=0, stratify=labels[rest])
    x = torch.as_tensor(pixels, dtype=torch.float32, device=device).view(-1, 1, 8, 8) / 16  # grey levels from 0 to 16
    y = torch.as_tensor(labels, dtype=torch.int64, device=device)
    return (x[train], y[train]), (x[validation], y[validation]), (x[test], y[test])


def build_model() -> nn.Sequential:
    convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GELU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 64), nn.GELU(), nn.Linear(64, CLASSES))


@torch.no_grad()
def evaluate(model: nn.Module, split: Split) -> tuple[float, float]:
    """Mean loss and accuracy in percent."""
    x, y = split
    logits = model(x)
    return F.cross_entropy(logits, y).item(), 100 * (logits.argmax(1) == y).float().mean().item()


def sharpness(model: nn.Module, split: Split) -> Sharpness:
    """Of the mean loss on a split, in parts that fit a cache."""
    x, y = split
    return Sharpness(model, F.cross_entropy, list(zip(x.split(2 * BATCH), y.split(2 * BATCH), strict=True)))


@dataclass(frozen=True)
class Run:
    """A trained network, the time of its steps, and mean training loss and validation accuracy of every epoch."""

    model: nn.Module
    train: Split
    step_ms: float
    gradient_ms: float
    losses: list[float]
    accuracies: list[float]


def now(device: torch.device) -> float:
    """Milliseconds on a clock, once the device has done its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return 1e3 * time.perf_counter()


def batches(split: Split, generator: torch.Generator) -> Iterator[Split]:
    x, y = split
    for index in torch.randperm(len(y), generator=generator).to(y.device).split(BATCH):
        yield x[index], y[index]


def train(name: str, lr: float, seed: int, data: Split, validation: Split, args: argparse.Namespace, bar: tqdm) -> Run:
    """Trains one network; before every fifth step, times a plain forward and backward pass of the same batch."""
    torch.manual_seed(seed)
    data = data[0], with_noise(data[1], args.label_noise, CLASSES, seed)
    model = build_model().to(args.device)
    build, step = CONTENDERS[name]
    opt = build(model.parameters(), lr, args.backend)
    schedule = CosineAnnealingLR(opt, args.epochs * TRAIN // BATCH)
    order = torch.Generator().manual_seed(seed)
    step_times: list[float] = []
    gradient_times: list[float] = []
    history: tuple[list[float], list[float]] = [], []
    for _ in range(args.epochs):
        losses = []
        for x, y in batches(data, order):

            def loss_fn(x: Tensor = x, y: Tensor = y) -> Tensor:
                return F.cross_entropy(model(x), y)

            if len(step_times) % 5 == 0:
                start = now(args.device)
                loss_fn().backward()
                gradient_times.append(now(args.device) - start)
                opt.zero_grad()
            start = now(args.device)
            loss = step(opt, loss_fn)
            step_times.append(now(args.device) - start)
            losses.append(loss)
            schedule.step()
        history[0].append(torch.stack(losses).mean().item())
        history[1].append(evaluate(model, validation)[1])
        bar.set_postfix_str(f"loss {history[0][-1]:.4f}, accuracy {history[1][-1]:5.1f}%", refresh=False)
        bar.update()
    # A median for each place in the cycle of refreshes: one of all steps would miss the step in ten that refreshes.
    step_ms = statistics.fmean(statistics.median(step_times[place::LAZY]) for place in range(LAZY))
    return Run(model, data, step_ms, statistics.median(gradient_times), *history)


def progress(title: str, total: int) -> tqdm:
    layout = "{desc} {percentage:3.0f}%|{bar:20}| {elapsed}, {remaining} left{postfix}"
    return tqdm(total=total, desc=title, mininterval=0.5, bar_format=layout)


def search(args: argparse.Namespace) -> None:
    """Prints the validation accuracy of every optimizer at every learning rate of the grid."""
    data, validation, _ = load_splits(args.device)
    best: dict[str, float] = {}
    lines = ["validation accuracy, %".ljust(24) + "".join(f"{lr:>9g}" for lr in GRID) + "     best"]
    for name in CONTENDERS:
        scores: dict[float, tuple[float, float]] = {}
        with progress(f"{name:<7}", args.epochs * len(GRID) * len(SEARCH_SEEDS)) as bar:
            for lr in GRID:
                runs = [train(name, lr, seed, data, validation, args, bar) for seed in SEARCH_SEEDS]
                results = [evaluate(run.model, validation) for run in runs]
                loss, accuracy = (statistics.fmean(column) for column in zip(*results, strict=True))
                scores[lr] = accuracy, -loss
        best[name] = max(scores, key=scores.__getitem__)  # of equal accuracies, the one with the lower loss
        lines.append(name.ljust(24) + "".join(f"{scores[lr][0]:9.2f}" for lr in GRID) + f"{best[name]:9g}")
    print("\n" + "\n".join(lines))
    presets = {name: rates[args.label_noise > 0] for name, rates in PRESETS.items()}
    print(f"\nPresets: {presets}\nFound:   {best}")


def compare(args: argparse.Namespace) -> None:
    """Trains all optimizers from every seed, one after the other, and prints the table."""
    data, validation, test = load_splits(args.device)
    runs: dict[str, list[Run]] = {name: [] for name in CONTENDERS}
    for seed in range(args.seeds):
        for name, rates in PRESETS.items():
            lr = rates[args.label_noise > 0]
            with progress(f"seed {seed}  {name:<7}", args.epochs) as bar:
                runs[name].append(train(name, lr, seed, data, validation, args, bar))
    traces: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    largest: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    curves: dict[str, Curve] = {}
    with progress("sharpness      ", args.seeds * len(CONTENDERS)) as bar:
        for name, group in runs.items():
            for run in group:
                measured = sharpness(run.model, run.train)
                traces[name].append(measured.trace(24))
                largest[name].append(measured.eigenvalues(tolerance=1e-2)[0])
                bar.update()
            curves[name] = sharpness(group[0].model, group[0].train).curve(radius=0.5, points=21)
    header = ["optimizer", "test accuracy, %", "train loss", "ms/step", "GC/step", "Hessian trace", "λmax"]
    table = [header]
    for name, group in runs.items():
        table.append(
            [
                name,
                spread([evaluate(run.model, test)[1] for run in group]),
                f"{statistics.fmean(evaluate(run.model, run.train)[0] for run in group):.5f}",
                f"{statistics.median(run.step_ms for run in group):.2f}",
                f"{statistics.median(run.step_ms / run.gradient_ms for run in group):.2f}",
                spread(traces[name]),
                spread(largest[name]),
            ]
        )
    lines = [ROW.format(*row) for row in table]
    print("\n" + lines[0] + "\n" + "-" * len(lines[0]) + "\n" + "\n".join(lines[1:]))
    story = Story(
        what=what(args),
        table=table,
        notes=NOTES.strip(),
        losses={name: [run.losses for run in group] for name, group in runs.items()},
        accuracies={name: [run.accuracies for run in group] for name, group in runs.items()},
        curves=curves,
        traces=traces,
    )
    picture, page = tell(story, args.out)
    print(f"{NOTES}\n\nPicture: {picture}\nPage:    {page}")


def what(args: argparse.Namespace) -> str:
    """A sentence about data, network and length."""
    size = sum(p.numel() for p in build_model().parameters())
    return (
        f"{TRAIN} training images, {args.label_noise:.0%} of them with wrong labels; a CNN of {size:,} parameters, "
        f"batch {BATCH}, {args.epochs} epochs, {args.device}, threads: {args.threads}"
    )


def spread(values: list[float]) -> str:
    """Mean and, of several values, the sample standard deviation."""
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.digits", description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="how many; default: %(default)s")
    parser.add_argument("--label-noise", type=float, default=0.0, help="share of wrong training labels, 0 to 1")
    parser.add_argument("--backend", default="auto", choices=["auto", *backends.names()], help="of SASSHA")
    parser.add_argument("--device", type=torch.device, default="cpu", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder of picture and page")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--lr-search", action="store_true", help="redo the search behind the preset learning rates")
    args = parser.parse_args()
    if min(args.epochs, args.seeds, args.threads) < 1 or not 0.0 <= args.label_noise <= 1.0:
        parser.error("--epochs, --seeds and --threads are at least 1, --label-noise is from 0 to 1")
    return args


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    print(what(args))
    start = time.perf_counter()
    if args.lr_search:
        search(args)
    else:
        compare(args)
    print(f"Total: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
