"""The caption task: a scene of coloured shapes, and a description of all of them in a loosely fixed order.

Conventions: a scene has 5 to 7 shapes on a grid of 4 columns x 3 rows (64 px each), no two alike in colour and shape.
A caption says how many there are, then names every one in reading order, beginning anywhere and going round, each in a
sentence whose grammar, size word, noun and place are drawn freely: this is the task with the highest entropy.
"""

from __future__ import annotations

import random

from glance.pocket.canvas import COLOURS, SHAPES, Canvas, Spot
from glance.pocket.pages import Alternative, Draft, choose_font, fill

NOUNS = {
    "circle": ("circle", "disc", "ball", "dot"),
    "square": ("square", "box", "block"),
    "triangle": ("triangle", "wedge", "cone"),
    "cross": ("cross", "plus"),
}
SIZES = {True: ("big", "large", "huge"), False: ("small", "tiny", "little")}
COLUMNS = ("far left", "left", "right", "far right")
ROWS = ("top", "middle", "bottom")
NUMBERS = dict(enumerate(["one", "two", "three", "four", "five", "six", "seven"], 1))


def draw_shape(canvas: Canvas, thing: dict) -> None:
    """Draw one shape at its centre."""
    (x, y), r, pen, colour = thing["centre"], thing["radius"], canvas.pen, COLOURS[thing["colour"]]
    if thing["shape"] == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif thing["shape"] == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), fill=colour)
    elif thing["shape"] == "triangle":
        pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    else:
        pen.rectangle((x - r, y - r // 3, x + r, y + r // 3), fill=colour)
        pen.rectangle((x - r // 3, y - r, x + r // 3, y + r), fill=colour)


def place_shapes(rng: random.Random, height: int, count: int) -> tuple[Canvas, list[dict]]:
    """Draw `count` different shapes on a grid, in reading order."""
    canvas = Canvas(rng, font=choose_font(rng), size=14, height=height, textured=rng.random() < 0.8)
    pairs = rng.sample([(colour, shape) for colour in COLOURS for shape in SHAPES], count)
    left = rng.randint(24, 40)
    top = rng.randint(26, 38)
    things = []
    for (colour, shape), place in zip(pairs, sorted(rng.sample(range(4 * (height // 64)), count)), strict=True):
        column = place % 4
        row = place // 4
        big = rng.random() < 0.5
        centre = (64 * column + left + rng.randint(-5, 5), 64 * row + top + rng.randint(-5, 5))
        radius = rng.randint(18, 22) if big else rng.randint(9, 11)
        thing = {"colour": colour, "shape": shape, "big": big, "column": column, "row": row, "centre": centre}
        things.append(thing | {"radius": radius})
        draw_shape(canvas, things[-1])
    canvas.objects = things
    return canvas, things


def name_shape(rng: random.Random, thing: dict) -> str:
    """Name a shape with its colour and often its size."""
    words = [rng.choice(SIZES[thing["big"]])] if rng.random() < 0.6 else []
    words += [thing["colour"], rng.choice(NOUNS[thing["shape"]])]
    return ("an " if words[0][0] in "aeiou" else "a ") + " ".join(words)


def name_place(rng: random.Random, thing: dict) -> str:
    """Say where a shape is."""
    column = COLUMNS[thing["column"]]
    row = ROWS[thing["row"]]
    half = "left" if thing["column"] < 2 else "right"
    places = [f"at the {row} {column}", f"in the {row} {column}", f"in the {row} row, {column}"]
    return rng.choice([*places, f"on the {column}", f"on the {half} half"])


def say_thing(rng: random.Random, thing: dict) -> str:
    """Say one sentence about a shape."""
    name = name_shape(rng, thing)
    place = name_place(rng, thing)
    kind = rng.random()
    if kind < 0.3:
        return f"{name.capitalize()} {rng.choice(['lies', 'sits', 'rests', 'appears'])} {place}."
    if kind < 0.6:
        return f"{place.capitalize()} {rng.choice(['we find', 'there is', 'one sees', 'you can spot'])} {name}."
    if kind < 0.85:
        verb = rng.choice(["placed", "drawn", "painted", "set"])
        return f"{rng.choice(['Also', 'Further', 'Next'])}, {name} is {verb} {place}."
    return f"{rng.choice(['Then comes', 'Here is', 'I notice'])} {name} {place}."


def draw_scene(rng: random.Random, split: str) -> Draft:
    """Draw a scene and describe it freely."""
    canvas, things = place_shapes(rng, 192, rng.choice([5, 6, 6, 7]))
    start = 0 if rng.random() < 0.6 else rng.randrange(len(things))
    number = NUMBERS[len(things)]
    openers = (
        "The picture shows {} shapes.",
        "There are {} shapes in this scene.",
        "We can see {} shapes here.",
        "I see {} things.",
        "This scene has {} parts.",
    )
    pieces: Alternative = fill(rng.choice(openers), number)
    for thing in things[start:] + things[:start]:
        pieces += [Spot(" " + say_thing(rng, thing), thing["centre"])]
    if rng.random() < 0.5:
        pieces += [rng.choice([" The background is pale.", " The mood is calm.", " Overall it looks simple."])]
    prompt = rng.choice(["Describe the picture.", "Write a caption."])
    return Draft(canvas, "caption", [prompt], [[pieces]])


def draw_strip(rng: random.Random, split: str) -> Draft:
    """Draw a strip of shapes, 64 px high, and list them from left to right: practice for scenes."""
    canvas, things = place_shapes(rng, 64, rng.randint(1, 4))
    pieces: Alternative = []
    for thing in things:
        name = f"{name_shape(rng, thing)} on the {COLUMNS[thing['column']]}"
        pieces += ["\n"] * bool(pieces) + [Spot(name, thing["centre"])]
    return Draft(canvas, "strip", ["Describe the picture."], [[pieces]])
