"""Views as text: valid XML, counts, nesting, places, escaping, determinism, size. What a browser does is in its own file."""

import io
import re
import subprocess
import sys
import unicodedata
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from view_rounds import make_rounds, words

from glance import view
from glance.records import round_row, unpack_round
from glance.tree import ancestor_matrix, build_budget_tree
from glance.view import pages
from glance.view.drawing import BONUS, GUTTER, place, scene_of, speller, visible, width_of

SVG = "{http://www.w3.org/2000/svg}"
ROUNDS = make_rounds()
SMALL = make_rounds(budget=12, n_offsets=5, k=4)
LONG = max(ROUNDS, key=lambda r: r.accepted)
EVERY_VIEW = {
    "tree": lambda: view.tree(LONG, words),
    "bare tree": lambda: view.tree(LONG.tree),
    "mask": lambda: view.mask(LONG, words),
    "marginals": lambda: view.marginals(LONG, words),
    "stream": lambda: view.stream(ROUNDS, words),
    "round": lambda: view.round(LONG, ROUNDS, words),
    "decode": lambda: view.decode(ROUNDS, words, prompt='a "prompt" <b>\ue000'),
    "no rounds": lambda: view.decode([], words),
    "empty tree": lambda: view.tree(build_budget_tree([], [], budget=3)),
}


class ByteTokenizer:
    """A byte-level tokenizer: a token is a byte, written as GPT-2's vocabulary writes it."""

    plain = (*range(33, 127), *range(161, 173), *range(174, 256))

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")

    def convert_ids_to_tokens(self, ids):
        hidden = [b for b in range(256) if b not in self.plain]
        return [chr(b) if b in self.plain else chr(256 + hidden.index(b)) for b in ids]


@st.composite
def trees(draw):
    n_offsets, k = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    logps = -np.sort(rng.exponential(draw(st.sampled_from([0.3, 1.0, 3.0])), (n_offsets, k)), axis=1)
    return build_budget_tree(rng.integers(0, 30, (n_offsets, k)), logps, budget=draw(st.integers(1, 60)), branch_k=k)


def svg_of(one, kind):
    return next(e for e in ET.fromstring(one.html).iter(SVG + "svg") if e.get("class") == kind)


def kinds(group):
    return (group.get("class") or "").split()


@pytest.mark.parametrize("name", EVERY_VIEW)
def test_every_view_is_self_contained_xml_without_script(name):
    one = EVERY_VIEW[name]()
    root = ET.fromstring(one.html)  # the whole, and so each SVG in it
    assert root.tag == "div" and one._repr_html_() == one.html and repr(one) == one.text != ""
    assert not re.search(r"<script|\bon\w+=|url\(|@import|<link|<img|<iframe", one.html)
    assert set(re.findall(r"https?://[^\"]*", one.html)) <= {"http://www.w3.org/2000/svg"}
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids)) and all(i.startswith(root.get("id")) for i in ids)
    assert {e.get("for") for e in root.iter() if e.get("for")} <= set(ids)
    for rule in re.sub(r"\{[^{}]*\}", "{}", root.find("style").text).split("}"):
        assert not rule.strip() or rule.lstrip().startswith(("#" + root.get("id"), ".p:has"))  # the latter are nested


@pytest.mark.parametrize("name", EVERY_VIEW)
def test_same_bytes_twice(name):
    assert EVERY_VIEW[name]().html == EVERY_VIEW[name]().html


def test_same_bytes_in_another_process_and_numpy_alone():
    code = (
        "import sys; sys.path.insert(0, 'tests'); from view_rounds import make_rounds, words; from glance import view;"
        "from hashlib import sha256; print(sha256(view.decode(make_rounds(), words).html.encode()).hexdigest());"
        "assert not {'matplotlib', 'torch', 'transformers'} & set(sys.modules)"
    )
    hashes = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "12"
    ]
    assert hashes[0] == hashes[1] != b""


@given(trees())
@settings(deadline=None, max_examples=60)
def test_a_group_per_node_inside_its_ancestors(tree):
    drawing = svg_of(view.tree(tree), "tree")
    found = {}

    def descend(group, above):
        if "n" in kinds(group):
            node = int(kinds(group)[1][1:])
            found[node] = above
            above = [*above, node]
        for child in group.findall(SVG + "g"):
            descend(child, above)

    (root,) = [g for g in drawing.findall(SVG + "g") if kinds(g) == ["r"]]
    descend(root, [])
    assert found == {i: tree.path(i)[:-1] for i in range(len(tree))}
    assert len(root.findall(f".//{SVG}path")) == len(tree)  # one edge each
    assert len(root.findall(f".//{SVG}title")) == len(tree) + 1


@given(trees())
@settings(deadline=None, max_examples=100)
def test_places_are_free_the_spine_is_straight_and_no_edges_cross(tree):
    at = place(scene_of(tree))
    assert len({(x, y) for x, y, _ in at.boxes.values()}) == len(tree) + 1
    assert {at.boxes[i][1] for i in tree.spine()} == {at.boxes[-1][1]}
    drops: dict[int, list[tuple[int, int, int]]] = {}  # per gutter: parent, and from where to where its edges go down
    for i, node in enumerate(tree):
        x, y, _ = at.boxes[i]
        px, py, pwide = at.boxes[node.parent]
        assert x == px + pwide + GUTTER and y >= py
        drops.setdefault(x, []).append((node.parent, py, y))
    for edges in drops.values():
        for parent, top, bottom in edges:
            assert not any(other != parent and (top <= a <= bottom or top <= b <= bottom) for other, a, b in edges)


def test_a_round_shows_path_bonus_and_what_the_target_would_have_said():
    for r in ROUNDS:
        drawing = svg_of(view.tree(r, words), "tree")
        accepted = {int(kinds(g)[1][1:]) for g in drawing.iter(SVG + "g") if kinds(g)[-1:] == ["a"]}
        assert accepted == set(r.path)
        bonuses = [g for g in drawing.iter(SVG + "g") if kinds(g) == ["b"]]
        assert [g.find(SVG + "text").text for g in bonuses] == [
            visible(words(b), 12) for b in [r.bonus] if b is not None
        ]
        for group in drawing.iter(SVG + "g"):
            if "n" not in kinds(group):
                continue
            node = int(kinds(group)[1][1:])
            n, title = r.tree[node], group.find(SVG + "title").text
            here, then = (words(r.choices[row]) for row in (n.parent + 1, node + 1))
            agrees = "agrees" if here == words(n.token) else visible(here, 24)
            p = np.exp(n.logp - (r.tree.logps[n.parent] if n.parent >= 0 else 0))
            assert title.split("\n") == [
                visible(words(n.token), 40),
                f"offset {n.depth}, rank {n.rank}, node {node}",
                f"p {p:.2g}, path {np.exp(n.logp):.2g}",
                f"target {agrees}, then {visible(then, 24)}",
            ]
    headings = [t.text for t in drawing.findall(f"{SVG}g[@class='h']/{SVG}text")]
    assert headings == ["root", *(f"offset {d}" for d in range(1, len(headings)))]


def test_opacity_follows_the_path_probability():
    drawing = svg_of(view.tree(LONG.tree), "tree")
    for group in drawing.iter(SVG + "g"):
        if "n" in kinds(group):
            p = np.exp(LONG.tree.logps[int(kinds(group)[1][1:])])
            assert float(group.get("style").removeprefix("--p:")) == pytest.approx(p**0.5, abs=0.006)


@given(trees())
@settings(deadline=None, max_examples=40)
def test_the_mask_is_the_ancestor_matrix(tree):
    drawing = svg_of(view.mask(tree), "mask")
    rows = [g for g in drawing.iter(SVG + "g") if "m" in kinds(g)]
    strokes = [re.findall(r"M(\d+) [\d.]+h(\d+)", g.find(SVG + "path").get("d")) for g in rows]
    left, pitch = (int(number) for number in strokes[0][0])  # the root sees itself alone
    seen = np.zeros((len(rows), len(rows)), dtype=bool)
    for row, runs in enumerate(strokes):
        for start, length in runs:
            seen[row, (int(start) - left) // pitch : (int(start) + int(length) - left) // pitch] = True
    assert (seen == ancestor_matrix(tree)).all()


@pytest.mark.parametrize("seed", range(6))
def test_a_tree_of_63_nodes_stays_under_20_kB(seed):
    for r in make_rounds(seed=seed):
        assert len(r.tree) == 63
        assert len(view.tree(r, words).html.encode()) < 20_000


def test_a_big_tree_is_cut_with_a_count_and_keeps_the_path():
    r = next(r for r in make_rounds(budget=600, seed=3) if max(r.path, default=0) > 40)
    one = view.tree(r, words, cap=30)
    drawn = [g for g in svg_of(one, "tree").iter(SVG + "g") if "n" in kinds(g)]
    assert len(drawn) == 30 and {f"k{i}" for i in r.path} <= {kinds(g)[1] for g in drawn}
    assert f"{len(r.tree)} nodes" in one.html and "30 of the nodes shown" in one.html
    assert "30 of the nodes shown" in view.decode([r], words, cap=30).html
    assert len([g for g in svg_of(view.mask(r, cap=30), "mask").iter(SVG + "g") if "m" in kinds(g)]) == 31


@given(st.lists(st.text(max_size=12), min_size=1, max_size=6))
@settings(deadline=None, max_examples=50)
def test_any_token_text_is_safe(texts):
    def spell(token):
        return texts[token % len(texts)]

    for one in (view.round(SMALL[0], SMALL, spell), view.marginals(SMALL[0], spell)):
        root = ET.fromstring(one.html)
        said = "".join(root.itertext())
        assert not any(unicodedata.category(c) in ("Cs", "Co", "Cn") for c in said)
        assert not any(
            unicodedata.bidirectional(c) in ("RLO", "LRO", "RLE", "LRE", "RLI", "LRI", "FSI", "PDF") for c in said
        )
    first = svg_of(one, "tree").find(f"{SVG}g/{SVG}title").text.split("\n")[0]
    assert first == visible(spell(int(SMALL[0].top_ids[0][0])), 40)


@given(st.text(max_size=30), st.integers(2, 20))
def test_visible_hides_nothing_and_keeps_its_width(text, cells):
    shown = visible(text)
    assert shown and not any(unicodedata.category(c)[0] in "CZ" for c in shown)
    cut = visible(text, cells)
    assert width_of(cut) <= cells and (cut == shown if width_of(shown) <= cells else cut[-1] == "…")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" <a", "␣<a"),
        ("\n", "⏎"),
        ("", "∅"),
        ("\t\x00", "⇥\\x00"),
        ("\u202e", "\\u202e"),
        ("\u0301x", "◌\u0301x"),
        ("\xa0", "\\xa0"),
    ],
)
def test_visible_by_example(text, shown):
    assert visible(text) == shown


def test_parts_of_a_character_are_bytes_in_a_tree_and_whole_in_the_stream():
    tokenizer = ByteTokenizer()
    spell = speller(tokenizer)
    assert [spell(b) for b in "é ".encode()] == ["\\xc3", "\\xa9", " "]
    assert speller(None)(7) == "7" and speller(words)(0) == words(0)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
def test_pieces_join_to_the_text(text):
    ids = list(text.encode())
    pieces = pages.token_pieces(ids, ByteTokenizer())
    assert len(pieces) == len(ids)
    if "\ufffd" not in text:
        assert "".join(pieces) == text


def test_the_stream_has_a_seam_per_round_and_all_of_the_text():
    root = ET.fromstring(view.stream(ROUNDS, words).html)
    chunks = [e for e in root.iter("span") if kinds(e)[:1] == ["c"]]
    assert len(chunks) == len(ROUNDS) + 1
    for chunk, r in zip(chunks[1:], ROUNDS, strict=True):
        text = "".join(chunk.itertext()).replace("⏎", "")
        assert text == "".join(words(t) for t in r.committed).replace("\u202e", "\\u202e")
        assert chunk.get("data-t").startswith(
            f"round {r.index + 1}: accepted {r.accepted} of 63 nodes, entropy {r.entropy:.2f}"
        )
        assert [u.text for u in chunk.findall("u")] == [words(b) for b in [r.bonus] if b is not None]


def test_decode_has_a_radio_button_per_round_and_says_tau():
    one = view.decode(ROUNDS, words, prompt="what?")
    radios = [e for e in ET.fromstring(one.html).iter("input") if e.get("type") == "radio"]
    assert len(radios) == len(ROUNDS) and [r.get("checked") for r in radios[:2]] == ["checked", None]
    assert len({r.get("name") for r in radios}) == 1
    assert all(r.get("data-lm-suppress-shortcuts") for r in radios)  # JupyterLab leaves the arrow keys to them
    n_tokens = sum(len(r.committed) for r in ROUNDS)
    assert f"{n_tokens} tokens in {len(ROUNDS)} rounds, tau {n_tokens / len(ROUNDS):.2f}" in one.html
    assert one.text.count("\n") == len(ROUNDS)


def test_marginals_mark_what_the_tree_uses_and_what_was_accepted():
    cells = list(svg_of(view.marginals(LONG, words), "tree").iter(SVG + "g"))
    assert len(cells) == LONG.top_ids.size
    assert sum(kinds(g) == ["a"] for g in cells) == LONG.accepted
    known = {(n.depth, n.rank) for n in LONG.tree}
    assert sum(kinds(g) != ["o"] for g in cells) - any(kinds(g) == ["b"] for g in cells) <= len(known)


def test_text_of_a_tree():
    tree = LONG.tree
    lines = repr(view.tree(LONG, words)).splitlines()
    assert len(lines) == 2 + len(tree) + (LONG.bonus is not None)
    assert sum(line.startswith("*") for line in lines) == LONG.accepted
    assert repr(tree) == view.tree_text(tree) and tree._repr_html_() == view.tree(tree).html
    assert all(line.startswith("  ") for line in repr(tree).splitlines()[2:])


def test_the_static_twin_stands_where_the_view_stands():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figure = view.tree_figure(LONG, words)
    (axes,) = figure.axes
    at = place(scene_of(LONG, words))
    boxes = [patch for patch in axes.patches if type(patch).__name__ == "FancyBboxPatch"]
    assert {(b.get_x(), b.get_y() + 10, b.get_width()) for b in boxes} == set(at.boxes.values())
    assert BONUS in at.boxes and len(axes.lines) == len(boxes) - 1
    assert figure.get_figwidth() == 6.75
    files = [io.BytesIO(), io.BytesIO()]
    for file in files:
        view.tree_figure(ROUNDS[0].tree).savefig(file, format="png")
    assert files[0].getvalue() == files[1].getvalue()


def test_marginals_of_a_round_read_from_a_file_are_refused():
    row = round_row(SMALL[0], arm="tree", task="x", prompt=1, warmup=False, trees=True)
    with pytest.raises(ValueError, match="round 0 was read from a file, which keeps no marginals"):
        view.marginals(unpack_round(row))
