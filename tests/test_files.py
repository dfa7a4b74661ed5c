"""Text files: what is written is what is read, for every text that JSON and CSV can hold; encodings are always said."""

import ast
import io
import json
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glance import cli
from glance.files import append_lines, json_line, read_csv, read_json, read_lines, write_json, write_text
from glance.paths import ROOT

BOUNDARIES = "\n\r\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"
texts = st.text(st.one_of(st.sampled_from(BOUNDARIES), st.characters(exclude_categories=["Cs"])), max_size=12)
rows = st.lists(
    st.dictionaries(texts, st.one_of(texts, st.integers(), st.none(), st.lists(texts, max_size=2))), max_size=4
)
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@few
@given(rows)
def test_rows_come_back_whatever_they_hold(tmp_path, values):
    path = tmp_path / "rows.jsonl"
    path.unlink(missing_ok=True)
    append_lines(path, values)
    assert [json.loads(line) for line in read_lines(path)] == values
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert [json.loads(line) for line in read_lines(path)] == values
    assert read_json(write_json(tmp_path / "one.json", values)) == values


@few
@given(st.lists(texts, min_size=1, max_size=4))
def test_cells_come_back_whatever_they_hold(tmp_path, cells):
    quoted = "".join('"' + cell.replace('"', '""') + '"\r\n' for cell in ["text", *cells])
    (tmp_path / "table.csv").write_bytes(b"\xef\xbb\xbf" + quoted.encode())
    assert [row["text"] for row in read_csv(tmp_path / "table.csv")] == cells


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_json_is_strict(value):
    def refuse(word):
        raise AssertionError(word)

    assert json.loads(json_line({"a": [value, 1.5]}), parse_constant=refuse) == {"a": [None, 1.5]}


def test_another_encoding_names_file_and_line(tmp_path):
    (tmp_path / "a.json").write_bytes('{\n"a": "Prüfung"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.json:2: not UTF-8 \(byte 0xfc\)"):
        read_json(tmp_path / "a.json")


def test_text_is_replaced_in_one_step_and_keeps_its_line_ends(tmp_path):
    path = write_text(tmp_path / "données" / "a.txt", "é\r\n\u2028\n")
    assert path.read_bytes() == "é\r\n\u2028\n".encode()
    assert [file.name for file in path.parent.iterdir()] == ["a.txt"]


def sources():
    """Return (file, code) of every module and every notebook's code cell."""
    for path in sorted((ROOT / "glance").rglob("*.py")):
        yield path, path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in read_json(path)["cells"]:
            if cell["cell_type"] == "code":
                yield path, "".join(cell["source"])


def test_every_text_file_is_opened_with_its_encoding():
    for path, code in sources():
        for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            is_ours = isinstance(call.func, ast.Name)  # glance.files' own read_text and write_text
            if name in ("read_text", "write_text") and not is_ours:
                assert "encoding" in {keyword.arg for keyword in call.keywords}, f"{path}: {ast.unparse(call)}"


def test_a_run_in_a_folder_that_the_locale_cannot_spell_is_written_and_resumed(tmp_path):
    script = """
import sys
from pathlib import Path
from glance.records import SCHEMAS
from glance.run.folder import Run

folder = Path(sys.argv[1]) / "run"
with Run(folder, {"parameters": {"data": sys.argv[1]}, "data": {sys.argv[1]: "hash"}}) as run:
    print(len(run.done))
    row = dict.fromkeys(SCHEMAS["prompts.jsonl"]) | dict(arm="ar", task=folder.parent.name, prompt=1, rounds=0)
    run.done or run.add(row, [])
"""
    folder = tmp_path / "donn\u00e9es"
    plain_c = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for known, locale in enumerate((plain_c, plain_c, {"PYTHONUTF8": "1"})):
        command = [sys.executable, "-c", script, str(folder)]
        done = subprocess.run(command, env=os.environ | locale, capture_output=True, text=True, encoding="utf-8")
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) == min(known, 1)
    assert read_json(folder / "run" / "provenance.json")["parameters"]["data"] == str(folder)


def test_what_standard_output_cannot_spell_ends_nothing(monkeypatch):
    wire = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(wire, encoding="cp1252"))
    monkeypatch.setattr(cli, "_fit_law", lambda arguments: print("\u6f22\u5b57"))
    assert cli.main(["fit-law", "rounds.jsonl"]) == 0
    sys.stdout.flush()
    assert wire.getvalue().split() == [rb"\u6f22\u5b57"]
