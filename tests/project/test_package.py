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
from training import make_batch, make_net

import sassha_fast
from tools import scale


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


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_answers_in_the_order_of_a_newcomers_questions():
    assert len(README.split()) <= 1000
    first_screen = README.split("## Install")[0]
    assert "never run on a GPU" in first_screen
    order = ["pip install", "```python", "make demo", "make test", "<img", "## What is proven", "## The three calls"]
    order += ["## One gradient a step", "## The family", "## Results", "## Where to go"]
    places = [README.index(word) for word in order]
    assert places == sorted(places)
    (picture,) = re.findall(r'<img src="([^"]+)"', README)
    assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("page", ["adamw.md", "distributed.md", "errors.md"])
def test_what_a_new_user_looks_for_is_one_click_from_readme_and_overview(page):
    """A learning rate to start with, several processes, what an error means; how to cite has other places."""
    assert f"](docs/{page})" in README
    assert f"]({page})" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert "](CITATION.cff)" in README


def test_the_results_of_the_readme_are_those_of_three_optimizers_and_say_their_command():
    results = README.split("## Results")[1].split("## ")[0]
    assert results.strip().startswith("`make demo`")
    assert re.findall(r"^\| (\w+) \| \d", results, re.MULTILINE) == ["AdamW", "SAM", "SASSHA"]


def test_the_documented_loop_of_m_sassha_never_evaluates_perturbed_weights(tmp_path):
    net, (x, y) = make_net(), make_batch()
    scope = {"model": net, "loader": [(x, y)] * 3, "loss_fn": torch.nn.functional.cross_entropy, "epochs": 2}

    def evaluate(model):
        model.eval()
        model(x)  # would warn, and a warning is an error here
        opt = scope["opt"]
        assert all(torch.equal(p, opt.state[p]["weight"]) for p in model.parameters())
        model.train()

    scope |= {"evaluate": evaluate, "torch": torch, "path": tmp_path / "checkpoint.pt"}
    blocks(ROOT / "docs" / "methods.md")[0].run(scope)
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


def test_the_page_on_scale_has_the_table_that_its_script_computes():
    assert scale.table() in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
