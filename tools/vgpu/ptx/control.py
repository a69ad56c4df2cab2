"""Jumps, calls, barriers, and what passes between the lanes of a warp."""

import re

from .function import Instruction, Translator, translates
from .operands import identifier
from .types import integer, is_signed


@translates("bra")
def branch(to: Translator, ins: Instruction) -> None:
    """Jumps to a label."""
    to.emit(f"goto {to.label(ins.operands[0])};")


@translates("ret", "exit")
def leave(to: Translator, ins: Instruction) -> None:
    """Ends the function."""
    to.emit("return;")


@translates("trap")
def trap(to: Translator, ins: Instruction) -> None:
    """Ends the launch with an error."""
    to.emit(f"thread.runtime->trap(thread, {ins.line});")


@translates("call")
def call(to: Translator, ins: Instruction) -> None:
    """Calls a function of the module; results and arguments are bytes on the stack."""
    found = re.match(r"(?:\(([^)]*)\)\s*,\s*)?([\w$]+)\s*(?:,\s*\(([^)]*)\))?", ins.operands[0])
    if found is None:
        raise NotImplementedError("indirect call")
    names = [name.strip() for part in (found[1], found[3]) for name in (part or "").split(",") if name.strip()]
    to.calls.add(found[2])
    arguments = "".join(f", {to.look_up(name).variable}" for name in names)  # type: ignore[union-attr]
    to.emit(f"function_{identifier(found[2])}(thread{arguments});")


@translates("bar", "barrier")
def barrier(to: Translator, ins: Instruction) -> None:
    """Waits for the block or the warp."""
    if len(ins.operands) != 1:
        raise NotImplementedError("a barrier of some threads")
    wait = "sync_warp" if "warp" in ins else "barrier"
    to.emit(f"thread.runtime->{wait}(thread, {to.value(ins.operands[0], 'u32')}, {ins.line});")


@translates("membar", "fence", "nop", "prefetch", "prefetchu", "discard")
def nothing(to: Translator, ins: Instruction) -> None:
    """Threads see each other's writes at once, and there are no caches."""


@translates("createpolicy")
def create_policy(to: Translator, ins: Instruction) -> None:
    """A hint for a cache."""
    to.assign(ins.operands[0], "0", "b64")


@translates("shfl")
def shuffle(to: Translator, ins: Instruction) -> None:
    """The value of another lane, and whether there is that lane."""
    mode = {"up": "kUp", "down": "kDown", "bfly": "kButterfly", "idx": "kIndex"}[ins.modifiers[1]]
    value, lane, clamp, mask = (to.value(operand, "u32") for operand in ins.operands[1:5])
    call = f"thread.runtime->shuffle(thread, ShuffleMode::{mode}, {mask}, {value}, {lane}, {clamp}, {ins.line})"
    to.emit(f"{{ uint64_t got = {call};")
    targets = ins.operands[0].split("|")
    to.assign(targets[0], "got", "b32")
    if len(targets) > 1:
        to.assign(targets[1], "(got >> 32) & 1", "pred")
    to.emit("}")


@translates("redux")
def reduce(to: Translator, ins: Instruction) -> None:
    """A sum, minimum or other reduction over lanes."""
    kind = integer("s32" if is_signed(ins.kind) else "u32")
    symbol = {"add": "+", "and": "&", "or": "|", "xor": "^"}.get(ins.modifiers[1])
    if symbol:
        joined = f"({kind})((uint32_t)a {symbol} (uint32_t)b)"
    else:
        joined = f"(a {({'min': '<', 'max': '>'})[ins.modifiers[1]]} b ? a : b)"
    value, mask = to.value(ins.operands[1], ins.kind), to.value(ins.operands[2], "u32")
    join = f"[]({kind} a, {kind} b) {{ return {joined}; }}"
    to.assign(ins.operands[0], f"reduce_warp<{kind}>(thread, {mask}, (uint32_t){value}, {ins.line}, {join})", ins.kind)


@translates("ldmatrix")
def load_matrix(to: Translator, ins: Instruction) -> None:
    """Matrices of 8 x 8 elements from shared memory."""
    count = int(ins.one_of(("x1", "x2", "x4"))[1])  # type: ignore[index]
    base, offset = to.address(ins.operands[1])
    address = f"(uint32_t)({to.value(base, 'u64')} + {offset}ll)"
    transposed = "true" if "trans" in ins else "false"
    to.emit(f"{{ uint32_t got[4]; load_matrices(thread, {address}, {count}, {transposed}, {ins.line}, got);")
    for i, target in enumerate(to.parts(ins.operands[0])):
        to.assign(target, f"got[{i}]", "b32")
    to.emit("}")
