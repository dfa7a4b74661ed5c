"""Exit codes: 1 for the guarantee alone, 2 for what a user can mend (one line), 3 for a surprise whose traceback is kept."""

import errno
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from papermill.exceptions import PapermillExecutionError

from glance import cli, exits, pipeline
from glance.head import check_checkpoint
from glance.paths import ROOT


@pytest.fixture(autouse=True)
def build(monkeypatch, tmp_path):
    monkeypatch.setattr(exits, "BUILD", tmp_path / "build")
    monkeypatch.setattr(pipeline, "BUILD", tmp_path / "build")


def main_table(made, tmp_path, *more, target=None, head=None):
    pair = ["--target", str(target or made / "target"), "--head", str(head or made / "head")]
    run = ["--data", str(made / "data"), "--n", "1", "--max-new", "4", "--run-folder", str(tmp_path / "run")]
    return cli.main(["main-table", *pair, *run, *more])


def refused(capsys):
    """Return the one line that standard error holds."""
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error, error
    return error


def raising(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied", "/x"),
        OSError(errno.EROFS, "Read-only file system", "/x"),
        OSError(errno.ENOSPC, "No space left on device"),
        FileExistsError(errno.EEXIST, "File exists", "/x"),
        NotADirectoryError(errno.ENOTDIR, "Not a directory", "/x"),
        ModuleNotFoundError("No module named 'papermill'", name="papermill"),
    ],
)
def test_what_the_system_refuses_is_bad_input(capsys, error):
    assert exits.exit_code(raising(error), "x") == 2
    refused(capsys)


def test_what_the_project_refuses_is_bad_input(tmp_path, capsys):
    assert exits.exit_code(lambda: check_checkpoint("no/such/folder"), "x") == 2
    assert "no/such/folder" in refused(capsys)


@pytest.mark.parametrize(
    "work",
    [
        lambda: np.zeros(2).reshape(3),  # a ValueError, but nobody's input
        lambda: np.linalg.inv(np.zeros((2, 2))),
        lambda: torch.ones(2) @ torch.ones(3),
        lambda: {}["key"],
        raising(AssertionError("but not of the guarantee")),
        raising(pipeline.NotebookFailed("01-decode: DeadKernelError")),
        raising(ConnectionResetError("by peer")),
        raising(ModuleNotFoundError("No module named 'glance.gone'", name="glance.gone")),
    ],
)
def test_any_other_surprise_is_3_with_its_traceback_in_a_file_that_is_named(capsys, work):
    assert exits.exit_code(work, "x") == 3
    error = capsys.readouterr().err.strip()
    path = Path(re.search(r"\(traceback: (.+)\)$", error).group(1))
    assert "\n" not in error and "Traceback (most recent call last)" in path.read_text(encoding="utf-8")


def test_a_traceback_is_kept_where_the_project_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(exits, "BUILD", tmp_path / "file" / "build")
    path = exits.write_traceback(ValueError("x"), "reproduce")
    assert path.is_file() and tmp_path not in path.parents
    path.unlink()


def test_1_is_for_the_guarantee_alone(capsys):
    assert exits.exit_code(raising(exits.NotLossless("2 differ")), "x") == 1
    assert capsys.readouterr().err == "NOT LOSSLESS: 2 differ\n"


@pytest.mark.parametrize(("resumes", "says"), [(True, "the same command resumes"), (False, "starts again")])
def test_an_interrupt_says_what_is_true(capsys, resumes, says):
    assert exits.exit_code(raising(KeyboardInterrupt()), "x", resumes=resumes) == 130
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", ["main-table", "audit"])
def test_an_interrupted_command_that_goes_on_says_so(command, capsys, monkeypatch):
    monkeypatch.setattr(f"glance.cli._{command.replace('-', '_')}", lambda _: raising(KeyboardInterrupt())())
    assert cli.main([command]) == 130
    assert capsys.readouterr().err == "interrupted; the same command resumes\n"


def cell_error(name, *files):
    """Build what papermill raises for an error whose innermost frame lies in the last file."""
    lines = [f"\x1b[36mFile \x1b[39m\x1b[32m{file}:12\x1b[39m, in f(x)" for file in files]
    return PapermillExecutionError(1, 1, "", name, "it said\nthis", ["Cell In[1], line 1", *lines])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (cell_error("NotLossless"), 1),
        (cell_error("ValueError"), 2),
        (cell_error("ValueError", "/lib/site-packages/numpy/core.py", exits.PACKAGE / "tasks.py"), 2),
        (cell_error("Missing", exits.PACKAGE / "report" / "results.py"), 2),
        (cell_error("PermissionError", "/lib/pathlib.py"), 2),
        (cell_error("OSError", "/lib/pathlib.py"), 2),
        (cell_error("ModuleNotFoundError", "/lib/importlib.py"), 2),
        (cell_error("ValueError", exits.PACKAGE / "tasks.py", "/lib/site-packages/numpy/core.py"), 3),
        (cell_error("AssertionError"), 3),
        (cell_error("KeyError", exits.PACKAGE / "tasks.py"), 3),
        (cell_error("ConnectionError"), 3),
        (cell_error("SomeLibrarysError", "/lib/x.py"), 3),
        (RuntimeError("Kernel died"), 3),
        (OSError(errno.ENOSPC, "No space left on device"), 2),
    ],
)
def test_a_notebooks_error_has_the_same_codes(monkeypatch, capsys, error, code):
    monkeypatch.setattr("papermill.execute_notebook", lambda *_, **__: raising(error)())
    assert cli.main(["reproduce", "--run", "x", "--only", "04-plots"]) == code
    said = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(said) == 1 and ("traceback: " in said[0]) == (code == 3)


def test_a_killed_kernel_is_a_surprise(monkeypatch, tmp_path, capsys):
    document = json.loads((ROOT / "notebooks" / "04-plots.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    code[1]["source"] = ["import os, signal\n", "os.kill(os.getpid(), signal.SIGKILL)"]
    (tmp_path / "notebooks").mkdir()
    for name in ("01-decode", "02-audit", "03-fit"):
        shutil.copy(ROOT / "notebooks" / f"{name}.ipynb", tmp_path / "notebooks")
    shutil.copy(ROOT / "notebooks" / "pocket.yaml", tmp_path / "notebooks")
    (tmp_path / "notebooks" / "04-plots.ipynb").write_text(json.dumps(document), encoding="utf-8")
    monkeypatch.setattr(pipeline, "NOTEBOOKS", tmp_path / "notebooks")
    assert cli.main(["reproduce", "--run", "x", "--only", "04-plots"]) == 3
    error = capsys.readouterr().err
    assert "DeadKernelError" in error and "traceback: " in error


def test_a_copy_without_notebooks_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pipeline, "NOTEBOOKS", tmp_path / "none")
    assert cli.main(["reproduce"]) == 2
    assert "they come with the repository" in refused(capsys)


def test_settings_of_a_command(made, tmp_path, capsys):
    for more, says in (
        (["--max-pixels", "-5"], "max_pixels must be at least 1"),
        (["--device", "cuda:99"], "cuda devices"),
        (["--device", "abacus"], "device must be cuda, mps or cpu"),
        (["--dtype", "float8"], "dtype must be one of"),
    ):
        assert main_table(made, tmp_path, *more) == 2
        assert says in refused(capsys)


def spoilt(made, tmp_path, what):
    """Return a copy of the pair with one fault of its files."""
    shutil.copytree(made / "target", tmp_path / "target")
    shutil.copytree(made / "head", tmp_path / "head")
    part = tmp_path / what.partition("-")[0]
    weights = next(part.glob("*.safetensors"))
    kind = what.partition("-")[2]
    if kind == "lfs":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    elif kind == "bin":
        weights.rename(part / "pytorch_model.bin")
    elif kind == "cut":
        weights.write_bytes(weights.read_bytes()[:100])
    elif kind == "config":
        (part / "config.json").write_text("{")
    elif kind == "family":
        (part / "config.json").write_text('{"model_type": "no_such_family"}')
    elif kind == "weights":
        weights.unlink()
    elif kind == "gone":
        shutil.rmtree(part)
    return {"target": tmp_path / "target", "head": tmp_path / "head"}


KINDS = ("lfs", "bin", "cut", "config", "family", "weights", "gone")


@pytest.mark.parametrize("what", [f"{part}-{kind}" for part in ("target", "head") for kind in KINDS])
def test_a_checkpoint_that_cannot_be_loaded(made, tmp_path, capsys, what):
    pair = spoilt(made, tmp_path, what)
    assert main_table(made, tmp_path, **pair) == 2
    assert str(pair[what.partition("-")[0]]) in refused(capsys)


def test_a_run_folder_that_is_a_file(made, tmp_path, capsys):
    (tmp_path / "run").write_text("")
    assert main_table(made, tmp_path) == 2
    refused(capsys)


@pytest.mark.parametrize(
    "text", ["", "{}\n", "[1]\n", "not json\n", '"text"\n', "null\n", '{"arm": "tree"}\n', "\x00\n"]
)
def test_fit_law_on_what_is_no_round_log(tmp_path, capsys, text):
    for name in ("rounds.jsonl", "mine.jsonl"):
        path = tmp_path / name
        path.write_text(text)
        assert cli.main(["fit-law", str(path)]) == 2
        refused(capsys)
    assert cli.main(["fit-law", str(tmp_path)]) == 2


def test_fit_law_on_the_prompts_of_a_run(made, tmp_path, capsys):
    assert main_table(made, tmp_path) == 0
    capsys.readouterr()
    assert cli.main(["fit-law", str(tmp_path / "run" / "prompts.jsonl")]) == 2
    assert "rounds" in refused(capsys)
