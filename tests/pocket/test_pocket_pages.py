"""Pages: deterministic by seed, labelled where the ink is, and drawn from lexicons that do not meet."""

import json
import random

import numpy as np
import pytest

from glance.pocket.canvas import CHARACTERS, Ink, find_cell, find_slot
from glance.pocket.evalset import read_set, write_set
from glance.pocket.render import DRAW, TASKS, sample
from glance.pocket.scores import count_edits, find_asked_value, score_caption, score_reading
from glance.pocket.tokenizer import SPECIALS, build_tokenizer, collect_template_words
from glance.pocket.words import draw_word, is_reserved, known_words, read_list
from glance.tasks import read_task


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.mark.parametrize("task", DRAW)
def test_same_seed_same_page(task):
    one, two, other = sample(task, 3), sample(task, 3), sample(task, 4)
    assert one.image.tobytes() == two.image.tobytes() and one.answer == two.answer and one.prompt == two.prompt
    assert one.answer != other.answer
    assert sample(task, 3, "eval").answer != one.answer


@pytest.mark.parametrize("task", TASKS)
def test_answer_is_one_of_its_own_alternatives_and_long_enough_to_count_rounds(task, tokenizer):
    lengths = []
    for seed in range(60):
        page = sample(task, seed, "eval")
        assert page.image.size == (256, 192) and page.image.mode == "RGB"
        assert count_edits(page.parts, page.answer) == 0
        assert len(page.answer) == len(page.answer_source) and len(page.prompt) == len(page.prompt_source)
        lengths.append(len(tokenizer(page.answer)["input_ids"]) + 1)
    assert np.median(lengths) >= 60 and max(lengths) <= 128


@pytest.mark.parametrize("task", ["textvqa", "infovqa", "docvqa", "chartqa", "lines", "lines64"])
def test_every_drawn_character_is_labelled_in_its_own_slot(task):
    for seed in range(40):
        canvas = sample(task, seed).canvas
        labels = canvas.label_slots()
        letters = [(c, xy) for ink in canvas.ink for c, xy in zip(ink.text, ink.centres, strict=True) if c != " "]
        assert (labels > 0).sum() == len(letters)  # no two share a slot
        for letter, (x, y) in letters:
            assert 0 <= x < 256 and 0 <= y < canvas.height
            cell = find_cell((x, y), canvas.height)
            assert CHARACTERS[labels[cell, find_slot((x, y))]] == letter


def test_answer_characters_point_at_the_same_character_on_the_page():
    for task in ("chartqa", "docvqa", "infovqa", "textvqa"):
        page = sample(task, 11)
        labels, pointed = page.canvas.label_slots(), 0
        for letter, (cell, slot) in zip(page.answer, page.answer_source, strict=True):
            if slot >= 0 and letter != " ":
                assert CHARACTERS[labels[cell, slot]] == letter
                pointed += 1
        assert pointed > 20


def test_lexicons_do_not_meet():
    train, held = set(read_list("train")), set(read_list("held"))
    reserved = {word.lower() for word in read_list("reserved")}
    assert not train & held and not (train | held) & reserved
    assert all(3 <= len(word) <= 7 and word.isascii() and word.islower() for word in train | held)
    rng = random.Random(0)
    trained = {draw_word(rng, "train").lower() for _ in range(4000)}
    evaluated = {draw_word(rng, "eval").lower() for _ in range(4000)}
    assert not trained & evaluated
    assert all(word in train or not is_reserved(word) for word in trained)
    assert all(word in held or is_reserved(word) for word in evaluated)
    assert not {w for w in trained | evaluated if w in reserved}
    assert held <= known_words()


def test_shipped_words_on_eval_pages_are_never_training_words():
    train, fixed = set(read_list("train")), {word.lower() for word in read_list("reserved")}
    for task in ("textvqa", "infovqa", "docvqa", "chartqa"):
        for seed in range(40):
            for ink in sample(task, seed, "eval").canvas.ink:
                for word in ink.text.lower().split():
                    assert not word.isalpha() or word in fixed or word not in train


def test_reserved_list_holds_every_template_word():
    assert set(collect_template_words(60)) <= set(read_list("reserved"))


@pytest.mark.parametrize(
    "text", ["The chart Foo has 4 values.", "  two  spaces\n\ttab", "naïve 東京 €5", "The picture", ""]
)
def test_tokenizer_round_trips(text, tokenizer):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_spells_page_words_and_keeps_template_words_whole(tokenizer, tmp_path):
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("The value of Xyzzy is 12.4.")["input_ids"])
    assert pieces == ["The", "Ġvalue", "Ġof", "ĠX", "y", "z", "z", "y", "Ġis", "Ġ1", "2", ".", "4", "."]
    assert tokenizer.convert_tokens_to_ids(list(SPECIALS)) == list(range(len(SPECIALS)))
    assert tokenizer.mask_token == "<|mask|>" and tokenizer.eos_token == "<|im_end|>"


def test_rendered_sets_are_valid_task_files(tmp_path):
    write_set(tmp_path, "eval", 3)
    for task in TASKS:
        prompts = read_task(tmp_path, task)
        assert len(prompts) == 3 and all(len(prompt.images) == 1 for prompt in prompts)
    page, row = sample("docvqa", 2, "eval"), read_set(tmp_path, "docvqa")[2]
    from PIL import Image

    assert Image.open(tmp_path / row["image"]).convert("RGB").tobytes() == page.image.tobytes()
    assert score_reading(row, page.answer)["character_error"] == 0


def test_error_is_counted_against_the_nearest_phrasing():
    assert count_edits([["a cat", "one cat"], [" sat"]], "one cat sits") == 2
    assert count_edits([["abc"]], "") == 3 and count_edits([["abc"], [""]], "xabc") == 1
    assert find_asked_value("x: 1\nThe value of Foo is 12.4.") == "12.4"
    assert find_asked_value("a\nThe Street of X is 9 Foo. The next line is Tax: 1.20.") == "9 Foo"


def test_caption_scores_count_what_is_there():
    row = {"objects": [{"colour": "red", "shape": "cross", "big": True, "column": 0, "row": 0}]}
    good = score_caption(row, "There are one shapes. A big red plus lies at the top far left.")
    assert (good["mentions"], good["grounded"], good["fitting"], good["repeats"], good["missed"]) == (1, 1, 1, 0, 0)
    bad = score_caption(row, "A red plus sits on the right. Also, a blue ball is set in the top left. A red cross.")
    assert (bad["mentions"], bad["grounded"], bad["fitting"], bad["repeats"]) == (3, 2, 1, 1)


def test_own_captions_score_as_grounded():
    for seed in range(30):
        page = sample("caption", seed, "eval")
        row = {"objects": page.objects}
        scores = score_caption(row, page.answer)
        assert scores["mentions"] == scores["grounded"] == scores["fitting"] == len(page.objects)
        assert scores["repeats"] == scores["missed"] == 0


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ValueError, match="unknown pocket task 'poem'"):
        sample("poem", 0)
    with pytest.raises(ValueError, match="unknown split 'test'"):
        sample("caption", 0, "test")
    with pytest.raises(FileNotFoundError, match="no such task file"):
        read_set(tmp_path, "docvqa")
    (tmp_path / "docvqa.jsonl").write_text(json.dumps({"image": "a.png", "prompt": "?"}) + "\n")
    with pytest.raises(ValueError, match=r"docvqa.jsonl:1: .*'answer' or 'objects'"):
        read_set(tmp_path, "docvqa")


def test_ink_is_hashable_and_remembers_its_text():
    assert Ink("ab", ((1.0, 2.0), (3.0, 2.0))) == Ink("ab", ((1.0, 2.0), (3.0, 2.0)))
