"""The wheel and the source archive: what is inside, and that they work beside nothing but torch."""

import email
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from textwrap import indent

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import DOCS, ROOT, blocks

import sassha_fast

pytestmark = pytest.mark.product
ENVIRONMENT = {**os.environ, "SASSHA_CUDA_ARCHS": "80", "OMP_NUM_THREADS": "1"}

TOUR = [block.code for block in blocks(DOCS / "tour.md")]
(MEASURES,) = [code for code in TOUR if "sassha_fast.sharpness" in code]  # needs an extra


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
    assert not [name for name in names if "test" in name or "bench" in name or "tools" in name]


def test_the_wheel_says_what_it_is(wheel):
    assert wheel.name.startswith(f"sassha_fast-{sassha_fast.__version__}-py3-none-")
    with zipfile.ZipFile(wheel) as archive:
        folder = f"sassha_fast-{sassha_fast.__version__}.dist-info"
        about = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        assert "Apache License" in archive.read(f"{folder}/licenses/LICENSE").decode()
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in about.get_all("Classifier")
    assert about.get_payload().startswith("# sassha_fast")  # the README
    assert [value for value in about.get_all("Requires-Dist") if "extra ==" not in value] == ["torch>=2.10"]


def needed(*names, found=()):
    """Names of installed distributions, and of all that these need."""
    found = set(found)
    for name in set(names) - found:
        found |= {name}
        for line in metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                found = needed(canonicalize_name(requirement.name), found=found)
    return found


def lend(names, site):
    """Makes distributions of this environment part of another one, and nothing beside them."""
    for name in names:
        files = metadata.distribution(name).files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(sysconfig.get_path("purelib")) / top)


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """The packages of an environment that has torch, what torch needs, and the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder)
    site = Path(run(folder / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    lend(needed("torch"), site)
    # Whatever the wheel needs beyond torch would be asked of an index, and there is none.
    run(folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", wheel)
    return site


@pytest.fixture(scope="module")
def python(site):
    return site.parents[2] / "bin" / "python"


def test_the_wheel_takes_the_tour_in_an_empty_environment_beside_torch(site, python, tmp_path):
    absent = "from importlib.util import find_spec; assert not any(map(find_spec, ('numpy', 'scipy', 'triton')))"
    installed = "import sassha_fast, sys; assert sassha_fast.__file__.startswith(sys.prefix), sassha_fast.__file__"
    core = [code for code in TOUR if code != MEASURES]
    refused = f"try:\n{indent(MEASURES, ' ')}except ImportError as error:\n print(error)\nelse:\n assert False"
    said = run(python, "-c", "\n".join([absent, installed, *core, refused]), cwd=tmp_path)
    assert "needs scipy" in said
    assert "pip install scipy" in said
    lend(needed("scipy", "tqdm"), site)
    assert "trace" in run(python, "-c", "\n".join([installed, *TOUR]), cwd=tmp_path)


def test_the_snippets_of_the_readme_run_as_pasted_in_order(python, tmp_path):
    snippets = [block.code for block in blocks(ROOT / "README.md")]
    said = run(python, "-c", "\n".join(snippets), cwd=tmp_path)
    losses = [float(text) for text in re.findall(r"^loss (\d\.\d+)$", said, re.MULTILINE)]
    assert len(losses) == 4  # of the first run, and of three epochs of M-SASSHA
    assert losses == sorted(losses, reverse=True)
    assert "learning rate" in said  # what suggest found


def test_the_wheel_brings_its_kernels(python, tmp_path):
    assert "'cpu' for parameters on the CPU" in run(python, "-m", "sassha_fast", cwd=tmp_path)


def test_import_takes_less_than_50_milliseconds_beyond_torch(python, tmp_path):
    code = "import time, torch; t = time.process_time(); import sassha_fast; print(time.process_time() - t)"
    assert any(float(run(python, "-c", code, cwd=tmp_path)) < 0.05 for _ in range(10))  # others fill the caches too


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
    assert not [name for name in names if name.startswith(("tests", "bench", "tools")) or name.endswith(".so")]


@pytest.mark.slow
def test_the_source_archive_builds(tmp_path):
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path, cwd=ROOT)
    (path,) = tmp_path.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-build-isolation")
    run(*pip, "--no-deps", "--wheel-dir", tmp_path, path, env={**ENVIRONMENT, "SASSHA_CUDA": "0"}, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert "sassha_fast/_native.so" in files_of(wheel)
