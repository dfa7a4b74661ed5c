"""Records: a kill, a cut file or two writers lose nothing that was sealed and double nothing; no two runs mix."""

import json
import multiprocessing
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import made_round
from view_rounds import make_rounds

from glance.files import read_json, sha256, write_json
from glance.metrics import repeated_share
from glance.records import (
    PROMPT_FIELDS,
    ROUND_FIELDS,
    TREE_FIELDS,
    Round,
    read_prompts,
    read_rounds,
    read_rows,
    round_row,
    unpack_round,
)
from glance.run.folder import Run, differences, provenance
from glance.tree import make_tree

SEALED_BY_RUN = ("rounds_kept", "rounds_sha256")


def prompt_row(prompt=0, arm="tree", **changes):
    values = {str: "x", int: 1, float: 1.5, bool: False}
    row = {name: values[kind] for name, kind in PROMPT_FIELDS.items() if name not in SEALED_BY_RUN}
    return row | {"arm": arm, "prompt": prompt} | changes


def round_rows(prompt=0, arm="tree", n=3, **changes):
    values = {str: "x", int: 1, float: 1.5, bool: False}
    row = {name: values[kind] for name, kind in ROUND_FIELDS.items()} | changes
    return [row | {"arm": arm, "prompt": prompt, "round": i} for i in range(n)]


def write_three(folder):
    """Write a folder of three answers by two arms: ar without rounds, tree with some."""
    with Run(folder, provenance({})) as run:
        for prompt in range(3):
            run.add(prompt_row(prompt, arm="ar"), [])
            run.add(prompt_row(prompt), round_rows(prompt, n=1 + prompt))
    return folder


def finish(folder):
    """Go on with a folder as a resumed run does: decode again what is not done."""
    with Run(folder, provenance({})) as run:
        before = set(run.done)
        for prompt in range(3):
            if ("ar", "x", prompt) not in run.done:
                run.add(prompt_row(prompt, arm="ar"), [])
            if ("tree", "x", prompt) not in run.done:
                run.add(prompt_row(prompt), round_rows(prompt, n=1 + prompt))
    return before


def assert_whole(folder):
    """Each answer once, each with all of its rounds."""
    prompts = read_prompts(folder / "prompts.jsonl")
    rounds = read_rounds(folder / "rounds.jsonl")
    assert sorted((row["arm"], row["prompt"]) for row in prompts) == [
        (arm, i) for arm in ("ar", "tree") for i in range(3)
    ]
    assert sorted((row["prompt"], row["round"]) for row in rounds) == [(i, j) for i in range(3) for j in range(1 + i)]
    assert len(read_rows(folder / "rounds.jsonl")) == 6


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return write_three(tmp_path_factory.mktemp("three") / "run")


def copied(three, tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(three, folder)
    return folder


def test_rows_come_back_and_are_done(tmp_path):
    with Run(tmp_path / "run", provenance({"n": 1})) as run:
        run.add(prompt_row(0, tau=float("nan")), round_rows(0))
    with Run(tmp_path / "run", provenance({"n": 1})) as again:
        assert set(again.done) == {("tree", "x", 0)}
    assert read_rows(tmp_path / "run" / "prompts.jsonl")[0]["tau"] is None, "nan is null in JSON"
    assert [row["round"] for row in read_rounds(tmp_path / "run" / "rounds.jsonl")] == [0, 1, 2]


@settings(max_examples=25)
@given(
    text=st.text(st.characters(codec="utf-8")) | st.sampled_from(["a\u2028b", "\u2029", "\x85\r\n\x1c\x0b", "\ufeff"])
)
def test_any_text_comes_back(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("run")
    with Run(folder, provenance({})) as run:
        run.add(prompt_row(0, text=text), round_rows(0, task="x"))
    with Run(folder, provenance({})) as again:
        assert again.done["tree", "x", 0]["text"] == text
    assert read_prompts(folder / "prompts.jsonl")[0]["text"] == text and len(read_rounds(folder / "rounds.jsonl")) == 3


@settings(max_examples=25)
@given(cut=st.integers(1, 10_000))
def test_a_kill_at_any_byte_leaves_whole_prompts(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("run")
    with Run(folder, provenance({})) as run:
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
    with Run(folder, provenance({})) as again:
        sealed = {row["prompt"] for row in read_rows(folder / "prompts.jsonl")}
        assert {key[2] for key in again.done} == sealed
        rows = read_rows(folder / "rounds.jsonl")
        assert [row["prompt"] for row in rows] == [p for p in sorted(sealed) for _ in range(3)]
        for prompt in set(range(3)) - sealed:
            again.add(prompt_row(prompt), round_rows(prompt))
    assert sorted(row["prompt"] for row in read_rows(folder / "prompts.jsonl")) == [0, 1, 2]
    assert len(read_rounds(folder / "rounds.jsonl")) == 9


@settings(max_examples=40)
@given(share=st.floats(0, 1), at_line=st.booleans())
def test_rounds_cut_at_any_byte_are_refused_by_readers_and_decoded_again(three, tmp_path_factory, share, at_line):
    folder = copied(three, tmp_path_factory)
    path = folder / "rounds.jsonl"
    data = path.read_bytes()
    cut = int(share * (len(data) - 1))
    if at_line:
        cut = data.rfind(b"\n", 0, cut) + 1
    path.write_bytes(data[:cut])
    with pytest.raises(ValueError, match=r"rounds of \d of 6 answers are not what was written .*: run 01-decode again"):
        read_rounds(path)
    before = finish(folder)
    assert {("ar", "x", i) for i in range(3)} <= before, "an answer without rounds loses nothing"
    assert before < {(arm, "x", i) for arm in ("ar", "tree") for i in range(3)}
    assert_whole(folder)


def test_lost_rounds_are_decoded_again(three, tmp_path_factory):
    folder = copied(three, tmp_path_factory)
    (folder / "rounds.jsonl").unlink()
    with pytest.raises(ValueError, match="run 01-decode again"):
        read_rounds(folder / "rounds.jsonl")
    assert finish(folder) == {("ar", "x", i) for i in range(3)}
    assert_whole(folder)


@settings(max_examples=25)
@given(data=st.data())
def test_an_edited_round_is_refused_and_decoded_again(three, tmp_path_factory, data):
    folder = copied(three, tmp_path_factory)
    path = folder / "rounds.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    which = data.draw(st.integers(0, len(lines) - 1))
    row = json.loads(lines[which])
    lines[which] = json.dumps(row | {"accepted": row["accepted"] + 1})
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    with pytest.raises(ValueError, match="rounds of 1 of 6 answers"):
        read_rounds(path)
    assert ("tree", "x", row["prompt"]) not in finish(folder)
    assert_whole(folder)


@settings(max_examples=40)
@given(data=st.data())
def test_doubled_rows_are_refused_by_readers_and_dropped_on_resume(three, tmp_path_factory, data):
    """Two writers of old: each appends an answer's rounds, then its row; their blocks interleave in any way."""
    folder = copied(three, tmp_path_factory)
    with Run(tmp_path_factory.mktemp("other"), provenance({})) as other:
        for prompt in range(3):
            other.add(prompt_row(prompt, arm="ar", ms_per_token=2.5), [])
            other.add(prompt_row(prompt, ms_per_token=2.5), round_rows(prompt, n=1 + prompt, draft_ms=2.5))
    for name in ("rounds.jsonl", "prompts.jsonl"):
        blocks = [[], []]
        for side, source in enumerate((folder, other.folder)):
            for line in (source / name).read_text(encoding="utf-8").split("\n")[:-1]:
                blocks[side].append((json.loads(line)["prompt"], line))
        mixed = []
        for prompt in range(3):
            sides = [[line for p, line in side if p == prompt] for side in blocks]
            for side in data.draw(st.permutations(sides)):
                mixed += side
        (folder / name).write_text("".join(line + "\n" for line in mixed), encoding="utf-8")
    with pytest.raises(ValueError, match="6 doubled rows"):
        read_prompts(folder / "prompts.jsonl")
    with pytest.raises(ValueError, match="doubled rows"):
        read_rounds(folder / "rounds.jsonl")
    assert len(finish(folder)) == 6, "every answer has one whole copy: nothing is decoded again"
    assert_whole(folder)
    for row in read_prompts(folder / "prompts.jsonl"):
        mine = [r["draft_ms"] for r in read_rounds(folder / "rounds.jsonl") if r["prompt"] == row["prompt"]]
        assert row["arm"] == "ar" or set(mine) == {row["ms_per_token"]}, "a row keeps its own rounds"


def _write_until_told(folder, taken, leave):
    with Run(folder, provenance({"n": 1})) as run:
        run.add(prompt_row(0), round_rows(0))
        taken.set()
        leave.wait(600)


def test_of_two_writers_at_once_the_second_is_refused_by_name(tmp_path):
    folder = tmp_path / "run"
    spawn = multiprocessing.get_context("spawn")
    taken, leave = spawn.Event(), spawn.Event()
    first = spawn.Process(target=_write_until_told, args=(folder, taken, leave))
    first.start()
    try:
        assert taken.wait(600)
        with pytest.raises(ValueError, match=rf"is being written by process {first.pid} on .* since "):
            Run(folder, provenance({"n": 1}))
        other = "from glance.run.folder import Run, provenance; import sys; Run(sys.argv[1], provenance({'n': 1}))"
        second = subprocess.run([sys.executable, "-c", other, folder], capture_output=True, text=True, check=False)
        assert second.returncode and f"process {first.pid}" in second.stderr
    finally:
        leave.set()
        first.join()
    with Run(folder, provenance({"n": 1})) as run:
        assert set(run.done) == {("tree", "x", 0)}
    assert len(read_rounds(folder / "rounds.jsonl")) == 3


def test_a_killed_writers_lock_is_free(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    taken, never = spawn.Event(), spawn.Event()
    writer = spawn.Process(target=_write_until_told, args=(tmp_path, taken, never))
    writer.start()
    assert taken.wait(600)
    writer.kill()
    writer.join()
    with Run(tmp_path, provenance({"n": 1})) as run:
        assert set(run.done) == {("tree", "x", 0)}


def test_another_runs_folder_is_refused(tmp_path):
    facts = {"device": "cpu", "data": {"a.jsonl": "12"}, "weights": {"head": "a" * 64}, "drafter": {"block_size": 16}}
    with Run(tmp_path, provenance({"n": 1, "budget": 63}, **facts)) as run:
        run.add(prompt_row(), [])
    changes = {
        "data a.jsonl: '12' there, '34' now": {"data": {"a.jsonl": "34"}},
        "device: 'cpu' there, 'cuda' now": {"device": "cuda"},
        "weights head: 'aaaaaaaaaaaa' there, 'bbbbbbbbbbbb' now": {"weights": {"head": "b" * 64}},
        "drafter block_size: 16 there, 8 now": {"drafter": {"block_size": 8}},
        "images docvqa: None there, '5' now": {"images": {"docvqa": "5"}},
    }
    for says, change in changes.items():
        with pytest.raises(ValueError, match=says):
            Run(tmp_path, provenance({"n": 1, "budget": 63}, **(facts | change)))
    with pytest.raises(ValueError, match="budget: 63 there, 31 now"):
        Run(tmp_path, provenance({"n": 1, "budget": 31}, **facts))
    assert len(read_rows(tmp_path / "prompts.jsonl")) == 1


def test_a_run_under_another_pillow_or_tokenizer_is_another_run_and_under_another_matplotlib_is_not():
    now = provenance({})
    for name in ("pillow", "tokenizers", "safetensors", "torch", "transformers", "numpy"):
        assert now["versions"][name]
        then = {**now, "versions": now["versions"] | {name: "0.0"}}
        assert differences(then, now) == [f"versions {name}: '0.0' there, {now['versions'][name]!r} now"]
    for name in ("matplotlib", "freetype", "scipy", "pandas"):
        assert now["drawn_with"][name]
        assert differences({**now, "drawn_with": now["drawn_with"] | {name: "0.0"}}, now) == []


def test_a_folder_without_rows_is_nobodys(tmp_path):
    with Run(tmp_path, provenance({"budget": 63})):
        pass
    (tmp_path / "rounds.jsonl").write_text(json.dumps(round_rows()[0]) + "\n")  # of an answer that was interrupted
    with Run(tmp_path, provenance({"budget": 31})) as run:
        run.add(prompt_row(), round_rows())
    assert read_json(tmp_path / "provenance.json")["parameters"] == {"budget": 31}
    assert len(read_rounds(tmp_path / "rounds.jsonl")) == 3
    (tmp_path / "provenance.json").unlink()
    with pytest.raises(ValueError, match=r"has rows and no provenance\.json"):
        Run(tmp_path, provenance({"budget": 31}))


def test_a_row_out_of_the_schema_is_refused(tmp_path):
    with Run(tmp_path, provenance({})) as run:
        with pytest.raises(ValueError, match="unknown fields \\['speed'\\]"):
            run.add(prompt_row(speed=3), [])
        with pytest.raises(ValueError, match="missing fields \\['tau'\\]"):
            run.add({name: value for name, value in prompt_row().items() if name != "tau"}, round_rows())
    assert read_rows(tmp_path / "prompts.jsonl") == read_rows(tmp_path / "rounds.jsonl") == []


def test_a_corrupt_line_in_the_middle_is_named(tmp_path):
    with Run(tmp_path, provenance({})) as run:
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


def test_hashes_and_json(tmp_path):
    assert sha256([1, 2]) == sha256(np.array([1, 2])) != sha256([12])
    path = write_json(tmp_path / "deep" / "x.json", {"a": np.float64("nan"), "b": np.int64(3), 4: (1, np.bool_(True))})
    assert read_json(path) == {"a": None, "b": 3, "4": [1, True]}


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_repeated_share_counts_what_occurred_before(tokens, n):
    grams = [tokens[i : i + n] for i in range(len(tokens) - n + 1)]
    before = sum(gram in grams[:i] for i, gram in enumerate(grams))
    assert repeated_share(tokens, n) == pytest.approx(before / len(grams) if grams else 0.0)


def test_a_loop_without_spaces_is_seen():
    assert repeated_share([7] * 60) > 0.95 and repeated_share(list(range(60))) == 0.0


def test_a_round_comes_back_from_its_row_with_all_that_views_take():
    for report in make_rounds():
        row = json.loads(json.dumps(round_row(report, arm="tree", task="x", prompt=1, warmup=False, trees=True)))
        assert set(row) == {*ROUND_FIELDS, "tree"} and set(row["tree"]) == set(TREE_FIELDS)
        again = unpack_round(row)
        assert isinstance(again, Round) and again.top_ids.size == again.top_logprobs.size == 0
        for name in ("tokens", "parents", "depths", "ranks"):
            assert getattr(again.tree, name).tolist() == getattr(report.tree, name).tolist()
        assert np.allclose(again.tree.logps, report.tree.logps, atol=1e-4)
        for name in (
            "index",
            "start",
            "root",
            "accepted",
            "path",
            "bonus",
            "committed",
            "choices",
            "entropy",
            "ms",
            "offsets",
            "extended",
        ):
            assert getattr(again, name) == getattr(report, name), name
        packed = round_row(again, arm="tree", task="x", prompt=1, warmup=False, trees=True)
        assert packed == row, "and packs to the same row"


@given(depth=st.integers(0, 6), offsets=st.integers(0, 6))
def test_a_round_read_back_knows_whether_its_tree_reaches_past_the_draft(depth, offsets):
    chain = make_tree(range(depth), range(-1, depth - 1), range(1, depth + 1), [0] * depth, [0.0] * depth)
    report = made_round(chain, offsets=offsets)
    row = round_row(report, arm="tree", task="x", prompt=1, warmup=False, trees=True)
    assert row["extended"] == report.extended == unpack_round(row).extended == (depth > offsets)
