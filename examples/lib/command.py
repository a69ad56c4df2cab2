"""The command line that examples.image and examples.gpt share, and what they do with it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import nn

from examples.lib import launch
from examples.lib.curves import draw_run
from examples.lib.engine import Data, Run
from examples.lib.optimizers import BUILDERS, TITLES, build_optimizer, build_schedule
from examples.lib.presets import Preset, Settings


def parser(prog: str, description: str, presets: dict[str, Preset], default: str) -> argparse.ArgumentParser:
    """The options that pictures and language share. What is not given comes from the preset."""
    p = argparse.ArgumentParser(prog=f"python -m {prog}", description=description)
    p.add_argument("--preset", choices=list(presets), default=default, help="task of the paper; default: %(default)s")
    p.add_argument("--optimizer", choices=list(BUILDERS), default="sassha", help="default: %(default)s")
    p.add_argument("--data", type=Path, required=True, metavar="PATH")
    p.add_argument(
        "--out", type=Path, default=Path("runs/run"), help="folder of log, checkpoint and plot; default: %(default)s"
    )
    p.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    p.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="checkpoint within epochs too")
    p.add_argument("--epochs", type=int)
    p.add_argument("--batch", type=int, help="examples in a step, of all processes together")
    p.add_argument("--schedule", choices=["steps", "cosine", "plateau"])
    for setting in fields(Settings):
        if setting.name != "schedule":
            kind = int if setting.name == "lazy_hessian" else float
            p.add_argument(f"--{setting.name.replace('_', '-')}", type=kind, metavar="N")
    p.add_argument("--hvp", choices=["exact", "finite_difference", "central_difference"], help="how products are made")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--amp", action="store_true", help="forward passes in bfloat16")
    p.add_argument("--full-products", action="store_true", help="with --amp: no bfloat16 on refreshes")
    p.add_argument("--compile", action="store_true", help="torch.compile the network; products by finite differences")
    p.add_argument("--device", help="default: the GPU, if there is one")
    p.add_argument("--threads", type=int, help="default: torch's")
    p.add_argument("--workers", type=int, default=4, help="processes that decode large pictures; default: %(default)s")
    p.add_argument("--stats", action="store_true", help="log and draw loss, gap and trace of every step")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    return p


def chosen(args: argparse.Namespace, presets: dict[str, Preset]) -> tuple[Preset, Settings]:
    """Preset and settings, with what was given on the command line in place of their own."""
    preset = presets[args.preset]
    if args.optimizer not in preset.settings:
        raise SystemExit(
            f"--preset {args.preset} has no settings for {args.optimizer}; it has {', '.join(preset.settings)}"
        )
    settings = preset.settings[args.optimizer]
    given = {f.name: getattr(args, f.name) for f in fields(Settings) if getattr(args, f.name) is not None}
    settings = replace(settings, **given)
    task = {name: getattr(args, name) for name in ("batch", "schedule") if getattr(args, name) is not None}
    if settings.schedule is not None and "schedule" not in task:
        task["schedule"] = settings.schedule
    if args.compile and args.hvp == "exact":
        raise SystemExit("--compile: compiled networks have no double backward; take --hvp finite_difference")
    args.hvp = args.hvp or ("finite_difference" if args.compile else "exact")
    args.epochs = args.epochs or preset.epochs
    args.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.threads:
        torch.set_num_threads(args.threads)
    return replace(preset, **task), settings


def assemble(args: argparse.Namespace, preset: Preset, settings: Settings, model: nn.Module, data: Data) -> Run:
    """Optimizer, schedule and run for a network and its data."""
    model = model.to(args.device)
    opt = build_optimizer(args.optimizer, model.parameters(), settings, hvp=args.hvp, seed=args.seed)
    return Run(
        model,
        opt,
        build_schedule(opt, preset, args.epochs, data.steps),
        data,
        args.out,
        epochs=args.epochs,
        seed=args.seed,
        amp=args.amp,
        full_products=args.full_products,
        compiled=args.compile,
        save_every=args.save_every,
        quiet=args.quiet,
        grad_clip=settings.grad_clip,
        stats=args.stats,
    )


def execute(args: argparse.Namespace, prepare: Callable[[argparse.Namespace], Run]) -> list[dict[str, float]]:
    """Trains, from the checkpoint if asked to, and draws. Under torchrun all processes do."""
    if "RANK" in os.environ:
        args.device = launch.start()
    run = prepare(args)
    kept = args.out / "checkpoint.pt"
    if args.resume:
        print(f"resumed from {kept}" if run.resume() else f"no checkpoint at {kept}: beginning anew", flush=True)
    elif kept.exists():
        raise SystemExit(f"--out {args.out} has a checkpoint: go on with --resume, or take another folder")
    rows = run.train()
    if run.first:
        draw_run(rows, args.out / "curves.png", TITLES[args.optimizer])
        print(f"log, checkpoint and curves.png are in {args.out}")
    return rows
