"""From a run's records to the numbers of its main table. Conventions are `glance.metrics`'; nothing here decodes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glance.files import write_json
from glance.metrics import acceptance_length, break_even_tau, drop_warmup, geomean, paired_bootstrap, speedup
from glance.records import read_rows


def number(value: float | None, width: int = 0, suffix: str = "") -> str:
    """Print a number to two places; "-" where there is none (null or nan): a task that never started a round has no tau."""
    missing = value is None or not np.isfinite(value)
    return ("-" if missing else f"{value:.2f}{suffix}").rjust(width)


def pooled_tau(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the tau of one arm's prompts, pooled over rounds; nan where none has a round."""
    return acceptance_length(rows) if any(row["rounds"] for row in rows) else float("nan")


def not_lossless(folder: str | Path) -> list[str]:
    """Name every prompt of a run whose ids differ from ar's: empty where the run is lossless."""
    rows = read_rows(Path(folder) / "prompts.jsonl")
    return [f"{row['arm']}/{row['task']}/{row['prompt']}" for row in rows if not row["matches_ar"]]


def main_table(folder: str | Path) -> dict[str, Any]:
    """Sum up a run per task and arm, and pooled over tasks; also writes `main_table.json` beside the rows."""
    folder = Path(folder)
    prompts = drop_warmup(read_rows(folder / "prompts.jsonl"))
    rounds = drop_warmup(read_rows(folder / "rounds.jsonl"))
    if not prompts:
        raise ValueError(f"{folder} has no decoded prompts: run 01-decode or `glance main-table` first")
    arms = list(dict.fromkeys(row["arm"] for row in prompts))
    tasks = list(dict.fromkeys(row["task"] for row in prompts))
    steady = [arm for arm in arms if arm != "auto"][-1]  # whose rounds the entropies are taken at
    reach = max((row["accepted"] for row in rounds), default=1) or 1
    rows = []
    for task in tasks:
        entropies = [row["entropy"] for row in rounds if row["task"] == task and row["arm"] == steady]
        for arm in arms:
            mine = [row for row in prompts if (row["task"], row["arm"]) == (task, arm)]
            row = {"task": task, "arm": arm, **_summary(mine, rounds, reach), **_speedup(prompts, arm, [task])}
            row["break_even_tau"] = break_even_tau(row["tau"], row["speedup"])
            rows.append(row | {"entropy": float(np.mean(entropies)) if entropies else None})
    pooled = []
    for arm in arms:
        mine = [row for row in prompts if row["arm"] == arm]
        pooled.append({"arm": arm, **_summary(mine, rounds, reach), **_speedup(prompts, arm, tasks)})
    facts = {name: prompts[0][name] for name in ("device", "dtype")} | {"timing": "decode_only"}
    budget = max(row["budget"] for row in prompts)
    table = {**facts, "budget": budget, "rows": rows, "pooled": pooled}
    write_json(folder / "main_table.json", table)
    return table


def _summary(mine: Sequence[Mapping[str, Any]], rounds: Sequence[Mapping[str, Any]], reach: int) -> dict[str, Any]:
    """Sum up one arm's prompts, and its rounds without the cut ones."""
    arm, tasks = mine[0]["arm"], {row["task"] for row in mine}
    whole = [row["tau"] for row in rounds if row["arm"] == arm and row["task"] in tasks and not row["truncated"]]
    tokens, tau = sum(row["n_tokens"] for row in mine), pooled_tau(mine)
    return {
        "n": len(mine),
        "n_tokens": tokens,
        "rounds": sum(row["rounds"] for row in mine),
        "tau": tau,
        "tau_uncut": float(np.mean(whole)) if whole else tau,
        "accepted_length": tau - 1,
        "acceptance_rate": (tau - 1) / reach,
        "ms_per_token": sum(row["ms_per_token"] * row["n_tokens"] for row in mine) / tokens,
        "tree_size": float(np.mean([row["tree_size"] for row in mine])),
        "repeats": float(np.mean([row["repeats"] for row in mine])),
        "identical": sum(row["matches_ar"] for row in mine),
    }


def _speedup(prompts: Sequence[Mapping[str, Any]], arm: str, tasks: Sequence[str]) -> dict[str, float]:
    """Return the speedup over ar on these tasks (geometric mean of several) with its paired bootstrap interval."""
    rows = [row for row in prompts if row["task"] in tasks]
    value = geomean(speedup(rows, arm).values())
    sides = []
    for side in (arm, "ar"):
        mine = sorted((row for row in rows if row["arm"] == side), key=lambda row: (row["task"], row["prompt"]))
        sides.append(np.array([[row["ms_per_token"] * row["n_tokens"], row["n_tokens"]] for row in mine]))
    strata = np.array([row["task"] for row in mine])
    if len(strata) < 2:
        return {"speedup": value, "speedup_low": value, "speedup_high": value}
    members = [strata == task for task in tasks]

    def ratio(ours: np.ndarray, base: np.ndarray) -> float:
        return geomean(
            (base[of, 0].sum() / base[of, 1].sum()) / (ours[of, 0].sum() / ours[of, 1].sum()) for of in members
        )

    interval = paired_bootstrap(sides[0], sides[1], ratio, strata=strata)
    return {"speedup": value, "speedup_low": interval.low, "speedup_high": interval.high}


def table_text(table: Mapping[str, Any]) -> str:
    """Print a main table as aligned text; a slowdown says so."""
    lines = [
        f"{'task':9s} {'arm':8s} {'n':>4s} {'tau':>6s} {'ms/token':>9s} {'speedup':>8s}  {'95% interval':15s} identical"
    ]
    for row in [*table["rows"], *({"task": "all", **pooled} for pooled in table["pooled"])]:
        mark = "  SLOWDOWN" if row["speedup"] < 1 else ""
        lines.append(
            f"{row['task']:9s} {row['arm']:8s} {row['n']:4d} {number(row['tau'], 6)} {row['ms_per_token']:9.2f} "
            f"{number(row['speedup'], 8, 'x')}  [{number(row['speedup_low'])}, {number(row['speedup_high'])}]    "
            f"{row['identical']}/{row['n']}{mark}"
        )
    return "\n".join(lines)


def short_table(table: Mapping[str, Any]) -> str:
    """Return a main table as the README shows it: a row per task in markdown, chain and tree side by side."""
    lines = [
        "| task | entropy (nats) | tau chain | tau tree | speedup chain | speedup tree | identical to greedy |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    cells = {(row["task"], row["arm"]): row for row in table["rows"]}
    cells |= {("all", row["arm"]): {"entropy": None, **row} for row in table["pooled"]}
    for task in dict.fromkeys(task for task, _ in cells):
        chain, tree = cells[task, "chain"], cells[task, "tree"]
        entropy = "" if task == "all" else number(chain["entropy"])
        speeds = (
            f"{row['speedup']:.2f}x [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]" for row in (chain, tree)
        )
        same = f"{chain['identical'] + tree['identical']} of {chain['n'] + tree['n']}"
        lines.append(
            f"| {task} | {entropy} | {number(chain['tau'])} | {number(tree['tau'])} | {' | '.join(speeds)} | {same} |"
        )
    return "\n".join(lines)
