"""The door to the pages: `sample(task, seed, split)` draws one, always the same for the same arguments.

Stable interface::

    page = sample("docvqa", 7, "train")   # split: "train" | "eval" | "seen"
    page.image, page.prompt, page.answer, page.task, page.kind

Tasks are `TASKS` (the five), and for practice `lines` (192 px high), `lines64` and `strip64` (64 px high). `train` and
`seen` draw words from the training lexicon (different images), `eval` from the held-out one. Labels for training:
`page.prompt_source` and `page.answer_source`, (characters, 2) int64: cell and slot of each character, -1 where none.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from glance.pocket.canvas import Canvas, Ink, Spot, find_cell, find_slot
from glance.pocket.pages import CARRIERS, Alternative, Draft, draw_cards, draw_chart, draw_form, draw_lines, draw_sign
from glance.pocket.scenes import draw_scene, draw_strip
from glance.pocket.words import SPLITS

TASKS = ("caption", "textvqa", "infovqa", "docvqa", "chartqa")  # from most to least free
DRAW = {
    "caption": draw_scene,
    "textvqa": draw_sign,
    "infovqa": draw_cards,
    "docvqa": draw_form,
    "chartqa": draw_chart,
    "lines": lambda rng, split: draw_lines(rng, split, 192),
    "lines64": lambda rng, split: draw_lines(rng, split, 64),
    "strip64": draw_strip,
}


@dataclass
class Page:
    """One drawn page. `parts` are the answer's segments, each a list of equally right texts."""

    image: Image.Image
    prompt: str
    answer: str
    task: str
    kind: str
    split: str
    seed: int
    font: str
    size: int
    parts: list[list[str]]
    objects: list[dict] | None
    canvas: Canvas = field(repr=False)
    prompt_source: np.ndarray = field(repr=False)
    answer_source: np.ndarray = field(repr=False)

    def mark_asked(self) -> np.ndarray:
        """Mark the characters of the answer that depend on the question, (characters,) bool.

        Of a look-up that is its last line, of a sign the word for what carries the text.
        """
        marks = np.zeros(len(self.answer), bool)
        if self.kind == "lookup":
            marks[self.answer.rindex("\n") + 1 :] = True
        if self.kind == "text":
            for found in re.finditer(rf"\b({'|'.join(CARRIERS)})\b", self.answer):
                marks[found.start() : found.end()] = True
        return marks


def join_text(pieces: Alternative) -> str:
    """Return what a row of pieces says."""
    return "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)


def join_source(pieces: Alternative, height: int) -> np.ndarray:
    """Return where on the page each character of a row of pieces stands, (characters, 2) int64."""
    rows: list[tuple[int, int]] = []
    for piece in pieces:
        if isinstance(piece, Ink):
            rows += [(find_cell(centre, height), find_slot(centre)) for centre in piece.centres]
        elif isinstance(piece, Spot):
            rows += [(find_cell(piece.centre, height), -1)] * len(piece.text)
        else:
            rows += [(-1, -1)] * len(piece)
    return np.array(rows, np.int64).reshape(-1, 2)


def sample(task: str, seed: int, split: str = "train") -> Page:
    """Draw the page that `task`, `seed` and `split` name (see the module's docstring)."""
    if task not in DRAW:
        raise ValueError(f"unknown pocket task {task!r}; known: {', '.join(DRAW)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    rng = random.Random(f"{split}/{task}/{seed}")
    draft: Draft = DRAW[task](rng, split)
    chosen = [rng.choice(segment) for segment in draft.segments]
    answer = [piece for alternative in chosen for piece in alternative]
    canvas = draft.canvas
    return Page(
        image=canvas.image,
        prompt=join_text(draft.prompt),
        answer=join_text(answer),
        task=task,
        kind=draft.kind,
        split=split,
        seed=seed,
        font=canvas.font,
        size=canvas.size,
        parts=[[join_text(alternative) for alternative in segment] for segment in draft.segments],
        objects=canvas.objects,
        canvas=canvas,
        prompt_source=join_source(draft.prompt, canvas.height),
        answer_source=join_source(answer, canvas.height),
    )
