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

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import ceil, exp
from typing import Any

from glance.tree import ROOT, CandidateTree, ancestor_matrix, as_tree

DRAFT = "#0173B2"
ACCEPTED = "#029E73"
BONUS_COLOR = "#DE8F05"
BONUS = -2  # stands for the bonus where nodes are meant; never in a tree
CELL = 7.25
PITCH = 26
BOX = 20
GUTTER = 24
HEAD = 24  # a character's width, a row, a box, between columns, the headings
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level vocabularies write as themselves
_HIDDEN = [b for b in range(256) if b not in _PLAIN]
_BYTES = {chr(b): b for b in _PLAIN} | {chr(256 + i): b for i, b in enumerate(_HIDDEN)}


def speller(words: Any) -> Callable[[int], str]:
    """Turn `words` (None, a callable `id -> str`, or a tokenizer) into a function from token id to text.

    A tokenizer's token that is a part of a UTF-8 character comes as its bytes, `\\xe2\\x80`, not as a replacement mark.
    """
    if not hasattr(words, "decode"):
        return words or str
    pieces = getattr(getattr(words, "tokenizer", words), "convert_ids_to_tokens", lambda ids: [""])

    def spell(token: int) -> str:
        text = words.decode([token])
        piece = pieces([token])[0] or ""
        if "\ufffd" in text and piece:
            known = [_BYTES.get(c, 0) for c in piece]
            return "".join(chr(b) if 32 < b < 127 else f"\\x{b:02x}" for b in known) if all(known) else piece
        return " " + text if piece.startswith("▁") and not text.startswith(" ") else text

    return spell


def width_of(text: str) -> int:
    """Count the columns that a text takes in a monospaced font."""
    return sum(
        1 + (unicodedata.east_asian_width(c) in "WF") for c in text if unicodedata.category(c) not in ("Mn", "Me")
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

    def parent(self, node: int) -> int:
        """Name what a node hangs on; the bonus hangs where the walk left the tree."""
        return int(self.tree.parents[node]) if node != BONUS else self.path[-1] if self.path else ROOT

    def label(self, node: int, cells: int = 12) -> str:
        """Spell a node, the root (-1) or the bonus (-2)."""
        token = {ROOT: self.root, BONUS: self.bonus}[node] if node < 0 else int(self.tree.tokens[node])
        return "root" if token is None else visible(self.spell(token), cells)

    def depth(self, node: int) -> int:
        """Name a node's column: its offset; 0 for the root."""
        if node == BONUS:
            return self.depth(self.parent(BONUS)) + 1
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
        n = self.tree[node]
        path = self.probability(node)
        p = exp(n.logp - self.tree.logps[n.parent]) if n.parent != ROOT else path
        said += f"offset {n.depth}, rank {n.rank}, node {node}\np {p:.2g}, path {path:.2g}"
        if self.choices:
            here = self.choices[n.parent + 1]
            said += f"\ntarget {'agrees' if here == n.token else visible(self.spell(here), 24)}, then {then}"
        return said


def scene_of(subject: Any, words: Any = None, *, cap: int = 127, **extra: Any) -> Scene:
    """Make the scene of a round, a tree, or any sequence of nodes."""
    if not hasattr(subject, "tree"):
        return Scene(as_tree(subject), speller(words), cap=cap, **extra)
    path, choices = (tuple(int(i) for i in ids) for ids in (subject.path, subject.choices))
    bonus = None if subject.bonus is None else int(subject.bonus)
    return Scene(as_tree(subject.tree), speller(words), int(subject.root), path, bonus, choices, cap, **extra)


@dataclass(frozen=True)
class Places:
    """Where everything stands: per node its kids in drawing order and (left, middle, width); per column (left, width)."""

    kids: dict[int, list[int]]
    boxes: dict[int, tuple[int, int, int]]
    columns: list[tuple[int, int]]
    width: int
    height: int


def place(scene: Scene) -> Places:
    """Stand every shown node, the root and the bonus in columns and rows."""
    kids: dict[int, list[int]] = defaultdict(list)
    for i in sorted(scene.shown, key=lambda i: (int(scene.tree.ranks[i]), i)):
        kids[scene.parent(i)].append(i)
    if scene.bonus is not None:
        kids[scene.parent(BONUS)].append(BONUS)
    rows: dict[int, int] = {}
    taken: dict[int, int] = defaultdict(lambda: -1)  # per column, its lowest taken row

    def put(node: int, floor: int) -> None:
        chain = [node]
        while kids.get(chain[-1]):
            chain.append(kids[chain[-1]][0])
        row = max(floor, *(taken[scene.depth(link)] + 1 for link in chain))
        for link in chain:
            rows[link] = taken[scene.depth(link)] = row
        for link in reversed(chain):  # deepest first: what is placed later never lies between a parent and its child
            for sibling in kids.get(link, [])[1:]:
                put(sibling, row + 1)

    put(ROOT, 0)
    columns = []
    left = 2
    for column in range(max(taken) + 1):
        widest = max(width_of(scene.label(node)) for node in rows if scene.depth(node) == column)
        columns.append((left, max(42, ceil(widest * CELL) + 12)))
        left += columns[-1][1] + GUTTER
    middles = {node: HEAD + PITCH * row + 12 for node, row in rows.items()}
    boxes = {n: (columns[scene.depth(n)][0], y, columns[scene.depth(n)][1]) for n, y in middles.items()}
    return Places(dict(kids), boxes, columns, left - GUTTER + 4, max(middles.values()) + PITCH - 12)


def svg(width: float, height: float, kind: str, label: str, body: str) -> str:
    """Wrap a drawing; it scales with the font around it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width / 14:.4g}em" height="{height / 14:.4g}em" role="group" aria-label="{escape(label)}">{body}</svg>'
    )


def tree_svg(scene: Scene) -> str:
    """Draw the tree: a group per node, each inside its parent's."""
    at = place(scene)
    accepted = set(scene.path)

    def draw(node: int) -> str:
        x, y, wide = at.boxes[node]
        kind = "r" if node == ROOT else "b" if node == BONUS else f"n k{node}"
        edge = ""
        opacity = ""
        if node != ROOT:
            drop = y - at.boxes[scene.parent(node)][1]
            down = f"h6q6 0 6 6v{drop - 12}q0 6 6 6h6" if drop else f"h{GUTTER}"
            edge = f'<path d="M{x - GUTTER} {y - drop}{down}"/>'
        if node >= 0:
            kind = kind + " a" * (node in accepted)
            opacity = f' style="--p:{scene.probability(node) ** 0.5:.2f}"'
        kids = sorted(at.kids.get(node, ()), key=lambda kid: kid == BONUS or kid in accepted)  # painted last, on top
        return (
            f'<g class="{kind}"{opacity} tabindex="0"><title>{escape(scene.title(node), False)}</title>{edge}'
            f'<rect x="{x}" y="{y - BOX // 2}" width="{wide}"/>'
            f'<text x="{x + wide // 2}" y="{y + 4}">{escape(scene.label(node), False)}</text>'
            f"{''.join(map(draw, kids))}</g>"
        )

    bands = "".join(f"M{x - 4} 0h{w + 8}v{at.height}h{-w - 8}z" for x, w in at.columns)
    heads = "".join(f'<text x="{x + w // 2}" y="14">{heading(c)}</text>' for c, (x, w) in enumerate(at.columns))
    body = f'<path class="bands" d="{bands}"/><g class="h">{heads}</g>{draw(ROOT)}'
    return svg(at.width, at.height, "tree", f"candidate tree of {len(scene.tree)} nodes", body)


def heading(column: int) -> str:
    return f"offset {column}" if column else "root"


def mask_svg(scene: Scene) -> str:
    """Draw who sees whom: row and column per node in the order of the verify pass, the root first."""
    order = [ROOT, *scene.shown]
    labels = [label.lstrip("␣") or label for label in (scene.label(i, 10) for i in order)]
    sees = ancestor_matrix(scene.tree)[[[i + 1] for i in order], [i + 1 for i in order]].tolist()
    pitch = max(9, min(14, 420 // len(order)))
    font = min(pitch, 11) - 1
    prefix = 3 * pitch
    top = (
        ceil(max(map(width_of, [*labels, "prefix"])) * font * 0.61) + 8
    )  # height of the column labels, width of the row labels
    left = top + prefix
    size = len(order) * pitch
    accepted = {ROOT, *scene.path} if scene.root is not None else set()
    rows = []
    columns = f'<text x="{4 - top}" y="{top + prefix // 2}">prefix</text>'
    for row, (node, label) in enumerate(zip(order, labels, strict=True)):
        y = top + row * pitch
        text = escape(label, False)
        runs = re.finditer("1+", "".join("01"[cell] for cell in sees[row]))  # neighbouring cells are one stroke
        strokes = "".join(f"M{left + m.start() * pitch} {y + pitch / 2:g}h{len(m[0]) * pitch}" for m in runs)
        seen = " ".join(name for name, cell in zip(labels, sees[row], strict=True) if cell)
        said = escape(f"row {row} sees the prefix, {seen}", False)
        rows.append(
            f'<g class="m{" a" * (node in accepted)} m{"r" if node == ROOT else node}"><title>{said}</title>'
            f'<rect y="{y}" width="{left + size}"/><path d="{strokes}"/>'
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
    unit = min(width_in * 72 / at.width, 8 / 12)  # points per px
    spare = width_in * 72 / unit - at.width
    figure = Figure(figsize=(width_in, at.height * unit / 72))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-spare / 2, at.width + spare / 2), ylim=(at.height, 0))
    axes.axis("off")
    center = {"ha": "center", "va": "center_baseline"}
    for column, (x, wide) in enumerate(at.columns):
        axes.axvspan(x - 4, x + wide + 4, color="0.965", lw=0, zorder=0)
        axes.text(x + wide / 2, 11, heading(column), fontsize=10 * unit, color="0.4", **center)
    for node, (x, y, wide) in at.boxes.items():
        p = scene.probability(node) ** 0.5 if node >= 0 else 0.1
        color = (DRAFT, 0.3 + 0.7 * p)
        edge = "0.6"
        line = {"lw": unit, "zorder": 1}
        if node == ROOT:
            color = ("black", 0.6)
        elif node == BONUS:
            color = (BONUS_COLOR, 1)
            edge = BONUS_COLOR
            line = {"lw": 2 * unit, "zorder": 2, "ls": (0, (2.5, 1.5))}
        elif node in scene.path:
            color = (ACCEPTED, 1)
            edge = ACCEPTED
            line = {"lw": 2.5 * unit, "zorder": 2}
        if node != ROOT:
            top = at.boxes[scene.parent(node)][1]
            gutter = x - GUTTER / 2
            axes.plot([x - GUTTER, gutter, gutter, x], [top, top, y, y], color=edge, solid_capstyle="butt", **line)
        corner = "round,pad=0,rounding_size=4"
        face = (color[0], 0.03 + 0.5 * p)
        axes.add_patch(FancyBboxPatch((x, y - BOX / 2), wide, BOX, corner, fc=face, ec=color, **line | {"zorder": 3}))
        font = {"fontsize": 12 * unit, "family": "DejaVu Sans Mono", "parse_math": False, "zorder": 4}
        axes.text(x + wide / 2, y, scene.label(node), **center, **font)
    return figure
