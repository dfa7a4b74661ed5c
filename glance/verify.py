"""The verify pass: the one owner of how a round's rows are run through a target."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import RLock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from glance.attention import GROUPED, GroupedAttention, MaskBuffer
from glance.cache import PathCache
from glance.compiled import StaticPass
from glance.states import KeptStates, decoder_of
from glance.tree import CandidateTree

MASKED = ("sdpa", "eager")  # attention that takes an additive (1, 1, q, k) mask unchanged


@dataclass
class ModelState:
    """What is known of a target from one decode to the next."""

    lock: Any = field(default_factory=RLock)  # held during a pass: threads that share a target take turns pass by pass
    short_way: dict[tuple, bool] = field(default_factory=dict)  # kind of pass -> whether the short way gave equal bits
    compiled: dict[tuple, StaticPass] = field(default_factory=dict)  # (layer ids, rows) -> pass of static shape
    branches_apart: dict[str, bool] = field(default_factory=dict)  # attention -> whether its tree mask was seen to hold


_STATES: WeakKeyDictionary = WeakKeyDictionary()


def state_of(model: nn.Module) -> ModelState:
    """Return what is known of a target, the same object every time."""
    return _STATES.setdefault(model, ModelState())


class VerifyPass:
    """Runs the root and the nodes of a round through a target, with the tree's ancestor mask.

    Ways of running a pass, the first that applies:

    1. *Static shape*, when a decode asks for `compile=True`: rows are padded to the drafter's largest tree and the pass is
       compiled once (`glance.compiled`).
    2. *Short way*: decoder and output head alone, without the model's own forward around them. Taken where a model's first
       pass of the kind (masked or not, one row or more, rope axes), run both ways, gave equal bits. Never taken for a model
       with a forward or hooks of its own, nor for tokens that are placeholders of images.
    3. The model's own forward.

    In each of them query heads that share a key-value head are folded into rows (`glance.attention`) where the target
    runs on sdpa and all its layers are alike: the config's attention is set for the time of the pass alone. A pass holds
    the target's lock, so that several threads can decode on one target; a forward of someone else's in another thread
    takes no lock, and may run in between: its states are not recorded.
    """

    def __init__(self, model: nn.Module, kept: KeptStates, cache: PathCache, *, room: int, rows: int, skip: set):
        """Serve one decode.

        Args:
            kept: records the states of layers; reads nothing outside a pass.
            cache: the decode's own.
            room: rows that the cache reserves, and columns of the mask.
            rows: rows of a pass of static shape; 0 for passes as wide as their trees.
            skip: ids of placeholders.
        """
        self.model = model
        self.rows = rows
        self.lock = state_of(model).lock
        self._kept = kept
        self._cache = cache
        self._skip = skip
        self._decoder = decoder_of(model)
        self._head = model.get_output_embeddings()
        self._is_bare = _is_bare(model)
        self._short_way = state_of(model).short_way
        self._grouped = GroupedAttention(self._decoder)
        self.groups = self._grouped.groups
        weight = model.get_input_embeddings().weight
        self._masks = MaskBuffer(self._grouped.groups, weight.dtype, weight.device, room)
        self.masked = attention_of(model) in MASKED
        self._static = compiled_pass(model, kept.layer_ids, rows) if rows else None

    def __call__(
        self, tokens: Sequence[int], ids: torch.Tensor, positions: torch.Tensor, tree: CandidateTree, length: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run rows behind `length` committed tokens.

        Args:
            tokens: the root and the N nodes.
            ids: (1, q) the same on the target's device; q = N + 1, or `rows`.
            positions: (1, q) or (A, 1, q).

        Returns:
            Logits `(N+1, V)`, and the kept states, `(1, q, d)` a layer.
        """
        with self.lock, self._grouped:
            mask = self.mask_of(tree, length)
            if self._static:
                logits, states = self._static(self.model, ids, positions, mask, self._cache, length)
                return logits[0, : len(tokens)], states
            self._kept.thread = get_ident()
            self._kept.recording = True
            inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
            logits = self._logits(tokens, length, **inputs)
            self._kept.recording = False
            return logits[0], self._kept.take()

    def fold(self, groups: int) -> None:
        """Fold `groups` query heads per key-value head: 1 for the stock path, to compare with."""
        self.groups = groups
        self._grouped.groups = groups
        self._masks.groups = groups

    def _logits(self, tokens: Sequence[int], length: int, **inputs: Any) -> torch.Tensor:
        """Run a pass by the short way where it is known to give the model's own bits; return logits `(1, q, V)`."""
        positions = inputs["position_ids"]
        axes = len(positions) if positions.dim() == 3 else 0
        kind = (inputs["attention_mask"] is None, inputs["input_ids"].shape[1] == 1, axes)
        inputs |= {"past_key_values": self._cache, "use_cache": True}
        known = self._short_way.get(kind) if self._is_bare and self._skip.isdisjoint(tokens) else False
        if known:
            return self._head(self._decoder(**inputs).last_hidden_state)
        short = None
        if known is None:
            with suppress(Exception):  # whatever a decoder may say that asks for more than these inputs
                short = self._head(self._decoder(**inputs).last_hidden_state)
            self._cache.truncate(length)
        logits = self.model(**inputs).logits
        if known is None:
            alike = short is not None and (short.dtype, short.device) == (logits.dtype, logits.device)
            self._short_way[kind] = alike and torch.equal(short, logits)
        return logits

    def mask_of(self, tree: CandidateTree, length: int) -> torch.Tensor | None:
        """Return the additive mask `(1, G, N+1, length+N+1)`; None where plain causal order already says it."""
        if self._static:
            columns = self._cache.layers[0].keys.shape[-2]
            return self._masks.write(tree, length, rows=self.rows, columns=columns)
        return self._masks.write(tree, length) if len(tree) and self.masked else None


def attention_of(model: nn.Module) -> str:
    """Name the attention implementation of a target's language layers."""
    name = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None) or "eager"
    return "sdpa" if name == GROUPED else name  # another thread is in the middle of a pass


def compiled_pass(model: nn.Module, layer_ids: Sequence[int], rows: int) -> StaticPass:
    """Return the compiled pass of a target for trees of up to `rows - 1` nodes, the same one every time.

    Raises:
        ValueError: an attention implementation that takes no mask.
    """
    attention = attention_of(model)
    if attention not in MASKED:
        raise ValueError(f"compile=True pads with a mask, and attn_implementation={attention!r} takes none: use 'sdpa'")
    known = state_of(model).compiled
    key = (tuple(layer_ids), rows)
    if key not in known:
        known[key] = StaticPass(model, layer_ids, rows)
    return known[key]


def _is_bare(model: nn.Module) -> bool:
    """Say whether a model's forward is its class's own, with nothing hooked on: what the short way may leave out."""
    return not ("forward" in vars(model) or model._forward_hooks or model._forward_pre_hooks)
