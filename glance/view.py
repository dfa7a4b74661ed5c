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
from math import exp
from typing import Any

from glance.tree import ROOT
from glance.view_tree import BONUS, Scene, mask_svg, place, scene_of, speller, svg, tree_figure, tree_svg, visible

__all__ = ["View", "decode", "marginals", "mask", "round", "stream", "tree", "tree_figure", "tree_text"]

_CSS = """
 {font:1em/1.5 system-ui,sans-serif;max-width:100%;margin:.3em 0}
 .box{overflow-x:auto;max-width:100%;padding-bottom:2px}
 .side{display:flex;flex-wrap:wrap;gap:.6em 2em;align-items:flex-start}
 .side>.box{min-width:0}
 .note{font-size:.86em;opacity:.8;margin:.2em 0;overflow-wrap:anywhere}
 .key{display:inline-block;width:1.3em;height:.8em;margin:0 .35em 0 .8em;border:1px solid #0173B2;border-radius:3px;background:rgb(1 115 178/.3)}
 .key.a{border:2px solid #029E73;background:rgb(2 158 115/.3)}
 .key.b{border:2px dashed #DE8F05;background:none}
 svg{display:block;max-width:none;fill:currentColor;font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}
 svg text{unicode-bidi:plaintext;pointer-events:none}
 .tree text{text-anchor:middle}
 .h{font:10px system-ui,sans-serif;opacity:.65}
 .bands,.ground{fill-opacity:.045}
 .tree g>rect{height:20px;rx:4px;fill:#0173B2;fill-opacity:calc(.04 + .46*var(--p));stroke:#0173B2;stroke-opacity:calc(.2 + .8*var(--p))}
 .tree g>path{fill:none;stroke:currentColor;stroke-opacity:.3;pointer-events:none}
 .tree .r>rect{fill:currentColor;fill-opacity:.06;stroke:currentColor;stroke-opacity:.6}
 .tree .a>rect{fill:#029E73;stroke:#029E73;stroke-width:2.5;stroke-opacity:1}
 .tree .a>path{stroke:#029E73;stroke-width:2.5;stroke-opacity:1}
 .tree .b>rect{fill:#DE8F05;fill-opacity:.08;stroke:#DE8F05;stroke-width:2;stroke-dasharray:4 3;stroke-opacity:1}
 .tree .b>path{stroke:#DE8F05;stroke-width:2;stroke-dasharray:4 3;stroke-opacity:1}
 .tree g{outline:none}
 .r:is(:hover,:focus-within) g:not(:hover,:focus-within)>:is(rect,text,path){opacity:.3}
 .tree g:is(:hover,:focus-within)>rect{stroke:currentColor;stroke-width:2.5;stroke-opacity:1}
 .tree g:is(:hover,:focus-within)>path{stroke:currentColor;stroke-width:2.5;stroke-opacity:1}
 .mask text{text-anchor:end}
 .mask .t{transform:rotate(-90deg);text-anchor:start}
 .before{fill-opacity:.16}
 .m>rect{fill:currentColor;fill-opacity:0}
 .m>path{stroke:#0173B2;stroke-width:var(--w);stroke-opacity:.75}
 .m.a>path{stroke:#029E73;stroke-opacity:1}
 .m:hover>rect{fill-opacity:.16}
 .m:hover>text{font-weight:bold}
 .s{position:relative;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.75;padding-bottom:1.9em;max-width:60em}
 .c{background:rgb(2 158 115/calc(.05 + .4*var(--a)));border-left:2px solid;padding:.1em 0;border-radius:0 3px 3px 0}
 .c.first{background:rgb(128 128 128/.2)}
 .c u{text-decoration:underline dashed #DE8F05 2px;text-underline-offset:4px}
 .c i{opacity:.5;font-style:normal}
 .c.later{opacity:.4}
 .c.now,.c:is(:hover,:focus){outline:2px solid #DE8F05;outline-offset:1px}
 .c:is(:hover,:focus)::after{content:attr(data-t);position:absolute;left:0;right:0;bottom:0;font-size:.86em;line-height:1.5;opacity:.8}
"""
_STEP_CSS = """
 .d{display:flex;flex-wrap:wrap;align-items:flex-end;gap:3px}
 .d>input{appearance:none;-webkit-appearance:none;order:-1;margin:0;width:13px;height:calc(6px + 34px*var(--a));border:1px solid #029E73;border-radius:3px 3px 0 0;background:rgb(2 158 115/.3);cursor:pointer}
 .d>input:checked{background:#DE8F05;border-color:#DE8F05}
 .d>input:focus-visible{outline:2px solid;outline-offset:2px}
 .d>.s,.d>.p{flex:0 0 100%;min-width:0}
 .d>.p{order:1;display:none}
 .d>input:checked+.p{display:block}
 .d label{cursor:pointer}
 .go{padding:.1em .7em;border:1px solid;border-radius:4px;margin-right:.5em;user-select:none}
 .go.off{opacity:.3}
"""
_LEGEND = (
    '<p class="note"><span class="key"></span>drafted, stronger = more probable path<span class="key a"></span>accepted'
    '<span class="key b"></span>bonus, the target\'s own token</p>'
)
_HINT = "Point at a node or tab to it: what lights up is all that it may attend to."


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
    return _view(_tree_box(scene) + f'<p class="note">{_count(scene)} {_HINT}</p>', _text(scene))


def mask(subject: Any, words: Any = None, *, cap: int = 127) -> View:
    """Show the ancestor mask of a tree's verify pass: one row per node, the columns that it may attend to."""
    scene = scene_of(subject, words, cap=cap)
    return _view(f'<div class="box">{mask_svg(scene)}</div><p class="note">{_count(scene)}</p>', _text(scene))


def marginals(round: Any, words: Any = None, *, k: int = 8) -> View:
    """Show the draft's marginals: per offset the `k` most probable tokens, in one pass and before there is any tree.

    A blue frame marks what the tree uses, a green one what was accepted, a dashed one the bonus where the draft knew it.
    """
    scene, ids, logps = scene_of(round, words), round.top_ids[:, :k], round.top_logprobs[:, :k]
    used = {(n.depth, n.token): 0 for n in scene.tree} | {(scene.tree[i].depth, scene.tree[i].token): 1 for i in scene.path}
    if scene.bonus is not None:
        used[scene.depth(BONUS), scene.bonus] = 2
    wide, high, parts = 84, 34, []
    for d in range(len(ids)):
        x = 44 + d * (wide + 4)
        parts.append(f'<text class="h" x="{x + wide / 2:g}" y="14">offset {d + 1}</text>')
        for r, (token, logp) in enumerate(zip(ids[d].tolist(), logps[d].tolist(), strict=True)):
            p, label = exp(logp), visible(scene.spell(token), 10)
            if p == 0:
                continue
            y, kind = 24 + r * (high + 4), ("u", "u a", "u b")[used[d + 1, token]] if (d + 1, token) in used else "o"
            said = f"{visible(scene.spell(token), 40)}\noffset {d + 1}, rank {r}\np {p:.3g}"
            parts.append(
                f'<g class="{kind}" style="--p:{p**0.5:.2f}"><title>{escape(said, False)}</title>'
                f'<rect x="{x}" y="{y}" width="{wide}" height="{high}"/><text x="{x + wide / 2:g}" y="{y + 15}">'
                f'{escape(label, False)}</text><text class="h" x="{x + wide / 2:g}" y="{y + 28}">{p:.2g}</text></g>'
            )
    ranks = "".join(f'<text class="h" x="20" y="{45 + r * (high + 4)}">rank {r}</text>' for r in range(ids.shape[1]))
    size = (44 + len(ids) * (wide + 4), 26 + ids.shape[1] * (high + 4))
    body = svg(*size, "tree heat", f"marginals of {len(ids)} offsets", ranks + "".join(parts))
    rows = [" ".join(f"{visible(scene.spell(t), 12)} {exp(p):.2g}" for t, p in zip(*row, strict=True)) for row in zip(ids, logps, strict=True)]
    text = "\n".join(f"offset {d + 1}: {row}" for d, row in enumerate(rows))
    return _view(f'<div class="box">{body}</div>{_LEGEND}', text, _HEAT_CSS)


_HEAT_CSS = """
 .heat g>rect{height:34px;fill-opacity:calc(.02 + .6*var(--p));stroke-width:1.5;stroke-opacity:1}
 .heat .o>rect{stroke:none}
 .heat g:hover>rect{stroke-width:3}
 .heat .b>rect{fill:#0173B2;fill-opacity:calc(.02 + .6*var(--p))}
"""


def stream(rounds: Sequence[Any], words: Any = None) -> View:
    """Show the committed text with a seam per round: greener is more accepted, underlined is the target's own token."""
    return _view(_stream(rounds, words), _rounds_text(rounds, words))


def round(round: Any, rounds: Sequence[Any] = (), words: Any = None, *, cap: int = 127) -> View:
    """Show one round: its tree, its mask, and, given all `rounds`, its place in the stream."""
    scene = scene_of(round, words, cap=cap)
    body = _panel(round, scene) + (_stream(rounds, words, now=round.index) if rounds else "")
    return _view(f'<div class="p">{body}</div>', _text(scene), _links(scene.shown))


def decode(rounds: Sequence[Any], words: Any = None, *, prompt: str | None = None, cap: int = 127) -> View:
    """Show a whole answer, to be stepped through: arrow keys on the bars, a click on a bar, on the text, or on next.

    Args:
        rounds: all rounds of one answer, in order.
        words: None, a callable `token id -> str`, or a tokenizer.
        prompt: the prompt's text, shown above.
        cap: the most nodes to draw per tree.
    """
    scenes = [scene_of(r, words, cap=cap) for r in rounds]
    longest = max([1, *(r.accepted for r in rounds)])
    steps, shown = [], sorted({i for scene in scenes for i in scene.shown})
    for i, (r, scene) in enumerate(zip(rounds, scenes, strict=True)):
        back, on = (
            f'<label class="go" for="\ue000-{j}">{name}</label>' if 0 <= j < len(rounds) else f'<span class="go off">{name}</span>'
            for j, name in ((i - 1, "‹ back"), (i + 1, "next ›"))
        )
        steps.append(
            f'<input type="radio" name="\ue000" id="\ue000-{i}" aria-label="{_fact(r)}" title="{_fact(r)}" '
            f'style="--a:{r.accepted / longest:.2f}"{" checked=" + chr(34) * 2 if not i else ""}/>'
            f'<div class="p">{back}{on}{_panel(r, scene)}</div>'
        )
    n_tokens = sum(len(r.committed) for r in rounds)
    total = f"{n_tokens} tokens in {len(rounds)} rounds, tau {n_tokens / max(1, len(rounds)):.2f}"
    head = f'<p class="note">{escape(visible(prompt, keep=chr(32) + chr(10)), False)}</p>' if prompt else ""
    lit = "".join(
        f" #\ue000-{i}:checked~.s .c:nth-of-type({i + 2}){{outline:2px solid #DE8F05;outline-offset:1px}}\n"
        f" #\ue000-{i}:checked~.s .c:nth-of-type(n+{i + 3}){{opacity:.4}}\n"
        for i in range(len(rounds))
    ).replace(" #", " .d>#")
    body = f'{head}<div class="d" data-lm-suppress-shortcuts="true">{"".join(steps)}{_stream(rounds, words, labels=True)}</div>'
    body += f'<p class="note">{total}. A bar per round, as high as the number of accepted tokens. {_HINT}</p>'
    return _view(body, f"{total}\n{_rounds_text(rounds, words)}", _STEP_CSS + lit + _links(shown))


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
    kids, lines = place(scene).kids, [_count(scene, "").rstrip("."), scene.label(ROOT, 40)]

    def write(node: int) -> None:
        for kid in kids.get(node, ()):
            mark = "+" if kid == BONUS else "*" if kid in scene.path else " "
            p = "" if kid == BONUS else f"  {scene.probability(kid)[1]:.2g}"
            lines.append(f"{mark}{' ' * (2 * scene.depth(kid) - 1)}{scene.label(kid, 40)}{p}")
            write(kid)

    write(ROOT)
    return "\n".join(lines)


def _count(scene: Scene, end: str = ".") -> str:
    n, shown = len(scene.tree), len(scene.shown)
    n_offsets = max([0, *scene.tree.depths.tolist()])
    return f"{n} nodes, {n_offsets} offsets" + (f", {shown} of the nodes shown" if shown < n else "") + end


def _fact(r: Any) -> str:
    cut = ", cut at a stop token or at the limit" if r.truncated else ""
    return f"round {r.index + 1}: accepted {r.accepted} of {len(r.tree)} nodes, entropy {r.entropy:.2f} nats{cut}"


def _tree_box(scene: Scene) -> str:
    return f'<div class="box">{tree_svg(scene)}</div>{_LEGEND}'


def _panel(r: Any, scene: Scene) -> str:
    times = ", ".join(f"{name} {r.ms[name]:.1f}" for name in ("draft", "tree", "verify", "commit") if name in r.ms)
    fact = f"{_fact(r)}; {times} ms" if times else _fact(r)
    capped = f'<p class="note">{_count(scene)}</p>' if len(scene.shown) < len(scene.tree) else ""
    boxes = f'<div class="box">{tree_svg(scene)}</div><div class="box">{mask_svg(scene)}</div>'
    return f'<b>{fact}</b>{capped}<div class="side">{boxes}</div>{_LEGEND}'


def _pieces(tokens: list[int], words: Any) -> list[str]:
    """Spell tokens so that they join to the text: what is not yet a whole character goes to the token that ends it."""
    spell = speller(words)
    if words is None:
        return [f"{token} " for token in tokens]
    if not hasattr(words, "decode"):
        return list(map(spell, tokens))
    pieces, waiting = [], []
    for i, token in enumerate(tokens):
        waiting.append(token)
        text = words.decode(waiting) if len(waiting) > 1 else spell(token)
        whole = "\ufffd" not in words.decode(waiting) or len(waiting) == 4 or i + 1 == len(tokens)
        pieces.append(text if whole else "")
        waiting = [] if whole else waiting
    return pieces


def _stream(rounds: Sequence[Any], words: Any, *, now: int | None = None, labels: bool = False) -> str:
    if not rounds:
        return '<p class="note">no rounds</p>'
    pieces = iter(_pieces([rounds[0].root, *(t for r in rounds for t in r.committed)], words))
    spell = lambda: escape(visible(next(pieces) or "\u200d", keep=" \n\t\u200c\u200d"), False).replace("\n", "<i>⏎</i>\n")  # noqa: E731
    longest = max([1, *(r.accepted for r in rounds)])
    tag = "label" if labels else "span"
    start = "round" if rounds[0].index else "prefill"
    chunks = [f'<{tag} class="c first" tabindex="0" data-t="committed before: by the {start}">{spell()}</{tag}>']
    for i, r in enumerate(rounds):
        kind = "c" if now is None or r.index < now else "c now" if r.index == now else "c later"
        target = f' for="\ue000-{i}"' if labels else ' tabindex="0"'
        text = "".join(spell() if j < r.accepted else f"<u>{spell()}</u>" for j in range(len(r.committed)))
        chunks.append(
            f'<{tag} class="{kind}"{target} style="--a:{r.accepted / longest:.2f}" data-t="{escape(_fact(r))}">{text}</{tag}>'
        )
    return f'<div class="s" dir="auto">{"".join(chunks)}</div>'


def _rounds_text(rounds: Sequence[Any], words: Any) -> str:
    return "\n".join(f"{_fact(r)}: {visible(''.join(_pieces(list(r.committed), words)))}" for r in rounds) or "no rounds"


def _links(nodes: list[int]) -> str:
    """Tie a node to its row of the mask: pointing at one lights the other."""
    rules = [" .p:has(.r:is(:hover,:focus-within)) .mr>rect{fill-opacity:.08}"]
    for i in nodes:
        rules.append(f" .p:has(.k{i}>rect:hover,.k{i}:focus) .m{i}>rect{{fill-opacity:.25}}")
        rules.append(f" .p:has(.m{i}:hover) .n:is(.k{i},:has(.k{i}))>rect{{stroke:currentColor;stroke-width:2.5;stroke-opacity:1}}")
    return "\n".join(rules[1:]) + "\n"


def _view(body: str, text: str, css: str = "") -> View:
    rules = "".join("#\ue000" + line + "\n" for line in (_CSS + css).splitlines() if line)
    html = f'<div id="\ue000"><style>\n{rules}</style>{body}</div>'
    return View(html.replace("\ue000", "g" + sha256(html.encode()).hexdigest()[:10]), text)
