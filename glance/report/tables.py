"""The tables of a run, main, audit and law, and the benchmark's; each as markdown, CSV and LaTeX.

Columns are of two groups that never mix: what this run measured, and, under names that begin with "paper", what the paper
reports of its own 8B target with edition v1 or v2 (`data/paper/`). A cell that was not measured or not reported is "-".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import pandas as pd

from glance.files import read_csv, read_json, sha256
from glance.paths import BENCH, FIGURES, named
from glance.report import writer
from glance.report.results import Missing, Results, paper_main, paper_rows
from glance.report.style import look

NONE, ENDS = "-", ("_low", "_high")


@dataclass(frozen=True)
class Table:
    """A table: `columns` maps keys of the rows to headings; a key's interval stands beside it as key_low and key_high."""

    name: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    note: str

    def only(self, *keys: str, **where: str) -> "Table":
        """Return some of its columns, and of its rows those with these values."""
        rows = [row for row in self.rows if all(row.get(key) == value for key, value in where.items())]
        return replace(self, columns={key: self.columns[key] for key in keys}, rows=rows)

    @property
    def values(self) -> pd.DataFrame:
        """Its values by key, an interval's ends in columns of their own."""
        keys = [k + end for k in self.columns for end in ("", *ENDS) if not end or any(k + end in r for r in self.rows)]
        return writer.frame(({key: row.get(key) for key in keys} for row in self.rows), keys)

    @property
    def cells(self) -> pd.DataFrame:
        """Its cells as they are printed, by heading."""
        rows = ([_shown(row, key) for key in self.columns] for row in self.rows)
        return writer.frame(rows, list(self.columns.values()))

    def markdown(self) -> str:
        """Return it as markdown, the paper's columns in italics."""
        heads = [f"*{head}*" if key.startswith("paper") else head for key, head in self.columns.items()]
        return f"**{self.title}**\n\n{writer.markdown(self.cells.set_axis(heads, axis=1))}\n{self.note}\n"

    def csv(self) -> str:
        """Return it as CSV headed by the keys."""
        return writer.csv(self.values)

    def latex(self) -> str:
        """Return it as a LaTeX table for the booktabs package, the two groups of columns under a rule each."""
        n_paper = sum(key.startswith("paper") for key in self.columns)
        caption = f"{self.title} {self.note}"
        return writer.latex(self.cells, caption=caption, label=f"tab:{self.name}", n_paper=n_paper)

    _repr_markdown_ = markdown


def write(table: Table, folder: str | Path = FIGURES) -> dict[str, Path]:
    """Write a table as `table-<name>` in md, csv and tex; return the paths by format."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    texts = {"md": table.markdown(), "csv": table.csv(), "tex": table.latex()}
    paths = {kind: Path(folder) / f"table-{table.name}.{kind}" for kind in texts}
    for kind, path in paths.items():
        path.write_text(texts[kind], encoding="utf-8")
    return paths


def main_table(results: Results) -> Table:
    """Return the main table: every task by every arm, the arms over all tasks, and the paper's autoregressive head."""
    columns = {
        "task": "task",
        "arm": "arm",
        "n": "prompts",
        "identical": "identical to greedy",
        "tau": "tau",
        "tau_uncut": "tau, uncut rounds",
        "accepted_length": "accepted",
        "acceptance_rate": "acceptance rate",
        "ms_per_token": "ms/token",
        "speedup": "speedup [95%]",
        "break_even_tau": "break-even tau",
        "entropy": "entropy (nats)",
        "tree_size": "nodes",
        "repeats": "repeated 4-grams",
        **{f"paper_{key}_{v}": f"paper {key} {v}" for key in ("tau", "speedup") for v in ("v1", "v2")},
    }
    rows = []
    for task in dict.fromkeys(row["task"] for row in results.main["rows"]):
        rows += [_measured(row, task) for row in results.main["rows"] if row["task"] == task]
        if reported := _reported(task, "eagle3"):
            rows.append({"task": look(task).label, "arm": "EAGLE3 head, in the paper alone", **reported})
    rows += [_measured(row, "all tasks") for row in results.main["pooled"]]
    facts = ", ".join(results.main[key] for key in ("device", "dtype")) + f", budget {results.main['budget']}"
    note = (
        f"This run: {facts}, {results.main['timing']} timing. tau: tokens per round with the bonus, pooled over rounds; "
        "accepted: tau - 1; acceptance rate: accepted / offsets of a block. Speedup: over plain greedy in the same process, "
        "all tasks by geometric mean; below 1, and so below the break-even tau, it is a slowdown. Columns named paper: "
        "reported for Qwen3-VL-8B on a GPU, in edition v1 or v2; another target on another machine."
    )
    return Table("main", "Accepted length and speedup.", columns, rows, note)


def audit_table(results: Results) -> Table:
    """Return the audit's table: equality per arm, the controls, row invariance, faults, and the reduced precision."""
    report, half = results.audit, results.audit.get("bfloat16")
    rows = [_check("verdict", report["dtype"], report["verdict"]), *_equality(report, paper=True)]
    rows += _invariance(report["row_invariance"])
    for row in report["faults"]:
        want = "must fail" if row["must_fail"] else "must not fail"
        word = f"{row['diverged']} of {row['of']}, {'as it must' if row['caught'] else 'NOT AS IT MUST'}"
        if row["caught"] is None:
            word = f"{'not exercised' if row['applies'] else 'does not apply'}: {row['why']}"
        rows.append(_check(f"planted: {row['fault']} ({want})", report["dtype"], word))
    if half:
        rows += [_check("verdict", half["dtype"], half["verdict"]), *_equality(half, paper=False)]
    columns = {"check": "check", "dtype": "dtype", "measured": "this run", "paper": "paper"}
    note = "A planted fault's count is of prompts that diverged. The paper audits its own 8B target in fp32."
    return Table("audit", "Equality with greedy decoding.", columns, rows, note)


def law_table(results: Results) -> Table:
    """Return the law's table: the mean fit with intervals and against its ceiling, the geometric fit, filled blocks."""
    columns = {
        "name": "task",
        "n": "rounds",
        "n_groups": "prompts",
        "b0": "b0 [95%]",
        "b1": "b1 [95%]",
        "rho": "rho [95%]",
        "r2_round": "r2 rounds",
        "r2_ceiling": "r2 ceiling",
        "r2_curve": "r2 deciles",
        "geometric_b0": "geometric b0 [95%]",
        "geometric_b1": "geometric b1 [95%]",
        "geometric_r2": "geometric r2 rounds",
        "at_cap": "filled the block",
        "holds": "law",
        "paper": "paper",
    }
    (claim,) = (row for row in paper_rows("claims") if row["where"] == "figure a")
    rows = []
    for name, law in results.named_laws:
        row = {**law, "name": "all tasks" if name is None else look(name).label}
        row["holds"] = "holds" if law["holds"] else "does not hold"
        if why := law.get("failed") or law.get("degenerate"):
            row["holds"] += f": {why}"
        for key in ("b0", "b1", "rho"):
            row |= dict(zip((f"{key}_low", f"{key}_high"), law[f"{key}_ci"] or (None, None), strict=True))
        other = law.get("geometric") or {}
        for key in ("b0", "b1") if other.get("b1") is not None else ():
            low, high = other[f"{key}_ci"]
            row |= {f"geometric_{key}": other[key], f"geometric_{key}_low": low, f"geometric_{key}_high": high}
        row["geometric_r2"] = other.get("r2_round")
        row["at_cap"] = f"{law['at_cap']:.1%}" if law.get("at_cap") is not None and law["cap"] else None
        rows.append(row | ({} if name is None else {"paper": f"holds ({claim['source']})"}))
    cap = f"blocks end at {results.law['cap']}" if results.law["cap"] else "blocks without an end"
    note = (
        f"logit p = b0 - b1 H; arm {results.law['arm']}, {cap}, cut rounds left out; intervals by a bootstrap over "
        "prompts. The law is fitted to the mean accepted length, by least squares, and its verdict is on that fit. The "
        "geometric fit asks more, that the chance of acceptance is the same along a block: where the two part, it is not. "
        "The paper's word is on its own 8B target; it prints no coefficients to set beside."
    )
    return Table("law", "The draftability law.", columns, rows, note)


def bench_table(folder: str | Path = BENCH) -> Table:
    """Return what `make bench` measured, every section; raises `Missing` where it did not run."""
    folder = Path(folder)
    if not (files := sorted(folder.glob("*.csv"))) or not (folder / "machine.json").is_file():
        raise Missing(f"{folder} has no benchmark: run `make bench` first")
    facts = read_json(folder / "machine.json")
    columns = {key: key for key in ("section", "case", "variant", "prefix", "nodes", "ms", "ratio")}
    columns |= {"base": "over", "tau": "tau", "bound": "bound", "of_bound": "speedup / bound"}
    rows: list[dict[str, Any]] = []
    for file in files:
        for row in read_csv(file):
            shown: dict[str, Any] = {
                key: float(row[key]) if row[key] else None for key in ("ms", "ratio", "tau", "bound")
            }
            if shown["bound"]:
                shown["of_bound"] = 1 / (shown["ratio"] * shown["bound"])
            rows.append(row | shown)
    note = (
        f"Medians in one process, variants in turn; {facts['machine']['processor']}, {facts['threads']} threads, "
        f"torch {facts['versions']['torch']}. Ratio: milliseconds over those of the variant in the next column; a decode's "
        "speedup is 1 / ratio. Bound: tau c_ar / (c_draft + c_verify(N)), forwards timed apart. What a section compares "
        "stands in glance/bench/suite.py."
    )
    return Table("bench", "The benchmark.", columns, rows, note)


def _measured(row: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Label a row of main_table.json, and set the paper's numbers for the tree beside it."""
    shown = {**row, "task": look(task).label, "arm": look(row["arm"]).label}
    shown["identical"] = f"{row['identical']} of {row['n']}"
    if row.get("looped"):
        shown["task"] += f" (loops: {row['looped']} of {row['n']} answers)"
    if row["arm"] == "ar":  # the baseline has nothing to accept
        barred = ("accepted_length", "acceptance_rate", "break_even_tau", "tree_size", "speedup_low", "speedup_high")
        return {key: value for key, value in shown.items() if key not in barred}
    return shown | (_reported(task, "glance") if row["arm"] == "tree" else {})


def _reported(task: str, method: str) -> dict[str, float]:
    editions = {v: paper_main(task, v) for v in ("v1", "v2")}
    cells = {
        f"paper_{key}_{v}": row.get(f"{method}_{key}") for v, row in editions.items() for key in ("tau", "speedup")
    }
    return {key: value for key, value in cells.items() if value is not None}


def _equality(report: Mapping[str, Any], *, paper: bool) -> list[dict[str, Any]]:
    (claim,) = (row for row in paper_rows("claims") if row["where"] == "audit")
    rows = []
    for arm, count in report["arms"].items():
        row = _check(
            f"{look(arm).label} equals greedy", report["dtype"], f"{count['identical']} of {count['of']} prompts"
        )
        rows.append(row | ({"paper": f"{claim['reported']} ({claim['source']})"} if paper and arm == "tree" else {}))
    for arm, count in report.get("generate", {}).get("arms", {}).items():  # reports of before have no such control
        what = f"control: {look(arm).label} equals transformers' own generate"
        rows.append(_check(what, report["dtype"], f"{count['identical']} of {count['of']} prompts"))
    repeat, block = report["controls"]["oracle_repeat"], report["controls"]["block_pass"]
    rows.append(
        _check("control: greedy equals itself", report["dtype"], f"{repeat['identical']} of {repeat['of']} prompts")
    )
    gap = f"{block['argmax_changed']} of {block['rows']} choices changed, logits off by {block['max_logit_gap']:.2g} at most"
    return [*rows, _check("control: a block pass chooses as single steps do", report["dtype"], gap)]


def _check(what: str, dtype: str, measured: str) -> dict[str, Any]:
    return {"check": what, "dtype": dtype, "measured": measured}


def _invariance(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sum up the row-invariance measurements per dtype and masking: where it is bitwise, and how far off where not."""
    checks = []
    for dtype, masked in dict.fromkeys((row["dtype"], row["masked"]) for row in rows):
        mine = [row for row in rows if (row["dtype"], row["masked"]) == (dtype, masked)]
        off = [row for row in mine if not row["bitwise_equal"]]
        said = [f"bitwise equal among {', '.join(str(r['rows']) for r in mine if r not in off) or 'none'}"]
        if off:
            far = f"{max(r['max_abs'] for r in off):.2g} ({max(r['max_ulp'] for r in off)} ulp)"
            said.append(f"off by up to {far} among {', '.join(str(r['rows']) for r in off)}")
        checks.append(_check(f"one row alone and packed{', masked' if masked else ''}", dtype, "; ".join(said)))
    return checks


def _shown(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if isinstance(value, float) and not isfinite(value):
        return NONE
    if not isinstance(value, float):
        return NONE if value is None or value == "" else str(value)
    text = f"{value:.2f}" if abs(value) >= 1 or row.get(f"{key}_low") is not None else f"{value:.3f}"
    if row.get(f"{key}_low") is not None:
        text += f" [{row[f'{key}_low']:.2f}, {row[f'{key}_high']:.2f}]"
    return f"{text} SLOWDOWN" if key == "speedup" and value < 1 else text


def written(paths: str | Path | Iterable[str | Path]) -> Any:
    """Tabulate files, or all below a folder, in a data frame for a notebook's end: name, rows, bytes, head of sha256."""
    if isinstance(paths, (str, Path)):
        paths = sorted(path for path in Path(paths).rglob("[!.]*") if path.is_file())
    rows = []
    for path in map(Path, paths):
        data = path.read_bytes()
        count = data.count(b"\n") if path.suffix in (".jsonl", ".json", ".csv", ".md", ".tex") else None
        rows.append({"file": named(path), "rows": count, "bytes": len(data), "sha256": sha256(data)[:8]})
    return pd.DataFrame(rows, columns=["file", "rows", "bytes", "sha256"]).astype({"rows": "Int64"})
