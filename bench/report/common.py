"""What the sections of measurements share: names, notes on what is missing, a plot beside its table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .markup import MISSING, Table, digits, figure, note
from .plots import Bar
from .records import Record, Run

STEP = ("norm", "perturb", "restore", "step", "refresh_step")  # passes of a step in their order
MODELS = ("gpt", "resnet20", "small")
KERNELS = ("sassha cuda", "sassha triton", "sassha cpu")  # contenders that are this library's kernels
SPOKEN = {
    "adamw": "AdamW",
    "sam": "SAM",
    "sassha": "SASSHA",
    "m-sassha": "M-SASSHA",
    "g-sassha": "G-SASSHA",
    "adahessian": "AdaHessian",
    "sophia-h": "Sophia-H",
    "shampoo": "Shampoo",
    "gpt": "GPT",
    "resnet20": "ResNet-20",
}


SHAPES = {"gpt": "GPT shapes", "resnet20": "ResNet-20 shapes", "small": "Small tensors"}


def shapes_of(record: Record) -> str:
    """The shapes of a record by name and size."""
    name = SHAPES.get(record.text("model"), spoken(record.text("model")))
    parameters, tensors = record.number("parameters"), record.whole("tensors")
    if parameters is None or tensors is None:
        return name
    size = f"{digits(parameters / 1e6)} M" if parameters >= 1e6 else f"{parameters:,.0f}"
    return f"{name}: {size} parameters in {tensors:,} tensors"


def missing(what: str, file: str) -> str:
    """What to run for what the JSON lacks."""
    return note(f"Not in this run: {what}. `make bench` runs `bench/{file}`.")


def source(*files: str) -> str:
    """Which command makes a figure."""
    return "`make bench`, " + ", ".join(f"`bench/{file}`" for file in files)


def spoken(name: str) -> str:
    """A contender's or a model's name as people write it."""
    return re.sub(r"[\w-]+", lambda word: SPOKEN.get(word[0], word[0]), name)


def ours(contender: str) -> bool:
    """Whether a contender is this library's SASSHA or of its family."""
    return "sassha" in contender.lower()


def kernels(run: Run) -> str:
    """The contender that stands for this library: the kernels of the device that was timed."""
    found = {record.text("contender") for record in run.records}
    return next((name for name in KERNELS if name in found), "sassha cpu")


def quartiles(record: Record, name: str) -> tuple[float | None, float | None]:
    """Quartiles of a ratio, if it is the one whose quartiles were kept."""
    if record.text("ratio_name") != name:
        return None, None
    return record.number("ratio_low"), record.number("ratio_high")


def limit(record: Record) -> str:
    """What the main figure is meant to stay below."""
    target = record.number("target")
    return MISSING if target is None else f"≤ {target:g}"


def by_value(records: Iterable[Record], key: str) -> list[Record]:
    """Smallest first; those without the value last."""
    return sorted(records, key=lambda record: (record.number(key) is None, record.number(key) or 0.0))


def in_order(models: Iterable[object]) -> list[str]:
    """Models in the order of the project, others after them."""
    names = [str(model) for model in models]
    return [*(m for m in MODELS if m in names), *(m for m in names if m not in MODELS)]


def emphasised(contenders: Sequence[str]) -> frozenset[int]:
    """Rows of this library's methods."""
    return frozenset(number for number, name in enumerate(contenders) if ours(name))


def filled(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """A table without the columns that nobody has filled."""
    kept = [i for i in range(len(head)) if any(row[i] != MISSING for row in rows)]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def listed(bars: Sequence[Bar], unit: str = "") -> str:
    """Bars as words, for those who hear the page."""
    return "; ".join(f"{bar.label} {digits(bar.value)}{unit}" for bar in bars)


def beside(picture: str, alt: str, caption: str, table: Table) -> str:
    """A plot, and on wide screens its table beside it."""
    return f'<div class="beside">{figure(picture, alt, caption)}{table.html()}</div>\n'
