"""One tree on paper: how a token is spelled, where a node stands, and the SVG, mask and matplotlib drawings of that.

Conventions that decide the picture:

- Columns are offsets. The first child (lowest rank) stands on its parent's row, so the greedy spine is straight; each
  further child opens a row below, as high as its columns are free. Edges run in the gutters and never cross.
- Opacity is the square root of the path probability: a path of 0.01 is still to be seen beside one of 0.9.
- Each node's group encloses its children's groups: what encloses a node is what it may attend to, its row of the mask.
- A tree larger than `cap` shows its first nodes (the most probable, parents always among them) and the accepted path.

Units are px at a 14 px font; the SVGs scale in em. U+E000 stands for the id of a view, which is a hash of its content.
The file knows nothing of rounds as a sequence, of models or of tokenizers beyond two of their methods.
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import ceil, exp
from typing import Any

from glance.tree import ROOT, CandidateTree, ancestor_matrix, as_tree

DRAFT, ACCEPTED, BONUS_COLOR = "#0173B2", "#029E73", "#DE8F05"
BONUS = -2  # stands for the bonus where nodes are meant; never in a tree
CELL, PITCH, BOX, GUTTER, HEAD = (
    7.25,
    26,
    20,
    24,
    24,
)  # a character's width, a row, a box, between columns, the headings
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
            return (
                "".join(chr(b) if 32 < b < 127 else f"\\x{b:02x}" for b in map(_BYTES.get, piece)) if known else piece
            )
        return " " + text if piece.startswith("▁") and not text.startswith(" ") else text

    return spell


def width_of(text: str) -> int:
    """Count the columns that a text takes in a monospaced font."""
    return sum(
        (unicodedata.category(c) not in ("Mn", "Me")) * (1 + (unicodedata.east_asian_width(c) in "WF")) for c in text
    )


def visible(text: str, cells: int = 10**9, keep: str = "") -> str:
    """Spell a text so that nothing in it is invisible or moves other text, cut to a width of `cells` columns.

    >>> visible(" a\\n"), visible(""), visible("speculative", 8)
    ('␣a⏎', '∅', 'specula…')
    """
    shown = ""
    for c in text[: cells + 1] or "∅":  # a cut text needs no more than that
        kind = unicodedata.category(c)[0]
        if c not in keep and kind in "CZ":
            c = {" ": "␣", "\n": "⏎", "\t": "⇥"}.get(c) or c.encode("unicode_escape").decode()
        shown += "◌" + c if not shown and kind == "M" else c  # a mark needs something to stand on
    if width_of(shown) > cells:
        while width_of(shown) > cells - 1:
            shown = shown[:-1]
        shown += "…"
    return shown


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
        if node == BONUS:
            return self.depth(self.leaf) + 1
        return 0 if node == ROOT else int(self.tree.depths[node])

    def probability(self, node: int) -> float:
        """Give the probability of the path from the root to a node."""
        return exp(self.tree.logps[node])

    def title(self, node: int) -> str:
        """Say everything about a node, a line each: token, place, probabilities, what the target would have said."""
        said = f"{self.label(node, 40)}\n"
        if node == BONUS:
            return f"{said}offset {self.depth(node)}, the bonus: the target's own token"
        then = visible(self.spell(self.choices[node + 1]), 24) if self.choices else ""
        if node == ROOT:
            return f"{said}the last committed token" + (f"\ntarget: {then}" if then else "")
        n, path = self.tree[node], self.probability(node)
        p = exp(n.logp - self.tree.logps[n.parent]) if n.parent != ROOT else path
        said += f"offset {n.depth}, rank {n.rank}, node {node}\np {p:.2g}, path {path:.2g}"
        if self.choices:
            here = self.choices[n.parent + 1]
            said += "\ntarget " + ("agrees" if here == n.token else f"{visible(self.spell(here), 24)}")
            said += f", then {then}"
        return said


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
    lefts: list[int]
    widths: list[int]

    @property
    def size(self) -> tuple[int, int]:
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
    widths = [42] * (max(map(scene.depth, rows)) + 1)
    for node in rows:
        column = scene.depth(node)
        widths[column] = max(widths[column], ceil(width_of(scene.label(node)) * CELL) + 12)
    lefts = [2]
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
            edge = f'<path d="M{x - GUTTER} {y - drop}{down}"/>'
        opacity = f' style="--p:{scene.probability(node) ** 0.5:.2f}"' if node >= 0 else ""
        kids = sorted(at.kids.get(node, ()), key=lambda kid: kid == BONUS or kid in accepted)  # painted last, on top
        return (
            f'<g class="{kind}"{opacity} tabindex="0"><title>{escape(scene.title(node), False)}</title>{edge}'
            f'<rect x="{x}" y="{y - BOX // 2}" width="{wide}"/>'
            f'<text x="{x + wide // 2}" y="{y + 4}">{escape(scene.label(node), False)}</text>'
            f"{''.join(map(draw, kids))}</g>"
        )

    columns = list(zip(at.lefts, at.widths, strict=True))
    bands = "".join(f"M{x - 4} 0h{w + 8}v{height}h{-w - 8}z" for x, w in columns)
    heads = "".join(f'<text x="{x + w // 2}" y="14">{heading(c)}</text>' for c, (x, w) in enumerate(columns))
    body = f'<path class="bands" d="{bands}"/><g class="h">{heads}</g>{draw(ROOT)}'
    return svg(width + 2, height, "tree", f"candidate tree of {len(scene.tree)} nodes", body)


def mask_svg(scene: Scene) -> str:
    """Draw who sees whom: row and column per node in the order of the verify pass, the root first."""
    order = [ROOT, *scene.shown]
    labels = [label.lstrip("␣") or label for label in (scene.label(i, 10) for i in order)]
    sees = ancestor_matrix(scene.tree)[[[i + 1] for i in order], [i + 1 for i in order]].tolist()
    pitch = max(9, min(14, 420 // len(order)))
    font, prefix = min(pitch, 11) - 1, 3 * pitch
    top = ceil(max(map(width_of, labels)) * font * 0.61) + 8  # height of the column labels, width of the row labels
    left, size = top + prefix, len(order) * pitch
    accepted = {ROOT, *scene.path} if scene.root is not None else set()
    rows, columns = [], f'<text x="{4 - top}" y="{top + prefix // 2}">prefix</text>'
    for row, (node, label) in enumerate(zip(order, labels, strict=True)):
        y, text = top + row * pitch, escape(label, False)
        seen = [c for c, is_seen in enumerate(sees[row]) if is_seen]
        starts = [c for c in seen if not c or not sees[row][c - 1]]  # of the runs of cells
        ends = [c + 1 for c in seen if c + 1 == len(order) or not sees[row][c + 1]]
        run = "".join(
            f"M{left + a * pitch} {y + pitch / 2:g}h{(b - a) * pitch}" for a, b in zip(starts, ends, strict=True)
        )
        said = escape(f"row {row} sees the prefix, {' '.join(labels[c] for c in seen)}", False)
        rows.append(
            f'<g class="m{" a" * (node in accepted)} m{"r" if node == ROOT else node}"><title>{said}</title>'
            f'<rect y="{y}" width="{left + size}"/><path d="{run}"/>'
            f'<text x="{top - 4}" y="{y + (pitch + font) // 2 - 1}">{text}</text></g>'
        )
        columns += f'<text x="{4 - top}" y="{left + row * pitch + (pitch + font) // 2 - 1}">{text}</text>'
    body = (
        f'<path class="bands" d="M{left} {top}h{size}v{size}h-{size}z"/>'
        f'<path class="before" d="M{top} {top}h{prefix - 3}v{size}h{3 - prefix}z"/>'
        f'<g style="font-size:{font}px;--w:{pitch - 1}px;--h:{pitch}px"><g class="t">{columns}</g>{"".join(rows)}</g>'
    )
    return svg(left + size + 2, top + size + 2, "mask", f"ancestor mask of {len(order)} rows", body)


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
        p = scene.probability(node) ** 0.5 if node >= 0 else 0.0
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
            FancyBboxPatch(
                (x, y - BOX / 2), wide, BOX, style, fc=face, ec=(color, alpha), lw=line * unit, ls=dash, zorder=3
            )
        )
        font = {"fontsize": 12 * unit, "family": "DejaVu Sans Mono", "parse_math": False}
        axes.text(x + wide / 2, y, scene.label(node), ha="center", va="center_baseline", zorder=4, **font)
    return figure
