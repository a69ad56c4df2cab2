"""Runs ``fuzz.py`` over CPU kernels that were built with AddressSanitizer and UndefinedBehaviorSanitizer.

``make fuzz-sanitized`` builds them. Every instruction set of this machine has its turn. The first access out of bounds,
or the first undefined operation, ends the run with its stack; torch itself is not watched.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

SECONDS = 200  # for each instruction set
HERE = Path(__file__).parent
WIDER = {"AVX512": ["avx2", "avx512"], "AVX2": ["avx2"]}


def runtime(name: str) -> str:
    """A library of the compiler, which the sanitized one expects to be loaded before all others."""
    compiler = os.environ.get("CXX", "g++")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def main() -> int:
    library, *options = sys.argv[1:]
    preloaded = f"{runtime('libasan.so')} {runtime('libubsan.so')} {runtime('libstdc++.so')}"
    # Python ends without giving its memory back, so leaks say nothing.
    watched = {"LD_PRELOAD": preloaded, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    for isa in ["generic", *WIDER.get(torch.backends.cpu.get_cpu_capability(), [])]:
        print(f"{isa}:", flush=True)
        command = [sys.executable, str(HERE / "fuzz.py"), "--library", library, "--backends", "reference,cpu"]
        command += ["--seconds", str(SECONDS), *options]
        done = subprocess.run(command, env={**os.environ, **watched, "SASSHA_CPU_ISA": isa})
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
