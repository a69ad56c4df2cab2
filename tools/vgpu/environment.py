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
        """Copies what git knows and what is new, with its times: ninja builds again only what changed."""
        self.source.mkdir(parents=True, exist_ok=True)
        for path in self.source.iterdir():
            if path.name != "build":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        listed = build.run("git", "-C", PROJECT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in filter(None, listed.split("\0")):
            if (PROJECT / name).exists():
                (self.source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(PROJECT / name, self.source / name)

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
        shutil.copytree(
            self.source / "triton_kernels", self.source / "sassha_fast" / "triton_kernels", dirs_exist_ok=True
        )
        self._link_to_stand_in(site, native)
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

    def _link_to_stand_in(self, site: Path, native: Path) -> None:
        """Links the native library once more: the wheel has a cudart inside, which would ask for a real driver."""
        objects = [path for path in native.glob("*.o") if not path.name.startswith(("sim_", "watched_", "careful_"))]
        torch = ("-Wl,--no-as-needed", f"-L{site / 'torch' / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10")
        target = self.source / "sassha_fast" / "_native.so"
        build.run("g++", "-shared", "-o", target, *objects, *torch, f"-L{self.libraries}", "-l:libcudart.so.13")

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
