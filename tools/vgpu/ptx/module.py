"""Reads PTX: the functions of a module, its shared and constant variables, and the statements of a body."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from .types import BYTES


class Parameter(NamedTuple):
    """A parameter of a function and where it lies in the block of all of them."""

    name: str
    offset: int
    size: int


class Statement(NamedTuple):
    """A piece of a body: kind is open, close, label or instruction."""

    kind: str
    text: str
    line: int


class SharedVariable(NamedTuple):
    """A variable in shared memory; of size 0 if the launch decides."""

    alignment: int
    size: int


class GlobalVariable(NamedTuple):
    """A variable of the module in global or constant memory."""

    name: str
    kind: str
    count: int
    initial: str | None


@dataclass
class Function:
    """A function as it stands in the text: an entry, which is a kernel, or one that kernels call."""

    name: str
    is_entry: bool
    parameters: list[Parameter]
    parameter_bytes: int
    results: list[str]
    max_threads: int
    statements: list[Statement]


@dataclass
class Module:
    """The functions and variables of a PTX text."""

    entries: dict[str, Function] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    shared: dict[str, SharedVariable] = field(default_factory=dict)
    globals: dict[str, GlobalVariable] = field(default_factory=dict)


def parse(text: str) -> Module:
    """Reads a module."""
    text = _without_comments(text)
    module, outside, position = Module(), [], 0
    for found in re.finditer(r"\.(entry|func)\b", text):
        parsed = _function(text, found)
        if parsed is None:  # a declaration
            continue
        function, end = parsed
        (module.entries if function.is_entry else module.functions)[function.name] = function
        outside.append(text[position : found.start()])
        position = end + 1
    _read_variables(module, "".join([*outside, text[position:]]))
    return module


def _without_comments(text: str) -> str:
    """The text with comments removed, and every line where it was."""
    text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def _closing(text: str, start: int) -> int:
    """Where the bracket at ``start`` is closed."""
    opening, depth = text[start], 0
    closing = {"(": ")", "{": "}"}[opening]
    for i in range(start, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if depth == 0:
            return i
    raise ValueError(f"{opening} is never closed")


def _function(text: str, keyword: re.Match[str]) -> tuple[Function, int] | None:
    """The function that begins at a keyword and where it ends, or None if it is only declared."""

    def parenthesised(at: int) -> tuple[str, int]:
        while text[at].isspace():
            at += 1
        if text[at] != "(":
            return "", at
        end = _closing(text, at)
        return text[at + 1 : end], end + 1

    results, at = parenthesised(keyword.end())
    name = re.compile(r"\s*([\w$]+)\s*").match(text, at)
    if name is None:
        raise ValueError(f"a function without a name: {text[at : at + 40]!r}")
    parameters, at = parenthesised(name.end())
    begin = at + re.search(r"[{;]", text[at:]).start()  # type: ignore[union-attr]
    if text[begin] == ";":
        return None
    end = _closing(text, begin)
    placed, size = _parameters(parameters)
    first_line = text.count("\n", 0, begin)
    function = Function(
        name=name[1],
        is_entry=keyword[1] == "entry",
        parameters=placed,
        parameter_bytes=size,
        results=[result.name for result in _parameters(results)[0]],
        max_threads=_max_threads(text[at:begin]),
        statements=_statements(text[begin + 1 : end], first_line),
    )
    return function, end


def _parameters(text: str) -> tuple[list[Parameter], int]:
    """Parameters of a list, each aligned as it asks for, and their size together."""
    placed, offset = [], 0
    for part in filter(str.strip, text.split(",")):
        found = re.search(
            r"\.param(?:\s+\.align\s+(\d+))?\s+\.(\w+)(.*?)([\w$]+)(?:\[(\d+)\])?\s*$", part.strip(), re.DOTALL
        )
        if found is None:
            raise ValueError(f"not a parameter: {part!r}")
        alignment, size = int(found[1] or BYTES[found[2]]), BYTES[found[2]] * int(found[5] or 1)
        offset = (offset + alignment - 1) // alignment * alignment
        placed.append(Parameter(found[4], offset, size))
        offset += size
    return placed, offset


def _max_threads(attributes: str) -> int:
    """Launch bounds of a kernel."""
    found = re.search(r"\.(?:reqntid|maxntid)\s+([\d, ]+)", attributes)
    threads = 1
    for size in found[1].split(",") if found else ("1024",):
        threads *= int(size)
    return threads


def _statements(body: str, first_line: int) -> list[Statement]:
    """Cuts a body into blocks, labels and instructions. Debug information is left out."""
    label, debug = re.compile(r"([\w$]+)\s*:(?!:)"), re.compile(r"\.(?:loc|file)\b[^\n;]*")
    found, i, line, counted = [], 0, first_line + 1, 0
    while i < len(body):
        if body[i].isspace():
            i += 1
            continue
        line += body.count("\n", counted, i)
        counted = i
        if body[i] in "{}":
            found.append(Statement("open" if body[i] == "{" else "close", "", line))
            i += 1
        elif match := label.match(body, i):
            found.append(Statement("label", match[1], line))
            i = match.end()
        elif match := debug.match(body, i):
            i = match.end()
        else:
            end = body.index(";", i)
            found.append(Statement("instruction", " ".join(body[i:end].split()), line))
            i = end + 1
    return found


def _read_variables(module: Module, text: str) -> None:
    """Variables outside of functions."""
    name = r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)"
    for found in re.finditer(rf"\.shared\s+{name}(\[(\d*)\])?", text):
        count = int(found[5] or 0) if found[4] else 1
        module.shared[found[3]] = SharedVariable(int(found[1] or BYTES[found[2]]), BYTES[found[2]] * count)
    for found in re.finditer(rf"\.(?:global|const)\s+{name}(?:\[(\d*)\])?\s*(?:=\s*\{{([^}}]*)\}})?", text):
        module.globals[found[3]] = GlobalVariable(found[3], found[2], int(found[4] or 1), found[5])
