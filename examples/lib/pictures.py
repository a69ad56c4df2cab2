"""Pictures for examples.image: a tree of folders, an archive of one, or CIFAR's own archives.

A tree has ``train/<class>/*`` and ``val/<class>/*`` (or ``test/``), as ImageNet has. Small pictures are decoded once
and kept in memory; large ones are decoded by workers as they are needed.
"""

from __future__ import annotations

import pickle
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

try:
    import numpy as np
    from PIL import Image
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"examples.image: {error}; pip install numpy pillow tqdm")

Batch = tuple[Tensor, Tensor]

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".zip")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, the custom for all
PAD = 4  # pixels by which small pictures are shifted at most
WHERE = """
Where to get data:
  CIFAR-10, CIFAR-100   https://www.cs.toronto.edu/~kriz/cifar.html (the "python version", as it is)
  ImageNet              https://image-net.org/download.php, unpacked to train/<class>/ and val/<class>/
  your own              train/<class>/*.jpg and val/<class>/*.jpg in a folder, or in a .tar, .tar.gz, .tar.xz or .zip"""


class DataMissing(SystemExit):
    """Data that is not where it should be. Ends a program with a message that says where to get it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"examples.image: {what}\n{WHERE}")


@dataclass(frozen=True)
class Listed:
    """Files and labels of a split."""

    files: list[Path]
    labels: Tensor


@dataclass(frozen=True)
class Decoded:
    """Pictures of a split in memory: bytes of [N, 3, size, size], and labels."""

    pixels: Tensor
    labels: Tensor


Split = Listed | Decoded


# ---- finding -----------------------------------------------------------------------------------------------------


def unpacked(path: Path, cache: Path) -> Path:
    """The folder itself, or the one that an archive was unpacked to, once."""
    if path.is_dir():
        return path
    suffix = next((s for s in sorted(ARCHIVES, key=len, reverse=True) if path.name.endswith(s)), None)
    if not path.exists() or suffix is None:
        raise DataMissing(f"--data {path}: " + ("no archive known" if path.exists() else "no such file or folder"))
    folder = cache / path.name.removesuffix(suffix)
    if not folder.exists():
        print(f"unpacking {path} to {folder}", flush=True)
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        options = {} if suffix == ".zip" else {"filter": "data"}
        shutil.unpack_archive(path, partial, "zip" if suffix == ".zip" else None, **options)
        partial.rename(folder)
    inner = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    return inner[0] if len(inner) == 1 and inner[0].is_dir() else folder


def listed(folder: Path, classes: list[str]) -> Listed:
    """All pictures of a split, in the order of their names."""
    files = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((folder / name).rglob("*"))
        if file.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise DataMissing(f"{folder} has no pictures")
    return Listed([file for file, _ in files], torch.tensor([label for _, label in files]))


def cifar(folder: Path) -> tuple[Decoded, Decoded, int] | None:
    """CIFAR's own files, if that is what lies there."""
    parts = sorted(folder.glob("data_batch_*")) or [folder / "train"]
    last = folder / ("test_batch" if len(parts) > 1 else "test")
    if not (parts[0].is_file() and last.is_file()):
        return None

    def read(files: list[Path]) -> Decoded:
        found = [pickle.loads(file.read_bytes(), encoding="bytes") for file in files]
        pixels = np.concatenate([part[b"data"] for part in found])
        labels = [label for part in found for label in part.get(b"labels", part.get(b"fine_labels"))]
        return Decoded(torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.tensor(labels))

    train, test = read(parts), read([last])
    return train, test, int(train.labels.max()) + 1


def find(path: Path, cache: Path) -> tuple[Split, Split, int]:
    """Training and validation pictures, and the number of classes."""
    folder = unpacked(path, cache)
    known = cifar(folder)
    if known is not None:
        return known
    splits = [folder / "train", folder / ("val" if (folder / "val").is_dir() else "test")]
    for split in splits:
        if not split.is_dir():
            raise DataMissing(f"{folder} has no folder {split.name}/")
    classes = sorted(entry.name for entry in splits[0].iterdir() if entry.is_dir())
    return listed(splits[0], classes), listed(splits[1], classes), len(classes)


# ---- small pictures, in memory -----------------------------------------------------------------------------------


def decoded(split: Split, size: int, kept: Path) -> Decoded:
    """All pictures as bytes. They are decoded once and kept in a file."""
    if isinstance(split, Decoded):
        return split
    if kept.exists():
        content = torch.load(kept)
        if content["files"] == len(split.files) and content["pixels"].shape[-1] == size:
            return Decoded(content["pixels"], split.labels)

    def read(file: Path) -> np.ndarray:
        with Image.open(file) as picture:
            return np.asarray(picture.convert("RGB").resize((size, size)))

    with ThreadPoolExecutor() as pool:
        arrays = list(tqdm(pool.map(read, split.files), desc="decoding", total=len(split.files)))
    pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
    kept.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"files": len(split.files), "pixels": pixels}, kept)
    return Decoded(pixels, split.labels)


def normalised(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(v, device=pixels.device).view(3, 1, 1) for v in (MEAN, STD))
    return (pixels.float() / 255 - mean) / std


def shifted(x: Tensor, generator: torch.Generator) -> Tensor:
    """Pictures mirrored at random and shifted by up to four pixels, with zeros beyond the border."""
    n, _, height, width = x.shape
    draws = torch.randint(0, 2 * PAD + 1, (2, n, 1), generator=generator).to(x.device)
    mirrored = torch.randint(0, 2, (n, 1), generator=generator).to(x.device).bool()
    down, right = torch.arange(height, device=x.device) + draws[0], torch.arange(width, device=x.device) + draws[1]
    right = torch.where(mirrored, right.flip(1), right)
    padded = F.pad(x, (PAD, PAD, PAD, PAD))
    each = torch.arange(n, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[each, down[:, :, None], right[:, None, :]].permute(0, 3, 1, 2).contiguous()


# ---- large pictures, decoded by workers --------------------------------------------------------------------------


class Files(Dataset[tuple[Tensor, int]]):
    """Pictures of 224 pixels: a random part of each for training, the middle for validation."""

    def __init__(self, split: Listed, size: int, epoch_seed: int | None) -> None:
        self.split, self.size, self.seed = split, size, epoch_seed

    def __len__(self) -> int:
        return len(self.split.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.split.files[index]) as picture:
            rgb = picture.convert("RGB")
        part = self._middle(rgb) if self.seed is None else self._random(rgb, index)
        pixels = torch.from_numpy(np.array(part)).permute(2, 0, 1)
        return normalised(pixels), int(self.split.labels[index])

    def _middle(self, rgb: Image.Image) -> Image.Image:
        scale = self.size / 0.875 / min(rgb.size)
        width, height = (round(side * scale) for side in rgb.size)
        left, top = (width - self.size) // 2, (height - self.size) // 2
        return rgb.resize((width, height)).crop((left, top, left + self.size, top + self.size))

    def _random(self, rgb: Image.Image, index: int) -> Image.Image:
        """8 to 100 % of the area, 3:4 to 4:3, mirrored or not: a function of seed, epoch and picture alone."""
        draw = np.random.default_rng((self.seed, index))
        for _ in range(10):
            area = draw.uniform(0.08, 1.0) * rgb.width * rgb.height
            aspect = np.exp(draw.uniform(np.log(3 / 4), np.log(4 / 3)))
            width, height = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
            if width <= rgb.width and height <= rgb.height:
                break
        else:
            width = height = min(rgb.size)
        left, top = draw.integers(rgb.width - width + 1), draw.integers(rgb.height - height + 1)
        part = rgb.resize((self.size, self.size), box=(left, top, left + width, top + height))
        return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else part


# ---- batches -----------------------------------------------------------------------------------------------------


def batches(
    split: Split, indices: list[Tensor], size: int, seed: int | None, first: int, workers: int
) -> Iterator[Batch]:
    """The batches of these indices. With a seed, pictures are varied as training needs it.

    Args:
        split: The pictures.
        indices: Of each batch.
        size: Side of a picture.
        seed: Of this epoch's variation, None for validation.
        first: Number of the first batch in its epoch: what a batch looks like does not depend on where a run began.
        workers: Processes that decode large pictures.
    """
    if isinstance(split, Listed):
        lists = [index.tolist() for index in indices]
        yield from DataLoader(Files(split, size, seed), batch_sampler=lists, num_workers=workers)
        return
    for number, index in enumerate(indices, first):
        x = normalised(split.pixels[index])
        if seed is not None:
            x = shifted(x, torch.Generator().manual_seed((seed << 20) + number))
        yield x, split.labels[index]
