"""The paper's claims against a run: each row of data/paper/claims.csv with a rule in code that decides it.

A rule returns what it measured, with intervals, and whether the claim holds here; where the run lacks what it needs, the
verdict is "not measured here" and says what is lacking. Verdicts speak of this run's target, head and machine alone. Rules
decide on 95% intervals over prompts where there are any, and their bounds are the constants below, fixed beforehand.
What the paper compares with and this project does not train is looked for as arms of the run (`eagle3`, an autoregressive
chain; `ar-head`, one trained on the same rows; `two-model`; `relaxed-*`; `text-only`), or as runs inside its folder
(`second-target/`, `second-corpus/`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from glance.files import read_text
from glance.metrics import Interval
from glance.paths import FIGURES
from glance.report import writer
from glance.report.results import Missing, Results, paper_main, paper_rows
from glance.report.style import look
from glance.tasks import TASKS

FREE, GROUNDED = TASKS[:2], TASKS[2:]  # answers that run free, and answers anchored in the image
ORDERED_SHARE = 0.95  # of bootstrap resamples in which an ordering must stand
NEARLY_CONSTANT = 1.10  # largest over smallest ratio of a factor that is "nearly constant"
LEAST = 3  # prompts per task: fewer have no interval to decide by
FLAT = 0.95  # a curve that keeps this share of its value is flat, not falling
HOLDS, FAILS, UNMEASURED = "holds", "does not hold", "not measured here"


class Finding(NamedTuple):
    """What a rule found: the claim's truth on this run, and the measurement in words."""

    holds: bool
    measured: str


@dataclass(frozen=True)
class Claim:
    """One claim of the paper: the first words of its row, the rule in words (intervals are 95%), and the rule."""

    text: str
    decided: str
    rule: Callable[[Results], Finding]
    later: Callable[[], str] | None = None  # what edition v2 reports where claims.csv has v1


@dataclass(frozen=True)
class Entry:
    """A line of the ledger."""

    claim: str
    where: str
    reported: str
    measured: str
    verdict: str
    decided: str


def _said(name: str, value: Interval, unit: str = "x") -> str:
    return f"{look(name).label} {value.value:.2f}{unit} [{value.low:.2f}, {value.high:.2f}]"


def _all_equal(results: Results) -> Finding:
    report = results.audit
    if report["dtype"] != "float32":
        raise Missing(f"the audit ran in {report['dtype']}, the claim is about fp32")
    if report["verdict"] == "not exercised":
        raise Missing("every audited output was equal, but checks of the audit itself were not exercised")
    counts = {arm: (count["identical"], count["of"]) for arm, count in report["arms"].items()}
    words = [f"{look(arm).label} {same} of {of} prompts" for arm, (same, of) in counts.items()]
    least = min(of for _, of in counts.values())
    bound = f"; so at 95% at most {1 - 0.05 ** (1 / least):.1%} of prompts differ"
    equal = report["verdict"] == "exact" and all(same == of for same, of in counts.values())
    return Finding(equal, ", ".join(words) + (bound if equal else f"; the audit's verdict: {report['verdict']}"))


def _ordered(results: Results) -> Finding:
    results.require("tree", tasks=TASKS, least=LEAST)
    taus = {task: results.tau("tree", [task]) for task in TASKS}
    share = results.ordered_share("tree", TASKS)
    words = " < ".join(_said(task, tau, "") for task, tau in taus.items())
    ascending = all(np.diff([tau.value for tau in taus.values()]) > 0)
    words = words if ascending else words.replace(" < ", ", ")
    return Finding(ascending and share >= ORDERED_SHARE, f"{words}; in this order in {share:.0%} of resamples")


def _faster(
    tasks: Sequence[str], arm: str = "tree", over: str = "ar", *, so: bool = True
) -> Callable[[Results], Finding]:
    """Make the rule that `arm` is faster (or slower, where not `so`) than `over` on each of the tasks."""

    def rule(results: Results) -> Finding:
        results.require(arm, over, tasks=tasks, least=LEAST)
        gains = {task: results.speedup(arm, over, [task]) for task in tasks}
        clear = all(gain.low > 1 if so else gain.high < 1 for gain in gains.values())
        return Finding(
            clear, ", ".join(_said(task, gain) + " SLOWDOWN" * (gain.value < 1) for task, gain in gains.items())
        )

    return rule


def _wider(results: Results) -> Finding:
    results.require("tree", "chain", least=LEAST)
    ratios = {task: results.tau_ratio("tree", "chain", [task]) for task in results.tasks}
    values = [ratio.value for ratio in ratios.values()]
    spread = max(values) / min(values)
    clear = all(ratio.low > 1 for ratio in ratios.values()) and spread <= NEARLY_CONSTANT
    return Finding(clear, f"{', '.join(_said(*pair) for pair in ratios.items())}; largest over smallest {spread:.2f}")


def _budget(results: Results) -> Finding:
    sweep = results.sweep
    sweep.require(*(f"tree-{n}" for n in (15, 31, 63)), least=LEAST)
    rise, on = sweep.speedup("tree-31", "tree-15"), sweep.speedup("tree-63", "tree-31")
    words = f"{_said('N = 31 over 15:', rise)}, {_said('63 over 31:', on)}"
    return Finding(rise.low > 1 and FLAT <= on.value < rise.value, words)


def _lawful(results: Results) -> Finding:
    laws = {task: results.law_of(task) for task in TASKS}
    slopes = [law["b1"] for law in laws.values()]
    words = []
    for task, law in laws.items():
        word = "" if law["holds"] else " (does not hold)"
        words.append(f"{look(task).label} no finite fit" if law["b1"] is None else _slope(task, law) + word)
    steeper = None not in slopes and all(np.diff(slopes) > 0)
    steeper = steeper and laws[TASKS[-1]]["b1_ci"][0] > laws[TASKS[0]]["b1_ci"][1]
    order = "steeper from task to task" if steeper else "not clearly steeper from task to task"
    return Finding(steeper and all(law["holds"] for law in laws.values()), f"slopes {', '.join(words)}: {order}")


def _slope(name: str, law: dict) -> str:
    return _said(name, Interval(law["b1"], *law["b1_ci"]), "")


def _transfers(results: Results) -> Finding:
    laws = Results(results.folder / "second-target").named_laws
    words = [f"{look(name).label if name else 'pooled'} {HOLDS if law['holds'] else FAILS}" for name, law in laws]
    return Finding(all(law["holds"] for _, law in laws), ", ".join(words))


def _longer(results: Results) -> Finding:
    results.require("tree", "ar-head", tasks=["chartqa"], least=LEAST)
    ratio, chart = (results.tau_ratio("tree", "ar-head", tasks) for tasks in (None, ["chartqa"]))
    return Finding(min(ratio.low, chart.low) > 1, f"{_said('pooled', ratio)}, {_said('chartqa', chart)}")


def _replicates(results: Results) -> Finding:
    return _longer(Results(results.folder / "second-corpus"))


def _relaxed(results: Results) -> Finding:
    arms = [arm for arm in results.arms if arm.startswith("relaxed")]
    if not arms:
        raise Missing(f"{results.folder} has no arm relaxed-*")
    same = {arm: [row["matches_ar"] for row in results.prompts if row["arm"] == arm] for arm in arms}
    return Finding(
        not any(map(any, same.values())), ", ".join(f"{a} {sum(s)} of {len(s)} prompts" for a, s in same.items())
    )


def _fused(results: Results) -> Finding:
    results.require("tree", "text-only", tasks=TASKS, least=LEAST)
    kept = {task: results.tau_ratio("text-only", "tree", [task]) for task in TASKS}
    free, grounded = (np.mean([kept[task].value for task in tasks]) for tasks in (FREE, GROUNDED))
    better = all(share.high < 1 for share in kept.values())
    return Finding(
        better and grounded < free, "kept without vision: " + ", ".join(_said(*pair) for pair in kept.items())
    )


def _v2(said: Callable[[dict[str, dict[str, float]]], str]) -> Callable[[], str]:
    """Make what edition v2 reports, from its main table by task."""
    return lambda: said({task: paper_main(task, "v2") for task in TASKS})


V2_TAUS = _v2(lambda rows: " < ".join(f"{row['glance_tau']:.2f}" for row in rows.values()))
V2_BEST = _v2(lambda rows: f"up to {max(row['glance_speedup'] for row in rows.values()):.2f}x")
V2_MARGINS = _v2(
    lambda rows: (
        f"up to {max(rows[t]['eagle3_ms_per_token'] / rows[t]['glance_ms_per_token'] - 1 for t in GROUNDED):.1%}"
    )
)
V2_FREE = _v2(
    lambda rows: ", ".join(
        f"{t} chain {rows[t]['eagle3_speedup']:.2f}x, GLANCE {rows[t]['glance_speedup']:.2f}x" for t in FREE
    )
)

CLAIMS = (  # each by the words that its row in claims.csv begins with
    Claim("output equals greedy decoding", "every arm equals greedy on every prompt, the verdict is exact", _all_equal),
    Claim(
        "accepted length is ordered",
        f"tau ascends over the tasks, in {ORDERED_SHARE:.0%} of resamples",
        _ordered,
        V2_TAUS,
    ),
    Claim(
        "faster than autoregression",
        "each grounded task's speedup lies above 1, interval and all",
        _faster(GROUNDED),
        V2_BEST,
    ),
    Claim("faster than the production head", "the same over arm eagle3", _faster(GROUNDED, over="eagle3"), V2_MARGINS),
    Claim(
        "free-running text favours",
        "arm eagle3 beats the tree on caption and TextVQA",
        _faster(FREE, "eagle3", "tree"),
        V2_FREE,
    ),
    Claim(
        "the wide tree accepts more",
        f"each ratio lies above 1; largest over smallest is at most {NEARLY_CONSTANT}",
        _wider,
    ),
    Claim(
        "speedup rises with the verifier",
        f"31 over 15 lies above 1; 63 over 31 is smaller, and at least {FLAT}",
        _budget,
    ),
    Claim(
        "accepted length falls with entropy",
        "the law holds on all five; b1 ascends, ChartQA's clear of caption's",
        _lawful,
    ),
    Claim("the law transfers", "the law holds per task and pooled in second-target/", _transfers),
    Claim("block head accepts longer", "tau over arm ar-head's lies above 1, pooled and on ChartQA", _longer),
    Claim("the matched-training gap", "the same in second-corpus/", _replicates),
    Claim(
        "a two-model drafter",
        "arm two-model's speedup lies below 1 on every task",
        _faster(TASKS, "two-model", so=False),
    ),
    Claim("relaxed acceptance heads", "no prompt of an arm relaxed-* equals greedy", _relaxed),
    Claim(
        "fused states beat text-only",
        "text-only's tau over the tree's lies below 1 on each task, lower if grounded",
        _fused,
    ),
)


def judge(claim: Claim, results: Results) -> tuple[str, str]:
    """Return the verdict on a claim and what was measured, or what is missing."""
    try:
        finding = claim.rule(results)
    except Missing as lack:
        return UNMEASURED, str(lack).replace(f"{results.folder}", "the run")
    return HOLDS if finding.holds else FAILS, finding.measured


def ledger(results: Results) -> list[Entry]:
    """Judge every row of data/paper/claims.csv, in its order.

    Raises:
        ValueError: a row without a rule, or a rule without a row.
    """
    entries, rows = [], paper_rows("claims")
    if len(rows) != len(CLAIMS):
        raise ValueError(f"claims.csv has {len(rows)} rows and there are rules for {len(CLAIMS)}")
    for row in rows:
        claim = next((claim for claim in CLAIMS if row["claim"].startswith(claim.text)), None)
        if claim is None:
            raise ValueError(f"claims.csv has a row without a rule: {row['claim']}")
        verdict, measured = judge(claim, results)
        reported = f"{row['reported']} ({row['source']})"
        if claim.later and row["source"] == "v1":
            reported += f"; v2 measured again: {claim.later()}"
        entries.append(Entry(row["claim"], row["where"], reported, measured, verdict, claim.decided))
    return entries


def count(entries: Sequence[Entry]) -> str:
    """Sum up a ledger in a line.

    >>> count([Entry("", "", "", "", "holds", "")])
    'claims: 1 holds, 0 does not hold, 0 not measured here'
    """
    verdicts = [entry.verdict for entry in entries]
    return "claims: " + ", ".join(f"{verdicts.count(word)} {word}" for word in (HOLDS, FAILS, UNMEASURED))


def law_sentence(results: Results) -> str:
    """Say in a sentence on which tasks the law holds, as README, notebooks and the ledger say it: from law.json alone.

    Raises:
        Missing: the run has no law.json.
    """
    tasks = results.law["laws"]
    holding = [look(name).label for name, law in tasks.items() if law["holds"]]
    where = f" ({', '.join(holding)})" if 0 < len(holding) < len(tasks) else ""
    pooled = "holds" if results.law["pooled"]["holds"] else "does not hold"
    return f"By its mean fit the law holds on {len(holding)} of {len(tasks)} tasks{where}; pooled over all it {pooled}."


def verdict_lines(ledger_file: str | Path = FIGURES / "claims.md") -> str:
    """Return the claims that a written ledger decided as the README lists them, a line of markdown each, and the count."""
    text = read_text(ledger_file)
    rows = [line.split(" | ") for line in text.split("\n") if line.startswith("| ")][2:]
    decided = [f"- {row[0][2:]}: {row[3]}" for row in rows if row[3] != f"**{UNMEASURED}**"]
    (counted,) = (line for line in text.split("\n") if "Claims: " in line)
    return "\n".join([*decided, "", counted[counted.index("Claims: ") :]])


def write_ledger(results: Results, folder: str | Path = FIGURES) -> Path:
    """Write claims.md: what the paper reports beside what this run measured, the verdict, and the rule that gave it."""
    entries, main = ledger(results), results.main
    lines = [
        "# The paper's claims, on this run",
        "",
        f"Run `{results.folder.name}`: {main['device']}, {main['dtype']}, ",
    ]
    lines[-1] += f"budget {main['budget']}. {count(entries).capitalize()}."
    lines += [
        "The paper reports of Qwen3-VL-8B on a GPU; a verdict speaks of this run alone: its target, its head, its machine.",
        "",
    ]
    heads = ("claim", "paper reports", "this run measured (95% intervals over prompts)", "verdict", "decided by")
    rows = [(f"{e.claim} ({e.where})", e.reported, e.measured, f"**{e.verdict}**", e.decided) for e in entries]
    table = writer.markdown(writer.frame(rows, heads))
    path = Path(folder) / "claims.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n" + table, encoding="utf-8")
    return path
