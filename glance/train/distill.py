"""What a block head learns from: a frozen target's own greedy text, and the kept states that go with it.

A head drafts what the target will say, so it is trained on nothing else: every prompt is answered by the target itself,
in batches, and the answers are cached on disk by prompt, so that a build that was stopped goes on. The states are then
read in one pass per batch through `glance.target.KeptStates`, as a decode reads them.

Conventions that decide numbers: greedy is the plain argmax, without the target's own penalties; a text ends with its stop
token, which is part of it; prompts of a batch are padded on the left to answer and texts on the right to read states,
which changes neither. States are held in bfloat16. The file knows nothing of heads, losses or training.

Shapes: n sequences of a batch, P prompt tokens, T tokens of prompt and text, L kept layers, d width.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from glance.decode import stop_ids
from glance.files import append_lines, read_lines, write_text
from glance.states import KeptStates, fuse
from glance.target import StreamPositions
from glance.vl import VisionPositions

TOKEN_SHAPED = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
Inputs = Mapping[str, Any]  # what `glance.tasks.encode` returns: `input_ids` (1, P), pixels, grids


@dataclass
class Example:
    """One prompt, the target's own text after it, and the states that a head reads."""

    ids: torch.Tensor  # (T,)
    start: int  # P: the text's first place
    states: torch.Tensor  # (T - 1 or T, L * d); no block needs the last token's

    @property
    def n_anchors(self) -> int:
        """Return how many places a block can hang from: every token of the text but the last."""
        return len(self.ids) - 1 - self.start


class AnswerCache:
    """The target's answers in a text file, one a line under the prompt's hash; the first line says whose they are."""

    def __init__(self, path: Path | None, target: nn.Module, max_new_tokens: int, precision: str = "float32"):
        self.path = path
        self.answers: dict[str, list[int]] = {}
        self.asked: list[str] = []  # hashes of the prompts of a build, in order
        owner = {"target": fingerprint(target), "max_new_tokens": max_new_tokens, "precision": precision}
        if path is None:
            return
        lines = read_lines(path) if path.is_file() else []
        if lines and json.loads(lines[0]) != owner:
            raise ValueError(f"{path} holds answers of another run: {lines[0]}, this one is {json.dumps(owner)}")
        for line in lines[1:]:
            if line.endswith("}"):  # a half-written last line is answered again
                row = json.loads(line)
                self.answers[row["prompt"]] = row["tokens"]
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [json.dumps({"prompt": key, "tokens": tokens}) for key, tokens in self.answers.items()]
        write_text(path, "\n".join([json.dumps(owner), *rows]) + "\n")

    def add(self, keys: Sequence[str], texts: Sequence[list[int]]) -> None:
        """Keep answers, in memory and on disk."""
        self.answers |= dict(zip(keys, texts, strict=True))
        if self.path is not None:
            rows = zip(keys, texts, strict=True)
            append_lines(self.path, [{"prompt": key, "tokens": tokens} for key, tokens in rows])


def fingerprint(model: nn.Module) -> str:
    """Return a short hash of a model's weights, as they are loaded."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)} ".encode())
        digest.update(weight.detach().reshape(-1)[:4096].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def prompt_key(inputs: Inputs) -> str:
    """Return the hash under which a prompt's answer is kept: of everything the target is given."""
    digest = hashlib.blake2b(digest_size=12)
    for name in sorted(inputs):
        if isinstance(inputs[name], torch.Tensor):
            digest.update(name.encode() + inputs[name].contiguous().view(-1).cpu().numpy().tobytes())
    return digest.hexdigest()


def keys_hash(keys: Sequence[str]) -> str:
    """Return one hash of many prompts' hashes, in order."""
    return hashlib.blake2b("".join(keys).encode(), digest_size=12).hexdigest()


def stack_inputs(prompts: Sequence[Inputs], ids: Sequence[torch.Tensor], pad: int, *, left: bool) -> dict[str, Any]:
    """Batch prompts whose ids are `ids` (perhaps with text behind): padded ids and mask `(n, T)`, pixels end to end."""
    length = max(map(len, ids))
    batch = {"input_ids": torch.full((len(ids), length), pad), "attention_mask": torch.zeros(len(ids), length).long()}
    typed = [name for name in ("mm_token_type_ids", "token_type_ids") if name in prompts[0]]
    for name in typed:
        batch[name] = torch.zeros(len(ids), length).long()
    for row, (prompt, own) in enumerate(zip(prompts, ids, strict=True)):
        at = length - len(own) if left else 0
        batch["input_ids"][row, at : at + len(own)] = own
        batch["attention_mask"][row, at : at + len(own)] = 1
        for name in typed:
            types = prompt[name].view(-1)
            batch[name][row, at : at + len(types)] = types
    for name, value in prompts[0].items():
        if name not in TOKEN_SHAPED and isinstance(value, torch.Tensor):
            batch[name] = torch.cat([prompt[name] for prompt in prompts])
    return batch


@torch.inference_mode()
def answer(
    target: nn.Module, prompts: Sequence[Inputs], max_new_tokens: int, layer_ids: Sequence[int] = ()
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Let the target answer a batch of prompts greedily, by transformers' `generate`.

    Returns:
        Each prompt's text, and its kept states `(T - 1, L * d)`: of all but the text's last token, which was never read.
    """
    stops = stop_ids(target)
    pad = _pad_id(target)
    ids = [prompt["input_ids"].view(-1) for prompt in prompts]
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stops) or None,
        pad_token_id=pad,
    )
    batch = _on_device(stack_inputs(prompts, ids, pad, left=True), target)
    length = batch["input_ids"].shape[1]
    with KeptStates(target, layer_ids) as kept, _without_rules(target):
        steps = _Steps(kept)
        out = target.generate(**batch, generation_config=greedy, logits_processor=[steps])[:, length:].tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in out]
    texts = [row[:end] for row, end in zip(out, ends, strict=True)]
    if not layer_ids:
        return texts, []
    states = torch.cat(steps.states, 1)  # (n, length + steps - 1, L * d)
    rows = zip(states, ids, ends, strict=True)
    return texts, [row[length - len(own) : length + end - 1].clone() for row, own, end in rows]


@contextmanager
def _without_rules(target: nn.Module) -> Iterator[None]:
    """Take the target's own rules of generation away while entered: `generate` falls back on them for what is not given."""
    own = target.generation_config
    target.generation_config = GenerationConfig()
    try:
        yield
    finally:
        target.generation_config = own


class _Steps(LogitsProcessor):
    """Takes the kept states of every pass of `generate`; leaves its scores alone."""

    def __init__(self, kept: KeptStates):
        self.kept = kept
        self.states = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.states.append(fuse(self.kept.take()))
        return scores


@torch.inference_mode()
def read_states(
    target: nn.Module, layer_ids: Sequence[int], prompts: Sequence[Inputs], ids: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the kept states `(T, L * d)` of each prompt with its text, in one pass; a decode reads the same."""
    batch = stack_inputs(prompts, ids, _pad_id(target), left=False)
    batch.pop("attention_mask")  # causal order hides the padding behind
    batch = _on_device(batch, target)
    positions = VisionPositions.from_inputs(batch) if "pixel_values" in batch else StreamPositions()
    inputs = positions.prefill_inputs(target, batch["input_ids"])
    with KeptStates(target, layer_ids) as kept:
        target(input_ids=batch["input_ids"], use_cache=False, logits_to_keep=1, **inputs)
        states = fuse(kept.take())
    return [row[: len(own)] for row, own in zip(states, ids, strict=True)]


def build_examples(
    target: nn.Module,
    prompts: Sequence[Inputs],
    layer_ids: Sequence[int],
    *,
    max_new_tokens: int,
    cache: AnswerCache,
    batch: int = 96,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[Example]:
    """Answer every prompt and read its states; prompts are encoded as they are needed and let go of.

    Args:
        prompts: anything with a length whose items are encoded prompts.
        cache: answers that are known are not asked for again.
        report: called with the number of prompts done, and of all.

    Returns:
        Examples in the prompts' order; texts of fewer than two tokens, which no block can hang from, are left out.
    """
    examples: list[Example] = []
    kept: dict[int, torch.Tensor] = {}
    for begin in range(0, len(prompts), 4 * batch):
        encoded = {i: prompts[i] for i in range(begin, min(begin + 4 * batch, len(prompts)))}
        keys = {i: prompt_key(prompt) for i, prompt in encoded.items()}
        cache.asked += keys.values()
        for group in _groups([i for i in encoded if keys[i] not in cache.answers], encoded, {}, batch):
            texts, states = answer(target, [encoded[i] for i in group], max_new_tokens, layer_ids)
            cache.add([keys[i] for i in group], texts)
            kept |= {i: state.bfloat16().cpu() for i, state in zip(group, states, strict=True)}
        own = {i: torch.tensor(cache.answers[keys[i]]) for i in encoded}
        own = {i: torch.cat([encoded[i]["input_ids"].view(-1).cpu(), own[i]]) for i in encoded}
        for group in _groups([i for i in encoded if i not in kept], encoded, own, batch):
            states = read_states(target, layer_ids, [encoded[i] for i in group], [own[i] for i in group])
            kept |= {i: state.bfloat16().cpu().clone() for i, state in zip(group, states, strict=True)}
        for i in encoded:
            examples.append(Example(own[i], encoded[i]["input_ids"].shape[-1], kept.pop(i)))
        report(begin + len(encoded), len(prompts))
    return [example for example in examples if example.n_anchors > 0]


def _groups(
    chosen: Sequence[int], encoded: Mapping[int, Inputs], own: Mapping[int, torch.Tensor], batch: int
) -> Iterator[list[int]]:
    """Split prompts into batches that share the shape of their pixels, like lengths together."""
    shape = {
        i: json.dumps({name: value.shape[1:] for name, value in sorted(encoded[i].items()) if name not in TOKEN_SHAPED})
        for i in chosen
    }
    length = {i: len(own[i]) if i in own else encoded[i]["input_ids"].shape[-1] for i in chosen}
    for _, alike in groupby(sorted(chosen, key=lambda i: (shape[i], length[i])), shape.get):
        alike = list(alike)
        yield from (alike[i : i + batch] for i in range(0, len(alike), batch))


def _on_device(batch: dict[str, Any], target: nn.Module) -> dict[str, Any]:
    weight = target.get_input_embeddings().weight
    return {k: v.to(weight.device, weight.dtype if v.is_floating_point() else None) for k, v in batch.items()}


def _pad_id(target: nn.Module) -> int:
    pad = getattr(target.generation_config, "pad_token_id", None)
    return int(pad) if pad is not None else min(stop_ids(target), default=0)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Let "sdpa" be two matmuls and a softmax while entered: in bfloat16 on a CPU up to three times faster."""
    fast = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = _attend
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = fast


def _attend(module, query, key, value, attention_mask, scaling=None, is_causal=None, **kwargs):
    n, heads, q, d = query.shape
    groups = heads // key.shape[1]
    scores = query.reshape(n, -1, groups * q, d) @ key.transpose(-1, -2)  # one product for the heads that share keys
    scores = scores.view(n, -1, groups, q, key.shape[2]) * (d**-0.5 if scaling is None else scaling)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and q > 1:
        attention_mask = torch.ones(q, key.shape[2], dtype=torch.bool, device=query.device).tril(key.shape[2] - q)
    elif attention_mask is not None:
        attention_mask = attention_mask[:, :, None]
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask.to(scores.dtype)
    weights = scores.softmax(-1).to(value.dtype).view(n, -1, groups * q, key.shape[2])
    return (weights @ value).view(n, heads, q, d).transpose(1, 2), None
