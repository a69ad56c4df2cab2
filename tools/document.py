"""Pages that programs write parts of: what stands between the markers of a section is theirs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUMMARY = ROOT / "docs" / "gpu.md"  # one screen, and one short table
TABLES = ROOT / "docs" / "gpu-tables.md"  # everything that was read from machine code


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def section(page: Path, name: str, text: str) -> None:
    """Replaces what stands between the markers of a section."""
    begin, end = _markers(name)
    document = page.read_text(encoding="utf-8")
    if begin not in document or end not in document:
        raise RuntimeError(f"{page} has no markers {begin} and {end}")
    head, rest = document.split(begin)
    tail = rest.split(end)[1]
    page.write_text(f"{head}{begin}\n{text.strip()}\n{end}{tail}", encoding="utf-8")


def read_section(page: Path, name: str) -> str:
    """What stands between the markers of a section."""
    begin, end = _markers(name)
    return page.read_text(encoding="utf-8").split(begin)[1].split(end)[0].strip()


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def read_table(text: str) -> list[list[str]]:
    """Rows of a table in Markdown, below its header."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
