"""The figures of a run, and the one door to figures/: one function per figure, each from `Results` to a matplotlib Figure.

Sizes are printed inches (3.25 or 6.75 wide), fonts are matplotlib's own, colours seaborn's "colorblind" palette, and what
a colour says a marker, dash or hatch says again. `save` fixes metadata and the hash salt: equal data, equal bytes, under
equal versions. A figure draws what the run measured; numbers of the paper stand in tables alone. Figure (c), the margin
over an autoregressive head under matched training, has its place between `width_figure` and `budget_figure`.
"""

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.lines
import matplotlib.ticker
import numpy as np
from matplotlib.figure import Figure

from glance.law import DraftabilityLaw
from glance.metrics import Interval, geomean
from glance.paths import FIGURES
from glance.records import unpack_round
from glance.report.results import Missing, Results

COLUMN_IN, PAGE_IN = 3.25, 6.75


class Look(NamedTuple):
    """How an arm or a task appears wherever it appears."""

    label: str
    color: str
    marker: str
    dash: Any = "-"


ARMS = {
    "ar": Look("plain greedy", "#949494", "D", ":"),
    "chain": Look("chain", "#DE8F05", "s", (0, (4, 1.5))),
    "tree": Look("tree", "#0173B2", "o", "-"),
    "auto": Look("auto", "#029E73", "*", (0, (1, 2))),
}
TASKS = {  # in the paper's order, from free to anchored in the image
    "caption": Look("caption", "#CC78BC", "o", (0, (1, 1))),
    "textvqa": Look("TextVQA", "#DE8F05", "s", (0, (3, 1, 1, 1))),
    "infovqa": Look("InfoVQA", "#029E73", "^", (0, (4, 1.5))),
    "docvqa": Look("DocVQA", "#0173B2", "D", (0, (7, 1.5))),
    "chartqa": Look("ChartQA", "#D55E00", "v", "-"),
}
STEPS = {  # of a round: label, colour, hatch
    "draft": ("draft", "#0173B2", ""),
    "tree": ("tree", "#ECE133", "...."),
    "verify": ("verify", "#029E73", "////"),
    "commit": ("walk and commit", "#CC78BC", "xxxx"),
    "other": ("other", "#CFCFCF", ""),
}
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "axes.titlesize": 7.5,
    **dict.fromkeys(("axes.labelsize", "figure.labelsize"), 7),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 6.5),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.6),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 2.5),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "lines.linewidth": 1.1,
    "lines.markersize": 3.6,
    "hatch.linewidth": 0.4,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "glance",
}
METADATA = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {"Software": None}}
BOUND = r"bound: $\tau(N)\,c_{ar}\,/\,(c_{draft}+c_{verify}(N))$"
DECILE = ("entropy", "accepted", "low", "high", "at_cap")


def look(name: str) -> Look:
    """Return the look of an arm or a task; grey under its own name where it is not on the lists."""
    return ARMS.get(name) or TASKS.get(name) or Look(name, "#565656", "P", (0, (2, 1)))


def save(figure: Figure, name: str, folder: str | Path = FIGURES) -> dict[str, Path]:
    """Write a figure as pdf, png and svg; return the paths by format. Nothing else writes a figure."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = {kind: Path(folder) / f"{name}.{kind}" for kind in METADATA}
    for kind, path in paths.items():
        path.write_bytes(_bytes(figure, kind))
    return paths


def preview(figure: Figure, width: int = 760) -> Any:
    """Show a figure in a notebook as the PNG that `save` would write, `width` pixels wide."""
    from IPython.display import Image

    return Image(_bytes(figure, "png"), width=width)


def figures_folder(run: str) -> Path:
    """Return where a run's figures and tables go: figures/ for the default run, a folder of its own in it for another."""
    return FIGURES if run == "pocket" else FIGURES / run


def _bytes(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=kind, metadata=METADATA[kind])
    return buffer.getvalue()


def _styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    @functools.wraps(draw)
    def drawn(*args: Any) -> Figure:
        with matplotlib.rc_context(STYLE):
            return draw(*args)

    return drawn


@_styled
def law_figure(results: Results) -> Figure:
    """Figure (a): accepted length against entropy by decile with the fitted law, per task and pooled.

    Points are decile means with 95% intervals over prompts, the paler the more of the decile's rounds filled the block.
    The solid line is the law for a block that ends, the dotted one the same law were it endless: between them lies what
    the censoring hides.
    """
    laws = {name: results.law_of(name) for name in results.law["laws"]}
    shown = [law["deciles"] for law in laws.values() if law["deciles"]]
    if not shown:
        raise Missing(f"{results.folder / 'law.json'} has no deciles: every round was truncated")
    n_rows = (len(laws) + 2) // 3
    figure = Figure(figsize=(PAGE_IN, 0.6 + 1.6 * n_rows), layout="constrained")
    grid = figure.subplots(n_rows, 3, sharex=True, sharey=True, squeeze=False).ravel()
    right, top = (1.08 * max(max(d[key]) for d in shown) for key in ("entropy", "high"))
    cap = results.law["cap"]
    top = 1.12 * cap if cap and cap < 2 * top else 1.5 * top
    for axes, (name, law) in zip(grid, laws.items(), strict=False):
        _law_panel(axes, name, law, below=0.84 if cap and cap < top else 0.97)
    for axes in grid[len(laws) :]:
        axes.axis("off")
    ticks = [t for t in (0, 0.05, 0.2, 0.5, 1, 2, 4, 8) if t < right]
    grid[0].set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
    grid[0].set(xlim=(0, right), ylim=(0, top), xticks=ticks, xticklabels=[f"{t:g}" for t in ticks])
    grid[0].yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))
    key = {"decile mean, 95% interval": "ok", "fitted law": "-k"}
    key |= {"the same law, were the block endless": ":k", f"end of the block ({cap})": "k--"} if cap else {}
    handles = [
        matplotlib.lines.Line2D([], [], color="k", marker=m.strip("k:-"), ls=m.strip("ko")) for m in key.values()
    ]
    figure.legend(handles, list(key), loc="outside upper center", ncols=4)
    figure.supxlabel("entropy of the target's next token at the round's root (nats, square-root axis)")
    figure.supylabel("draft tokens accepted per round")
    return figure


def _law_panel(axes: Any, name: str, law: Mapping[str, Any], below: float) -> None:
    style = Look("all tasks", "#000000", "o") if name == "pooled" else look(name)
    axes.set_title(style.label, loc="left", color=style.color, fontweight="bold")
    deciles = law["deciles"]
    for x, y, low, high, full in zip(*(deciles.get(k, ()) for k in DECILE), strict=True):
        axes.plot([x, x], [low, high], color=style.color, lw=0.7, alpha=0.7)
        axes.plot(x, y, style.marker, mfc=_mix(style.color, 1 - full), mec=style.color, mew=0.7, zorder=3)
    note = {"transform": axes.transAxes, "ha": "right", "va": "top", "fontsize": 6, "linespacing": 1.35}
    if law.get("failed"):
        axes.text(0.98, below, f"no finite fit\n$n$ = {law['n']}", **note)
        return
    fitted = DraftabilityLaw.from_dict(law)
    entropy = np.linspace(0, (1.2 * deciles["entropy"][-1]) ** 0.5, 200) ** 2
    axes.plot(entropy, fitted.expected(entropy), color=style.color)
    slope = f"$b_1$ = {fitted.b1:.2f} [{fitted.b1_ci[0]:.2f}, {fitted.b1_ci[1]:.2f}], $\\rho$ = {fitted.rho:.2f}"
    axes.text(1, 1.03, slope, **note | {"va": "bottom"})
    rounds, verdict = f"{fitted.n} rounds", "holds" if law["holds"] else "does not hold"
    if fitted.cap:
        axes.axhline(fitted.cap, color="0.5", lw=0.6, ls=(0, (4, 2)))
        axes.plot(entropy, np.exp(fitted.b0 - fitted.b1 * entropy), color=style.color, lw=0.9, ls=":", zorder=1)
        rounds += f", {law['at_cap']:.1%} filled the block"
    axes.text(0.98, below, f"{rounds}\nthe law {verdict}", **note)


def _mix(color: str, share: float) -> tuple[float, ...]:
    return tuple(1 - share * (1 - c) for c in matplotlib.colors.to_rgb(color))


def _bars(intervals: Sequence[Interval]) -> np.ndarray:
    """Return error bars (2, n); rounding may put an end a hair inside its value."""
    return np.maximum([[i.value - i.low for i in intervals], [i.high - i.value for i in intervals]], 0)


@_styled
def width_figure(results: Results) -> Figure:
    """Figure (b): one head, drafting a chain of width 1 or a wide tree; tau per task, and the ratio with its interval."""
    results.require("chain", "tree")
    figure = Figure(figsize=(COLUMN_IN, 3.0), layout="constrained")
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
            upper.text(x, tau.high, f"{tau.value:.2f}", ha="center", va="bottom", fontsize=5.5)
    upper.axhline(1, color="black", ls=ARMS["ar"].dash, lw=0.8, label=ARMS["ar"].label)
    upper.set(ylabel="tokens per round, $\\tau$", title="One head, one pass: chain or tree")
    upper.legend(loc="upper left", ncols=3, handlelength=1.6)
    upper.set_ylim(0, 1.22 * upper.dataLim.y1)
    pooled = results.tau_ratio("tree", "chain")
    lower.axhspan(pooled.low, pooled.high, color="black", alpha=0.08, lw=0)
    lower.axhline(pooled.value, color="black", lw=0.7, ls=(0, (4, 2)), label=f"all tasks: {pooled.value:.2f}x")
    for x, task in zip(places, results.tasks, strict=True):
        ratio, style = results.tau_ratio("tree", "chain", [task]), look(task)
        lower.errorbar(x, ratio.value, _bars([ratio]), fmt=style.marker, color=style.color, elinewidth=0.8)
        box = {"facecolor": "white", "alpha": 0.85, "pad": 0.3, "lw": 0}
        lower.text(x, ratio.high, f"{ratio.value:.2f}x", ha="center", va="bottom", fontsize=5.5, bbox=box)
    lower.set(ylabel="tree / chain", xticks=places, xticklabels=[look(task).label for task in results.tasks])
    lower.axhline(1, color="black", ls=ARMS["ar"].dash, lw=0.8)
    low, high = lower.dataLim.y0, lower.dataLim.y1
    lower.set_ylim(min(1, low) - 0.06 * (high - 1), high + 0.5 * (high - min(1, low)))
    lower.legend(loc="upper left", handlelength=2)
    return figure


@_styled
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
    mean_tau = np.array([geomean(column) for column in zip(*taus.values(), strict=True)])
    figure = Figure(figsize=(PAGE_IN, 2.5), layout="constrained")
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
        mark = look(task)
        right.plot(x, line, color=mark.color, ls=mark.dash, marker=mark.marker, ms=2.8, lw=0.9, label=mark.label)
    right.plot(x, cost, color="black", marker="x", lw=1.4, label="cost of a round's passes")
    right.fill_between(x, 0.1, cost, color="0.94", lw=0, zorder=0)
    right.set(ylabel="tokens of plain decoding", title="Speedup = what a round yields ($\\tau$) / what it costs")
    right.set_yscale("log", base=2)
    right.set_ylim(0.8, 2.8 * max(*map(max, taus.values()), *cost))
    right.yaxis.set_major_formatter("{x:g}")
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


@_styled
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
