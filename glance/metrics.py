"""From a run's rows to the numbers in its tables: warm-up, acceptance, speedup, intervals.

Rows are mappings with the keys of ``prompts.jsonl`` (one per arm, task and prompt); any iterable of them will do.
Conventions that decide numbers:

- The first sample of a task is a warm-up and is dropped, so ``n=100`` decodes 101. Every function here leaves out rows
  marked ``warmup``.
- The first token comes from the prefill and belongs to no round; a round commits what it accepted plus one bonus, cut
  at a stop token or at the limit. So ``tau = (n_tokens - 1) / rounds`` counts the bonus, and tau of ``ar`` is 1.
- A task's tau pools rounds, not prompts: sum of tokens over sum of rounds. Its ms/token likewise pools tokens.
- A speedup is a task's, against its own autoregressive arm: same prompts, process, device, dtype, versions. Speedups
  of tasks combine by geometric mean. Below 1 it is a slowdown, and `break_even_tau` says how far off.

What it does not know: whether outputs were equal. The audit says so, and no speedup counts without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

REQUIRED = ("device", "dtype")  # on every timed row; these and the rest must agree on all rows that meet
LOOP_SHARE = 0.5  # an answer loops where this share of its token 4-grams, or more, occurred earlier in it
SETTINGS = (*REQUIRED, "torch", "transformers", "attn_implementation", "threads", "timing")


class Interval(NamedTuple):
    value: float
    low: float
    high: float


def drop_warmup(rows: Iterable[Mapping]) -> list[Mapping]:
    """Return the rows not marked ``warmup``; where no row has that key, all but the first per arm and task.

    >>> [row["prompt"] for row in drop_warmup([{"task": "docvqa", "prompt": i} for i in range(3)])]
    [1, 2]
    """
    rows = _listed(rows)
    if any("warmup" in row for row in rows):
        return [row for row in _listed(rows, "warmup") if not row["warmup"]]
    places = [(row.get("arm"), row.get("task")) for row in rows]
    return [row for i, row in enumerate(rows) if places.index(places[i]) < i]


def acceptance_length(rows: Iterable[Mapping]) -> float:
    """Return tau of one arm, pooled over rounds: sum(n_tokens - 1) / sum(rounds), the bonus included.

    >>> acceptance_length([{"n_tokens": 9, "rounds": 2}, {"n_tokens": 3, "rounds": 2}])
    2.5
    """
    rows = [row for row in _listed(rows, "n_tokens", "rounds") if not row.get("warmup")]
    if len(arms := {str(row.get("arm")) for row in rows}) > 1:
        raise ValueError(f"rows mix the arms {sorted(arms)}: their pool has no meaning; select one")
    if not (rounds := sum(row["rounds"] for row in rows)):
        raise ValueError(f"no round in {len(rows)} rows: a prompt that ends with its first token has no tau")
    return sum(row["n_tokens"] - 1 for row in rows) / rounds


def acceptance(rows: Iterable[Mapping], *, reach: int) -> dict[str, float]:
    """Return the three figures that are quoted as acceptance, side by side, for one arm.

    ``tau``: tokens per round, bonus included. ``accepted_length`` = tau - 1: without it. ``acceptance_rate`` =
    (tau - 1) / ``reach``: the share of a block's drafted offsets (block size - 1) that was accepted.

    >>> acceptance([{"n_tokens": 36, "rounds": 10}], reach=10)
    {'tau': 3.5, 'accepted_length': 2.5, 'acceptance_rate': 0.25}
    """
    if reach < 1:
        raise ValueError(f"reach={reach} must be at least 1: the offsets of a block")
    tau = acceptance_length(rows)
    return {"tau": tau, "accepted_length": tau - 1, "acceptance_rate": (tau - 1) / reach}


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean.

    >>> round(geomean([1.0, 4.0]), 12)
    2.0
    """
    values = np.asarray(list(values), float)
    if not values.size or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"a geometric mean needs positive finite numbers, at least one; got {values.tolist()}")
    return float(np.exp(np.log(values).mean()))


def speedup(rows: Iterable[Mapping], arm: str, baseline: str = "ar", *, key: str = "ms_per_token") -> dict[str, float]:
    """Return each task's ms/token of ``baseline`` over that of ``arm``; combine tasks with `geomean`.

    Raises ValueError if arms differ in prompts, rows in device, dtype, versions or timing, or a pair in its process.

    >>> row = {"task": "docvqa", "prompt": 1, "n_tokens": 8, "device": "cpu", "dtype": "float32"}
    >>> speedup([{**row, "arm": "ar", "ms_per_token": 9.0}, {**row, "arm": "tree", "ms_per_token": 3.0}], "tree")
    {'docvqa': 3.0}
    """
    rows = _listed(rows, "arm", "task", "prompt", "n_tokens", key, *REQUIRED)
    rows = [row for row in rows if row["arm"] in (arm, baseline) and not row.get("warmup")]
    for name in SETTINGS:
        if len(found := {str(row.get(name)) for row in rows}) > 1:
            raise ValueError(f"rows mix {name} {sorted(found)}: timings compare on equal terms alone; select one")
    sides = [{(row["task"], row["prompt"]): row for row in rows if row["arm"] == a} for a in (arm, baseline)]
    if not rows or sides[0].keys() != sides[1].keys() or len(rows) != len({arm, baseline}) * len(sides[0]):
        counts = f"{len(rows)} rows hold {len(sides[0])} and {len(sides[1])} prompts"
        raise ValueError(f"each prompt needs one row of {arm!r} and one of {baseline!r}; {counts}")
    sums: dict[str, np.ndarray] = {}
    for place, row in sides[0].items():
        if row.get("process") != (other := sides[1][place]).get("process"):
            raise ValueError(f"{arm!r} and {baseline!r} ran task and prompt {place} in different processes")
        cost = [side for r in (other, row) for side in (r[key] * r["n_tokens"], r["n_tokens"])]
        if not (np.isfinite(cost) & (np.array(cost) > 0)).all():
            raise ValueError(f"{key} and n_tokens must be positive; task and prompt {place} have {cost}")
        sums[place[0]] = sums.get(place[0], 0) + np.array(cost)
    return {task: float((base / base_n) / (ours / ours_n)) for task, (base, base_n, ours, ours_n) in sums.items()}


def break_even_tau(tau: float, speedup: float) -> float:
    """Return the tau below which a run is slower than its baseline: a round's cost in baseline tokens.

    >>> break_even_tau(tau=4.0, speedup=1.6), break_even_tau(tau=2.0, speedup=0.8)
    (2.5, 2.5)
    """
    return tau / speedup


def paired_bootstrap(
    ours, baseline, statistic=None, *, strata=None, n_boot: int = 2000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Return a statistic of two arms over the same prompts, with its percentile interval over resampled prompts.

    Args:
        ours, baseline: one entry per prompt, (n,) or (n, k), in one order; a prompt is drawn with both its sides.
        statistic: (ours, baseline) -> number; the ratio of means (of totals: of pools) where None. A resample for which it
            is nan (no round in any answer drawn) is left out; an interval of nan where it is nan for all.
        strata: each prompt's task; prompts are then drawn within it, and every position keeps its task.

    >>> tuple(paired_bootstrap([10.0, 12.0, 8.0], [5.0, 6.0, 4.0]))
    (2.0, 2.0, 2.0)
    """
    statistic = statistic or (lambda a, b: a.mean() / b.mean())
    ours = np.asarray(ours, float)
    baseline = np.asarray(baseline, float)
    labels = np.zeros(len(ours)) if strata is None else np.asarray(strata)
    if not len(ours) == len(baseline) == len(labels) > 1:
        raise ValueError(f"pairs of two prompts or more: got {len(ours)}, {len(baseline)}, strata {len(labels)}")
    if not (np.isfinite(ours).all() and np.isfinite(baseline).all() and 0 < level < 1 and n_boot > 0):
        raise ValueError(f"values must be finite, level={level} between 0 and 1, n_boot={n_boot} positive")
    rng = np.random.default_rng(seed)
    drawn = np.empty((n_boot, len(ours)), int)
    for members in (np.flatnonzero(labels == label) for label in np.unique(labels)):
        drawn[:, members] = rng.choice(members, (n_boot, len(members)))
    values = np.array([statistic(ours[i], baseline[i]) for i in drawn], float)
    values = values[~np.isnan(values)]
    value = float(statistic(ours, baseline))
    if not values.size:
        return Interval(value, float("nan"), float("nan"))
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def _listed(rows: Iterable[Mapping], *keys: str) -> list[Mapping]:
    rows = list(rows)
    if wrong := [row for row in rows if not isinstance(row, Mapping)]:
        raise ValueError(f"rows must be mappings, one is {wrong[0]!r:.40}; of a data frame: .to_dict('records')")
    for key in keys:
        if lacking := sum(key not in row for row in rows):
            raise ValueError(f"{lacking} of {len(rows)} rows lack {key!r}")
    return rows


def repeated_share(tokens: Sequence[int], n: int = 4) -> float:
    """Return the share of an answer's token n-grams that occurred earlier in it: 0 for none.

    Tokens and not words, so that a loop without spaces is seen.

    >>> repeated_share([1, 2, 3, 1, 2, 3], n=2)
    0.4
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
