"""What the repository promises of itself: pins that agree, files that stay small, modules that say what they are."""

import ast
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from glance.paths import ROOT

FILE_LINES = 350  # a guide: about 300
FUNCTION_LINES = 65  # a guide: about 60

PACKAGE = ROOT / "glance"
MODULES = sorted(PACKAGE.rglob("*.py"))
CORE = [path for path in MODULES if PACKAGE / "pocket" not in path.parents]


def named(path):
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def environment():
    """The entries of environment.yml, without their dashes."""
    lines = (ROOT / "environment.yml").read_text().splitlines()
    return [line.strip()[1:].strip().strip("\"'") for line in lines if line.strip().startswith("-")]


def test_environment_and_project_agree_on_the_pins(project, environment):
    def pins(lines):
        return {name: pin for line in lines for name, pin in re.findall(r"^([a-z][a-z0-9-]*)==([0-9.]+)$", line)}

    theirs, ours = pins(environment), pins(project["optional-dependencies"]["decode"])
    assert ours == {"torch": "2.13.0", "transformers": "5.15.0", "dflash": "0.1.0"}
    assert {name: theirs.get(name) for name in ours} == ours


def test_the_environment_installs_the_package_in_place(project, environment):
    assert re.search(r"-e \.\[([a-z,]+)\]", "\n".join(environment)).group(1).split(",") == [
        "decode",
        "notebooks",
        "dev",
    ]
    assert set(project["optional-dependencies"]) >= {"decode", "notebooks", "dev"}
    python = next(line for line in environment if re.match(r"python\s*=", line))
    assert re.sub(r"[\s=]", "", python) == "python3.11" and project["requires-python"] == ">=3.11"


def test_the_lock_satisfies_every_bound_of_the_project(project):
    lines = (ROOT / "environment.lock.txt").read_text(encoding="utf-8").splitlines()
    locked = dict(line.split("==") for line in lines if not line.startswith("#"))
    locked = {canonicalize_name(name): version for name, version in locked.items()}
    needs = [*project["dependencies"], *(need for extra in project["optional-dependencies"].values() for need in extra)]
    wrong = [
        need
        for need in map(Requirement, needs)
        if not need.specifier.contains(locked.get(canonicalize_name(need.name), "0"))
    ]
    assert wrong == [] and len(locked) > 100
    assert not any("+" in version for version in locked.values()), "a local build is nobody else's"


def test_the_distribution_is_ours_and_needs_numpy_alone(project):
    assert project["name"] == "glance-companion"
    assert [re.split(r"[<>=]", need)[0] for need in project["dependencies"]] == ["numpy"]


def test_files_are_short():
    lines = {named(path): len(path.read_text(encoding="utf-8").splitlines()) for path in CORE}
    assert {name: n for name, n in lines.items() if n > FILE_LINES} == {}


def test_functions_are_short():
    long = {}
    for path in CORE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                said = (ast.get_docstring(node, clean=False) or "").count("\n")  # a docstring may take its room
                lines = node.end_lineno - node.lineno + 1 - said
                if lines > FUNCTION_LINES:
                    long[f"{named(path)}:{node.name}"] = lines
    assert long == {}


def test_every_module_says_what_it_is():
    assert [named(path) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))] == []
