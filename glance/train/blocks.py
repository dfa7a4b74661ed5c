"""A block head in training: its settings, its blocks, and many of them in one pass.

An *anchor* is the place that a block hangs from: the last committed token of some round to come. One pass trains many
blocks of a sequence at once: the fused states stand first, the blocks behind, and a mask shows each block the states
strictly before its anchor and its own rows, nothing else. A block's rows are `[anchor, r revealed tokens, MASK x (B-1)]`:
mostly r = 0, as a round begins; now and then more, as when `extend_budget` reaches past a block.

Conventions that decide numbers: step k draws its batch from seed and k alone; offset k weighs exp(-(k-1) / decay); a
setting of 0 means none where that has a meaning (warmup, decay, clip, minutes, patience, scout).

Shapes: n sequences, A anchors, S = r + B rows of a block, T places of context, L kept layers, d width, V vocabulary.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from glance.head import block_embedding, block_logits, check_pair
from glance.states import decoder_layers, decoder_of
from glance.train.distill import Example

IGNORE = -100


def setting(default: Any, says: str) -> Any:
    """Declare a field of `TrainSettings` with the sentence that the command line shows."""
    return field(default=default, metadata={"help": says})


@dataclass(frozen=True)
class TrainSettings:
    """How a head looks and how it is trained; refuses what makes no sense before anything loads."""

    block: int = setting(16, "B, the block's size: its root and B-1 offsets")
    layers: int = setting(3, "layers of the head")
    kept: tuple[int, ...] = setting((), "target layers that the head reads; none: three, spread, past deepstack")
    steps: int = setting(1500, "training steps")
    batch: int = setting(24, "sequences per step")
    anchors: int = setting(8, "blocks per sequence and step")
    rate: float = setting(2e-3, "learning rate of AdamW, for norms")
    matrix_rate: float = setting(3e-3, "learning rate of Muon, for matrices")
    warmup: int = setting(80, "steps of linear warm-up, 0 for none; then a cosine")
    reveal: float = setting(0.1, "share of steps whose blocks begin with revealed tokens")
    decay: float = setting(7.0, "offset k weighs exp(-(k-1) / decay); 0: all weigh the same")
    scout: float = setting(0.0, "weight of the scout's loss, which teaches the middle layer where to look")
    clip: float = setting(1.0, "largest norm of the gradient, 0 for none")
    precision: str = setting("auto", "of training: bfloat16, float32, or auto: bfloat16 where that is fast")
    minutes: float = setting(math.inf, "end the schedule after this long, if steps do not end it sooner; 0: no limit")
    every: int = setting(250, "steps between validations")
    patience: int = setting(0, "stop after this many validations without a better one; 0: never")
    budget: int = setting(63, "tree nodes in validation")
    max_new_tokens: int = setting(128, "limit of the target's own texts")
    seed: int = setting(0, "of initial weights, order and anchors")

    def __post_init__(self) -> None:
        counts = {"block": 2, "layers": 1, "steps": 1, "batch": 1, "anchors": 1, "every": 1, "max_new_tokens": 2}
        counts |= {"warmup": 0, "patience": 0, "budget": 1, "seed": 0}
        for name, least in counts.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        for name in ("decay", "scout", "clip", "minutes"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}")
        for name in ("rate", "matrix_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)!r}")
        if not 0 <= self.reveal <= 1:
            raise ValueError(f"reveal is a share, 0 to 1, got {self.reveal!r}")
        if any(not isinstance(layer, int) or layer < 0 for layer in self.kept):
            raise ValueError(f"kept lists layers of the target, from 0, got {list(self.kept)}")
        if self.precision not in ("auto", "bfloat16", "float32"):
            raise ValueError(f"precision must be auto, bfloat16 or float32, got {self.precision!r}")


class Blocks(NamedTuple):
    """One training pass: context, blocks, and what they should say."""

    states: torch.Tensor  # (n, T, L * d)
    ids: torch.Tensor  # (n, A, S)
    labels: torch.Tensor  # (n, A, S), IGNORE where nothing is asked
    anchors: torch.Tensor  # (n, A)
    revealed: int  # r

    def to(self, device: Any) -> "Blocks":
        """Return the same on another device."""
        return Blocks(*(part.to(device) for part in self[:4]), self.revealed)


def new_head(target: nn.Module, settings: TrainSettings, mask_token_id: int) -> nn.Module:
    """Build a `dflash` head for a target, its layers and last norm copied from the target's last where shapes allow."""
    from dflash import DFlashDraftModel
    from transformers import Qwen3Config

    text = target.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    rows, width = target.get_input_embeddings().weight.shape
    heads = text.num_attention_heads
    config = Qwen3Config(
        vocab_size=rows,
        hidden_size=width,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * width,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or width // heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        max_position_embeddings=text.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
        tie_word_embeddings=False,
    )
    kept = list(settings.kept or spread_layers(target))
    config.num_target_layers = text.num_hidden_layers
    config.block_size = settings.block
    config.dflash_config = {
        "mask_token_id": mask_token_id,
        "target_layer_ids": kept,
        "block_size": settings.block,
        "kept_state": "layer_output",
    }
    torch.manual_seed(settings.seed)
    head = DFlashDraftModel(config).float()
    check_pair(head, target)
    with torch.no_grad():
        for own, other in zip(reversed(head.layers), reversed(decoder_layers(target)), strict=False):
            _copy_fitting(own, other)
        if getattr(decoder_of(target), "norm", None) is not None:
            _copy_fitting(head.norm, decoder_of(target).norm)
    return head.to(target.get_input_embeddings().weight.device)


def _copy_fitting(own: nn.Module, other: nn.Module) -> None:
    given = other.state_dict()
    for name, weight in own.state_dict().items():
        if name in given and given[name].shape == weight.shape:
            weight.copy_(given[name])


def spread_layers(target: nn.Module, count: int = 3) -> tuple[int, ...]:
    """Choose layers to keep: spread evenly from past the deepstack layers to the last but one."""
    deep = getattr(getattr(target.config, "vision_config", None), "deepstack_visual_indexes", None) or []
    last = max(0, len(decoder_layers(target)) - 2)
    first = min(len(deep), last)
    return tuple(sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)}))


def choose_mask_token(target: nn.Module, tokenizer: Any) -> int:
    """Choose the id that stands for "to be filled": the tokenizer's mask, a padded embedding row, or its padding."""
    rows = target.get_input_embeddings().weight.shape[0]
    if getattr(tokenizer, "mask_token_id", None) is not None:
        return int(tokenizer.mask_token_id)
    if tokenizer is not None and len(tokenizer) < rows:
        return rows - 1
    return int(getattr(tokenizer, "pad_token_id", None) or 0)


def draw_blocks(examples: Sequence[Example], settings: TrainSettings, mask: int, step: int) -> Blocks:
    """Draw step `step`'s batch: sequences of like length, `anchors` places of each (the first always), a span to reveal."""
    rng = random.Random(f"{settings.seed}/{step}")
    size = min(settings.batch, len(examples))
    epoch, at = divmod(step, len(examples) // size)
    order = _epoch_batches(tuple(len(example.ids) for example in examples), size, f"{settings.seed}/epoch/{epoch}")
    chosen = [examples[j] for j in order[at]]
    revealed = 0
    count = settings.anchors
    if rng.random() < settings.reveal:
        revealed = settings.block - 1 if rng.random() < 0.5 else rng.randint(1, settings.block - 1)
        count = max(1, count * settings.block // (settings.block + revealed))  # longer blocks, fewer of them
    anchors = []
    for example in chosen:
        places = range(example.start + 1, max(example.start + 2, len(example.ids) - 1 - revealed))
        places = rng.sample(places, min(count - 1, len(places)))
        anchors.append([example.start, *places, *[example.start] * (count - 1 - len(places))])
    return hang_blocks(chosen, anchors, settings.block, mask, revealed)


@lru_cache(maxsize=2)
def _epoch_batches(lengths: tuple[int, ...], size: int, seed: str) -> list[list[int]]:
    """Cut a shuffled epoch into batches of sequences of like length: sorted within windows of eight batches."""
    shuffle = random.Random(seed)
    order = list(range(len(lengths)))
    shuffle.shuffle(order)
    windows = (sorted(order[i : i + 8 * size], key=lengths.__getitem__) for i in range(0, len(order), 8 * size))
    order = [j for window in windows for j in window]
    batches = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
    shuffle.shuffle(batches)
    return batches


def hang_blocks(
    examples: Sequence[Example], anchors: Sequence[Sequence[int]], block: int, mask: int, revealed: int = 0
) -> Blocks:
    """Hang a block from each anchor `(n, A)`: `[anchor, revealed tokens, MASK x (B-1)]`, with labels on the masks."""
    length = -(-max(len(example.ids) for example in examples) // 8) * 8
    truth = torch.full((len(examples), length + revealed + block), IGNORE)
    states = examples[0].states.new_zeros(len(examples), length, examples[0].states.shape[-1])
    for row, example in enumerate(examples):
        truth[row, : len(example.ids)] = example.ids
        states[row, : len(example.states)] = example.states
    places = torch.tensor(anchors)  # (n, A)
    steps = torch.arange(revealed + block)
    rows = places[..., None] + steps  # (n, A, S)
    truth = truth.gather(1, rows.flatten(1)).view_as(rows)
    known = steps <= revealed
    ids = torch.where(known & (truth != IGNORE), truth, mask)
    return Blocks(states, ids, torch.where(known, IGNORE, truth), places, revealed)


def run_blocks(head: nn.Module, target: nn.Module, blocks: Blocks) -> torch.Tensor:
    """Run every block in one pass; return hidden states `(n, A * S, d)`."""
    (n, length, _), (_, a, s) = blocks.states.shape, blocks.ids.shape
    device = blocks.states.device
    places = torch.arange(length, device=device)
    rows = (blocks.anchors[..., None] + torch.arange(s, device=device)).flatten(1)  # (n, A * S)
    seen = torch.zeros(n, a * s, length + a * s, dtype=torch.bool, device=device)
    seen[..., :length] = (places < blocks.anchors[..., None]).repeat_interleave(s, 1)  # strictly before the anchor
    owner = torch.arange(a * s, device=device) // s
    seen[..., length:] = owner[:, None] == owner
    embedded = block_embedding(head, target)(blocks.ids.flatten(1))
    dtype = torch.bfloat16 if torch.is_autocast_enabled(device.type) else embedded.dtype
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -1e30)
    return head(
        target_hidden=blocks.states.to(dtype),
        noise_embedding=embedded,
        position_ids=torch.cat([places.expand(n, -1), rows], 1),
        attention_mask=mask[:, None],
    )


def block_loss(
    head: nn.Module, target: nn.Module, blocks: Blocks, settings: TrainSettings, scout: nn.Module | None = None
) -> torch.Tensor:
    """Return the mean cross-entropy of the masked rows, offset k weighing exp(-(k-1) / decay).

    With a `scout`, an auxiliary cosine loss is added: a linear map of the head's middle layer, thrown away after training,
    is compared with the target's first kept layer one place before the row's token.
    """
    middle: list[torch.Tensor] = []
    hook = head.layers[(len(head.layers) - 1) // 2].register_forward_hook(lambda *call: middle.append(call[-1]))
    hidden = run_blocks(head, target, blocks)
    hook.remove()
    labelled = (blocks.labels != IGNORE).flatten(1)
    k = torch.arange(blocks.ids.shape[-1], device=hidden.device) - blocks.revealed  # 1, 2, ... on the masks
    decay = settings.decay or math.inf  # without a decay all offsets weigh the same
    weights = torch.exp(-(k - 1) / decay).expand_as(blocks.labels).flatten(1)[labelled]
    logits = block_logits(head, target)(hidden[labelled]).float()
    losses = F.cross_entropy(logits, blocks.labels.flatten(1)[labelled], reduction="none")
    if scout is not None:
        losses = losses + settings.scout * _scout_losses(scout, middle[0], blocks)[labelled]
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)  # texts may end before the masks begin


def _scout_losses(scout: nn.Module, middle: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Return 1 - cosine between what the scout makes of each row and the target's state one place before it `(n, A * S)`."""
    n, length, _ = blocks.states.shape
    width = middle.shape[-1]
    before = blocks.anchors[..., None] + torch.arange(blocks.ids.shape[-1], device=middle.device) - 1
    before = before.view(n, -1, 1).clamp(0, length - 1).expand(-1, -1, width)
    wanted = blocks.states[..., :width].gather(1, before)
    foreseen = scout(F.rms_norm(middle.float(), (width,)))
    return 1 - F.cosine_similarity(foreseen.float(), wanted.float(), dim=-1)
