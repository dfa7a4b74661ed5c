"""The pocket head: pages as prompts, the plan by which the shipped head was trained, and its figures in `head.json`.

Training is `glance.train`'s, as for any target; this file says on what. Prompt `i` is a page of task `i % 5` drawn from the
training split with seed `FIRST_SEED + i // 5`, far from the seeds that the target was trained on; validation pages are drawn
from the `seen` split, whose words training knows and whose images it does not; figures are taken on `eval`.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from glance.files import read_json, read_lines, write_json
from glance.paths import BUILD, DATA, POCKET
from glance.pocket.batches import encode_prompt
from glance.pocket.canvas import CELL
from glance.pocket.model import PATCH, POINTER_LAYER, cut_patches, double_frames, stack_pixels
from glance.pocket.render import TASKS, sample
from glance.train.blocks import TrainSettings
from glance.train.distill import Inputs

FIRST_SEED = 2**50  # the target's own pages have seeds below 2**48
PLAN = TrainSettings(
    block=16,
    layers=4,
    kept=(POINTER_LAYER, 1, 3, 4),  # the first is the scout's
    steps=2240,  # 14 minutes on two cores
    batch=24,
    anchors=8,
    scout=0.3,
    every=224,
    budget=63,
)


class PagePrompts(Sequence):
    """Pages of the five tasks in turn, drawn and encoded when they are asked for; what a processor returns, faster."""

    def __init__(self, tokenizer: Any, count: int, split: str = "train", first_seed: int = FIRST_SEED):
        self.tokenizer = tokenizer
        self.count = count
        self.split = split
        self.first_seed = first_seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Inputs:
        page = sample(TASKS[i % len(TASKS)], self.first_seed + i // len(TASKS), self.split)
        width, height = page.image.size
        ids = torch.tensor([encode_prompt(self.tokenizer, page.prompt, width * height // CELL**2)])
        return {
            "input_ids": ids,
            "pixel_values": double_frames(cut_patches(stack_pixels([page.image]))),
            "image_grid_thw": torch.tensor([[1, height // PATCH, width // PATCH]]),
            "mm_token_type_ids": (ids == self.tokenizer.convert_tokens_to_ids("<|image_pad|>")).long(),
        }


def train_pocket_head(
    out: Path,
    settings: TrainSettings = PLAN,
    *,
    prompts: int = 11000,
    held_out: int = 40,
    target: Path = POCKET / "target",
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train a head for the pocket target into a run's folder; resumes what is there. Returns its acceptance."""
    from glance.train.loop import train_head
    from glance.vl import load_target

    model, processor = load_target(target, torch.float32, "cpu")
    pages = (PagePrompts(processor.tokenizer, prompts), PagePrompts(processor.tokenizer, held_out, "seen"))
    answers = DATA / "cache" / "pocket-head" / "answers.jsonl"
    return train_head(model, processor.tokenizer, *pages, out, settings, answers=answers, report=report)


def ship_head(run: Path, folder: Path = POCKET) -> None:
    """Copy a run's best head into the pocket's folder and start `head.json`: settings, log and acceptance by offset."""
    (folder / "head").mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(run / name, folder / "head" / name)
    owner = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)["owner"]
    facts = {
        "settings": {name: None if value == math.inf else value for name, value in owner.items()},
        "sha256": hashlib.sha256((folder / "head" / "model.safetensors").read_bytes()).hexdigest(),
        "log": [json.loads(line) for line in read_lines(run / "log.jsonl")],
        "acceptance": read_json(run / "acceptance.json"),
    }
    write_json(folder / "head.json", facts)


def measure_head(folder: Path = POCKET, n: int = 135, run: Path | None = None) -> dict[str, Any]:
    """Decode the evaluation pages by every arm and write the head's figures to `head.json`; refuses inexact output.

    `n` pages per task are measured after one of warm-up, which must be exact too: by default the whole set of 136.
    """
    from glance.report.summary import main_table, not_lossless
    from glance.run.experiment import Plan, decode_tasks, load_pair

    arms = ("ar", "chain", "tree-15", "tree-31", "tree-63")
    pair = load_pair(str(folder / "target"), str(folder / "head"), dtype="float32", device="cpu")
    run = run or BUILD / "pocket-head-figures"
    decode_tasks(pair, Plan(str(folder / "eval"), n=n, arms=arms), run)
    table = main_table(run)
    differing = not_lossless(run)
    figures = {
        "n": n,
        "identical": not differing,
        "differing": differing,
        "rows": table["rows"],
        "pooled": table["pooled"],
    }
    path = folder / "head.json"
    known = read_json(path) if path.is_file() else {}
    write_json(path, known | {"figures": figures})
    if differing:
        raise ValueError(f"{len(differing)} outputs are not the target's own: {', '.join(differing[:5])}")
    return figures
