"""Speed as ratios: what is compared runs side by side in one process, alternating, and medians are reported.

`make bench` writes one CSV per section, all with the same columns, and `machine.json`, to `data/bench/`. A ratio is the
variant's milliseconds over its base's. Absolute milliseconds belong to the machine that `machine.json` describes.

| section | what is compared |
|---|---|
| oracle | our greedy loop with transformers' `generate(do_sample=False)`, by prefix |
| decode | trees and chain with the oracle, the chain with dflash's own loop, for a head of stated quality; a random head |
| overhead | the share of a round spent outside the forwards of target and head, by prefix |
| attention | 64 rows, 4 query heads per key-value head: transformers' pass, a verify pass, one with grouped attention |
| tree | building trees and masks beside a plain heap that pushes every child |
| pocket | speedups on the pocket target by budget, beside the bound tau c_ar / (c_draft + c_verify(N)); a random head |

The first three run on random ids through the pocket pair. The file knows nothing of notebooks and figures.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import DynamicCache

from glance.bench.parts import Forwards, KnowingHead, Stopwatch, random_head, random_prompt, random_target, small_pair
from glance.decode import chain_generate, generate, greedy_generate
from glance.files import write_json
from glance.paths import BENCH, POCKET
from glance.run.folder import provenance
from glance.states import decoder_of
from glance.target import StreamPositions, Target
from glance.tree import ancestor_matrix, build_budget_tree, tree_mask

COLUMNS = ("section", "case", "variant", "prefix", "nodes", "ms", "base", "ratio", "tau", "bound", "repeats")
PREFIXES = (100, 1000, 4000)
BUDGETS = (7, 15, 31, 63)


def add_bench(commands: Any) -> None:
    """Add `bench` to the command line."""
    parser = commands.add_parser("bench", help="speed as ratios, side by side in one process")
    parser.add_argument("--only", nargs="+", choices=sorted(SECTIONS), default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--quick", action="store_true", help="few repeats and short prefixes: a smoke test")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=BENCH)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    repeats = 2 if arguments.quick else max(1, arguments.repeats)
    bench(arguments.out, arguments.only, repeats=repeats, prefixes=(50, 200) if arguments.quick else PREFIXES)
    return 0


def bench(
    out: Path, only: Sequence[str], *, repeats: int = 9, prefixes: Sequence[int] = PREFIXES, say: Callable = print
) -> None:
    """Run sections, print their rows and write them to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    facts = provenance({"prefixes": list(prefixes)}, device="cpu", threads=torch.get_num_threads())
    say(f"{facts['machine']['processor']}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name in only:
        rows = SECTIONS[name](repeats, prefixes)
        if not rows:
            say(f"{name:10s} left out: no pocket target and head in {POCKET}")
            continue
        frame = pd.DataFrame(rows, columns=COLUMNS).assign(section=name, repeats=repeats)
        frame.to_csv(out / f"{name}.csv", index=False, float_format="%.4g", lineterminator="\n", encoding="utf-8")
        for row in rows:
            told = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
            say(name.ljust(10), *(f"{key}={value}" for key, value in told.items()))
    write_json(out / "machine.json", facts)


def alternate(variants: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Run the variants in turn, in an order that rotates, after one round of warm-up; return each one's median milliseconds.

    A variant that returns a number has measured itself; of the others the whole call is timed.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for i in range(repeats + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            began = perf_counter()
            measured = variants[name]()
            times[name].append(measured if isinstance(measured, float) else 1e3 * (perf_counter() - began))
    return {name: float(np.median(values[1:])) for name, values in times.items()}


def ratios(ms: Mapping[str, float], base: str, **facts: Any) -> list[dict[str, Any]]:
    """Turn medians into rows, each beside the base."""
    return [{**facts, "variant": name, "ms": ms[name], "base": base, "ratio": ms[name] / ms[base]} for name in ms]


def bench_oracle(repeats: int, prefixes: Sequence[int]) -> list[dict[str, Any]]:
    """Time a step of our greedy loop beside a step of transformers' `generate`."""
    (model, _, name), rows, n = small_pair(), [], 48
    for prefix in prefixes:
        ids = random_prompt(prefix)

        def ours(ids=ids):
            greedy_generate(model, ids, n, streamer=(watch := Stopwatch()))
            return watch.ms_per_token()

        def stock(ids=ids):
            ones = torch.ones_like(ids)
            model.generate(ids, attention_mask=ones, do_sample=False, max_new_tokens=n, streamer=(watch := Stopwatch()))
            return watch.ms_per_token()

        rows += ratios(alternate({"generate": stock, "oracle": ours}, repeats), "generate", prefix=prefix, case=name)
    return rows


def bench_decode(repeats: int, prefixes: Sequence[int]) -> list[dict[str, Any]]:
    """Time whole decodes of one text at the shortest and longest prefix: oracle, dflash's chain, ours, trees, auto."""
    return [row for prefix in (prefixes[0], prefixes[-1]) for row in _decode_rows(repeats, prefix)]


def _decode_rows(repeats: int, prefix: int) -> list[dict[str, Any]]:
    from dflash.model import dflash_generate

    (model, head, case), ids, n = small_pair(), random_prompt(prefix), 96
    stream = greedy_generate(model, ids, n)[0].tolist()
    useless = random_head(model, head.config)
    head = KnowingHead(head, greedy_generate(model, ids, n + 64)[0].tolist())
    variants: dict[str, Callable] = {
        "oracle": lambda: greedy_generate(model, ids, n),
        "dflash chain": lambda: dflash_generate(head, model, ids, n, None),
        "chain": lambda: chain_generate(head, model, ids, n),
        **{f"tree-{b}": lambda b=b: generate(head, model, ids, n, budget=b) for b in BUDGETS},
        "auto": lambda: generate(head, model, ids, n, budget="auto"),
        "auto, random head": lambda: generate(useless, model, ids, n, budget="auto"),
    }
    for name, run in variants.items():
        if run()[0].tolist() != stream:
            raise ValueError(f"{name} does not decode the oracle's text: speed means nothing before that")
    ms = alternate(variants, repeats)
    return ratios(ms, "oracle", prefix=prefix, case=case) + ratios(
        {name: ms[name] for name in ("dflash chain", "chain")}, "dflash chain", prefix=prefix, case=case
    )


def bench_overhead(repeats: int, prefixes: Sequence[int]) -> list[dict[str, Any]]:
    """Measure a round's time outside the forwards of the target's and the head's modules, at budget 63: means of decodes."""
    (model, real, case), rows = small_pair(), []
    modules = real, decoder_of(model), model.get_input_embeddings(), model.get_output_embeddings()
    for prefix in prefixes:
        ids = random_prompt(prefix)
        head = KnowingHead(real, greedy_generate(model, ids, 160)[0].tolist())
        runs = []
        for _ in range(4 * repeats + 1):
            with Forwards(*modules, aside_ms=lambda head=head: head.rigging_ms) as inside:
                _, stats = generate(head, model, ids, 96, return_stats=True)
            runs.append(np.mean(inside.laps[3:], axis=0))  # before: the prefill, and two rounds that allocate
        whole, forwards = np.array(runs[1:]).T
        ms = {"round": float(np.median(whole)), "outside forwards": float(np.median(whole - forwards))}
        rows += ratios(ms, "round", prefix=prefix, nodes=63, tau=stats.tau, case=case, repeats=4 * repeats)
    return rows


@torch.inference_mode()
def bench_attention(repeats: int, prefixes: Sequence[int]) -> list[dict[str, Any]]:
    """Time a verify pass of 64 rows by the stock path, with the in-place cache, and with grouped attention too."""
    model = random_target(heads=16, kv_heads=4, layers=4, width=512)
    rows = []
    ids = np.arange(120).reshape(15, 8)
    tree = build_budget_tree(ids, np.log(0.5 ** np.arange(1, 9)) * np.ones((15, 1)), budget=63)
    for prefix in prefixes:
        prompt = random_prompt(prefix)
        cache = DynamicCache(config=model.config)
        with Target(model, StreamPositions(), (1, 2), room=prefix + 128) as target:
            target.prefill(prompt)
            model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
            groups = target.verify_pass.groups

            def ours(grouped: int, target=target) -> None:
                target.verify_pass.fold(grouped)
                target.verify(7, tree)
                target.cache.truncate(target.length)

            def stock(cache=cache, prefix=prefix) -> float:
                began = perf_counter()
                steps = torch.from_numpy(np.stack([np.append(7, tree.tokens), np.append(0, tree.depths)]))
                mask = torch.from_numpy(tree_mask(tree, prefix=prefix))[None, None]
                positions = steps[1:] + prefix
                model(steps[:1], position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True)
                ms = 1e3 * (perf_counter() - began)
                cache.crop(-len(tree) - 1)
                return ms

            variants = {"stock": stock, "in-place cache": lambda: ours(1), "grouped": lambda g=groups: ours(g)}
            ms = alternate(variants, repeats)
        rows += ratios(ms, "stock", prefix=prefix, nodes=63, case=f"{groups} query heads per key-value head")
    return rows


def plain_heap_tree(logps: Sequence[Sequence[float]], budget: int) -> list[tuple]:
    """Take the best paths with a heap that receives every child of every node taken: the obvious way."""
    heap = [(-logp, 1, -1, rank) for rank, logp in enumerate(logps[0])]
    heap.sort()
    taken: list[tuple] = []
    while heap and len(taken) < budget:
        node = heappop(heap)
        taken.append(node)
        if node[1] < len(logps):
            for rank, logp in enumerate(logps[node[1]]):
                heappush(heap, (node[0] - logp, node[1] + 1, len(taken) - 1, rank))
    return taken


def bench_tree(repeats: int, prefixes: Sequence[int]) -> list[dict[str, Any]]:
    """Time tree building at 15 offsets x 8, and a mask of 63 nodes."""
    raw = np.random.default_rng(0).normal(size=(15, 8)) * 2
    logps = np.sort(raw - np.log(np.exp(raw).sum(-1, keepdims=True)), axis=-1)[:, ::-1].copy()
    ids = np.arange(120).reshape(15, 8)
    lists = logps.tolist()
    rows = []
    calls = 50
    tree = build_budget_tree(ids, logps, budget=63)

    def timed(run: Callable) -> Callable[[], float]:
        def many() -> float:
            began = perf_counter()
            for _ in range(calls):
                run()
            return 1e3 * (perf_counter() - began) / calls

        return many

    for n in (63, 1023):
        variants = {
            "plain heap": timed(lambda n=n: plain_heap_tree(lists, n)),
            "build": timed(lambda n=n: build_budget_tree(ids, logps, budget=n)),
        }
        rows += ratios(alternate(variants, repeats), "plain heap", nodes=n, case="build")
    masks = {"mask": timed(lambda: tree_mask(tree)), "ancestors": timed(lambda: ancestor_matrix(tree))}
    return rows + ratios(alternate(masks, repeats), "mask", nodes=63, case="mask")


def bench_pocket(repeats: int, prefixes: Sequence[int]) -> list[dict[str, Any]]:
    """Time the arms on prompts of the five tasks, and set the fixed budgets beside their bound."""
    from glance.bench.pair import pocket_rows

    few = max(1, repeats // 4)  # its many prompts are repeats of a kind
    return [row | {"repeats": few} for row in pocket_rows(few, BUDGETS)]


SECTIONS: dict[str, Callable[[int, Sequence[int]], list[dict[str, Any]]]] = {
    "oracle": bench_oracle,
    "decode": bench_decode,
    "overhead": bench_overhead,
    "attention": bench_attention,
    "tree": bench_tree,
    "pocket": bench_pocket,
}
