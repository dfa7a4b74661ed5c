"""Training a block head on any frozen target: the steps, validation by real decoding, checkpoints, and the command.

Conventions that decide numbers: batches depend on seed and step alone and nothing else is random, so a run that was stopped
takes the same steps again, bit for bit (a limit in minutes gives this up); a run keeps the head of its best validation, by
tau over rounds that were not cut; weights are written in bfloat16. What a step learns from stands in `glance.train.blocks`,
where the texts and states come from in `glance.train.distill`.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glance.decode import decode
from glance.drafters.block import BlockDrafter
from glance.files import append_lines, write_json
from glance.head import block_logits, load_block_head
from glance.records import Round
from glance.session import Settings
from glance.target import StreamPositions
from glance.tasks import Prompt, encode, read_task, task_names
from glance.train.blocks import (
    TrainSettings,
    block_loss,
    choose_mask_token,
    draw_blocks,
    hang_blocks,
    new_head,
    run_blocks,
)
from glance.train.distill import AnswerCache, Example, Inputs, build_examples, fingerprint, plain_attention, read_states
from glance.vl import VisionPositions, load_target


class HeadRun:
    """A head in training: its optimisers, how far it is, the best validation so far; saved and resumed as one."""

    def __init__(self, head: nn.Module, target: nn.Module, settings: TrainSettings, mask: int, owner: dict[str, Any]):
        self.head, self.target, self.settings, self.mask, self.owner = head, target, settings, mask, owner
        self.step, self.seconds, self.best, self.stale = 0, 0.0, -math.inf, 0
        width = target.get_input_embeddings().weight.shape[1]
        self.scout = nn.Linear(width, width).to(self._device) if settings.scout else None
        matrices = [weight for weight in head.parameters() if weight.dim() == 2]
        others = [weight for weight in head.parameters() if weight.dim() != 2]
        others += [] if self.scout is None else list(self.scout.parameters())
        self.optimisers = [
            torch.optim.AdamW(others, lr=settings.rate, betas=(0.9, 0.97), weight_decay=0.0),
            torch.optim.Muon(
                matrices, lr=settings.matrix_rate, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"
            ),
        ]

    @property
    def progress(self) -> float:
        """Return how much of the schedule is behind, 0 to 1."""
        return min(1.0, max(self.step / self.settings.steps, self.seconds / 60 / self.settings.minutes))

    def advance(self, examples: Sequence[Example]) -> float:
        """Take one step; return its loss."""
        began, settings = time.perf_counter(), self.settings
        scale = min(1.0, (self.step + 1) / settings.warmup) * (0.03 + 0.485 * (1 + math.cos(math.pi * self.progress)))
        for optimiser, rate in zip(self.optimisers, (settings.rate, settings.matrix_rate), strict=True):
            optimiser.param_groups[0]["lr"] = rate * scale
        blocks = draw_blocks(examples, settings, self.mask, self.step).to(self._device)
        with plain_attention(), torch.autocast(self._device, torch.bfloat16, enabled=settings.bf16):
            loss = block_loss(self.head, self.target, blocks, settings, self.scout)
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), settings.clip)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step, self.seconds = self.step + 1, self.seconds + time.perf_counter() - began
        return loss.item()

    @property
    def _device(self) -> str:
        return next(self.head.parameters()).device.type

    @property
    def _parts(self) -> list[Any]:
        return [self.head, *self.optimisers, *([] if self.scout is None else [self.scout])]

    def save(self, path: Path) -> None:
        """Write the checkpoint; a kill leaves the old one whole."""
        state = {name: getattr(self, name) for name in ("owner", "step", "seconds", "best", "stale")}
        state["parts"] = [part.state_dict() for part in self._parts]
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def load(self, path: Path) -> None:
        """Resume from a checkpoint of this very run; refuse another's, naming what differs."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        theirs = state.pop("owner")
        differ = [f"{k} {theirs.get(k)!r} there, {v!r} here" for k, v in self.owner.items() if theirs.get(k) != v]
        if differ:
            raise ValueError(f"{path} is a checkpoint of another run: {'; '.join(differ)}; choose another folder")
        for part, saved in zip(self._parts, state.pop("parts"), strict=True):
            part.load_state_dict(saved)
        vars(self).update(state)


def save_head(head: nn.Module, out: Path) -> None:
    """Write a head's folder, weights in bfloat16."""
    copy.deepcopy(head).to(torch.bfloat16).save_pretrained(out)


def decode_rounds(
    head: nn.Module, target: nn.Module, prompts: Sequence[Inputs], drafter: BlockDrafter, max_new_tokens: int
) -> list[tuple[torch.Tensor, list[Round]]]:
    """Decode held-out prompts; return each text's ids `(T,)` and its rounds that were not cut."""
    texts, head_mode = [], head.training
    head.eval()
    for i in range(len(prompts)):
        inputs = prompts[i]
        positions = VisionPositions.from_inputs(inputs) if "pixel_values" in inputs else StreamPositions()
        ids, stats = decode(drafter, target, inputs["input_ids"], Settings(max_new_tokens), positions)
        texts.append((ids[0].cpu(), [r for r in stats.rounds if not r.truncated]))
    head.train(head_mode)
    return texts


def tau_of(texts: list[tuple[torch.Tensor, list[Round]]]) -> float:
    """Return tokens per round, pooled over all rounds that were not cut."""
    accepted = [r.accepted for _, rounds in texts for r in rounds]
    return 1 + sum(accepted) / len(accepted) if accepted else float("nan")


@torch.inference_mode()
def compare_acceptance(
    head: nn.Module, target: nn.Module, prompts: Sequence[Inputs], settings: TrainSettings, mask: int
):
    """Set the chain's acceptance in decoding beside the teacher-forced one, from the same anchors, offset by offset.

    Returns:
        tau of chain and tree, and per offset the share of rounds that accept at least so far: as decoded, and as one
        training pass over the finished text says. The two should agree; where they part, the head is not fed in decoding
        what it was trained on.
    """
    block = settings.block
    texts = decode_rounds(head, target, prompts, BlockDrafter(head, block - 1, 1), settings.max_new_tokens)
    tree = decode_rounds(head, target, prompts, BlockDrafter(head, settings.budget), settings.max_new_tokens)
    decoded, forced, n = torch.zeros(block - 1), torch.zeros(block - 1), 0
    for i, (ids, rounds) in enumerate(texts):
        if not rounds:
            continue
        states = read_states(target, head.target_layer_ids, [prompts[i]], [ids])[0]
        blocks = hang_blocks([Example(ids, 0, states)], [[r.start for r in rounds]], block, mask)
        said = block_logits(head, target)(run_blocks(head, target, blocks.to(states.device))).argmax(-1)
        right = said.view_as(blocks.labels).cpu() == blocks.labels  # (1, A, B)
        forced += right[0, :, 1:].int().cumprod(-1).sum(0)
        decoded += torch.stack([torch.arange(1, block) <= r.accepted for r in rounds]).sum(0)
        n += len(rounds)
    rows = {"decode": (decoded / max(n, 1)).tolist(), "teacher_forced": (forced / max(n, 1)).tolist()}
    gap = float((decoded - forced).abs().max()) / max(n, 1)
    return {"tau_chain": tau_of(texts), f"tau_tree_{settings.budget}": tau_of(tree), "rounds": n, "gap": gap, **rows}


def train(
    run: HeadRun, examples: Sequence[Example], out: Path, validate: Callable[[], float], report: Callable[[str], None]
) -> None:
    """Take the steps that are left; validate, log and save every `every` steps, and keep the best head in `out`."""
    losses: list[float] = []
    while run.progress < 1 and not 0 < run.settings.patience <= run.stale:
        losses.append(run.advance(examples))
        if run.step % run.settings.every and run.progress < 1:
            continue
        tau = validate()
        run.stale = 0 if tau > run.best else run.stale + 1
        if tau > run.best:
            run.best = tau
            save_head(run.head, out)
        row = {"step": run.step, "seconds": round(run.seconds), "loss": sum(losses) / len(losses), "tau": tau}
        append_lines(out / "log.jsonl", [row | {"best": run.best}])
        run.save(out / "checkpoint.pt")
        left = run.seconds * (1 / run.progress - 1) / 60
        bar = ("#" * int(30 * run.progress)).ljust(30, ".")
        report(
            f"[{bar}] step {run.step}  loss {row['loss']:.3f}  tau {tau:.2f} (best {run.best:.2f})  {left:.1f} min left"
        )
        losses.clear()


def train_head(
    target: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Inputs],
    held_out: Sequence[Inputs],
    out: str | Path,
    settings: TrainSettings,
    *,
    answers: str | Path | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train a block head for a frozen target, from its own text on `prompts`; resumes what `out` holds.

    Args:
        target: the frozen target, as `load_target` gives it.
        tokenizer: its tokenizer, for a mask token.
        prompts: encoded prompts (`glance.tasks.encode`) to learn from; may encode as they are asked for.
        held_out: prompts to validate on.
        out: the run's folder; the best head is `out` itself, beside `log.jsonl`, `checkpoint.pt`, `acceptance.json`.
        answers: where the target's texts are cached; default `out`.
        report: takes progress, one line at a time.

    Returns:
        `compare_acceptance` of the best head, also written to `acceptance.json`.

    Raises:
        ValueError: no prompts, settings that do not fit the target, or a checkpoint or answers of another run.
    """
    out = Path(out)
    if not len(prompts) or not len(held_out):
        raise ValueError(
            f"{len(prompts)} prompts to train on and {len(held_out)} held out: at least one of each is needed"
        )
    mask = choose_mask_token(target, tokenizer)
    head = new_head(target, settings, mask).train()
    owner = {"target": fingerprint(target), "prompts": len(prompts)} | json.loads(json.dumps(asdict(settings)))
    run = HeadRun(head, target, settings, mask, owner)
    if (out / "checkpoint.pt").is_file():
        run.load(out / "checkpoint.pt")
        report(f"resumed at step {run.step}")
    out.mkdir(parents=True, exist_ok=True)
    cache = AnswerCache(Path(answers or out / "answers.jsonl"), target, settings.max_new_tokens)
    examples = learn_from(target, prompts, head, settings, cache, report)
    tree = BlockDrafter(head, settings.budget)
    validate = lambda: tau_of(decode_rounds(head, target, held_out, tree, settings.max_new_tokens))  # noqa: E731
    train(run, examples, out, validate, report)
    result = compare_acceptance(load_block_head(out, torch.float32), target, held_out, settings, mask)
    write_json(out / "acceptance.json", result)
    if result["gap"] > 0.02:
        report(f"warning: teacher-forced and decoded acceptance part by {result['gap']:.3f} at some offset")
    return result


def learn_from(
    target: nn.Module,
    prompts: Sequence[Inputs],
    head: nn.Module,
    settings: TrainSettings,
    cache: AnswerCache,
    report: Callable[[str], None],
) -> list[Example]:
    """Let the target answer the prompts, in bfloat16 where the head is trained so; refuse texts that teach nothing."""
    reader = copy.deepcopy(target).to(torch.bfloat16) if settings.bf16 else target
    with plain_attention():
        examples = build_examples(
            reader,
            prompts,
            head.target_layer_ids,
            max_new_tokens=settings.max_new_tokens,
            cache=cache,
            report=lambda done, total: report(f"the target's own text: {done} of {total} prompts"),
        )
    if not examples:
        raise ValueError("the target's texts are all of one token: no block can hang from them")
    return examples


class EncodedPrompts(Sequence):
    """Prompts of task files that are encoded when they are asked for."""

    def __init__(self, processor: Any, prompts: Sequence[Prompt]):
        self.processor, self.prompts = processor, prompts

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
        flag, says = "--" + item.name.replace("_", "-"), f"{item.metadata['help']} (default: {item.default})"
        if isinstance(item.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=item.default, help=says)
        else:
            many = {"nargs": "+", "type": int} if item.default == () else {"type": type(item.default)}
            parser.add_argument(flag, default=item.default, help=says, **many)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    given = {item.name: getattr(arguments, item.name) for item in fields(TrainSettings)}
    settings = TrainSettings(**given | {"kept": tuple(given["kept"])})
    train_prompts, valid = split_tasks(arguments.data, arguments.held_out)
    target, processor = load_target(arguments.target)
    train_set, valid_set = (EncodedPrompts(processor, prompts) for prompts in (train_prompts, valid))
    tokenizer = getattr(processor, "tokenizer", processor)
    result = train_head(target, tokenizer, train_set, valid_set, arguments.out, settings, answers=arguments.answers)
    print(acceptance_text(result))
    return 0


def acceptance_text(result: dict[str, Any]) -> str:
    """Lay out acceptance by offset, decoded beside teacher-forced."""
    taus = "  ".join(f"{name} {value:.2f}" for name, value in result.items() if name.startswith("tau"))
    pairs = zip(result["decode"], result["teacher_forced"], strict=True)
    rows = [f"{k:6d}  {decoded:6.3f}  {forced:14.3f}" for k, (decoded, forced) in enumerate(pairs, start=1)]
    return "\n".join([f"{taus}  over {result['rounds']} rounds", "offset  decode  teacher-forced", *rows])
