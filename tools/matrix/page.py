"""The tables of docs/install.md, from results."""

from __future__ import annotations

from tools.document import ROOT, section, table

from .cells import MISSING, PYTHONS, TESTED, TORCHES, Cell, all_cells
from .run import Outcome

PAGE = ROOT / "docs" / "install.md"


def said(outcome: Outcome | None) -> str:
    """One cell in words."""
    if outcome is None:
        return "not run"
    if outcome.error:
        return f"failed: {outcome.error.splitlines()[0]}"
    if outcome.failures:
        return f"{len(outcome.failures)} of {outcome.passed + len(outcome.failures)} failed"
    return f"{outcome.passed:,} passed"


def cuda_of(results: dict[str, Outcome], torch: str) -> str:
    """The CUDA that a torch was built for, as its environments said."""
    found = {results[c.name].versions.get("CUDA") for c in all_cells() if c.torch == torch and c.name in results}
    return ", ".join(sorted(filter(None, found))) or "–"


def markdown(results: dict[str, Outcome]) -> str:
    """Both tables, and the wheel that they are about."""
    rows = []
    for torch in sorted(TORCHES, key=lambda version: [int(part) for part in version.split(".")]):
        cells = ["no such build" if (torch, p) in MISSING else said(results.get(Cell(torch, p).name)) for p in PYTHONS]
        rows.append([torch, cuda_of(results, torch), *cells])
    frameworks = []
    for cell in all_cells():
        if cell.frameworks:
            outcome = results.get(cell.name)
            names = [requirement.partition("==")[0] for requirement in cell.frameworks]
            versions = outcome.versions if outcome is not None else {}
            frameworks.append([*(versions.get(name, "–") for name in names), said(outcome)])
    wheels = sorted({f"`{outcome.wheel}`, {outcome.date}" for outcome in results.values()})
    return "\n\n".join(
        [
            f"The wheel: {'; '.join(wheels) or 'none yet'}.",
            table(["torch", "CUDA", *(f"Python {version}" for version in PYTHONS)], rows),
            f"Trainers, with torch {TESTED} and Python 3.11, the oldest and the newest versions:",
            table(["lightning", "transformers", "accelerate", "result"], frameworks),
        ]
    )


def write(results: dict[str, Outcome]) -> None:
    """Writes the tables into docs/install.md."""
    section(PAGE, "matrix", markdown(results))
