"""What the names in a function stand for: registers, variables, parameters, labels, in nested blocks."""

from __future__ import annotations

import re
from typing import NamedTuple

from .module import Function, Module, SharedVariable, Statement
from .types import FLOATS, integer, unsigned, untyped

SPECIAL = {
    **{
        f"%{name}.{axis}": f"thread.{name}[{i}]"
        for name in ("tid", "ntid", "ctaid", "nctaid")
        for i, axis in enumerate("xyz")
    },
    "%laneid": "thread.lane",
    "%warpid": "thread.warp",
    "WARP_SZ": "32u",
    "%clock": "0ull",  # there is no time here
    "%clock64": "0ull",
    "%globaltimer": "0ull",
}


class Name(NamedTuple):
    """What is declared under a name: its C++ variable, and the type of a register."""

    is_register: bool
    variable: str
    kind: str


def identifier(name: str) -> str:
    """A name of PTX as one of C++."""
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


class Operands:
    """Scopes of one function, and its operands as C++ expressions.

    Attributes:
        declarations: C++ declarations of all variables. They stand at the beginning, as jumps must not cross them.
        code: C++ statements so far.
        shared: Shared variables that the function uses.
    """

    def __init__(self, module: Module, function: Function) -> None:
        """Begins a function, with its labels known."""
        self.module, self.function = module, function
        self.declarations: list[str] = []
        self.code: list[str] = []
        self.shared: dict[str, SharedVariable] = {}
        self.offsets = {parameter.name: parameter.offset for parameter in function.parameters}
        self._scopes: list[dict[str, Name]] = [{}]
        self._families: list[dict[str, tuple[str, str]]] = [{}]  # %r<10>: the prefix of its variables, and its type
        self._declared: set[str] = set()
        self._numbers = 0
        self._blocks = [0]  # numbers of the blocks around the statement at hand
        self._parents: dict[int, int | None] = {0: None}
        self._labels = self._find_labels(function.statements)

    def emit(self, code: str) -> None:
        """Adds a statement of C++."""
        self.code.append(code)

    # ---- blocks and labels --------------------------------------------------------------------------------------

    def _find_labels(self, statements: list[Statement]) -> dict[tuple[int, str], str]:
        """Labels by their block: a jump may come before its label."""
        labels, blocks, number = {}, [0], 0
        for statement in statements:
            if statement.kind == "open":
                number += 1
                self._parents[number] = blocks[-1]
                blocks.append(number)
            elif statement.kind == "close":
                blocks.pop()
            elif statement.kind == "label":
                labels[blocks[-1], statement.text] = f"label{blocks[-1]}_{identifier(statement.text)}"
        self._opened = 0
        return labels

    def open(self) -> None:
        """Enters a block."""
        self._opened += 1
        self._blocks.append(self._opened)
        self._scopes.append({})
        self._families.append({})

    def close(self) -> None:
        """Leaves a block."""
        self._blocks.pop()
        self._scopes.pop()
        self._families.pop()

    def label(self, name: str) -> str:
        """The C++ label of a name, from this block outwards."""
        block: int | None = self._blocks[-1]
        while block is not None:
            if (block, name) in self._labels:
                return self._labels[block, name]
            block = self._parents[block]
        raise KeyError(f"no label {name}")

    # ---- declarations -------------------------------------------------------------------------------------------

    def declare_registers(self, kind: str, names: str) -> None:
        """``.reg``: single names, and families of numbered ones."""
        for name in map(str.strip, names.split(",")):
            self._numbers += 1
            family = re.fullmatch(r"(.*?)<(\d+)>", name)
            prefix = f"r{self._numbers}_{identifier(family[1] if family else name)}"
            if family:
                self._families[-1][family[1]] = (prefix, kind)
            else:
                self._declare(prefix, kind)
                self._scopes[-1][name] = Name(True, prefix, kind)

    def declare_bytes(self, name: str, size: int) -> None:
        """``.local`` and ``.param`` variables of a body: bytes on the stack, which nobody has written yet."""
        self._numbers += 1
        variable = f"bytes{self._numbers}"
        self.declarations.append(f"alignas(16) uint8_t {variable}[{max(size, 16)}];")
        self.declarations.append(f"memset({variable}, 0xDB, sizeof {variable});")
        self._scopes[-1][name] = Name(False, variable, "b8")

    def _declare(self, variable: str, kind: str) -> None:
        if variable in self._declared:
            return
        self._declared.add(variable)
        if kind == "pred":
            self.declarations.append(f"bool {variable} = false;")
        else:  # a register that nobody has written holds rubbish that is easy to recognise
            kind = unsigned(kind)
            self.declarations.append(f"{kind} {variable} = ({kind})0xDEADBEEFDEADBEEFull;")

    def look_up(self, name: str) -> Name | None:
        """What a name stands for, from this block outwards."""
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        numbered = re.fullmatch(r"(.*?)(\d+)", name)
        for families in reversed(self._families) if numbered else ():
            if numbered[1] in families:
                prefix, kind = families[numbered[1]]
                variable = prefix + numbered[2]
                self._declare(variable, kind)
                return Name(True, variable, kind)
        return None

    # ---- operands -----------------------------------------------------------------------------------------------

    def value(self, operand: str, kind: str) -> str:
        """An operand as a C++ expression of a type; 16-bit floats stay bits."""
        operand = operand.strip()
        negated, operand = operand.startswith("!"), operand.removeprefix("!")
        raw = self._raw(operand)
        if kind == "pred":
            return f"({'!' if negated else ''}({raw}))"
        if kind in FLOATS:
            return f"{kind}(({unsigned(kind)})({raw}))"
        return f"(({integer(kind)})({raw}))"

    def raw(self, operand: str, kind: str) -> str:
        """The bits of an operand."""
        return self.value(operand, kind if kind == "pred" else untyped(kind))

    def _raw(self, operand: str) -> str:
        if operand in SPECIAL:
            return f"(uint64_t){SPECIAL[operand]}"
        if operand in ("true", "false"):
            return operand
        if found := re.fullmatch(r"0[fFdD]([0-9a-fA-F]{8}|[0-9a-fA-F]{16})", operand):
            return f"0x{found[1]}ull"
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", operand):
            number = int(operand.rstrip("U"), 0)
            return f"(uint64_t)({number}ll)" if abs(number) < 1 << 63 else f"({number}ull)"
        return self._variable(operand)

    def _variable(self, name: str) -> str:
        found = self.look_up(name)
        if found is not None:
            return found.variable if found.is_register else f"(uint64_t){found.variable}"
        if name in self.shared or name in self.module.shared:
            self.shared.setdefault(name, self.module.shared.get(name))  # type: ignore[arg-type]
            return f"(uint64_t)shared_{identifier(name)}"
        if name in self.offsets:
            return f"{self.offsets[name]}ull"
        if name in self.module.globals:
            return f"(uint64_t)global_{identifier(name)}"
        raise KeyError(f"{name} is not declared")

    def assign(self, target: str, expression: str, kind: str) -> None:
        """Assigns a value of a type to a register, which may be wider than it."""
        if target == "_":
            return
        found = self.look_up(target)
        if found is None:
            raise KeyError(f"{target} is not declared")
        if found.kind == "pred":
            self.emit(f"{found.variable} = ({expression});")
            return
        typed = f"bits(({FLOATS[kind]})({expression}))" if kind in FLOATS else f"({integer(kind)})({expression})"
        self.emit(f"{found.variable} = ({unsigned(found.kind)})({typed});")

    @staticmethod
    def address(operand: str) -> tuple[str, int]:
        """Base and offset of ``[base+offset]``."""
        found = re.fullmatch(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        if found is None:
            raise ValueError(f"not an address: {operand}")
        return found[1], int(found[2] or "0", 0)

    @staticmethod
    def parts(operand: str) -> list[str]:
        """The registers of a vector ``{a, b}``, or the operand itself."""
        return [part.strip() for part in operand.strip("{}").split(",")]
