"""Views of a round for notebooks: HTML with inline SVG and CSS, no script, nothing loaded, the same bytes every time.

Every view has `_repr_html_` for Jupyter and, as its text, an indented tree or a list of rounds. `words` is None (ids are
shown), a callable `token id -> str`, or a tokenizer. A round is anything with the fields of `glance.records.Round`.

How a view keeps to itself on a page stands in `glance.view.frame`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from glance.tree import ROOT
from glance.view.drawing import BONUS, Scene, mask_svg, place, scene_of, speller, svg, tree_figure, tree_svg, visible
from glance.view.frame import (
    HEAT,
    HINT,
    ID,
    KEY,
    KEYS,
    LEGEND,
    LIT,
    MASK,
    STEP,
    STREAM,
    TREE,
    View,
    count_nodes,
    make_view,
    note,
    round_fact,
)

__all__ = ["View", "decode", "marginals", "mask", "round", "stream", "tree", "tree_figure", "tree_text"]


def tree(subject: Any, words: Any = None, *, cap: int = 127, **walk: Any) -> View:
    """Show a candidate tree, or a round's tree with the accepted path and the bonus.

    Args:
        subject: a round, a tree, or a sequence of nodes.
        words: None, a callable `token id -> str`, or a tokenizer.
        cap: the most nodes to draw; the caption says how many there are.
        walk: for a bare tree, any of `root`, `path`, `bonus` and `choices` as a round has them.
    """
    scene = scene_of(subject, words, cap=cap, **walk)
    return make_view(f"{_tree_box(scene)}{note(f'{count_nodes(scene)}. {HINT}')}", _text(scene), TREE + LIT)


def mask(subject: Any, words: Any = None, *, cap: int = 127) -> View:
    """Show the ancestor mask of a tree's verify pass: one row per node, the columns that it may attend to."""
    scene = scene_of(subject, words, cap=cap)
    said = f"{count_nodes(scene)}. A row per node, in the order of the verify pass; filled is what it attends to."
    return make_view(f'<div class="box">{mask_svg(scene)}</div>{note(said)}', _text(scene), MASK)


def marginals(round: Any, words: Any = None, *, k: int = 8) -> View:
    """Show the draft's marginals: per offset the `k` most probable tokens, out of one pass and before there is a tree.

    Framed is what the tree uses, green what was accepted, dashed the bonus where the draft had it among its `k`.
    """
    if round.offsets and not len(round.top_ids):
        raise ValueError(f"round {round.index} was read from a file, which keeps no marginals: decode it to see them")
    scene = scene_of(round, words)
    ids = np.asarray(round.top_ids)[:, :k]
    logps = np.asarray(round.top_logprobs)[:, :k]
    kinds = {(n.depth, n.token): "u" for n in scene.tree}
    kinds |= {(n.depth, n.token): "a" for n in map(scene.tree.__getitem__, scene.path)}
    kinds |= {(scene.depth(BONUS), scene.bonus): "b"}
    wide = 86
    high = 38
    parts = []
    lines = []
    for d, (tokens, row) in enumerate(zip(ids.tolist(), np.exp(logps).tolist(), strict=True), start=1):
        x = 46 + (d - 1) * wide
        middle = x + wide // 2 - 2
        parts.append(f'<text class="h" x="{middle}" y="14">offset {d}</text>')
        said = (f"{visible(scene.spell(token), 12)} {p:.2g}" for token, p in zip(tokens, row, strict=True))
        lines.append(f"offset {d}: {'  '.join(said)}")
        for r, (token, p) in enumerate(zip(tokens, row, strict=True)):
            y = 24 + r * high
            word = scene.spell(token)
            said = escape(f"{visible(word, 40)}\noffset {d}, rank {r}\np {p:.3g}", False)
            parts.append(
                f'<g class="{kinds.get((d, token), "o")}" style="--p:{p**0.5:.2f}"><title>{said}</title>'
                f'<rect x="{x}" y="{y}" width="{wide - 4}"/><text x="{middle}" y="{y + 15}">'
                f'{escape(visible(word, 10), False)}</text><text class="h" x="{middle}" y="{y + 28}">{p:.2g}</text></g>'
            )
    parts += [f'<text class="h" x="20" y="{45 + r * high}">rank {r}</text>' for r in range(ids.shape[1])]
    size = (46 + len(ids) * wide, 24 + ids.shape[1] * high)
    label = f"marginals of {len(ids)} offsets"
    drawing = svg(*size, "tree", label, "".join(parts))
    legend = KEY.format("in the tree; stronger: more probable at its offset", "")
    return make_view(f'<div class="box">{drawing}</div>{legend}', "\n".join(lines), TREE + HEAT)


def stream(rounds: Sequence[Any], words: Any = None) -> View:
    """Show the committed text with a seam per round: greener is more accepted, underlined is the target's own token."""
    return make_view(_stream(rounds, words), _rounds_text(rounds, words), STREAM)


def round(round: Any, rounds: Sequence[Any] = (), words: Any = None, *, cap: int = 127) -> View:
    """Show one round: its tree, its mask, and, given all `rounds`, its place in the stream."""
    scene = scene_of(round, words, cap=cap)
    body = _panel(round, scene) + (_stream(rounds, words, now=round.index) if rounds else "")
    css = TREE + LIT + MASK + STREAM
    return make_view(f'<div class="p">{body}</div>', f"{round_fact(round)}\n{_text(scene)}", css, links=scene.shown)


def decode(rounds: Sequence[Any], words: Any = None, *, prompt: str | None = None, cap: int = 127) -> View:
    """Show a whole answer, to be stepped through: arrow keys on the bars; a click on a bar, on the text, or on next.

    Args:
        rounds: all rounds of one answer, in order.
        words: None, a callable `token id -> str`, or a tokenizer.
        prompt: the prompt's text, shown above.
        cap: the most nodes to draw per tree.
    """
    scenes = [scene_of(r, words, cap=cap) for r in rounds]
    longest = max([1, *(r.accepted for r in rounds)])
    last = len(rounds) - 1
    steps = []
    lit = ""
    for i, (r, scene) in enumerate(zip(rounds, scenes, strict=True)):
        off = (" off" * (i == 0), " off" * (i == last))
        go = f'<label class="go{off[0]}" for="{ID}-{max(i - 1, 0)}">‹ back</label>'
        go += f'<label class="go{off[1]}" for="{ID}-{min(i + 1, last)}">next ›</label>'
        checked = "" if i else ' checked="checked"'
        said = round_fact(r)
        steps.append(
            f'<input type="radio" name="{ID}" id="{ID}-{i}"{checked} {KEYS} aria-label="{said}" title="{said}" '
            f'style="--a:{r.accepted / longest:.2f}"/><div class="p">{go}{_panel(r, scene)}</div>'
        )
        chunk = f" #{ID}-{i}:checked~div .c:nth-child"
        lit += f"{chunk}({i + 2}){{outline:2px solid #DE8F05;outline-offset:1px}}{chunk}(n+{i + 3}){{opacity:.4}}\n"
    n_tokens = sum(len(r.committed) for r in rounds)
    total = f"{n_tokens} tokens in {len(rounds)} rounds, tau {n_tokens / max(1, len(rounds)):.2f}"
    head = note(visible(prompt, keep=" \n")) if prompt else ""
    text = f"<div>{_stream(rounds, words, labels=True)}</div>"
    body = f'{head}<div class="d">{"".join(steps)}{text}</div>'
    body += note(f"{total}. A bar per round, as high as the number of accepted tokens. {HINT}")
    css = TREE + LIT + MASK + STREAM + STEP + lit
    nodes = sorted({i for scene in scenes for i in scene.shown})
    return make_view(body, f"{total}\n{_rounds_text(rounds, words)}", css, links=nodes)


def tree_text(subject: Any, words: Any = None, *, cap: int = 127) -> str:
    """Write a tree as indented text: token and path probability, `*` accepted, `+` the bonus.

    >>> from glance.tree import build_budget_tree
    >>> print(tree_text(build_budget_tree([[5, 6], [7, 8]], [[-0.1, -2.5], [-0.2, -1.0]], budget=3)))
    3 nodes, 2 offsets
    root
      5  0.9
        7  0.74
        8  0.33
    """
    return _text(scene_of(subject, words, cap=cap))


def _text(scene: Scene) -> str:
    kids = place(scene).kids
    lines = [count_nodes(scene), scene.label(ROOT, 40)]

    def write(node: int) -> None:
        for kid in kids.get(node, ()):
            mark = "+" if kid == BONUS else "*" if kid in scene.path else " "
            p = f"  {scene.probability(kid):.2g}" if kid != BONUS else ""
            lines.append(f"{mark}{' ' * (2 * scene.depth(kid) - 1)}{scene.label(kid, 40)}{p}")
            write(kid)

    write(ROOT)
    return "\n".join(lines)


def _tree_box(scene: Scene) -> str:
    return f'<div class="box">{tree_svg(scene)}</div>{LEGEND if scene.path or scene.bonus is not None else ""}'


def _panel(r: Any, scene: Scene) -> str:
    times = ", ".join(f"{name} {r.ms[name]:.1f}" for name in ("draft", "tree", "verify", "commit") if name in r.ms)
    capped = note(count_nodes(scene)) if len(scene.shown) < len(scene.tree) else ""
    boxes = f'<div>{_tree_box(scene)}</div><div class="box">{mask_svg(scene)}</div>'
    return f'<b>{round_fact(r)}</b>{note(f"{times} ms") if times else ""}{capped}<div class="side">{boxes}</div>'


def token_pieces(tokens: list[int], words: Any) -> list[str]:
    """Spell tokens so that they join to the text: part of a character waits for the token that completes it."""
    spell = speller(words)
    if not hasattr(words, "decode"):
        return [spell(token) + " " * (words is None) for token in tokens]
    pieces = []
    waiting = []
    for i, token in enumerate(tokens):
        waiting.append(token)
        text = words.decode(waiting) if len(waiting) > 1 else spell(token)
        if "\ufffd" in words.decode(waiting):  # not whole: wait, at most as long as a character is
            text = "".join(map(spell, waiting)) if len(waiting) == 4 or i + 1 == len(tokens) else ""
        pieces.append(text)
        waiting = waiting if not text else []
    return pieces


def _stream(rounds: Sequence[Any], words: Any, *, now: int | None = None, labels: bool = False) -> str:
    if not rounds:
        return note("no rounds")
    pieces = token_pieces([int(rounds[0].root), *(int(t) for r in rounds for t in r.committed)], words)
    shown = map(_text_html, pieces)
    longest = max([1, *(r.accepted for r in rounds)])
    tag = "label" if labels else "span"
    before = "the round before" if rounds[0].index else "the prefill, before any round"
    chunks = [f'<span class="c first" tabindex="0" data-t="committed by {before}">{next(shown)}</span>']
    for i, r in enumerate(rounds):
        kind = "c" if now is None or r.index < now else "c now" if r.index == now else "c later"
        target = f' for="{ID}-{i}"' if labels else ' tabindex="0"'
        text = "".join(next(shown) if j < r.accepted else f"<u>{next(shown)}</u>" for j in range(len(r.committed)))
        chunks.append(
            f'<{tag} class="{kind}"{target} style="--a:{r.accepted / longest:.2f}" data-t="{round_fact(r)}">{text}</{tag}>'
        )
    return f'<div class="s" dir="auto">{"".join(chunks)}</div>'


def _text_html(text: str) -> str:
    safe = (
        visible(text, keep=" \n\t\u200c\u200d") if text else ""
    )  # "" is a part of a character, shown with its last part
    return escape(safe, False).replace("\n", "<i>⏎</i>\n")


def _rounds_text(rounds: Sequence[Any], words: Any) -> str:
    said = [f"{round_fact(r)}: {visible(''.join(token_pieces(list(r.committed), words)))}" for r in rounds]
    return "\n".join(said) or "no rounds"
