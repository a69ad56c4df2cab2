"""Arithmetic on integers, on float32 and float64, and on numbers of 16 bits."""

from .function import Instruction, Translator, translates
from .types import BYTES, FLOATS, HALVES, SIGNED, UNSIGNED, is_signed, unsigned

# Twice as wide as an integer of so many bytes: what the upper half of a product needs.
TWICE = {1: "int16_t", 2: "int32_t", 4: "int64_t", 8: "__int128"}


@translates("add", "sub", "div", "rem", "min", "max", "abs", "neg")
def compute(to: Translator, ins: Instruction) -> None:
    """What integers and floats have."""
    if ins.kind in FLOATS:
        _compute_float(to, ins)
    elif ins.kind in HALVES:
        _compute_half(to, ins)
    else:
        _compute_integer(to, ins)


@translates("mul", "mad")
def multiply(to: Translator, ins: Instruction) -> None:
    """Products, and products plus a number."""
    if ins.kind in FLOATS:
        (_compute_float if ins.op == "mul" else multiply_add)(to, ins)
    elif ins.kind in HALVES:
        _compute_half(to, ins)
    else:
        _multiply_integers(to, ins)


@translates("fma")
def multiply_add(to: Translator, ins: Instruction) -> None:
    """A product plus a number, rounded once."""
    if ins.kind not in FLOATS:
        raise NotImplementedError(f"fma of {ins.kind}")
    a, b, c = (to.value(operand, ins.kind) for operand in ins.operands[1:4])
    _assign_float(to, ins, f"std::fma({a}, {b}, {c})")


@translates("sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", "copysign")
def _compute_float(to: Translator, ins: Instruction) -> None:
    """One operation on float32 or float64. Approximate ones are as exact as the host's."""
    if ins.kind not in FLOATS:
        raise NotImplementedError(f"{ins.op} of {ins.kind}")
    a, b = ([to.value(operand, ins.kind) for operand in ins.operands[1:3]] + [""])[:2]
    if "ftz" in ins:
        a, b = f"flush({a})", b and f"flush({b})"
    kind = FLOATS[ins.kind]
    if ins.op in ("min", "max"):
        result = f"{'least' if ins.op == 'min' else 'greatest'}({a}, {b})"
        if "NaN" in ins:
            result = f"(({a} != {a} || {b} != {b}) ? ({kind})NAN : {result})"
    else:
        result = {
            **{"add": f"{a} + {b}", "sub": f"{a} - {b}", "mul": f"{a} * {b}", "div": f"{a} / {b}"},
            **{"abs": f"std::fabs({a})", "neg": f"-{a}", "copysign": f"std::copysign({b}, {a})"},
            **{"rcp": f"({kind})1 / {a}", "sqrt": f"std::sqrt({a})", "rsqrt": f"({kind})1 / std::sqrt({a})"},
            **{"ex2": f"std::exp2({a})", "lg2": f"std::log2({a})", "tanh": f"std::tanh({a})"},
            **{"sin": f"std::sin({a})", "cos": f"std::cos({a})"},
        }[ins.op]
    _assign_float(to, ins, result)


def _assign_float(to: Translator, ins: Instruction, result: str) -> None:
    """Rounds to nearest, the host's way; saturates and flushes as the instruction asks for."""
    if rounding := ins.one_of(("rz", "rm", "rp")):
        raise NotImplementedError(f"rounding {rounding}")
    kind = FLOATS[ins.kind]
    if "sat" in ins:
        result = f"least(greatest(({kind})({result}), ({kind})0), ({kind})1)"
    if "ftz" in ins:
        result = f"flush(({kind})({result}))"
    to.assign(ins.operands[0], result, ins.kind)


def _compute_half(to: Translator, ins: Instruction) -> None:
    """On numbers of 16 bits: in float32, whose results round to theirs as one operation would."""
    widen, narrow = HALVES[ins.kind]
    raw = [to.value(operand, "u16") for operand in ins.operands[1:]]
    if ins.op in ("neg", "abs"):
        to.assign(ins.operands[0], f"{raw[0]} {'^ 0x8000' if ins.op == 'neg' else '& 0x7fff'}", "b16")
        return
    a, b = (f"{widen}({operand})" for operand in raw)
    result = {
        **{"add": f"{a} + {b}", "sub": f"{a} - {b}", "mul": f"{a} * {b}"},
        **{"min": f"least({a}, {b})", "max": f"greatest({a}, {b})"},
    }[ins.op]
    to.assign(ins.operands[0], f"{narrow}({result})", "b16")


def _compute_integer(to: Translator, ins: Instruction) -> None:
    """On integers; sums wrap around, so they are of unsigned ones. A division by 0 gives ones."""
    if "sat" in ins or "cc" in ins:
        raise NotImplementedError("saturating integers and carries")
    a, b = ([to.value(operand, ins.kind) for operand in ins.operands[1:3]] + [""])[:2]
    kind = unsigned(ins.kind)
    result = {
        **{"add": f"({kind}){a} + ({kind}){b}", "sub": f"({kind}){a} - ({kind}){b}", "neg": f"-({kind}){a}"},
        **{"div": f"{b} ? {a} / {b} : ({kind})-1", "rem": f"{b} ? {a} % {b} : {a}"},
        **{"min": f"{a} < {b} ? {a} : {b}", "max": f"{a} > {b} ? {a} : {b}", "abs": f"{a} < 0 ? -{a} : {a}"},
    }[ins.op]
    to.assign(ins.operands[0], result, ins.kind)


def _multiply_integers(to: Translator, ins: Instruction) -> None:
    """The lower or upper half of a product, or all of it (wide); plus a number for mad."""
    size, sign = BYTES[ins.kind], is_signed(ins.kind)
    names = SIGNED if sign else UNSIGNED
    a, b = (to.value(operand, ins.kind) for operand in ins.operands[1:3])
    kind = ins.kind
    if "wide" in ins:
        kind = f"{'s' if sign else 'u'}{16 * size}"
        result = f"({names[2 * size]}){a} * ({names[2 * size]}){b}"
    elif "hi" in ins:
        wide = TWICE[size] if sign else f"unsigned {TWICE[size]}" if size == 8 else f"u{TWICE[size]}"
        result = f"({names[size]})((({wide}){a} * ({wide}){b}) >> {8 * size})"
    else:  # narrow integers would be promoted to int, whose products overflow
        factor = UNSIGNED[max(size, 4)]
        result = f"({factor}){a} * ({factor}){b}"
    if ins.op == "mad":
        result = f"({unsigned(kind)})({result}) + {to.value(ins.operands[3], f'u{8 * BYTES[kind]}')}"
    to.assign(ins.operands[0], result, kind)
