"""Arms over tasks: every output is compared with ar's, rows follow the schema, a stopped run goes on where it stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import toy_run
from PIL import Image
from safetensors.torch import load_file, save_file

from glance import cli
from glance.records import read_rows
from glance.report.fit import fit_law
from glance.report.results import Results
from glance.report.summary import main_table, not_lossless, table_text
from glance.run import experiment
from glance.run.experiment import Plan, decode_tasks, load_pair, mean_costs, measure_costs, reuse


@pytest.fixture(scope="module")
def pair(made):
    return load_pair(str(made / "target"), str(made / "head"), dtype="float32", device="cpu")


def plan_of(made, **changes):
    settings = {"data": str(made / "data"), "n": 2, "max_new_tokens": 10, "budget": 7, "branch_k": 4}
    return Plan(**(settings | changes))


TIMED = ("ms_per_token", "ms_per_token_legacy", "draft_ms", "tree_ms", "verify_ms", "commit_ms", "rounds_sha256")


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
        assert sum(r["committed"] for r in mine) == (row["n_tokens"] - 1 if row["arm"] != "ar" else 0)
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


@pytest.fixture(scope="module")
def moved(made, tmp_path_factory):
    """A copy of the pair and its data, with one run in it: a place in which files can be replaced."""
    place = tmp_path_factory.mktemp("moved")
    shutil.copytree(made, place / "toy")
    folder = place / "toy"
    decode_tasks(load_copy(folder), plan_of(folder, n=1), place / "run", say=lambda line: None)
    return place


def load_copy(folder):
    return load_pair(str(folder / "target"), str(folder / "head"), dtype="float32", device="cpu")


def scale_one_weight(path, name_part):
    """Change one element of one tensor by one part in a million: the least of all retrainings."""
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name_part in name)
    flat = tensors[name].reshape(-1)
    flat[flat.numel() // 3] = flat[flat.numel() // 3] * (1 + 1e-6) + 1e-9
    save_file(tensors, path, metadata={"format": "pt"})


def edit_json(path, change):
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")


REPLACED = {
    "weights head": lambda toy: scale_one_weight(toy / "head" / "model.safetensors", "layers.0"),
    "weights target": lambda toy: scale_one_weight(toy / "target" / "model.safetensors", "visual"),
    "weights processor": lambda toy: edit_json(
        toy / "target" / "preprocessor_config.json", lambda values: values.update(image_mean=[0.1, 0.2, 0.3])
    ),
    "images docvqa": lambda toy: Image.new("RGB", (96, 64), "red").save(toy / "data" / "docvqa" / "1.png"),
    "data caption.jsonl": lambda toy: (toy / "data" / "caption.jsonl").write_text(
        (toy / "data" / "caption.jsonl").read_text(encoding="utf-8").replace("What is 1", "Who is 1"), encoding="utf-8"
    ),
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_was_replaced_in_the_same_place_is_another_run(moved, tmp_path, what):
    toy = tmp_path / "toy"
    shutil.copytree(moved / "toy", toy)
    shutil.copytree(moved / "run", tmp_path / "run")
    record = json.loads((tmp_path / "run" / "provenance.json").read_text(encoding="utf-8"))
    record["parameters"] |= {"target": str(toy / "target"), "head": str(toy / "head"), "data": str(toy / "data")}
    (tmp_path / "run" / "provenance.json").write_text(json.dumps(record), encoding="utf-8")
    decode_tasks(load_copy(toy), plan_of(toy, n=1), tmp_path / "run", say=lambda line: None)  # same files: the same run
    before = (tmp_path / "run" / "prompts.jsonl").read_bytes()
    REPLACED[what](toy)
    with pytest.raises(ValueError, match=rf"holds another run \({what}: '\w+' there, '\w+' now\)"):
        decode_tasks(load_copy(toy), plan_of(toy, n=1), tmp_path / "run", say=lambda line: None)
    assert (tmp_path / "run" / "prompts.jsonl").read_bytes() == before


def test_decoding_does_not_change_a_pairs_fingerprint_and_provenance_names_the_drafter(made, pair, tmp_path):
    decode_tasks(pair, plan_of(made, n=1), tmp_path, say=lambda line: None)
    record = json.loads((tmp_path / "provenance.json").read_text(encoding="utf-8"))
    assert record["weights"] == load_copy(made).weights == experiment.Pair(*pair_parts(pair)).weights
    assert record["drafter"] == {
        "name": "block",
        "head": type(pair.head).__name__,
        "block_size": pair.head.block_size,
        "mask_token_id": pair.head.mask_token_id,
        "target_layer_ids": list(pair.head.target_layer_ids),
    }
    table = main_table(tmp_path)
    assert table["block_size"] == pair.head.block_size
    for row in table["rows"]:
        assert row["acceptance_rate"] == pytest.approx((row["tau"] - 1) / (pair.head.block_size - 1))


def pair_parts(pair):
    return pair.target, pair.processor, pair.head, pair.names


def test_a_refused_slip_leaves_the_folder_to_nobody(made, pair, tmp_path):
    for slip in ({"budget": -1}, {"branch_k": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}):
        with pytest.raises(ValueError):
            decode_tasks(pair, plan_of(made, **slip), tmp_path / "run")
    broken = replace(pair, head=SimpleNamespace(block_size=1, mask_token_id=0, target_layer_ids=[0]))
    with pytest.raises(ValueError, match="block_size is 1"):
        decode_tasks(broken, plan_of(made, n=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_answers_that_start_no_round_have_no_tau_anywhere(made, pair, tmp_path):
    decode_tasks(pair, plan_of(made, max_new_tokens=1), tmp_path, say=lambda line: None)
    table = main_table(tmp_path)
    assert {row["rounds"] for row in table["rows"]} == {0}
    for row in table["rows"] + table["pooled"]:
        assert row["tau"] is row["accepted_length"] is row["acceptance_rate"] is row["tau_uncut"] is None
    assert json.loads((tmp_path / "main_table.json").read_text(encoding="utf-8")) == table
    lines = table_text(table).splitlines()
    assert all(line.split()[3] == "-" for line in lines[1:])
    results = Results(tmp_path)
    assert np.isnan(results.tau("tree")).all() and np.isnan(results.tau_ratio("tree", "chain")).all()
    with pytest.raises(ValueError, match="no rounds of arm 'tree'"):
        fit_law(tmp_path / "rounds.jsonl")


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
            *toy_run.flags(made),
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
        ({"budget": -1}, "budget must be at least 0, got -1"),
        ({"branch_k": 0}, "branch_k must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_pixels": -5}, "max_pixels must be at least 1"),
        ({"temperature": float("nan")}, "temperature must be 0 or a positive number"),
        ({"arms": ("ar", "tree-3", "tree-3")}, "is decoded once; twice: tree-3"),
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
