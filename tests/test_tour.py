"""The notebooks that nobody runs in batch: the tour and the inspector, executed in a folder of their own.

Each copy has one more cell, which writes what it computed to a file; cell outputs are not looked at.
"""

import json
from types import SimpleNamespace

import papermill
import pytest
import toy_run
from papermill.exceptions import PapermillExecutionError

from glance.files import sha256
from glance.paths import NOTEBOOKS, POCKET
from glance.records import read_rows
from glance.report.results import Missing, Results
from glance.run import experiment

pytestmark = pytest.mark.slow
TOUR = {
    "plain": "[ids for ids, _ in greedy]",
    "tree": "[ids for ids, _ in drafted]",
    "taus": "[stats.tau for _, stats in drafted]",
    "fused": "list(fused.shape)",
    "sizes": "[len(one.tree) for each in rounds for one in each]",
    "committed": "[[token for one in each for token in one.committed] for each in rounds]",
    "names": "names",
}
INSPECT = {
    "committed": "[told[0].root, *(token for one in told for token in one.committed)]",
    "row": "row",
    "table": "table.to_dict('list')",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Paths of the pocket pair and tasks where both are there, else of a toy pair and toy tasks."""
    if (POCKET / "target" / "config.json").is_file() and (POCKET / "head" / "config.json").is_file():
        return {name: str(POCKET / name) for name in ("target", "head")} | {"data": str(POCKET / "eval")}
    folder = toy_run.write_pair(tmp_path_factory.mktemp("toy"))
    toy_run.write_tasks(folder / "tasks")
    return {name: str(folder / name) for name in ("target", "head")} | {"data": str(folder / "tasks")}


@pytest.fixture(scope="module")
def run(pair, tmp_path_factory):
    """A run folder that kept its trees, and one that did not."""
    folder = tmp_path_factory.mktemp("runs")
    loaded = experiment.load_pair(pair["target"], pair["head"], dtype="float32")
    settings = {"data": pair["data"], "tasks": ("docvqa",), "n": 1, "budget": 7, "max_new_tokens": 12}
    experiment.decode_tasks(loaded, experiment.Plan(**settings, trees=True), folder / "kept", say=lambda line: None)
    experiment.decode_tasks(loaded, experiment.Plan(**settings), folder / "bare", say=lambda line: None)
    return folder


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Run a notebook with one more cell that writes the named expressions, and return their values."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")

    def run(notebook, parameters, facts):
        document = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text(encoding="utf-8"))
        pairs = ", ".join(f"{name!r}: {expression}" for name, expression in facts.items())
        source = f"import json\nPath({str(tmp_path / 'facts.json')!r}).write_text(json.dumps({{{pairs}}}))"
        cell = {"cell_type": "code", "id": "facts", "metadata": {}, "outputs": [], "execution_count": None}
        document["cells"].append(cell | {"source": source})
        copy = tmp_path / f"{notebook}.ipynb"
        copy.write_text(json.dumps(document), encoding="utf-8")
        settings = {"kernel_name": "python3", "cwd": str(tmp_path), "progress_bar": False}
        papermill.execute_notebook(str(copy), str(tmp_path / "executed.ipynb"), parameters, **settings)
        return SimpleNamespace(**json.loads((tmp_path / "facts.json").read_text()))

    return run


def test_the_tour_runs_and_its_text_is_greedy(execute, pair):
    small = {"budget": 7, "branch_k": 4, "max_new_tokens": 16, "prompts": [["docvqa", 2], ["caption", 1]]}
    image = str(next((POCKET / "eval").glob("*/*.png"), NOTEBOOKS.parent / "figures" / "tree.png"))
    tour = execute("00-tour", pair | small | {"image": image, "question": "What is it?"}, TOUR)
    assert tour.names == ["docvqa, line 2", "caption, line 1", "own, line 0"]
    assert tour.tree == tour.plain and all(tour.tree)
    assert [ids[1:] for ids in tour.tree] == tour.committed, "rounds commit all but the prefill's token"
    assert all(tau >= 1 for tau in tour.taus) and max(tour.sizes) == 7 and len(tour.fused) == 3


def test_the_inspector_shows_what_the_run_recorded(execute, run):
    shown = execute("06-inspect", {"run_name": str(run / "kept"), "task": "docvqa", "prompt": 1}, INSPECT)
    rows = [r for r in read_rows(run / "kept" / "rounds.jsonl") if (r["arm"], r["prompt"]) == ("tree", 1)]
    assert sha256(shown.committed) == shown.row["sha256"], "the rounds are the whole answer"
    for name in ("entropy", "accepted", "tree_size", "verify_ms"):
        assert shown.table[name] == [row[name] for row in rows]


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"run_name": "bare"}, "bare kept no trees: decode it again, under another name, with trees=True"),
        ({"run_name": "nowhere"}, "nowhere has no prompts.jsonl: run 01-decode first"),
    ],
)
def test_the_inspector_says_what_is_missing_in_one_line(execute, run, parameters, says):
    parameters = {"task": "docvqa"} | parameters | {"run_name": str(run / parameters["run_name"])}
    with pytest.raises(PapermillExecutionError) as error:
        execute("06-inspect", parameters, INSPECT)
    assert error.value.ename == "Missing" and error.value.evalue.endswith(says)
    assert "\n" not in error.value.evalue


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (("caption", 1, "tree"), "no answer of task caption, prompt 1, arm tree; it has tasks docvqa"),
        (("docvqa", 9, "tree"), "it has prompts 0 to 1"),
        (("docvqa", 1, "tree-9"), "it has arms .*chain"),
        (("docvqa", 1, "ar"), "plain decoding, which has no rounds"),
    ],
)
def test_an_answer_that_is_not_there_says_what_is(run, key, says):
    with pytest.raises(Missing, match=says):
        Results(run / "kept").answer(*key)


def test_the_runs_tokenizer_spells_its_tokens(run):
    results = Results(run / "kept")
    row, rounds = results.answer("docvqa", 1)
    ids = [rounds[0].root, *(token for one in rounds for token in one.committed)]
    assert results.words.decode(ids, skip_special_tokens=True) == row["text"]
