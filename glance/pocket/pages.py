"""The four reading tasks and plain lines: what is drawn, what is asked, what a right answer says.

Conventions: an answer is a row of *segments*, each a list of equally right alternatives, of which one is drawn; tasks
differ in how many alternatives they allow (chartqa none, docvqa one place, infovqa one per card, textvqa every sentence),
so that their entropies order as the paper's tasks do. Values are first transcribed, then said again in a sentence; a
look-up names the value asked for in that sentence. Pieces that are `Ink` or `Spot` remember their place on the page.
This file does not know of tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from glance.pocket.canvas import COLOURS, FONTS, Canvas, Ink, Spot, draw_dark, draw_pale
from glance.pocket.words import draw_date, draw_money, draw_number, draw_word, draw_words

Piece = str | Ink | Spot
Alternative = list[Piece]

HEADINGS = ("Invoice", "Receipt", "Letter", "Report")
KEYS = [
    "Date",
    "Total",
    "Tax",
    "Name",
    "City",
    "Item",
    "Price",
    "Phone",
    "Order",
    "Amount",
    "Balance",
    "Street",
    "Agent",
    "Room",
    "Weight",
    "Table",
    "Ticket",
    "Account",
]
ATTRIBUTES = ("Age", "Size", "Cost", "Speed", "Rank", "Team", "Home", "Code")
CARRIERS = ("sign", "label", "poster", "banner")


@dataclass
class Draft:
    """A drawn page with its question and the segments of its answer."""

    canvas: Canvas
    kind: str
    prompt: Alternative
    segments: list[list[Alternative]]


def fill(template: str, *pieces: Piece) -> Alternative:
    """Put pieces into the `{}` of a template, keeping what they are."""
    texts = template.split("{}")
    if len(texts) != len(pieces) + 1:
        raise ValueError(f"{template!r} has {len(texts) - 1} places for {len(pieces)} pieces")
    row: Alternative = [texts[0]]
    for piece, text in zip(pieces, texts[1:], strict=True):
        row += [piece, text]
    return [piece for piece in row if piece != ""]


def choose_font(rng: random.Random) -> str:
    """Draw one of the fonts."""
    return rng.choice(list(FONTS))


def draw_lines(rng: random.Random, split: str, height: int) -> Draft:
    """Draw a few lines of words and numbers anywhere: practice for reading."""
    size = rng.choice([13, 14, 15, 16, 17, 18] + ([20, 24] if rng.random() < 0.3 else []))
    canvas = Canvas(rng, font=choose_font(rng), size=size, height=height, textured=rng.random() < 0.3)
    if rng.random() < 0.3:
        canvas.colour = rng.choice(list(COLOURS))
    colour = COLOURS[canvas.colour] if canvas.colour else draw_dark(rng)
    step = round(size * 1.75)
    lines = []
    places = list(range(rng.randint(0, 8), height - size - 3, step))
    if height > 64:
        places = sorted(rng.sample(places, min(len(places), rng.randint(2, 4))))
    for y in places:
        x = rng.randint(2, 60)
        text = ""
        for _ in range(rng.randint(1, 4)):
            kind = rng.random()
            if kind < 0.65:
                word = draw_word(rng, split)
            else:
                word = draw_number(rng) if kind < 0.9 else rng.choice([draw_money, draw_date])(rng)
            longer = f"{text} {word}{':' if rng.random() < 0.15 else ''}".strip()
            if x + canvas.measure(longer) > 254:
                break
            text = longer
        if text:
            lines.append(canvas.write(x, y + rng.randint(-1, 1) if y else y, text, colour))
    pieces: Alternative = []
    for line in lines:
        pieces += ["\n"] * bool(pieces) + [line]
    return Draft(canvas, "lines", ["Transcribe the lines."], [[pieces]])


def place_bars(canvas: Canvas, labels: list[str], values: list[str], dark) -> list[tuple[Ink, Ink]]:
    """Draw horizontal bars with the label before and the value after each."""
    rng = canvas.rng
    top = max(float(v) for v in values)
    y = rng.randint(30, 36)
    step = rng.randint(28, 31)
    left = max(canvas.measure(label) for label in labels) + rng.randint(6, 14)
    room = 250 - left - max(canvas.measure(value) for value in values) - 8
    rows = []
    for label, value in zip(labels, values, strict=True):
        name = canvas.write(rng.randint(3, 6), y, label, dark)
        length = 6 + int((room - 6) * float(value) / top)
        box = (left, y + 2, left + length, y + canvas.size)
        canvas.pen.rectangle(box, fill=rng.choice(list(COLOURS.values())))
        rows.append((name, canvas.write(left + length + 6, y, value, dark)))
        y += step
    return rows


def place_columns(canvas: Canvas, labels: list[str], values: list[str], dark) -> list[tuple[Ink, Ink]]:
    """Draw three vertical bars, or points on a line, with labels below and values above."""
    rng = canvas.rng
    top = max(float(v) for v in values)
    rows = []
    points = []
    base = rng.randint(150, 160)
    is_line = rng.random() < 0.4
    colour = rng.choice(list(COLOURS.values()))
    for i, (label, value) in enumerate(zip(labels, values, strict=True)):
        x = 4 + 84 * i + rng.randint(0, 3)
        height = 8 + int(70 * float(value) / top)
        if not is_line:
            canvas.pen.rectangle((x + 8, base - height, x + 36, base), fill=rng.choice(list(COLOURS.values())))
        points.append((x + 22, base - height))
        name = canvas.write(x, base + 6, label, dark)
        rows.append((name, canvas.write(x + 6, base - height - canvas.size - 8, value, dark)))
    if is_line:
        canvas.pen.line(points, fill=colour, width=2)
        for x, y in points:
            canvas.pen.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)
    return rows


def draw_chart(rng: random.Random, split: str) -> Draft:
    """Draw a chart of 3 to 5 values; ask for its table, or for one value."""
    canvas = Canvas(rng, font=choose_font(rng), size=rng.choice([14, 15, 16]))
    flat = rng.random() < 0.6
    count = rng.choice([3, 4, 4, 5]) if flat else 3
    if not flat and canvas.size > 15:
        canvas.size = 14
    title, *labels = draw_words(rng, split, count + 1, 7 if flat else 6)
    while len({*(values := [draw_number(rng) for _ in range(count)])}) < count:
        pass
    dark = draw_dark(rng)
    head = canvas.write(rng.randint(20, 150), rng.randint(1, 7), title, dark)
    rows = (place_bars if flat else place_columns)(canvas, labels, values, dark)
    body = fill("The chart {} has {} values.\n", head, str(count))
    for name, value in rows:
        body += fill("{}: {}\n", name, value)
    if rng.random() < 0.5:
        (first, low), (last, high) = rows[0], rows[-1]
        tail = fill("The first value is {} for {} and the last is {} for {}.", low, first, high, last)
        return Draft(canvas, "table", ["Read the chart as a table."], [[body + tail]])
    name, value = rng.choice(rows)
    tail = fill("In the chart {} the value of {} is {}.", head, name, value)
    return Draft(canvas, "lookup", fill("What is the value of {}?", name), [[body + tail]])


def draw_value(rng: random.Random, split: str, key: str) -> str:
    """Draw what stands behind a key of a form."""
    if key == "Date":
        return draw_date(rng)
    if key in ("Total", "Tax", "Price", "Amount", "Balance"):
        return draw_money(rng)
    if key in ("Phone", "Order", "Account", "Ticket"):
        return str(rng.randint(1000, 99999))
    if key in ("Room", "Weight", "Table"):
        return draw_number(rng)
    if key == "Street":
        return f"{rng.randint(1, 99)} {draw_word(rng, split)}"
    return " ".join(draw_words(rng, split, 2, 6)) if rng.random() < 0.5 else draw_word(rng, split)


def draw_form(rng: random.Random, split: str) -> Draft:
    """Draw a form of 3 to 5 fields under a heading; ask for all of it, or for one field."""
    canvas = Canvas(rng, font=choose_font(rng), size=rng.choice([14, 15, 16]))
    dark = draw_dark(rng)
    count = rng.choice([3, 4, 4, 5])
    left = rng.randint(4, 30)
    y = rng.randint(2, 6)
    heading = rng.choice(HEADINGS)
    company = draw_word(rng, split)
    kind = canvas.write(left, y, heading, dark)
    owner = canvas.write(left + canvas.measure(heading + " "), y, company, dark)
    canvas.pen.line((4, y + 22, 250, y + 22), fill=dark, width=1)
    keys = rng.sample(KEYS, count)
    column = left + max(canvas.measure(key + ": ") for key in keys) + rng.randint(2, 12) if rng.random() < 0.6 else 0
    step = rng.randint(27, 31)
    y = y + rng.randint(27, 31)
    rows = []
    for key in keys:
        value = draw_value(rng, split, key)
        x = column or left + canvas.measure(key + ": ")
        while x + canvas.measure(value) > 253:
            value = draw_value(rng, split, key)
            x = left + canvas.measure(key + ": ")
        name = canvas.write(left, y, key, dark)
        canvas.write(left + canvas.measure(key), y, ":", dark)
        rows.append((name, canvas.write(x, y, value, dark)))
        y += step
    heads = [fill("{} of {}.\n", kind, owner), fill("It is a {} of {}.\n", kind, owner)]
    body: Alternative = []
    for name, value in rows:
        body += fill("{}: {}\n", name, value)
    if rng.random() < 0.5:
        (first, one), (last, other) = rows[0], rows[-1]
        tail = fill("The first line of {} is {}: {} and the last is {}: {}.", owner, first, one, last, other)
        return Draft(canvas, "table", ["Transcribe the form."], [heads, [body + tail]])
    i = rng.randrange(count)
    tail = fill("The {} of {} is {}.", rows[i][0], owner, rows[i][1])
    if i < count - 1:
        tail += fill(" The next line is {}: {}.", *rows[i + 1])
    else:
        tail += fill(" The line before is {}: {}.", *rows[i - 1])
    return Draft(canvas, "lookup", fill("What is the {}?", rows[i][0]), [heads, [body + tail]])


def draw_cards(rng: random.Random, split: str) -> Draft:
    """Draw 3 or 4 cards with two attributes each; ask for a summary, or for one attribute of one card."""
    canvas = Canvas(rng, font=choose_font(rng), size=rng.choice([13, 14]))
    count = rng.choice([3, 3, 4])
    names = draw_words(rng, split, count)
    attributes = rng.sample(ATTRIBUTES, 2)
    cards = []
    corners = sorted(rng.sample([(0, 0), (128, 0), (0, 96), (128, 96)], count), key=lambda p: (p[1], p[0]))
    for name, (x, y) in zip(names, corners, strict=True):
        dark = draw_dark(rng)
        canvas.pen.rectangle((x + 2, y + 2, x + 125, y + 93), fill=draw_pale(rng), outline=dark)
        left = x + rng.randint(5, 16)
        top = y + rng.randint(4, 9)
        card: list[Ink] = [canvas.write(left, top, name, dark)]
        for attribute in attributes:
            value = draw_word(rng, split, 6) if attribute in ("Team", "Home") else draw_number(rng)
            top += rng.randint(25, 28)
            card.append(canvas.write(left, top, attribute, dark))
            card.append(canvas.write(left + canvas.measure(attribute + " "), top, value, dark))
        cards.append(card)
    number = str(count)
    opener = [fill(text, number) for text in ("There are {} cards.", "I count {} cards.", "The page shows {} cards.")]
    segments = [opener]
    for card in cards:
        verbs = ("has", "comes with", "shows")
        segments.append([fill(f"\n{{}} {verb} {{}} {{}} and {{}} {{}}.", *card) for verb in verbs])
    if rng.random() < 0.5:
        ends = (cards[0][0], cards[-1][0])
        segments.append([fill(f"\nThe first card {verb} {{}} and the last {{}}.", *ends) for verb in ("is", "shows")])
        return Draft(canvas, "table", ["Summarise each card."], segments)
    card = rng.choice(cards)
    j = rng.choice([1, 3])
    asked = (card[j], card[0], card[j + 1])
    segments.append([fill("\nThe {} of {} is {}.", *asked), fill("\nSo the {} of {} is {}.", *asked)])
    return Draft(canvas, "lookup", fill("What is the {} of {}?", card[j], card[0]), segments)


def say_sign(words: list[Ink], colour: Spot, carrier: str, place: Spot, number: str) -> list[list[Alternative]]:
    """List the sentences that describe a sign, each with its alternatives."""
    quoted = "{}" + " {}" * (len(words) - 1)
    listed = "{}" + ", {}" * (len(words) - 2) + " and {}"
    return [
        [
            fill(f'The {{}} {carrier} reads "{quoted}".', colour, *words),
            fill(f'The {carrier} says "{quoted}" in {{}} letters.', *words, colour),
            fill(f'In {{}}, the words "{quoted}" are written on the {carrier}.', colour, *words),
            fill(f'You can read "{quoted}" on it, in {{}}.', *words, colour),
        ],
        [
            fill(" It is in the {} part of the picture.", place),
            fill(" The text sits at the {}.", place),
            fill(f" The {carrier} is placed at the {{}}.", place),
        ],
        [
            fill(f" There are {number} words: {listed}.", *words),
            fill(f" It has {number} words: {listed}.", *words),
            fill(f" I count {number} words: {listed}.", *words),
        ],
        [
            fill(" The first word is {}.", words[0]),
            fill(" It starts with {}.", words[0]),
            fill(" It ends with {}.", words[-1]),
            fill(" The last word is {}.", words[-1]),
        ],
    ]


def draw_sign(rng: random.Random, split: str) -> Draft:
    """Draw a sign of 2 to 4 coloured words on a textured ground; ask what it says."""
    count = rng.choice([2, 3, 3, 4, 4])
    canvas = Canvas(rng, font=choose_font(rng), size=rng.choice([16, 18, 20, 24]), textured=True)
    canvas.colour = rng.choice([name for name in COLOURS if name != "black"])
    colour = COLOURS[canvas.colour]
    carrier = rng.choice(CARRIERS)
    texts = draw_words(rng, split, count)
    width = max(canvas.measure(text) for text in texts)
    step = round(canvas.size * 1.6)
    x = rng.randint(6, 248 - width)
    y = rng.randint(6, 186 - step * count)
    box = (x - 5, y - 4, x + width + 4, y + step * count)
    canvas.pen.rectangle(box, fill=draw_pale(rng), outline=colour)
    words = []
    centred = rng.random() < 0.4
    for i, text in enumerate(texts):
        shift = (width - canvas.measure(text)) // 2 if centred else 0
        words.append(canvas.write(x + shift, y + i * step, text, colour))
    middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    place = f"{'upper' if middle[1] < 96 else 'lower'} {'left' if middle[0] < 128 else 'right'}"
    segments = say_sign(
        words, Spot(canvas.colour, words[0].centres[0]), carrier, Spot(place, words[0].centres[0]), str(count)
    )
    return Draft(canvas, "text", [f"What does the {carrier} say?"], segments)
