"""What a release is made of: workflows that run make's targets, hooks that run its tools, wheels that are checked."""

import re
import zipfile

import pytest
from pages import ROOT

import sassha_fast
from tools import check_wheels

yaml = pytest.importorskip("yaml")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def commands(workflow):
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def test_workflows_do_their_work_by_targets_of_make():
    run = {workflow.stem: commands(workflow) for workflow in WORKFLOWS}
    targets = {name: [c.split()[1] for c in found if c.startswith("make ")] for name, found in run.items()}
    assert targets == {
        "docs": ["docs"],
        "release": ["wheel", "wheel-cpu", "check-wheels"],
        "tests": ["lint", "test", "test-product", "matrix"],
    }
    for target in [target for found in targets.values() for target in found]:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    others = [c for found in run.values() for c in found if not c.startswith("make ")]
    assert all(c.startswith(("dnf ", "gh release create")) for c in others)  # a compiler, and the upload


def test_workflows_run_what_has_to_pass_before_a_change_lands():
    wanted = re.findall(r"^make (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert [f"make {target}" for target in wanted] == commands(ROOT / ".github" / "workflows" / "tests.yml")[:3]


def test_hooks_of_a_commit_run_the_tools_of_make_lint():
    recipe = MAKEFILE.split("\nlint:")[1].split("\n\n")[0].splitlines()[1:]
    tools = [re.sub(r"\$\(BIN\)", ".venv/bin", line.strip()) for line in recipe]
    tools = [re.sub(r" (\.|\$\(FORMATTED\))$", "", line) for line in tools]
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]] == tools


def test_templates_of_issues_and_the_citation_are_whole():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert path.name == "config.yml" or {"name", "description", "body"} <= form.keys()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == sassha_fast.__version__
    names = {author["family-names"] for author in citation["preferred-citation"]["authors"]}
    page = (ROOT / "docs" / "cite.md").read_text(encoding="utf-8")
    assert all(name in page for name in names)
    assert citation["preferred-citation"]["title"].split(": ")[1] in page


def wheel_of(folder, **files):
    path = folder / "sassha_fast-1.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "/"), content)
    return path


def test_a_wheel_without_its_library_or_one_too_large_is_refused(tmp_path, monkeypatch):
    with pytest.raises(check_wheels.WheelError, match=r"has no sassha_fast/_native\.so"):
        check_wheels.contents(wheel_of(tmp_path, sassha_fast__x="1"))
    monkeypatch.setattr(check_wheels, "MOST_WITHOUT_CUDA", 100)
    native = {"sassha_fast/_native.so": b"x" * 200}
    with pytest.raises(check_wheels.WheelError, match="has no CUDA and"):
        check_wheels.contents(wheel_of(tmp_path, **native))
    check_wheels.contents(wheel_of(tmp_path, **{"sassha_fast/_native.so": b".nv_fatbin" + b"x" * 200}))


def test_the_policy_is_read_from_what_auditwheel_says():
    said = 'This constrains the platform tag to "manylinux_2_34_x86_64". In order to achieve'
    assert check_wheels.newest_policy(said) == (2, 34)
    with pytest.raises(check_wheels.WheelError, match="names no policy"):
        check_wheels.newest_policy("nothing")
