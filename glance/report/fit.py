"""Fitting the draftability law to a run's rounds, per task and pooled: what 03-fit and `glance fit-law` both call.

Conventions that decide numbers: one arm's rounds ("tree"); warm-up prompts dropped; truncated rounds left out; the
bootstrap draws prompts, each with all its rounds. A task without a finite fit carries the reason under "failed" and does
not stop the others. The law is the mean fit's; the geometric fit stands inside it under "geometric". The statistics are
`glance.law`'s; this file knows of rows and files alone.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from glance.files import write_json
from glance.law import FITS, DraftabilityLaw, decile_table
from glance.metrics import drop_warmup
from glance.records import SCHEMAS, read_rounds
from glance.report.summary import drafted_block
from glance.tasks import TASKS


def fit_law(
    rounds_path: str | Path,
    *,
    cap: int | None = None,
    arm: str = "tree",
    loops: bool = True,
    n_boot: int = 1000,
    seed: int = 0,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Fit the law to each task of a round log and to all of them together.

    Args:
        rounds_path: a run's rounds.jsonl.
        cap: the farthest a round can accept (block size - 1), where it counts as censored; None takes the block size that
            the run's provenance names, and for a log that lies alone the chain arm's draft, which always fills the block;
            without either nothing is censored, as with 0.
        loops: False leaves out answers that loop (`looped`, see `glance.metrics.LOOP_SHARE`).
        out: where to write the result as JSON; None writes nothing.

    Returns:
        "cap", "arm", "laws" by task, and "pooled", the law of all tasks' rounds (apart: a task may bear any name). A law is
        `DraftabilityLaw.to_dict()` of the mean fit (or "failed"), with "geometric", the same of the geometric fit; "at_cap",
        the share of rounds that filled the block; "deciles", and "depths" (see `chance_by_depth`).

    Raises:
        ValueError: no such file, or no rounds of the arm in it; says what there is.
    """
    path = Path(rounds_path)
    if not path.is_file():
        raise ValueError(f"{path}: no such round log: run 01-decode first, or name a run's rounds.jsonl")
    found_rows = read_rounds(path)
    for number, row in enumerate(found_rows, start=1):
        if missing := [name for name in SCHEMAS["rounds.jsonl"] if name not in row]:
            raise ValueError(f"{path}:{number}: no row of a rounds.jsonl: it has no {', '.join(missing[:4])}")
    columns = ("task", "prompt", "arm", "entropy", "accepted", "truncated", "extended", "looped", "tree_size")
    rows = pd.DataFrame(drop_warmup(found_rows), columns=columns)
    mine = rows[(rows["arm"] == arm) & ~rows["extended"].astype(bool)]
    if not loops:
        mine = mine[~mine["looped"].astype(bool)]
    if mine.empty:
        arms = ", ".join(sorted(rows["arm"].unique())) or "none"
        raise ValueError(f"{path}: no rounds of arm {arm!r} after the warm-up; arms there: {arms}")
    if cap is None:
        block_size = drafted_block(path.parent)
        chain = rows[rows["arm"] == "chain"]
        drafted = 0 if chain.empty else int(chain["tree_size"].max())
        cap = block_size - 1 if block_size else drafted
    by_task = dict(list(mine.groupby("task", sort=False)))
    names = [task for task in TASKS if task in by_task] + [task for task in by_task if task not in TASKS]
    options = {"cap": cap or None, "n_boot": n_boot, "seed": seed}
    laws = {name: _fit(by_task[name], **options) for name in names}
    result = {"cap": cap or None, "arm": arm, "loops": loops, "laws": laws, "pooled": _fit(mine, **options)}
    if out is not None:
        write_json(out, result)
    return result


def _fit(rows: pd.DataFrame, cap: int | None, n_boot: int, seed: int) -> dict[str, Any]:
    entropy = rows["entropy"].to_numpy(float)
    accepted = rows["accepted"].to_numpy()
    cut = rows["truncated"].to_numpy(bool)
    groups = list(zip(rows["task"], rows["prompt"], strict=True))
    kept = [group for group, out in zip(groups, cut, strict=True) if not out]
    if not kept:
        return {**_failed(f"all {len(rows)} rounds were truncated", 0), "at_cap": None, "deciles": {}, "depths": {}}
    data = {"cap": cap, "groups": groups, "truncated": cut, "n_boot": n_boot, "seed": seed}
    fits = {}
    for kind in FITS:
        try:
            fits[kind] = DraftabilityLaw.fit(entropy, accepted, fit=kind, **data).to_dict()
        except ValueError as error:
            fits[kind] = _failed(str(error), len(kept))
    return {
        **fits["mean"],
        "geometric": fits["geometric"],
        "at_cap": float((accepted[~cut] == cap).mean()),
        "deciles": _deciles(entropy[~cut], accepted[~cut], kept, cap, n_boot, seed),
        "depths": chance_by_depth(entropy[~cut], accepted[~cut], kept, n_boot=n_boot, seed=seed),
    }


def _failed(why: str, n: int) -> dict[str, Any]:
    """Fill a law's place: every number None, so that readers meet the same keys, and the reason."""
    return {**{f.name: None for f in fields(DraftabilityLaw)}, "failed": why, "n": n, "holds": False}


def chance_by_depth(
    entropy: np.ndarray, accepted: np.ndarray, groups: Sequence[Any], *, n_boot: int = 1000, seed: int = 0
) -> dict[str, dict[str, list[float]]]:
    """Return the chance that the next node is accepted, by its depth: of all rounds, and of each half of entropies.

    A round that accepted k - 1 nodes or more is a trial at depth k, and a success if it accepted k. The geometric fit takes
    this chance to be the same at every depth; the law does not ask it. Intervals are 95%, by a bootstrap over `groups`.

    Args:
        entropy, accepted, groups: one per round that was not truncated; the halves part at the median of entropy.

    Returns:
        "all", "low", "high" (entropy): columns "depth", "trials", "chance", "low", "high".

    >>> chance_by_depth(np.array([0.1, 0.2, 0.3]), np.array([2, 1, 0]), [0, 1, 2])["all"]["chance"]
    [0.6666666666666666, 0.5]
    """
    depths = np.arange(1, int(accepted.max(initial=0)) + 1)
    lower = entropy <= np.median(entropy)
    tables = {}
    for name, part in (("all", np.ones_like(lower)), ("low", lower), ("high", ~lower)):
        tried = part[:, None] & (accepted[:, None] >= depths - 1)  # (rounds, depths)
        passed = part[:, None] & (accepted[:, None] >= depths)
        trials = tried.sum(0)
        reached = trials > 0
        chance = passed.sum(0)[reached] / trials[reached]
        low, high = _group_intervals(tried[:, reached], passed[:, reached], chance, groups, n_boot, seed)
        columns = {"depth": depths[reached], "trials": trials[reached], "chance": chance, "low": low, "high": high}
        tables[name] = {key: values.tolist() for key, values in columns.items()}
    return tables


def _group_intervals(
    counts: np.ndarray, sums: np.ndarray, means: np.ndarray, groups: Sequence[Any], n_boot: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return 95% intervals of the columns' sums over counts, both (rounds, columns), by drawing groups with their rounds.

    A column that a resample leaves without a count stays at its mean there.
    """
    codes = pd.factorize(pd.Series(list(groups), dtype=object))[0]
    n_groups = codes.max() + 1
    of_group = np.zeros((n_groups, len(counts)))
    of_group[codes, np.arange(len(counts))] = 1
    drawn = np.random.default_rng(seed).multinomial(n_groups, np.full(n_groups, 1 / n_groups), size=n_boot)
    ratios = (drawn @ (of_group @ sums) + 1e-12 * means) / (drawn @ (of_group @ counts) + 1e-12)
    low, high = np.quantile(ratios, [0.025, 0.975], axis=0)
    return low, high


def _deciles(
    entropy: np.ndarray, accepted: np.ndarray, groups: Sequence[Any], cap: int | None, n_boot: int, seed: int
) -> dict[str, list[float]]:
    """Bin by entropy; per bin the means, the count, the share at the cap, and the mean's interval over prompts."""
    table = decile_table(entropy, accepted)
    edges = np.unique(np.quantile(entropy, np.arange(1, 10) / 10))  # as decile_table cuts
    _, which = np.unique(np.searchsorted(edges, entropy), return_inverse=True)
    binned = which[:, None] == np.arange(len(table["count"]))  # (rounds, bins)
    low, high = _group_intervals(binned, binned * accepted[:, None], table["accepted"], groups, n_boot, seed)
    at_cap = np.bincount(which, accepted == cap) / table["count"]
    columns = {**table, "low": low, "high": high, "at_cap": at_cap}
    return {name: np.asarray(values).tolist() for name, values in columns.items()}
