"""Bits and comparisons."""

from .function import Instruction, Translator, translates
from .types import FLOATS, HALVES, bits, is_signed, unsigned

COMPARISONS = {
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
    **{"lo": "<", "ls": "<=", "hi": ">", "hs": ">="},
}
JOINED = {"and": "&&", "or": "||", "xor": "!="}


def _compared(to: Translator, ins: Instruction) -> str:
    """The comparison of two operands. A comparison with NaN is false, and true for those that end in u."""
    a, b = (to.value(operand, ins.kind) for operand in ins.operands[1:3])
    is_float = ins.kind in FLOATS or ins.kind in HALVES
    if ins.kind in HALVES:
        widen, _ = HALVES[ins.kind]
        a, b = f"{widen}({a})", f"{widen}({b})"
    either_nan = f"({a} != {a} || {b} != {b})" if is_float else "false"
    comparison = ins.modifiers[0]
    if comparison == "num":
        return f"(!{either_nan})"
    if comparison == "nan":
        return either_nan
    if comparison in COMPARISONS:
        result = f"({a} {COMPARISONS[comparison]} {b})"
        return f"(!{either_nan} && {result})" if is_float and comparison == "ne" else result
    return f"({either_nan} || ({a} {COMPARISONS[comparison.removesuffix('u')]} {b}))"


@translates("setp")
def set_predicate(to: Translator, ins: Instruction) -> None:
    """Compares, into a predicate and its opposite, each joined with another predicate."""
    result = _compared(to, ins)
    opposite = f"(!{result})"
    if operation := next((m for m in ins.modifiers[1:] if m in JOINED), None):
        other = to.value(ins.operands[3], "pred")
        result, opposite = (f"({value} {JOINED[operation]} {other})" for value in (result, opposite))
    targets = ins.operands[0].split("|")
    if len(targets) == 1:
        to.assign(targets[0], result, "pred")
        return
    to.emit(f"{{ bool yes = {result}, no = {opposite};")
    to.assign(targets[0], "yes", "pred")
    to.assign(targets[1], "no", "pred")
    to.emit("}")


@translates("testp")
def test_property(to: Translator, ins: Instruction) -> None:
    """What kind of number a float is."""
    value = to.value(ins.operands[1], ins.kind)
    result = {
        "finite": f"std::isfinite({value})",
        "infinite": f"std::isinf({value})",
        "nan": f"std::isnan({value})",
        "notanumber": f"std::isnan({value})",
        "number": f"!std::isnan({value})",
        "subnormal": f"std::fpclassify({value}) == FP_SUBNORMAL",
        "normal": f"std::isnormal({value})",
    }[ins.modifiers[0]]
    to.assign(ins.operands[0], result, "pred")


@translates("and", "or", "xor")
def combine(to: Translator, ins: Instruction) -> None:
    """Bit by bit, or predicates."""
    a, b = (to.value(operand, ins.kind) for operand in ins.operands[1:])
    symbols = JOINED if ins.kind == "pred" else {"and": "&", "or": "|", "xor": "^"}
    to.assign(ins.operands[0], f"{a} {symbols[ins.op]} {b}", ins.kind)


@translates("not", "cnot")
def invert(to: Translator, ins: Instruction) -> None:
    """The opposite of a predicate, of every bit, or of a whole number."""
    value = to.value(ins.operands[1], ins.kind)
    negated = f"{value} == 0" if ins.op == "cnot" else f"!{value}" if ins.kind == "pred" else f"~{value}"
    to.assign(ins.operands[0], negated, ins.kind)


@translates("lop3")
def look_up_bits(to: Translator, ins: Instruction) -> None:
    """Any function of three bits."""
    a, b, c = (to.value(operand, ins.kind) for operand in ins.operands[1:4])
    to.assign(ins.operands[0], f"lop3({a}, {b}, {c}, {to.value(ins.operands[4], 'u32')})", ins.kind)


@translates("shl", "shr")
def shift(to: Translator, ins: Instruction) -> None:
    """Shifts; one by the width or more leaves zeros, or signs."""
    width, kind = bits(ins.kind), unsigned(ins.kind)
    value, count = to.value(ins.operands[1], ins.kind), to.value(ins.operands[2], "u32")
    if ins.op == "shr" and is_signed(ins.kind):
        result = f"{value} >> ({count} >= {width} ? {width - 1} : {count})"
    else:
        symbol = "<<" if ins.op == "shl" else ">>"
        result = f"{count} >= {width} ? ({kind})0 : ({kind})({value} {symbol} ({count} & {width - 1}))"
    to.assign(ins.operands[0], result, ins.kind)


@translates("shf")
def funnel_shift(to: Translator, ins: Instruction) -> None:
    """Shifts two registers as one, of which a half is kept."""
    low, high, count = (to.value(operand, "u32") for operand in ins.operands[1:4])
    count = f"({count} > 32 ? 32 : {count})" if "clamp" in ins else f"({count} & 31)"
    both = f"(((uint64_t){high} << 32) | {low})"
    result = f"({both} << {count}) >> 32" if ins.modifiers[0] == "l" else f"{both} >> {count}"
    to.assign(ins.operands[0], f"(uint32_t)({result})", "b32")


@translates("prmt")
def permute(to: Translator, ins: Instruction) -> None:
    """Four bytes of eight."""
    if ins.modifiers != ["b32"]:
        raise NotImplementedError("a mode of prmt")
    a, b, selector = (to.value(operand, "u32") for operand in ins.operands[1:4])
    to.assign(ins.operands[0], f"permute_bytes({a}, {b}, {selector})", "b32")


@translates("bfe")
def extract_field(to: Translator, ins: Instruction) -> None:
    """Some bits of a register."""
    kind, sign = unsigned(ins.kind), "true" if is_signed(ins.kind) else "false"
    position, length = (to.value(operand, "u32") for operand in ins.operands[2:4])
    value = f"({kind}){to.value(ins.operands[1], ins.kind)}"
    to.assign(ins.operands[0], f"extract_bits<{kind}>({value}, {position}, {length}, {sign})", ins.kind)


@translates("bfi")
def insert_field(to: Translator, ins: Instruction) -> None:
    """Some bits of a register into another."""
    field, value = (to.value(operand, ins.kind) for operand in ins.operands[1:3])
    position, length = (to.value(operand, "u32") for operand in ins.operands[3:5])
    to.assign(ins.operands[0], f"insert_bits<{unsigned(ins.kind)}>({field}, {value}, {position}, {length})", ins.kind)


@translates("clz", "popc")
def count_bits(to: Translator, ins: Instruction) -> None:
    """Leading zeros, or ones."""
    value = to.value(ins.operands[1], ins.kind)
    if ins.op == "popc":
        result = f"__builtin_popcountll((uint64_t){value})"
    else:
        result = f"{value} ? __builtin_clz{'ll' if ins.kind == 'b64' else ''}({value}) : {bits(ins.kind)}"
    to.assign(ins.operands[0], result, "u32")


@translates("brev")
def reverse(to: Translator, ins: Instruction) -> None:
    """The bits from the other end."""
    if ins.kind != "b32":
        raise NotImplementedError("brev of 64 bits")
    to.assign(ins.operands[0], f"reverse_bits({to.value(ins.operands[1], 'u32')})", "b32")
