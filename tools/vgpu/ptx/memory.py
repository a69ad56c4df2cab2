"""Loads, stores and moves."""

from .function import Instruction, Translator, translates
from .operands import identifier
from .types import BYTES, bits, integer, is_signed, unsigned, untyped

SPACES = ("param", "global", "shared", "local", "const")


def _bytes_at(to: Translator, ins: Instruction, operand: str, size: int, access: str) -> str:
    """Code that gives the place of an access in memory of the host, by its state space."""
    base, offset = to.address(operand)
    space = ins.one_of(SPACES)
    if space == "param":
        return _parameter(to, base, offset)
    address = f"{to.value(base, 'u64')} + {offset}ll"
    if space == "global":
        return f"global(thread, {address}, {size}, Access::{access}, {ins.line}, cache)"
    if space == "shared":
        return f"shared(thread, {address}, {size}, Access::{access}, {ins.line})"
    if space in ("local", "const"):
        return f"(uint8_t*)({address})"
    raise NotImplementedError("a generic address")


def _parameter(to: Translator, name: str, offset: int) -> str:
    """Parameters of the kernel are one block, those of a function are passed one by one."""
    if found := to.look_up(name):
        return f"{found.variable} + {offset}"
    if name in to.offsets and to.function.is_entry:
        return f"(uint8_t*)params + {to.offsets[name] + offset}"
    if name in to.offsets:
        return f"(uint8_t*)argument_{identifier(name)} + {offset}"
    if name in to.function.results:
        return f"(uint8_t*)result_{identifier(name)} + {offset}"
    return f"(uint8_t*)params + {to.value(name, 'u64')} + {offset}"


def _access(to: Translator, ins: Instruction, address: str, data: str, access: str) -> tuple[str, list[str]]:
    """Emits the address of an access; returns its pointer and the registers that are loaded or stored."""
    width = int((ins.one_of(("v2", "v4", "v8")) or "v1")[1])
    registers = to.parts(data) if data.startswith("{") else [data]
    if len(registers) != width:
        raise NotImplementedError(f"{len(registers)} registers for a vector of {width}")
    pointer = to.new_pointer()
    place = _bytes_at(to, ins, address, BYTES[ins.kind] * width, access)
    to.emit(f"{{ static Range cache; {pointer} = {place}; }}")
    return pointer, registers


@translates("ld", "ldu")
def load(to: Translator, ins: Instruction) -> None:
    """Loads one register or a vector of them."""
    pointer, registers = _access(to, ins, ins.operands[1], ins.operands[0], "kLoad")
    value = integer(ins.kind)
    kind = ins.kind if is_signed(ins.kind) else untyped(ins.kind)
    for i, register in enumerate(registers):
        to.emit(f"{{ {value} got = get<{value}>({pointer} + {i * BYTES[ins.kind]});")
        to.assign(register, "got", kind)
        to.emit("}")


@translates("st")
def store(to: Translator, ins: Instruction) -> None:
    """Stores one register or a vector of them."""
    pointer, registers = _access(to, ins, ins.operands[0], ins.operands[1], "kStore")
    for i, register in enumerate(registers):
        to.emit(f"put<{unsigned(ins.kind)}>({pointer} + {i * BYTES[ins.kind]}, {to.raw(register, ins.kind)});")


@translates("mov")
def move(to: Translator, ins: Instruction) -> None:
    """Copies a register, takes one apart, or puts one together."""
    target, source = ins.operands
    if target.startswith("{"):
        parts = to.parts(target)
        width = bits(ins.kind) // len(parts)
        to.emit(f"{{ {unsigned(ins.kind)} whole = {to.raw(source, ins.kind)};")
        for i, part in enumerate(parts):
            to.assign(part, f"whole >> {width * i}", f"u{width}")
        to.emit("}")
    elif source.startswith("{"):
        parts = to.parts(source)
        width = bits(ins.kind) // len(parts)
        shifted = [
            f"(({unsigned(ins.kind)}){to.value(part, f'u{width}')} << {width * i})" for i, part in enumerate(parts)
        ]
        to.assign(target, " | ".join(shifted), f"b{bits(ins.kind)}")
    elif ins.kind == "pred":
        to.assign(target, to.value(source, "pred"), "pred")
    else:
        to.assign(target, to.raw(source, ins.kind), untyped(ins.kind))


@translates("cvta")
def convert_address(to: Translator, ins: Instruction) -> None:
    """A generic address is the same number: every access names its state space."""
    to.assign(ins.operands[0], to.value(ins.operands[1], ins.kind), ins.kind)


@translates("selp")
def select(to: Translator, ins: Instruction) -> None:
    """One of two values."""
    yes, no = (to.raw(operand, ins.kind) for operand in ins.operands[1:3])
    to.assign(ins.operands[0], f"{to.value(ins.operands[3], 'pred')} ? {yes} : {no}", f"b{bits(ins.kind)}")
