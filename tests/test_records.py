"""Records: a kill loses nothing that was sealed and doubles nothing; another run's folder is refused, not mixed."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from view_rounds import make_rounds

from glance.files import sha256, write_json
from glance.metrics import repeated_share
from glance.records import PROMPT_FIELDS, ROUND_FIELDS, TREE_FIELDS, read_rows, round_row, unpack_round
from glance.run.folder import Run, provenance


def prompt_row(prompt=0, arm="tree", **changes):
    values = {str: "x", int: 1, float: 1.5, bool: False}
    return {name: values[kind] for name, kind in PROMPT_FIELDS.items()} | {"arm": arm, "prompt": prompt} | changes


def round_rows(prompt=0, arm="tree", n=3):
    values = {str: "x", int: 1, float: 1.5, bool: False}
    row = {name: values[kind] for name, kind in ROUND_FIELDS.items()}
    return [row | {"arm": arm, "prompt": prompt, "round": i} for i in range(n)]


def test_rows_come_back_and_are_done(tmp_path):
    run = Run(tmp_path / "run", provenance({"n": 1}))
    run.add(prompt_row(0, tau=float("nan")), round_rows(0))
    again = Run(tmp_path / "run", provenance({"n": 1}))
    assert set(again.done) == {("tree", "x", 0)}
    assert read_rows(tmp_path / "run" / "prompts.jsonl")[0]["tau"] is None, "nan is null in JSON"
    assert [row["round"] for row in read_rows(tmp_path / "run" / "rounds.jsonl")] == [0, 1, 2]


@settings(max_examples=25)
@given(cut=st.integers(1, 10_000))
def test_a_kill_at_any_byte_leaves_whole_prompts(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("run")
    run = Run(folder, provenance({}))
    for prompt in range(3):
        run.add(prompt_row(prompt), round_rows(prompt))
    # Bytes reach the disk in this order: rounds of a prompt, then its row. Replay the log up to the cut.
    rounds, prompts = ((folder / f"{name}.jsonl").read_bytes().splitlines(True) for name in ("rounds", "prompts"))
    written = [part for i in range(3) for part in (*rounds[3 * i : 3 * i + 3], prompts[i])]
    kept, left = {"rounds": b"", "prompts": b""}, cut
    for i, line in enumerate(written):
        kept["prompts" if i % 4 == 3 else "rounds"] += line[: max(0, left)]
        left -= len(line)
    for name, data in kept.items():
        (folder / f"{name}.jsonl").write_bytes(data)
    again = Run(folder, provenance({}))
    sealed = {row["prompt"] for row in read_rows(folder / "prompts.jsonl")}
    assert {key[2] for key in again.done} == sealed
    assert [row["prompt"] for row in read_rows(folder / "rounds.jsonl")] == [
        p for p in sorted(sealed) for _ in range(3)
    ]
    for prompt in set(range(3)) - sealed:
        again.add(prompt_row(prompt), round_rows(prompt))
    assert sorted(row["prompt"] for row in read_rows(folder / "prompts.jsonl")) == [0, 1, 2]
    assert len(read_rows(folder / "rounds.jsonl")) == 9


def test_another_runs_folder_is_refused(tmp_path):
    Run(tmp_path, provenance({"n": 1, "budget": 63}, device="cpu", data={"a.jsonl": "12"}))
    with pytest.raises(ValueError, match="budget: 63 there, 31 now"):
        Run(tmp_path, provenance({"n": 1, "budget": 31}, device="cpu", data={"a.jsonl": "12"}))
    with pytest.raises(ValueError, match=r"a\.jsonl: '12' there, '34' now"):
        Run(tmp_path, provenance({"n": 1, "budget": 63}, device="cpu", data={"a.jsonl": "34"}))
    with pytest.raises(ValueError, match="device: 'cpu' there, 'cuda' now"):
        Run(tmp_path, provenance({"n": 1, "budget": 63}, device="cuda", data={"a.jsonl": "12"}))


def test_a_row_out_of_the_schema_is_refused(tmp_path):
    run = Run(tmp_path, provenance({}))
    with pytest.raises(ValueError, match="unknown fields \\['speed'\\]"):
        run.add(prompt_row(speed=3), [])
    with pytest.raises(ValueError, match="missing fields \\['tau'\\]"):
        run.add({name: value for name, value in prompt_row().items() if name != "tau"}, [])
    assert read_rows(tmp_path / "prompts.jsonl") == []


def test_a_corrupt_line_in_the_middle_is_named(tmp_path):
    run = Run(tmp_path, provenance({}))
    run.add(prompt_row(), [])
    path = tmp_path / "prompts.jsonl"
    path.write_text("garbage\n" + path.read_text())
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: not JSON"):
        read_rows(path)
    path.write_text(json.dumps({"arm": "ar"}) + "\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: missing budget"):
        read_rows(path)


def test_provenance_says_what_made_the_numbers():
    record = provenance({"n": 3}, device="cpu")
    assert record["versions"]["torch"] and record["versions"]["transformers"] and record["machine"]["cpus"]
    assert record["parameters"] == {"n": 3} and record["device"] == "cpu"
    assert json.dumps(record)


def test_hashes_json_and_repeats(tmp_path):
    assert sha256([1, 2]) == sha256(np.array([1, 2])) != sha256([12])
    path = write_json(tmp_path / "deep" / "x.json", {"a": np.float64("nan"), "b": np.int64(3), 4: (1, np.bool_(True))})
    assert json.loads(path.read_text()) == {"a": None, "b": 3, "4": [1, True]}
    assert repeated_share("one two three") == 0.0
    assert repeated_share("a b c d a b c d", n=4) == pytest.approx(1 / 5)


def test_a_round_comes_back_from_its_row_with_all_that_views_take():
    for report in make_rounds():
        row = json.loads(json.dumps(round_row(report, arm="tree", task="x", prompt=1, warmup=False, trees=True)))
        assert set(row) == {*ROUND_FIELDS, "tree"} and set(row["tree"]) == set(TREE_FIELDS)
        again = unpack_round(row)
        for name in ("tokens", "parents", "depths", "ranks"):
            assert getattr(again.tree, name).tolist() == getattr(report.tree, name).tolist()
        assert np.allclose(again.tree.logps, report.tree.logps, atol=1e-4)
        for name in ("index", "start", "root", "accepted", "path", "bonus", "committed", "choices", "entropy", "ms"):
            assert getattr(again, name) == getattr(report, name), name
        packed = round_row(again, arm="tree", task="x", prompt=1, warmup=False, trees=True)
        assert packed == row, "and packs to the same row"
