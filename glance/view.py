"""Views of a round for notebooks: HTML with inline SVG and CSS, no script, nothing loaded, the same bytes every time.

Every view has `_repr_html_` for Jupyter and, as its text, an indented tree or a list of rounds. `words` is None (ids are
shown), a callable `token id -> str`, or a tokenizer. A round is anything with the fields of `glance.decode.Round`.

The id of a view is a hash of its content, and all its CSS hangs below that id: views on one page do not meet, except
that two equal `decode` views share their radio buttons. Text and lines take the page's own colour, so that light and
dark pages both work. What is wider than the page scrolls in its own box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from typing import Any

import numpy as np

from glance.tree import ROOT
from glance.view_tree import BONUS, Scene, mask_svg, place, scene_of, speller, svg, tree_figure, tree_svg, visible

__all__ = ["View", "decode", "marginals", "mask", "round", "stream", "tree", "tree_figure", "tree_text"]

_ID = "\ue000"  # stands for the view's id until that is known; no token can bring it: `visible` spells it out
# Each rule is written without the view's id, which `_view` puts before it; rules end at "}".
_BASE = """
{font:1em/1.5 system-ui,sans-serif;max-width:100%;margin:.3em 0}
 .box{overflow-x:auto;max-width:100%;min-width:0;padding-bottom:2px}
 .side{display:flex;flex-wrap:wrap;gap:.6em 2em;align-items:flex-start} .side>div{min-width:0;max-width:100%}
 .note{font-size:.86em;opacity:.8;margin:.3em 0;overflow-wrap:anywhere}
 .key{display:inline-block;width:1.3em;height:.8em;margin-right:.4em;border:1px solid #0173B2;border-radius:3px}
 .w{display:inline-block;margin-right:1em} .key.a{border:2px solid #029E73} .key.b{border:2px dashed #DE8F05}
 svg{display:block;max-width:none;fill:currentColor;font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}
 svg text{unicode-bidi:plaintext;pointer-events:none} .bands{fill-opacity:.045}
"""
_TREE = """
 .tree text{text-anchor:middle} .tree g{outline:none} .h{font:10px system-ui,sans-serif;opacity:.7}
 .tree rect{height:20px;rx:4px;fill:#0173B2;fill-opacity:calc(.03 + .5*var(--p));
  stroke:#0173B2;stroke-opacity:calc(.3 + .7*var(--p))}
 .tree g>path{fill:none;stroke:#8a8a8a;pointer-events:none}
 .tree .r>rect{fill:currentColor;fill-opacity:.08;stroke:currentColor;stroke-opacity:.6}
 .tree .a>rect{fill:#029E73;stroke:#029E73;stroke-width:2.5;stroke-opacity:1}
 .tree .a>path{stroke:#029E73;stroke-width:2.5}
 .tree .b>rect{fill:#DE8F05;fill-opacity:.08;stroke:#DE8F05;stroke-width:2;stroke-dasharray:4 3;stroke-opacity:1}
 .tree .b>path{stroke:#DE8F05;stroke-width:2;stroke-dasharray:4 3}
"""
_LIT = """
 .r:hover g:not(:hover)>:not(g){opacity:.3}
 .r:has(:focus-visible) g:not(:focus-visible,:has(:focus-visible),:hover)>:not(g){opacity:.3}
 .tree g:is(:hover,:focus-visible,:has(:focus-visible))>:is(rect,path){stroke:currentColor;stroke-width:2.5;stroke-opacity:1}
"""
_HEAT = """
 .tree rect{height:34px;stroke-width:1.5;stroke-opacity:1} .tree .o>rect{stroke:none} .tree g:hover>rect{stroke-width:4}
 .tree .b>rect{fill:#0173B2;fill-opacity:calc(.03 + .5*var(--p))}
"""
_MASK = """
 .mask text{text-anchor:end} .mask .t{transform:rotate(-90deg)} .mask .t text{text-anchor:start} .before{fill-opacity:.16}
 .m>rect{fill-opacity:0;height:var(--h)} .m>path{stroke:#0173B2;stroke-width:var(--w);stroke-dasharray:var(--w) 1px}
 .m.a>path{stroke:#029E73} .m:hover>rect{fill-opacity:.2} .m:hover>text{font-weight:bold}
"""
_STREAM = """
 .s{position:relative;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.8;padding-bottom:1.9em;max-width:56em}
 .c{background:rgb(2 158 115/calc(.05 + .4*var(--a)));border-left:2px solid;padding:.1em 0;border-radius:0 3px 3px 0}
 .c.first{background:rgb(128 128 128/.2)} .c i{opacity:.5;font-style:normal} .c.later{opacity:.4}
 .c u{text-decoration:underline dashed #DE8F05 2px;text-underline-offset:4px}
 .c.now,.s .c:is(:hover,:focus){outline:2px solid #DE8F05;outline-offset:1px}
 .c:is(:hover,:focus)::after{content:attr(data-t);position:absolute;left:0;right:0;bottom:0;font-size:.86em;line-height:1.5;
  text-decoration:none}
"""
_STEP = """
 .d{display:flex;flex-wrap:wrap;align-items:flex-end;gap:3px}
 .d>input{appearance:none;-webkit-appearance:none;order:-1;margin:0;width:14px;cursor:pointer;
  height:calc(8px + 34px*var(--a));border:1px solid #029E73;border-radius:3px 3px 0 0;background:rgb(2 158 115/.35)}
 .d>input:checked{background:#DE8F05;border-color:#DE8F05} .d>input:focus-visible{outline:2px solid;outline-offset:2px}
 .d>div{flex:0 0 100%;min-width:0} .d>.p{order:1;display:none} .d>input:checked+.p{display:block} .d label{cursor:pointer}
 .go{padding:.1em .7em;border:1px solid;border-radius:4px;margin-right:.5em;user-select:none} .go.off{opacity:.3}
"""
_KEY = (
    '<p class="note"><span class="w"><span class="key"></span>{}</span><span class="w"><span class="key a"></span>'
    'accepted</span><span class="w"><span class="key b"></span>bonus{}</span></p>'
)
_LEGEND = _KEY.format("drafted, stronger: more probable path", ", the target's own token")
_KEYS = 'data-lm-suppress-shortcuts="true"'  # else JupyterLab takes the arrow keys; it asks the focused element itself
_HINT = "Point at a node, or tab to it: what lights up is what it attends to."


@dataclass(frozen=True, repr=False)
class View:
    """A picture for a notebook: `html` is what Jupyter shows, `text` what a terminal does."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def tree(subject: Any, words: Any = None, *, cap: int = 127, **walk: Any) -> View:
    """Show a candidate tree, or a round's tree with the accepted path and the bonus.

    Args:
        subject: a round, a tree, or a sequence of nodes.
        words: None, a callable `token id -> str`, or a tokenizer.
        cap: the most nodes to draw; the caption says how many there are.
        walk: for a bare tree, any of `root`, `path`, `bonus` and `choices` as a round has them.
    """
    scene = scene_of(subject, words, cap=cap, **walk)
    return _view(f"{_tree_box(scene)}{_note(f'{_count(scene)}. {_HINT}')}", _text(scene), _TREE + _LIT)


def mask(subject: Any, words: Any = None, *, cap: int = 127) -> View:
    """Show the ancestor mask of a tree's verify pass: one row per node, the columns that it may attend to."""
    scene = scene_of(subject, words, cap=cap)
    said = f"{_count(scene)}. A row per node, in the order of the verify pass; filled is what it attends to."
    return _view(f'<div class="box">{mask_svg(scene)}</div>{_note(said)}', _text(scene), _MASK)


def marginals(round: Any, words: Any = None, *, k: int = 8) -> View:
    """Show the draft's marginals: per offset the `k` most probable tokens, out of one pass and before there is a tree.

    Framed is what the tree uses, green what was accepted, dashed the bonus where the draft had it among its `k`.
    """
    scene, ids, logps = scene_of(round, words), np.asarray(round.top_ids)[:, :k], np.asarray(round.top_logprobs)[:, :k]
    kinds = {(n.depth, n.token): "u" for n in scene.tree}
    kinds |= {(n.depth, n.token): "a" for n in map(scene.tree.__getitem__, scene.path)}
    kinds |= {(scene.depth(BONUS), scene.bonus): "b"}
    wide, high, parts, lines = 86, 38, [], []
    for d, (tokens, row) in enumerate(zip(ids.tolist(), np.exp(logps).tolist(), strict=True), start=1):
        x = 46 + (d - 1) * wide
        middle = x + wide // 2 - 2
        parts.append(f'<text class="h" x="{middle}" y="14">offset {d}</text>')
        said = (f"{visible(scene.spell(token), 12)} {p:.2g}" for token, p in zip(tokens, row, strict=True))
        lines.append(f"offset {d}: {'  '.join(said)}")
        for r, (token, p) in enumerate(zip(tokens, row, strict=True)):
            y, word = 24 + r * high, scene.spell(token)
            said = escape(f"{visible(word, 40)}\noffset {d}, rank {r}\np {p:.3g}", False)
            parts.append(
                f'<g class="{kinds.get((d, token), "o")}" style="--p:{p**0.5:.2f}"><title>{said}</title>'
                f'<rect x="{x}" y="{y}" width="{wide - 4}"/><text x="{middle}" y="{y + 15}">'
                f'{escape(visible(word, 10), False)}</text><text class="h" x="{middle}" y="{y + 28}">{p:.2g}</text></g>'
            )
    parts += [f'<text class="h" x="20" y="{45 + r * high}">rank {r}</text>' for r in range(ids.shape[1])]
    size, label = (46 + len(ids) * wide, 24 + ids.shape[1] * high), f"marginals of {len(ids)} offsets"
    drawing = svg(*size, "tree", label, "".join(parts))
    legend = _KEY.format("in the tree; stronger: more probable at its offset", "")
    return _view(f'<div class="box">{drawing}</div>{legend}', "\n".join(lines), _TREE + _HEAT)


def stream(rounds: Sequence[Any], words: Any = None) -> View:
    """Show the committed text with a seam per round: greener is more accepted, underlined is the target's own token."""
    return _view(_stream(rounds, words), _rounds_text(rounds, words), _STREAM)


def round(round: Any, rounds: Sequence[Any] = (), words: Any = None, *, cap: int = 127) -> View:
    """Show one round: its tree, its mask, and, given all `rounds`, its place in the stream."""
    scene = scene_of(round, words, cap=cap)
    body = _panel(round, scene) + (_stream(rounds, words, now=round.index) if rounds else "")
    css = _TREE + _LIT + _MASK + _STREAM
    return _view(f'<div class="p">{body}</div>', f"{_fact(round)}\n{_text(scene)}", css, links=scene.shown)


def decode(rounds: Sequence[Any], words: Any = None, *, prompt: str | None = None, cap: int = 127) -> View:
    """Show a whole answer, to be stepped through: arrow keys on the bars; a click on a bar, on the text, or on next.

    Args:
        rounds: all rounds of one answer, in order.
        words: None, a callable `token id -> str`, or a tokenizer.
        prompt: the prompt's text, shown above.
        cap: the most nodes to draw per tree.
    """
    scenes = [scene_of(r, words, cap=cap) for r in rounds]
    longest, last, steps, lit = max([1, *(r.accepted for r in rounds)]), len(rounds) - 1, [], ""
    for i, (r, scene) in enumerate(zip(rounds, scenes, strict=True)):
        off = (" off" * (i == 0), " off" * (i == last))
        go = f'<label class="go{off[0]}" for="{_ID}-{max(i - 1, 0)}">‹ back</label>'
        go += f'<label class="go{off[1]}" for="{_ID}-{min(i + 1, last)}">next ›</label>'
        checked, said = "" if i else ' checked="checked"', _fact(r)
        steps.append(
            f'<input type="radio" name="{_ID}" id="{_ID}-{i}"{checked} {_KEYS} aria-label="{said}" title="{said}" '
            f'style="--a:{r.accepted / longest:.2f}"/><div class="p">{go}{_panel(r, scene)}</div>'
        )
        chunk = f" #{_ID}-{i}:checked~div .c:nth-child"
        lit += f"{chunk}({i + 2}){{outline:2px solid #DE8F05;outline-offset:1px}}{chunk}(n+{i + 3}){{opacity:.4}}\n"
    n_tokens = sum(len(r.committed) for r in rounds)
    total = f"{n_tokens} tokens in {len(rounds)} rounds, tau {n_tokens / max(1, len(rounds)):.2f}"
    head = _note(visible(prompt, keep=" \n")) if prompt else ""
    text = f"<div>{_stream(rounds, words, labels=True)}</div>"
    body = f'{head}<div class="d">{"".join(steps)}{text}</div>'
    body += _note(f"{total}. A bar per round, as high as the number of accepted tokens. {_HINT}")
    css, nodes = _TREE + _LIT + _MASK + _STREAM + _STEP + lit, sorted({i for scene in scenes for i in scene.shown})
    return _view(body, f"{total}\n{_rounds_text(rounds, words)}", css, links=nodes)


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
    kids, lines = place(scene).kids, [_count(scene), scene.label(ROOT, 40)]

    def write(node: int) -> None:
        for kid in kids.get(node, ()):
            mark = "+" if kid == BONUS else "*" if kid in scene.path else " "
            p = f"  {scene.probability(kid):.2g}" if kid != BONUS else ""
            lines.append(f"{mark}{' ' * (2 * scene.depth(kid) - 1)}{scene.label(kid, 40)}{p}")
            write(kid)

    write(ROOT)
    return "\n".join(lines)


def _count(scene: Scene) -> str:
    n, shown, n_offsets = len(scene.tree), len(scene.shown), max([0, *scene.tree.depths.tolist()])
    return f"{n} nodes, {n_offsets} offsets" + (f", {shown} of the nodes shown" if shown < n else "")


def _fact(r: Any) -> str:
    cut = ", cut at a stop token or at the limit" if r.truncated else ""
    return f"round {r.index + 1}: accepted {r.accepted} of {len(r.tree)} nodes, entropy {r.entropy:.2f} nats{cut}"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text, False)}</p>'


def _tree_box(scene: Scene) -> str:
    return f'<div class="box">{tree_svg(scene)}</div>{_LEGEND if scene.path or scene.bonus is not None else ""}'


def _panel(r: Any, scene: Scene) -> str:
    times = ", ".join(f"{name} {r.ms[name]:.1f}" for name in ("draft", "tree", "verify", "commit") if name in r.ms)
    capped = _note(_count(scene)) if len(scene.shown) < len(scene.tree) else ""
    boxes = f'<div>{_tree_box(scene)}</div><div class="box">{mask_svg(scene)}</div>'
    return f'<b>{_fact(r)}</b>{_note(f"{times} ms") if times else ""}{capped}<div class="side">{boxes}</div>'


def _pieces(tokens: list[int], words: Any) -> list[str]:
    """Spell tokens so that they join to the text: part of a character waits for the token that completes it."""
    spell = speller(words)
    if not hasattr(words, "decode"):
        return [spell(token) + " " * (words is None) for token in tokens]
    pieces, waiting = [], []
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
        return _note("no rounds")
    pieces = _pieces([int(rounds[0].root), *(int(t) for r in rounds for t in r.committed)], words)
    shown = map(_text_html, pieces)
    longest, tag = max([1, *(r.accepted for r in rounds)]), "label" if labels else "span"
    before = "the round before" if rounds[0].index else "the prefill, before any round"
    chunks = [f'<span class="c first" tabindex="0" data-t="committed by {before}">{next(shown)}</span>']
    for i, r in enumerate(rounds):
        kind = "c" if now is None or r.index < now else "c now" if r.index == now else "c later"
        target = f' for="{_ID}-{i}"' if labels else ' tabindex="0"'
        text = "".join(next(shown) if j < r.accepted else f"<u>{next(shown)}</u>" for j in range(len(r.committed)))
        chunks.append(
            f'<{tag} class="{kind}"{target} style="--a:{r.accepted / longest:.2f}" data-t="{_fact(r)}">{text}</{tag}>'
        )
    return f'<div class="s" dir="auto">{"".join(chunks)}</div>'


def _text_html(text: str) -> str:
    safe = (
        visible(text, keep=" \n\t\u200c\u200d") if text else ""
    )  # "" is a part of a character, shown with its last part
    return escape(safe, False).replace("\n", "<i>⏎</i>\n")


def _rounds_text(rounds: Sequence[Any], words: Any) -> str:
    said = [f"{_fact(r)}: {visible(''.join(_pieces(list(r.committed), words)))}" for r in rounds]
    return "\n".join(said) or "no rounds"


def _view(body: str, text: str, css: str, *, links: Sequence[int] = ()) -> View:
    """Put body and style together; `links` are nodes to tie to their rows of the mask, so that one lights the other."""
    rules = "".join(f"#{_ID}{rule}}}" for rule in (_BASE + css).replace("\n", "").split("}") if rule)
    if links:
        rows = ",".join(f".p:has(.k{i}>rect:hover,.k{i}:focus-visible) .m{i}>rect" for i in links)
        nodes = ",".join(f".p:has(.m{i}:hover) .n:is(.k{i},:has(.k{i}))>rect" for i in links)
        lit = "{stroke:currentColor;stroke-width:2.5;stroke-opacity:1}"
        rules += f"#{_ID}{{{rows}{{fill-opacity:.25}}{nodes}{lit}}}"
    html = f'<div id="{_ID}"><style>{rules}</style>{body}</div>'
    return View(html.replace(_ID, "g" + sha256(html.encode()).hexdigest()[:10]), text)
