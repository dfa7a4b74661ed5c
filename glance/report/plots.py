"""The figures of a run: one function per figure, each from `Results` to a matplotlib Figure.

Looks, fonts and `save` stand in `glance.report.style`. A figure draws what the run measured; numbers of
the paper stand in tables alone. Figure (c), the margin over an autoregressive head under matched training, has its place
between `width_figure` and `budget_figure`.

A figure grows with its tasks.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.lines
import matplotlib.ticker
import numpy as np
from matplotlib.figure import Figure

from glance.law import DraftabilityLaw
from glance.metrics import Interval, geomean
from glance.records import unpack_round
from glance.report.results import Missing, Results
from glance.report.style import (
    ARMS,
    COLUMN_IN,
    NO_NUMBER,
    PAGE_IN,
    POOLED,
    STEPS,
    Look,
    drawable,
    look,
    styled,
    task_looks,
)

LEAST_TRIALS = 10  # of a depth that is drawn
BOUND = r"bound: $\tau(N)\,c_{ar}\,/\,(c_{draft}+c_{verify}(N))$"
DECILE = ("entropy", "accepted", "low", "high", "at_cap")
TICKS_FLAT = 6  # tasks whose labels stand side by side in a column
WIDEST = 14  # tasks that fit on a page's width


@styled
def law_figure(results: Results) -> Figure:
    """Figure (a): accepted length against entropy by decile with the fitted law, per task and pooled.

    Points are decile means with 95% intervals over prompts, the paler the more of the decile's rounds filled the block.
    The solid line is the law, fitted to the mean; the dotted one is the geometric fit, which takes the chance of acceptance
    to be the same along the block. Where they part, it is not: `depth_figure` shows it.
    """
    laws = results.named_laws
    shown = [law["deciles"] for _, law in laws if law["deciles"]]
    if not shown:
        raise Missing(f"{results.folder / 'law.json'} has no deciles: every round was truncated")
    looks = task_looks(list(results.law["laws"]))
    figure, grid = _panels(len(laws))
    right, top = (1.08 * max(max(d[key]) for d in shown) for key in ("entropy", "high"))
    cap = results.law["cap"]
    top = 1.18 * cap if cap and cap < 2 * top else 1.5 * top
    grid[0].set_ylim(0, top)
    for axes, (name, law) in zip(grid, laws, strict=False):
        _law_panel(axes, POOLED if name is None else looks[name], law, below=0.8 if cap and cap < top else 0.97)
    ticks = [t for t in (0, 0.05, 0.2, 0.5, 1, 2, 4, 8) if t < right]
    grid[0].set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
    grid[0].set(xlim=(0, right), xticks=ticks, xticklabels=[f"{t:g}" for t in ticks])
    grid[0].yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))
    key = {"decile mean, 95% interval": "ok", "the law, fitted to the mean": "-k", "geometric fit": ":k"}
    key |= {f"end of the block ({cap})": "k--"} if cap else {}
    handles = [
        matplotlib.lines.Line2D([], [], color="k", marker=m.strip("k:-"), ls=m.strip("ko")) for m in key.values()
    ]
    figure.legend(handles, list(key), loc="outside upper center", ncols=4)
    figure.supxlabel("entropy of the target's next token at the round's root (nats, square-root axis)")
    figure.supylabel("draft tokens accepted per round")
    return figure


def _panels(n: int) -> tuple[Figure, np.ndarray]:
    """Return a page-wide figure of `n` panels, three in a row, that share their axes."""
    n_rows = (n + 2) // 3
    figure = Figure(figsize=(PAGE_IN, 0.6 + 1.6 * n_rows), layout="constrained")
    grid = figure.subplots(n_rows, 3, sharex=True, sharey=True, squeeze=False).ravel()
    for axes in grid[n:]:
        axes.axis("off")
    for axes in grid[max(0, n - 3) : n]:  # the lowest panel of each column
        axes.tick_params(labelbottom=True)
    return figure, grid


def _law_panel(axes: Any, style: Look, law: Mapping[str, Any], below: float) -> None:
    axes.set_title(drawable(style.label), loc="left", color=style.color, fontweight="bold")
    deciles = law["deciles"]
    for x, y, low, high, full in zip(*(deciles.get(k, ()) for k in DECILE), strict=True):
        axes.plot([x, x], [low, high], color=style.color, lw=0.7, alpha=0.7)
        axes.plot(x, y, style.marker, mfc=_mix(style.color, 1 - full), mec=style.color, mew=0.7, zorder=3)
    note = {"transform": axes.transAxes, "ha": "right", "va": "top", "fontsize": 6, "linespacing": 1.35}
    if (
        deciles and deciles["accepted"][-1] > 0.35 * axes.get_ylim()[1]
    ):  # the curve stays high: the free corner is below
        below = 0.04
        note["va"] = "bottom"
    entropy = np.linspace(0, (1.2 * deciles["entropy"][-1]) ** 0.5, 200) ** 2 if deciles else np.empty(0)
    if not law["geometric"].get("failed"):
        geometric = DraftabilityLaw.from_dict(law["geometric"])
        axes.plot(entropy, geometric.expected(entropy), color=style.color, lw=0.9, ls=":", zorder=1)
    if law.get("failed"):
        axes.text(0.98, below, f"no finite fit\n$n$ = {law['n']}", **note)
        return
    fitted = DraftabilityLaw.from_dict(law)
    axes.plot(entropy, fitted.expected(entropy), color=style.color)
    if fitted.cap:
        axes.axhline(fitted.cap, color="0.5", lw=0.6, ls=(0, (4, 2)))
    slope = f"$b_1$ = {fitted.b1:.2f} [{fitted.b1_ci[0]:.2f}, {fitted.b1_ci[1]:.2f}], $\\rho$ = {fitted.rho:.2f}"
    full = f", {law['at_cap']:.1%} filled the block" if fitted.cap else ""
    verdict = "holds" if law["holds"] else "does not hold"
    box = {"facecolor": "white", "alpha": 0.7, "pad": 0.5, "lw": 0}
    axes.text(0.98, below, f"{slope}\n{fitted.n} rounds{full}\nthe law {verdict}", bbox=box, **note)


@styled
def depth_figure(results: Results) -> Figure:
    """Figure (a), companion: the chance that the next node is accepted, by its depth, per task and pooled.

    Full markers: rounds of the lower half of entropies; open markers: the upper half; bars are 95% intervals over prompts.
    The dashed line is the one chance that the geometric fit gives all depths at the mean entropy. Depths with fewer than
    ten trials are left out. Where the markers leave the line, the chance is not constant along the block.
    """
    laws = results.named_laws
    if not any(law["depths"] for _, law in laws):
        raise Missing(f"{results.folder / 'law.json'} has no depths: every round was truncated")
    looks = task_looks(list(results.law["laws"]))
    figure, grid = _panels(len(laws))
    for axes, (name, law) in zip(grid, laws, strict=False):
        _depth_panel(axes, POOLED if name is None else looks[name], law)
    grid[0].set_ylim(0, 1.02)
    grid[0].xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(8, integer=True))
    line = functools.partial(matplotlib.lines.Line2D, [], [], color="k")
    handles = [line(marker="o"), line(marker="o", mfc="white", ls="--"), line(ls=":")]
    words = ["lower half of entropies", "upper half, 95% intervals", "one chance for all depths (geometric fit)"]
    figure.legend(handles, words, loc="outside upper center", ncols=3)
    figure.supxlabel("depth of the node (offset in the block)")
    figure.supylabel("chance that it is accepted, its parent being so")
    return figure


def _depth_panel(axes: Any, style: Look, law: Mapping[str, Any]) -> None:
    axes.set_title(drawable(style.label), loc="left", color=style.color, fontweight="bold")
    for half, shift, face, dash in (("low", -0.1, style.color, "-"), ("high", 0.1, "white", "--")):
        table = {key: np.array(column) for key, column in law["depths"].get(half, {}).items()}
        if not table:
            continue
        seen = table["trials"] >= LEAST_TRIALS
        chance, low, high = (table[key][seen] for key in ("chance", "low", "high"))
        ends = np.maximum([chance - low, high - chance], 0)
        cue = {"color": style.color, "marker": style.marker, "mfc": face, "ls": dash}
        axes.errorbar(table["depth"][seen] + shift, chance, ends, elinewidth=0.6, lw=0.8, ms=3, mew=0.7, **cue)
    if not law["geometric"].get("failed") and law["deciles"]:
        entropy = np.average(law["deciles"]["entropy"], weights=law["deciles"]["count"])
        one = float(DraftabilityLaw.from_dict(law["geometric"]).p(entropy))
        axes.axhline(one, color="0.3", lw=0.9, ls=":", zorder=1)


def _mix(color: str, share: float) -> tuple[float, ...]:
    return tuple(1 - share * (1 - c) for c in matplotlib.colors.to_rgb(color))


def _bars(intervals: Sequence[Interval]) -> np.ndarray:
    """Return error bars (2, n); rounding may put an end a hair inside its value."""
    return np.maximum([[i.value - i.low for i in intervals], [i.high - i.value for i in intervals]], 0)


@styled
def width_figure(results: Results) -> Figure:
    """Figure (b): one head, drafting a chain of width 1 or a wide tree; tau per task, and the ratio with its interval."""
    results.require("chain", "tree")
    looks = task_looks(results.tasks)
    n = len(looks)
    width = COLUMN_IN if n <= TICKS_FLAT else PAGE_IN * max(1, n / WIDEST)
    figure = Figure(figsize=(width, 3.0 if n <= TICKS_FLAT else 3.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1.15))
    places = np.arange(len(results.tasks))
    for arm, shift in (("chain", -0.19), ("tree", 0.19)):
        taus = [results.tau(arm, [task]) for task in results.tasks]
        style, hatch = look(arm), "////" if arm == "chain" else ""
        mid = np.array([tau.value for tau in taus])
        color = _mix(style.color, 0.55) if hatch else style.color
        upper.bar(places + shift, mid, 0.36, label=style.label, color=color, hatch=hatch, edgecolor="white", lw=0)
        upper.errorbar(places + shift, mid, _bars(taus), fmt="none", ecolor="black", elinewidth=0.7)
        for x, tau in zip(places + shift, taus, strict=True):
            upper.text(x, np.nan_to_num(tau.high), _number(tau.value), ha="center", va="bottom", fontsize=5.5)
    upper.axhline(1, color="black", ls=ARMS["ar"].dash, lw=0.8, label=ARMS["ar"].label)
    upper.set(ylabel="tokens per round, $\\tau$", title="One head, one pass: chain or tree")
    upper.legend(loc="upper left", ncols=3, handlelength=1.6)
    upper.set_ylim(0, 1.22 * max(1, upper.dataLim.y1))
    pooled = results.tau_ratio("tree", "chain")
    if np.isfinite(pooled.value):
        lower.axhspan(pooled.low, pooled.high, color="black", alpha=0.08, lw=0)
        lower.axhline(pooled.value, color="black", lw=0.7, ls=(0, (4, 2)), label=f"all tasks: {pooled.value:.2f}x")
    for x, (task, style) in zip(places, looks.items(), strict=True):
        ratio = results.tau_ratio("tree", "chain", [task])
        if not np.isfinite(ratio.value):
            lower.text(x, 1, NO_NUMBER, ha="center", va="bottom", fontsize=5.5)
            continue
        lower.errorbar(x, ratio.value, _bars([ratio]), fmt=style.marker, color=style.color, elinewidth=0.8)
        box = {"facecolor": "white", "alpha": 0.85, "pad": 0.3, "lw": 0}
        lower.text(x, ratio.high, f"{ratio.value:.2f}x", ha="center", va="bottom", fontsize=5.5, bbox=box)
    lower.set(ylabel="tree / chain", xticks=places, xticklabels=[drawable(style.label) for style in looks.values()])
    if n > TICKS_FLAT or any(len(style.label) > 8 for style in looks.values()):
        lower.tick_params(axis="x", labelrotation=35)
        for label in lower.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    lower.axhline(1, color="black", ls=ARMS["ar"].dash, lw=0.8)
    low, high = (lower.dataLim.y0, max(lower.dataLim.y1, 1.1)) if lower.containers else (1.0, 2.0)
    lower.set_ylim(min(1, low) - 0.06 * (high - 1), high + 0.5 * (high - min(1, low)))
    if np.isfinite(pooled.value):
        lower.legend(loc="upper left", handlelength=2)
    return figure


def _number(value: float) -> str:
    return f"{value:.2f}" if np.isfinite(value) else NO_NUMBER


@styled
def budget_figure(results: Results) -> Figure:
    """Figure (d): speedup against the verifier's budget N, measured and as bounded by separately timed passes; and why.

    The bound is tau(N) * c_ar / (c_draft + c_verify(N)): a decoder that did nothing but its passes. Beside them, the arm
    auto. Right, the same two numbers in plain decoding's tokens: what a round yields, and what its passes cost.
    """
    sweep, budgets, costs = results.sweep, results.sweep.budgets, results.costs
    verify = {entry["nodes"]: entry["ms"] for entry in costs["verify"]}
    if not (known := [n for n in budgets if n in verify]):
        raise Missing(f"{sweep.folder} has budgets {budgets} and costs.json {sorted(verify)}: none in common")
    x = np.log2(np.array(known) + 1)
    measured = [sweep.speedup(f"tree-{n}") for n in known]
    taus = {task: [sweep.tau(f"tree-{n}", [task]).value for n in known] for task in sweep.tasks}
    cost = np.array([((costs["draft_ms"] if n else 0) + verify[n]) / costs["ar_ms"] for n in known])
    taus = {task: line for task, line in taus.items() if np.isfinite(line).all()}
    if not taus:
        raise Missing(f"{sweep.folder}: no answer began a round, so no task has a tau")
    mean_tau = np.array([geomean(column) for column in zip(*taus.values(), strict=True)])
    looks = task_looks(sweep.tasks)
    below = len(taus) > TICKS_FLAT  # the legend has a place of its own
    legend_rows = (len(taus) + 3) // 3 if below else 0
    figure = Figure(figsize=(PAGE_IN, 2.5 + 0.13 * legend_rows), layout="constrained")
    left, right = figure.subplots(1, 2)
    style = look("tree")
    values = np.array([m.value for m in measured])
    left.fill_between(x, [m.low for m in measured], [m.high for m in measured], color=style.color, alpha=0.16, lw=0)
    left.plot(x, values, color=style.color, marker=style.marker, label="measured, with 95% interval")
    left.plot(x, mean_tau / cost, color="black", ls=(0, (4, 2)), marker="x", label=BOUND)
    left.axhline(1, color=ARMS["ar"].color, lw=0.8)
    left.set_ylim(0, 1.4 * max(1, values.max(), (mean_tau / cost).max()))
    left.axhspan(0, 1, color="0.94", lw=0, zorder=0)
    left.text(x[-1], 0.05, "slower than plain greedy decoding", ha="right", va="bottom", color="0.4", fontsize=6)
    best = int(values.argmax())
    above = {"textcoords": "offset points", "ha": "right" if best == len(known) - 1 else "center"}
    top = x[best], max(measured[best].high, (mean_tau / cost)[best])
    left.annotate(f"{values[best]:.2f}x at N = {known[best]}", top, (0, 4), color=style.color, **above)
    left.set(ylabel="speedup over plain greedy", title="Speedup, all tasks (geometric mean)")
    left.legend(loc="upper left")
    for task, line in taus.items():
        mark = looks[task]
        cue = {"color": mark.color, "ls": mark.dash, "marker": mark.marker}
        right.plot(x, line, ms=2.8, lw=0.9, label=drawable(mark.label), **cue)
    right.plot(x, cost, color="black", marker="x", lw=1.4, label="cost of a round's passes")
    right.fill_between(x, 0.1, cost, color="0.94", lw=0, zorder=0)
    right.set(ylabel="tokens of plain decoding", title="Speedup = what a round yields ($\\tau$) / what it costs")
    right.set_yscale("log", base=2)
    right.set_ylim(0.8, (1.2 if below else 2.8) * max(*map(max, taus.values()), *cost))
    right.yaxis.set_major_formatter("{x:g}")
    if below:
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3, handlelength=2.6)
    else:
        right.legend(loc="upper left", ncols=2, handlelength=2.6)
    for axes in (left, right):
        axes.set(xticks=x, xticklabels=known, xlabel="verifier budget $N$ (nodes)")
    if "auto" in sweep.arms:
        auto, mark, place = sweep.speedup("auto"), look("auto"), x[-1] + 1.2
        ends = [[max(0, auto.value - auto.low)], [max(0, auto.high - auto.value)]]
        left.set_ylim(0, max(left.get_ylim()[1], 1.15 * auto.high))
        left.errorbar(place, auto.value, ends, color=mark.color, marker=mark.marker, ms=6, lw=1)
        left.annotate(f"{auto.value:.2f}x", (place, auto.high), (0, 4), **above | {"ha": "center", "color": mark.color})
        left.set(xticks=[*x, place], xticklabels=[*known, "auto"])
    return figure


@styled
def time_figure(results: Results) -> Figure:
    """Draw where the time of a round goes, per budget: draft, tree, verify, commit, and what no step accounts for."""
    sweep = results.sweep
    if not (splits := {n: sweep.split(f"tree-{n}") for n in sweep.budgets}):
        raise Missing(f"{sweep.folder} has no arm tree-N: run 01-decode with a sweep over budgets first")
    axes = (figure := Figure(figsize=(COLUMN_IN, 2.55), layout="constrained")).subplots()
    places, floor = np.arange(len(splits)), np.zeros(len(splits))
    for step, (label, color, hatch) in STEPS.items():
        heights = np.array([split[step] for split in splits.values()])
        axes.bar(places, heights, 0.72, floor, color=color, hatch=hatch, edgecolor="white", lw=0.3, label=label)
        floor += heights
    plain = [r for r in sweep.prompts if r["arm"] == "ar"]
    step_ms = sum(r["ms_per_token"] * r["n_tokens"] for r in plain) / max(1, sum(r["rounds"] for r in plain))
    axes.axhline(step_ms, color="black", lw=0.8, ls=(0, (4, 2)), label=f"one plain step ({step_ms:.1f} ms)")
    axes.set(xticks=places, xticklabels=splits, xlabel="verifier budget $N$ (nodes)", ylabel="ms per round")
    axes.set(title="Where the time of a round goes", ylim=(0, 1.42 * floor.max()))
    axes.legend(loc="upper left", ncols=2, handlelength=1.6)
    return figure


def tree_pictures(results: Results, words: Any = None, *, cap: int = 40) -> list[Figure]:
    """Draw one recorded round whose walk left the draft's first choices; [] where the run kept no trees.

    `words` is as in `glance.view`; None reads the tokenizer of the run's target.
    """
    from glance.view import tree_figure

    kept = [row for row in results.rounds if row.get("tree") and row["tree"]["bonus"] is not None]
    if not kept:
        return []

    def fitness(tree: Mapping[str, Any]) -> int:  # the walk should leave the first choices, neither short nor long
        return abs(len(tree["path"]) - 6) - 20 * any(tree["ranks"][i] for i in tree["path"])

    chosen = unpack_round(min(kept, key=lambda row: fitness(row["tree"])))
    return [tree_figure(chosen, results.words if words is None else words, cap=cap)]
