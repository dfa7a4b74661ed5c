"""A made-up run folder, for tests of what reads one: written through glance.records' own writers, never kept in the repo."""

from functools import cache
from pathlib import Path

import numpy as np
from made import made_round

from glance.files import read_json, sha256, write_json
from glance.metrics import LOOP_SHARE, repeated_share
from glance.records import answer_key, read_rows, round_row
from glance.report.summary import main_table
from glance.run.folder import Run, provenance
from glance.tasks import TASKS
from glance.tree import build_budget_tree, make_tree

BLOCK = 16
AR_MS = 3.6
DRAFT_MS = 1.1
STEPS = ("draft", "tree", "verify", "commit")
BUDGETS = (0, 1, 3, 7, 15, 31, 63, 127)
SHAPES = dict(
    zip(TASKS, ((1.05, 1.6, 0.9), (0.32, 1.7, 1.5), (0.12, 1.8, 2.1), (0.1, 1.95, 2.8), (0.07, 2.3, 3.6)), strict=True)
)
AUDIT = {
    "verdict": "exact",
    "dtype": "float32",
    "n_prompts": 30,
    "budget": 63,
    "arms": {"chain": {"identical": 30, "of": 30}, "tree": {"identical": 30, "of": 30}},
    "controls": {
        "oracle_repeat": {"identical": 30, "of": 30},
        "block_pass": {"rows": 2431, "argmax_changed": 0, "max_logit_gap": 2.1e-5, "max_margin_change": 1.9e-5},
    },
    "divergences": [],
    "row_invariance": [
        {"dtype": dtype, "rows": rows, "masked": masked, "bitwise_equal": rows < 2, "max_abs": gap, "max_ulp": ulp}
        for dtype, gap, ulp in (("float32", 3.8e-6, 24), ("bfloat16", 0.0625, 2))
        for rows in (2, 8, 64)
        for masked in (False, True)
    ],
    "faults": [
        {"fault": "delta forced to 0", "must_fail": True, "diverged": 9, "of": 10, "caught": True},
        {"fault": "mask shifted by one", "must_fail": True, "diverged": 10, "of": 10, "caught": True},
        {"fault": "wrong layer read", "must_fail": False, "diverged": 0, "of": 10, "caught": True},
    ],
    "bfloat16": {
        "verdict": "near-ties only",
        "dtype": "bfloat16",
        "n_prompts": 10,
        "budget": 63,
        "arms": {"chain": {"identical": 9, "of": 10}, "tree": {"identical": 8, "of": 10}},
        "controls": {
            "oracle_repeat": {"identical": 10, "of": 10},
            "block_pass": {"rows": 801, "argmax_changed": 4, "max_logit_gap": 0.12, "max_margin_change": 0.11},
        },
        "divergences": [],
    },
    "provenance": {},
}


def write_run(folder, *, n=12, tasks=TASKS, cheap=1.0, chain_reach=0.72, order=1, faster=1.0, sweep=True):
    """Write a run of made-up rows: accepted lengths that follow a law of entropy, and times that follow a cost.

    Args:
        n: prompts per task after the warm-up.
        cheap: scales the cost of a round; large values make every speedup a slowdown.
        chain_reach: the chain's chance to go on, against the tree's.
        order: -1 gives the least grounded task the longest accepted length.
        faster: scales the verify cost of wide trees; below 1 the widest budgets win.
    """
    folder = Path(folder)
    arms = {"ar": 0, "chain": BLOCK - 1, "tree": 63}
    _write(folder, n, tasks, arms, cheap, chain_reach, order, faster)
    main_table(folder)
    nodes = [{"nodes": b, "ms": AR_MS * cheap * _verify(b, faster)} for b in BUDGETS]
    write_json(folder / "costs.json", {"prefix": 90, "ar_ms": AR_MS, "draft_ms": DRAFT_MS * cheap, "verify": nodes})
    write_json(folder / "audit.json", AUDIT)
    if sweep:
        arms = {"ar": 0} | {f"tree-{b}": b for b in BUDGETS} | {"auto": 15}
        _write(folder / "sweep", max(3, n // 3), tasks, arms, cheap, chain_reach, order, faster)
    return folder


def _verify(nodes, faster):
    return 1 + faster * nodes / 55


def _write(folder, n, tasks, arms, cheap, chain_reach, order, faster):
    parameters = {"arms": list(arms), "n": n, "budget": 63, "target": "made-up", "head": "made-up"}
    drafter = {"name": "block", "block_size": BLOCK}
    with Run(folder, provenance(parameters, device="cpu", dtype="float32", drafter=drafter)) as run:
        for task in tasks:
            entropy_scale, b0, b1 = SHAPES[task if order == 1 else TASKS[-1 - TASKS.index(task)]]
            for prompt in range(n + 1):
                for arm, budget in arms.items():
                    rng = np.random.default_rng([prompt, TASKS.index(task)])
                    reach = chain_reach if arm == "chain" else 0.42 + 0.58 * np.log2(budget + 1) / 6
                    _prompt(run, rng, arm, task, prompt, budget, (reach, b0, b1, entropy_scale), cheap, faster)


def _prompt(run, rng, arm, task, prompt, budget, odds, cheap, faster):
    n_tokens, at, reports = int(rng.integers(60, 120)), 1, []
    while arm != "ar" and at < n_tokens:
        report = _round(rng, len(reports), n_tokens - at, arm, budget, *odds, cheap, faster)
        at += len(report.committed)
        reports.append(report)
    steps = n_tokens - 1 if arm == "ar" else len(reports)
    ms = AR_MS * rng.normal(1, 0.02) * steps
    if reports:
        ms = sum(sum(r.ms.values()) for r in reports) - reports[0].ms["draft"] + 0.12 * steps
    words = rng.integers(40, size=n_tokens).tolist()
    text = " ".join(f"w{word}" for word in words)
    repeats = repeated_share(words)
    keys = {"arm": arm, "task": task, "prompt": prompt, "warmup": prompt == 0, "looped": repeats >= LOOP_SHARE}
    row = keys | {
        "prompt_tokens": 90,
        "n_tokens": n_tokens,
        "rounds": steps,
        "tau": (n_tokens - 1) / steps,
        "ms_per_token": ms / n_tokens,
        "ms_per_token_legacy": (ms + 20) / n_tokens,
        "budget": budget,
        "tree_size": float(budget),
        "finish": "stop",
        "repeats": repeats,
        "matches_ar": True,
        "text": text,
        "sha256": sha256([n_tokens]),
        "device": "cpu",
        "dtype": "float32",
    }
    run.add(row, [round_row(r, **keys) for r in reports])


def _round(rng, index, room, arm, budget, reach, b0, b1, scale, cheap, faster):
    entropy = float(min(3.5, scale * rng.lognormal(-0.9, 1.3)))
    p = reach / (1 + np.exp(b1 * entropy - b0))
    accepted = min(int(rng.geometric(1 - p)) - 1, BLOCK - 1, budget)
    kept = min(accepted + 1, room)
    noise = rng.normal(1, 0.05)
    verify = AR_MS * cheap * _verify(budget, faster) * noise
    ms = {"draft": DRAFT_MS * cheap * (budget > 0), "tree": 0.05 + 0.006 * budget, "verify": verify, "commit": 0.15}
    return made_round(
        bush_of(budget),
        index=index,
        accepted=min(accepted, kept),
        committed=[0] * kept,
        truncated=kept < accepted + 1,
        entropy=entropy,
        offsets=BLOCK - 1,
        ms=ms,
    )


@cache
def bush_of(budget):
    """Return a tree of `budget` nodes that are the root's children: of these rounds only its size is kept."""
    return make_tree(list(range(budget)), [-1] * budget, [1] * budget, [0] * budget, [0.0] * budget)


def rewrite_rounds(folder, rows):
    """Replace a run's rounds, of doubled ones the last, and seal its answers anew as if these had been written."""
    rows = {(*answer_key(row), row["round"]): row for row in rows}.values()
    prompts = read_rows(folder / "prompts.jsonl")
    record = read_json(folder / "provenance.json")
    for name in ("prompts.jsonl", "rounds.jsonl"):
        (folder / name).unlink()
    with Run(folder, record) as run:
        for prompt in prompts:
            run.add(prompt, [row for row in rows if answer_key(row) == answer_key(prompt)])


def packed_round(seed=0):
    """Return a rounds.jsonl row that keeps its tree, with two accepted nodes off the first ranks and a bonus."""
    rng = np.random.default_rng(seed)
    top_ids = np.arange(15 * 4).reshape(15, 4)
    logps = np.sort(np.log(rng.dirichlet(np.ones(6), 15)), axis=1)[:, ::-1][:, :4]
    tree = build_budget_tree(top_ids, logps, budget=15, branch_k=4)
    leaf = max(range(len(tree)), key=lambda i: (tree.depths[i], tree.ranks[i]))
    path = [leaf]
    while tree.parents[path[0]] >= 0:
        path.insert(0, int(tree.parents[path[0]]))
    report = made_round(tree, index=1, start=90, root=7, path=path, bonus=99, ms=dict.fromkeys(STEPS, 1.0))
    return round_row(report, arm="tree", task="docvqa", prompt=1, warmup=False, trees=True)
