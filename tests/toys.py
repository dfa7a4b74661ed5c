"""Tiny random targets of transformers' own classes, tiny block heads for them, and a head that knows the answer.

Everything is made in memory in milliseconds, in fp32, from a seed; `save_target` writes a folder that loads like a
published checkpoint. All targets share one vocabulary: 256 bytes, then the special tokens below.
"""

import json
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from glance.tree import make_tree
from glance.vl import VisionPositions

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|mask|>",
)
EOS, IM_START, IM_END, VISION_START, VISION_END, IMAGE, VIDEO, MASK = range(256, 264)
VOCAB = 272  # rows are padded past the last special, as published tables are
WIDTH = 32
LAYERS = 4

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}  # head_dim 8: 4 frequencies
PLACES = {"image_token_id": IMAGE, "video_token_id": VIDEO}
EDGES = {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
GLM_EDGES = {
    "image_start_token_id": VISION_START,
    "image_end_token_id": VISION_END,
    "video_start_token_id": 264,
    "video_end_token_id": 265,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text_target(family: str = "qwen3", *, seed: int = 0, attention: str = "sdpa", **changes: Any) -> nn.Module:
    """Build a tiny random text target: qwen3, qwen2, llama, gpt2, mistral or gemma2 (the last two with windows)."""
    if family == "gpt2":
        settings = {
            "vocab_size": VOCAB,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": 4,
            "n_positions": 1024,
            "initializer_range": 0.25,
        }
        settings |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    else:
        settings = TEXT | ({"head_dim": 8} if family in ("qwen3", "gemma2") else {})
        settings["tie_word_embeddings"] = False
    config = {
        "qwen3": transformers.Qwen3Config,
        "qwen2": transformers.Qwen2Config,
        "llama": transformers.LlamaConfig,
        "gpt2": transformers.GPT2Config,
        "mistral": transformers.MistralConfig,
        "gemma2": transformers.Gemma2Config,
    }[family](**settings | changes)
    config._attn_implementation = attention
    torch.manual_seed(seed)
    return _frozen(transformers.AutoModelForCausalLM.from_config(config))


def vision_config(family: str, **changes: Any) -> Any:
    """Return a tiny configuration of a vision-language family; `changes` go to its text half."""
    text = TEXT | {"rope_parameters": dict(MROPE)} | changes
    deep = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 4,
        "out_hidden_size": WIDTH,
        "patch_size": 8,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.25,
    }
    if family in ("qwen2_vl", "qwen2_5_vl"):
        vision = {"patch_size": 8, "depth": 2, "num_heads": 4, "initializer_range": 0.25}
        if family == "qwen2_vl":
            vision |= {"embed_dim": 32, "hidden_size": WIDTH, "mlp_ratio": 2}
            return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **PLACES, **EDGES)
        vision |= {
            "hidden_size": 32,
            "out_hidden_size": WIDTH,
            "intermediate_size": 32,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        }
        return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **PLACES, **EDGES)
    if family == "qwen3_vl":
        return transformers.Qwen3VLConfig(text_config=text | {"head_dim": 8}, vision_config=deep, **PLACES, **EDGES)
    if family == "qwen3_vl_moe":
        experts = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        return transformers.Qwen3VLMoeConfig(text_config=text | experts, vision_config=deep, **PLACES, **EDGES)
    if family in ("glm4v", "glm_ocr"):
        kind = transformers.Glm4vConfig if family == "glm4v" else transformers.GlmOcrConfig
        vision = {
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 4,
            "image_size": 64,
            "patch_size": 8,
            "out_hidden_size": WIDTH,
        }
        vision |= {"intermediate_size": 32, "initializer_range": 0.25}
        if family == "glm_ocr":
            text["head_dim"] = 8
        return kind(text_config=text, vision_config=vision, **PLACES, **GLM_EDGES)
    if family == "paddleocr_vl":
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        vision |= {"image_size": 64, "patch_size": 8}
        settings = dict(tie_word_embeddings=False, **PLACES, **EDGES)
        return transformers.PaddleOCRVLConfig(text_config=text | {"head_dim": 8}, vision_config=vision, **settings)
    if family == "llava":
        text = transformers.LlamaConfig(**TEXT | changes)
        vision = transformers.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
        )
        return transformers.LlavaConfig(
            text_config=text, vision_config=vision, image_token_index=IMAGE, vision_feature_layer=-1
        )
    if family == "idefics3":
        text = transformers.LlamaConfig(**TEXT | changes)
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        vision |= {"image_size": 32, "patch_size": 8}
        return transformers.Idefics3Config(
            text_config=text, vision_config=vision, image_token_id=IMAGE, scale_factor=2, tie_word_embeddings=False
        )
    if family == "gemma3":
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        vision |= {"image_size": 32, "patch_size": 8}
        settings = {"image_token_index": IMAGE, "boi_token_index": VISION_START, "eoi_token_index": VISION_END}
        settings |= {"mm_tokens_per_image": 4, "tie_word_embeddings": False}
        text = TEXT | {"head_dim": 8, "sliding_window": 512, "tie_word_embeddings": False} | changes
        return transformers.Gemma3Config(text_config=text, vision_config=vision, **settings)
    if family == "gemma4":
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        vision |= {"num_key_value_heads": 4, "head_dim": 8, "patch_size": 8, "pooling_kernel_size": 2}
        vision |= {"position_embedding_size": 64}
        text = {name: value for name, value in TEXT.items() if not name.endswith("token_id")} | {"pad_token_id": 0}
        text |= {"head_dim": 8, "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 2}
        text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
        text |= {"use_bidirectional_attention": "vision"} | changes
        places = PLACES | {"audio_token_id": 270, "boa_token_id": 268, "eoa_token_index": 269}
        places |= {"boi_token_id": VISION_START, "eoi_token_id": VISION_END}
        return transformers.Gemma4Config(text_config=text, vision_config=vision, tie_word_embeddings=True, **places)
    if family == "hunyuan_vl":
        vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        vision |= {"patch_size": 8, "out_hidden_size": WIDTH, "text_hidden_size": WIDTH, "max_image_size": 64}
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1, 1]}
        text = TEXT | {"head_dim": 8, "rope_parameters": rope, "tie_word_embeddings": False} | changes
        edges = {"im_start_id": VISION_START, "im_end_id": VISION_END, "im_newline_id": 264}
        settings = {"image_token_id": IMAGE, "tie_word_embeddings": False} | edges
        return transformers.HunYuanVLConfig(text_config=text, vision_config=vision, **settings)
    if family in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"):
        return _omni_config(family, changes)
    raise KeyError(family)


def _omni_config(family: str, changes: dict[str, Any]) -> Any:
    """Return the configuration of a Qwen-Omni thinker."""
    audio = {"num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16}
    audio |= {"output_dim": WIDTH}
    text = TEXT | {"rope_parameters": dict(MROPE)} | changes
    edges = EDGES | {"audio_start_token_id": 268, "audio_end_token_id": 269}
    if family == "qwen2_5_omni_thinker":
        vision = {"patch_size": 8, "depth": 2, "num_heads": 4, "hidden_size": 32, "out_hidden_size": WIDTH}
        vision |= {"intermediate_size": 32, "window_size": 32, "fullatt_block_indexes": [1], "initializer_range": 0.25}
        places = {"image_token_index": IMAGE, "video_token_index": VIDEO, "audio_token_index": 270}
        return transformers.Qwen2_5OmniThinkerConfig(
            text_config=text, vision_config=vision, audio_config=audio, **places, **edges
        )
    experts = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": WIDTH}
    vision |= {"patch_size": 8, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return transformers.Qwen3OmniMoeThinkerConfig(
        text_config=text | experts, vision_config=vision, audio_config=audio, **PLACES, audio_token_id=270, **edges
    )


MROPE_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm_ocr", "paddleocr_vl")
OUTER_FAMILIES = (
    "qwen2_5_omni_thinker",
    "qwen3_omni_moe_thinker",
    "hunyuan_vl",
)  # rope indices elsewhere, other counts
PLAIN_FAMILIES = ("llava", "idefics3", "gemma3", "gemma4")


def vision_target(family: str = "qwen3_vl", *, seed: int = 0, attention: str = "sdpa", **changes: Any) -> nn.Module:
    """Build a tiny random vision-language target of a family."""
    config = vision_config(family, **changes)
    torch.manual_seed(seed)
    thinkers = {
        "qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
        "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
    }
    if family in thinkers:
        config._attn_implementation = attention
        return _frozen(getattr(transformers, thinkers[family])(config).float())
    return _frozen(
        transformers.AutoModelForImageTextToText.from_config(config, attn_implementation=attention, dtype=torch.float32)
    )


def _frozen(model: nn.Module) -> nn.Module:
    # Biases and whatever a class fills with a constant or leaves uninitialised would make all tokens alike.
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and float(parameter.detach().std()) < 0.05:
            nn.init.normal_(parameter, std=0.1 if "embed" in name else 0.2)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    model.generation_config.bos_token_id = None
    return model.eval().requires_grad_(False)


@dataclass(eq=False)
class Prompt:
    """A prompt with its images: what our functions take, and what transformers' `generate` takes."""

    ids: torch.Tensor  # (1, P)
    positions: VisionPositions | None
    inputs: dict[str, Any]
    delta: int  # what the delta must be

    def greedy(self, model: nn.Module, n: int, **settings: Any) -> list[int]:
        """Return the n tokens of transformers' own greedy decoding (fewer with a stop token)."""
        return reference(model, self.ids, n, **self.inputs, **settings)


def text_prompt(length: int = 9, seed: int = 0) -> torch.Tensor:
    """Return random byte ids `(1, length)`."""
    return torch.randint(256, (1, length), generator=torch.Generator().manual_seed(seed))


def vision_prompt(
    model: nn.Module, grids: list[tuple[int, int]] | None = None, *, apart: bool = True, seed: int = 0
) -> Prompt:
    """Build a prompt with one image per grid (height, width in merged patches), adjacent or with text between."""
    rng = torch.Generator().manual_seed(seed)
    grids = [(2, 3)] if grids is None else grids
    family, vision = model.config.model_type, getattr(model.config, "vision_config", None)
    text = lambda n: torch.randint(256, (n,), generator=rng).tolist()  # noqa: E731
    ids = text(3)
    per_image = {"llava": 16, "idefics3": 4, "gemma3": 4, "gemma4": 4}.get(family)
    for height, width in grids:
        tokens = height * (width + 1) + 2 if family == "hunyuan_vl" else height * width
        ids += [VISION_START] + [IMAGE] * (per_image or tokens) + [VISION_END] + (text(2) if apart else [])
    ids = torch.tensor([ids + text(4)])
    inputs: dict[str, Any] = {}
    delta = 0
    if grids and per_image:
        shape = (1, len(grids), 3, 32, 32) if family == "idefics3" else (len(grids), 3, 32, 32)
        inputs["pixel_values"] = torch.randn(shape, generator=rng)
        if family == "gemma4":  # patches in rows, and where they stand
            inputs["pixel_values"] = torch.rand(len(grids), 16, 3 * 8 * 8, generator=rng)
            places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)
            inputs["image_position_ids"] = places.expand(len(grids), -1, -1).contiguous()
            inputs["mm_token_type_ids"] = (ids == IMAGE).long()
        if family == "gemma3":  # by these an image's tokens see each other in the prefill
            inputs["token_type_ids"] = (ids == IMAGE).long()
    elif grids:
        merge = vision.spatial_merge_size
        inputs["image_grid_thw"] = torch.tensor([[1, h * merge, w * merge] for h, w in grids])
        n = int(inputs["image_grid_thw"].prod(-1).sum())
        if family == "paddleocr_vl":
            inputs["pixel_values"] = torch.randn(n, 3, 8, 8, generator=rng)
        else:
            frames = 1 if family == "hunyuan_vl" else 2
            inputs["pixel_values"] = torch.randn(n, 3 * frames * 8 * 8, generator=rng)
        if not family.endswith("thinker"):
            inputs["mm_token_type_ids"] = (ids == IMAGE).long()
        delta = 0 if family == "hunyuan_vl" else -sum(h * w - max(h, w) for h, w in grids)
    return Prompt(ids, VisionPositions.from_inputs(inputs) if grids else None, inputs, delta)


def reference(model: nn.Module, ids: torch.Tensor, n: int, **inputs: Any) -> list[int]:
    """Return the new tokens of transformers' own `generate(do_sample=False)`, with an attention mask of ones."""
    ones = torch.ones_like(ids)
    for owner in (model, getattr(model, "model", None)):
        if hasattr(owner, "rope_deltas"):
            owner.rope_deltas = None  # state that leaks from the prompt before
    out = model.generate(ids, attention_mask=ones, do_sample=False, max_new_tokens=n, **inputs)
    return out[0, ids.shape[1] :].tolist()


def block_head(
    model: nn.Module, *, second: bool = False, block: int = 6, layer_ids: tuple = (0, 2), seed: int = 1, **changes: Any
) -> nn.Module:
    """Build a tiny random `DFlashDraftModel` (`second`: `DFlash2DraftModel`) for a target."""
    from dflash import DFlash2DraftModel, DFlashDraftModel

    width = model.get_input_embeddings().weight.shape[1]
    drafting = {"mask_token_id": MASK % len(model.get_input_embeddings().weight), "target_layer_ids": list(layer_ids)}
    if second:
        drafting |= {"selector_rank": 4, "selector_top_k": 5, "conv_kernel_size": 2, "conv_group_size": 8}
    config = transformers.Qwen3Config(
        vocab_size=len(model.get_input_embeddings().weight),
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    config.num_target_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    config.block_size = block
    config.dflash_config = drafting | changes
    torch.manual_seed(seed)
    head = (DFlash2DraftModel if second else DFlashDraftModel)(config)
    for name, parameter in head.named_parameters():
        if "base_kernel" in name or "codebook" in name:  # left empty by the class
            nn.init.normal_(parameter, std=0.3)
    return head.eval().requires_grad_(False)


@dataclass
class OracleHead:
    """A block head that knows the whole stream and errs where it is told to.

    Args:
        stream: prompt and continuation, the truth.
        block_size: B.
        rank_of: (root's place, offset) -> rank that the right token gets at that offset; None leaves it out of reach.
        scores: logit of rank 0, 1, 2, ...; further ranks fall off steeply.
    """

    stream: list[int]
    block_size: int = 6
    rank_of: Callable[[int, int], int | None] = lambda start, offset: 0
    target_layer_ids: tuple = (0, 2)
    mask_token_id: int = MASK
    vocab: int = VOCAB

    def __post_init__(self) -> None:
        self.config = transformers.Qwen3Config(num_hidden_layers=1, hidden_size=WIDTH, vocab_size=self.vocab)
        self.seen = 0  # committed positions whose states were read
        self.calls: list[int] = []  # root's place of every pass

    def __call__(self, *, target_hidden, noise_embedding, position_ids, past_key_values, use_cache):
        n, q = target_hidden.shape[1], noise_embedding.shape[1]
        start = int(position_ids[0, n])
        assert position_ids.tolist() == [list(range(start - n, start + q))], "plain places, context then block"
        self.seen = n if start == n else self.seen + n
        assert self.seen == start, "the states of every committed position but the root, each once"
        places = torch.arange(start - n, start + q).float().view(1, 1, -1, 1)
        keys, _ = past_key_values.update(places, places, 0, {})  # as an attention layer would
        assert use_cache and keys.flatten().tolist() == list(range(start + q)), "the cache holds the committed places"
        self.calls.append(start)
        hidden = torch.zeros(1, q, noise_embedding.shape[-1])
        hidden[..., 0], hidden[..., 1] = float(start), torch.arange(q).float()
        return hidden

    def compute_logits(self, hidden: torch.Tensor, output_head: Any) -> torch.Tensor:
        rows = []
        for start, offset in hidden[0, :, :2].long().tolist():
            place = start + offset
            right = self.stream[place] if place < len(self.stream) else place % 256
            rank = self.rank_of(start, offset)
            order = [(right + 1 + i) % self.vocab for i in range(self.vocab - 1)]  # the wrong ones, in a fixed order
            order.insert(self.vocab if rank is None else rank, right)
            row = torch.empty(self.vocab)
            row[torch.tensor(order)] = -0.7 * torch.arange(self.vocab).float().clamp(max=60)
            rows.append(row)
        return torch.stack(rows)[None]


def accept_lengths(lengths: list[int], first: int) -> Callable[[int, int], int | None]:
    """Return a `rank_of` whose rounds accept `lengths`, over and over; `first` is the first root's place."""
    accepted, place = {}, first
    for i in range(1000):
        accepted[place] = lengths[i % len(lengths)]
        place += accepted[place] + 1
    return lambda start, offset: 0 if offset <= accepted.get(start, 0) else None


@dataclass
class RandomDrafter:
    """A drafter of random trees of random shape, half of whose tokens come from the truth; it reads no states."""

    stream: list[int]
    seed: int = 0
    size: int = 20
    layer_ids: tuple = ()
    chain: bool = False

    def __post_init__(self) -> None:
        self.max_nodes = self.size
        self._rng = torch.Generator().manual_seed(self.seed)

    def begin(self, target: Any, lap: Any) -> None:
        self.target = target

    def draft(self, root: int, fused: Any) -> Any:
        import numpy as np

        from glance.drafters import Draft

        assert fused is None
        return Draft(np.empty((0, 0), np.int64), np.empty((0, 0)))

    def grow(self, draft: Any) -> Any:
        pick = lambda n: int(torch.randint(n, (1,), generator=self._rng))  # noqa: E731
        tokens, parents, depths, taken = [], [], [], set()
        for _ in range(pick(self.size + 1)):
            parent = pick(len(tokens) + 1) - 1
            depth = 1 + (depths[parent] if parent >= 0 else 0)
            place = self.target.length + depth
            token = self.stream[place] if pick(2) and place < len(self.stream) else pick(256)
            if (parent, token) not in taken:
                taken.add((parent, token))
                tokens.append(token), parents.append(parent), depths.append(depth)
        return make_tree(tokens, parents, depths, [0] * len(tokens), [-1.0] * len(tokens))


@contextmanager
def forwards(model: nn.Module):
    """Count the passes of a model, by its own forward or by its decoder alone: yields a list of each one's inputs."""
    seen: list[Any] = []
    inside: list[Any] = []

    def enter(module, args, kwargs):
        if not inside:
            seen.append(kwargs)
        inside.append(module)

    hooks = []
    for module in (model, model.get_decoder()):
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(lambda *_: inside.pop() and None, always_call=True))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def refused(call: Callable[[], Any], told: str, forwards: int = 0, model: nn.Module | None = None) -> str:
    """Assert that `call` raises one line of ValueError that says `told`, after exactly `forwards` passes of `model`.

    Returns:
        the line, for what else it should say.
    """
    with count_passes(model) as passes, pytest.raises(ValueError, match=told) as caught:
        call()
    assert len(passes) == forwards
    assert "\n" not in str(caught.value)
    return str(caught.value)


def count_passes(model: nn.Module | None) -> Any:
    """Return `forwards` of a model, or an empty list where there is none to count."""
    return forwards(model) if model is not None else nullcontext([])


def tokenizer(**names: str) -> Any:
    """Build a byte-level tokenizer with the special tokens at the ids above, further named ones, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIALS),
        extra_special_tokens=names,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_target(model: nn.Module, folder: Path) -> Path:
    """Write a target as published checkpoints are: config, safetensors, tokenizer and, for images, preprocessor files."""
    model.save_pretrained(folder)
    family = model.config.model_type
    named = {"image_token": SPECIALS[IMAGE - 256], "video_token": SPECIALS[VIDEO - 256]}
    tokenizer(**(named if family in ("glm4v", "paddleocr_vl") else {})).save_pretrained(folder)
    kinds = {
        "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
        "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLVideoProcessor"),
        "qwen3_vl": ("Qwen3VLProcessor", "Qwen2VLImageProcessorFast", "Qwen3VLVideoProcessor"),
        "qwen3_vl_moe": ("Qwen3VLProcessor", "Qwen2VLImageProcessorFast", "Qwen3VLVideoProcessor"),
        "glm4v": ("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
        "paddleocr_vl": ("PaddleOCRVLProcessor", "PaddleOCRVLImageProcessor", None),
        "llava": ("LlavaProcessor", "CLIPImageProcessor", None),
    }
    if family not in kinds:
        return folder
    processor, image, video = kinds[family]
    shape = {"patch_size": 8, "temporal_patch_size": 1 if family == "paddleocr_vl" else 2, "merge_size": 2}
    size = {"shortest_edge": 16 * 16, "longest_edge": 96 * 96}
    settings = {"image_processor_type": image, "processor_class": processor, "size": size, **shape}
    if family == "paddleocr_vl":
        settings |= {"min_pixels": 16 * 16, "max_pixels": 96 * 96}
    if family == "llava":
        settings |= {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
        named = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        named |= {"processor_class": processor, "image_token": SPECIALS[IMAGE - 256]}
        (folder / "processor_config.json").write_text(json.dumps(named))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    if video:
        settings = {"video_processor_type": video, "processor_class": processor, "size": size, **shape}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def save_head(head: nn.Module, folder: Path) -> Path:
    """Write a block head's folder."""
    head.save_pretrained(folder)
    return folder
