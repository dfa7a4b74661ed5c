"""Training a block head on any frozen target: the steps, validation by real decoding, checkpoints, and the command.

Conventions that decide numbers: batches depend on seed and step alone and nothing else is random, so a run that was stopped
takes the same steps again, bit for bit (a limit in minutes gives this up); a run keeps the head of its best validation, by
tau over rounds that were not cut; weights are written in bfloat16. What a step learns from stands in `glance.train.blocks`,
where the texts and states come from in `glance.train.distill`.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glance.drafters.block import BlockDrafter
from glance.files import append_lines, plain, write_json
from glance.head import load_block_head
from glance.precision import describe, training_precision
from glance.train.acceptance import compare_acceptance, decode_rounds, tau_of
from glance.train.blocks import (
    TrainSettings,
    block_loss,
    choose_mask_token,
    draw_blocks,
    new_head,
)
from glance.train.distill import (
    AnswerCache,
    Example,
    Inputs,
    build_examples,
    data_hash,
    fingerprint,
    plain_attention,
)
from glance.train.muon import build_muon


class HeadRun:
    """A head in training: its optimisers, how far it is, the best validation so far; saved and resumed as one."""

    def __init__(self, head: nn.Module, target: nn.Module, settings: TrainSettings, mask: int, owner: dict[str, Any]):
        self.head = head
        self.target = target
        self.settings = settings
        self.mask = mask
        self.owner = owner
        self.step = 0
        self.seconds = 0.0
        self.best = -math.inf
        self.stale = 0  # validations since the best
        self.precision = training_precision(settings.precision, self._device)
        width = target.get_input_embeddings().weight.shape[1]
        self.scout = nn.Linear(width, width).to(self._device) if settings.scout else None
        matrices = [weight for weight in head.parameters() if weight.dim() == 2]
        others = [weight for weight in head.parameters() if weight.dim() != 2]
        others += [] if self.scout is None else list(self.scout.parameters())
        self.optimisers = [
            torch.optim.AdamW(others, lr=settings.rate, betas=(0.9, 0.97), weight_decay=0.0),
            build_muon(matrices, settings.matrix_rate, self.precision),
        ]

    @property
    def progress(self) -> float:
        """Return how much of the schedule is behind, 0 to 1."""
        in_time = self.seconds / 60 / self.settings.minutes if self.settings.minutes else 0.0
        return min(1.0, max(self.step / self.settings.steps, in_time))

    def advance(self, examples: Sequence[Example]) -> float:
        """Take one step; return its loss."""
        began = time.perf_counter()
        settings = self.settings
        warmth = min(1.0, (self.step + 1) / max(1, settings.warmup))
        scale = warmth * (0.03 + 0.485 * (1 + math.cos(math.pi * self.progress)))
        for optimiser, rate in zip(self.optimisers, (settings.rate, settings.matrix_rate), strict=True):
            optimiser.param_groups[0]["lr"] = rate * scale
        blocks = draw_blocks(examples, settings, self.mask, self.step).to(self._device)
        with plain_attention(), torch.autocast(self._device, torch.bfloat16, enabled=self.precision == "bfloat16"):
            loss = block_loss(self.head, self.target, blocks, settings, self.scout)
        loss.backward()
        if settings.clip:
            nn.utils.clip_grad_norm_(self.head.parameters(), settings.clip)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        self.seconds += time.perf_counter() - began
        return loss.item()

    @property
    def _device(self) -> str:
        return next(self.head.parameters()).device.type

    @property
    def _parts(self) -> list[Any]:
        return [self.head, *self.optimisers, *([] if self.scout is None else [self.scout])]

    def save(self, path: Path) -> None:
        """Write the checkpoint; a kill leaves the old one whole."""
        state = {name: getattr(self, name) for name in ("step", "seconds", "best", "stale")}
        state["owner"] = plain(self.owner)
        state["parts"] = [part.state_dict() for part in self._parts]
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def load(self, path: Path) -> None:
        """Resume from a checkpoint of this very run; refuse another's, naming what differs."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        owner = plain(self.owner)
        theirs = plain(state.pop("owner"))
        differ = [f"{k} {theirs.get(k)!r} there, {v!r} here" for k, v in owner.items() if theirs.get(k) != v]
        if differ:
            raise ValueError(f"{path} is a checkpoint of another run: {'; '.join(differ)}; choose another folder")
        for part, saved in zip(self._parts, state.pop("parts"), strict=True):
            part.load_state_dict(saved)
        vars(self).update(state)


def save_head(head: nn.Module, out: Path) -> None:
    """Write a head's folder, weights in bfloat16."""
    copy.deepcopy(head).to(torch.bfloat16).save_pretrained(out)


def train(
    run: HeadRun, examples: Sequence[Example], out: Path, validate: Callable[[], float], report: Callable[[str], None]
) -> None:
    """Take the steps that are left; validate, log and save every `every` steps, and keep the best head in `out`."""
    losses: list[float] = []
    while run.progress < 1 and not 0 < run.settings.patience <= run.stale:
        losses.append(run.advance(examples))
        if not math.isfinite(losses[-1]):
            raise ValueError(
                f"step {run.step}: the loss is {losses[-1]}; lower rate and matrix_rate (now {run.settings.rate} and "
                f"{run.settings.matrix_rate}), or lower clip (now {run.settings.clip}, 0 for none)"
            )
        if run.step % run.settings.every and run.progress < 1:
            continue
        tau = validate()
        loss = sum(losses) / len(losses)
        score = tau if math.isfinite(tau) else -loss
        run.stale = 0 if score > run.best else run.stale + 1
        if score > run.best:
            run.best = score
            save_head(run.head, out)
        row = {"step": run.step, "seconds": round(run.seconds), "loss": loss, "tau": tau}
        append_lines(out / "log.jsonl", [row | {"best": run.best}])
        run.save(out / "checkpoint.pt")
        left = run.seconds * (1 / run.progress - 1) / 60
        bar = ("#" * int(30 * run.progress)).ljust(30, ".")
        judged = f"tau {tau:.2f} (best {run.best:.2f})"
        if not math.isfinite(tau):
            judged = "no whole round in the held-out answers: the head of the lowest training loss is kept"
        report(f"[{bar}] step {run.step}  loss {loss:.3f}  {judged}  {left:.1f} min left")
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
    device = target.get_input_embeddings().weight.device
    if settings.precision == "auto":
        report(describe(device))
    settings = replace(settings, precision=training_precision(settings.precision, device))
    head = new_head(target, settings, mask).train()
    head.config.dflash_config["trained_in"] = settings.precision
    owner = {
        "target": fingerprint(target),
        "prompts": data_hash(prompts),
        "held_out": data_hash(held_out),
        **asdict(settings),
    }
    run = HeadRun(head, target, settings, mask, owner)
    if (out / "checkpoint.pt").is_file():
        run.load(out / "checkpoint.pt")
        report(f"resumed at step {run.step}")
    out.mkdir(parents=True, exist_ok=True)
    cache = AnswerCache(Path(answers or out / "answers.jsonl"), target, settings.max_new_tokens, settings.precision)
    examples = learn_from(target, prompts, head, settings, cache, report)
    tree = BlockDrafter(head, settings.budget)
    validate = lambda: tau_of(decode_rounds(head, target, held_out, tree, settings.max_new_tokens))  # noqa: E731
    train(run, examples, out, validate, report)
    result = compare_acceptance(load_block_head(out, torch.float32), target, held_out, settings, mask)
    result = {"precision": settings.precision, **result}
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
    """Let the target answer the prompts, in the precision of training; refuse texts that teach nothing."""
    reader = copy.deepcopy(target).to(torch.bfloat16) if settings.precision == "bfloat16" else target
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
