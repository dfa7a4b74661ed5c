"""A page being drawn: text in several fonts at arbitrary pixel offsets, and where each character stands.

Conventions: a page is 256 px wide; a *cell* is 32 x 32 px, what one language token of the image covers, numbered row by
row; a *slot* is one of 2 x 8 places of 16 x 4 px (height x width) in a cell. Labels speak of character centres. Letters are
set one by one, one pixel apart, so that two centres never share a slot. This file does not know what a page says.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

WIDTH = 256
HEIGHT = 192
CELL = 32
SLOT_ROWS = 2
SLOT_COLUMNS = 8
SLOTS = SLOT_ROWS * SLOT_COLUMNS
FONTS = {
    "mono": "DejaVuSansMono.ttf",
    "mono-bold": "DejaVuSansMono-Bold.ttf",
    "sans": "DejaVuSans.ttf",
    "sans-bold": "DejaVuSans-Bold.ttf",
    "serif": "DejaVuSerif.ttf",
}
CHARACTERS = " abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:/"  # index 0: nothing here
COLOURS = {
    "red": (215, 40, 40),
    "green": (40, 150, 60),
    "blue": (45, 80, 215),
    "orange": (235, 130, 20),
    "purple": (140, 60, 180),
    "black": (25, 25, 25),
    "teal": (15, 140, 145),
    "pink": (235, 100, 170),
}
SHAPES = ("circle", "square", "triangle", "cross")
TRACKING = 1  # px between letters

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Ink:
    """Text that stands on the page, with the centre of each character in px."""

    text: str
    centres: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Spot:
    """Words about one place of the page (a sentence about a shape, the colour of a sign)."""

    text: str
    centre: tuple[float, float]


def find_cell(centre: tuple[float, float], height: int = HEIGHT) -> int:
    """Return the number of the 32 px cell that a point lies in."""
    column = min(max(int(centre[0] // CELL), 0), WIDTH // CELL - 1)
    row = min(max(int(centre[1] // CELL), 0), height // CELL - 1)
    return row * (WIDTH // CELL) + column


def find_slot(centre: tuple[float, float]) -> int:
    """Return the slot, within its cell, that a point lies in."""
    row = int(centre[1] % CELL // (CELL // SLOT_ROWS))
    return row * SLOT_COLUMNS + int(centre[0] % CELL // (CELL // SLOT_COLUMNS))


@lru_cache
def load_font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """Load one of `FONTS` (they come with matplotlib) at a size in px per em."""
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / FONTS[name]
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)


@cache
def measure_letter(name: str, size: int, letter: str) -> float:
    """Return a letter's advance in px."""
    return load_font(name, size).getlength(letter)


def draw_pale(rng: random.Random) -> Colour:
    """Draw a pale colour for a ground."""
    return rng.randint(208, 255), rng.randint(208, 255), rng.randint(208, 255)


def draw_dark(rng: random.Random) -> Colour:
    """Draw a dark colour for text."""
    return rng.randint(0, 90), rng.randint(0, 90), rng.randint(0, 90)


def draw_texture(rng: random.Random, height: int) -> Image.Image:
    """Draw a pale ground of 4 px blocks that vary a little."""
    noise = np.random.RandomState(rng.randrange(2**31)).randint(-18, 19, (height // 4, WIDTH // 4, 3))
    pixels = np.array(draw_pale(rng)) + noise.repeat(4, 0).repeat(4, 1)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


class Canvas:
    """One page: its image, its font and what has been put where."""

    def __init__(self, rng: random.Random, *, font: str, size: int, height: int = HEIGHT, textured: bool = False):
        self.rng = rng
        self.font = font
        self.size = size
        self.height = height
        self.image = draw_texture(rng, height) if textured else Image.new("RGB", (WIDTH, height), draw_pale(rng))
        self.pen = ImageDraw.Draw(self.image)
        self.ink: list[Ink] = []
        self.colour: str | None = None  # of the text, where it has a name
        self.objects: list[dict] | None = None

    def measure(self, text: str) -> int:
        """Return the width of a text in px, rounded up."""
        return int(sum(measure_letter(self.font, self.size, c) + TRACKING for c in text)) + 1

    def write(self, x: float, y: float, text: str, colour: Colour) -> Ink:
        """Write a text with its left edge at x and its em box's top at y, and remember its character centres."""
        ascent, _ = load_font(self.font, self.size).getmetrics()
        middle = y + ascent - 0.3 * self.size
        centres = []
        for letter in text:
            advance = measure_letter(self.font, self.size, letter)
            if letter != " ":
                self.pen.text((round(x), y), letter, font=load_font(self.font, self.size), fill=colour)
            centres.append((x + advance / 2, middle))
            x += advance + TRACKING
        ink = Ink(text, tuple(centres))
        self.ink.append(ink)
        return ink

    def label_slots(self) -> np.ndarray:
        """Return the character of each slot as an index into `CHARACTERS`, (cells, 16) int64."""
        labels = np.zeros((WIDTH * self.height // CELL**2, SLOTS), np.int64)
        for ink in self.ink:
            for letter, centre in zip(ink.text, ink.centres, strict=True):
                if letter != " ":
                    labels[find_cell(centre, self.height), find_slot(centre)] = CHARACTERS.index(letter)
        return labels

    def label_things(self) -> np.ndarray:
        """Return colour, shape and size class of each cell, (cells, 3) int64: 0 none, -1 not said."""
        labels = np.full((WIDTH * self.height // CELL**2, 3), -1, np.int64)
        if self.objects is not None:
            labels[:] = 0
            for thing in self.objects:
                classes = list(COLOURS).index(thing["colour"]), SHAPES.index(thing["shape"]), int(thing["big"])
                labels[find_cell(thing["centre"], self.height)] = [1 + c for c in classes]
        elif self.colour is not None:
            for ink in self.ink:
                for centre in ink.centres:
                    labels[find_cell(centre, self.height)] = [1 + list(COLOURS).index(self.colour), 0, 0]
        return labels
