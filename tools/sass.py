"""What the machine code of a GPU kernel says about its speed: accesses in the hot loop, registers, occupancy.

Figures are read from the compiled code, not measured.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# ---- machine code -------------------------------------------------------------------------------------------------


def tool(name: str) -> str:
    """A program of the CUDA toolkit, or the one that comes with triton."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which(name, path=str(Path(home) / "bin") if home else None) or shutil.which(name)
    if found is None:
        import triton

        path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
        found = str(path) if path.exists() else None
    if found is None:
        raise FileNotFoundError(f"{name} was not found; install the CUDA toolkit, or triton, which brings it along")
    return found


@dataclass(frozen=True)
class Instruction:
    """One line of SASS."""

    address: int
    predicated: bool
    opcode: str
    operands: str
    target: int | None

    @property
    def registers(self) -> list[int]:
        """Registers that it names, in order; a vector is named by its first."""
        return [int(number) for number in re.findall(r"\bR(\d+)\b", self.operands)]

    @property
    def bytes(self) -> int:
        """Bytes of global memory that a thread moves with it."""
        if not re.match(r"(LDG|STG|LD|ST)\b", self.opcode):
            return 0
        for width, size in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)):
            if width in self.opcode.split("."):
                return size
        return 4


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture."""

    name: str
    arch: int
    registers: int
    shared: int
    stack: int
    code: tuple[Instruction, ...]

    @property
    def spills(self) -> int:
        """Instructions that move registers to and from local memory."""
        return sum(re.match(r"(LDL|STL)\b", i.opcode) is not None for i in self.code)

    @cached_property
    def hot_loop(self) -> list[Instruction]:
        """The natural loop that moves most bytes."""
        return max(natural_loops(self.code), key=lambda loop: sum(i.bytes for i in loop), default=[])

    def accesses(self, opcode: str, size: int) -> int:
        """How often the hot loop loads (``LDG``) or stores (``STG``) vectors of ``size`` bytes."""
        return sum(i.opcode.startswith(opcode) and i.bytes == size for i in self.hot_loop)

    @property
    def bytes(self) -> int:
        """Bytes that a thread moves in one turn of the hot loop."""
        return sum(i.bytes for i in self.hot_loop)

    @property
    def bytes_ahead(self) -> int:
        """Bytes that a thread asks for in one turn of the hot loop before it uses any of them."""
        total, waiting = 0, set[int]()
        for instruction in self.hot_loop:
            loads = instruction.bytes > 0 and instruction.opcode.startswith("LD")
            named = instruction.registers
            if waiting.intersection(named[1:] if loads else named):
                break
            if loads:
                total += instruction.bytes
                waiting.update(range(named[0], named[0] + -(-instruction.bytes // 4)))
        return total

    @property
    def narrow(self) -> tuple[int, ...]:
        """Bytes of every access that is not a vector of 128 bits."""
        return tuple(i.bytes for i in self.hot_loop if i.bytes not in (0, 16))

    @property
    def widest_only(self) -> bool:
        """Whether all of them go in vectors of 128 bits."""
        return not self.narrow


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")


def instructions(text: str) -> tuple[Instruction, ...]:
    """Parses the disassembly of one function."""
    out = []
    for address, predicate, opcode, operands in _LINE.findall(text):
        found = re.search(r"0x([0-9a-f]+)", operands) if opcode.startswith("BRA") else None
        # A branch may have its condition among its operands as well: BRA.U UP0, or BRA.DIV for lanes that have parted.
        conditional = found is not None and (re.search(r"\bU?P\d", operands) or opcode == "BRA.DIV")
        predicated = bool(predicate or conditional)
        target = int(found[1], 16) if found else None
        out.append(Instruction(int(address, 16), predicated, opcode, operands.strip(), target))
    return tuple(out)


def natural_loops(code: tuple[Instruction, ...]) -> list[list[Instruction]]:
    """Loops by their back edges: jumps to a block that every way to them passes through, and which comes first."""
    number = {instruction.address: i for i, instruction in enumerate(code)}
    starts = {0}
    for i, instruction in enumerate(code):
        if instruction.target is not None or instruction.opcode.startswith(("EXIT", "RET", "BRX", "JMP")):
            starts.add(i + 1)
        if instruction.target in number:
            starts.add(number[instruction.target])
    order = sorted(s for s in starts if s < len(code))
    ends = [*order[1:], len(code)]
    block_at = {start: b for b, start in enumerate(order)}
    following: list[set[int]] = []
    for b, end in enumerate(ends):
        last = code[end - 1]
        goes_on = last.predicated or not last.opcode.startswith(("BRA", "EXIT", "RET", "BRX", "JMP"))
        after = {b + 1} if goes_on and b + 1 < len(order) else set()
        if last.target in number:
            after.add(block_at[number[last.target]])
        following.append(after)
    before: list[set[int]] = [set() for _ in order]
    for b, after in enumerate(following):
        for other in after:
            before[other].add(b)
    everything = set(range(len(order)))
    dominators = [{0}] + [set(everything) for _ in order[1:]]
    changed = True
    while changed:
        changed = False
        for b in range(1, len(order)):
            common = set.intersection(*(dominators[p] for p in before[b])) if before[b] else set()
            if common | {b} != dominators[b]:
                dominators[b], changed = common | {b}, True
    loops = []
    for b, after in enumerate(following):
        for head in after & dominators[b]:
            body, todo = {head, b}, [b] if b != head else []
            while todo:
                for p in before[todo.pop()]:
                    if p not in body:
                        body.add(p)
                        todo.append(p)
            turn = sorted(body, key=lambda block, head=head: (block < head, block))  # type: ignore[misc]
            loops.append([i for block in turn for i in code[order[block] : ends[block]]])
    return loops


def read(path: Path, arch: int) -> list[Kernel]:
    """The kernels of an object file or cubin for one architecture."""
    command = [tool("cuobjdump"), "-arch", f"sm_{arch}"]
    usage = subprocess.run([*command, "--dump-resource-usage", str(path)], capture_output=True, text=True, check=True)
    sass = subprocess.run([*command, "-sass", str(path)], capture_output=True, text=True, check=True)
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage.stdout)
    bodies = dict(re.findall(r"Function : (\S+)\n(.*?)(?=Function : |\Z)", sass.stdout, re.DOTALL))
    return [
        Kernel(name, arch, int(registers), int(shared), int(stack), instructions(bodies[name]))
        for name, registers, stack, shared in found
    ]


# ---- occupancy ----------------------------------------------------------------------------------------------------

WARP = 32
REGISTERS = 65536  # of a multiprocessor, handed out to a warp in units of 256
RESERVED = 1024  # bytes of shared memory that the system takes of every block; from sm_90 on tools count them in
MAX_WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
SHARED = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}  # KiB of a multiprocessor


def occupancy(arch: int, registers: int, shared: int, threads: int) -> float:
    """Share of a multiprocessor's warps that are resident, by the limits in NVIDIA's programming guide."""
    warps = -(-threads // WARP)
    per_warp = -(-registers * WARP // 256) * 256
    by_registers = REGISTERS // per_warp // 4 * 4 // warps
    taken = shared + (RESERVED if arch < 90 else 0)
    by_shared = SHARED[arch] * 1024 // max(-(-taken // 128) * 128, RESERVED)
    blocks = min(by_registers, by_shared, MAX_WARPS[arch] // warps, 32)
    return blocks * warps / MAX_WARPS[arch]
