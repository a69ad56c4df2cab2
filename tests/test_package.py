"""What is installed, and the commands that the README names."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import ROOT, blocks
from training import make_batch, make_net, snapshot

import sassha_fast


def run(*command, cwd=ROOT):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_triton_kernels_install_inside_the_package_and_nowhere_else():
    code = "from importlib.util import find_spec as f; print(f('sassha_fast.triton_kernels').name, f('triton_kernels'))"
    assert run("-c", code, cwd="/").split() == ["sassha_fast.triton_kernels", "None"]


def test_import_neither_loads_the_library_nor_imports_triton():
    code = (
        "import sassha_fast, sys, torch; print('triton' in sys.modules, hasattr(torch.ops.sassha_fast, 'table_step'))"
    )
    assert run("-c", code).split() == ["False", "False"]


def test_every_public_name_has_a_docstring():
    for module in sorted(path.stem for path in Path(sassha_fast.__file__).parent.glob("[a-z]*.py")):
        names = importlib.import_module(f"sassha_fast.{module}")
        for name in names.__all__:
            value = getattr(names, name)
            is_code = inspect.isclass(value) or inspect.isfunction(value)
            assert not is_code or value.__doc__, f"{module}.{name}"
    assert all(getattr(sassha_fast, name).__doc__ for name in sassha_fast.__all__ if name != "__version__")


def test_the_demo_runs_and_leaves_a_picture_and_a_page(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    output = run("-m", "examples.digits", "--epochs", "1", "--seeds", "1", "--out", str(tmp_path))
    for name in ("AdamW", "SAM", "SASSHA", "GC/step", "Hessian trace"):
        assert name in output
    assert str(tmp_path / "index.html") in output
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "index.html").read_text()
    rows = [line.split() for line in output.splitlines() if line.startswith(("AdamW ", "SAM ", "SASSHA "))]
    assert len(rows) == 3
    assert all(f"<td>{cell}</td>" in page for row in rows for cell in row)


def test_the_readme_begins_with_install_two_commands_four_lines_and_a_picture():
    beginning = (ROOT / "README.md").read_text().split("\n- ")[0]
    install, *commands = beginning.split("```sh\n")[1].split("```")[0].splitlines()
    assert install.startswith("pip install")
    assert [command.split("#")[0].strip() for command in commands] == ["make demo", "make test"]
    assert len(blocks(ROOT / "README.md")[0].code.splitlines()) == 4
    (picture,) = re.findall(r'<img src="([^"]+)"', beginning)
    assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")


def test_the_loop_of_the_readme_runs():
    first, loop, with_closure, _ = blocks(ROOT / "README.md")
    net, (x, y) = make_net(), make_batch()
    before = snapshot(net)
    scope = {"model": net, "loader": [(x, y)] * 3, "loss_fn": torch.nn.functional.cross_entropy}
    scope["sassha_fast"] = sassha_fast

    def closure(x, y):
        def run():
            scope["opt"].zero_grad()
            loss = scope["loss_fn"](net(x), y)
            loss.backward()
            return loss

        return run

    scope["closure"] = closure
    first.run(scope)
    assert scope["opt"].state[net[0].weight]["step"] == 3
    loop.run(scope)
    assert scope["opt"].state[net[0].weight]["step"] == 3
    assert not torch.equal(net[0].weight, before[0])
    with_closure.run(scope)
    assert scope["opt"].state[net[0].weight]["step"] == 4


@pytest.mark.parametrize(("document", "block"), [("README.md", 3), ("docs/methods.md", 0)])
def test_the_documented_loop_of_m_sassha_never_evaluates_perturbed_weights(document, block, tmp_path):
    net, (x, y) = make_net(), make_batch()
    scope = {"model": net, "loader": [(x, y)] * 3, "loss_fn": torch.nn.functional.cross_entropy, "epochs": 2}

    def evaluate(model):
        model.eval()
        model(x)  # would warn, and a warning is an error here
        opt = scope["opt"]
        assert all(torch.equal(p, opt.state[p]["weight"]) for p in model.parameters())
        model.train()

    scope |= {"evaluate": evaluate, "torch": torch, "path": tmp_path / "checkpoint.pt"}
    blocks(ROOT / document)[block].run(scope)
    assert scope["opt"].state[net[0].weight]["step"] == 6


def test_the_comparison_on_label_noise_trains_every_method(monkeypatch):
    label_noise = pytest.importorskip("examples.label_noise")
    monkeypatch.setattr(label_noise, "EPOCHS", 1)
    data, _, _ = label_noise.load_splits(torch.device("cpu"))
    torch.manual_seed(0)
    start, _ = label_noise.evaluate(label_noise.build_model(), data)
    document = (ROOT / "docs" / "methods.md").read_text()
    for name in label_noise.METHODS:
        loss, _ = label_noise.evaluate(label_noise.train(name, 0.003, 0, data), data)
        assert loss < start, name
        assert document.count(f"% | {name} | ") == len(label_noise.NOISE)


def test_version_is_the_same_everywhere():
    assert f'version = "{sassha_fast.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"## {sassha_fast.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_page_on_scale_has_the_table_that_its_script_computes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import scale

    assert scale.table() in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
