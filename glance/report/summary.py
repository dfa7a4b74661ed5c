"""From a run's records to the numbers of its main table. Conventions are `glance.metrics`'; nothing here decodes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

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
    results = Results(folder)
    by_arm = dict(list(results.frame.groupby("arm", sort=False)))
    cells = dict(list(results.frame.groupby(["task", "arm"], sort=False)))
    logged = pd.DataFrame(rounds, columns=["task", "arm", "committed", "truncated", "entropy"])
    tasks = results.frame["task"].unique().tolist()
    steady = [arm for arm in by_arm if arm != "auto"][-1]  # whose rounds the entropies are taken at
    entropies = logged[logged["arm"] == steady].groupby("task")["entropy"].mean()
    block_size = drafted_block(folder)
    reach = block_size - 1 if block_size else None
    rows = []
    for task in tasks:
        for arm in by_arm:
            mine = cells[task, arm]
            row = {"task": task, "arm": arm, **_summary(mine, logged, reach), **_intervals(results, arm, [task])}
            row["break_even_tau"] = break_even_tau(row["tau"], row["speedup"])
            rows.append(row | {"entropy": entropies.get(task)})
    pooled = [
        {"arm": arm, **_summary(mine, logged, reach), **_intervals(results, arm, tasks)} for arm, mine in by_arm.items()
    ]
    facts = {name: prompts[0][name] for name in ("device", "dtype")} | {"timing": "decode_only"}
    budget = max(row["budget"] for row in prompts)
    table = plain({**facts, "budget": budget, "block_size": block_size, "rows": rows, "pooled": pooled})
    write_json(folder / "main_table.json", table)
    return table


def drafted_block(folder: str | Path) -> int | None:
    """Return the block size of a run's drafter, as its provenance says; None where it says none."""
    path = Path(folder) / "provenance.json"
    return read_json(path).get("drafter", {}).get("block_size") if path.is_file() else None


def _summary(mine: pd.DataFrame, logged: pd.DataFrame, reach: int | None) -> dict[str, Any]:
    """Sum up one arm's prompts, and its rounds without the cut ones."""
    uncut = logged[
        (logged["arm"] == mine["arm"].iloc[0]) & logged["task"].isin(mine["task"]) & ~logged["truncated"].astype(bool)
    ]
    tokens = mine["n_tokens"].sum()
    tau = pooled_tau(mine.to_dict("records"))
    return {
        "n": len(mine),
        "n_tokens": tokens,
        "rounds": mine["rounds"].sum(),
        "tau": tau,
        "tau_uncut": tau if uncut.empty else uncut["committed"].mean(),
        "accepted_length": tau - 1,
        "acceptance_rate": (tau - 1) / reach if reach else None,
        "ms_per_token": (mine["ms_per_token"] * mine["n_tokens"]).sum() / tokens,
        "tree_size": mine["tree_size"].mean(),
        "repeats": mine["repeats"].mean(),
        "looped": mine["looped"].sum(),
        "identical": mine["matches_ar"].sum(),
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
