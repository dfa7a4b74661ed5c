"""Words, numbers and dates that stand on pages: an open stream for training, a reserved share for evaluation.

Conventions: a page word has 3 to 7 letters and is capitalised. A quarter of the words are real, the rest are pseudo-words
that look like English. Evaluation draws from real words that training never sees (`held.txt`) and from the pseudo-words
whose CRC-32 is divisible by 16, which training never draws. Words of the answers' own sentences (`reserved.txt`) are
page words in neither. This file does not know where a word is drawn.
"""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from functools import lru_cache
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "data" / "pocket"
WORDS = DATA / "words"
SPLITS = ("train", "eval", "seen")
RESERVED_ONE_IN = 16  # of the pseudo-words, kept for evaluation


@lru_cache
def read_list(name: str) -> tuple[str, ...]:
    """Read one shipped word list (`train`, `held` or `reserved`), in order."""
    path = WORDS / f"{name}.txt"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: the pocket target's word list is missing; restore data/pocket/words")
    return tuple(path.read_text(encoding="utf-8").split())


@lru_cache
def known_words() -> frozenset[str]:
    """Every word that no pseudo-word may equal."""
    reserved = (word.lower() for word in read_list("reserved"))
    return frozenset((*read_list("train"), *read_list("held"), *reserved))


@lru_cache
def continuations(order: int) -> dict[str, str]:
    """Count which letters follow `order` letters in the training words ('^' before, '$' after a word)."""
    table: dict[str, list[str]] = defaultdict(list)
    for word in read_list("train"):
        padded = "^" * order + word + "$"
        for i in range(order, len(padded)):
            table[padded[i - order : i]].append(padded[i])
    return {key: "".join(letters) for key, letters in table.items()}


def is_reserved(word: str) -> bool:
    """Say whether a pseudo-word belongs to evaluation alone."""
    return zlib.crc32(word.lower().encode()) % RESERVED_ONE_IN == 0


def draw_pseudo_word(rng: random.Random) -> str:
    """Invent a lower-case word: most by letter statistics of real words, some by syllables, some uniformly."""
    while True:
        kind = rng.random()
        if kind < 0.12:
            word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 7)))
        elif kind < 0.3:
            word = "".join(rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
            word += rng.choice(["", "", "n", "r", "s", "t"])
        else:
            order = 2 if kind < 0.7 else 3
            table = continuations(order)
            word = "^" * order
            while len(word) < order + 9 and (letter := rng.choice(table[word[-order:]])) != "$":
                word += letter
            word = word[order:]
        if 3 <= len(word) <= 7 and word not in known_words():
            return word


def draw_word(rng: random.Random, split: str, longest: int = 7) -> str:
    """Draw one page word of a split, capitalised, with at most `longest` letters."""
    held = split == "eval"
    while True:
        if rng.random() < (0.5 if held else 0.25):
            word = rng.choice(read_list("held" if held else "train"))
        else:
            word = draw_pseudo_word(rng)
            if is_reserved(word) != held:
                continue
        if len(word) <= longest:
            return word.capitalize()


def draw_words(rng: random.Random, split: str, count: int, longest: int = 7) -> list[str]:
    """Draw `count` different page words."""
    words: list[str] = []
    while len(words) < count:
        word = draw_word(rng, split, longest)
        if word not in words:
            words.append(word)
    return words


def draw_number(rng: random.Random) -> str:
    """Draw a short number, whole or with one decimal."""
    kind = rng.random()
    if kind < 0.35:
        return str(rng.randint(1, 99))
    if kind < 0.65:
        return str(rng.randint(100, 999))
    return f"{rng.randint(1, 99)}.{rng.randint(0, 9)}"


def draw_money(rng: random.Random) -> str:
    """Draw an amount with two decimals."""
    return f"{rng.randint(1, 499)}.{rng.randint(0, 99):02d}"


def draw_date(rng: random.Random) -> str:
    """Draw a date, day/month/year."""
    return f"{rng.randint(1, 28):02d}/{rng.randint(1, 12):02d}/{rng.randint(2001, 2039)}"
