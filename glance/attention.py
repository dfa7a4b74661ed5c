"""Attention for the verify pass where several query heads share one key-value head, and the mask that all layers read.

transformers' `sdpa` path expands keys and values to one copy per query head whenever a mask is given: at every layer, of
every pass, as long as the prefix. `grouped_attention` folds the query heads of a group into further rows of their
key-value head instead, so that keys and values are read where the cache holds them. `MaskBuffer` keeps one additive mask
for a whole decode whose prefix columns are zero already; a round rewrites the columns of its own tree only.

Conventions that decide numbers:

- A mask with G in dimension 1, `(1, G, q, k)` instead of `(1, 1, q, k)`, selects the folding. Everything else goes to the
  stock function: a prefill, a mask of another shape, dropout, a position bias, a soft-cap, attention sinks.
- It is in force inside `with grouped:` alone, and the target's own setting stands again after it.

The file knows nothing of rounds, tokens or heads that draft.

Shapes: H query heads, G query heads per key-value head, N nodes, q = N + 1 rows, k keys, d head width.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from glance.tree import CandidateTree, tree_mask

GROUPED = "glance_grouped"  # its name among transformers' attention functions
ROOM = 16  # columns and rows of the mask come in multiples of this, which keeps rows aligned for the kernels of a GPU
_UNSUPPORTED = ("position_bias", "softcap", "s_aux", "output_attentions")  # what a plain softmax of scores cannot say


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with the query heads of a group as rows of their key-value head; an attention function of transformers.

    Args:
        query: (1, H, q, d).
        key, value: (1, H / G, k, d).
        attention_mask: (1, G, q, k) additive, the same for every head; None for a single row that sees every key.

    Returns:
        (1, q, H, d), and None in the place of weights.
    """
    batch, heads, rows, _ = query.shape
    groups = heads // key.shape[1]
    asked = rows == 1 if attention_mask is None else attention_mask.shape[1] == groups
    other = dropout or any(kwargs.get(name) is not None and kwargs[name] is not False for name in _UNSUPPORTED)
    if groups == 1 or not asked or other:
        mask = attention_mask if attention_mask is None else attention_mask[:, :1]
        stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return stock(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    folded = query.reshape(batch, key.shape[1], groups * rows, -1)
    if attention_mask is not None:
        attention_mask = attention_mask.reshape(1, 1, groups * rows, -1)  # a view: the buffer's rows lie evenly
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


class GroupedAttention:
    """Puts `grouped_attention` in force on a model while entered; does nothing where the model does not allow it.

    Attributes:
        groups: G; 1 where the stock path stays: another attention implementation than sdpa, one query head per key-value
            head, layers that differ, or a model that does not look its attention function up.
    """

    def __init__(self, decoder: nn.Module):
        """Look at a language model's decoder (the module that runs the layers)."""
        layers = [module for module in decoder.modules() if hasattr(module, "num_key_value_groups")]
        sizes = {module.num_key_value_groups for module in layers}
        configs = {id(module.config): module.config for module in layers if hasattr(module, "config")}.values()
        looks_up = getattr(type(decoder), "_can_set_attn_implementation", lambda: False)()
        stock = all(config._attn_implementation in ("sdpa", GROUPED) for config in configs)
        self.groups = sizes.pop() if len(sizes) == 1 and configs and looks_up and stock else 1
        self._settings = list(map(vars, configs)) if self.groups > 1 else []

    def __enter__(self) -> "GroupedAttention":
        for settings in self._settings:  # past a config's own setter, which is slow: this runs twice a round
            settings["_attn_implementation_internal"] = GROUPED
        return self

    def __exit__(self, *exc: object) -> None:
        for settings in self._settings:
            settings["_attn_implementation_internal"] = "sdpa"


class MaskBuffer:
    """The additive masks of a decode's rounds, one after another in the same memory."""

    def __init__(self, groups: int, dtype: torch.dtype, device: torch.device, room: int = 0):
        """Serve masks for `groups` query heads per key-value head; `room` columns are reserved at the first round."""
        self.groups = groups
        self._dtype = dtype
        self._device = device
        self._room = room
        self._rows = torch.empty(0, 0)  # (rows, room)
        self._clean = 0  # columns before this one are zero in every row

    def write(self, tree: CandidateTree, length: int, *, rows: int = 0, columns: int = 0) -> torch.Tensor:
        """Return the mask `(1, G, N+1, length+N+1)` of a tree behind `length` committed tokens; valid until the next call.

        Zeroed are the columns that were a tree's and are committed now, written are the N + 1 of this tree: the work does
        not grow with the prefix. With `rows` and `columns` the mask is padded to `(1, G, rows, columns)`: padding rows see
        what the root sees, padding columns are seen by none.
        """
        q = rows or len(tree) + 1
        end = columns or length + q
        height, width = self._rows.shape
        if height < self.groups * q or width < end:
            width = width if width >= end else max(end, self._room, width * 3 // 2)
            shape = (-(-size // ROOM) * ROOM for size in (max(self.groups * q, height), width))
            self._rows = torch.zeros(*shape, dtype=self._dtype, device=self._device)
            if columns:
                self._rows[:, length:] = -torch.inf
            self._clean = length
        used = self.groups * q
        clean = self._clean
        if used < len(self._rows):
            self._rows[used:, clean:length] = 0
        own = tree_mask(tree, prefix=length - clean)
        if q > len(own):
            own = np.pad(own, ((0, q - len(own)), (0, q - len(own))), constant_values=-np.inf)
            own[len(tree) + 1 :, : length - clean + 1] = 0
        mask = self._rows.narrow(0, 0, used).view(1, self.groups, q, -1)
        mask.narrow(-1, clean, length - clean + q).copy_(torch.from_numpy(own))
        self._clean = length
        return mask.narrow(-1, 0, end)
