"""What a decode asks of the frozen target: prefill, verify a tree in one pass, keep a path, and the kept states.

Any causal language model of transformers with full attention will do, and any vision-language model around one. Places
and positions are two numbers: a token's *place* is its row in the cache; its rope *position* is place + delta, on every
axis, where the prompt's images make delta negative (M-RoPE). A node's place is the root's place + its depth.

Conventions that decide numbers:

- The kept state of layer i is what decoder layer i returns (transformers' `hidden_states[i + 1]`), before Qwen3-VL's
  deepstack addition, which happens between layers; of the last layer it is the final norm's output. Only the layers
  asked for are held.
- A verify pass runs the decoder and the output head without the model's own forward around them (the short way), where a
  model's first pass of the kind (masked or not, one row or more, rope axes), run both ways, gave equal bits. A model with a
  forward or hooks of its own, and a pass with a placeholder among its tokens, takes the model's forward.
- The delta comes from the prompt's own positions (largest + 1 - length), never from `rope_deltas`, which is state on the
  model and leaks from one prompt into the next.

Shapes: P prompt tokens, N nodes, V vocabulary, L kept layers, d width, A rope axes (M-RoPE: 3).
"""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from glance.attention import GroupedAttention, MaskBuffer
from glance.cache import PathCache, rows_of
from glance.tree import CandidateTree

_TREE_ATTENTION = ("sdpa", "eager")  # what takes an additive (1, 1, q, k) mask unchanged
# model -> {kind of pass: whether the short way gave the model's own logits}
_SHORT_WAY: WeakKeyDictionary = WeakKeyDictionary()


class Positions(Protocol):
    """Says how a prompt enters the target: the position adapter."""

    def prefill_inputs(self, model: nn.Module, input_ids: torch.Tensor) -> dict[str, Any]:
        """Check the prompt `(1, P)`; return the prefill's keywords, `position_ids` of `(1, P)` or `(A, 1, P)` included."""
        ...


class StreamPositions:
    """Plain positions 0, 1, 2, ...: text targets, and text-only prompts on a vision-language target."""

    def prefill_inputs(self, model: nn.Module, input_ids: torch.Tensor) -> dict[str, Any]:
        """Refuse image or video tokens, which have no pixels here; return 1-D positions `(1, P)`."""
        for kind in ("image", "video"):
            placeholder = placeholder_id(model.config, kind)
            count = int((input_ids == placeholder).sum()) if placeholder is not None else 0
            if count:
                raise ValueError(
                    f"the prompt has {count} {kind} tokens (id {placeholder}) but 0 pixel values: "
                    "pass positions=VisionPositions(pixel_values, image_grid_thw)"
                )
        return {"position_ids": torch.arange(input_ids.shape[1], device=input_ids.device)[None]}


def placeholder_id(config: Any, kind: str) -> int | None:
    """Return the id that stands for one merged patch of an "image" or "video" in a prompt, or None."""
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    return None


class KeptStates:
    """Records what chosen decoder layers return while it is entered; training and decoding both read states with it."""

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]):
        self.decoder, self.layers = decoder_of(model), decoder_layers(model)
        self.layer_ids = tuple(layer_ids)
        bad = [i for i in self.layer_ids if not 0 <= i < len(self.layers)]
        if bad:
            raise ValueError(f"target_layer_ids {bad} are outside the target's layers 0..{len(self.layers) - 1}")
        self._states: dict[int, torch.Tensor] = {}
        self._hooks: list = []

    def __enter__(self) -> "KeptStates":
        last = len(self.layers) - 1
        for i in set(self.layer_ids):
            module = self.decoder if i == last else self.layers[i]
            self._hooks.append(module.register_forward_hook(self._recorder(i)))
        return self

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._states.clear()

    def _recorder(self, layer: int):
        def record(module: nn.Module, args: tuple, output: Any) -> None:
            self._states[layer] = output if isinstance(output, torch.Tensor) else output[0]

        return record

    def take(self) -> list[torch.Tensor]:
        """Return the last forward's states, `(batch, q, d)` per layer asked for, and let go of them."""
        missing = [i for i in self.layer_ids if i not in self._states]
        if missing:
            raise RuntimeError(f"the target returned no state for layers {missing}: is every layer run as a module?")
        states = [self._states[i] for i in self.layer_ids]
        self._states.clear()
        return states


def fuse(states: Sequence[torch.Tensor], n: int = 0, rows: torch.Tensor | None = None) -> torch.Tensor | None:
    """Put kept states `(batch, q, d)` of L layers side by side, `(batch, n, L * d)`: of `rows` (n,), the first n, or all.

    None for L = 0.
    """
    if not states:
        return None
    home = states[-1].device
    if any(state.device != home for state in states):  # layers may sit on several devices
        states = [state.to(home) for state in states]
    if rows is not None:
        rows = rows.to(home)
        states = [state.index_select(1, rows) for state in states]
    elif n:
        states = [state.narrow(1, 0, n) for state in states]
    return torch.cat(states, dim=-1)


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the module that runs the language layers."""
    return model.get_decoder()


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the language model's decoder layers, in order."""
    config = model.config.get_text_config(decoder=True)
    for child in decoder_of(model).children():
        if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers:
            return child
    raise ValueError(f"{type(model).__name__} has no list of {config.num_hidden_layers} decoder layers to read from")


def _is_bare(model: nn.Module) -> bool:
    """Say whether a model's forward is its class's own, with nothing hooked on: what the short way may leave out."""
    return not ("forward" in vars(model) or model._forward_hooks or model._forward_pre_hooks)


def _n_alike(model: nn.Module) -> int:
    """Return the number of decoder layers if all are of one type and on one device, else 0."""
    layers, types = decoder_layers(model), getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    homes = {next(layer.parameters()).device for layer in layers}
    return len(layers) if len(homes) == 1 and len(set(types or [None])) == 1 else 0


def check_decodable(model: nn.Module, end: int) -> None:
    """Refuse, by name and before any forward, a target whose text here would differ from transformers' `generate`.

    Args:
        end: the most tokens that prompt and text can have.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if getattr(config, "cross_attention_layers", None):
        raise ValueError(
            f"{name} has cross-attention layers, which keep an image's keys in the cache beside the text's: "
            "use a target whose images stand in the stream"
        )
    for kind, longest in _ropes_by_length(config):
        if end > longest:
            raise ValueError(
                f"{name} has {kind} rope, whose frequencies change past {longest} tokens, and this decode may reach "
                f"{end}: stay within {longest}, or use a target with another rope"
            )


def _ropes_by_length(config: Any) -> list[tuple[str, int]]:
    """List the ropes of a text config whose frequencies change with length: type, and the length up to which they do not."""
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = list(ropes.values()) if all(isinstance(rope, dict) for rope in ropes.values()) else [ropes]
    found = []
    for rope in kinds:
        kind = rope.get("rope_type")
        if kind in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") if kind == "longrope" else None
            original = original or getattr(config, "original_max_position_embeddings", None)
            found.append((kind, int(original or config.max_position_embeddings)))
    return found


def check_verifiable(model: nn.Module, *, room: int, chain: bool = False) -> None:
    """Refuse, by name and before any forward, a target whose block pass would differ from its steps.

    Args:
        room: the largest number of tokens that the cache will hold; sliding windows at least this long never bite.
        chain: whether only chains will be verified; these need no mask of ours.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    layer_types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or []  # GPT-Neo
    window = getattr(config, "sliding_window", None)
    if not layer_types and window and getattr(config, "use_sliding_window", True):
        layer_types = ["sliding_attention"]
    known = {"full_attention", "global", "sliding_attention"}
    strange = sorted({kind for kind in layer_types if kind not in known})
    if strange or getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} has {', '.join(strange) or 'recurrent'} layers: their state after a block is not the state after "
            "single steps along one path, so a tree cannot be verified; use a target with full attention"
        )
    if "sliding_attention" in layer_types and window and window < room:
        raise ValueError(
            f"{name} has sliding_attention layers with a window of {window}, and this decode reaches {room} tokens: "
            "one mask cannot serve both layer types; stay within the window or use a target with full attention"
        )
    attention = getattr(config, "_attn_implementation", None) or "eager"
    if attention not in _TREE_ATTENTION and not chain:
        raise ValueError(
            f"attn_implementation={attention!r} takes no tree mask: load the target with 'sdpa' or 'eager' "
            "(a chain needs no mask: chain_generate still runs)"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters or getattr(config, "alibi", False):
        why = "biases attention by place (alibi)" if getattr(config, "alibi", False) else "takes no position_ids"
        raise ValueError(f"{name}.forward {why}, so nodes of equal depth cannot share a position")


class Target:
    """One prompt's conversation with a frozen target; enter it to record kept states, leave it to let go of everything.

    Attributes:
        model: the transformers model.
        delta: rope position minus place, for every token after the prompt.
        length: number of committed tokens in the cache, the root not among them.
    """

    def __init__(
        self,
        model: nn.Module,
        positions: Positions,
        layer_ids: Sequence[int] = (),
        *,
        room: int = 0,
        end: int | None = None,
        static: Any = None,
    ):
        """Reserve `room` cache rows; no token at place `end` or after it will be kept, so none asks for its position.

        `static` is a `glance.compiled.StaticPass` that verifies instead of the model's own forward.
        """
        self.model = model
        self.positions = positions
        self.static = static
        room = static.reserve(room) if static else room
        self.cache = PathCache(room, static is not None, n_alike=_n_alike(model))
        self.kept = KeptStates(model, layer_ids)
        self.device = model.get_input_embeddings().weight.device
        self.dtype = model.get_input_embeddings().weight.dtype
        self.masked = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
        self.masked = (self.masked or "eager") in _TREE_ATTENTION
        self._decoder, self._head = decoder_of(model), model.get_output_embeddings()
        self._bare, self._short = _is_bare(model), _SHORT_WAY.setdefault(model, {})
        self._placeholders = {placeholder_id(model.config, kind) for kind in ("image", "video", "audio")}
        self._grouped = GroupedAttention(self._decoder)
        self._masks = MaskBuffer(self._grouped.groups, self.dtype, self.device, room)
        self.delta = 0
        self.axes = 0  # 0: position_ids are (1, q); else (A, 1, q)
        self.length = 0
        self.end = end
        self._states: list[torch.Tensor] = []

    def __enter__(self) -> "Target":
        self.kept.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kept.__exit__(*exc)
        self._states = []

    def prefill(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the prompt `(1, P)`; return the next token's logits `(1, V)` and the prompt's fused states `(1, P, L * d)`."""
        inputs = self.positions.prefill_inputs(self.model, input_ids)
        position_ids = inputs["position_ids"]
        self.axes = position_ids.shape[0] if position_ids.dim() == 3 else 0
        self.delta = int(position_ids.max()) + 1 - input_ids.shape[1]
        output = self.model(input_ids=input_ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1, **inputs)
        self.length = input_ids.shape[1]
        return output.logits[0, -1:], fuse(self.kept.take())

    def verify(self, root: int, tree: CandidateTree) -> torch.Tensor:
        """Run the root and its N nodes in one pass; return logits `(N+1, V)`: row 0 is what follows the root."""
        n = len(tree)
        tokens = tree.columns.tokens
        depths = tree.columns.depths
        padding = (self.static.rows - n - 1) if self.static else 0
        at = self.length + self.delta
        places = [at, *(at + depth for depth in depths), *[at] * padding]
        if self.end is not None and max(places) > (last := self.end - 1 + self.delta):
            places = [min(place, last) for place in places]  # a table of learned positions may end where the text must
        steps = np.array([[[root, *tokens, *[root] * padding]], [places]], np.int64)
        ids, positions = torch.from_numpy(steps).to(self.device).unbind()  # (1, q) each
        positions, mask = positions.expand(self.axes, 1, -1) if self.axes else positions, self._mask(tree)
        with self._grouped:
            if self.static:
                logits, self._states = self.static(self.model, ids, positions, mask, self.cache, self.length)
                return logits[0, : n + 1]
            inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
            logits = self._logits((root, *tokens), **inputs)
        self._states = self.kept.take()
        return logits[0]

    def keep(self, path: Sequence[int]) -> torch.Tensor | None:
        """Commit the root and the nodes of `path`, in place; return their fused states `(1, 1 + a, L * d)`."""
        path = [0, *(node + 1 for node in path)]
        rows = rows_of(path, self.device)
        self.cache.keep_path(self.length, path, rows)
        self.length += len(path)
        states, self._states = self._states, []
        return fuse(states, len(path), rows)

    def _logits(self, tokens: Sequence[int], **inputs: Any) -> torch.Tensor:
        """Run a pass; return logits `(1, q, V)`, by the short way where it is known to give the model's own bits."""
        kind = inputs["attention_mask"] is None, inputs["input_ids"].shape[1] == 1, self.axes
        inputs |= {"past_key_values": self.cache, "use_cache": True}
        known = self._short.get(kind) if self._bare and self._placeholders.isdisjoint(tokens) else False
        if known:
            return self._head(self._decoder(**inputs).last_hidden_state)
        short = None
        if known is None:
            with suppress(Exception):  # whatever a decoder may say that asks for more than these inputs
                short = self._head(self._decoder(**inputs).last_hidden_state)
            self.cache.truncate(self.length)
        logits = self.model(**inputs).logits
        if known is None:
            alike = short is not None and (short.dtype, short.device) == (logits.dtype, logits.device)
            self._short[kind] = alike and torch.equal(short, logits)
        return logits

    def _mask(self, tree: CandidateTree) -> torch.Tensor | None:
        """Return the additive mask `(1, G, N+1, length+N+1)`; None where plain causal order already says it."""
        if self.static:
            columns = self.cache.layers[0].keys.shape[-2]
            return self._masks.write(tree, self.length, rows=self.static.rows, columns=columns)
        return self._masks.write(tree, self.length) if len(tree) and self.masked else None
