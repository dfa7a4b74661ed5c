"""What an answer is worth: character error against the nearest right answer, values looked up, captions grounded.

Conventions: a right answer may have several forms; its `parts` are segments, each a list of alternatives, and the error is
the edit distance to the nearest combination over the length of the given answer. A caption's *mention* is a colour and a
noun; it is grounded when the scene has such a shape, and a repeat when the caption has named that shape before.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from glance.pocket.canvas import COLOURS
from glance.pocket.scenes import COLUMNS, NOUNS, ROWS, SIZES

SHAPE_OF = {noun: shape for shape, nouns in NOUNS.items() for noun in nouns}
IS_BIG = {word: big for big, words in SIZES.items() for word in words}
MENTION = re.compile(rf"\b(?:({'|'.join(IS_BIG)}) )?({'|'.join(COLOURS)}) ({'|'.join(SHAPE_OF)})\b")
SENTENCE = re.compile(r"(?<=\.)\s+")


def extend_row(row: np.ndarray, text: str, codes: np.ndarray) -> np.ndarray:
    """Carry a row of edit distances (one per prefix of the hypothesis) over more reference text."""
    steps = np.arange(len(codes) + 1)
    for letter in text:
        best = row + 1
        best[1:] = np.minimum(best[1:], row[:-1] + (codes != ord(letter)))
        row = np.minimum.accumulate(best - steps) + steps
    return row


def count_edits(parts: list[list[str]], hypothesis: str) -> int:
    """Count the edits between a text and the nearest combination of alternatives.

    >>> count_edits([["a cat", "one cat"], [" sat"]], "one cat sits")
    2
    """
    codes = np.array([ord(letter) for letter in hypothesis], np.int64)
    row = np.arange(len(codes) + 1)
    for alternatives in parts:
        row = np.min([extend_row(row, text, codes) for text in alternatives], axis=0)
    return int(row[-1])


def find_asked_value(answer: str) -> str:
    """Return what the last line of a look-up's answer says the value is ("" where it says none)."""
    found = re.search(r" is (.+?)\.(?: |$)", answer.rsplit("\n", 1)[-1])
    return found.group(1) if found else ""


def find_word_list(answer: str) -> str:
    """Return the words that a sign's answer lists ("" where it lists none)."""
    found = re.search(r"words: (.+?)\.(?: |$)", answer)
    return found.group(1) if found else ""


def score_reading(row: dict, hypothesis: str) -> dict[str, float]:
    """Score an answer of a reading task; `row` has `answer`, `kind` and, where it may vary, `parts`."""
    answer = row["answer"]
    edits = count_edits(row.get("parts") or [[answer]], hypothesis)
    scores = {"character_error": edits / len(answer), "exact": float(edits == 0)}
    if row["kind"] == "lookup":
        scores["value_exact"] = float(find_asked_value(hypothesis) == find_asked_value(answer))
    if row["kind"] == "text":
        wanted = find_word_list(answer)
        got = find_word_list(hypothesis)
        scores["word_list_error"] = count_edits([[wanted]], got) / len(wanted)
        scores["word_list_exact"] = float(wanted == got)
        colours = [{c for c in COLOURS if re.search(rf"\b{c}\b", text)} for text in (answer, hypothesis)]
        scores["colour_exact"] = float(colours[0] == colours[1])
    return scores


def is_placed(sentence: str, thing: dict) -> bool:
    """Say whether a sentence's words for a place fit a thing."""
    text = sentence.lower()
    half = re.search(r"\bon the (left|right) half\b", text)
    if half:
        return (thing["column"] < 2) == (half.group(1) == "left")
    column = re.search(r"\b(far left|far right|left|right)\b", text)
    row = re.search(r"\b(top|middle|bottom)\b", text)
    fits = column is None or COLUMNS[thing["column"]] == column.group(1)
    return fits and (row is None or ROWS[thing["row"]] == row.group(1))


def score_caption(row: dict, hypothesis: str) -> dict[str, float]:
    """Count a caption's mentions: how many there are, are grounded, fit in size and place too, repeat, are missed."""
    things = row["objects"]
    mentions = []
    fitting = 0
    for sentence in SENTENCE.split(hypothesis):
        for size, colour, noun in MENTION.findall(sentence):
            mentions.append((colour, SHAPE_OF[noun]))
            same = [t for t in things if (t["colour"], t["shape"]) == mentions[-1]]
            fitting += any(size in ("", *SIZES[t["big"]]) and is_placed(sentence, t) for t in same)
    present = {(t["colour"], t["shape"]) for t in things}
    counts = Counter(mentions)
    return {
        "mentions": len(mentions),
        "grounded": sum(count for pair, count in counts.items() if pair in present),
        "fitting": fitting,
        "repeats": sum(count - 1 for count in counts.values()),
        "missed": len(present - set(counts)),
        "things": len(things),
    }
