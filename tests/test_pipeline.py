"""The runner is strict before it starts, the whole pipeline runs from any folder, and a failed claim is an exit code.

The pipeline runs here in a copy of the project, on a toy pair and two toy tasks, with another folder as the working one.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import toy_run

from glance import pipeline
from glance.paths import NOTEBOOKS, ROOT
from glance.records import read_rows

TINY = {"n": 3, "budget": 7, "branch_k": 4, "max_new_tokens": 8, "audit_n": 2, "bfloat16_n": 1, "sweep_n": 1}


def test_the_folder_has_the_notebooks_of_the_list_and_no_others():
    found = {path.stem for path in NOTEBOOKS.glob("*.ipynb")}
    assert set(pipeline.PIPELINE) <= found <= {*pipeline.PIPELINE, "00-tour", "05-train-head", "06-inspect"}


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_saved_clean_and_well_formed(path):
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["metadata"]["kernelspec"]["name"] == "python3"
    assert document["metadata"]["kernelspec"]["display_name"] == "Python 3"
    assert "papermill" not in document["metadata"]
    assert [cell["id"] for cell in document["cells"]] == [str(i) for i in range(len(document["cells"]))]
    for cell in document["cells"]:
        assert "papermill" not in cell["metadata"]
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
            assert "../" not in source and not any(f"\n{word} " in f"\n{source}" for word in ("def", "class"))
    assert document["cells"][0]["cell_type"] == "markdown" and "*Reads*" in "".join(document["cells"][0]["source"])
    parameters = pipeline.notebook_parameters(path.stem)
    assert parameters and all(entry.help and entry.kind for entry in parameters.values()), (
        "each parameter has a comment, which is its manual"
    )


def test_profiles_name_parameters_of_the_notebooks():
    for profile in pipeline.PROFILES:
        plan = pipeline.plan_run(profile, {})
        assert [name for name, _ in plan] == list(pipeline.PIPELINE)
        assert all(parameters["run_name"] == profile for _, parameters in plan)
    decode = dict(pipeline.plan_run("paper", {})[0][1])
    assert decode["target"] == "Qwen/Qwen3-VL-8B-Instruct" and decode["dtype"] == "bfloat16"
    assert (decode["n"], decode["budget"], decode["max_new_tokens"], decode["data"]) == (100, 63, 256, "data/vl_eval")
    assert dict(pipeline.plan_run("paper", {})[1][1])["audit_n"] == 20


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (("pocket", {"buget": 31}), "no notebook has a parameter 'buget'; there are: .*budget"),
        (("pocket", {}, ["07-nothing"]), "'07-nothing' is not of the pipeline: 01-decode"),
        (("atlantis", {}), "neither a file nor one of pocket, paper, quick"),
    ],
)
def test_misspelt_names_stop_before_anything_runs(call, says):
    with pytest.raises(ValueError, match=says):
        pipeline.plan_run(*call)


def test_a_profile_file_must_be_a_mapping(tmp_path):
    (tmp_path / "mine.yaml").write_text("- a\n- b\n")
    with pytest.raises(ValueError, match="maps parameter names"):
        pipeline.plan_run(tmp_path / "mine.yaml", {})
    (tmp_path / "mine.yaml").write_text("budget: [\n")
    with pytest.raises(ValueError, match="not YAML"):
        pipeline.plan_run(tmp_path / "mine.yaml", {})


@pytest.mark.parametrize("spoil", ["untagged", "second", "kernel"])
def test_a_notebook_without_its_parameters_cell_is_an_error(tmp_path, monkeypatch, spoil):
    document = json.loads((NOTEBOOKS / "03-fit.ipynb").read_text())
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    if spoil == "untagged":
        code[0]["metadata"]["tags"] = []
    elif spoil == "second":
        code[1]["metadata"]["tags"] = ["parameters"]
    else:
        document["metadata"]["kernelspec"]["name"] = "my-env"
    (tmp_path / "03-fit.ipynb").write_text(json.dumps(document))
    monkeypatch.setattr(pipeline, "NOTEBOOKS", tmp_path)
    with pytest.raises(ValueError, match=r"03-fit\.ipynb: "):
        pipeline.notebook_parameters("03-fit")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the project beside a toy pair and toy tasks, and a foreign folder to run from."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("glance", "notebooks", "data/paper", "pyproject.toml"):
        source, target = ROOT / name, folder / "project" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    toy_run.write_pair(folder / "project" / "data" / "toy")
    toy_run.write_tasks(folder / "project" / "data" / "toy" / "tasks")
    (folder / "elsewhere").mkdir()
    profile = TINY | {
        "target": "data/toy/target",
        "head": "data/toy/head",
        "data": "data/toy/tasks",
        "dtype": "float32",
    }
    (folder / "tiny.yaml").write_text("".join(f"{name}: {value}\n" for name, value in profile.items()))
    return folder


def reproduce(copy: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the command in the copy, from a foreign folder, with a broken kernel of the same name in the user's home."""
    home = copy / "home"
    kernel = home / ".local" / "share" / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True, exist_ok=True)
    broken = {"argv": ["/nowhere/python", "-m", "ipykernel", "-f", "{connection_file}"], "display_name": "Python 3"}
    (kernel / "kernel.json").write_text(json.dumps(broken | {"language": "python"}))
    environment = os.environ | {"PYTHONPATH": str(copy / "project"), "OMP_NUM_THREADS": "1", "HOME": str(home)}
    command = [sys.executable, "-m", "glance", "reproduce", "--profile", str(copy / "tiny.yaml"), *arguments]
    return subprocess.run(
        command, cwd=copy / "elsewhere", env=environment, capture_output=True, text=True, timeout=3600
    )


@pytest.mark.slow
def test_the_whole_pipeline_runs_from_a_foreign_folder(copy):
    done = reproduce(copy)
    assert done.returncode == 0, done.stderr[-3000:]
    run = copy / "project" / "data" / "runs" / "tiny"
    rows = read_rows(run / "prompts.jsonl")
    assert len(rows) == 3 * 2 * 4 and all(row["matches_ar"] for row in rows)
    assert json.loads((run / "audit.json").read_text())["verdict"] == "exact"
    law = json.loads((run / "law.json").read_text())
    assert {"caption", "docvqa"} <= set(law["laws"]) and law["pooled"]["n"]
    figures = {path.name for path in (copy / "project" / "figures" / "tiny").iterdir()}
    assert {"law.pdf", "width.png", "budget.svg", "time.pdf", "claims.md"} <= figures
    assert {f"table-{name}.{kind}" for name in ("main", "audit", "law") for kind in ("md", "csv", "tex")} <= figures
    for notebook in pipeline.PIPELINE:
        executed = copy / "project" / "build" / "tiny" / f"{notebook}.ipynb"
        assert executed.with_suffix(".html").is_file() and executed.stat().st_size < 3e6
        assert "application/vnd.jupyter.widget" not in executed.read_text()
    assert "identical 3/3" in done.stdout and "audit: exact" in done.stdout and "not measured here" in done.stdout
    provenance = json.loads((run / "provenance.json").read_text())["parameters"]
    assert provenance["target"] == "data/toy/target", "no folder of this machine in a record"
    again = reproduce(copy, "--only", "01-decode")
    assert again.returncode == 0, again.stderr[-2000:]
    assert read_rows(run / "prompts.jsonl") == rows, "a second run finds everything done"
    changed = reproduce(copy, "--only", "01-decode", "-p", "budget", "15")
    assert changed.returncode == 2 and "budget: 7 there, 15 now" in changed.stderr


@pytest.mark.slow
def test_a_planted_divergence_fails_the_pipeline_and_leaves_its_report(copy):
    source = copy / "project" / "glance" / "target.py"
    honest = source.read_text()
    line = "self.delta = int(position_ids.max()) + 1 - input_ids.shape[1]"
    assert line in honest
    source.write_text(honest.replace(line, "self.delta = 0"))
    try:
        decode = reproduce(copy, "--run", "broken", "--only", "01-decode")
        audit = reproduce(copy, "--run", "broken", "--only", "02-audit")
    finally:
        source.write_text(honest)
    assert decode.returncode == 1 and "NOT LOSSLESS" in decode.stderr and "differ from ar" in decode.stderr
    run = copy / "project" / "data" / "runs" / "broken"
    assert any(not row["matches_ar"] for row in read_rows(run / "prompts.jsonl"))
    assert audit.returncode == 1 and json.loads((run / "audit.json").read_text())["verdict"] == "fault"


@pytest.mark.slow
def test_bad_input_is_one_line_and_exit_code_2(copy):
    bad = reproduce(copy, "--run", "bad", "--only", "01-decode", "-p", "tasks", "[chart]")
    assert bad.returncode == 2 and "has no task chart" in bad.stderr.strip().splitlines()[-1]
    early = reproduce(copy, "--run", "bad", "--only", "04-plots")
    assert early.returncode == 2 and "run 01-decode first" in early.stderr.strip().splitlines()[-1]


def test_the_law_can_be_fitted_without_loops_from_the_notebook():
    cells = json.loads((NOTEBOOKS / "03-fit.ipynb").read_text("utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert pipeline.notebook_parameters("03-fit")["loops"][:2] == ("bool", True)
    assert '"loops": loops' in text, "handed to fit_law"
    with pytest.raises(ValueError, match="loops is true or false"):
        pipeline.plan_run("pocket", {"loops": "perhaps"}, ["03-fit"])
    assert pipeline.plan_run("pocket", {"loops": "false"}, ["03-fit"])[0][1]["loops"] is False
