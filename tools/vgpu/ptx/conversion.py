"""Conversions between types."""

from .function import Instruction, Translator, translates
from .types import FLOATS, HALVES, integer

TO_WHOLE = {"rni": "std::nearbyint", "rzi": "std::trunc", "rmi": "std::floor", "rpi": "std::ceil"}
ROUNDINGS = ("rn", "rz", "rm", "rp", "rna", *TO_WHOLE)


@translates("cvt")
def convert(to: Translator, ins: Instruction) -> None:
    """From the last type of its name to the one before."""
    target, source = ins.modifiers[-2:]
    rounding = ins.one_of(ROUNDINGS)
    if rounding not in (None, "rn", *TO_WHOLE):
        raise NotImplementedError(f"rounding {rounding}")
    if target in ("bf16x2", "f16x2"):
        _convert_pair(to, ins, target.removesuffix("x2"))
        return
    value = to.value(ins.operands[1], "u16" if source in HALVES else source)
    if source in HALVES:
        value = f"{HALVES[source][0]}({value})"
    if "ftz" in ins and source == "f32":
        value = f"flush({value})"
    from_float, to_float = (kind in FLOATS or kind in HALVES for kind in (source, target))
    if from_float and not to_float:
        result = f"to_int<{integer(target)}>({TO_WHOLE[rounding]}({value}))"  # type: ignore[index]
        to.assign(ins.operands[0], result, target)
    elif to_float:
        if rounding in TO_WHOLE:
            value = f"{TO_WHOLE[rounding]}({value})"
        _assign(to, ins, target, source, value)
    else:
        if "sat" in ins:
            raise NotImplementedError("saturating integers")
        to.assign(ins.operands[0], f"({integer(target)})({value})", target)


def _convert_pair(to: Translator, ins: Instruction, half: str) -> None:
    """Two float32 into the halves of a register; the first one becomes the upper half."""
    _, narrow = HALVES[half]
    upper, lower = (f"{narrow}({to.value(operand, 'f32')})" for operand in ins.operands[1:3])
    to.assign(ins.operands[0], f"((uint32_t){upper} << 16) | {lower}", "b32")


def _assign(to: Translator, ins: Instruction, target: str, source: str, value: str) -> None:
    """Rounds a number to a float type."""
    if "sat" in ins:
        wide = FLOATS.get(source, "float")
        value = f"least(greatest(({wide}){value}, ({wide})0), ({wide})1)"
    if target in HALVES:
        if source == "f64":
            raise NotImplementedError("float64 to 16 bits, which would be rounded twice")
        to.assign(ins.operands[0], f"{HALVES[target][1]}((float)({value}))", "b16")
    else:
        to.assign(ins.operands[0], f"({FLOATS[target]})({value})", target)
