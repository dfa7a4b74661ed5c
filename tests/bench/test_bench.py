"""The benchmark's machinery: rotation, medians, files; every section runs once on small sizes. Nothing asserts on time."""

import csv
import json

import numpy as np
import pytest
import torch
from toys import text_prompt, text_target

from glance.bench import pair as bench_pocket
from glance.bench import parts as bench_parts
from glance.bench import suite as bench
from glance.bench.parts import Forwards, KnowingHead, Stopwatch, random_head, random_prompt, random_target
from glance.bench.suite import COLUMNS, SECTIONS, alternate, plain_heap_tree, ratios
from glance.decode import chain_generate, generate, greedy_generate
from glance.tree import build_budget_tree


def test_variants_alternate_in_a_rotating_order_and_the_first_round_does_not_count():
    order = []
    values = {"a": iter([100.0, 1.0, 5.0, 3.0]), "b": iter([0.0, 2.0, 2.0, 2.0])}
    medians = alternate({name: lambda name=name: order.append(name) or next(values[name]) for name in values}, 3)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"] and medians == {"a": 3.0, "b": 2.0}
    assert [row["ratio"] for row in ratios(medians, "b", prefix=7)] == [1.5, 1.0]
    assert alternate({"timed": lambda: None}, 1)["timed"] >= 0


def test_a_stopwatch_leaves_the_prefill_out():
    watch = Stopwatch()
    watch.at = [0.0, 10.0, 10.5, 11.0]  # prompt, first token, two more
    assert watch.ms_per_token() == 500.0
    model = text_target()
    for run in (
        lambda w: greedy_generate(model, text_prompt(), 5, streamer=w),
        lambda w: model.generate(text_prompt(), max_new_tokens=5, do_sample=False, streamer=w),
    ):
        run(watch := Stopwatch())
        assert len(watch.at) == 6


def test_forwards_count_nested_modules_once():
    inner = torch.nn.Linear(2, 2)
    outer = torch.nn.Sequential(inner, inner)
    aside = iter([0.0, 0.0, 0.0, 1e9])
    with Forwards(outer, inner, aside_ms=lambda: next(aside)) as inside:
        outer(torch.zeros(1, 2))  # a lap ends where the first module is called
        inner(torch.zeros(1, 2))
        outer(torch.zeros(1, 2))
    (before, nothing), (whole, ms), (less, _) = inside.laps
    assert 0 < ms <= whole and nothing == 0 <= before and less < 0
    assert "forward" not in vars(outer) and "forward" not in vars(inner)


def test_without_the_pocket_pair_a_random_one_stands_in(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_parts, "POCKET", tmp_path)
    monkeypatch.setattr(bench_parts, "random_target", lambda: random_target(layers=5, width=32))
    model, head, name = bench_parts.small_pair()
    assert (
        name == "random target" and head.target_layer_ids and len(generate(head, model, random_prompt(9), 4)[0]) == 13
    )
    monkeypatch.undo()
    model, head, name = bench_parts.small_pair()
    assert name == "pocket target" and model.generation_config.eos_token_id is None


def test_the_plain_heap_finds_the_same_paths():
    logps = torch.log_softmax(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), -1).sort(-1, True).values
    ours = build_budget_tree(torch.zeros(5, 4), logps, budget=40)
    taken = plain_heap_tree(logps.double().tolist(), 40)
    assert [node[1:] for node in taken] == [(node.depth, node.parent, node.rank) for node in ours]


def test_a_knowing_head_is_accepted_as_it_says():
    model, ids = random_target(layers=5, width=64), text_prompt(20)
    stream = greedy_generate(model, ids, 160)[0].tolist()
    head = KnowingHead(random_head(model), stream)
    out, wide = generate(head, model, ids, 90, budget=31, return_stats=True)
    chain, narrow = chain_generate(head, model, ids, 90, return_stats=True)
    assert out[0].tolist() == chain[0].tolist() == stream[:110]
    assert 3 < narrow.tau < wide.tau < 14


@pytest.fixture()
def small(monkeypatch):
    """Sizes that run in a moment."""
    shrunk = lambda heads=4, kv_heads=2, layers=6, width=256: random_target(heads, kv_heads, 5, 32)  # noqa: E731
    monkeypatch.setattr(bench, "random_target", shrunk)
    monkeypatch.setattr(bench, "small_pair", lambda: (shrunk(), random_head(shrunk()), "random target"))
    monkeypatch.setattr(bench, "BUDGETS", (3,))


@pytest.mark.parametrize("name", [name for name in SECTIONS if name != "pocket"])
def test_every_section_writes_its_rows(name, small, tmp_path):
    said = []
    bench.bench(tmp_path, [name], repeats=1, prefixes=(12,), say=lambda *parts: said.append(parts))
    with (tmp_path / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows and tuple(rows[0]) == COLUMNS and len(said) == len(rows) + 1
    for row in rows:
        assert row["section"] == name and float(row["ms"]) > 0 and float(row["ratio"]) > 0
    assert any(row["variant"] == row["base"] and float(row["ratio"]) == 1 for row in rows)
    machine = json.loads((tmp_path / "machine.json").read_text())
    assert machine["threads"] == torch.get_num_threads() and machine["machine"]["processor"]


def test_without_a_pocket_target_the_section_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_parts, "POCKET", tmp_path)
    said = []
    bench.bench(tmp_path / "out", ["pocket"], repeats=1, say=lambda *parts: said.append(" ".join(parts)))
    assert "left out" in said[-1] and not (tmp_path / "out" / "pocket.csv").exists()


def test_the_command_knows_its_sections():
    import argparse

    parser = argparse.ArgumentParser()
    bench.add_bench(parser.add_subparsers())
    assert parser.parse_args(["bench", "--only", "tree", "--quick"]).only == ["tree"]
    with pytest.raises(SystemExit):
        parser.parse_args(["bench", "--only", "nothing"])


def test_a_bound_is_of_forwards_timed_apart_and_averaged():
    totals = {
        "oracle": np.array([100.0, 50, 50, 0]),
        "tree-7": np.array([40.0, 50, 10, 70]),
        "auto": np.array([50.0, 50, 9, 99]),
    }
    costs = [{"prefix": 60, "ar_ms": 1.5, "draft_ms": 1.0, "verify": [{"nodes": 7, "ms": 2.0}]}]
    costs += [{"prefix": 80, "ar_ms": 2.5, "draft_ms": 2.0, "verify": [{"nodes": 7, "ms": 3.0}]}]
    row = bench_pocket.pair_row("docvqa", "tree-7", totals, costs)
    assert (
        row | {"prefix": 70.0, "nodes": 7.0, "ms": 0.8, "ratio": 0.4, "tau": 5.0, "bound": 5 * 2.0 / (1.5 + 2.5)} == row
    )
    assert "bound" not in bench_pocket.pair_row("docvqa", "auto", totals, costs)
