"""docs/errors.md from page.md, and back."""

from __future__ import annotations

import re
from pathlib import Path

from tools.document import ROOT

from .messages import Message, messages

TEMPLATE = Path(__file__).with_name("page.md")
PAGE = ROOT / "docs" / "errors.md"
MADE = "<!-- Made by `make errors` from the sources and tools/errors/page.md. -->\n"
BLOCK = re.compile(r"^```messages\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SEPARATOR, NOTHING = " | ", "∅"


class PageError(RuntimeError):
    """A line of page.md that names no message, or several, or fills in too much or too little."""


def _literals(message: Message) -> list[str]:
    """Words of a message between what is filled in, longest first."""
    return sorted((part.strip(" ,;:.()") for part in message.text.split("{}")), key=len, reverse=True)


def find(kind: str, words: str) -> Message:
    """The message of this kind that has these words; the same text may stand in several modules."""
    named = {m.text: m for m in messages() if m.kind == kind and (words == m.text or words in m.text)}
    exact = named.get(words)
    if exact is None and len(named) != 1:
        found = "none has" if not named else f"{len(named)} have"
        raise PageError(f"{kind}: of the messages {found} {words!r}; see tools/errors/page.md")
    return exact if exact is not None else next(iter(named.values()))


def fill(line: str) -> tuple[Message, str]:
    """The message that a line names, and its text with the values of the line."""
    kind, _, rest = line.partition(": ")
    words, *values = rest.split(SEPARATOR)
    message = find(kind, words)
    parts = message.text.split("{}")
    if len(values) != len(parts) - 1:
        raise PageError(f"{line!r} fills in {len(values)} values, expected {len(parts) - 1}: {message.text!r}")
    filled = ["" if value == NOTHING else value for value in [*values, NOTHING]]
    return message, "".join(part + value for part, value in zip(parts, filled, strict=True))


def explained() -> set[str]:
    """Texts of the messages that page.md names."""
    lines = [line for block in BLOCK.findall(TEMPLATE.read_text(encoding="utf-8")) for line in block.splitlines()]
    return {fill(line)[0].text for line in lines}


def render() -> str:
    """The page."""

    def shown(match: re.Match[str]) -> str:
        filled = (fill(line) for line in match[1].splitlines())
        return "```text\n" + "".join(f"{message.kind}: {text}\n" for message, text in filled) + "```"

    title, _, rest = TEMPLATE.read_text(encoding="utf-8").partition("\n")
    return f"{title}\n\n{MADE}{BLOCK.sub(shown, rest)}"


def name(kind: str, seen: str) -> str:
    """A line of page.md for a message that somebody saw: of those that fit, the one that fills in least."""
    fitting = [m for m in messages() if m.fits(kind, seen)]
    if not fitting:
        raise PageError(f"no source says: {kind}: {seen}")
    message = max(fitting, key=lambda m: len(m.text.replace("{}", "")))
    values = re.fullmatch("(.*?)".join(map(re.escape, message.text.split("{}"))), seen)
    assert values is not None
    longest = _literals(message)[0].split(" ")
    beginnings = [" ".join(longest[:count]) for count in (5, 8, 12, len(longest))]
    for words in [*beginnings, message.text]:
        try:
            if words and SEPARATOR not in words and find(kind, words).text == message.text:
                return SEPARATOR.join([f"{kind}: {words}", *(value or NOTHING for value in values.groups())])
        except PageError:
            continue
    raise PageError(f"no words tell this message from others: {kind}: {message.text}")


def adopt() -> str:
    """page.md from the messages, as they were seen, of docs/errors.md."""

    def named(match: re.Match[str]) -> str:
        lines = [line.split(": ", 1) for line in match[1].splitlines() if line]
        return "```messages\n" + "".join(f"{name(kind, seen)}\n" for kind, seen in lines) + "```"

    return SHOWN.sub(named, PAGE.read_text(encoding="utf-8").replace(f"\n{MADE}", ""))
