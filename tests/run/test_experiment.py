"""Arms over tasks: every output is compared with ar's, rows follow the schema, a stopped run goes on where it stopped."""

import os
import signal
import subprocess
import sys

import pytest
import toy_run

from glance import cli
from glance.records import read_rows
from glance.report.summary import main_table, not_lossless, table_text
from glance.run import experiment
from glance.run.experiment import Plan, decode_tasks, load_pair, mean_costs, measure_costs, reuse


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    toy_run.write_pair(folder)
    toy_run.write_tasks(folder / "data")
    return folder


@pytest.fixture(scope="module")
def pair(made):
    return load_pair(str(made / "target"), str(made / "head"), dtype="float32", device="cpu")


def plan_of(made, **changes):
    settings = {"data": str(made / "data"), "n": 2, "max_new_tokens": 10, "budget": 7, "branch_k": 4}
    return Plan(**(settings | changes))


TIMED = ("ms_per_token", "ms_per_token_legacy", "draft_ms", "tree_ms", "verify_ms", "commit_ms")


def untimed(path):
    """Return a record file's rows without what the clock said, in a stated order."""
    rows = [{k: v for k, v in row.items() if k not in TIMED} for row in read_rows(path)]
    return sorted(rows, key=lambda row: (row["arm"], row["task"], row["prompt"], row.get("round", 0)))


def test_every_arm_on_every_prompt_equals_ar(made, pair, tmp_path):
    plan = plan_of(made, arms=("ar", "chain", "tree", "tree-3"), trees=True)
    said = []
    decode_tasks(pair, plan, tmp_path / "run", say=said.append)
    rows = read_rows(tmp_path / "run" / "prompts.jsonl")
    assert len(rows) == 4 * 2 * 3 and not_lossless(tmp_path / "run") == []
    assert {row["warmup"] for row in rows if row["prompt"] == 0} == {True}
    assert len(said) == 2 and "identical 8/8" in said[0]
    rounds = read_rows(tmp_path / "run" / "rounds.jsonl")
    for row in rows:
        mine = [r for r in rounds if (r["arm"], r["task"], r["prompt"]) == (row["arm"], row["task"], row["prompt"])]
        assert sum(r["tau"] for r in mine) == (row["n_tokens"] - 1 if row["arm"] != "ar" else 0)
        assert all(len(r["tree"]["tokens"]) == r["tree_size"] for r in mine)
    table = main_table(tmp_path / "run")
    assert [row["tau"] for row in table["rows"] if row["arm"] == "ar"] == [1.0, 1.0]
    assert all(row["identical"] == row["n"] == 2 for row in table["rows"])
    assert "SLOWDOWN" in table_text({**table, "rows": [dict(table["rows"][0], speedup=0.5)], "pooled": []})


KILLED = """
import os, signal, sys
from glance.cli import main

rows = []

def watch(event, args):
    if event == "open" and str(args[0]).endswith("prompts.jsonl") and str(args[1]).startswith("a"):
        if len(rows) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        rows.append(args)

sys.addaudithook(watch)
sys.exit(main(sys.argv[1:]))
"""  # the command, killed where it would write its fifth row, however fast the machine is


def test_a_killed_run_resumes_to_the_same_rows(made, pair, tmp_path):
    plan = plan_of(made, n=4)
    decode_tasks(pair, plan, tmp_path / "whole", say=lambda line: None)
    command = [
        "main-table",
        "--target",
        str(made / "target"),
        "--head",
        str(made / "head"),
    ]
    command += [
        "--data",
        str(made / "data"),
        "--n",
        "4",
        "--max-new",
        "10",
        "--budget",
        "7",
        "--branch-k",
        "4",
        "--chain",
    ]
    command += ["--run-folder", str(tmp_path / "cut"), "--device", "cpu", "--dtype", "float32", "--resume"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-c", KILLED, *command], env=environment, stdout=subprocess.DEVNULL)
    path = tmp_path / "cut" / "prompts.jsonl"
    assert killed.returncode == -signal.SIGKILL and len(read_rows(path)) == 4
    with path.open("a") as file:
        file.write('{"arm": "tr')  # and what a kill in mid-write leaves
    again = [sys.executable, "-m", "glance", *command]
    assert subprocess.run(again, env=environment, stdout=subprocess.DEVNULL).returncode == 0
    for name in ("prompts.jsonl", "rounds.jsonl"):
        assert untimed(tmp_path / "cut" / name) == untimed(tmp_path / "whole" / name)


def test_a_changed_parameter_is_refused(made, pair, tmp_path):
    decode_tasks(pair, plan_of(made, n=1), tmp_path, say=lambda line: None)
    with pytest.raises(ValueError, match="budget: 7 there, 3 now"):
        decode_tasks(pair, plan_of(made, n=1, budget=3), tmp_path)


def test_a_difference_from_ar_is_recorded_and_fails_the_command(made, tmp_path, monkeypatch, capsys):
    honest = experiment.generate

    def planted(*args, **settings):
        ids, stats = honest(*args, **settings)
        ids = ids.clone()
        ids[0, -1] = (ids[0, -1] + 1) % 200
        return ids, stats

    monkeypatch.setattr(experiment, "generate", planted)
    code = cli.main(
        [
            "main-table",
            "--target",
            str(made / "target"),
            "--head",
            str(made / "head"),
            "--data",
            str(made / "data"),
            "--n",
            "1",
            "--max-new",
            "6",
            "--run-folder",
            str(tmp_path / "run"),
            "--dtype",
            "float32",
            "--out",
            str(tmp_path / "table.json"),
            "--round-log",
            str(tmp_path / "log.jsonl"),
        ]
    )
    assert code == 1 and "NOT LOSSLESS: 4 outputs differ" in capsys.readouterr().err
    assert len(not_lossless(tmp_path / "run")) == 4
    assert (tmp_path / "table.json").is_file() and read_rows(tmp_path / "log.jsonl")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n": 0}, "n must be at least 1"),
        ({"arms": ("tree",)}, "arms must begin with ar"),
        ({"arms": ("ar", "bush")}, "arm 'bush' is not known"),
        ({"arms": ("ar", "auto"), "extend_budget": 8}, "auto goes with extend_budget=0"),
        ({"tasks": ("chart",)}, "has no task chart; it has: caption, docvqa"),
        ({"data": "nowhere"}, "nowhere has no task files"),
    ],
)
def test_a_plan_refuses_what_makes_no_sense(made, changes, says):
    with pytest.raises(ValueError, match=says):
        plan_of(made, **changes)


def test_unknown_dtypes_and_folders_are_refused(made):
    with pytest.raises(ValueError, match="dtype must be one of float32"):
        load_pair(str(made / "target"), str(made / "head"), dtype="fp8")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_pair(str(made / "data"), str(made / "head"))


def test_costs_are_measured_for_every_budget_and_reports_are_reused(made, pair, tmp_path):
    plan = plan_of(made)
    calls = []

    def make():
        calls.append(1)
        return mean_costs([measure_costs(pair, prompt, plan, [0, 7], repeats=2) for prompt in plan.prompts()[:2]])

    costs = reuse(tmp_path / "costs.json", pair, plan, make)
    assert [row["nodes"] for row in costs["verify"]] == [0, 7] and costs["draft_ms"] > 0 and costs["ar_ms"] > 0
    assert reuse(tmp_path / "costs.json", pair, plan, make)["verify"] == costs["verify"] and len(calls) == 1
    reuse(tmp_path / "costs.json", pair, plan_of(made, budget=3), make)
    assert len(calls) == 2, "another plan's report is not reused"


def test_sampling_arms_run_and_repeat(made, pair):
    plan = plan_of(made, temperature=1.0, seed=3)
    ids, positions = experiment.prepare(pair, plan.prompts()[0], plan)
    first, again = (experiment.decode_arm("tree", pair, ids, positions, plan)[0] for _ in range(2))
    assert first == again
