"""Sections of the optimizer by itself: its passes against the roofline, its step against others."""

from __future__ import annotations

from collections import Counter

from .common import (
    MODELS,
    STEP,
    beside,
    by_value,
    emphasised,
    filled,
    in_order,
    kernels,
    limit,
    listed,
    missing,
    ours,
    quartiles,
    shapes_of,
    source,
    spoken,
)
from .markup import MISSING, Section, Table, details, digits, duration, figure, heading, paragraph, percent, span
from .plots import Bar, Plots, Target
from .records import Record, Run, distinct

PASS_FILES = ("bench_norm.py", "bench_perturb.py", "bench_step.py", "bench_hvp.py")


def passes(run: Run, plots: Plots) -> Section:
    """Bytes and share of the roofline of every pass."""
    title = "The passes"
    records = run.of("pass", "share_of_roofline", contender=kernels(run))
    if not records:
        return Section("passes", "Passes", title, missing("the passes beside their roofline", PASS_FILES[0]))
    body = paragraph(
        "Every pass but the drawing of signs (`rademacher`) is bound by memory. The roofline is a loop on as many "
        "threads that moves the same bytes and computes nothing: at 100 % arithmetic is free. `ordinary` is norm, "
        "perturb and step in a row."
    )
    models = in_order(distinct(records, "model"))
    first = _sorted([r for r in records if r.text("model") == models[0]] if models else records)
    shares = [
        Bar(r.text("pass"), *(value and value * 100 for value in (r.number("share_of_roofline"), *_spread(r))))
        for r in first
    ]
    moved = [Bar(r.text("pass"), r.number("bytes_per_parameter") or 0, ours=False) for r in first]
    body += '<div class="figures">'
    body += figure(
        plots.bars("passes_roofline", shares, "% of roofline", targets=[Target("roofline", 100)], show=_per_cent),
        f"Bars, share of roofline: {listed(shares, ' %')}",
        f"Speed of each pass over that of its roofline, with quartiles. {shapes_of(first[0])}. {source(*PASS_FILES)}",
    )
    body += figure(
        plots.bars("passes_bytes", moved, "bytes per float32 parameter", show=lambda value: f"{value:g}"),
        f"Bars, bytes per parameter: {listed(moved)}",
        f"Bytes that each pass has to read and write, counted and not measured. {source(*PASS_FILES)}",
    )
    body += "</div>\n" + _pass_table(records, models) + _everybody(run)
    return Section("passes", "Passes", title, body)


def _per_cent(value: float) -> str:
    return f"{value:.0f} %"


def _spread(record: Record) -> tuple[float | None, float | None]:
    return quartiles(record, "share_of_roofline")


def _sorted(records: list[Record]) -> list[Record]:
    """In the order of a step, each pass once."""
    names = list(dict.fromkeys(record.text("pass") for record in records))
    places = {name: i for i, name in enumerate([*STEP, *(n for n in names if n not in STEP)])}
    once = {record.text("pass"): record for record in reversed(records)}
    return sorted(once.values(), key=lambda record: places[record.text("pass")])


def _pass_table(records: list[Record], models: list[str]) -> str:
    head = ["pass", "shapes", "bytes per parameter", "median time", "GB/s", "share of roofline", "quartiles"]
    rows = []
    for model in models or [""]:
        for r in _sorted([r for r in records if r.text("model") == model]):
            low, high = _spread(r)
            rows.append(
                [
                    f"`{r.text('pass')}`",
                    spoken(model),
                    f"{r.number('bytes_per_parameter') or 0:g}",
                    duration(r.seconds),
                    digits(r.number("gigabytes_per_second")),
                    percent(r.number("share_of_roofline")),
                    MISSING if low is None or high is None else f"{low * 100:.0f} … {percent(high)}",
                ]
            )
    return Table(f"The passes in float32. {source(*PASS_FILES)}", head, rows, texts=2).html()


def _everybody(run: Run) -> str:
    """Other backends and torch's own functions on the same passes."""
    records = [r for r in run.of("pass", "gigabytes_per_second", model="gpt") if r.text("contender") != kernels(run)]
    if not records:
        return ""
    rows = [
        [
            f"`{r.text('pass')}`",
            spoken(r.text("contender")),
            duration(r.seconds),
            digits(r.number("gigabytes_per_second")),
            percent(r.number("share_of_roofline")),
            digits(r.number("speedup_over_eager")),
        ]
        for r in records
    ]
    head = ["pass", "contender", "median time", "GB/s", "share of roofline", "× eager loop’s speed"]
    table = Table(f"Passes of others. {shapes_of(records[0])}. {source(*PASS_FILES)}", head, rows, texts=2)
    return details("The same passes by other backends, by torch and by the roofline", table.html())


def speed(run: Run, plots: Plots) -> Section:
    """An ordinary step against everybody."""
    title, file = "Speed of an ordinary step", "bench_step.py"
    records = [r for r in run.of("model", "calls", bench="step") if "pass" not in r.info and "axis" not in r.info]
    if not records:
        return Section("speed", "Speed", title, missing("the comparison of optimizers", file))
    body = paragraph(
        "The three calls of an ordinary step (`perturb_weights`, `unperturb`, `step`) against a step of other "
        "optimizers, all with their gradients given. Left of the line is faster than fused AdamW, right is slower, "
        "on a logarithmic scale. The dark stroke at the end of a bar spans the quartiles."
    )
    models = in_order(distinct(records, "model"))
    for model in models:
        body += _speed_of(model, [r for r in records if r.text("model") == model], plots, file)
    absent = [f"`{model}`" for model in MODELS if model not in models]
    return Section("speed", "Speed", title, body + (missing(f"timings of {', '.join(absent)}", file) if absent else ""))


def _names(records: list[Record]) -> list[str]:
    """Contenders, with their calls where one of them was timed in several ways."""
    names = [record.text("contender") for record in records]
    ways = Counter(names)
    calls = [f", {record.text('calls')}" if ways[record.text("contender")] > 1 else "" for record in records]
    return [spoken(name) + more for name, more in zip(names, calls, strict=True)]


def _speed_of(model: str, records: list[Record], plots: Plots, file: str) -> str:
    name = shapes_of(records[0])
    records = by_value(records, "ratio_to_fused_adamw")
    rows, bars = [], []
    for label, r in zip(_names(records), records, strict=True):
        ratio, spread = r.number("ratio_to_fused_adamw"), quartiles(r, "ratio_to_fused_adamw")
        eager, eager_spread = r.number("speedup_over_eager"), quartiles(r, "speedup_over_eager")
        eagerly = [digits(eager), span(*eager_spread)]
        rows.append([label, duration(r.seconds), digits(ratio), span(*spread), limit(r), *eagerly])
        if ratio is not None:
            bars.append(Bar(label, ratio, *spread, ours(r.text("contender"))))
    head = ["contender", "median time", "× fused AdamW’s time", "quartiles", "target"]
    head += ["× eager loop’s speed", "quartiles"]
    marked = emphasised([r.text("contender") for r in records])
    table = Table(f"{name}. {source(file)}", *filled(head, rows), emphasis=marked)
    if not bars:
        return heading(name) + table.html()
    label = "time, fused AdamW = 1 (logarithmic)"
    address = plots.bars(f"speed_{model}", bars, label, targets=[Target("fused AdamW", 1.0)], origin=1.0)
    alt = f"Bars on {name}, time over fused AdamW's: {listed(bars, ' times')}"
    return heading(name) + beside(address, alt, f"Time of an ordinary step over fused AdamW’s. {source(file)}", table)
