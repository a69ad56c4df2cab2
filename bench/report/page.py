"""The page from its sections."""

from __future__ import annotations

from pathlib import Path
from string import Template

from . import cost, elsewhere, head, passes, scaling
from .markup import Section, inline
from .plots import Plots
from .records import Run

HERE = Path(__file__).resolve().parent
MEASURED = (passes.passes, passes.speed, cost.cost, cost.refresh, cost.memory, scaling.scaling)


def sections(run: Run, plots: Plots, root: Path) -> list[Section]:
    """The page from top to bottom."""
    on_gpu = any(record.text("device") == "cuda" for record in run.records)
    measured = [section(run, plots) for section in MEASURED]
    return [head.machine(run), *measured, elsewhere.gpu(root, on_gpu), elsewhere.training(root)]


def write(run: Run, folder: Path, root: Path = elsewhere.ROOT) -> Path:
    """Writes index.html, which needs no other file, and the plots as PNG."""
    body = sections(run, Plots(folder), root)
    template = Template((HERE / "page.html").read_text(encoding="utf-8"))
    text = template.substitute(
        style=(HERE / "style.css").read_text(encoding="utf-8"),
        date=inline(head.spoken_date(run.date)),
        links="".join(f'<li><a href="#{part.anchor}">{inline(part.short)}</a></li>\n' for part in body),
        summary=head.summary(run),
        sections="\n".join(part.html() for part in body),
    )
    target = folder / "index.html"
    target.write_text(text, encoding="utf-8")
    return target
