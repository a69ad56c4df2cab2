"""Follows the statements of one function and makes C++ of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .module import SharedVariable
from .operands import Operands, identifier
from .types import BYTES


@dataclass
class Instruction:
    """One instruction: ``ld.global.v2.f32 {%f1, %f2}, [%rd1]`` has op ld, modifiers global, v2 and f32, two operands.

    Attributes:
        op: What it does.
        modifiers: What follows the op, between dots.
        operands: What it does it to, as text.
        line: Its line of the PTX.
    """

    op: str
    modifiers: list[str]
    operands: list[str]
    line: int

    @property
    def kind(self) -> str:
        """The type it works on: its last modifier."""
        return self.modifiers[-1]

    def __contains__(self, modifier: str) -> bool:
        """Whether it has a modifier."""
        return modifier in self.modifiers

    def one_of(self, choices: object) -> str | None:
        """The first of its modifiers that is one of the choices."""
        return next((modifier for modifier in self.modifiers if modifier in choices), None)  # type: ignore[operator]


Translation = Callable[["Translator", Instruction], None]
TRANSLATIONS: dict[str, Translation] = {}


def translates(*ops: str) -> Callable[[Translation], Translation]:
    """Registers what translates instructions of these names."""

    def register(translation: Translation) -> Translation:
        TRANSLATIONS.update(dict.fromkeys(ops, translation))
        return translation

    return register


def split_operands(text: str) -> list[str]:
    """Operands at their commas, except for those in brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


class Translator(Operands):
    """One function on its way to C++.

    Attributes:
        calls: Functions that it calls.
    """

    def translate(self) -> str:
        """The function in C++."""
        self.calls: set[str] = set()
        self._sites = 0
        for statement in self.function.statements:
            if statement.kind == "open":
                self.open()
            elif statement.kind == "close":
                self.close()
            elif statement.kind == "label":
                self.emit(f"{self.label(statement.text)}: ;")
            else:
                try:
                    self._statement(statement.text, statement.line)
                except Exception as error:
                    message = f"{self.function.name}, PTX line {statement.line}: {statement.text}: {error!r}"
                    raise NotImplementedError(message) from error
        body = "\n  ".join([*self.declarations, *self.code])
        return f"static void {self._signature()} {{\n  {body}\n  ;\n}}\n"

    def _signature(self) -> str:
        if self.function.is_entry:
            return "kernel(Thread& thread, const uint8_t* params)"
        results = [f", void* result_{identifier(name)}" for name in self.function.results]
        arguments = [f", void* argument_{identifier(p.name)}" for p in self.function.parameters]
        return f"function_{identifier(self.function.name)}(Thread& thread{''.join(results + arguments)})"

    def _statement(self, text: str, line: int) -> None:
        if text.startswith("."):
            self._directive(text)
            return
        found = re.fullmatch(r"(?:@(!?)([%\w$]+)\s+)?([\w.:]+)\s*(.*)", text)
        if found is None:
            raise NotImplementedError("not an instruction")
        op, *modifiers = filter(None, found[3].split("."))
        if op not in TRANSLATIONS:
            raise NotImplementedError(op)
        begin = len(self.code)
        operands = [found[4]] if op == "call" else split_operands(found[4])
        TRANSLATIONS[op](self, Instruction(op, modifiers, operands, line))
        if found[2]:
            condition = self.value(found[1] + found[2], "pred")
            self.code[begin:] = [f"if ({condition}) {{ {' '.join(self.code[begin:])} }}"]

    def _directive(self, text: str) -> None:
        if found := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text):
            self.declare_registers(found[1], found[2])
            return
        variable = r"\.(local|param|shared)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?"
        if found := re.fullmatch(variable, text):
            size = BYTES[found[3]] * int(found[5] or 1)
            if found[1] == "shared":
                self.shared[found[4]] = SharedVariable(int(found[2] or BYTES[found[3]]), size)
            else:
                self.declare_bytes(found[4], size)
            return
        if not text.startswith(".pragma"):
            raise NotImplementedError("directive")

    def new_pointer(self) -> str:
        """A pointer for one access. It is declared at the beginning, as jumps must not cross a declaration."""
        self._sites += 1
        self.declarations.append(f"uint8_t* at{self._sites} = nullptr;")
        return f"at{self._sites}"
