"""Every table is written in one place; what it writes reads back as what it was given."""

import ast
import csv
import io
from pathlib import Path

import pandas as pd
import seaborn
from hypothesis import given, settings
from hypothesis import strategies as st

import glance
from glance.report import style, writer

NUMBERS = st.none() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1)
HEADS = ["task", "n", "tau"]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(WORDS, NUMBERS, NUMBERS), max_size=5))
def test_csv_reads_back_every_value_whatever_stands_beside_it(rows):
    """An integer beside a gap or a float stays an integer, and every float keeps its last digit."""
    text = writer.csv(writer.frame(rows, HEADS))
    head, *body = list(csv.reader(io.StringIO(text, newline="")))
    assert head == HEADS
    assert body == [["" if cell is None else str(cell) for cell in row] for row in rows]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(*[st.text("ab| \\$_", max_size=4)] * 3), max_size=5))
def test_every_line_of_markdown_has_the_same_columns(rows):
    lines = writer.markdown(writer.frame(rows, HEADS), right=["n"]).splitlines()
    assert lines[1] == "| --- | ---: | --- |"
    assert [line.count("|") - line.count("\\|") for line in lines] == [4] * (len(rows) + 2)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(*[st.text("ab-1.", min_size=1, max_size=9)] * 3), max_size=5))
def test_aligned_columns_end_or_begin_at_one_place(rows):
    cells = writer.frame(rows, HEADS)
    lines = writer.aligned(cells, right=["n", "tau"]).splitlines()
    assert [tuple(line.split()) for line in lines] == [tuple(HEADS), *rows]
    assert len({len(line) for line in lines}) == 1


def test_no_other_file_of_the_package_lays_out_a_table():
    """The rule under a markdown table's head, and a LaTeX table's environment, are spelled in one file alone."""
    package = Path(glance.__file__).parent
    spelled = set()
    for path in package.rglob("*.py"):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        if any(isinstance(text, str) and ("tabular" in text or text in ("---", "---:")) for text in texts):
            spelled.add(path.relative_to(package).as_posix())
    assert spelled == {"report/writer.py"}


def test_frames_are_pandas_and_colours_seaborns():
    assert isinstance(writer.frame([], HEADS), pd.DataFrame)
    palette = set(seaborn.color_palette("colorblind").as_hex())
    assert {look.color for look in (*style.ARMS.values(), *style.TASKS.values())} <= palette
    assert set(style.OWN_COLORS) <= palette
