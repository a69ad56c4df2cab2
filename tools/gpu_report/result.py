"""What a part of the report has found, in a form that crosses processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from traceback import format_exception

LEFT_OUT = "–"


@dataclass
class Table:
    """A table of text."""

    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    title: str = ""

    def add(self, *cells: object) -> None:
        """Adds a row."""
        self.rows.append([str(cell) for cell in cells])


@dataclass(frozen=True)
class Failure:
    """Something that went wrong: where, and the whole text of it."""

    where: str
    text: str

    @classmethod
    def of(cls, where: str, error: BaseException) -> Failure:
        """An exception with its traceback."""
        return cls(where, "".join(format_exception(error)))


@dataclass
class Result:
    """What a part has to say: notes, tables below them, and how to read these."""

    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    legend: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Stores it."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Result:
        """What ``write`` has stored."""
        read = json.loads(path.read_text(encoding="utf-8"))
        tables = [Table(**table) for table in read["tables"]]
        failures = [Failure(**failure) for failure in read["failures"]]
        return cls(read["notes"], tables, read["legend"], failures)


def count_of(number: int, what: str) -> str:
    """A number and its noun, in the plural where it is one."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def shorten(text: str, most: int) -> str:
    """Text with its middle left out where it is too long: messages stand at its ends."""
    if len(text) <= most:
        return text
    head = most // 4
    return f"{text[:head]}\n... {len(text) - most} characters left out ...\n{text[head - most :]}"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
