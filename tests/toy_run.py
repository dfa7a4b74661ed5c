"""A toy pair and toy task files on disk, for tests of everything above the decoder."""

import json
from pathlib import Path

import numpy as np
import toys
from PIL import Image


def write_pair(folder: Path) -> Path:
    """Write a tiny random Qwen3-VL target and a random block head for it: `target/` and `head/`."""
    target = toys.vision_target("qwen3_vl")
    toys.save_target(target, folder / "target")
    toys.save_head(toys.block_head(target), folder / "head")
    return folder


def write_tasks(folder: Path, tasks: tuple = ("caption", "docvqa"), n: int = 5) -> Path:
    """Write task files with random images of two shapes."""
    for task in tasks:
        (folder / task).mkdir(parents=True)
        rows = []
        for i in range(n):
            pixels = np.random.default_rng(i).integers(0, 255, (64 + 32 * (i % 2), 96, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / task / f"{i}.png")
            rows.append({"image": f"{task}/{i}.png", "prompt": f"What is {i}?", "answer": str(i)})
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def flags(folder: Path) -> list[str]:
    """Return the flags that name a toy pair and its tasks to a command."""
    return [part for name in ("target", "head", "data") for part in (f"--{name}", str(folder / name))]
