"""What a decode asks of the frozen target: prefill, verify a tree in one pass, keep a path, and the kept states.

Any causal language model of transformers with full attention will do, and any vision-language model around one. Places
and positions are two numbers: a token's *place* is its row in the cache; its rope *position* is place + delta, on every
axis, where the prompt's images make delta negative (M-RoPE). A node's place is the root's place + its depth.

Conventions that decide numbers:

- Which states are kept of a layer stands in `glance.states`, how a verify pass is run in `glance.verify`.
- The delta comes from the prompt's own positions (largest + 1 - length), never from `rope_deltas`, which is state on the
  model and leaks from one prompt into the next.

Shapes: P prompt tokens, N nodes, V vocabulary, L kept layers, d width, A rope axes (M-RoPE: 3).
"""

import inspect
from collections.abc import Sequence
from threading import get_ident
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from glance.cache import PathCache, rows_of
from glance.compiled import reserve
from glance.states import KeptStates, decoder_layers, fuse
from glance.tree import ROOT, CandidateTree, make_tree
from glance.verify import MASKED, VerifyPass, attention_of, state_of


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


def check_decodable(model: nn.Module, end: int) -> None:
    """Refuse, by name and before any forward, a target whose text here would differ from transformers' `generate`.

    Args:
        end: the most tokens that prompt and text can have.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if any(module.training for module in model.modules()):
        raise ValueError(f"{name} is in training mode, where dropout may change its text: call target.eval() first")
    kind = model.get_input_embeddings().weight.device.type
    if torch.is_autocast_enabled(kind):
        raise ValueError(
            f"autocast is on for {kind}, and would round what {name} computes: leave the autocast context, or load the "
            "target in the dtype that you want"
        )
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
    attention = attention_of(model)
    if attention not in MASKED and not chain:
        raise ValueError(
            f"attn_implementation={attention!r} takes no tree mask: load the target with 'sdpa' or 'eager' "
            "(a chain needs no mask: chain_generate still runs)"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters or getattr(config, "alibi", False):
        why = "biases attention by place (alibi)" if getattr(config, "alibi", False) else "takes no position_ids"
        raise ValueError(f"{name}.forward {why}, so nodes of equal depth cannot share a position")


def _n_alike(model: nn.Module) -> int:
    """Return the number of decoder layers if all are of one type and on one device, else 0."""
    layers = decoder_layers(model)
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    homes = {next(layer.parameters()).device for layer in layers}
    return len(layers) if len(homes) == 1 and len(set(types or [None])) == 1 else 0


@torch.inference_mode()
def check_mask(model: nn.Module, input_ids: torch.Tensor) -> None:
    """See once per target that a tree's branches do not see each other; known targets cost nothing.

    A root's last child x must say the same whatever its siblings are: y and y, or x and x. Where the mask is ignored, it
    sees them. Both passes have one shape, so that kernels which round by the number of rows do not part them.

    Args:
        input_ids: (1, P) a prompt; its first tokens that are no placeholders serve as context and children.

    Raises:
        ValueError: the rows differ.
    """
    known = state_of(model).branches_apart
    attention = attention_of(model)
    if attention in known:
        return
    placeholders = {placeholder_id(model.config, kind) for kind in ("image", "video", "audio")}
    x = next((token for token in input_ids[0].tolist() if token not in placeholders), 0)
    y = next((token for token in input_ids[0].tolist() if token not in placeholders and token != x), (x + 1) % 2)
    with Target(model, StreamPositions()) as target:
        target.prefill(input_ids.new_tensor([[x, y]]))
        rows = []
        for sibling in (y, x):
            children = make_tree([sibling, sibling, x], [ROOT] * 3, [1] * 3, [0, 1, 2], [0.0] * 3)
            rows.append(target.verify(y, children).float())
            target.cache.truncate(target.length)
    astray = float((rows[0][-1] - rows[1][-1]).abs().max())
    if astray > 0.02 * float((rows[0][-1] - rows[0][1]).abs().max()):
        raise ValueError(
            f"{type(model).__name__} with {attention!r} attention does not keep a tree's branches apart: it ignores the "
            "mask of a verify pass; load it with attn_implementation='eager', or decode with chain_generate"
        )
    known[attention] = True


class Target:
    """One prompt's conversation with a frozen target; enter it to record kept states, leave it to let go of everything.

    Args:
        model: a transformers model with full attention.
        positions: how the prompt enters it.
        layer_ids: layers whose states are kept; may be empty.
        room: cache rows to reserve.
        end: no token at this place or after it will be kept, so none asks for its position; None where that is not known.
        rows: rows of a compiled verify pass, see `glance.compiled`; 0 for passes as wide as their trees.

    Raises:
        ValueError: layer ids outside the target; `prefill` raises what the position adapter refuses.

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
        rows: int = 0,
    ):
        self.model = model
        self.positions = positions
        room = reserve(room) if rows else room
        self.cache = PathCache(room, rows > 0, n_alike=_n_alike(model))
        self.kept = KeptStates(model, layer_ids)
        self.kept.recording = False
        self.device = model.get_input_embeddings().weight.device
        self.dtype = model.get_input_embeddings().weight.dtype
        placeholders = {placeholder_id(model.config, kind) for kind in ("image", "video", "audio")}
        with state_of(model).lock:  # another thread may be in the middle of a pass
            self.verify_pass = VerifyPass(model, self.kept, self.cache, room=room, rows=rows, skip=placeholders)
        self.delta = 0
        self.axes = 0  # 0: position_ids are (1, q); else (A, 1, q)
        self.length = 0
        self.end = end
        self._states: list[torch.Tensor] = []

    @property
    def compiled(self) -> bool:
        """Say whether verify passes are compiled."""
        return self.verify_pass.rows > 0

    def __enter__(self) -> "Target":
        with self.verify_pass.lock:  # a hook that is added in the middle of another thread's pass would see half of it
            self.kept.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        with self.verify_pass.lock:
            self.kept.__exit__(*exc)
        self._states = []

    def prefill(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the prompt `(1, P)`; return the next token's logits `(1, V)` and the prompt's fused states `(1, P, L * d)`."""
        inputs = self.positions.prefill_inputs(self.model, input_ids)
        position_ids = inputs["position_ids"]
        self.axes = position_ids.shape[0] if position_ids.dim() == 3 else 0
        self.delta = int(position_ids.max()) + 1 - input_ids.shape[1]
        inputs |= {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        with self.verify_pass.lock:
            self.kept.thread = get_ident()
            self.kept.recording = True
            output = self.model(input_ids=input_ids, **inputs)
            self.kept.recording = False
            states = self.kept.take()
        self.length = input_ids.shape[1]
        return output.logits[0, -1:], fuse(states)

    def verify(self, root: int, tree: CandidateTree) -> torch.Tensor:
        """Run the root and its N nodes in one pass; return logits `(N+1, V)`: row 0 is what follows the root."""
        n = len(tree)
        tokens = tree.columns.tokens
        depths = tree.columns.depths
        padding = max(0, self.verify_pass.rows - n - 1)
        at = self.length + self.delta
        places = [at, *(at + depth for depth in depths), *[at] * padding]
        if self.end is not None and max(places) > (last := self.end - 1 + self.delta):
            places = [min(place, last) for place in places]  # a table of learned positions may end where the text must
        steps = np.array([[[root, *tokens, *[root] * padding]], [places]], np.int64)
        ids, positions = torch.from_numpy(steps).to(self.device).unbind()  # (1, q) each
        if self.axes:
            positions = positions.expand(self.axes, 1, -1)
        logits, self._states = self.verify_pass((root, *tokens), ids, positions, tree, self.length)
        return logits

    def keep(self, path: Sequence[int]) -> torch.Tensor | None:
        """Commit the root and the nodes of `path`, in place; return their fused states `(1, 1 + a, L * d)`."""
        path = [0, *(node + 1 for node in path)]
        rows = rows_of(path, self.device)
        self.cache.keep_path(self.length, path, rows)
        self.length += len(path)
        states = self._states
        self._states = []
        return fuse(states, len(path), rows)
