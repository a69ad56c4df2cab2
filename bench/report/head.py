"""The top of the page: where and how it was measured, and the figures that matter."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from .common import STEP, kernels, shapes_of
from .markup import Section, digits, inline, paragraph, percent
from .records import Run

HOW = (
    "Contenders were interleaved: they took turns, so that each saw the same machine. A ratio is the median over "
    "rounds of one contender's time over the other's in the same round, with the quartiles beside it. The machine is "
    "shared: trust ratios more than milliseconds."
)
HERE = "*"  # marks what the run did not note
FEW = 2  # rounds of `pytest bench --quick`


@dataclass(frozen=True)
class Card:
    """A figure that matters, what it is, what to compare it with, and the section that has the rest."""

    figure: str
    what: str
    beside: str
    anchor: str


def _memory() -> str:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return ""
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"


def _compiler() -> str:
    """The first line of what the compiler says about itself."""
    try:
        said = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.partition("\n")[0]


def here() -> dict[str, str]:
    """This machine, for what the run did not note."""
    import torch

    import sassha_fast
    from sassha_fast._passes import library

    return {
        "memory": _memory(),
        "isa": "" if library.load() is not None else str(torch.ops.sassha_fast.cpu_isa()),
        "compiler": _compiler(),
        "torch": torch.__version__,
        "sassha_fast": sassha_fast.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }


def noted(run: Run) -> dict[str, str]:
    """What the run says about its machine: pytest-benchmark's notes, and those under the names of ``here``."""
    machine, cpu = run.machine, run.machine.get("cpu")
    cpu = cpu if isinstance(cpu, dict) else {}
    threads = Counter(record.whole("threads") for record in run.of("threads")).most_common(1)
    found = {
        "cpu": cpu.get("brand_raw") or machine.get("processor") or machine.get("machine"),
        "cores": cpu.get("count"),
        "system": " ".join(str(machine.get(key, "")) for key in ("system", "release")).strip(),
        "python": machine.get("python_version"),
        "threads": threads[0][0] if threads else None,
    }
    found |= {key: machine[key] for key in ("memory", "isa", "compiler", "torch", "sassha_fast") if key in machine}
    return {key: str(value) for key, value in found.items() if value not in (None, "")}


def spoken_date(text: str) -> str:
    """A date as people write it."""
    try:
        return datetime.fromisoformat(text).strftime("%d %B %Y, %H:%M %Z").strip(" ,").removeprefix("0")
    except ValueError:
        return text or "date not noted"


def facts(run: Run) -> list[tuple[str, str]]:
    """Machine, versions and circumstances; what the run did not note is that of this machine, and marked."""
    known, now = noted(run), here()

    def value(key: str) -> str:
        if key in known:
            return known[key]
        return f"{now[key]} {HERE}" if now.get(key) else "not noted"

    commit = str(run.commit.get("id") or "")[:10]
    if commit:
        commit = f", commit {commit}" + (" with changes" if run.commit.get("dirty") else "")
    counts = sorted({record.whole("threads") or 0 for record in run.of("threads", "axis")})
    return [
        ("CPU", f"{value('cpu')}, {value('cores')} cores"),
        ("Instruction set", value("isa")),
        ("Memory", value("memory")),
        ("Threads", value("threads") + (f" (curves: {' and '.join(map(str, counts))})" if len(counts) > 1 else "")),
        ("torch", value("torch")),
        ("sassha_fast", value("sassha_fast") + commit),
        ("Python", value("python")),
        ("Compiler", value("compiler")),
        ("System", value("system")),
        ("Date of the run", spoken_date(run.date)),
        ("Command", f"`make bench`: {len(run.records)} benchmarks"),
    ]


def machine(run: Run) -> Section:
    """Where and how."""
    found = facts(run)
    items = "".join(f"<div><dt>{inline(name)}</dt><dd>{inline(what)}</dd></div>\n" for name, what in found)
    body = f'<dl class="facts">\n{items}</dl>\n{paragraph(HOW)}'
    if any(HERE in what for _, what in found):
        body += paragraph(f"{HERE} Not noted by the run: so it is where this page was made.", "small")
    return Section("machine", "Machine", "Where and how", body)


def cards(run: Run) -> list[Card]:
    """The figures that matter, as far as the run has them."""
    found = []
    for model in ("gpt", "small"):
        for record in run.of("ratio_to_fused_adamw", bench="step", model=model, calls="three calls"):
            if record.text("contender") != kernels(run):
                continue
            eager = record.number("speedup_over_eager")
            beside = "" if eager is None else f"{digits(eager)} × the eager loop's speed"
            ratio = f"{digits(record.number('ratio_to_fused_adamw'))} ×"
            found.append(Card(ratio, f"fused AdamW's time for the three calls. {shapes_of(record)}", beside, "speed"))
    for record in run.of("gc", bench="train", model="resnet20", contender="sassha exact")[:1]:
        cost = f"{digits(record.number('gc'))} GC"
        found.append(
            Card(
                cost,
                "gradient computations for a step of SASSHA on ResNet-20, refreshes included",
                "The paper counts 2.3",
                "cost",
            )
        )
    passes = run.of("share_of_roofline", model="gpt", contender=kernels(run))
    shares = [record.number("share_of_roofline") or 0 for record in passes if record.text("pass") in STEP]
    if shares:
        share = f"{min(shares) * 100:.0f} to {percent(max(shares))}"
        found.append(Card(share, "of the roofline, from pass to pass", "A loop that only moves the bytes", "passes"))
    return found


def summary(run: Run) -> str:
    """The cards, each a link to its section, and a warning if the run was no measurement."""
    rounds = max((int(record.stats.get("rounds") or 0) for record in run.records), default=0)
    body = ""
    if 0 < rounds <= FEW:
        body = paragraph(
            "**A quick run, no results:** so few rounds show that the benchmarks work. `make bench` measures.",
            "warning",
        )
    shown = [
        f'<li><a href="#{card.anchor}"><strong>{inline(card.figure)}</strong> <span>{inline(card.what)}</span> '
        f"<small>{inline(card.beside)}</small></a></li>\n"
        for card in cards(run)
    ]
    if not shown:
        return body + paragraph("This run has none of the figures of the summary: `make bench` measures them.", "note")
    return f'{body}<ul class="cards">\n{"".join(shown)}</ul>\n'
