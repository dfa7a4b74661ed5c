"""Fitting the draftability law to a run's rounds, per task and pooled: what 03-fit and `glance fit-law` both call.

Conventions that decide numbers: one arm's rounds ("tree"); warm-up prompts dropped; truncated rounds left out; the
bootstrap draws prompts, each with all its rounds. A task without a finite fit carries the reason under "failed" and does
not stop the others. The statistics are `glance.law`'s; this file knows of rows and files alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from glance.files import write_json
from glance.law import DraftabilityLaw, decile_table
from glance.metrics import drop_warmup
from glance.records import SCHEMAS, read_rows
from glance.tasks import TASKS


def fit_law(
    rounds_path: str | Path,
    *,
    cap: int | None = None,
    arm: str = "tree",
    n_boot: int = 1000,
    seed: int = 0,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Fit the law to each task of a round log and to all of them together.

    Args:
        rounds_path: a run's rounds.jsonl.
        cap: the farthest a round can accept (block size - 1), where it counts as censored; None reads it off the chain
            arm, whose draft always fills the block, and without a chain arm censors nothing, as 0 does.
        out: where to write the result as JSON; None writes nothing.

    Returns:
        "cap", "arm", and "laws": by task and "pooled", `DraftabilityLaw.to_dict()` (or "failed") with "deciles".

    Raises:
        ValueError: no such file, or no rounds of the arm in it; says what there is.
    """
    path = Path(rounds_path)
    if not path.is_file():
        raise ValueError(f"{path}: no such round log: run 01-decode first, or name a run's rounds.jsonl")
    found_rows = read_rows(path)
    for number, row in enumerate(found_rows, start=1):
        if missing := [name for name in SCHEMAS["rounds.jsonl"] if name not in row]:
            raise ValueError(f"{path}:{number}: no row of a rounds.jsonl: it has no {', '.join(missing[:4])}")
    rows = drop_warmup(found_rows)
    mine = [row for row in rows if row["arm"] == arm and not row["extended"]]
    if not mine:
        arms = ", ".join(sorted({row["arm"] for row in rows})) or "none"
        raise ValueError(f"{path}: no rounds of arm {arm!r} after the warm-up; arms there: {arms}")
    if cap is None:
        cap = max((row["tree_size"] for row in rows if row["arm"] == "chain"), default=0)
    found = dict.fromkeys(row["task"] for row in mine)
    names = [task for task in TASKS if task in found] + [task for task in found if task not in TASKS]
    options = {"cap": cap or None, "n_boot": n_boot, "seed": seed}
    laws = {name: _fit([row for row in mine if row["task"] == name], **options) for name in names}
    laws["pooled"] = _fit(mine, **options)
    result = {"cap": cap or None, "arm": arm, "laws": laws}
    if out is not None:
        write_json(out, result)
    return result


def _fit(rows: Sequence[Mapping[str, Any]], cap: int | None, n_boot: int, seed: int) -> dict[str, Any]:
    entropy, accepted, cut = (np.array([row[key] for row in rows]) for key in ("entropy", "accepted", "truncated"))
    groups = [(row["task"], row["prompt"]) for row in rows]
    kept = [group for group, out in zip(groups, cut, strict=True) if not out]
    if not kept:
        return _failed(f"all {len(rows)} rounds were truncated", 0, {})
    deciles = _deciles(entropy[~cut], accepted[~cut], kept, cap, n_boot, seed)
    try:
        law = DraftabilityLaw.fit(
            entropy, accepted, cap=cap, groups=groups, truncated=cut, n_boot=n_boot, seed=seed
        ).to_dict()
    except ValueError as error:
        return _failed(str(error), len(kept), deciles)
    return {**law, "at_cap": float((accepted[~cut] == cap).mean()), "deciles": deciles}


def _failed(why: str, n: int, deciles: Mapping[str, Any]) -> dict[str, Any]:
    """Fill a law's place: every number None, so that readers meet the same keys, and the reason."""
    return {
        **{f.name: None for f in fields(DraftabilityLaw)},
        "failed": why,
        "n": n,
        "holds": False,
        "deciles": deciles,
    }


def _deciles(
    entropy: np.ndarray, accepted: np.ndarray, groups: Sequence[Any], cap: int | None, n_boot: int, seed: int
) -> dict[str, list[float]]:
    """Bin by entropy; per bin the means, the count, the share at the cap, and the mean's interval over prompts."""
    table = decile_table(entropy, accepted)
    edges = np.unique(np.quantile(entropy, np.arange(1, 10) / 10))  # as decile_table cuts
    _, which = np.unique(np.searchsorted(edges, entropy), return_inverse=True)
    codes = {group: code for code, group in enumerate(dict.fromkeys(groups))}
    place = np.array([codes[group] for group in groups]) * len(table["count"]) + which
    sums, counts = (
        np.bincount(place, values, len(codes) * len(table["count"])).reshape(len(codes), -1)
        for values in (accepted, np.ones_like(accepted))
    )
    drawn = np.random.default_rng(seed).multinomial(len(codes), np.full(len(codes), 1 / len(codes)), size=n_boot)
    means = (drawn @ sums + 1e-12 * table["accepted"]) / (drawn @ counts + 1e-12)  # an undrawn bin stays at its mean
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    at_cap = np.bincount(which, accepted == cap) / table["count"]
    columns = {**table, "low": low, "high": high, "at_cap": at_cap}
    return {name: np.asarray(values).tolist() for name, values in columns.items()}
