"""Trains an image classifier with any optimizer of the paper's tables, with the authors' settings.

    python -m examples.image --data cifar-10-python.tar.gz --preset cifar10-resnet20 --optimizer sassha
    python -m examples.image --data imagenet/ --preset imagenet-resnet50 --amp --compile
    torchrun --nproc-per-node 8 -m examples.image --data imagenet/ --preset imagenet-vit-s-32 --amp

``--out`` gets a log (CSV), a checkpoint after every epoch and a plot; ``--resume`` goes on where a run was stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from examples.lib import pictures, presets
from examples.lib.command import assemble, chosen, execute, parser
from examples.lib.engine import Batch, Data, Run
from examples.lib.launch import stop
from examples.lib.networks import PICTURES
from examples.lib.noise import with_noise
from examples.lib.pictures import Decoded, Listed, Split


def subset(split: Split, size: int, seed: int = 0) -> Split:
    """So many pictures, the same in every run; all of them for 0."""
    if not size:
        return split
    keep = torch.randperm(len(split.labels), generator=torch.Generator().manual_seed(seed))[:size]
    if isinstance(split, Decoded):
        return Decoded(split.pixels[keep], split.labels[keep])
    return Listed([split.files[i] for i in keep.tolist()], split.labels[keep])


def batches(train: Split, validation: Split, side: int, batch: int, seed: int, workers: int) -> Data:
    """Batches in an order that epoch and seed decide; every process takes its part of each."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    steps = len(train.labels) // batch
    if not steps:
        raise SystemExit(f"--batch {batch}: there are only {len(train.labels)} training pictures")

    def of_epoch(epoch: int, first: int) -> Iterator[Batch]:
        epoch_seed = (seed << 12) + epoch
        order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(epoch_seed))
        indices: list[Tensor] = [index[rank::size] for index in order[: steps * batch].split(batch)][first:]
        return pictures.batches(train, indices, side, epoch_seed, first, workers)

    def held_out() -> Iterator[Batch]:
        indices = list(torch.arange(len(validation.labels)).split(max(batch // size, 1)))
        return pictures.batches(validation, indices, side, None, 0, workers)

    return Data(steps, of_epoch, held_out, "images")


def parse_args(given: list[str] | None = None) -> argparse.Namespace:
    p = parser("examples.image", __doc__.splitlines()[0], presets.IMAGE, "cifar10-resnet20")
    p.add_argument("--model", choices=list(PICTURES), help="another network than the preset's")
    p.add_argument("--label-noise", type=float, help="share of wrong training labels")
    p.add_argument("--train-size", type=int, default=0, help="so many training pictures, drawn at random; 0 is all")
    p.add_argument("--validation-size", type=int, default=0, help="so many validation pictures; 0 is all")
    p.add_argument("--cache", type=Path, default=Path("build/data"), help="where archives are unpacked and decoded")
    return p.parse_args(given)


def load(args: argparse.Namespace, side: int) -> tuple[Split, Split, int]:
    """Training and validation pictures, small ones in memory, and the number of classes."""
    train, validation, classes = pictures.find(args.data, args.cache)
    if side <= 64:
        name = args.data.name.split(".")[0]
        train = pictures.decoded(train, side, args.cache / f"{name}-train.pt")
        validation = pictures.decoded(validation, side, args.cache / f"{name}-validation.pt")
    return subset(train, args.train_size), subset(validation, args.validation_size), classes


def prepare(args: argparse.Namespace) -> Run:
    """The run that the arguments describe, at its beginning."""
    preset, settings = chosen(args, presets.IMAGE)
    side, network = PICTURES[args.model or preset.model]
    train, validation, classes = load(args, side)
    noise = preset.label_noise if args.label_noise is None else args.label_noise
    if noise:
        train = replace(train, labels=with_noise(train.labels, noise, classes, args.seed))
    data = batches(train, validation, side, preset.batch, args.seed, args.workers)
    torch.manual_seed(args.seed)
    model = network(classes)
    return assemble(args, preset, settings, model, data)


def main(given: list[str] | None = None) -> None:
    execute(parse_args(given), prepare)


if __name__ == "__main__":
    main()
    stop()
