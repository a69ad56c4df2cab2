"""Types of PTX in C++."""

BYTES = {
    **dict.fromkeys(("pred", "b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
}
UNSIGNED = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t"}
SIGNED = {1: "int8_t", 2: "int16_t", 4: "int32_t", 8: "int64_t"}
FLOATS = {"f32": "float", "f64": "double"}
# Numbers of 16 bits are computed with in float32: how they are widened and rounded.
HALVES = {"f16": ("from_f16", "to_f16"), "bf16": ("from_bf16", "to_bf16")}


def is_signed(kind: str) -> bool:
    """Whether it is a signed integer."""
    return kind.startswith("s")


def integer(kind: str) -> str:
    """The C++ integer of a type: signed if it is, and as wide as it is."""
    return (SIGNED if is_signed(kind) else UNSIGNED)[BYTES[kind]]


def unsigned(kind: str) -> str:
    """The C++ integer that holds the bits of a type."""
    return UNSIGNED[BYTES[kind]]


def bits(kind: str) -> int:
    """How many bits a type has."""
    return 8 * BYTES[kind]


def untyped(kind: str) -> str:
    """The PTX type that is nothing but the bits of another: u32 for f32."""
    return f"u{bits(kind)}"
