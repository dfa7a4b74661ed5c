"""A run read back: nothing that was cut, doubled or mixed is summed up; what has no value is shown as none; one interval."""

import json

import numpy as np
import pytest
import synthetic_run
from hypothesis import given, settings
from hypothesis import strategies as st

from glance import pipeline
from glance.files import read_json, write_json
from glance.records import read_rows
from glance.report import claims, tables
from glance.report.fit import fit_law
from glance.report.results import Results
from glance.report.summary import main_table, short_table, table_text
from glance.run.folder import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return synthetic_run.write_run(
        tmp_path_factory.mktemp("made-up") / "run", n=3, tasks=("caption", "docvqa"), sweep=False
    )


def copied(folder, place):
    place.mkdir()
    for name in ("prompts.jsonl", "rounds.jsonl", "provenance.json"):
        (place / name).write_bytes((folder / name).read_bytes())
    return place


@settings(max_examples=10)
@given(share=st.floats(0, 1))
def test_no_reader_takes_rounds_that_were_cut(folder, tmp_path_factory, share):
    run = copied(folder, tmp_path_factory.mktemp("cut") / "run")
    path = run / "rounds.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[: int(share * (len(data) - 1))])
    readers = (fit_law, lambda _: main_table(run), lambda _: Results(run).rounds, lambda _: Results(run).split("tree"))
    for read in readers:
        with pytest.raises(ValueError, match=r"answers are not what was written .*: run 01-decode again") as raised:
            read(path)
        assert "\n" not in str(raised.value)


def test_no_reader_takes_doubled_rows(folder, tmp_path):
    run = copied(folder, tmp_path / "run")
    for name in ("prompts.jsonl", "rounds.jsonl"):
        (run / name).write_bytes((folder / name).read_bytes() * 2)
    for read in (lambda: main_table(run), lambda: Results(run).prompts, lambda: fit_law(run / "rounds.jsonl")):
        with pytest.raises(ValueError, match="doubled rows"):
            read()


def test_a_round_log_of_its_own_is_read_as_it_is(folder, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes((folder / "rounds.jsonl").read_bytes())
    assert fit_law(log, n_boot=20)["pooled"]["b1"] == fit_law(folder / "rounds.jsonl", n_boot=20)["pooled"]["b1"]


def test_the_block_size_is_the_provenances_and_not_what_was_accepted(folder, tmp_path):
    run = copied(folder, tmp_path / "run")
    record = read_json(run / "provenance.json")
    farthest = max(row["accepted"] for row in read_rows(run / "rounds.jsonl"))
    record["drafter"]["block_size"] = farthest + 10
    write_json(run / "provenance.json", record)
    assert fit_law(run / "rounds.jsonl", n_boot=20)["cap"] == farthest + 9
    table = main_table(run)
    assert table["block_size"] == farthest + 10
    for row in table["rows"]:
        assert row["acceptance_rate"] == pytest.approx((row["tau"] - 1) / (farthest + 9))
    del record["drafter"]
    write_json(run / "provenance.json", record)
    assert {row["acceptance_rate"] for row in main_table(run)["rows"]} == {None}


def test_answers_that_loop_are_counted_and_can_be_left_out_of_the_law(folder, tmp_path):
    run = copied(folder, tmp_path / "run")
    prompts = read_rows(run / "prompts.jsonl")
    rounds = read_rows(run / "rounds.jsonl")
    for row in (*prompts, *rounds):
        row["looped"] = row["task"] == "docvqa" and row["prompt"] == 2
    for name in ("prompts.jsonl", "rounds.jsonl"):
        (run / name).unlink()
    with Run(run, read_json(run / "provenance.json")) as again:
        for row in prompts:
            again.add(row, [r for r in rounds if all(r[key] == row[key] for key in ("arm", "task", "prompt"))])
    table = main_table(run)
    assert [row["looped"] for row in table["rows"]] == [0, 0, 0, 1, 1, 1]
    assert "1 of 3 LOOP" in table_text(table)
    every, without = (fit_law(run / "rounds.jsonl", n_boot=20, loops=loops) for loops in (True, False))
    mine = [row for row in rounds if row["looped"] and row["arm"] == "tree" and not row["truncated"]]
    assert every["laws"]["docvqa"]["n"] - without["laws"]["docvqa"]["n"] == len(mine) > 0
    assert every["laws"]["caption"] == without["laws"]["caption"] and (every["loops"], without["loops"]) == (
        True,
        False,
    )


def test_an_interval_is_the_same_in_table_and_ledger(folder):
    table, results = read_json(folder / "main_table.json"), Results(folder)
    for row in table["rows"]:
        interval = results.speedup(row["arm"], tasks=[row["task"]])
        assert interval == pytest.approx((row["speedup"], row["speedup_low"], row["speedup_high"]))
    for row in table["pooled"]:
        assert results.speedup(row["arm"]) == pytest.approx((row["speedup"], row["speedup_low"], row["speedup_high"]))


def test_a_task_whose_answers_start_no_round_is_shown_and_stops_nothing(folder, tmp_path, monkeypatch):
    run = copied(folder, tmp_path / "run")
    with Run(run, read_json(run / "provenance.json")) as again:
        for (_, task, _), row in list(again.done.items()):
            if task == "caption":
                facts = {"task": "yesno", "n_tokens": 1, "rounds": 0, "tau": float("nan"), "tree_size": 0.0}
                again.add({**row, **facts, "ms_per_token": 3.0}, [])
    table = main_table(run)
    assert table == json.loads((run / "main_table.json").read_text(encoding="utf-8"))
    yesno = [row for row in table["rows"] if row["task"] == "yesno"]
    assert [row["tau"] for row in yesno] == [None] * 3 and all(row["speedup"] == 1 for row in yesno)
    assert "| yesno | - | - | - |" in short_table(table)
    assert sum(" - " in line for line in table_text(table).splitlines()) == 3
    law = fit_law(run / "rounds.jsonl", n_boot=20, out=run / "law.json")
    assert "yesno" not in law["laws"]
    write_json(run / "audit.json", synthetic_run.AUDIT)
    results = Results(run)
    assert np.isnan(results.tau("tree", ["yesno"])).all() and results.tau("tree").low > 1
    assert "yesno" in tables.main_table(results).markdown()
    assert "claims" in claims.count(claims.ledger(results))
    monkeypatch.setattr(pipeline, "RUNS", tmp_path)
    assert "tau     -" in pipeline.summary("run")
