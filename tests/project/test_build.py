"""The build script says what it misses."""

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "setup.py"


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("build_script", SETUP)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def only(tmp_path, monkeypatch):
    """Makes programs that print a text the only ones to be found."""

    def install(**programs):
        for name, text in programs.items():
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{text}\nEND\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        for name in ("CUDA_HOME", "CXX"):
            monkeypatch.delenv(name, raising=False)

    return install


def test_without_nvcc_auto_builds_for_the_cpu_and_1_ends_the_build(build, only, monkeypatch, capsys):
    only()
    monkeypatch.setenv("SASSHA_CUDA", "auto")
    assert build.find_nvcc() is None
    assert "building without CUDA: nvcc was not found" in capsys.readouterr().out
    monkeypatch.setenv("SASSHA_CUDA", "1")
    with pytest.raises(SystemExit, match="SASSHA_CUDA=1, but nvcc was not found; install the CUDA toolkit"):
        build.find_nvcc()


def test_a_compiler_may_have_words_around_it(build, only, monkeypatch):
    only(ccache="12", **{"g++": "12"})
    monkeypatch.setenv("CXX", "ccache g++ -pipe")
    assert build.find_compiler() == "ccache g++ -pipe"
    assert build.host_compiler() == "g++"
    only(cc="no number")
    monkeypatch.setenv("CXX", "cc")
    with pytest.raises(SystemExit, match="'cc' does not tell its version as a C"):
        build.find_compiler()


def test_old_setuptools_are_named(monkeypatch):
    monkeypatch.setattr("setuptools.__version__", "65.5.0")
    with pytest.raises(SystemExit, match=r"setuptools is 65\.5\.0, expected 77 or later: pip install 'setuptools>=77'"):
        runpy.run_path(str(SETUP))


def test_an_old_nvcc_is_named(build, only, monkeypatch):
    only(nvcc="Cuda compilation tools, release 11.4, V11.4.100")
    monkeypatch.setenv("SASSHA_CUDA", "1")
    with pytest.raises(SystemExit, match=r"nvcc is release 11\.4, expected 12\.8 or later"):
        build.find_nvcc()


def test_a_new_nvcc_is_taken_unless_cuda_is_refused(build, only, monkeypatch):
    only(nvcc="Cuda compilation tools, release 13.0, V13.0.88")
    monkeypatch.setenv("SASSHA_CUDA", "auto")
    assert build.find_nvcc().endswith("/nvcc")
    monkeypatch.setenv("SASSHA_CUDA", "0")
    assert build.find_nvcc() is None
    monkeypatch.setenv("SASSHA_CUDA", "yes")
    with pytest.raises(SystemExit, match="SASSHA_CUDA is 'yes', expected auto, 0 or 1"):
        build.find_nvcc()


def test_a_missing_or_old_host_compiler_is_named(build, only, monkeypatch):
    only()
    with pytest.raises(
        SystemExit, match=r"'g\+\+' was not found; install g\+\+ \(11 or later\), set CXX, or set SASSHA_NATIVE=0"
    ):
        build.find_compiler()
    only(old="9.4.0\nFree Software Foundation")
    monkeypatch.setenv("CXX", "old")
    with pytest.raises(SystemExit, match="expected 11 or later"):
        build.find_compiler()


def test_architectures_come_from_the_environment(build, monkeypatch):
    monkeypatch.setenv("SASSHA_CUDA_ARCHS", "80;90")
    assert build.arch_flags() == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    monkeypatch.delenv("SASSHA_CUDA_ARCHS")
    assert build.arch_flags()[-1] == "-gencode=arch=compute_120,code=compute_120"
    monkeypatch.setenv("SASSHA_CUDA_ARCHS", "sm_80")
    with pytest.raises(SystemExit, match="SASSHA_CUDA_ARCHS has 'sm_80', expected numbers"):
        build.arch_flags()


@pytest.mark.parametrize("missing", ["torch", "ninja"])
def test_without_torch_or_ninja_the_build_says_to_leave_isolation(build, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf"{missing} can't be imported here; install torch .*--no-build-isolation \."):
        build.find_needed()


def test_the_native_library_can_be_left_out(build, monkeypatch):
    assert build.native()
    monkeypatch.setenv("SASSHA_NATIVE", "0")
    assert not build.native()
    assert not build.NativeDistribution().has_ext_modules()
    monkeypatch.setenv("SASSHA_NATIVE", "no")
    with pytest.raises(SystemExit, match="SASSHA_NATIVE is 'no', expected 0 or 1"):
        build.native()


@pytest.mark.parametrize("named", ["", "triton~=3.9.0; platform_system == 'Linux'"])
def test_the_pinned_triton_is_installed_only_beside_a_torch_that_names_none(tmp_path, named):
    programs, log = tmp_path / "bin", tmp_path / "log"
    programs.mkdir()
    for name, script in (("python", f'case "$2" in *requires*) echo "{named}";; esac'), ("pip", f'echo "$@" >> {log}')):
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    root, target = SETUP.parent, tmp_path / ".installed"
    subprocess.run(["make", "--quiet", "-C", root, f"VENV={tmp_path}", target], check=True, capture_output=True)
    pins = [line for line in (root / "requirements-dev.txt").read_text().splitlines() if "==" in line]
    assert (tmp_path / "requirements.txt").read_text().split("\n")[1:-1] == [p for p in pins if "triton" not in p]
    calls = log.read_text().splitlines()
    assert calls[0].endswith(f"-r {tmp_path}/requirements.txt")
    assert [call.split()[-1] for call in calls if "triton==" in call] == (
        [] if named else [p for p in pins if "triton" in p]
    )
    assert calls[-1].endswith("--no-deps --editable .")
