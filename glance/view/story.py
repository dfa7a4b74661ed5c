"""Views that tell how a round comes about: a tree as it grows, the walk step by step, whole answers beside each other.

They follow `glance.view`: no script, nothing loaded, the same bytes every time, and a text for terminals. The file knows
nothing of models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from glance.pictures import data_url
from glance.tree import ROOT
from glance.view.drawing import Scene, place, scene_of, svg, tree_svg, visible
from glance.view.frame import HINT, ID, KEYS, LIT, STEP, TREE, View, count_nodes, make_view, note, round_fact

__all__ = ["beside", "growth", "rhythm", "walk"]

_GROW = """
 .n{opacity:clamp(0,1 + var(--n) - var(--i),1)} .d>input{width:11px;background:rgb(1 115 178/.35);border-color:#0173B2}
 .tree .n>rect{stroke-width:calc(1px + 2px*max(0,1 - max(var(--n) - var(--i),var(--i) - var(--n))))}
"""
_WALK = """
 table{border-collapse:collapse;font-size:.92em;margin:0}
 table :is(td,th){padding:.15em .8em .15em 0;text-align:left;vertical-align:top;white-space:nowrap}
 table th{font-weight:normal;opacity:.7} table td{border-top:1px solid rgb(128 128 128/.35)}
 table td.c{white-space:normal}
 code{font-size:.95em;white-space:nowrap;background:none;padding:0 .3em 0 0}
 code.t{border:1px solid #0173B2;border-radius:3px;padding:0 .3em;margin-right:.5em} code.a{border:2px solid #029E73}
 code.x{border:2px dashed #DE8F05}
"""
_RHYTHM = """
 svg{max-width:100%;height:auto} .bar{fill:#DE8F05} .bar.flat{fill:#029E73} text{font-family:system-ui,sans-serif}
 .t{font-size:11px;opacity:.75} .line{stroke:currentColor;stroke-opacity:.4}
"""
_BESIDE = """
 .two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24em),1fr));gap:.4em 2em;align-items:start}
 .two>div{min-width:0} .text{white-space:pre-wrap;overflow-wrap:anywhere;margin:.2em 0} img{width:384px;max-width:100%}
"""


def growth(subject: Any, words: Any = None, *, first: int | None = None, cap: int = 127) -> View:
    """Show a tree as best-first search grows it, node by node: arrow keys on the bars, a click on a bar, or back and next.

    Args:
        subject: a round or a tree; of a round the draft's tree alone is shown, without the target's verdict.
        words: None, a callable `token id -> str`, or a tokenizer.
        first: how many nodes are there at first; all where None.
        cap: the most nodes to grow.
    """
    scene = replace(scene_of(subject, words), path=(), bonus=None, choices=())
    scene = replace(scene, cap=min(cap, len(scene.tree)))
    n = len(scene.shown)
    total = 0.0
    steps = []
    css = ""
    lines = []
    start = min(n, first or n) - 1
    for i in range(n):
        p = scene.probability(i)
        total = total + scene.probability(i)
        said = (
            f"node {i + 1}: {_after(scene, i)}, path probability {p:.2g}; expected to be accepted so far: {total:.2f}"
        )
        go = f'<label class="go{" off" * (i == 0)}" for="{ID}-{max(i - 1, 0)}">‹ back</label>'
        go += f'<label class="go{" off" * (i == n - 1)}" for="{ID}-{min(i + 1, n - 1)}">next ›</label>'
        checked = ' checked="checked"' * (i == start)
        shown = escape(said)
        steps.append(
            f'<input type="radio" name="{ID}" id="{ID}-{i}"{checked} {KEYS} aria-label="{shown}" title="{shown}" '
            f'style="--a:{p**0.5:.2f}"/><div class="p">{go}{escape(said, False)}</div>'
        )
        css += f" .d:has(#{ID}-{i}:checked){{--n:{i}}} .k{i}{{--i:{i}}}"
        lines.append(said)
    body = f'<div class="d">{"".join(steps)}<div class="box">{tree_svg(scene)}</div></div>'
    body += note(
        f"{count_nodes(scene)}. A bar per node in the order of selection, higher for a more probable path. {HINT}"
    )
    return make_view(body, "\n".join(lines) or "no nodes", TREE + LIT + STEP + _GROW + css)


def walk(round: Any, words: Any = None) -> View:
    """Show a round's walk as a table: at each place the tree's candidates, what the target says, and what follows."""
    scene = scene_of(round, words)
    kids = place(replace(scene, bonus=None)).kids
    rows = []
    lines = []
    for node in [ROOT, *scene.path][: len(scene.path) + (scene.bonus is not None)]:
        told = int(round.choices[node + 1])
        cells = []
        tokens = []
        for kid in kids.get(node, ()):
            mark = " a" if kid in scene.path else ""
            cells.append(f'<code class="t{mark}">{escape(scene.label(kid), False)}</code>')
            tokens.append(scene.label(kid))
        here = scene.label(node)
        target = visible(scene.spell(told), 24)
        agreed = any(int(scene.tree.tokens[kid]) == told for kid in kids.get(node, ()))
        then = "accepted" if agreed else "bonus, the end"
        code = f'<code class="{"a t" if agreed else "x t"}">{escape(target, False)}</code>'
        drafted = "".join(cells) or "none"
        rows.append(
            f'<tr><td><code>{escape(here, False)}</code></td><td class="c">{drafted}</td><td>{code}</td>'
            f"<td>{then}</td></tr>"
        )
        lines.append(f"after {here}: drafted {', '.join(tokens) or 'none'}; the target says {target}, {then}")
    head = "".join(f"<th>{name}</th>" for name in ("after", "the tree has", "the target says", "so"))
    body = f'<b>{round_fact(round)}</b><div class="box"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    return make_view(body, "\n".join([round_fact(round), *lines]), _WALK)


def rhythm(answers: Mapping[str, Sequence[Any]]) -> View:
    """Show answers as rows of rounds, one bar each: as wide as the tokens it committed, as high as the root's entropy.

    Args:
        answers: a name for each answer, and its rounds.
    """
    longest = max([1, *(sum(len(r.committed) for r in rounds) for rounds in answers.values())])
    tallest = max([1.0, *(r.entropy for rounds in answers.values() for r in rounds)])
    unit = 880 / longest
    high = 70
    pitch = 116
    parts = []
    lines = []
    for row, (name, rounds) in enumerate(answers.items()):
        x = 40.0
        floor = row * pitch + 30 + high
        n = sum(len(r.committed) for r in rounds)
        mean = float(np.mean([r.entropy for r in rounds])) if rounds else float("nan")
        said = f"{name}: {n} tokens in {len(rounds)} rounds, tau {n / max(1, len(rounds)):.2f}, mean entropy {mean:.2f} nats"
        lines.append(said)
        parts.append(f'<text x="40" y="{row * pitch + 16}">{escape(said, False)}</text>')
        for value, y in ((0, floor), (tallest, floor - high)):
            parts.append(f'<text class="t" x="34" y="{y + 4}" text-anchor="end">{value:.1f}</text>')
        for r in rounds:
            tall = max(2.0, high * r.entropy / tallest)
            wide = unit * len(r.committed)
            kind = "bar flat" if r.entropy < 0.1 else "bar"
            parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{floor - tall:.1f}" width="{max(1.0, wide - 1.5):.1f}" '
                f'height="{tall:.1f}"><title>{round_fact(r)}</title></rect>'
            )
            x += wide
        parts.append(f'<path class="line" d="M40 {floor + 0.5}H{40 + 880}"/>')
    drawing = svg(924, max(1, len(answers)) * pitch, "rhythm", "entropy and length of each round", "".join(parts))
    body = drawing + note("A bar per round: width, tokens committed; height, entropy in nats; green, below 0.1 nats.")
    return make_view(body, "\n".join(lines) or "no answers", _RHYTHM)


def beside(*items: Any, titles: Sequence[str] = ()) -> View:
    """Put views, image files, tables or texts beside each other, or below each other where the page is narrow."""
    cells = []
    lines = []
    for i, item in enumerate(items):
        title = titles[i] if i < len(titles) else ""
        name = f"<b>{escape(title, False)}</b>" if title else ""
        cells.append(f"<div>{name}{_html(item)}</div>")
        lines.append(f"{title}\n{item}" if title else str(item))
    return make_view(f'<div class="two">{"".join(cells)}</div>', "\n\n".join(lines), _BESIDE)


def _html(item: Any) -> str:
    if hasattr(item, "_repr_html_"):
        return item._repr_html_()
    if isinstance(item, Path):
        return f'<div><img alt="{escape(item.stem)}" src="{data_url(item)}"/></div>'
    text = visible(str(item), keep=" \n")
    return f'<p class="text">{escape(text, False)}</p>'


def _after(scene: Scene, node: int) -> str:
    """Name a node and the path that it continues."""
    path = scene.tree.path(node)[:-1]
    before = "".join(scene.spell(int(scene.tree.tokens[i])) for i in path)
    return f"“{scene.label(node)}” after " + (f"“{visible(before, 40)}”" if path else "the root")
