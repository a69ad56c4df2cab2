"""Pieces of the page. All of it is well-formed XML, so that a test can parse it strictly."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

MINUS = "−"
MISSING = "–"


def digits(value: float | None, figures: int = 3) -> str:
    """A number with so many significant figures, groups of thousands and never an exponent."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    # Below one the leading zero counts as a figure: 0.55 stands beside 2.05.
    decimals = max(0, figures - 1 - exponent - (exponent < 0))
    return f"{value:,.{decimals}f}".replace("-", MINUS)


def percent(value: float | None) -> str:
    """A share in per cent."""
    return MISSING if value is None else f"{value * 100:,.0f} %"


def span(low: float | None, high: float | None) -> str:
    """Two quartiles."""
    return MISSING if low is None or high is None else f"{digits(low)} … {digits(high)}"


def duration(seconds: float | None) -> str:
    """Seconds in the unit that suits them."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{digits(seconds / size)} {unit}"
    return f"{digits(seconds / 1e-9)} ns"


def inline(text: str) -> str:
    """Escapes text and renders the `code`, **bold** and links of Markdown."""
    text = escape(text, quote=False)
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


@dataclass
class Table:
    """A table; the columns beyond the first ``texts`` hold numbers.

    Attributes:
        emphasis: Numbers of the rows to set off.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1
    emphasis: frozenset[int] = field(default_factory=frozenset)

    def html(self) -> str:
        """The table in a box that scrolls sideways when it must, its caption above and outside of that."""
        head = "".join(f'<th scope="col"{self._kind(i)}>{inline(cell)}</th>' for i, cell in enumerate(self.head))
        body = []
        for number, row in enumerate(self.rows):
            cells = "".join(self._cell(i, cell) for i, cell in enumerate(row))
            kind = ' class="ours"' if number in self.emphasis else ""
            body.append(f"<tr{kind}>{cells}</tr>")
        return (
            f'<figure class="table"><figcaption>{inline(self.caption)}</figcaption>\n'
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(plain(self.caption))}"><table>\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>{chr(10).join(body)}</tbody></table></div></figure>\n"
        )

    def _kind(self, column: int) -> str:
        return "" if column < self.texts else ' class="number"'

    def _cell(self, column: int, text: str) -> str:
        if column == 0:
            return f'<th scope="row">{inline(text)}</th>'
        return f"<td{self._kind(column)}>{inline(text)}</td>"


def plain(text: str) -> str:
    """Text without Markdown's marks, for attributes."""
    return re.sub(r"[`*]", "", text)


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of text with inline Markdown."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{inline(text)}</p>\n"


def heading(text: str) -> str:
    """A heading within a section."""
    return f"<h3>{inline(text)}</h3>\n"


def note(text: str) -> str:
    """What is missing, and the command that makes it."""
    return paragraph(text, "note")


def details(summary: str, content: str) -> str:
    """What opens on demand."""
    return f"<details><summary>{inline(summary)}</summary>\n{content}</details>\n"


def figure(source: str, alt: str, caption: str, kind: str = "card") -> str:
    """A picture on a white card."""
    return (
        f'<figure><div class="{kind}"><img src="{source}" alt="{escape(plain(alt))}" /></div>'
        f"<figcaption>{inline(caption)}</figcaption></figure>\n"
    )


def data_uri(content: bytes, kind: str) -> str:
    """A file as an address that needs no request."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def picture(path: Path) -> str:
    """A PNG, JPEG or SVG file as an address."""
    kinds = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".svg": "image/svg+xml"}
    return data_uri(path.read_bytes(), kinds[path.suffix.lower()])


@dataclass
class Section:
    """A part of the page with an address of its own, and a short name for the list of parts."""

    anchor: str
    short: str
    title: str
    body: str

    def html(self) -> str:
        """The section, its heading a link to itself."""
        heading = f'<h2 id="{self.anchor}"><a href="#{self.anchor}">{inline(self.title)}</a></h2>'
        return f'<section aria-labelledby="{self.anchor}">\n{heading}\n{self.body}</section>\n'
