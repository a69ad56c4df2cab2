"""Where the documentation lies, and how code is fenced in it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

# Why the block is not run, its language, its text.
FENCE = re.compile(r"^(?:<!-- not run: ([^\n]*) -->\n\n)?```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
