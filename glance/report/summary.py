"""From a run's records to the numbers of its main table. Conventions are `glance.metrics`'; nothing here decodes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glance.files import plain, read_json, write_json
from glance.metrics import acceptance_length, break_even_tau, drop_warmup, speedup
from glance.records import read_prompts, read_rounds
from glance.report import writer
from glance.report.results import Results


def number(value: float | None, width: int = 0, suffix: str = "") -> str:
    """Print a number to two places; "-" where there is none (null or nan): a task that never started a round has no tau."""
    missing = value is None or not np.isfinite(value)
    return ("-" if missing else f"{value:.2f}{suffix}").rjust(width)


def pooled_tau(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the tau of one arm's prompts, pooled over rounds; nan where none has a round."""
    return acceptance_length(rows) if any(row["rounds"] for row in rows) else float("nan")


def not_lossless(folder: str | Path) -> list[str]:
    """Name every prompt of a run whose ids differ from ar's: empty where the run is lossless."""
    rows = read_prompts(Path(folder) / "prompts.jsonl")
    return [f"{row['arm']}/{row['task']}/{row['prompt']}" for row in rows if not row["matches_ar"]]


def main_table(folder: str | Path) -> dict[str, Any]:
    """Sum up a run per task and arm, and pooled over tasks; also writes `main_table.json` beside the rows.

    What has no value is None: tau and what follows from it where no answer started a round, an acceptance rate where the
    provenance names no block size.

    Raises:
        ValueError: no rows, or rows that are not whole (see `glance.records.read_rounds`).
    """
    folder = Path(folder)
    prompts = drop_warmup(read_prompts(folder / "prompts.jsonl"))
    rounds = drop_warmup(read_rounds(folder / "rounds.jsonl"))
    if not prompts:
        raise ValueError(f"{folder} has no decoded prompts: run 01-decode or `glance main-table` first")
    arms = list(dict.fromkeys(row["arm"] for row in prompts))
    tasks = list(dict.fromkeys(row["task"] for row in prompts))
    steady = [arm for arm in arms if arm != "auto"][-1]  # whose rounds the entropies are taken at
    block_size = drafted_block(folder)
    reach = block_size - 1 if block_size else None
    results = Results(folder)
    rows = []
    for task in tasks:
        entropies = [row["entropy"] for row in rounds if row["task"] == task and row["arm"] == steady]
        for arm in arms:
            mine = [row for row in prompts if (row["task"], row["arm"]) == (task, arm)]
            row = {"task": task, "arm": arm, **_summary(mine, rounds, reach), **_intervals(results, arm, [task])}
            row["break_even_tau"] = break_even_tau(row["tau"], row["speedup"])
            rows.append(row | {"entropy": float(np.mean(entropies)) if entropies else None})
    pooled = []
    for arm in arms:
        mine = [row for row in prompts if row["arm"] == arm]
        pooled.append({"arm": arm, **_summary(mine, rounds, reach), **_intervals(results, arm, tasks)})
    facts = {name: prompts[0][name] for name in ("device", "dtype")} | {"timing": "decode_only"}
    budget = max(row["budget"] for row in prompts)
    table = plain({**facts, "budget": budget, "block_size": block_size, "rows": rows, "pooled": pooled})
    write_json(folder / "main_table.json", table)
    return table


def drafted_block(folder: str | Path) -> int | None:
    """Return the block size of a run's drafter, as its provenance says; None where it says none."""
    path = Path(folder) / "provenance.json"
    return read_json(path).get("drafter", {}).get("block_size") if path.is_file() else None


def _summary(
    mine: Sequence[Mapping[str, Any]], rounds: Sequence[Mapping[str, Any]], reach: int | None
) -> dict[str, Any]:
    """Sum up one arm's prompts, and its rounds without the cut ones."""
    arm, tasks = mine[0]["arm"], {row["task"] for row in mine}
    whole = [row["committed"] for row in rounds if row["arm"] == arm and row["task"] in tasks and not row["truncated"]]
    tokens, tau = sum(row["n_tokens"] for row in mine), pooled_tau(mine)
    return {
        "n": len(mine),
        "n_tokens": tokens,
        "rounds": sum(row["rounds"] for row in mine),
        "tau": tau,
        "tau_uncut": float(np.mean(whole)) if whole else tau,
        "accepted_length": tau - 1,
        "acceptance_rate": (tau - 1) / reach if reach else None,
        "ms_per_token": sum(row["ms_per_token"] * row["n_tokens"] for row in mine) / tokens,
        "tree_size": float(np.mean([row["tree_size"] for row in mine])),
        "repeats": float(np.mean([row["repeats"] for row in mine])),
        "looped": sum(row["looped"] for row in mine),
        "identical": sum(row["matches_ar"] for row in mine),
    }


def _intervals(results: Results, arm: str, tasks: Sequence[str]) -> dict[str, float]:
    """Return the speedup over ar on these tasks (geometric mean of several), and the ends of its and of tau's interval."""
    speedup([row for row in results.prompts if row["task"] in tasks], arm)  # refuses rows that do not compare
    gain = results.speedup(arm, "ar", tasks)
    tau = results.tau(arm, tasks)
    ends = {"speedup_low": gain.low, "speedup_high": gain.high, "tau_low": tau.low, "tau_high": tau.high}
    return {"speedup": gain.value, **ends}


def table_text(table: Mapping[str, Any]) -> str:
    """Print a main table as aligned text; a slowdown says so."""
    heads = ("task", "arm", "n", "tau", "ms/token", "speedup", "95% interval", "identical", "")
    rows = []
    for row in [*table["rows"], *({"task": "all", **pooled} for pooled in table["pooled"])]:
        speed = row["speedup"]
        marks = ["SLOWDOWN"] if speed is not None and speed < 1 else []
        if row.get("looped"):
            marks.append(f"{row['looped']} of {row['n']} LOOP")
        numbers = (str(row["n"]), number(row["tau"]), number(row["ms_per_token"]), number(speed, suffix="x"))
        interval = f"[{number(row['speedup_low'])}, {number(row['speedup_high'])}]"
        rows.append((row["task"], row["arm"], *numbers, interval, f"{row['identical']}/{row['n']}", "  ".join(marks)))
    return writer.aligned(writer.frame(rows, heads), right=heads[2:6])


def short_table(table: Mapping[str, Any]) -> str:
    """Return a main table as the README shows it: a row per task in markdown, chain and tree side by side."""
    heads = ("task", "entropy (nats)", "tau chain", "tau tree", "speedup chain", "speedup tree", "identical to greedy")
    by_arm = {(row["task"], row["arm"]): row for row in table["rows"]}
    by_arm |= {("all", row["arm"]): {"entropy": None, **row} for row in table["pooled"]}
    rows = []
    for task in dict.fromkeys(task for task, _ in by_arm):
        arms = (by_arm[task, "chain"], by_arm[task, "tree"])
        entropy = "" if task == "all" else number(arms[0]["entropy"])
        taus = (number(row["tau"]) for row in arms)
        speeds = (f"{row['speedup']:.2f}x [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]" for row in arms)
        same = f"{sum(row['identical'] for row in arms)} of {sum(row['n'] for row in arms)}"
        rows.append((task, entropy, *taus, *speeds, same))
    return writer.markdown(writer.frame(rows, heads), right=heads[1:]).rstrip("\n")
