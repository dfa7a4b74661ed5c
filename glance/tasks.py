"""Task files: `<data>/<task>.jsonl`, one prompt a line; read, checked whole before any work, and encoded for a target.

A row is `{"image": "docvqa/0001.png", "prompt": "..."}`, the image relative to the data folder; `"images": [...]` names
several, `"answer"` a reference answer; any further key travels along. The file knows nothing of models; encoding asks the
target's own processor and chat template.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TASKS = ("caption", "textvqa", "infovqa", "docvqa", "chartqa")  # the paper's five, from most to least free


@dataclass(frozen=True)
class Prompt:
    """One row of a task file: its text, its images on disk, and what else the row says."""

    task: str
    index: int  # 0-based line of the task file
    text: str
    images: tuple[Path, ...] = ()
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def task_names(data: str | Path) -> list[str]:
    """List the tasks that a data folder has: the paper's five in the paper's order, then any others by name."""
    found = {path.stem for path in Path(data).glob("*.jsonl")}
    return [task for task in TASKS if task in found] + sorted(found - set(TASKS))


def read_task(data: str | Path, task: str, limit: int | None = None) -> list[Prompt]:
    """Read the first `limit` prompts of a task and open every image once.

    Raises:
        ValueError: no such task, a bad line, a missing or unreadable image, a path outside the data folder, or fewer rows
            than `limit`; names file and line.
    """
    data = Path(data)
    path = data / f"{task}.jsonl"
    if not path.is_file():
        known = ", ".join(task_names(data)) or "none"
        raise ValueError(f"{path}: no such task file; tasks in {data}: {known}")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
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
    if row.get("answer") is not None and not isinstance(row["answer"], str):
        raise ValueError(f"{where}: 'answer' must be a string, got {row['answer']!r}")
    names = row["images"] if "images" in row else [row["image"]] if row.get("image") is not None else []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: 'image' must be a path, 'images' a list of paths, got {names!r}")
    images = tuple(_checked_image(data, name, where) for name in names)
    extra = {key: value for key, value in row.items() if key not in ("image", "images", "prompt", "answer")}
    return Prompt(task, index, row["prompt"], images, row.get("answer"), extra)


def _checked_image(data: Path, name: str, where: str) -> Path:
    from PIL import Image, UnidentifiedImageError

    path = (data / name).resolve()
    if not path.is_relative_to(data.resolve()):
        raise ValueError(f"{where}: image {name!r} leaves the data folder {data}")
    if not path.is_file():
        raise ValueError(f"{where}: image {name!r} does not exist in {data}")
    try:
        with Image.open(path) as image:
            image.verify()
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{where}: image {name!r} cannot be read: {error}") from None
    return path


def encode(
    processor: Any, prompt: Prompt, *, max_pixels: int | None = None, template: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Turn a prompt into a target's inputs through its own chat template: `input_ids` (1, P), pixels, grids.

    Args:
        processor: a processor, or a tokenizer for text targets.
        max_pixels: scale larger images down to this many pixels first, keeping their shape.
        template: further flags of the chat template (`enable_thinking`, ...), recorded in a run's provenance.
    """
    images = [_open(path, max_pixels) for path in prompt.images]
    sees = hasattr(processor, "image_processor")
    if images and not sees:
        raise ValueError(
            f"{prompt.task} line {prompt.index + 1} has an image and {type(processor).__name__} takes none"
        )
    if getattr(processor, "chat_template", None) is None:
        return dict(processor(prompt.text, return_tensors="pt"))
    content: Any = prompt.text
    if sees:
        content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": prompt.text}]
    encoded = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        **(template or {}),
    )
    return dict(encoded)


def _open(path: Path, max_pixels: int | None) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        image = image.convert("RGB")
    if max_pixels and image.width * image.height > max_pixels:
        scale = (max_pixels / (image.width * image.height)) ** 0.5
        image = image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))
    return image


def load_tasks(data: str | Path, tasks: Sequence[str] | None, n: int) -> list[Prompt]:
    """Read n + 1 prompts of each task (the first is a warm-up), in the tasks' order; everything is checked first."""
    return [prompt for task in tasks or task_names(data) for prompt in read_task(data, task, n + 1)]
