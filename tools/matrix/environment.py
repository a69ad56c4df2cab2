"""Environments outside the project: made with uv, which takes packages from one cache, and removed after use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from .cells import Cell

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(os.environ.get("MATRIX_HOME", Path.home() / ".cache" / "sassha_fast-matrix"))
# What tests read beside the package, which comes from the wheel.
COPIED = ("tests", "examples", "bench", "tools", "docs", "csrc", "pyproject.toml", "README.md", "LICENSE", "setup.py")
SIMULATOR = Path("build", "native", "_cuda_sim.so")


def run(*command: object, **options: object) -> str:
    """What a command printed; its output is in the error if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-3000:]
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{said}")
    return str(done.stdout)


def find_python(version: str) -> Path:
    """An interpreter of this version: on PATH, or of pyenv."""
    found = shutil.which(f"python{version}")
    ours = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for path in [*ours, *([Path(found)] if found else [])]:
        return path
    raise RuntimeError(f"matrix: Python {version} was not found on PATH or in ~/.pyenv; install it, or use --cells")


def find_uv() -> str:
    """The command uv, which is installed below HOME if PATH has none."""
    folder = HOME / "uv"
    found = shutil.which("uv") or shutil.which("uv", path=str(folder / "bin"))
    if found is None:
        run(sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, "uv")
        found = str(folder / "bin" / "uv")
    return found


def build_wheel() -> Path:
    """The wheel that all environments get. It is built once; remove it, or HOME, to have it built again."""
    folder = HOME / "wheel"
    if not any(folder.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
        # Kernels for one GPU are enough where none runs them.
        variables = {"SASSHA_CUDA_ARCHS": "80", **os.environ}
        run(*command, "--wheel-dir", folder, ROOT, env=variables)
    (wheel,) = folder.glob("*.whl")
    return wheel


class Environment:
    """A virtual environment with torch, the wheel and what tests need, and a copy of the tests beside it."""

    def __init__(self, cell: Cell) -> None:
        """Names its folders; ``make`` fills them."""
        self.cell = cell
        self.folder = HOME / "environment"
        self.project = HOME / "project"
        self.python = self.folder / "bin" / "python"
        self.variables = {**os.environ, "UV_CACHE_DIR": str(HOME / "cache"), "VIRTUAL_ENV": str(self.folder)}

    def make(self, wheel: Path) -> None:
        """Installs everything: some 5 GB, most of which is torch's CUDA libraries."""
        self.remove()
        uv = find_uv()
        run(uv, "venv", "--quiet", "--python", find_python(self.cell.python), self.folder, env=self.variables)
        needed = [f"torch=={self.cell.torch}", wheel, *self.cell.needs]
        run(uv, "pip", "install", "--quiet", *needed, env=self.variables)

    def copy_project(self) -> None:
        """Copies what git knows of the tests; the package itself stays behind, so that the wheel is what is tested."""
        listed = run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", *COPIED)
        for name in [*filter(None, listed.split("\0")), str(SIMULATOR)]:
            if (ROOT / name).exists():
                (self.project / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.project / name)

    def remove(self) -> None:
        """Removes environment and copy."""
        for folder in (self.folder, self.project):
            shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def forget_packages() -> None:
        """Removes what uv keeps of packages; the next torch brings other CUDA libraries."""
        shutil.rmtree(HOME / "cache", ignore_errors=True)
