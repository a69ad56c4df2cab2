"""How time grows with parameters and with tensors."""

from __future__ import annotations

from collections.abc import Callable

from .common import KERNELS, filled, missing, ours, quartiles, shapes_of, source, spoken
from .markup import MISSING, Section, Table, digits, duration, figure, heading, paragraph, span
from .plots import Curve, Plots, Target
from .records import Record, Run, distinct

FILE = "bench_scaling.py"
DASHES = "dashed: 1 thread"
# What a plot shows where there is more than it can; tables have everything.
DRAWN = (*KERNELS, "adamw fused", "eager loop", "sassha foreach")
MANY = 6

Key = tuple[str, str, int]


def _grouped(records: list[Record]) -> dict[Key, list[Record]]:
    """Records of one curve: contender, calls, and threads where their number varies."""
    several = len(distinct(records, "threads")) > 1
    groups: dict[Key, list[Record]] = {}
    for record in records:
        threads = record.whole("threads") or 0
        key = record.text("contender"), record.text("calls"), threads if several else 0
        groups.setdefault(key, []).append(record)
    return groups


def _threads_of(records: list[Record]) -> str:
    """The number of threads, where all have the same."""
    counts = distinct(records, "threads")
    return f", {counts[0]} thread{'s' if counts[0] != 1 else ''}" if len(counts) == 1 else ""


def _drawn(groups: dict[Key, list[Record]]) -> dict[Key, list[Record]]:
    """The curves of a plot."""
    if len({key[:2] for key in groups}) <= MANY:
        return groups
    return {key: records for key, records in groups.items() if key[0] in DRAWN}


def _label(key: Key) -> str:
    contender, calls, threads = key
    name = spoken(contender)
    if calls and calls not in name:
        name = f"{name} {calls}" if name else calls
    return name + (f", {threads} thread{'s' if threads > 1 else ''}" if threads else "")


def _curve(key: Key, records: list[Record], axis: str, y: Callable[[Record], float]) -> Curve:
    points = sorted((record.number(axis) or 0.0, y(record)) for record in records)
    return Curve(_label((*key[:2], 0)), [x for x, _ in points], [value for _, value in points], dashed=key[2] == 1)


def _fits(groups: dict[Key, list[Record]], per: str) -> str:
    """Straight lines through the points, as the benchmarks fitted them."""
    rows, marked = [], set()
    for key, records in groups.items():
        for record in [r for r in records if r.number("fit_slope_ns") is not None][:1]:
            if ours(key[0]):
                marked.add(len(rows))
            slope, r2 = record.number("fit_slope_ns"), record.number("fit_r2")
            intercept = record.number("fit_intercept_us")
            rows.append([_label(key), digits(intercept), digits(slope), MISSING if r2 is None else f"{r2:.4f}"])
    if not rows:
        return ""
    head = ["curve", "fixed, µs", f"ns per {per}", "R²"]
    return Table(f"Fits: time = fixed + slope × {per}s. {source(FILE)}", head, rows, emphasis=frozenset(marked)).html()


def _points(groups: dict[Key, list[Record]], axis: str, y: Callable[[Record], str]) -> str:
    """Every point: a row for each curve, a column for each size."""
    sizes = sorted({record.number(axis) or 0.0 for records in groups.values() for record in records})
    rows = []
    for key, records in groups.items():
        found = {record.number(axis): y(record) for record in records}
        rows.append([_label(key), *(found.get(size, MISSING) for size in sizes)])
    marked = frozenset(i for i, key in enumerate(groups) if ours(key[0]))
    what = "Time" if axis == "parameters" else "Microseconds per tensor"
    head = [f"{axis} →", *(f"{size:,.0f}" for size in sizes)]
    return Table(f"{what} by number of {axis}, medians. {source(FILE)}", head, rows, emphasis=marked).html()


def _parameters(run: Run, plots: Plots) -> str:
    records = [r for r in run.of("parameters", axis="parameters") if r.seconds]
    if not records:
        return missing("the curve over parameters", FILE)
    groups = _grouped(records)
    drawn = _drawn(groups)
    curves = [_curve(key, group, "parameters", lambda r: (r.seconds or 0) * 1e3) for key, group in drawn.items()]
    address = plots.curves("scaling_parameters", curves, "parameters", "milliseconds", dashes=DASHES)
    ends = "; ".join(
        f"{c.label}: {digits(c.y[0])} ms at {c.x[0]:,.0f}, {digits(c.y[-1])} ms at {c.x[-1]:,.0f}" for c in curves
    )
    more = "" if len(drawn) == len(groups) else "; the table has the others too"
    picture = figure(
        address,
        f"Curves of time against parameters, both axes logarithmic. {ends}",
        f"Time of a step against the number of parameters{_threads_of(records)}{more}. {source(FILE)}",
    )
    fits = _fits(groups, "parameter")
    return f'<div class="beside">{picture}{fits}</div>\n' + _points(groups, "parameters", lambda r: duration(r.seconds))


def _per_tensor(record: Record) -> float:
    noted = record.number("us_per_tensor")
    return (record.seconds or 0) * 1e6 / (record.number("tensors") or 1) if noted is None else noted


def _targets(groups: dict[Key, list[Record]]) -> dict[str, float]:
    """Microseconds per tensor to reach by the name of the calls, as the benchmarks note them."""
    return {key[1]: value for key, records in groups.items() for r in records if (value := r.number("target"))}


def _tensors(run: Run, plots: Plots) -> str:
    records = [r for r in run.of("tensors", axis="tensors") if r.seconds]
    if not records:
        return missing("the curve over tensors", FILE)
    groups = _grouped(records)
    wanted = _targets(groups)
    targets = [Target(f"target, {calls}", value) for calls, value in wanted.items()]
    curves = [_curve(key, group, "tensors", _per_tensor) for key, group in _drawn(groups).items()]
    address = plots.curves("scaling_tensors", curves, "tensors", "µs per tensor", targets=targets, dashes=DASHES)
    ends = "; ".join(f"{c.label}: {digits(c.y[-1])} µs at {c.x[-1]:,.0f}" for c in curves)
    picture = figure(
        address,
        f"Curves of microseconds per tensor against the number of tensors, both axes logarithmic. {ends}",
        f"Time per tensor against the number of tensors{_threads_of(records)}. {source(FILE)}",
    )
    asked = " and ".join(f"{value:g} µs for the {calls}" for calls, value in wanted.items())
    said = paragraph("What a tensor costs beside its bytes." + (f" Targets: {asked}." if asked else ""))
    shown = f'<div class="beside">{picture}{_fits(groups, "tensor")}</div>\n'
    return said + shown + _points(groups, "tensors", lambda r: digits(_per_tensor(r)))


def _threads(run: Run) -> str:
    """What more threads bring, at one size."""
    records = [r for r in run.of("threads", axis="threads") if r.seconds]
    if not records:
        return missing("the comparison of numbers of threads", FILE)
    counts = sorted({record.whole("threads") or 0 for record in records})
    groups: dict[str, dict[int, Record]] = {}
    for r in records:
        groups.setdefault(_label((r.text("contender"), r.text("calls"), 0)), {})[r.whole("threads") or 0] = r
    rows = []
    for name, found in groups.items():
        times = [duration(found[count].seconds) if count in found else MISSING for count in counts]
        most = found[max(found)]
        gain = most.number("speedup_over_one_thread")
        rows.append([name, *times, digits(gain), span(*quartiles(most, "speedup_over_one_thread"))])
    head = ["contender", *(f"{count} thread{'s' if count > 1 else ''}" for count in counts), "gain, ×", "quartiles"]
    marked = frozenset(i for i, name in enumerate(groups) if ours(name))
    caption = f"Time by number of threads, medians. {shapes_of(records[0])}. {source(FILE)}"
    return Table(caption, *filled(head, rows), emphasis=marked).html()


def scaling(run: Run, plots: Plots) -> Section:
    """More parameters, more tensors, more threads."""
    body = heading("More parameters") + paragraph(
        "From some size on time is bandwidth: a straight line of slope one. What is fixed shows on the left."
    )
    body += _parameters(run, plots)
    body += heading("More tensors") + _tensors(run, plots) + heading("More threads") + _threads(run)
    return Section("scaling", "Scaling", "Scaling", body)
