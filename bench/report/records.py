"""What ``make bench`` wrote: one record per benchmark, found by the keys of ``bench/conftest.py``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ReportError(Exception):
    """The report can't be made; the message says why and what to do."""


@dataclass(frozen=True)
class Record:
    """One benchmark: where it comes from, seconds of its rounds, and what it noted."""

    file: str
    test: str
    stats: dict[str, float]
    info: dict[str, Any]

    def text(self, key: str) -> str:
        """A note as text, empty if absent."""
        value = self.info.get(key)
        return "" if value is None else str(value)

    def number(self, key: str) -> float | None:
        """A note as a number, None if absent or no number."""
        value = self.info.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def whole(self, key: str) -> int | None:
        """A note as a whole number."""
        value = self.number(key)
        return None if value is None else round(value)

    @property
    def seconds(self) -> float | None:
        """Median over rounds."""
        return self.stats.get("median")


@dataclass(frozen=True)
class Run:
    """One run of the benchmarks."""

    path: Path
    machine: dict[str, Any]
    commit: dict[str, Any]
    date: str
    records: list[Record]

    def of(self, *keys: str, **values: object) -> list[Record]:
        """The records that have all of these notes, with these values, in the order of the run."""
        return [
            record
            for record in self.records
            if all(record.info.get(key) is not None for key in keys)
            and all(record.info.get(key) == value for key, value in values.items())
        ]


def distinct(records: list[Record], key: str) -> list[Any]:
    """The values of a note, each once, in the order of the run."""
    return list(dict.fromkeys(record.info[key] for record in records if key in record.info))


def read(path: Path) -> Run:
    """Reads pytest-benchmark's JSON.

    Raises:
        ReportError: If the file is absent or something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError(f"bench.report: {path} does not exist; `make bench` writes build/bench.json") from None
    except ValueError as error:
        raise ReportError(f"bench.report: {path} is not JSON ({error}); run `make bench` again") from None
    if not isinstance(found, dict) or not isinstance(found.get("benchmarks"), list):
        raise ReportError(f"bench.report: {path} has no list of benchmarks; run `make bench` again")
    records = [
        Record(
            file=Path(str(entry.get("fullname", "")).split("::")[0]).name,
            test=str(entry.get("name", "")),
            stats=entry.get("stats") or {},
            info=entry.get("extra_info") or {},
        )
        for entry in found["benchmarks"]
    ]
    date = str(found.get("datetime", ""))
    return Run(path, found.get("machine_info") or {}, found.get("commit_info") or {}, date, records)
