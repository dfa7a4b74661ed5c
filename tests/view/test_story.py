"""Views that tell a story: valid XML, no script, the same bytes twice, and what they say is what the round says."""

import re
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from PIL import Image
from view_rounds import make_rounds, words

from glance import view
from glance.tree import build_budget_tree
from glance.view import story

ROUNDS = make_rounds()
LONG = max(ROUNDS, key=lambda r: r.accepted)
CUT = next(r for r in ROUNDS if r.truncated)
EVERY_VIEW = {
    "growth": lambda: story.growth(LONG, words),
    "growth from a few": lambda: story.growth(LONG.tree, first=3),
    "growth of nothing": lambda: story.growth(build_budget_tree([], [], budget=3)),
    "walk": lambda: story.walk(LONG, words),
    "walk cut": lambda: story.walk(CUT, words),
    "rhythm": lambda: story.rhythm({"a <b>": ROUNDS, "b": ROUNDS[:2]}),
    "rhythm of nothing": lambda: story.rhythm({"a": []}),
    "beside": lambda: story.beside(view.stream(ROUNDS, words), 'a "text" <b>', titles=["<one>"]),
}


@pytest.mark.parametrize("name", EVERY_VIEW)
def test_every_view_is_self_contained_xml_without_script_and_repeats(name):
    one, again = EVERY_VIEW[name](), EVERY_VIEW[name]()
    ET.fromstring(one.html)
    assert "<script" not in one.html and "\ue000" not in one.html and repr(one)
    assert "http" not in one.html.replace("http://www.w3.org/2000/svg", "")
    assert one.html == again.html
    rules = re.search(r"<style>(.*?)</style>", one.html, re.S).group(1)
    scope = re.search(r'<div id="(\w+)"', one.html).group(1)
    for selector in re.findall(r"(?:^|\})([^{}]+)\{", rules):
        plain = re.sub(r"\([^()]*(?:\([^()]*\)[^()]*)*\)", "", selector)
        assert all(part.lstrip().startswith(f"#{scope}") for part in plain.split(",")), f"{selector} leaks"


def test_growth_has_a_step_per_node_that_shows_the_nodes_so_far():
    one = story.growth(LONG, words, first=5)
    n = len(LONG.tree)
    assert one.html.count('type="radio"') == n == one.html.count('<g class="n k')
    assert re.search(r'-4" checked="checked"', one.html), "the fifth node's bar is chosen at first"
    assert all(f".k{i}{{--i:{i}}}" in one.html for i in range(n))
    total = float(np.exp(LONG.tree.logps).sum())
    assert repr(one).splitlines()[-1].endswith(f"expected to be accepted so far: {total:.2f}")
    assert "n a" not in one.html, "the target has not spoken yet"


def test_the_walk_names_every_choice_and_ends_with_the_bonus():
    lines = repr(story.walk(LONG, words)).splitlines()[1:]
    assert len(lines) == LONG.accepted + 1
    assert all(line.endswith("accepted") for line in lines[:-1]) and lines[-1].endswith("bonus, the end")
    cut = repr(story.walk(CUT, words)).splitlines()[1:]
    assert len(cut) == CUT.accepted and cut[-1].endswith("accepted")


def test_rhythm_has_a_bar_per_round_as_wide_as_its_tokens():
    bars = re.findall(r'class="bar[^"]*" x="[\d.]+" y="[\d.]+" width="([\d.]+)"', story.rhythm({"a": ROUNDS}).html)
    wide = np.array([float(bar) for bar in bars]) + 1.5
    tokens = np.array([len(r.committed) for r in ROUNDS])
    assert np.allclose(wide / wide.sum(), tokens / tokens.sum(), atol=2e-3)


def test_beside_embeds_image_files(tmp_path):
    Image.new("RGB", (4, 3)).save(tmp_path / "a.png")
    one = story.beside(tmp_path / "a.png", titles=["a page"])
    assert 'src="data:image/png;base64,' in one.html and "<b>a page</b>" in one.html
