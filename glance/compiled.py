"""The verify pass with static shapes, so that `torch.compile` compiles it once: `generate(..., compile=True)`.

Rows are padded to the drafter's largest tree, keys and values are read over the cache's whole reserve, and the mask hides
what is padding. That is more arithmetic for fewer launches: worth it on a GPU at small batch, rarely on a CPU. One compiled
pass serves a target for all prompts of equal reserve; reserves come in multiples of ROOM.
"""

from collections.abc import Sequence

import torch
from torch import nn

from glance.cache import PathCache
from glance.states import KeptStates

ROOM = 256
BACKEND = "inductor"


def reserve(room: int) -> int:
    """Round a cache's reserve up."""
    return -(-room // ROOM) * ROOM


class StaticPass:
    """A compiled forward of `rows` rows over a static cache; it keeps its own record of the kept states.

    The model is no attribute: a pass must not keep its target alive.
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int], rows: int):
        self.rows = rows
        self._kept = KeptStates(model, layer_ids)
        self._run = torch.compile(_forward, dynamic=False, backend=BACKEND)

    def __call__(
        self,
        model: nn.Module,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: PathCache,
        start: int,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run rows `(1, rows)` behind `start` committed tokens; return logits `(1, rows, V)` and the kept states."""
        slots = torch.arange(start, start + self.rows, device=ids.device)
        for layer in cache.layers:
            layer.slots = slots
        try:
            with self._kept:
                logits = self._run(model, ids, positions, mask, cache)
                states = self._kept.take()
        finally:
            for layer in cache.layers:
                layer.slots = None
                layer.length = start + self.rows
        return logits, states


def _forward(model: nn.Module, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: PathCache):
    output = model(input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True)
    return output.logits
