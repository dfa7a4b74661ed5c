"""Task files: `<data>/<task>.jsonl`, one prompt a line; read, checked whole before any work, and encoded for a target.

A row is `{"image": "docvqa/0001.png", "prompt": "..."}`, the image relative to the data folder. `"images": [...]` names
several; `"video"` names a video file or lists its frames, for families that read video. `"answer"` is a reference answer
or a list of them. Any further key travels along, unless it looks like a misspelt picture. An empty or null value counts
as absent. The file knows nothing of models; encoding asks the target's own processor and chat template.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glance.files import read_lines
from glance.pictures import check_picture, read_picture

TASKS = ("caption", "textvqa", "infovqa", "docvqa", "chartqa")  # the paper's five, from most to least free


MEDIA = ("image", "img", "picture", "pic", "photo", "video", "audio", "frame", "page_image", "media")
MEDIA_FILES = {
    ".png",
    ".jpg",
    ".jpeg",
    ".gif",
    ".bmp",
    ".tif",
    ".tiff",
    ".webp",
    ".mp4",
    ".avi",
    ".mov",
    ".mkv",
    ".webm",
}


@dataclass(frozen=True)
class Prompt:
    """One row of a task file: its text, its images on disk, and what else the row says."""

    task: str
    index: int  # 0-based line of the task file
    text: str
    images: tuple[Path, ...] = ()
    answer: str | tuple[str, ...] | None = None  # several where the row lists several
    extra: Mapping[str, Any] = field(default_factory=dict)
    video: Path | tuple[Path, ...] | None = None  # a file, or frames
    where: str = ""  # file and line that it was read from


def task_names(data: str | Path) -> list[str]:
    """List the tasks that a data folder has: the paper's five in the paper's order, then any others by name."""
    found = {path.stem for path in Path(data).glob("*.jsonl") if not path.name.startswith(".")}
    return [task for task in TASKS if task in found] + sorted(found - set(TASKS))


def read_task(data: str | Path, task: str, limit: int | None = None) -> list[Prompt]:
    """Read the first `limit` prompts of a task and open every image once.

    Raises:
        ValueError: no such task, a bad line, a missing or unreadable image, a path outside the data folder, or fewer rows
            than `limit`; names file and line.
    """
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit must be a whole number of at least 1, got {limit!r}")
    data = Path(data)
    path = data / f"{task}.jsonl"
    if not path.is_file():
        known = ", ".join(task_names(data)) or "none"
        raise ValueError(f"{path}: no such task file; tasks in {data}: {known}")
    prompts = []
    for number, line in enumerate(read_lines(path), start=1):
        if limit is not None and len(prompts) == limit:
            break
        if line.strip():
            prompts.append(_read_row(data, task, len(prompts), line, f"{path}:{number}"))
    if not prompts:
        raise ValueError(f"{path}: the task has no prompts")
    if limit is not None and len(prompts) < limit:
        raise ValueError(f"{path}: {limit} prompts were asked for (a task's first is a warm-up), it has {len(prompts)}")
    return prompts


def _read_row(data: Path, task: str, index: int, line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row is an object, got {type(row).__name__}")
    if not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
        raise ValueError(f"{where}: 'prompt' must be a non-empty string, got {row.get('prompt')!r}")
    known = ("image", "images", "video", "prompt", "answer")
    extra = {key: value for key, value in row.items() if key not in known}
    for key, value in extra.items():
        if _names_media(key, value):
            raise ValueError(f"{where}: key {key!r} looks like a picture, and would be dropped: did you mean 'image'?")
    images = tuple(_checked_image(data, name, where) for name in _image_names(row, where))
    answer = _read_answer(row.get("answer"), where)
    return Prompt(task, index, row["prompt"], images, answer, extra, _read_video(data, row.get("video"), where), where)


def _image_names(row: Mapping[str, Any], where: str) -> list[str]:
    """Return the pictures that a row names, under either key; empty and null count as absent."""
    one = row.get("image") or None
    several = row.get("images") or None
    if one is not None and several is not None:
        raise ValueError(f"{where}: 'image' and 'images' are both given: use one of them")
    names = several if several is not None else [] if one is None else [one]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: 'image' must be a path, 'images' a list of paths, got {names!r}")
    return names


def _read_answer(answer: Any, where: str) -> str | tuple[str, ...] | None:
    """Return a row's answer or answers."""
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, list) and all(isinstance(one, str) for one in answer):
        return tuple(answer) or None
    raise ValueError(f"{where}: 'answer' must be a string or a list of strings, got {answer!r}")


def _names_media(key: str, value: Any) -> bool:
    """Say whether an unknown key was meant as a picture: by its name alone, or by a name like it and a file's value."""
    word = key.lower().strip("_- ")
    first = value[0] if isinstance(value, list) and value else value
    if not first:
        return False
    if word.rstrip("s") in MEDIA:
        return True
    is_file = isinstance(first, str) and (first.startswith("data:") or Path(first).suffix.lower() in MEDIA_FILES)
    return is_file and any(kind in word for kind in MEDIA)


def _placed(data: Path, name: str, where: str, kind: str) -> Path:
    """Return a file inside the data folder, reached by its name; a link that lies there may point anywhere."""
    path = Path(os.path.normpath(data / name))
    if not path.is_relative_to(Path(os.path.normpath(data))):
        raise ValueError(f"{where}: {kind} {name!r} leaves the data folder {data}")
    if not path.is_file():
        raise ValueError(f"{where}: {kind} {name!r} does not exist in {data}")
    return path


def _checked_image(data: Path, name: str, where: str) -> Path:
    path = _placed(data, name, where, "image")
    try:
        check_picture(path)
    except ValueError as error:
        raise ValueError(f"{where}: image {name!r} cannot be read: {error}") from None
    return path


def _read_video(data: Path, video: Any, where: str) -> Path | tuple[Path, ...] | None:
    """Return a row's video: a file, or its frames as pictures."""
    if not video:
        return None
    if isinstance(video, str):
        return _placed(data, video, where, "video")
    if isinstance(video, list) and all(isinstance(name, str) for name in video):
        return tuple(_checked_image(data, name, where) for name in video)
    raise ValueError(f"{where}: 'video' must be a path or a list of frames' paths, got {video!r}")


def special_tokens(processor: Any) -> list[str]:
    """List the strings that a processor takes for more than text: its special tokens and placeholders."""
    tokenizer = getattr(processor, "tokenizer", processor)
    found: set[Any] = set(getattr(tokenizer, "all_special_tokens", ()))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found |= {token.content for token in added.values() if getattr(token, "special", False)}
    found |= {
        value for name, value in vars(processor).items() if name.endswith("_token")
    }  # image_token, boi_token, ...
    found |= {getattr(processor, name, None) for name in ("image_token", "video_token")}
    return sorted(token for token in found if isinstance(token, str) and token.strip())


def check_prompts(processor: Any, prompts: Sequence[Prompt]) -> None:
    """Refuse, before any decoding, prompts that a processor cannot encode as they stand; names file and line.

    Raises:
        ValueError: a picture for a target that takes none, a processor without a chat template, video for a family
            without it, or a prompt that quotes a special token.
    """
    special = special_tokens(processor)
    for prompt in prompts:
        _check_prompt(processor, prompt, special)


def _check_prompt(processor: Any, prompt: Prompt, special: Sequence[str]) -> None:
    where = _where(prompt)
    kind = type(processor).__name__
    has_template = getattr(processor, "chat_template", None) is not None
    if prompt.images and not hasattr(processor, "image_processor"):
        raise ValueError(f"{where}: the prompt has an image and {kind} takes none")
    if prompt.video and getattr(processor, "video_processor", None) is None:
        raise ValueError(f"{where}: the prompt has a video and {kind} here takes none (video needs torchvision)")
    if (prompt.images or prompt.video) and not has_template:
        raise ValueError(
            f"{where}: {kind} has no chat template, which says where images stand: "
            "put the checkpoint's chat_template.jinja into its folder"
        )
    quoted = [token for token in special if token in prompt.text]
    if quoted:
        raise ValueError(f"{where}: the prompt quotes {quoted[0]!r}, a special token of {kind}: write it differently")


def encode(
    processor: Any, prompt: Prompt, *, max_pixels: int | None = None, template: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Turn a prompt into a target's inputs through its own chat template: `input_ids` (1, P), pixels, grids.

    Args:
        processor: a processor, or a tokenizer for text targets.
        max_pixels: scale larger images down to this many pixels first, keeping their shape. How a picture becomes RGB
            (orientation, transparency on white, depth) stands in `glance.pictures`.
        template: further flags of the chat template (`enable_thinking`, ...), recorded in a run's provenance.

    Raises:
        ValueError: as `check_prompts`.
    """
    _check_prompt(processor, prompt, special_tokens(processor))
    if getattr(processor, "chat_template", None) is None:
        return dict(processor(prompt.text, return_tensors="pt"))
    content: Any = prompt.text
    if hasattr(processor, "image_processor"):
        images = [{"type": "image", "image": _picture(prompt, path, max_pixels)} for path in prompt.images]
        content = [*images, *_video_content(prompt, max_pixels), {"type": "text", "text": prompt.text}]
    encoded = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        **(template or {}),
    )
    return dict(encoded)


def _picture(prompt: Prompt, path: Path, max_pixels: int | None) -> Any:
    """Read a prompt's picture; one that no task file brought is checked here for the first time."""
    try:
        check_picture(path)
        return read_picture(path, max_pixels)
    except (ValueError, OSError) as error:
        raise ValueError(f"{_where(prompt)}: image {str(path)!r} cannot be read: {error}") from None


def _where(prompt: Prompt) -> str:
    return prompt.where or f"{prompt.task} line {prompt.index + 1}"


def _video_content(prompt: Prompt, max_pixels: int | None) -> list[dict[str, Any]]:
    if prompt.video is None:
        return []
    if isinstance(prompt.video, Path):
        return [{"type": "video", "video": str(prompt.video)}]
    return [{"type": "video", "video": [_picture(prompt, path, max_pixels) for path in prompt.video]}]


def load_tasks(data: str | Path, tasks: Sequence[str] | None, n: int) -> list[Prompt]:
    """Read n + 1 prompts of each task (the first is a warm-up), in the tasks' order; everything is checked first."""
    return [prompt for task in tasks or task_names(data) for prompt in read_task(data, task, n + 1)]
