"""What a finished run says: the files of its folder, read once, and the intervals that figures, tables and claims share.

Everything here leaves warm-up out. A tau pools rounds; an interval is a paired bootstrap over prompts, drawn within their
tasks; speedups of several tasks combine by geometric mean (`glance.metrics`). An interval has one source, the methods
below: `main_table.json` stores what they give, the README prints it from there, and figures and claims, which ask for the
same, get the same digits. The file knows nothing of models.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from glance import metrics
from glance.files import read_csv, read_json
from glance.metrics import Interval
from glance.paths import KEPT, PAPER, located
from glance.records import Round, read_prompts, read_rounds, unpack_round
from glance.tasks import TASKS

N_BOOT = 2000  # resamples of every interval that a run's tables, figures and claims print
STEPS = ("draft", "tree", "verify", "commit")  # of a round, as rounds.jsonl books them
MADE_BY = {
    "provenance.json": "01-decode",
    "prompts.jsonl": "01-decode",
    "rounds.jsonl": "01-decode",
    "main_table.json": "01-decode",
    "costs.json": "01-decode",
    "audit.json": "02-audit",
    "law.json": "03-fit",
}


class Missing(ValueError):
    """A run lacks what a figure, a table or a claim needs; the message is one line."""


class Results:
    """A run folder, opened for reading; `sweep` is the run of the same shape inside it that varies the budget.

    >>> Results("nowhere").main
    Traceback (most recent call last):
        ...
    glance.report.results.Missing: nowhere has no main_table.json: run 01-decode first
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    @cached_property
    def prompts(self) -> list[dict[str, Any]]:
        """The rows of prompts.jsonl."""
        path = self._path("prompts.jsonl")
        rows = read_prompts(path)
        kept = metrics.drop_warmup(rows)
        if not kept:
            raise Missing(f"{path} has {len(rows)} rows and none after the warm-up: decode more prompts")
        return kept

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The rows of prompts.jsonl as a data frame."""
        return pd.DataFrame(self.prompts)

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """The rows of rounds.jsonl; none where no answer started a round."""
        return metrics.drop_warmup(read_rounds(self._path("rounds.jsonl")))

    @cached_property
    def main(self) -> dict[str, Any]:
        """main_table.json."""
        return self._json("main_table.json")

    @cached_property
    def audit(self) -> dict[str, Any]:
        """audit.json."""
        return self._json("audit.json")

    @cached_property
    def law(self) -> dict[str, Any]:
        """law.json."""
        return self._json("law.json")

    @cached_property
    def costs(self) -> dict[str, Any]:
        """costs.json."""
        return self._json("costs.json")

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """provenance.json."""
        return self._json("provenance.json")

    @cached_property
    def words(self) -> Any:
        """The tokenizer of the run's target; None, for which views show ids, where it cannot be loaded here."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(located(self.provenance["parameters"]["target"]))
        except (KeyError, OSError, ValueError):
            return None

    @cached_property
    def sweep(self) -> "Results":
        """The run over budgets."""
        return Results(self.folder / "sweep")

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks that were decoded, the paper's five first and in its order."""
        found = self.frame["task"].unique().tolist()
        return [task for task in TASKS if task in found] + [task for task in found if task not in TASKS]

    @cached_property
    def arms(self) -> list[str]:
        """The arms that were decoded, in their order in the file."""
        return self.frame["arm"].unique().tolist()

    @cached_property
    def budgets(self) -> list[int]:
        """The budgets N of the arms tree-N."""
        return sorted(int(arm[5:]) for arm in self.arms if arm.startswith("tree-"))

    def require(self, *arms: str, tasks: Sequence[str] = (), least: int = 1) -> None:
        """Raise `Missing` unless these arms and tasks were decoded, with `least` prompts in each task."""
        for kind, wanted, there in (("arm", arms, self.arms), ("task", tasks, self.tasks)):
            if lacking := [name for name in wanted if name not in there]:
                raise Missing(f"{self.folder} has no {kind} {', '.join(lacking)}; it has {', '.join(there)}")
        counts = self.frame.groupby(["arm", "task"]).size()
        for task in tasks or self.tasks:
            if (n := int(counts.get((arms[0], task), 0))) < least:
                raise Missing(f"{self.folder} has {n} prompts of {task}: an interval needs {least}")

    def tau(self, arm: str, tasks: Sequence[str] | None = None) -> Interval:
        """Return tau of an arm, pooled over the rounds of the tasks (all where None); nan where no answer has a round."""
        table, strata = self._table(arm, tasks)
        return _interval(table, table, lambda ours, _: _pooled(ours), strata)

    def tau_ratio(self, arm: str, other: str, tasks: Sequence[str] | None = None) -> Interval:
        """Return tau of an arm over tau of another on the same prompts."""
        (ours, strata), (base, _) = self._table(arm, tasks), self._table(other, tasks)

        def ratio(a: np.ndarray, b: np.ndarray) -> float:
            return _pooled(a) / _pooled(b)

        return _interval(ours, base, ratio, strata)

    def ordered_share(self, arm: str, tasks: Sequence[str], n_boot: int = 1000) -> float:
        """Return the share of resamples, of prompts within tasks, in which an arm's tau ascends over the tasks."""
        table, strata = self._table(arm, tasks)
        rng, taus = np.random.default_rng(0), []
        for task in tasks:
            mine = table[strata == task]
            drawn = mine[rng.integers(len(mine), size=(n_boot, len(mine)))]  # (R, prompts, 4)
            taus.append(drawn[..., 2].sum(1) / drawn[..., 3].sum(1))
        return float((np.diff(taus, axis=0) > 0).all(0).mean())

    def speedup(self, arm: str, over: str = "ar", tasks: Sequence[str] | None = None) -> Interval:
        """Return ms/token of `over` divided by that of `arm`: per task, then the geometric mean."""
        (ours, strata), (base, _) = self._table(arm, tasks), self._table(over, tasks)
        members = [strata == task for task in np.unique(strata)]

        def ratio(a: np.ndarray, b: np.ndarray) -> float:
            return metrics.geomean(
                (b[of, 0].sum() / b[of, 1].sum()) / (a[of, 0].sum() / a[of, 1].sum()) for of in members
            )

        return _interval(ours, base, ratio, strata)

    def split(self, arm: str) -> dict[str, float]:
        """Return an arm's mean milliseconds per round by step; "other" is decode time that no step booked, 0 at least.

        The first round's draft is left out throughout: the decode's clock opens after it.
        """
        self.require(arm)
        steps = [f"{step}_ms" for step in STEPS]
        rounds = pd.DataFrame(self.rounds, columns=["arm", "round", *steps])
        rounds = rounds[rounds["arm"] == arm].copy()
        rounds.loc[rounds["round"] == 0, "draft_ms"] = 0.0
        total = {step: float(rounds[f"{step}_ms"].sum()) for step in STEPS}
        mine = self.frame[self.frame["arm"] == arm]
        whole = float((mine["ms_per_token"] * mine["n_tokens"]).sum())
        total["other"] = max(0.0, whole - sum(total.values()))
        return {step: value / len(rounds) for step, value in total.items()}

    def answer(self, task: str, prompt: int, arm: str = "tree") -> tuple[dict[str, Any], list[Round]]:
        """Return one answer's row and its rounds, as views take them; the warm-up can be looked at too.

        Raises:
            Missing: no such answer, or a run that kept no trees; says what there is.
        """
        key = {"task": task, "prompt": prompt, "arm": arm}
        rows = read_prompts(self._path("prompts.jsonl"))
        if not (found := [row for row in rows if key.items() <= row.items()]):
            raise Missing(f"{self.folder} has no answer of {_said(key)}; it has {_offers(rows, key)}")
        if arm == "ar":
            raise Missing("arm ar is plain decoding, which has no rounds: choose another arm")
        rounds = [row for row in read_rounds(self._path("rounds.jsonl")) if key.items() <= row.items()]
        if not all(row.get("tree") for row in rounds):
            raise Missing(f"{self.folder} kept no trees: decode it again, under another name, with trees=True")
        return found[-1], [unpack_round(row) for row in sorted(rounds, key=lambda row: row["round"])]

    def row(self, task: str, arm: str) -> dict[str, Any]:
        """Return the main table's row of a task and an arm."""
        for row in self.main["rows"]:
            if (row["task"], row["arm"]) == (task, arm):
                return row
        raise Missing(f"{self.folder / 'main_table.json'} has no row of task {task}, arm {arm}")

    def law_of(self, name: str) -> dict[str, Any]:
        """Return law.json's entry of a task; one that has no finite fit says so under "failed"."""
        if name not in self.law["laws"]:
            raise Missing(f"{self.folder / 'law.json'} has no law of {name}; it has {', '.join(self.law['laws'])}")
        return self.law["laws"][name]

    @property
    def named_laws(self) -> list[tuple[str | None, dict[str, Any]]]:
        """Each task with its law, and None with the law of all tasks' rounds."""
        return [*self.law["laws"].items(), (None, self.law["pooled"])]

    def keep(self, folder: str | Path = KEPT) -> list[Path]:
        """Copy the small result files into the repository's keeping, so that a change of a number is a visible diff."""
        names = [name for name in (*MADE_BY, "sweep/main_table.json") if name.endswith(".json")]
        kept = []
        for name in names:
            path = Path(folder) / self.folder.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((self.folder / name).read_bytes())
            kept.append(path)
        return kept

    def _table(self, arm: str, tasks: Sequence[str] | None) -> tuple[np.ndarray, np.ndarray]:
        """Return per prompt: ms, tokens, tokens after the first, rounds; and its task."""
        self.require(arm, tasks=tasks or ())
        frame = self.frame[(self.frame["arm"] == arm) & self.frame["task"].isin(tasks or self.tasks)]
        frame = frame.sort_values(["task", "prompt"])
        cells = {"ms": frame["ms_per_token"] * frame["n_tokens"], "tokens": frame["n_tokens"]}
        cells |= {"after": frame["n_tokens"] - 1, "rounds": frame["rounds"]}
        return pd.DataFrame(cells).to_numpy(float), frame["task"].to_numpy(str)

    def _json(self, name: str) -> Any:
        return read_json(self._path(name))

    def _path(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise Missing(f"{self.folder} has no {name}: run {MADE_BY[name]} first")
        return path


def _said(key: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in key.items())


def _offers(rows: Sequence[Mapping[str, Any]], key: Mapping[str, Any]) -> str:
    """Say which values the rows have for the first part of a key that none of them meets."""
    for name, value in key.items():
        values = list(dict.fromkeys(row[name] for row in rows))
        rows = [row for row in rows if row[name] == value]
        if not rows and name == "prompt":
            return f"prompts {min(values)} to {max(values)}" if values else "none"
        if not rows:
            return f"{name}s {', '.join(values)}" if values else "none"
    return "none"


def paper_rows(name: str) -> list[dict[str, str]]:
    """Read a table of data/paper/, the numbers as published; empty cells are ""."""
    return read_csv(PAPER / f"{name}.csv")


def paper_main(task: str, source: str) -> dict[str, float]:
    """Return what the paper's main table reports of a task in edition "v1" or "v2", by column; empty cells are left out."""
    rows = [row for row in paper_rows("main_table") if (row["task"], row["source"]) == (task, source)]
    return {k: float(v) for row in rows for k, v in row.items() if v and k not in ("task", "source")}


def _pooled(table: np.ndarray) -> float:
    """Return the tau of a table's prompts; nan without a round."""
    rounds = table[:, 3].sum()
    return float(table[:, 2].sum() / rounds) if rounds else float("nan")


def _interval(ours: np.ndarray, base: np.ndarray, statistic: Any, strata: np.ndarray) -> Interval:
    """Bootstrap where there are prompts to draw from; a single prompt has no interval but its value."""
    if len(ours) < 2:
        value = float(statistic(ours, base))
        return Interval(value, value, value)
    return metrics.paired_bootstrap(ours, base, statistic, strata=strata, n_boot=N_BOOT)
