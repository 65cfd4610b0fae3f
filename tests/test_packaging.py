"""The conventions that hold the repository together: pins, a light import, short modules, readable notebooks."""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "grpo_lab").rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HEAVY = (
    "torch transformers trl peft accelerate datasets triton vllm matplotlib plotly ipywidgets IPython ipykernel "
    "papermill nbformat nbclient jupyterlab"
).split()


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def conda_pins():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    return dependencies, next(d["pip"] for d in dependencies if isinstance(d, dict))


def test_environment_yml_names_the_same_pins_as_pyproject():
    wanted = project()["dependencies"] + project()["optional-dependencies"]["test"]
    _, pins = conda_pins()
    assert sorted(p for p in pins if p != "-e .") == sorted(wanted)
    assert pins[-1] == "-e .", "the package itself comes last, when everything it needs is there"


def test_conda_python_is_one_that_pyproject_accepts():
    dependencies, _ = conda_pins()
    assert "python=3.11" in dependencies
    assert project()["requires-python"] == ">=3.11,<3.13"


def test_every_requirement_is_pinned_exactly():
    groups = project()["optional-dependencies"]
    for requirement in project()["dependencies"] + groups["test"] + groups["gpu"] + groups["slurm"]:
        assert re.fullmatch(r"[a-z0-9-]+==[\d.]+(; sys_platform == 'linux')?", requirement), requirement


def test_the_running_versions_are_the_pinned_ones():
    """Skipped by name on the second supported set (torch 2.11, triton 3.6), where the pins are not what is tested."""
    from importlib.metadata import version

    if version("torch").split("+")[0] != "2.13.0":
        pytest.skip("not the pinned set: torch " + version("torch"))
    for requirement in project()["dependencies"]:
        name, pin = requirement.split(";")[0].split("==")
        if "linux" in requirement and sys.platform != "linux":
            continue
        assert version(name).split("+")[0] == pin, requirement


def test_import_is_quick_and_light():
    code = (
        "import sys, time; before = set(sys.modules); t = time.perf_counter(); import grpo_lab; "
        "t = time.perf_counter() - t; dir(grpo_lab); import json; "
        "print(json.dumps([t, sorted({m.split('.')[0] for m in set(sys.modules) - before})]))"
    )
    runs = [json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)) for _ in range(3)]
    assert min(seconds for seconds, _ in runs) < 0.3
    assert not set(HEAVY) & set(runs[0][1])


def test_every_public_name_has_a_home():
    import grpo_lab

    for name in grpo_lab.__all__:
        home = ROOT / "grpo_lab" / f"{grpo_lab._HOME[name]}.py"
        assert home.exists(), f"{name} is announced by __init__ and {home.name} does not exist"
        assert re.search(rf"\b{name}\b", home.read_text()), name


def test_every_room_is_installed_named_in_the_readme_and_opens_quickly():
    rooms = sorted(path.parent.name for path in (ROOT / "grpo_lab").glob("*/__init__.py"))
    assert {path.parent.name for path in MODULES} == {"grpo_lab", *rooms}, "pip would leave out what has no __init__.py"
    code = "import sys; import " + ", ".join(f"grpo_lab.{room}" for room in rooms) + "; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()
    assert not set(HEAVY) & {name.split(".")[0] for name in loaded}
    assert all(f"`{room}/`" in (ROOT / "README.md").read_text() for room in rooms)


def test_a_folder_of_the_same_name_does_not_hide_the_package(tmp_path):
    """As the clone does for a Python that is started beside it."""
    (tmp_path / "grpo_lab").mkdir()
    code = "import grpo_lab; print(grpo_lab.__file__)"
    found = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True).strip()
    assert found.endswith("__init__.py"), "pip install -e . once more: an older one knows no package-dir"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT / "grpo_lab")))
def test_module_is_short_documented_and_imports_what_it_may(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert text.count("\n") <= 400, f"{path.name}: split it, one module is one idea (aim at 350 lines)"
    assert ast.get_docstring(tree), f"{path.name} does not say what it does"
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    if path.name != "triton_kernels.py":
        assert "triton" not in names, "only triton_kernels.py imports triton"


def test_ruff_is_content():
    for command in (["check"], ["format", "--check"]):
        result = subprocess.run([sys.executable, "-m", "ruff", *command], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


def parameters_cells(notebook):
    return [c for c in notebook["cells"] if "parameters" in c["metadata"].get("tags", [])]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_has_one_cell_of_plain_commented_parameters(path):
    cells = parameters_cells(json.loads(path.read_text()))
    assert len(cells) == 1 and cells[0]["cell_type"] == "code"
    source = "".join(cells[0]["source"])
    commented = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    names = set()
    for node in ast.parse(source).body:
        assert isinstance(node, ast.Assign) and len(node.targets) == 1, "plain assignments only: " + ast.unparse(node)
        ast.literal_eval(node.value)
        assert node.end_lineno in commented, f"{ast.unparse(node)}: give its unit and range in a comment on the line"
        names.add(node.targets[0].id)
    assert {"smoke", "seed"} <= names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_is_readable_everywhere(path):
    text = path.read_text()
    notebook = json.loads(text)
    assert len(text.encode()) < 500_000
    assert "widgets" not in notebook["metadata"], "clear the widget state before committing"
    for cell in (c for c in notebook["cells"] if c["cell_type"] == "code"):
        source = "".join(cell["source"])
        assert source.count("\n") < 40, source
        for output in cell["outputs"]:
            assert output["output_type"] != "error", source
            data = output.get("data", {})
            assert not any("widget" in mime for mime in data), "run it headless: this widget's model is not in the file"
            if "application/vnd.plotly.v1+json" in data:
                picture = "image/png" in data or any("image/png" in o.get("data", {}) for o in cell["outputs"])
                assert picture, "a static picture stands beside each plotly figure: " + source


def test_nothing_committed_names_a_registry_host_or_an_absolute_home():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git clone")
    bad = re.compile(r"/(root|home/\w+)/|(?<![.\w])/wor[k]/|pypi\.org|pythonhosted|download\.pytorch")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in {".py", ".ipynb", ".md", ".yml", ".yaml", ".toml", ".json", ".sh"} or path.name == "Makefile":
            if path == Path(__file__) or not path.exists():
                continue
            found = bad.search(path.read_text(errors="replace"))
            assert not found, f"{name}: {found.group()}"
