"""The wheel and the source archive: what is inside, and that they work beside nothing but torch."""

import email
import os
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

import sassha_fast

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "SASSHA_CUDA_ARCHS": "80", "OMP_NUM_THREADS": "1"}

TOUR = textwrap.dedent(
    """
    import sys, torch
    from sassha_fast import MSASSHA, SASSHA
    import sassha_fast

    assert sassha_fast.__file__.startswith(sys.prefix), sassha_fast.__file__
    print(sassha_fast.backends.report())
    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
    for method in (SASSHA, MSASSHA):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        opt = method(model.parameters(), lr=0.2, rho=0.05, backend="cpu")

        def closure():
            opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        losses = [float(opt.step(closure).detach()) for _ in range(30)]
        assert losses[-1] < 0.7 * losses[0], losses
    print("tour: ok")
    """
)


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **{"env": ENVIRONMENT, **options})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


def files_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names = files_of(wheel)
    assert {name.split("/")[0].removesuffix(f"-{sassha_fast.__version__}.dist-info") for name in names} == {
        "sassha_fast"
    }
    modules = {f"sassha_fast/{path.name}" for path in (ROOT / "sassha_fast").glob("*.py")}
    kernels = {f"sassha_fast/triton_kernels/{path.name}" for path in (ROOT / "triton_kernels").glob("*.py")}
    assert modules | kernels | {"sassha_fast/_native.so", "sassha_fast/py.typed"} <= set(names)
    assert not [name for name in names if "test" in name or "bench" in name]


def test_the_wheel_says_what_it_is(wheel):
    assert wheel.name.startswith(f"sassha_fast-{sassha_fast.__version__}-py3-none-")
    with zipfile.ZipFile(wheel) as archive:
        folder = f"sassha_fast-{sassha_fast.__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        assert "Apache License" in archive.read(f"{folder}/licenses/LICENSE").decode()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    needed = [value for value in metadata.get_all("Requires-Dist") if "extra ==" not in value]
    assert needed == ["torch>=2.10"]


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment that has the wheel, and torch beside it."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    interpreter = folder / "bin" / "python"
    site = Path(run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # torch is taken from here: files that add paths, such as that of an editable install, do nothing from there.
    (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    target = ("--target", site, "--no-deps", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "install", "--quiet", *target, wheel)
    return interpreter


def test_the_wheel_works_in_an_empty_environment_beside_torch(python, tmp_path):
    assert "tour: ok" in run(python, "-c", TOUR, cwd=tmp_path)


def test_import_takes_less_than_50_milliseconds_beyond_torch(python, tmp_path):
    code = "import time, torch; t = time.process_time(); import sassha_fast; print(time.process_time() - t)"
    times = [float(run(python, "-c", code, cwd=tmp_path)) for _ in range(3)]
    assert min(times) < 0.05


def test_import_starts_no_process(python, tmp_path):
    code = "import torch, subprocess, os; subprocess.Popen = os.system = os.posix_spawn = None; import sassha_fast"
    run(python, "-c", code, cwd=tmp_path)


def test_the_source_archive_has_what_the_wheel_is_built_from(tmp_path):
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path, cwd=ROOT)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = [
        *(ROOT / "csrc").rglob("*.*"),
        *(ROOT / "triton_kernels").glob("*.py"),
        *(ROOT / "sassha_fast").glob("*.py"),
    ]
    assert {str(source.relative_to(ROOT)) for source in sources} <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "sassha_fast/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests", "bench")) or name.endswith(".so")]


@pytest.mark.slow
def test_the_source_archive_builds(tmp_path):
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path, cwd=ROOT)
    (path,) = tmp_path.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-build-isolation")
    run(*pip, "--no-deps", "--wheel-dir", tmp_path, path, env={**ENVIRONMENT, "SASSHA_CUDA": "0"}, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert "sassha_fast/_native.so" in files_of(wheel)
