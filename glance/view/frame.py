"""What every view is made of: the `View` itself, the styles, and the few lines of text that several views say.

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

from glance.view.drawing import Scene

ID = "\ue000"  # stands for the view's id until that is known; no token can bring it: `visible` spells it out
# Each rule is written without the view's id, which `make_view` puts before it; rules end at "}".
BASE = """
{font:1em/1.5 system-ui,sans-serif;max-width:100%;margin:.3em 0}
 .box{overflow-x:auto;max-width:100%;min-width:0;padding-bottom:2px}
 .side{display:flex;flex-wrap:wrap;gap:.6em 2em;align-items:flex-start} .side>div{min-width:0;max-width:100%}
 .note{font-size:.86em;opacity:.8;margin:.3em 0;overflow-wrap:anywhere}
 .key{display:inline-block;width:1.3em;height:.8em;margin-right:.4em;border:1px solid #0173B2;border-radius:3px}
 .w{display:inline-block;margin-right:1em} .key.a{border:2px solid #029E73} .key.b{border:2px dashed #DE8F05}
 svg{display:block;max-width:none;fill:currentColor;font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}
 svg text{unicode-bidi:plaintext;pointer-events:none} .bands{fill-opacity:.045}
"""
TREE = """
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
LIT = """
 .r:hover g:not(:hover)>:not(g){opacity:.3}
 .r:has(:focus-visible) g:not(:focus-visible,:has(:focus-visible),:hover)>:not(g){opacity:.3}
 .tree g:is(:hover,:focus-visible,:has(:focus-visible))>:is(rect,path){stroke:currentColor;stroke-width:2.5;stroke-opacity:1}
"""
HEAT = """
 .tree rect{height:34px;stroke-width:1.5;stroke-opacity:1} .tree .o>rect{stroke:none} .tree g:hover>rect{stroke-width:4}
 .tree .b>rect{fill:#0173B2;fill-opacity:calc(.03 + .5*var(--p))}
"""
MASK = """
 .mask text{text-anchor:end} .mask .t{transform:rotate(-90deg)} .mask .t text{text-anchor:start} .before{fill-opacity:.16}
 .m>rect{fill-opacity:0;height:var(--h)} .m>path{stroke:#0173B2;stroke-width:var(--w);stroke-dasharray:var(--w) 1px}
 .m.a>path{stroke:#029E73} .m:hover>rect{fill-opacity:.2} .m:hover>text{font-weight:bold}
"""
STREAM = """
 .s{position:relative;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.8;padding-bottom:1.9em;max-width:56em}
 .c{background:rgb(2 158 115/calc(.05 + .4*var(--a)));border-left:2px solid;padding:.1em 0;border-radius:0 3px 3px 0}
 .c.first{background:rgb(128 128 128/.2)} .c i{opacity:.5;font-style:normal} .c.later{opacity:.4}
 .c u{text-decoration:underline dashed #DE8F05 2px;text-underline-offset:4px}
 .c.now,.s .c:is(:hover,:focus){outline:2px solid #DE8F05;outline-offset:1px}
 .c:is(:hover,:focus)::after{content:attr(data-t);position:absolute;left:0;right:0;bottom:0;font-size:.86em;line-height:1.5;
  text-decoration:none}
"""
STEP = """
 .d{display:flex;flex-wrap:wrap;align-items:flex-end;gap:3px}
 .d>input{appearance:none;-webkit-appearance:none;order:-1;margin:0;width:14px;cursor:pointer;
  height:calc(8px + 34px*var(--a));border:1px solid #029E73;border-radius:3px 3px 0 0;background:rgb(2 158 115/.35)}
 .d>input:checked{background:#DE8F05;border-color:#DE8F05} .d>input:focus-visible{outline:2px solid;outline-offset:2px}
 .d>div{flex:0 0 100%;min-width:0} .d>.p{order:1;display:none} .d>input:checked+.p{display:block} .d label{cursor:pointer}
 .go{padding:.1em .7em;border:1px solid;border-radius:4px;margin-right:.5em;user-select:none} .go.off{opacity:.3}
"""
KEY = (
    '<p class="note"><span class="w"><span class="key"></span>{}</span><span class="w"><span class="key a"></span>'
    'accepted</span><span class="w"><span class="key b"></span>bonus{}</span></p>'
)
LEGEND = KEY.format("drafted, stronger: more probable path", ", the target's own token")
KEYS = 'data-lm-suppress-shortcuts="true"'  # else JupyterLab takes the arrow keys; it asks the focused element itself
HINT = "Point at a node, or tab to it: what lights up is what it attends to."


@dataclass(frozen=True, repr=False)
class View:
    """A picture for a notebook: `html` is what Jupyter shows, `text` what a terminal does."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def count_nodes(scene: Scene) -> str:
    """Say how many nodes and offsets a tree has, and how many of them are shown."""
    n = len(scene.tree)
    shown = len(scene.shown)
    n_offsets = max([0, *scene.tree.depths.tolist()])
    return f"{n} nodes, {n_offsets} offsets" + (f", {shown} of the nodes shown" if shown < n else "")


def round_fact(r: Any) -> str:
    """Sum up a round in a line."""
    cut = ", cut at a stop token or at the limit" if r.truncated else ""
    return f"round {r.index + 1}: accepted {r.accepted} of {len(r.tree)} nodes, entropy {r.entropy:.2f} nats{cut}"


def note(text: str) -> str:
    """Put a line of text under a picture."""
    return f'<p class="note">{escape(text, False)}</p>'


def make_view(body: str, text: str, css: str, *, links: Sequence[int] = ()) -> View:
    """Put body and style together; `links` are nodes to tie to their rows of the mask, so that one lights the other."""
    rules = "".join(f"#{ID}{rule}}}" for rule in (BASE + css).replace("\n", "").split("}") if rule)
    if links:
        rows = ",".join(f".p:has(.k{i}>rect:hover,.k{i}:focus-visible) .m{i}>rect" for i in links)
        nodes = ",".join(f".p:has(.m{i}:hover) .n:is(.k{i},:has(.k{i}))>rect" for i in links)
        lit = "{stroke:currentColor;stroke-width:2.5;stroke-opacity:1}"
        rules += f"#{ID}{{{rows}{{fill-opacity:.25}}{nodes}{lit}}}"
    html = f'<div id="{ID}"><style>{rules}</style>{body}</div>'
    return View(html.replace(ID, "g" + sha256(html.encode()).hexdigest()[:10]), text)
