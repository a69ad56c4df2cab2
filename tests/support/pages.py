"""Where the documentation lies, and the code that is fenced in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

# Why the block is not run, its language, its text.
FENCE = re.compile(r"^(?:<!-- not run: ([^\n]*) -->\n\n)?```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETUP = re.compile(r"^<!-- setup:\n(.*?)^-->", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Code of a page, and the line that it starts in."""

    page: Path
    line: int
    code: str
    reason: str | None = None  # why it is not run

    def run(self, namespace: dict[str, Any]) -> None:
        """Executes the code under the page's name and lines."""
        exec(compile("\n" * (self.line - 1) + self.code, str(self.page), "exec"), namespace)


def blocks(page: Path) -> list[Block]:
    """The Python of a page in order: what readers see, and what a comment sets up for it."""
    text = page.read_text(encoding="utf-8")

    def at(match: re.Match[str], group: int, reason: str | None = None) -> Block:
        return Block(page, text.count("\n", 0, match.start(group)) + 1, match[group], reason)

    shown = [at(m, 3, m[1]) for m in FENCE.finditer(text) if m[2] in ("python", "py")]
    return sorted([at(m, 1) for m in SETUP.finditer(text)] + shown, key=lambda block: block.line)
