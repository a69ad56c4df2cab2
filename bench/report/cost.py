"""Sections of training: cost in gradient computations, refreshes, memory."""

from __future__ import annotations

from .common import beside, by_value, emphasised, filled, in_order, limit, listed, missing, ours, source, spoken
from .markup import MISSING, Section, Table, digits, heading, paragraph, span
from .plots import Bar, Plots
from .records import Record, Run, distinct

# The column "Total" of the paper's table of costs (Sec. "Cost"), in GC.
PAPER_GC = {"adamw": 1.0, "sam": 2.0, "adahessian": 4.0, "sassha": 2.3, "m-sassha": 1.3}
NETWORKS = {
    "gpt": "GPT, 4 layers of width 384, 10 M parameters",
    "resnet20": "ResNet-20, batches of 128",
}
TRAIN, PRODUCTS = "bench_train.py", "bench_hvp.py"


def paper_cost(contender: str) -> float | None:
    """The paper's count for a method; it has none for finite differences, nor for the eager loop."""
    method, _, kind = contender.partition(" ")
    return None if "difference" in kind or "quarter" in kind else PAPER_GC.get(method.rstrip(","))


def cost(run: Run, plots: Plots) -> Section:
    """Gradient computations per step, beside the paper's."""
    body = paragraph(
        "One GC is a forward and a backward pass of the same network in the same run. A step is the mean of the ten "
        "from one refresh of the curvature to the next. Bars and columns were **measured here**, but for the last: "
        "diamonds and the column **paper ◆** are the paper's count, which takes a Hessian-vector product for 3 GC. "
        "It is theory, not a timing."
    )
    records = run.of("gc", "model", bench="train")
    for model in in_order(distinct(records, "model")):
        body += _cost_of(model, [r for r in records if r.text("model") == model], plots)
    if not records:
        body += missing("the cost of training", TRAIN)
    measured = {r.text("contender").partition(" ")[0].rstrip(",") for r in records}
    absent = {name: value for name, value in PAPER_GC.items() if name not in measured}
    if absent:
        rows = [[spoken(name), f"{value:g}"] for name, value in absent.items()]
        body += Table(
            "In the paper alone: its count for methods that this run did not time", ["method", "paper\u00a0◆"], rows
        ).html()
    return Section("cost", "Cost", "Cost of training in gradient computations", body)


def _cost_of(model: str, records: list[Record], plots: Plots) -> str:
    name = NETWORKS.get(model, model)
    records = by_value([r for r in records if r.text("contender") != "gradient"], "gc")
    rows, bars = [], []
    for r in records:
        paper, spread = paper_cost(r.text("contender")), (r.number("gc_low"), r.number("gc_high"))
        label = spoken(r.text("contender"))
        parts = [digits(r.number("gc_ordinary")), digits(r.number("gc_refresh"))]
        told = [limit(r), MISSING if paper is None else f"{paper:g}"]
        rows.append([label, digits(r.number("gc")), span(*spread), *parts, *told])
        bars.append(Bar(label, r.number("gc") or 0, *spread, ours(r.text("contender")), paper))
    head = ["method", "GC", "quartiles", "ordinary step", "refresh step", "target", "paper\u00a0◆"]
    marked = emphasised([r.text("contender") for r in records])
    what = f"{name}: GC of a step, measured, and the paper’s count. {source(TRAIN)}"
    table = Table(what, *filled(head, rows), emphasis=marked)
    address = plots.bars(f"cost_{model}", bars, "GC per step", paper="counted in the paper")
    alt = f"Bars on {name}, measured GC per step: {listed(bars)}. Diamonds: the paper's count"
    caption = f"GC per step: bars measured here, diamonds counted in the paper. {source(TRAIN)}"
    return heading(name) + beside(address, alt, caption, table)


def refresh(run: Run, plots: Plots) -> Section:
    """Refreshes by kind of product."""
    title = "Cost of a refresh by kind of product"
    records = run.of("gc", "model", bench="hvp")
    if not records:
        return Section("refresh", "Refreshes", title, missing("refreshes", PRODUCTS))
    body = paragraph(
        "What a refresh adds to an ordinary step, in GC of the same network. Exact products differentiate the "
        "gradient; a finite difference takes one more gradient, a central one two."
    )
    for model in in_order(distinct(records, "model")):
        chosen = by_value([r for r in records if r.text("model") == model], "gc")
        spreads = [(r.number("gc_low"), r.number("gc_high")) for r in chosen]
        labels = [spoken(r.text("contender")) for r in chosen]
        bars = [Bar(n, r.number("gc") or 0, *s, ours=True) for n, r, s in zip(labels, chosen, spreads, strict=True)]
        rows = [
            [
                label,
                digits(r.number("gc")),
                span(*spread),
                digits(r.number("gc_ordinary")),
                digits(r.number("gc_refresh")),
            ]
            for label, r, spread in zip(labels, chosen, spreads, strict=True)
        ]
        name = NETWORKS.get(model, spoken(model))
        head = ["product", "added by a refresh, GC", "quartiles", "ordinary step, GC", "refresh step, GC"]
        table = Table(f"{name}: refreshes. {source(PRODUCTS)}", head, rows)
        address = plots.bars(f"refresh_{model}", bars, "GC that a refresh adds")
        alt = f"Bars on {name}, GC that a refresh adds: {listed(bars)}"
        caption = f"What a refresh adds, with quartiles. {source(PRODUCTS)}"
        body += heading(name) + beside(address, alt, caption, table)
    return Section("refresh", "Refreshes", title, body)


def memory(run: Run, plots: Plots) -> Section:
    """Peaks of live tensors."""
    records = [r for r in run.of("model", bench="train") if {"mib_ordinary", "mib_refresh"} & set(r.info)]
    if not records:
        return Section("memory", "Memory", "Memory", missing("peaks of memory", TRAIN))
    body = paragraph(
        "Peak of live tensors within a step (weights, state, gradients, activations, graphs), as torch's allocator saw "
        "it. Exact products keep the graph of the backward pass; finite differences do without."
    )
    for model in in_order(distinct(records, "model")):
        chosen = by_value([r for r in records if r.text("model") == model], "mib_refresh")
        labels = [spoken(r.text("contender")) for r in chosen]
        series = {
            "ordinary step": [r.number("mib_ordinary") for r in chosen],
            "refresh step": [r.number("mib_refresh") for r in chosen],
        }
        rows = [[label, *(digits(values[i]) for values in series.values())] for i, label in enumerate(labels)]
        name = NETWORKS.get(model, spoken(model))
        head = ["method", "ordinary step, MiB", "refresh step, MiB"]
        table = Table(f"{name}: peak of a step. {source(TRAIN)}", head, rows, emphasis=emphasised(labels))
        address = plots.pairs(f"memory_{model}", labels, series, "peak, MiB")
        alt = f"Pairs of bars on {name}, MiB in ordinary and refresh steps: " + "; ".join(
            f"{label} {before} and {after}" for label, before, after in rows
        )
        body += heading(name) + beside(address, alt, f"Peak of live tensors in a step. {source(TRAIN)}", table)
    return Section("memory", "Memory", "Memory", body)
