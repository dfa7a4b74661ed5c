"""Task files are read whole and checked before any work; a bad line names file, line and what is wrong."""

import json

import pytest
import toy_run
import toys
from PIL import Image

from glance.tasks import TASKS, encode, load_tasks, read_task, task_names


@pytest.fixture
def data(tmp_path):
    return toy_run.write_tasks(tmp_path / "data")


def test_rows_images_and_order(data):
    assert task_names(data) == ["caption", "docvqa"]
    assert [task for task in TASKS if task in task_names(data)] == task_names(data), "the paper's order"
    prompts = load_tasks(data, (), 3)
    assert [(p.task, p.index) for p in prompts] == [(t, i) for t in ("caption", "docvqa") for i in range(4)]
    assert all(len(p.images) == 1 and p.images[0].is_file() and p.answer == str(p.index) for p in prompts)


def test_several_images_none_and_extra_keys(data):
    (data / "mixed.jsonl").write_text(
        json.dumps({"images": ["caption/0.png", "caption/1.png"], "prompt": "two", "font": "serif"})
        + "\n\n"
        + json.dumps({"prompt": "none"})
        + "\n"
    )
    two, none = read_task(data, "mixed")
    assert len(two.images) == 2 and two.extra == {"font": "serif"} and two.answer is None
    assert none.images == () and none.index == 1


GOOD = '{"image": "caption/0.png", "prompt": "fine"}'


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "a row is an object, got list"),
        ('{"image": "caption/0.png"}', "'prompt' must be a non-empty string, got None"),
        ('{"image": "caption/0.png", "prompt": "  "}', "'prompt' must be a non-empty string"),
        ('{"image": "caption/0.png", "prompt": 3}', "got 3"),
        ('{"image": "caption/9.png", "prompt": "x"}', "image 'caption/9.png' does not exist"),
        ('{"image": "../secret.png", "prompt": "x"}', "leaves the data folder"),
        ('{"image": "/etc/passwd", "prompt": "x"}', "leaves the data folder"),
        ('{"image": "caption.jsonl", "prompt": "x"}', "cannot be read"),
        ('{"image": "broken.png", "prompt": "x"}', "cannot be read"),
        ('{"images": "caption/0.png", "prompt": "x"}', "'images' a list of paths"),
        ('{"image": "caption/0.png", "prompt": "x", "answer": 7}', "'answer' must be a string, got 7"),
    ],
)
def test_a_bad_line_names_file_and_line(data, line, says):
    whole = (data / "caption" / "0.png").read_bytes()
    (data / "broken.png").write_bytes(whole[: len(whole) // 2])
    (data / "bad.jsonl").write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: ") as error:
        read_task(data, "bad")
    assert says in str(error.value) and "\n" not in str(error.value)


def test_an_absent_task_an_empty_one_and_too_few_rows(data):
    with pytest.raises(ValueError, match=r"no such task file; tasks in .*: caption, docvqa"):
        read_task(data, "chart")
    (data / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no prompts"):
        read_task(data, "empty")
    with pytest.raises(ValueError, match=r"51 prompts were asked for .* it has 5"):
        load_tasks(data, ["caption"], 50)


def test_encoding_scales_large_images_and_passes_template_flags(data, tmp_path):
    from glance.vl import load_target

    pair = toy_run.write_pair(tmp_path / "pair")
    _, processor = load_target(pair / "target")
    Image.new("RGB", (640, 320)).save(data / "wide.png")
    (data / "wide.jsonl").write_text('{"image": "wide.png", "prompt": "how wide?"}\n')
    (prompt,) = read_task(data, "wide")
    full, small = encode(processor, prompt), encode(processor, prompt, max_pixels=64 * 32)
    area = [int(x["image_grid_thw"].prod()) for x in (full, small)]
    assert area[1] < area[0] and full["input_ids"].shape[1] > small["input_ids"].shape[1]
    flagged = encode(processor, prompt, template={"some_flag": True})
    assert flagged["input_ids"].tolist() == full["input_ids"].tolist()


def test_an_image_for_a_text_target_is_refused(data):
    (prompt, *_) = read_task(data, "caption")
    with pytest.raises(ValueError, match="caption line 1 has an image"):
        encode(toys.tokenizer(), prompt)
