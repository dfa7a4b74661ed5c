"""The README against the repository: its tree, its index, its table and its code are those of the project."""

import inspect
import json
import re
from importlib import import_module

from glance.paths import KEPT, NOTEBOOKS, ROOT
from glance.report.claims import law_sentence, verdict_lines
from glance.report.results import Results
from glance.report.summary import short_table

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def block_after(heading: str) -> str:
    """Return the first fenced block after a heading."""
    return re.search(r"```\w*\n(.*?)```", TEXT[TEXT.index(heading) :], re.S).group(1)


def test_every_file_of_the_house_has_a_caption():
    lines = [line for line in block_after("## The files").splitlines() if line.strip()]
    named = set()
    folders: list[str] = []
    for line in lines:
        name, _, caption = line.strip().partition(" ")
        assert caption.strip(), f"{name} has no caption"
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        named.add("".join(folders) + name)
        if name.endswith("/"):
            folders.append(name)
    package = ROOT / "glance"
    modules = [path for path in package.rglob("*.py") if not path.name.startswith("__")]
    captioned = {str(path.relative_to(ROOT)) for path in modules if path.parent != package / "pocket"}
    assert captioned - named == set(), "modules without a caption"
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_index_names_functions_and_files_that_are_there():
    rows = re.findall(r"\| ([\w-]+) \| `(\w+)\.(\w+)` \| \[(figures/[\w.-]+)\]", TEXT)
    assert len(rows) >= 8
    for notebook, module, function, path in rows:
        assert inspect.isfunction(getattr(import_module(f"glance.report.{module}"), function))
        source = (ROOT / "notebooks" / f"{notebook}.ipynb").read_text()
        assert f"{module}.{function}(" in source, f"{notebook} does not call {module}.{function}"
        assert (ROOT / path).is_file(), path


def test_links_and_pictures_are_there():
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", TEXT)
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_the_table_is_the_default_runs():
    shown = re.search(r"<!-- main-table -->\n(.*?)\n?<!-- /main-table -->", TEXT, re.S).group(1)
    table = json.loads((KEPT / "pocket" / "main_table.json").read_text())
    assert shown.strip() == short_table(table)


def between(mark):
    return re.search(rf"<!-- {mark} -->\n(.*?)\n?<!-- /{mark} -->", TEXT, re.S).group(1).strip()


def test_verdicts_and_the_word_on_the_law_are_the_ledgers():
    assert between("verdicts") == verdict_lines()
    assert between("law") == law_sentence(Results(KEPT / "pocket"))
    texts = [TEXT, *(path.read_text(encoding="utf-8") for path in NOTEBOOKS.glob("*.ipynb"))]
    said = re.compile(r"as the law says|the law (holds|does not hold)", re.I)
    for text in texts:
        rest = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", text, flags=re.S)
        assert not said.search(rest), "a verdict on the law that no ledger gave"


def test_the_code_block_runs_on_the_pocket_target(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(compile(block_after("## Use it on your own target"), "README.md", "exec"), {})
    assert capsys.readouterr().out.count("\n") >= 3
