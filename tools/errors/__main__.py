"""``python -m tools.errors``: writes docs/errors.md."""

from __future__ import annotations

import argparse
import sys

from . import page
from .messages import messages


def main() -> int:
    """Writes the page, or page.md with ``--adopt``; 1 if a message has no explanation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adopt", action="store_true", help="write page.md from messages pasted into docs/errors.md")
    try:
        if parser.parse_args().adopt:
            page.TEMPLATE.write_text(page.adopt(), encoding="utf-8")
        page.PAGE.write_text(page.render(), encoding="utf-8")
    except page.PageError as error:
        print(f"errors: {error}", file=sys.stderr)
        return 1
    missing = [m for m in messages() if m.text not in page.explained()]
    for message in missing:
        print(f"errors: {message.file}:{message.line} has no explanation: {message.text}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
