"""The page: Markdown that can be pasted into an issue, with everything that failed at its end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from .parts import Done
from .result import Table, count_of, listed
from .settings import Settings

TRIAL = (
    "**A trial, no results.** It ran on {where}, with small shapes, to show that the report works. Figures of time are "
    "left out (–): they would mean nothing."
)


def cell(text: str) -> str:
    """Text that does not end its cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def markdown(table: Table) -> str:
    """A table in Markdown."""
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    body = "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in lines)
    return f"**{table.title}**\n\n{body}" if table.title else body


def fenced(text: str) -> str:
    """Text as it is, in a fence that it does not contain."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def verdict(parts: Sequence[Done]) -> str:
    """What came of it, in a sentence."""
    failures = sum(len(done.result.failures) for done in parts)
    if not failures:
        return f"Everything passed: {listed([done.part.title for done in parts])}."
    where = [f"{done.part.title} ({len(done.result.failures)})" for done in parts if done.result.failures]
    return f"**{count_of(failures, 'failure')}**: {listed(where)}. Their texts stand at the end."


def section(done: Done, trial: bool) -> str:
    """One part."""
    pieces = [f"## {done.part.title}", *done.result.notes, *map(markdown, done.result.tables)]
    pieces += done.result.legend
    if done.result.failures:
        pieces.append(f"{count_of(len(done.result.failures), 'failure')}, at the end of this page.")
    if not trial:
        pieces.append(f"This part took {done.seconds:.0f} s.")
    return "\n\n".join(pieces)


def failures(parts: Sequence[Done]) -> str:
    """Every failure with its text."""
    pieces = ["## Failures"]
    for done in parts:
        for failure in done.result.failures:
            pieces += [f"### {done.part.title}: {failure.where}", fenced(failure.text)]
    return "\n\n".join(pieces if len(pieces) > 1 else [*pieces, "None."])


def write(settings: Settings, parts: Sequence[Done], command: str) -> str:
    """The whole page."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    pieces = [f"# GPU report: {settings.name}", verdict(parts)]
    if settings.trial:
        pieces.append(TRIAL.format(where="a virtual GPU" if settings.virtual else "a CPU"))
    pieces.append(f"`{command}`, {now}.")
    pieces += [section(done, settings.trial) for done in parts]
    return "\n\n".join([*pieces, failures(parts)]) + "\n"
