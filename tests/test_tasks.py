"""Task files are read whole and checked before any work; a bad line names file, line and what is wrong."""

import json

import pytest
import toy_run
import toys
from PIL import Image

from glance.tasks import TASKS, Prompt, check_prompts, encode, load_tasks, read_task, special_tokens, task_names


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
        (
            '{"image": "caption/0.png", "prompt": "x", "answer": 7}',
            "'answer' must be a string or a list of strings, got 7",
        ),
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
    with pytest.raises(ValueError, match=r"caption\.jsonl:1: the prompt has an image"):
        encode(toys.tokenizer(), prompt)


def write_rows(data, *rows, name="mine"):
    (data / f"{name}.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return read_task(data, name)


@pytest.mark.parametrize("mark", [*"\u2028\u2029\x85\x1c\x1d\x1e\x0b\x0c"])
def test_a_text_may_hold_every_line_boundary_of_unicode(data, mark):
    (prompt,) = write_rows(data, {"prompt": f"a{mark}b", "image": "caption/0.png"})
    assert prompt.text == f"a{mark}b"


def test_a_byte_order_mark_and_windows_line_ends_are_read(data):
    (data / "mine.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "one"}\r\n{"prompt": "two"}\r\n')
    assert [prompt.text for prompt in read_task(data, "mine")] == ["one", "two"]


def test_another_encoding_names_file_and_line(data):
    (data / "mine.jsonl").write_bytes('{"prompt": "one"}\n{"prompt": "Prüfung"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"mine\.jsonl:2: not UTF-8 \(byte 0xfc\)"):
        read_task(data, "mine")


@pytest.mark.parametrize(
    "absent", [{"images": []}, {"images": None}, {"image": None}, {"image": ""}, {"images": [], "image": None}]
)
def test_empty_and_null_are_absent(data, absent):
    (prompt,) = write_rows(data, {"prompt": "x", **absent})
    assert prompt.images == ()
    if "image" not in absent:
        (prompt,) = write_rows(data, {"prompt": "x", "image": "caption/0.png", **absent})
        assert len(prompt.images) == 1


def test_both_keys_at_once_are_refused(data):
    with pytest.raises(ValueError, match="both given"):
        write_rows(data, {"prompt": "x", "image": "caption/0.png", "images": ["caption/1.png"]})


def test_all_answers_are_kept(data):
    one, several, none = write_rows(
        data, {"prompt": "x", "answer": "a"}, {"prompt": "x", "answer": ["a", "b"]}, {"prompt": "x"}
    )
    assert one.answer == "a" and several.answer == ("a", "b") and none.answer is None


@pytest.mark.parametrize(
    "key", ["img", "Image", "picture", "photos", "pictures", "videos", "audio", "frames", "image_path", "page_img"]
)
def test_a_misspelt_picture_is_refused_and_other_keys_travel(data, key):
    with pytest.raises(ValueError, match=rf"mine\.jsonl:1: key '{key}' looks like a picture"):
        write_rows(data, {"prompt": "x", key: "caption/0.png"})
    (prompt,) = write_rows(data, {"prompt": "x", "image_id": "0012", "font": "serif", "image_width": 640, key: None})
    assert prompt.extra["image_id"] == "0012"


@pytest.mark.parametrize("limit", [2.5, 0, -1, "3"])
def test_a_limit_is_a_whole_number(data, limit):
    with pytest.raises(ValueError, match="limit must be a whole number"):
        read_task(data, "caption", limit)


def test_hidden_files_are_no_tasks(data):
    (data / "._docvqa.jsonl").write_bytes(b"\x00\x05\x16\x07")
    assert task_names(data) == ["caption", "docvqa"]


def test_a_link_inside_the_folder_may_point_anywhere(data, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "far.png")
    (data / "near.png").symlink_to(tmp_path / "far.png")
    (prompt,) = write_rows(data, {"prompt": "x", "image": "near.png"})
    assert prompt.images[0].is_file()


class Whole:
    """A processor with pictures and video that gives back what it is asked to place."""

    image_processor = video_processor = object()
    chat_template = "{{ messages }}"
    image_token = "<|image_pad|>"

    def apply_chat_template(self, messages, **settings):
        return {"content": messages[0]["content"]}


def test_video_goes_to_a_family_that_has_it_and_is_refused_elsewhere(data):
    (data / "clip.mp4").write_bytes(b"film")
    frames = ["caption/0.png", "caption/2.png"]
    film, listed = write_rows(data, {"prompt": "x", "video": "clip.mp4"}, {"prompt": "x", "video": frames})
    assert encode(Whole(), film)["content"][0] == {"type": "video", "video": str(data / "clip.mp4")}
    assert [frame.size for frame in encode(Whole(), listed)["content"][0]["video"]] == [(96, 64), (96, 64)]
    blind = Whole()
    blind.video_processor = None
    with pytest.raises(ValueError, match=r"mine\.jsonl:1: the prompt has a video and Whole here takes none"):
        check_prompts(blind, [film])


def test_a_quoted_special_token_is_refused_by_file_and_line(data):
    (prompt,) = write_rows(data, {"prompt": "what is <|image_pad|>?", "image": "caption/0.png"})
    for check in (lambda: encode(Whole(), prompt), lambda: check_prompts(Whole(), [prompt])):
        with pytest.raises(ValueError, match=r"mine\.jsonl:1: the prompt quotes '<\|image_pad\|>'"):
            check()


def test_every_placeholder_that_a_processor_names_is_special():
    processor = Whole()
    processor.boi_token = "<start_of_image>"
    processor.fake_image_token = "<fake_token_around_image>"
    processor.audio_token = None
    assert special_tokens(processor) == ["<fake_token_around_image>", "<start_of_image>", "<|image_pad|>"]


def test_a_picture_that_no_task_file_brought_is_refused_by_name(tmp_path):
    (tmp_path / "a.png").write_bytes(b"gone")
    for path in (tmp_path / "a.png", tmp_path / "absent.png"):
        with pytest.raises(ValueError, match=rf"own line 1: image '.*{path.name}' cannot be read"):
            encode(Whole(), Prompt("own", 0, "x", (path,)))


def test_every_special_token_of_the_pocket_processor_is_known(data):
    from glance.paths import POCKET
    from glance.vl import load_processor

    processor = load_processor(POCKET / "target")
    tokens = special_tokens(processor)
    assert "<|image_pad|>" in tokens and len(tokens) >= 3
    for token in tokens:
        (prompt,) = write_rows(data, {"prompt": f"read {token} aloud"})
        with pytest.raises(ValueError, match="special token"):
            encode(processor, prompt)


def test_a_processor_without_a_chat_template_says_what_is_missing(data):
    bare = Whole()
    bare.chat_template = None
    with pytest.raises(ValueError, match="Whole has no chat template"):
        encode(bare, read_task(data, "caption")[0])


@pytest.mark.parametrize("damage", ["strip", "truncated", "orientation"])
def test_pictures_are_decoded_whole_before_any_work(data, damage):
    if damage == "strip":
        Image.new("RGB", (3000, 10)).save(data / "a.png")
    elif damage == "truncated":
        Image.new("RGB", (300, 300), "red").save(data / "whole.jpg")
        (data / "a.png").write_bytes((data / "whole.jpg").read_bytes()[:-400])
    else:
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.new("RGB", (40, 20)).save(data / "a.png", exif=exif)
        (prompt,) = write_rows(data, {"prompt": "x", "image": "a.png"})
        assert encode(Whole(), prompt)["content"][0]["image"].size == (20, 40)
        return
    with pytest.raises(ValueError, match=r"mine\.jsonl:2: image 'a\.png' cannot be read"):
        write_rows(data, {"prompt": "x"}, {"prompt": "x", "image": "a.png"})
