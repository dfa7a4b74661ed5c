"""The shipped evaluation sets: held-out words (`eval`), and smaller ones with words of the training lexicon (`seen`).

Rows are the paper's task format, `{"image": "docvqa/0001.png", "prompt": ..., "answer": ...}`, with `kind`, `font`, `size`,
`seed`, where an answer may vary its `parts`, and for captions the scene's `objects` instead of an answer.
"""

from __future__ import annotations

import json
from pathlib import Path

from glance.files import read_lines
from glance.pocket.render import TASKS, Page, sample

EVAL_ROWS = 136
SEEN_ROWS = 48


def describe_page(page: Page, image: str) -> dict:
    """Return a page's row."""
    row = {"image": image, "prompt": page.prompt}
    if page.objects is None:
        row["answer"] = page.answer
    row |= {"kind": page.kind, "font": page.font, "size": page.size, "seed": page.seed}
    if page.objects is not None:
        keys = ("colour", "shape", "big", "column", "row")
        row["objects"] = [{key: thing[key] for key in keys} for thing in page.objects]
    elif any(len(alternatives) > 1 for alternatives in page.parts):
        row["parts"] = page.parts
    return row


def write_set(folder: Path, split: str, count: int, tasks: tuple[str, ...] = TASKS) -> None:
    """Render `count` pages of each task into a data folder."""
    for task in tasks:
        (folder / task).mkdir(parents=True, exist_ok=True)
        rows = []
        for seed in range(count):
            page = sample(task, seed, split)
            name = f"{task}/{seed:04d}.png"
            page.image.save(folder / name, optimize=True)
            rows.append(json.dumps(describe_page(page, name)))
        (folder / f"{task}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def read_set(folder: Path, task: str, limit: int | None = None) -> list[dict]:
    """Read a task's rows.

    Raises:
        FileNotFoundError: the folder has no such task.
        ValueError: a row has neither `answer` nor `objects`.
    """
    path = folder / f"{task}.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such task file; `glance pocket render --out {folder}` writes one")
    rows = [json.loads(line) for line in read_lines(path) if line.strip()][:limit]
    for number, row in enumerate(rows, 1):
        if "answer" not in row and "objects" not in row:
            raise ValueError(f"{path}:{number}: a row to evaluate needs 'answer' or 'objects'")
    return rows
