"""The layout: which module may import which, read off the source, and what imports without torch."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from glance.paths import ROOT

PACKAGE = ROOT / "glance"


def module_name(path: Path) -> str:
    """Name a file as imports do, `glance` left out: "tree", "run.audit", "drafters"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(path: Path) -> set[str]:
    """List the project's modules that a file imports anywhere in it, lazily too, but not for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            for_types |= {id(inner) for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "glance":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    inside = {name.removeprefix("glance.") for name in found if name.startswith("glance.")}
    return {name if name in FILES else name.rpartition(".")[0] for name in inside} - {""}


def read_rows() -> dict[str, tuple[list[str], str]]:
    """Read the README's table of rooms: row -> its modules and rooms, and the text of what it may import."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text[text.index("| row | modules and rooms | imports |") :]
    rows = {}
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            break
        row, members, allowed = (cell.strip() for cell in line.strip("|").split("|"))
        rows[row] = (members.strip("`").split(), allowed)
    return rows


ROWS = read_rows()
ROW_OF = {member.rstrip("/"): row for row, (members, _) in ROWS.items() for member in members}


def row_of(module: str) -> str:
    return ROW_OF[module.split(".")[0]]


def test_every_module_stands_in_one_row():
    assert {name for name in FILES if name.split(".")[0] not in ROW_OF} == set()
    tops = [member.rstrip("/") for members, _ in ROWS.values() for member in members]
    assert sorted(tops) == sorted({name.split(".")[0] for name in FILES})


@pytest.mark.parametrize("module", FILES)
def test_arrows_run_one_way(module):
    row = row_of(module)
    allowed = ROWS[row][1]
    named = {row, *re.findall(r"[a-z]+", allowed.partition(";")[0])}
    used = imports_of(FILES[module])
    if allowed != "everything":
        assert {name for name in used if row_of(name) not in named} == set()


def test_there_is_no_circle():
    graph = {name: imports_of(path) for name, path in FILES.items()}
    done: list[str] = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above, name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*above, name))
            done.append(name)

    for name in graph:
        visit(name, ())


def test_the_imports_are_really_read(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("from glance import tree\nfrom glance.run.audit import audit\ndef f():\n    import glance.law\n")
    assert imports_of(path) == {"tree", "run.audit", "law"}


@pytest.mark.parametrize(
    "row", [row for row, (_, allowed) in ROWS.items() if "numpy alone" in allowed or "no torch" in allowed]
)
def test_what_needs_no_torch_imports_without_it(row):
    blocked = {"torch", "transformers", "dflash", "safetensors"}
    if "numpy alone" in ROWS[row][1]:
        blocked |= {"scipy", "pandas", "matplotlib", "seaborn", "PIL", "tqdm"}
    modules = [f"glance.{name}" for name in FILES if row_of(name) == row]
    code = f"""
        import sys
        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {blocked!r}:
                    raise ImportError(name + " is blocked")
        sys.meta_path.insert(0, Blocker())
        import {", ".join(modules)}
    """
    lines = [line.strip() if not line.startswith(" " * 12) else line[8:] for line in code.splitlines()]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def mentions() -> list[tuple[str, str]]:
    """List what the sources, the notebooks and the README say of modules: file, and `glance.name` or a path."""
    files = [*FILES.values(), *(ROOT / "notebooks").glob("*.ipynb"), ROOT / "README.md"]
    found = set()
    for path in files:
        text = path.read_text(encoding="utf-8")
        found |= {(path.name, name) for name in re.findall(r"`(glance(?:\.\w+)+)|\b(glance/[\w/]+\.py)\b", text)}
    return sorted((path, dotted or file) for path, (dotted, file) in found)


@pytest.mark.parametrize(("source", "name"), mentions())
def test_what_is_said_of_modules_is_there(source, name):
    if name.endswith(".py"):
        assert (ROOT / name).is_file()
        return
    parts = name.split(".")
    known = max(i for i in range(1, len(parts) + 1) if i == 1 or ".".join(parts[1:i]) in FILES)
    thing = importlib.import_module(".".join(parts[:known]))
    for part in parts[known:]:
        thing = getattr(thing, part)
