"""How well the pocket target reads: greedy answers to the evaluation sets, scored by task, kind, font and size.

Conventions: float32, transformers' own `generate`, plain argmax, at most 128 new tokens with the stop token; prompts of
equal length share a batch. Entropy is in nats, of the next-token distribution at every token of the greedy answer, pooled
over a task's tokens. Shares of captions are pooled over mentions, everything else is a mean over prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from glance.pocket.batches import encode_prompt
from glance.pocket.canvas import CELL
from glance.pocket.evalset import read_set
from glance.pocket.model import PATCH, cut_patches, double_frames, stack_pixels
from glance.pocket.render import TASKS
from glance.pocket.scores import score_caption, score_reading

MAX_NEW_TOKENS = 128


def load_pocket(folder: Path, dtype: torch.dtype = torch.float32):
    """Load the target's model and tokenizer from its folder, in float32 for evaluation."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no target here (config.json is missing); train one with train-target")
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def generate_batch(model, tokenizer, images: list[Image.Image], prompts: list[list[int]]) -> list[dict]:
    """Answer prompts of one length greedily; return text, token count, whether it stopped, and entropies."""
    pixels = stack_pixels(images)
    ids = torch.tensor(prompts)
    height, width = pixels.shape[1:3]
    image_token = model.config.image_token_id
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == image_token).long(),
        pixel_values=double_frames(cut_patches(pixels)),
        image_grid_thw=torch.tensor([[1, height // PATCH, width // PATCH]] * len(ids)),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logp = torch.stack(out.logits, 1).float().log_softmax(-1)  # (n, new tokens, vocabulary)
    entropy = -(logp.exp() * logp).sum(-1)
    rows = []
    for new, nats in zip(out.sequences[:, ids.shape[1] :].tolist(), entropy.tolist(), strict=True):
        stopped = tokenizer.eos_token_id in new
        count = new.index(tokenizer.eos_token_id) + 1 if stopped else len(new)
        text = tokenizer.decode(new[: count - stopped])
        rows.append({"text": text, "tokens": count, "stopped": stopped, "entropy_nats": nats[:count]})
    return rows


def answer_rows(model, tokenizer, images: list[Image.Image], prompts: list[str], size: int = 32) -> list[dict]:
    """Answer prompts about equally sized images greedily, in their own order."""
    cells = images[0].width * images[0].height // CELL**2
    encoded = [encode_prompt(tokenizer, prompt, cells) for prompt in prompts]
    by_length = defaultdict(list)
    answers = [{}] * len(prompts)
    for i, ids in enumerate(encoded):
        by_length[len(ids)].append(i)
    for group in by_length.values():
        for begin in range(0, len(group), size):
            chosen = group[begin : begin + size]
            batch = generate_batch(model, tokenizer, [images[i] for i in chosen], [encoded[i] for i in chosen])
            for i, answer in zip(chosen, batch, strict=True):
                answers[i] = answer
    return answers


def pool(scored: Iterable[dict]) -> dict[str, float]:
    """Average the scores of some rows; captions' counts become shares of mentions."""
    columns = defaultdict(list)
    for row in scored:
        for name, value in row["scores"].items():
            columns[name].append(value)
    out: dict[str, float] = {"prompts": max((len(c) for c in columns.values()), default=0)}
    if "mentions" in columns:
        mentions = sum(columns["mentions"]) or 1
        things = sum(columns["things"])
        out |= {name: sum(columns[name]) / mentions for name in ("grounded", "fitting", "repeats")}
        return out | {"missed": sum(columns["missed"]) / things, "mentions": sum(columns["mentions"])}
    return out | {name: mean(values) for name, values in columns.items()}


def summarise(scored: list[dict]) -> dict:
    """Summarise a task: all of it, and by kind, font and size."""
    nats = [value for row in scored for value in row["answer"]["entropy_nats"]]
    out = {"all": pool(scored), "entropy_nats": mean(nats)}
    out["median_tokens"] = median(row["answer"]["tokens"] for row in scored)
    out["not_stopped"] = mean(not row["answer"]["stopped"] for row in scored)
    for key in ("kind", "font", "size"):
        values = sorted({row["row"][key] for row in scored})
        out[f"by_{key}"] = {str(v): pool(row for row in scored if row["row"][key] == v) for v in values}
    return round_all(out)


def round_all(value):
    """Round every float in a nested table to five places."""
    if isinstance(value, dict):
        return {key: round_all(item) for key, item in value.items()}
    return round(value, 5) if isinstance(value, float) else value


def score_task(model, tokenizer, folder: Path, task: str, limit: int | None = None) -> list[dict]:
    """Answer and score a task's rows: each with its `row`, `answer` and `scores`."""
    rows = read_set(folder, task, limit)
    images = [Image.open(folder / row["image"]).convert("RGB") for row in rows]
    answers = answer_rows(model, tokenizer, images, [row["prompt"] for row in rows])
    score = {True: score_caption, False: score_reading}
    return [
        {"row": row, "answer": answer, "scores": score["objects" in row](row, answer["text"])}
        for row, answer in zip(rows, answers, strict=True)
    ]


def evaluate(target: Path, sets: dict[str, Path], limit: int | None = None) -> dict:
    """Evaluate a target's folder on data folders.

    Args:
        sets: name -> data folder ("eval": the held-out words, "seen": the training lexicon).
        limit: rows per task; None for all.

    Returns:
        set -> task -> summary; a task that a folder lacks is left out.
    """
    model, tokenizer = load_pocket(target)
    return {
        name: {
            task: summarise(score_task(model, tokenizer, folder, task, limit))
            for task in TASKS
            if (folder / f"{task}.jsonl").is_file()
        }
        for name, folder in sets.items()
    }
