"""Messages of the sources: what is raised and warned of, and why backends do not run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools.document import ROOT

# Raised for nobody who uses the library as documented.
INTERNAL = {
    ("log_file.py", "ValueError", ""): "caught where it is called, and raised again with a message",
    ("reference.py", "ValueError", "stochastic_round: dtype is {}, expected torch.bfloat16 or torch.float16"): (
        "only for those who call functions of the reference by themselves"
    ),
    ("reference.py", "ValueError", "ascend: a {} parameter needs noise for stochastic rounding"): (
        "only for those who call functions of the reference by themselves"
    ),
}
REASON = "reason"  # why a backend does not run: part of a message


@dataclass(frozen=True)
class Message:
    """A message of the sources; placeholders are ``{}``."""

    file: str
    line: int
    kind: str
    text: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from others, wherever its module moves its lines."""
        return self.file, self.kind, self.text

    def fits(self, kind: str, text: str) -> bool:
        """Whether a message that somebody saw may be this one."""
        pattern = ".*?".join(map(re.escape, self.text.split("{}")))
        return kind == self.kind and re.fullmatch(pattern, text) is not None


def template(node: ast.expr) -> str | None:
    """A string constant or f-string, with ``{}`` for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value.replace("{}", "") if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def messages_of(path: Path) -> Iterator[Message]:
    """What a module raises and warns of, and the reasons that it gives for backends."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    explaining = [
        function
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and (function.name.endswith("_why_not") or (path.name, function.name) == ("library.py", "load"))
    ]
    for function in explaining if path.name in ("backends.py", "library.py") else ():
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                ends = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
                for text in filter(None, map(template, ends)):
                    yield Message(path.name, node.lineno, REASON, text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            call = node.exc if isinstance(node.exc, ast.Call) else None
            kind = ast.unparse(call.func if call is not None else node.exc)
            text = template(call.args[0]) if call is not None and call.args else ""
            assert text is not None, f"{path.name}:{node.lineno}: the message is no string; teach this test to read it"
            yield Message(path.name, node.lineno, kind, text)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
            text = template(node.args[0])
            assert text is not None, f"{path.name}:{node.lineno}: the warning is no string; teach this test to read it"
            category = ast.unparse(node.args[1]) if len(node.args) > 1 else "UserWarning"
            yield Message(path.name, node.lineno, category, text)


@cache
def messages() -> tuple[Message, ...]:
    """All messages of the package that users may see."""
    found = [m for path in sorted((ROOT / "sassha_fast").rglob("*.py")) for m in messages_of(path)]
    return tuple(m for m in found if m.key not in INTERNAL)
