"""Puts a translated kernel together and compiles it.

``python -m vgpu.ptx.compile file.ptx kernel out.so`` makes the shared object of one kernel.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from . import arithmetic, control, conversion, logic, memory
from .function import Translator
from .module import Module, parse
from .operands import identifier
from .types import unsigned

INSTRUCTIONS = (arithmetic, control, conversion, logic, memory)  # imported, they have registered themselves
HEADERS = Path(__file__).resolve().parents[1] / "device"
# Contraction would round once where PTX rounds twice. Kernels are run a few times: optimizing them further costs more.
COMPILER = [
    *("g++", "-std=c++17", "-O1", "-g0", "-w", "-mfma", "-mf16c", "-ffp-contract=off", "-fno-math-errno"),
    *("-fPIC", "-shared", "-I", str(HEADERS)),
]


@cache
def translator_key() -> str:
    """A name for this version of the translator and of what its kernels include."""
    sources = [*sorted(Path(__file__).parent.glob("*.py")), HEADERS / "kernel_abi.h", HEADERS / "kernel_code.h"]
    return hashlib.sha1(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def translate(module: Module, name: str) -> str:
    """The C++ text of a kernel with all functions that it calls."""
    kernel = Translator(module, module.entries[name])
    texts, translators, waiting, seen = [kernel.translate()], [kernel], list(kernel.calls), set()
    while waiting:
        callee = waiting.pop()
        if callee in seen:
            continue
        seen.add(callee)
        if callee not in module.functions:
            raise NotImplementedError(f"{name} calls {callee}, which the module does not have")
        function = Translator(module, module.functions[callee])
        texts.insert(0, function.translate())
        translators.append(function)
        waiting += function.calls
    offsets, shared_bytes = _place_shared(translators)
    body = "".join(texts)
    begin = '#include "kernel_code.h"\nusing namespace vgpu;\n'
    return begin + offsets + _globals(module, body) + body + _description(kernel, shared_bytes)


def _place_shared(translators: list[Translator]) -> tuple[str, int]:
    """Constants with the offsets of shared variables, and their size. Those the launch sizes share the end."""
    variables = {name: variable for translator in translators for name, variable in translator.shared.items()}
    lines, offset = [], 0
    for name, (alignment, size) in variables.items():
        if size:
            offset = (offset + alignment - 1) // alignment * alignment
            lines.append(f"enum {{ shared_{identifier(name)} = {offset} }};\n")
            offset += size
    offset = (offset + 15) // 16 * 16
    lines += [f"enum {{ shared_{identifier(name)} = {offset} }};\n" for name, v in variables.items() if v.size == 0]
    return "".join(lines), offset


def _globals(module: Module, body: str) -> str:
    """Variables of the module that the kernel uses."""
    used = [(f"global_{identifier(name)}", variable) for name, variable in module.globals.items()]
    return "".join(
        f"static {unsigned(variable.kind)} {name}[{variable.count}] = {{{variable.initial or 0}}};\n"
        for name, variable in used
        if name in body
    )


def _description(kernel: Translator, shared_bytes: int) -> str:
    """What the executor reads of a kernel."""
    function = kernel.function
    offsets = ", ".join(str(parameter.offset) for parameter in function.parameters) or "0"
    sizes = ", ".join(str(parameter.size) for parameter in function.parameters) or "0"
    numbers = f"{function.parameter_bytes}, {shared_bytes}, {len(function.parameters)}, {function.max_threads}"
    return (
        f"static const uint32_t offsets[] = {{{offsets}}}, sizes[] = {{{sizes}}};\n"
        f'extern "C" {{\nEntry vgpu_entry = kernel;\nInfo vgpu_info = {{{numbers}, offsets, sizes}};\n}}\n'
    )


def compile_text(text: str, shared_object: Path) -> None:
    """Compiles C++ into a shared object, which appears when it is whole: others may look for it at the same time."""
    source = shared_object.with_suffix(f".{os.getpid()}.cpp")
    unfinished = shared_object.with_suffix(f".{os.getpid()}.so")
    source.write_text(text)
    try:
        subprocess.run([*COMPILER, str(source), "-o", str(unfinished)], check=True)
        unfinished.replace(shared_object)
    finally:
        source.unlink()


def main() -> None:
    """Translates and compiles one kernel."""
    ptx, name, shared_object = sys.argv[1:]
    compile_text(translate(parse(Path(ptx).read_text()), name), Path(shared_object))


if __name__ == "__main__":
    main()
