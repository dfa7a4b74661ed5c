"""`glance train-head`: a block head for any target, from task files."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from glance.tasks import Prompt, check_prompts, encode, read_task, task_names
from glance.train.acceptance import acceptance_text
from glance.train.blocks import TrainSettings
from glance.train.distill import Inputs
from glance.train.loop import train_head
from glance.vl import load_target


class EncodedPrompts(Sequence):
    """Prompts of task files that are encoded when they are asked for."""

    def __init__(self, processor: Any, prompts: Sequence[Prompt]):
        self.processor = processor
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, i: int) -> Inputs:
        return encode(self.processor, self.prompts[i])


def split_tasks(data: str | Path, held_out: int) -> tuple[list[Prompt], list[Prompt]]:
    """Read every task of a folder; keep each task's last `held_out` prompts for validation."""
    tasks = task_names(data)
    if not tasks:
        raise ValueError(f"{data} has no task files (<task>.jsonl with rows like {{'prompt': ..., 'image': ...}})")
    rows = {task: read_task(data, task) for task in tasks}
    short = [f"{task} has {len(found)}" for task, found in rows.items() if len(found) <= held_out]
    if short:
        raise ValueError(f"{data}: {', '.join(short)} prompts, {held_out} of each task are held out")
    train, valid = ([p for f in rows.values() for p in f[a:b]] for a, b in ((0, -held_out), (-held_out, None)))
    return train, valid


def add_command(commands: Any) -> None:
    """Add `glance train-head`; every setting is a flag."""
    parser = commands.add_parser("train-head", help="train a block head on a frozen target, from its own text")
    parser.add_argument("--target", required=True, help="a transformers checkpoint")
    parser.add_argument("--data", required=True, help="a folder of task files; images are optional")
    parser.add_argument("--out", required=True, help="the run's folder; it becomes the head's folder too")
    parser.add_argument("--held-out", type=int, default=8, help="prompts of each task to validate on")
    parser.add_argument("--answers", help="where the target's texts are cached (default: in the run's folder)")
    for item in fields(TrainSettings):
        flag = "--" + item.name.replace("_", "-")
        says = f"{item.metadata['help']} (default: {item.default})"
        if isinstance(item.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=item.default, help=says)
        else:
            many = {"nargs": "+", "type": int} if item.default == () else {"type": type(item.default)}
            parser.add_argument(flag, default=item.default, help=says, **many)
    parser.set_defaults(run=_run, resumes=True)


def _run(arguments: argparse.Namespace) -> int:
    given = {item.name: getattr(arguments, item.name) for item in fields(TrainSettings)}
    settings = TrainSettings(**given | {"kept": tuple(given["kept"])})
    train_prompts, valid = split_tasks(arguments.data, arguments.held_out)
    target, processor = load_target(arguments.target)
    check_prompts(processor, [*train_prompts, *valid])
    train_set, valid_set = (EncodedPrompts(processor, prompts) for prompts in (train_prompts, valid))
    tokenizer = getattr(processor, "tokenizer", processor)
    result = train_head(target, tokenizer, train_set, valid_set, arguments.out, settings, answers=arguments.answers)
    print(acceptance_text(result))
    return 0
