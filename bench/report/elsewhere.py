"""Sections from files of the project: predictions for GPUs and results of trainings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from .markup import Section, Table, figure, heading, note, paragraph, picture

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float32", "bfloat16", "float64")
SUFFIXES = (".png", ".jpg", ".jpeg", ".svg")
# Pages with results of trainings, and the command that makes each.
TRAININGS = {
    "CIFAR-10": ("docs/cifar10.md", "make compare"),
    "Shakespeare": ("docs/shakespeare.md", "make compare"),
}


@dataclass
class Part:
    """A table or a picture of a Markdown page, with the heading above it."""

    heading: str
    rows: list[list[str]] = field(default_factory=list)
    image: str = ""
    alt: str = ""


def parts(text: str) -> list[Part]:
    """Tables and pictures of a Markdown page in order."""
    found: list[Part] = []
    above, inside = "", False
    for line in text.splitlines():
        if title := re.match(r"#+\s+(.*)", line):
            above = title[1].strip()
        if image := re.match(r"\s*!\[([^\]]*)\]\(([^)\s]+)[^)]*\)", line):
            found.append(Part(above, image=image[2], alt=image[1]))
        row = line.strip().startswith("|")
        if row and not inside:
            found.append(Part(above))
        if row:
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
                found[-1].rows.append(cells)
        inside = row
    return found


def between(text: str, name: str) -> str:
    """What stands between the markers of a part that a program writes."""
    _, _, rest = text.partition(f"<!-- {name}: begin -->")
    return rest.partition(f"<!-- {name}: end -->")[0]


def _is_number(text: str) -> bool:
    return bool(re.match(r"[−+-]?[\d.,]+", text)) or text in ("", "-", "–")


def as_table(caption: str, rows: list[list[str]]) -> str:
    """A Markdown table; the leading columns without numbers are text."""
    head, *body = rows
    width = len(head)
    body = [[*row, *[""] * width][:width] for row in body]
    texts = 1
    while texts < width and not all(_is_number(row[texts]) for row in body):
        texts += 1
    return Table(caption, head, body, texts=texts).html()


def _bytes() -> str:
    """The table of traffic, which the kernels' machine code was checked against."""
    import torch

    from sassha_fast import traffic

    rows = [
        [f"`{name}`", *(str(traffic.bytes_per_parameter(name, getattr(torch, dtype))) for dtype in DTYPES)]
        for name in traffic.PASSES
    ]
    return Table("Counted: bytes per parameter of each pass, `sassha_fast.traffic`", ["pass", *DTYPES], rows).html()


def gpu(root: Path = ROOT, timed: bool = False) -> Section:
    """Counts and predictions, never timings; those stand in the other sections if the run was on a GPU."""
    first = "Timings of this run, on a GPU, stand above." if timed else "**No GPU ran this.**"
    body = paragraph(
        f"{first} Nothing below was timed: bytes are counted in the source and in machine code, and times "
        "are predictions, those bytes over the bandwidth of the data sheet, which no copy reaches.",
        "warning",
    )
    body += _bytes()
    for path, marker, caption, command in (
        ("docs/gpu-tables.md", "cuda predictions", "Prediction: time of a step's passes on one GPU", "make prove-gpu"),
        ("docs/scale.md", "scale", "Prediction: traffic between GPUs for 1.5 billion parameters", "make scale"),
    ):
        page = root / path
        text = between(page.read_text(encoding="utf-8"), marker) if page.exists() else ""
        tables = [part.rows for part in parts(text) if part.rows]
        if tables:
            body += "".join(as_table(f"{caption}. `{path}`, `{command}`", rows) for rows in tables)
        else:
            body += note(f"`{path}` has no such table; `{command}` writes it.")
    return Section("gpu", "GPUs", "On GPUs: predictions", body)


def _shown(path: Path, alt: str, caption: str) -> str:
    """A picture of a training, which is wider than a plot of this page."""
    return figure(picture(path), alt, caption, "card wide")


def _page(title: str, path: Path, shown: str, command: str) -> str:
    """Tables and pictures of one page, and the picture of its name if the page does not show it."""
    body, seen, made = heading(title), set(), f"`{shown}`, `{command}`"
    found = parts(path.read_text(encoding="utf-8"))
    if not any(len(part.rows) > 1 for part in found):
        body += note(f"`{shown}` has no results yet; `{command}` fills it.")
    for part in found:
        above, image = part.heading or title, path.parent / part.image
        if len(part.rows) > 1:
            body += as_table(f"{above}. {made}", part.rows)
        elif part.image and image.suffix.lower() in SUFFIXES and image.exists():
            seen.add(image.resolve())
            body += _shown(image, part.alt or f"Picture of {above}", f"{part.alt or above}. {made}")
        elif part.image:
            body += note(f"`{shown}` shows `{part.image}`, which is not there; `{command}` draws it.")
    own = path.with_suffix(".png")
    if own.exists() and own.resolve() not in seen:
        body += _shown(own, f"Curves of the trainings: {title}", f"{title}: the trainings. {made}")
    return body


def training(root: Path = ROOT) -> Section:
    """Results of trainings, as far as they are there."""
    body = ""
    for title, (shown, command) in TRAININGS.items():
        path = root / shown
        if path.exists():
            body += _page(title, path, shown, command)
        else:
            body += note(f"{title}: there is no `{shown}` yet; `{command}` trains and writes it.")
    folder = root / "build" / "demo"
    images = sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES) if folder.is_dir() else []
    for image in images:
        caption = f"Training on digits with AdamW, SAM and SASSHA. `make demo`, `build/demo/{image.name}`"
        body += heading("Digits") + _shown(image, f"Plots of the demo: {image.stem}", caption)
    if not images:
        body += note("Digits: there is no picture in `build/demo` yet; `make demo` trains and draws it in a minute.")
    return Section("training", "Training", "Training results", body)
