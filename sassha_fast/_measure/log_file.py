"""The file of a log: a header, then a line for every row, in the order of steps."""

from __future__ import annotations

import math
import os
from pathlib import Path

COLUMNS = ("step", "loss", "grad_norm", "predicted_gap", "ascent_gap", "trace", "negative_share")
HEADER = ",".join(COLUMNS) + "\n"


def read_log(path: str | os.PathLike[str]) -> dict[str, list[float]]:
    """The columns of a log. What is not known is NaN; a last line that was cut off is left out."""
    return columns([parsed(line) for line in complete_lines(Path(path))[1:]])


def complete_lines(path: Path) -> list[bytes]:
    """The complete lines of a log, with their ends. Raises ValueError if the file is not a log."""
    lines = path.read_bytes().splitlines(keepends=True)
    start = lines[0] if lines else b""
    if start != HEADER.encode() and not (len(lines) <= 1 and HEADER.encode().startswith(start)):
        raise ValueError(
            f"StatsLog: {path} starts with {start[:60]!r}, which is not a log's header; log to another path"
        )
    complete = [line for line in lines if line.endswith(b"\n")]
    for i, line in enumerate(complete[1:], 2):
        try:
            parsed(line)
        except ValueError:
            raise ValueError(
                f"StatsLog: line {i} of {path} is {line[:60]!r}, expected {len(COLUMNS)} numbers; repair it or log to "
                "another path"
            ) from None
    return complete


def parsed(line: bytes) -> list[float]:
    """The numbers of a row, NaN for empty cells."""
    values = [float(cell) if cell.strip() else math.nan for cell in line.decode("ascii", "replace").split(",")]
    if len(values) != len(COLUMNS):
        raise ValueError
    return values


def columns(rows: list[list[float]]) -> dict[str, list[float]]:
    """Rows as columns by name."""
    return {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
