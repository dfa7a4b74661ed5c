"""The key-value cache of a decode: appended to in place, cut back in place, never copied as a whole.

transformers' `DynamicCache` concatenates: every step copies the whole prefix. Here each layer owns one buffer with room
to grow. A verify pass writes its rows behind the committed ones and `keep_path` moves the few rows of the accepted path
to the front of them, so a round's work does not depend on the length of the prefix.

The same class serves the target and the block head. It knows nothing of trees; `keep_path` takes row numbers.

Shapes: H key-value heads, P committed rows, q appended rows, d head width.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 256  # rows added beyond what is needed when a buffer has to grow


class PathLayer(CacheLayerMixin):
    """One layer's keys and values: `(1, H, room, d)` each, of which the first `length` rows are in use.

    Both lie in one buffer where their shapes agree, so that moving rows is one call.
    """

    is_sliding = False

    def __init__(self, room: int = 0, static: bool = False):
        super().__init__()
        self.length = 0
        self.slots: torch.Tensor | None = None  # while set: the rows (q,) that an update writes; all rows come back
        self._room, self._static = room, static

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate both buffers in the dtype, on the device and with the head widths of the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        room = self._room if self._static else max(self._room, key_states.shape[-2] + GROWTH)
        self._reserve(key_states, value_states, room)
        self.is_initialized = True

    def _reserve(self, keys: torch.Tensor, values: torch.Tensor, room: int) -> None:
        """Make buffers of `room` rows like `keys` and `values`, one for both where these agree."""
        make = torch.zeros if self._static else torch.empty  # rows that a mask hides must still be numbers
        shapes = [(*states.shape[:-2], room, states.shape[-1]) for states in (keys, values)]
        if shapes[0] == shapes[1] and keys.dtype == values.dtype:
            both = make(2, *shapes[0], dtype=keys.dtype, device=keys.device)
            self._buffers, self.keys, self.values = [both], both[0], both[1]
        else:
            self.keys = make(shapes[0], dtype=keys.dtype, device=keys.device)
            self.values = make(shapes[1], dtype=values.dtype, device=values.device)
            self._buffers = [self.keys, self.values]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Append `(1, H, q, d)` rows in place; return views `(1, H, length, d)` of all rows in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.slots is not None:
            self.keys.index_copy_(-2, self.slots, key_states)
            self.values.index_copy_(-2, self.slots, value_states)
            return self.keys, self.values
        end = self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            keys, values = self.keys[..., : self.length, :], self.values[..., : self.length, :]
            # geometric, so growing costs O(1) a row over a decode
            self._reserve(keys, values, max(end + GROWTH, self.keys.shape[-2] * 3 // 2))
            self.keys[..., : self.length, :], self.values[..., : self.length, :] = keys, values
        self.keys.narrow(-2, self.length, end - self.length).copy_(key_states)
        self.values.narrow(-2, self.length, end - self.length).copy_(value_states)
        self.length = end
        return self.keys.narrow(-2, 0, end), self.values.narrow(-2, 0, end)

    def keep_path(self, start: int, rows: torch.Tensor | None, count: int) -> None:
        """Cut back to `start + count` rows; `rows` (absolute numbers) go to the places after `start`, None = in place."""
        if rows is not None:
            for buffer in self._buffers:
                buffer.narrow(-2, start, count).copy_(buffer.index_select(-2, rows))
        self.length = start + count

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys a query of this length meets, and the first one's place."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of rows in use."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1


class PathCache(Cache):
    """One `PathLayer` per attention layer, made as the layers ask for them."""

    def __init__(self, room: int = 0, static: bool = False):
        """Reserve `room` rows per layer at the first update (0: a little more than the first update brings).

        `static` fills the reserve with zeros, for passes that read all of it (see `glance.static`).
        """
        super().__init__(layer_class_to_replicate=lambda: PathLayer(room, static))

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on."""
        for layer in self.layers:
            layer.length = min(layer.length, length)

    def keep_path(self, start: int, path: list[int]) -> None:
        """Keep the first `start` rows and, after them, the rows `start + p` for p in `path` (rising); forget the rest."""
        in_place = path == list(range(len(path)))
        rows = None
        for layer in self.layers:
            if not in_place and (rows is None or rows.device != layer.keys.device):
                rows = torch.tensor([start + p for p in path], device=layer.keys.device)
            layer.keep_path(start, None if in_place else rows, len(path))
