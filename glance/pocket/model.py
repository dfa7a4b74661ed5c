"""The pocket target itself: its configuration, its pixels, a batched forward for training, and its folder.

The model is transformers' own `Qwen3VLForConditionalGeneration`. `forward_batch` runs that model's own modules over a batch
of equally sized images, one per prompt, without padding tricks: the same arithmetic as the stock forward (a test compares
them), but with plain matmul attention, which in bfloat16 on a CPU is about three times faster than SDPA. Pixels: one image
of 256 px width, patches in the image processor's own order.
Shapes: `n` images or prompts, `p` patches, `c` cells (one language token each), `t` tokens, `d` hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from glance.pocket.canvas import CELL, WIDTH

PATCH = 16
POINTER_LAYER = 2  # after this language layer (from 0) the place of the next character is decided
READING_LAYERS = (3, 4)  # the layers whose heads are taught to look there


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    """Return the pocket target's configuration for a tokenizer."""
    ids = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    vision = {
        "depth": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_heads": 4,
        "out_hidden_size": 256,
        "deepstack_visual_indexes": [1],
        "patch_size": PATCH,
        "num_position_embeddings": 256,
        "hidden_act": "gelu_pytorch_tanh",
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def build_image_processor() -> Qwen2VLImageProcessorPil:
    """Return the image processor that goes with the target."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": 1024, "longest_edge": 1024 * 1024},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def cut_patches(pixels: torch.Tensor) -> torch.Tensor:
    """Cut uint8 images (n, height, width, 3) into patches in the processor's order, (n, p, 768), in -1..1."""
    n, height, width, _ = pixels.shape
    x = pixels.float().div_(127.5).sub_(1.0)
    x = x.view(n, height // CELL, 2, PATCH, width // CELL, 2, PATCH, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    return x.reshape(n, height * width // PATCH**2, 3 * PATCH**2)


def double_frames(patches: torch.Tensor) -> torch.Tensor:
    """Turn patches (n, p, 768) into the processor's `pixel_values` (n * p, 1536), each frame twice."""
    n, p, _ = patches.shape
    return patches.view(n * p, 3, 1, PATCH**2).expand(-1, -1, 2, -1).reshape(n * p, 6 * PATCH**2)


@dataclass
class Watch:
    """What a forward should keep beside its last states: the pointer layer's states and attention scores."""

    attention: bool = False
    pointer_states: torch.Tensor | None = None  # (n, t, d)
    attention_logp: list[torch.Tensor] = field(default_factory=list)  # each (n, heads / 2, t, c)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by plain matmuls; also return the masked scores."""
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v, scores


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply a rotary embedding."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def normalise(x: torch.Tensor, module) -> torch.Tensor:
    """Apply an RMS norm module in float32."""
    return F.rms_norm(x.float(), (x.shape[-1],), module.weight.float(), module.variance_epsilon)


class BatchForward:
    """The batched training forward of one model; holds the image geometry that it has met."""

    def __init__(self, model: Qwen3VLForConditionalGeneration):
        self.model = model
        self.visual = model.model.visual
        self.language = model.model.language_model
        self.geometry: dict[int, tuple] = {}

    def place_patches(self, height: int) -> tuple:
        """Return position indices, their weights, and the rotary cos and sin for one image height."""
        if height not in self.geometry:
            visual = self.visual
            grid = torch.tensor([[1, height // PATCH, WIDTH // PATCH]])
            indices, weights = get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=2,
            )
            positions = get_vision_position_ids(grid, 2)
            angles = visual.rotary_pos_emb(positions).reshape(positions.shape[0], -1)
            angles = torch.cat([angles, angles], -1)
            self.geometry[height] = (indices, weights, angles.cos(), angles.sin())
        return self.geometry[height]

    def see(self, pixels: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the cells' states (n, c, d) and the deepstack additions, each (n, c, d)."""
        visual = self.visual
        patches = cut_patches(pixels)
        indices, weights, cos, sin = self.place_patches(pixels.shape[1])
        n, p, _ = patches.shape
        kernel = visual.patch_embed.proj.weight
        x = F.linear(patches, kernel.sum(2).reshape(kernel.shape[0], -1), visual.patch_embed.proj.bias)
        x = x + (visual.pos_embed(indices) * weights[:, :, None]).sum(1).to(x.dtype)
        cos = cos.to(x.dtype)
        sin = sin.to(x.dtype)
        deep = []
        for i, block in enumerate(visual.blocks):
            attention = block.attn
            qkv = attention.qkv(block.norm1(x)).view(n, p, 3, attention.num_heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            out, _ = attend(rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v, causal=False)
            x = x + attention.proj(out.transpose(1, 2).reshape(n, p, -1))
            x = x + block.mlp(block.norm2(x))
            if i in visual.deepstack_visual_indexes:
                merger = visual.deepstack_merger_list[visual.deepstack_visual_indexes.index(i)]
                deep.append(merger(x.reshape(n * p, -1)).view(n, p // 4, -1))
        return visual.merger(x.reshape(n * p, -1)).view(n, p // 4, -1), deep

    def place_tokens(self, length: int, start: int, height: int) -> torch.Tensor:
        """Return M-RoPE positions (3, length) for an image that begins at token `start`."""
        rows = height // CELL
        columns = WIDTH // CELL
        cells = rows * columns
        positions = torch.arange(length).repeat(3, 1)
        positions[0, start : start + cells] = start
        positions[1, start : start + cells] = start + torch.arange(rows).repeat_interleave(columns)
        positions[2, start : start + cells] = start + torch.arange(columns).repeat(rows)
        positions[:, start + cells :] -= cells - max(rows, columns)
        return positions

    def read(self, x, positions, deep, image: slice, watch: Watch) -> torch.Tensor:
        """Run the language layers over embedded tokens (n, t, d)."""
        n, t, _ = x.shape
        cos, sin = (a.unsqueeze(1) for a in self.language.rotary_emb(x, positions))
        for i, layer in enumerate(self.language.layers):
            attention = layer.self_attn
            h = normalise(x, layer.input_layernorm)
            split = (n, t, -1, attention.head_dim)
            q = normalise(attention.q_proj(h).view(split), attention.q_norm).transpose(1, 2)
            k = normalise(attention.k_proj(h).view(split), attention.k_norm).transpose(1, 2)
            v = attention.v_proj(h).view(split).transpose(1, 2)
            q = rotate(q, cos, sin).to(v.dtype)
            k = rotate(k, cos, sin).to(v.dtype)
            groups = q.shape[1] // k.shape[1]
            out, scores = attend(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), causal=True)
            if watch.attention and i in READING_LAYERS:
                watch.attention_logp.append(scores[:, ::2].float().log_softmax(-1)[..., image])
            x = x + attention.o_proj(out.transpose(1, 2).reshape(n, t, -1))
            x = x + layer.mlp(normalise(x, layer.post_attention_layernorm))
            if i == POINTER_LAYER:
                watch.pointer_states = x
            if i < len(deep):
                x = torch.cat([x[:, : image.start], x[:, image] + deep[i], x[:, image.stop :]], 1)
        return normalise(x, self.language.norm)

    def __call__(self, pixels, ids, start: int, watch: Watch | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model.

        Args:
            pixels: (n, height, 256, 3) uint8.
            ids: (n, t), right-padded, each with the image's placeholders from token `start` on.
            watch: what else to keep.

        Returns:
            The normed last states (n, t, d) and the cells' states (n, c, d).
        """
        cells, deep = self.see(pixels)
        image = slice(start, start + cells.shape[1])
        embedded = self.language.embed_tokens(ids)
        x = torch.cat([embedded[:, :start], cells.to(embedded.dtype), embedded[:, image.stop :]], 1)
        positions = self.place_tokens(ids.shape[1], start, pixels.shape[1])[:, None].expand(3, len(ids), -1)
        return self.read(x, positions, deep, image, watch or Watch()), cells


def stack_pixels(images) -> torch.Tensor:
    """Stack equally sized PIL images as uint8 (n, height, width, 3)."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images]))


def save_target(model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the target as a folder that `from_pretrained` loads: bfloat16 weights, tokenizer, processor files."""
    import copy

    folder.mkdir(parents=True, exist_ok=True)
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    half.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    build_image_processor().save_pretrained(folder)
    name_processor(folder)


def name_processor(folder: Path) -> None:
    """Name the stock processor classes in the folder's files, so that with torchvision the stock processor loads."""
    import json

    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings |= {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor"}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"processor_class": "Qwen3VLProcessor"}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
