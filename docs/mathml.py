"""A hook of mkdocs: formulas become MathML, which browsers typeset by themselves, without a script or a network."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex makes of $…$ in a line and of $$…$$ in a paragraph.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html: str, **kwargs: Any) -> str:
    """Rewrites the formulas of a page."""
    return FORMULA.sub(_mathml, html)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    return convert(unescape(match[2]).strip(), display=display)  # type: ignore[no-any-return]
