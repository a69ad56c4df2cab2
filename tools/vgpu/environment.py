"""Everything a command on the virtual GPU needs: a torch with CUDA, a copy of the project, its kernels."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from . import build
from .ptx.compile import translator_key

PROJECT = Path(__file__).resolve().parents[2]
DEFAULT_TORCH = "2.15.0"
# Not needed beside a torch that brings its own Triton, or for the style of the sources alone.
LEFT_OUT = ("torch", "triton", "ruff", "mypy", "clang-format", "mkdocs-material", "mkdocstrings", "latex2mathml")


def _stamp(path: Path) -> tuple[int, int]:
    """Time and size of a file: what tells that it has changed."""
    about = path.stat()
    return about.st_mtime_ns, about.st_size


@dataclass(frozen=True)
class Environment:
    """Folders of one torch under VGPU_HOME.

    Attributes:
        home: Where everything is that is built.
        torch: The version of torch.
        source: The copy of the project in which commands run.
    """

    home: Path
    torch: str
    source: Path

    @staticmethod
    def from_variables() -> Environment:
        """As VGPU_HOME and VGPU_TORCH say."""
        home = Path(os.environ.get("VGPU_HOME") or Path.home() / ".cache" / "vgpu").resolve()
        torch = os.environ.get("VGPU_TORCH") or DEFAULT_TORCH
        return Environment(home, torch, home / f"src-{torch}")

    @property
    def bin(self) -> Path:
        """Programs of the virtual environment."""
        return self.home / f"venv-{self.torch}" / "bin"

    @property
    def libraries(self) -> Path:
        """The stand-in libraries."""
        return self.home / f"device-{self.torch}"

    @property
    def site(self) -> Path:
        """Packages of the virtual environment."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(build.run(self.bin / "python", "-c", code).strip())

    # ---- preparation --------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Does what was not done before: minutes for the first time, seconds after a change."""
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / "lock").open("w") as lock:  # another command may be preparing as well
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.install()
            self.copy_project()
            self.build()

    def install(self) -> None:
        """Installs a torch with CUDA and what the tests need."""
        done = self.bin.parent / ".done"
        if done.exists():
            return
        print(f"vgpu: installing torch {self.torch} with CUDA in {self.bin.parent}, some 5 GB", flush=True)
        build.run(sys.executable, "-m", "venv", self.bin.parent)
        pip = (self.bin / "pip", "install", "--quiet", "--disable-pip-version-check")
        build.run(*pip, f"torch=={self.torch}")
        pinned = (PROJECT / "requirements-dev.txt").read_text().splitlines()
        needed = [line for line in pinned if line.partition("==")[0].partition("[")[0] not in LEFT_OUT]
        build.run(*pip, *(line for line in needed if line and not line.startswith("#")))
        done.touch()

    def copy_project(self) -> None:
        """Copies what git knows and what is new, with its times: ninja builds again only what changed.

        Files that are the same are left alone, as another command may be running in the copy.
        """
        listed = build.run("git", "-C", PROJECT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        wanted = {self.source / name: PROJECT / name for name in filter(None, listed.split("\0"))}
        wanted = {target: path for target, path in wanted.items() if path.exists()}
        # Kernels of Triton are installed as a part of the package; see setup.py.
        kernels, installed = self.source / "triton_kernels", self.source / "sassha_fast" / "triton_kernels"
        inside = {target: path for target, path in wanted.items() if kernels in target.parents}
        wanted |= {installed / target.relative_to(kernels): path for target, path in inside.items()}
        for path in [*self.source.rglob("*")]:
            built = path.name == "_native.so" or {"build", "__pycache__"} & {*path.relative_to(self.source).parts}
            if not (built or path.is_dir() or path in wanted):
                path.unlink()
        for target, path in wanted.items():
            if not (target.exists() and _stamp(target) == _stamp(path)):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)

    def build(self) -> None:
        """Builds the stand-in libraries, the native library of the copy, and its kernels for the virtual GPU."""
        if shutil.which("nvcc") is None:
            raise SystemExit("vgpu: nvcc was not found; the CUDA kernels are compiled to PTX with it (no GPU needed)")
        site = self.site
        build.build_libraries(site, self.libraries)
        variables = {**os.environ, "SASSHA_CUDA": "1", "SASSHA_CUDA_ARCHS": "80"}
        setup = (self.bin / "python", "setup.py", "--quiet", "build_ext", "--inplace")
        self._quietly(*setup, cwd=self.source, env=variables)
        native = self.source / "build" / "native"
        self._quietly(self.bin / "ninja", "-C", native, "_cuda_sim.so")
        cuobjdump = build.find_cuobjdump(site)
        texts = [self._ptx(cuobjdump, path) for path in sorted(native.glob("cuda_*.o"))]
        kernels = build.build_kernels(texts, self.home / "kernels")
        self.index.write_text("".join(f"{name}\t{path}\n" for name, path in kernels.items()))

    @staticmethod
    def _quietly(*command: str | Path, **options: object) -> None:
        """Runs a command, and shows what it says only if it fails."""
        done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        if done.returncode:
            sys.stderr.write(done.stdout.decode())
            raise SystemExit(f"vgpu: {shlex.join(map(str, command))} failed")

    @staticmethod
    def _ptx(cuobjdump: Path, compiled: Path) -> str:
        """The PTX of an object file, kept beside it until it changes."""
        kept = compiled.with_suffix(".ptx")
        if not kept.exists() or kept.stat().st_mtime < compiled.stat().st_mtime:
            kept.write_text(build.read_ptx(cuobjdump, compiled))
        return kept.read_text()

    # ---- running ------------------------------------------------------------------------------------------------

    @property
    def index(self) -> Path:
        """Names and shared objects of the kernels of the copy."""
        return self.source / "build" / "kernels.txt"

    def variables(self) -> dict[str, str]:
        """Environment variables of a command on the virtual GPU."""
        tools = self.source / "tools"
        translate = f"PYTHONPATH={shlex.quote(str(tools))} {shlex.quote(sys.executable)} -m vgpu.ptx.compile"
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.libraries),
            "LD_PRELOAD": f"{self.libraries / 'libcudart.so.13'} {self.libraries / 'libcuda.so.1'}",
            "VGPU_KERNELS": str(self.index),
            "VGPU_TRANSLATE": translate,
            "VGPU_TRANSLATOR_KEY": translator_key(),
            "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR") or str(self.home / f"triton-{self.torch}"),
            "PYTHONPATH": f"{self.source}{os.pathsep}{tools}",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
        }
