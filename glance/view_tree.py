"""One tree on paper: how a token is spelled, where a node stands, and the SVG, mask and matplotlib drawings of that.

Conventions that decide the picture:

- Columns are offsets. The first child (lowest rank) stands on its parent's row, so the greedy spine is straight; each
  further child opens a row below, as high as its columns are free. Edges run in the gutters and never cross.
- Opacity is the cube root of the path probability: a path of 0.001 is still to be seen beside one of 0.9.
- Each node's group encloses its children's groups: what encloses a node is what it may attend to, its row of the mask.
- A tree larger than `cap` shows its first nodes (the most probable, parents always among them) and the accepted path.

Units are px at a 14 px font; the SVGs scale in em. U+E000 stands for the id of a view, which is a hash of its content.
The file knows nothing of rounds as a sequence, of models or of tokenizers beyond two of their methods.
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import exp
from typing import Any

from glance.tree import ROOT, CandidateTree, ancestor_matrix, as_tree

DRAFT, ACCEPTED, BONUS_COLOR = "#0173B2", "#029E73", "#DE8F05"
BONUS = -2  # stands for the bonus where nodes are meant; never in a tree
CELL, PITCH, BOX, GUTTER, HEAD = 7.25, 26, 20, 24, 24  # a character's width, a row, a box's height, between columns, title row
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level vocabularies write as themselves
_HIDDEN = [b for b in range(256) if b not in _PLAIN]
_BYTES = {chr(b): b for b in _PLAIN} | {chr(256 + i): b for i, b in enumerate(_HIDDEN)}


def speller(words: Any) -> Callable[[int], str]:
    """Turn `words` (None, a callable `id -> str`, or a tokenizer) into a function from token id to text.

    A tokenizer's token that is a part of a UTF-8 character comes as its bytes, `\\xe2\\x80`, not as a replacement mark.
    """
    if words is None:
        return str
    if not hasattr(words, "decode"):
        return words
    pieces = getattr(getattr(words, "tokenizer", words), "convert_ids_to_tokens", None)

    def spell(token: int) -> str:
        text = words.decode([token])
        piece = (pieces([token])[0] if pieces else None) or ""
        if "\ufffd" in text and piece:
            known = all(c in _BYTES for c in piece)
            return "".join(chr(b) if 32 < b < 127 else f"\\x{b:02x}" for b in map(_BYTES.get, piece)) if known else piece
        return " " + text if piece.startswith("▁") and not text.startswith(" ") else text

    return spell


def visible(text: str, cells: int = 10**9, keep: str = "") -> str:
    """Spell a text so that nothing in it is invisible or moves other text, cut to a width of `cells` columns.

    >>> visible(" a\\n"), visible(""), visible("speculative", 8)
    ('␣a⏎', '∅', 'specula…')
    """
    signs = {" ": "␣", "\n": "⏎", "\t": "⇥"}
    shown, width = [], 0
    for c in text or "∅":
        if c in keep:
            sign = c
        elif c in signs or unicodedata.category(c)[0] not in "CZ":
            sign = signs.get(c, c)
        else:
            sign = c.encode("unicode_escape").decode()
        if not shown and unicodedata.combining(c):
            sign = "◌" + sign
        wide = sum(0 if unicodedata.combining(s) else 1 + (unicodedata.east_asian_width(s) in "WF") for s in sign)
        if width + wide > cells - (len(shown) + 1 < len(text)):
            return "".join(shown) + "…"
        shown.append(sign)
        width += wide
    return "".join(shown)


def cells_of(label: str) -> int:
    """Count the columns that a label takes in a monospaced font."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in label)


@dataclass(frozen=True, eq=False)
class Scene:
    """What one picture shows: a tree and, where a round was walked, its root, path, bonus and the target's choices."""

    tree: CandidateTree
    spell: Callable[[int], str]
    root: int | None = None
    path: tuple[int, ...] = ()
    bonus: int | None = None
    choices: tuple[int, ...] = ()  # (N+1,) the target's own choice after the root, then after each node; () = unknown
    cap: int = 127

    @cached_property
    def shown(self) -> list[int]:
        """List the nodes to draw, in their own order: the first `cap`, the accepted path always among them."""
        room = max(self.cap - len(self.path), 0)
        rest = [i for i in range(len(self.tree)) if i not in self.path][:room]
        return sorted({*rest, *self.path})

    @cached_property
    def leaf(self) -> int:
        return self.path[-1] if self.path else ROOT

    def label(self, node: int, cells: int = 12) -> str:
        """Spell a node, the root (-1) or the bonus (-2)."""
        token = {ROOT: self.root, BONUS: self.bonus}[node] if node < 0 else int(self.tree.tokens[node])
        return "root" if token is None else visible(self.spell(token), cells)

    def depth(self, node: int) -> int:
        """Name a node's column: its offset; 0 for the root."""
        return {ROOT: 0, BONUS: self.depth(self.leaf) + 1 if node == BONUS else 0}.get(node) if node < 0 else int(self.tree.depths[node])

    def probability(self, node: int) -> tuple[float, float]:
        """Give a node's probability under the draft, given its parent and as a path from the root."""
        logps, parent = self.tree.logps, self.tree.parents[node]
        return exp(logps[node] - (logps[parent] if parent != ROOT else 0.0)), exp(logps[node])

    def title(self, node: int) -> str:
        """Say everything about a node, a line each: token, place, probabilities, what the target would have said."""
        if node == ROOT:
            return f"{self.label(ROOT, 40)}\nthe last committed token" + self._next(0)
        if node == BONUS:
            return f"{self.label(BONUS, 40)}\nthe bonus: the target's own token at offset {self.depth(BONUS)}"
        n = self.tree[node]
        p, path = self.probability(node)
        lines = f"{self.label(node, 40)}\noffset {n.depth}, rank {n.rank}, node {node}\np {p:.2g}, path {path:.2g}"
        if self.choices:
            here = self.choices[n.parent + 1]
            lines += "\nthe target's choice" if here == n.token else f"\ntarget here: {visible(self.spell(here), 24)}"
        return lines + self._next(node + 1)

    def _next(self, row: int) -> str:
        return f"\ntarget next: {visible(self.spell(self.choices[row]), 24)}" if self.choices else ""


def scene_of(subject: Any, words: Any = None, *, cap: int = 127, **extra: Any) -> Scene:
    """Make the scene of a round, a tree, or any sequence of nodes."""
    if not hasattr(subject, "tree"):
        return Scene(as_tree(subject), speller(words), cap=cap, **extra)
    path, choices = tuple(int(i) for i in subject.path), tuple(int(i) for i in subject.choices)
    known = {"root": int(subject.root), "path": path, "choices": choices}
    known["bonus"] = None if subject.bonus is None else int(subject.bonus)
    return Scene(as_tree(subject.tree), speller(words), cap=cap, **(known | extra))


@dataclass(frozen=True)
class Places:
    """Where everything stands: `rows` per node, `kids` in drawing order, and per column its left edge and box width."""

    rows: dict[int, int]
    kids: dict[int, list[int]]
    lefts: list[float]
    widths: list[float]

    @property
    def size(self) -> tuple[float, float]:
        return self.lefts[-1] + self.widths[-1] + 2, HEAD + PITCH * (max(self.rows.values()) + 1)


def place(scene: Scene) -> Places:
    """Stand every shown node, the root and the bonus in columns and rows."""
    kids: dict[int, list[int]] = defaultdict(list)
    for i in sorted(scene.shown, key=lambda i: (int(scene.tree.ranks[i]), i)):
        kids[int(scene.tree.parents[i])].append(i)
    if scene.bonus is not None:
        kids[scene.leaf].append(BONUS)
    rows: dict[int, int] = {}
    taken: dict[int, int] = defaultdict(lambda: -1)  # per column, its lowest taken row

    def put(node: int, floor: int) -> None:
        chain = [node]
        while kids.get(chain[-1]):
            chain.append(kids[chain[-1]][0])
        row = max(floor, *(taken[scene.depth(node) + j] + 1 for j in range(len(chain))))
        for j, link in enumerate(chain):
            rows[link] = taken[scene.depth(node) + j] = row
        for link in reversed(chain):  # deepest first: what is placed later never lies between a parent and its child
            for sibling in kids.get(link, [])[1:]:
                put(sibling, row + 1)

    put(ROOT, 0)
    widths = [38.0] * (max(map(scene.depth, rows)) + 1)
    for node in rows:
        column = scene.depth(node)
        widths[column] = max(widths[column], cells_of(scene.label(node)) * CELL + 12)
    lefts = [2.0]
    for width in widths[:-1]:
        lefts.append(lefts[-1] + width + GUTTER)
    return Places(rows, dict(kids), lefts, widths)


def heading(column: int) -> str:
    return f"offset {column}" if column else "root"


def svg(width: float, height: float, kind: str, label: str, body: str) -> str:
    """Wrap a drawing; it scales with the font around it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width / 14:.4g}em" height="{height / 14:.4g}em" role="group" aria-label="{escape(label)}">{body}</svg>'
    )


def tree_svg(scene: Scene) -> str:
    """Draw the tree: a group per node, each inside its parent's."""
    at = place(scene)
    width, height = at.size
    accepted = set(scene.path)

    def draw(node: int) -> str:
        column, y = scene.depth(node), HEAD + PITCH * at.rows[node] + 12
        x, wide = at.lefts[column], at.widths[column]
        kind = "r" if node == ROOT else "b" if node == BONUS else f"n k{node}" + " a" * (node in accepted)
        edge = ""
        if node != ROOT:
            parent = scene.leaf if node == BONUS else int(scene.tree.parents[node])
            drop = PITCH * (at.rows[node] - at.rows[parent])
            down = f"h6q6 0 6 6v{drop - 12}q0 6 6 6h6" if drop else f"h{GUTTER}"
            edge = f'<path d="M{x - GUTTER:g} {y - drop:g}{down}"/>'
        opacity = f' style="--p:{scene.probability(node)[1] ** (1 / 3):.2f}"' if node >= 0 else ""
        return (
            f'<g class="{kind}"{opacity} tabindex="0"><title>{escape(scene.title(node), False)}</title>{edge}'
            f'<rect x="{x:g}" y="{y - BOX / 2:g}" width="{wide:g}"/>'
            f'<text x="{x + wide / 2:g}" y="{y + 4:g}">{escape(scene.label(node), False)}</text>'
            + "".join(map(draw, at.kids.get(node, ())))
            + "</g>"
        )

    columns = list(zip(at.lefts, at.widths, strict=True))
    bands = "".join(f"M{x - 4:g} 0h{w + 8:g}v{height:g}h{-w - 8:g}z" for x, w in columns)
    heads = "".join(f'<text x="{x + w / 2:g}" y="14">{heading(c)}</text>' for c, (x, w) in enumerate(columns))
    body = f'<path class="bands" d="{bands}"/><g class="h">{heads}</g>{draw(ROOT)}'
    return svg(width + 2, height, "tree", f"candidate tree of {len(scene.tree)} nodes", body)


def mask_svg(scene: Scene) -> str:
    """Draw who sees whom: row and column per node in the order of the verify pass, the root first."""
    order = [ROOT, *scene.shown]
    labels = [scene.label(i, 10) for i in order]
    visible_to = ancestor_matrix(scene.tree)[[[i + 1] for i in order], [i + 1 for i in order]]
    pitch = max(9, min(14, 420 // len(order)))
    font, prefix = min(pitch, 11) - 1, 3 * pitch
    edge = max(map(cells_of, labels)) * font * 0.61 + 6
    left, size = edge + prefix, len(order) * pitch
    accepted = {ROOT, *scene.path} if scene.path or scene.bonus is not None else set()
    body = [
        f'<rect class="ground" x="{left:g}" y="{edge:g}" width="{size}" height="{size}"/>'
        f'<rect class="before" x="{edge:g}" y="{edge:g}" width="{prefix - 2}" height="{size}"/>'
        f'<text class="t" x="{-edge + 4:g}" y="{edge + prefix / 2 + 2:g}">prefix</text>'
    ]
    for row, (node, label) in enumerate(zip(order, labels, strict=True)):
        y = edge + (row + 0.5) * pitch
        seen = [c for c in range(len(order)) if visible_to[row, c]]
        run = "".join(f"M{left + c * pitch + 0.5:g} {y:g}h{pitch - 1}" for c in seen)
        kind = f"m m{node if node >= 0 else 'r'}" + " a" * (node in accepted)
        said = "row {}: sees the prefix, {}".format(row, " ".join(labels[c] for c in seen))
        body.append(
            f'<g class="{kind}"><title>{escape(said, False)}</title>'
            f'<rect y="{y - pitch / 2:g}" width="{left + size:g}" height="{pitch}"/>'
            f'<path d="{run}"/><text x="{edge - 4:g}" y="{y + font / 3:g}">{escape(label, False)}</text>'
            f'<text class="t" x="{-edge + 4:g}" y="{left + (row + 0.5) * pitch + font / 3:g}">{escape(label, False)}</text></g>'
        )
    style = f'<g style="font-size:{font}px;--w:{pitch - 1}px">{"".join(body)}</g>'
    return svg(left + size + 2, edge + size + 2, "mask", f"ancestor mask of {len(order)} rows", style)


def tree_figure(subject: Any, words: Any = None, *, width_in: float = 6.75, cap: int = 127) -> Any:
    """Draw the same tree with matplotlib, for paper and README.

    Args:
        subject: a round or a tree.
        words: None, a callable `token id -> str`, or a tokenizer.
        width_in: printed width in inches; the height follows, and type is at most 8 pt.
        cap: the most nodes to draw.

    Returns:
        A `matplotlib.figure.Figure`, not yet saved.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    scene = scene_of(subject, words, cap=cap)
    at = place(scene)
    width, height = at.size
    unit = min(width_in * 72 / (width + 4), 8 / 12)  # points per px
    figure = Figure(figsize=(width_in, (height + 4) * unit / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    spare = width_in * 72 / unit - width
    axes.set(xlim=(-spare / 2, width + spare / 2), ylim=(height + 2, -2))
    axes.axis("off")
    for column, (x, wide) in enumerate(zip(at.lefts, at.widths, strict=True)):
        axes.axvspan(x - 4, x + wide + 4, color="0.965", lw=0, zorder=0)
        axes.text(x + wide / 2, 10, heading(column), ha="center", va="center", fontsize=10 * unit, color="0.4")
    for node, row in at.rows.items():
        column, y = scene.depth(node), HEAD + PITCH * row + 12
        x, wide = at.lefts[column], at.widths[column]
        p = scene.probability(node)[1] ** (1 / 3) if node >= 0 else 0.0
        color, alpha, line, dash = DRAFT, 0.25 + 0.75 * p, 1.0, "-"
        if node in scene.path:
            color, alpha, line = ACCEPTED, 1.0, 2.5
        elif node == BONUS:
            color, alpha, line, dash = BONUS_COLOR, 1.0, 2.0, (0, (4, 2))
        elif node == ROOT:
            color, alpha = "black", 0.6
        if node != ROOT:
            parent = scene.leaf if node == BONUS else int(scene.tree.parents[node])
            top = HEAD + PITCH * at.rows[parent] + 12
            xs, ys = [x - GUTTER, x - GUTTER / 2, x - GUTTER / 2, x], [top, top, y, y]
            thin = color == DRAFT
            axes.plot(xs, ys, color="0.65" if thin else color, lw=line * unit, ls=dash, zorder=1 if thin else 2)
        style = f"round,pad=0,rounding_size={4}"
        face = (color, 0.06 + 0.5 * p)
        axes.add_patch(
            FancyBboxPatch((x, y - BOX / 2), wide, BOX, style, fc=face, ec=(color, alpha), lw=line * unit, ls=dash, zorder=3)
        )
        font = {"fontsize": 12 * unit, "family": "DejaVu Sans Mono", "parse_math": False}
        axes.text(x + wide / 2, y, scene.label(node), ha="center", va="center_baseline", zorder=4, **font)
    return figure
