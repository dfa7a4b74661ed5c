"""The benchmark on the pocket target: what every arm gains over the oracle, beside what separately timed forwards allow.

The bound of a fixed budget N is tau c_ar / (c_draft + c_verify(N)): the speedup of a decoder that spends nothing outside the
forwards of target and head. Tau is the arm's own; the forwards are timed at every prompt, after its decodes, and averaged.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from glance.bench.parts import pocket_is_here, random_head
from glance.decode import chain_generate, generate, greedy_generate
from glance.paths import POCKET
from glance.run.experiment import Pair, Plan, load_pair, mean_costs, measure_costs, prepare
from glance.tasks import load_tasks

PROMPTS = 40  # per task


def pocket_rows(repeats: int, budgets: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row per task and arm; none where the pocket target or its head is missing."""
    if not pocket_is_here():
        return []
    pair = load_pair(str(POCKET / "target"), str(POCKET / "head"), dtype="float32")
    plan = Plan(str(POCKET / "eval"), n=PROMPTS)
    by_task: dict[str, list[Any]] = {}
    for prompt in load_tasks(plan.data, plan.tasks, plan.n):
        by_task.setdefault(prompt.task, []).append(prompt)
    rows = []
    for task, prompts in by_task.items():
        rows += _task_rows(pair, plan, task, prompts, repeats, budgets)
    return rows


def _task_rows(pair: Pair, plan: Plan, task: str, prompts: list, repeats: int, budgets: Sequence[int]) -> list[dict]:
    """Decode a task's prompts by every arm, in turn, and sum the median times up."""
    useless = random_head(pair.target, pair.head.config)
    arms: dict[str, Any] = {
        "oracle": lambda ids, kw: greedy_generate(pair.target, ids, **kw),
        "chain": lambda ids, kw: chain_generate(pair.head, pair.target, ids, **kw),
        **{f"tree-{n}": lambda ids, kw, n=n: generate(pair.head, pair.target, ids, budget=n, **kw) for n in budgets},
        "auto": lambda ids, kw: generate(pair.head, pair.target, ids, budget="auto", **kw),
        "auto, random head": lambda ids, kw: generate(useless, pair.target, ids, budget="auto", **kw),
    }
    totals = {arm: np.zeros(4) for arm in arms}  # milliseconds, tokens, rounds, nodes
    costs = []
    rng = np.random.default_rng(0)
    for prompt in prompts:
        ids, positions = prepare(pair, prompt, plan)
        settings = {"max_new_tokens": plan.max_new_tokens, "positions": positions, "return_stats": True}
        seen: dict[str, list] = {arm: [] for arm in arms}
        for _ in range(repeats + 1):
            for arm in rng.permutation(list(arms)).tolist():  # what ran before an arm is part of its time
                seen[arm].append(arms[arm](ids, settings))
        texts = {arm: runs[0][0][0].tolist() for arm, runs in seen.items()}
        wrong = [arm for arm, text in texts.items() if text != texts["oracle"]]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} differ from the oracle on {task}/{prompt.index}")
        if prompt.index == 0:
            continue  # a warm-up
        for arm, runs in seen.items():
            ms = np.median([1e3 * stats.seconds["decode_only"] for _, stats in runs[1:]])
            stats = runs[0][1]
            nodes = sum(len(report.tree) for report in stats.rounds)
            totals[arm] += [ms, stats.n_tokens - 1, stats.n_rounds, nodes]
        costs.append(measure_costs(pair, prompt, plan, budgets, repeats=max(5, repeats)))
    return [pair_row(task, arm, totals, costs) for arm in arms]


def pair_row(task: str, arm: str, totals: dict[str, np.ndarray], costs: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum an arm up; `ratio` is its time over the oracle's, so a speedup is 1 / ratio."""
    (ms, tokens, rounds, nodes), mean = totals[arm], mean_costs(costs)
    row = {"case": task, "variant": arm, "prefix": mean["prefix"], "nodes": float(nodes / rounds), "base": "oracle"}
    row |= {"ms": float(ms / tokens), "ratio": float(ms / totals["oracle"][0]), "tau": float(tokens / rounds)}
    for entry in mean["verify"]:
        if arm == f"tree-{entry['nodes']}":
            row["bound"] = row["tau"] * mean["ar_ms"] / (mean["draft_ms"] + entry["ms"])
    return row
