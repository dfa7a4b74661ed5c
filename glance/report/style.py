"""How figures look, and the one door to figures/: looks of arms and tasks, fonts, sizes, and `save`.

Sizes are printed inches (3.25 or 6.75 wide), fonts are matplotlib's own, colours seaborn's "colorblind" palette, and what
a colour says a marker, dash or hatch says again. `save` fixes metadata and the hash salt: equal data, equal bytes, under
equal versions of matplotlib and freetype.

A task of the user's own gets a look that no other task of the run has. Names are drawn as they are, no `$` in them is
mathematics, in a font that has their glyphs; where this machine has none, a warning says so and the code points are drawn.
"""

import functools
import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import seaborn
from matplotlib import font_manager
from matplotlib.figure import Figure

from glance.paths import FIGURES
from glance.report.results import Missing, Results

COLUMN_IN = 3.25  # printed widths
PAGE_IN = 6.75
OWN_FONT = "DejaVu Sans"


class Look(NamedTuple):
    """How an arm or a task appears wherever it appears."""

    label: str
    color: str
    marker: str
    dash: Any = "-"


BLUE, ORANGE, GREEN, RED, PINK, BROWN, ROSE, GREY, YELLOW, SKY = seaborn.color_palette("colorblind").as_hex()

ARMS = {
    "ar": Look("plain greedy", GREY, "D", ":"),
    "chain": Look("chain", ORANGE, "s", (0, (4, 1.5))),
    "tree": Look("tree", BLUE, "o", "-"),
    "auto": Look("auto", GREEN, "*", (0, (1, 2))),
}
TASKS = {  # in the paper's order, from free to anchored in the image
    "caption": Look("caption", PINK, "o", (0, (1, 1))),
    "textvqa": Look("TextVQA", ORANGE, "s", (0, (3, 1, 1, 1))),
    "infovqa": Look("InfoVQA", GREEN, "^", (0, (4, 1.5))),
    "docvqa": Look("DocVQA", BLUE, "D", (0, (7, 1.5))),
    "chartqa": Look("ChartQA", RED, "v", "-"),
}
STEPS = {  # of a round: label, colour, hatch
    "draft": ("draft", BLUE, ""),
    "tree": ("tree", YELLOW, "...."),
    "verify": ("verify", GREEN, "////"),
    "commit": ("walk and commit", PINK, "xxxx"),
    "other": ("other", "#CFCFCF", ""),
}
STYLE = {
    "font.family": OWN_FONT,
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
POOLED = Look("all tasks", "#000000", "o")
NO_NUMBER = "-"  # of a task whose answers began no round


OWN_COLORS = (BLUE, ORANGE, GREEN, RED, PINK, BROWN, ROSE, GREY, SKY)
OWN_MARKERS = ("P", "X", "p", "h", "<", ">", "8", "d", "H", "*")
OWN_DASHES = ((0, (2, 1)), (0, (5, 1, 1, 1)), "-", (0, (1, 2)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (3, 3)))
PLACES = 24  # of a name that is drawn


def look(name: str) -> Look:
    """Return the look of an arm or a task; grey under its own name where it is not on the lists."""
    return ARMS.get(name) or TASKS.get(name) or Look(name, "#565656", "P", (0, (2, 1)))


def task_looks(names: Sequence[str]) -> dict[str, Look]:
    """Return the looks of a run's tasks: the paper's keep theirs, the i-th of the user's own takes the i-th of its cues.

    >>> looks = task_looks(["docvqa", "mine", "yours"])
    >>> looks["docvqa"].label, looks["mine"].color != looks["yours"].color
    ('DocVQA', True)
    """
    looks = {}
    own = 0
    for name in names:
        looks[name] = TASKS.get(name)
        if looks[name] is None:
            cues = (cycle[own % len(cycle)] for cycle in (OWN_COLORS, OWN_MARKERS, OWN_DASHES))
            looks[name] = Look(name, *cues)
            own += 1
    return looks


def drawable(name: str) -> str:
    """Return a name as matplotlib draws it literally: one line, not too long, no mathematics, no glyph that is missing."""
    name = " ".join(name.split())
    name = name if len(name) <= PLACES else f"{name[: PLACES - 1]}\N{HORIZONTAL ELLIPSIS}"
    missing = {letter for letter in name if _font_with(letter) is None}
    name = "".join(f"U+{ord(letter):04X} " if letter in missing else letter for letter in name).strip()
    name = name.replace("$", "\\$")
    return f" {name}" if name.startswith("_") else name  # a legend leaves out what begins with _


@functools.cache
def _font_with(letter: str) -> str | None:
    """Return the first font of this machine that has a glyph, matplotlib's own foremost; None where there is none."""
    fonts = sorted(font_manager.fontManager.ttflist, key=lambda font: (font.name != OWN_FONT, font.name, font.fname))
    for font in fonts:
        if font.name.startswith("Last Resort"):  # its glyphs are boxes that name a block of Unicode
            continue
        try:
            if font_manager.get_font(font.fname).get_char_index(ord(letter)):
                return font.name
        except (OSError, RuntimeError):
            continue
    return None


def font_families(names: Sequence[str]) -> list[str]:
    """Return the fonts that names need, matplotlib's own first; warn of letters that no font here has."""
    letters = sorted(set("".join(names)) - set(" \n\t"))
    found = {letter: _font_with(letter) for letter in letters}
    if missing := "".join(letter for letter, font in found.items() if font is None):
        warnings.warn(
            f"no font here has glyphs for {missing!r}: figures show their code points; install a font that has them, "
            "such as Noto Sans CJK, to see them",
            stacklevel=4,
        )
    return list(dict.fromkeys([OWN_FONT, *(font for font in found.values() if font)]))


def run_names(results: Results) -> list[str]:
    """Return what the figures of a run may have to write: its tasks and arms, as far as its files are there."""
    names: list[str] = []
    for read in (lambda: results.tasks, lambda: results.arms, lambda: list(results.law["laws"])):
        try:
            names += read()
        except Missing:
            continue
    return names


def save(figure: Figure, name: str, folder: str | Path = FIGURES) -> dict[str, Path]:
    """Write a figure as pdf, png and svg; return the paths by format. Nothing else writes a figure."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = {kind: Path(folder) / f"{name}.{kind}" for kind in METADATA}
    for kind, path in paths.items():
        path.write_bytes(figure_bytes(figure, kind))
    return paths


def preview(figure: Figure, width: int = 760) -> Any:
    """Show a figure in a notebook as the PNG that `save` would write, `width` pixels wide."""
    from IPython.display import Image

    return Image(figure_bytes(figure, "png"), width=width)


def figures_folder(run: str) -> Path:
    """Return where a run's figures and tables go: figures/ for the default run, a folder of its own in it for another."""
    return FIGURES if run == "pocket" else FIGURES / run


def figure_bytes(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=kind, metadata=METADATA[kind])
    return buffer.getvalue()


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    @functools.wraps(draw)
    def drawn(results: Results) -> Figure:
        with matplotlib.rc_context(STYLE | {"font.family": font_families(run_names(results))}):
            return draw(results)

    return drawn
