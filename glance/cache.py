"""The key-value cache of a decode: appended to in place, cut back in place, never copied as a whole.

transformers' `DynamicCache` concatenates: every step copies the whole prefix. Here keys and values lie in a buffer with
room to grow, one for all layers that agree. A verify pass writes its rows behind the committed ones and `keep_path` moves
the few rows of the accepted path to the front of them, so a round's work does not depend on the length of the prefix.

The same class serves the target and the block head. It knows nothing of trees; `keep_path` takes row numbers.

Shapes: H key-value heads, P committed rows, q appended rows, d head width.
"""

from collections.abc import Callable

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 256  # rows added beyond what is needed when a buffer has to grow


def rows_of(path: list[int], device: torch.device) -> torch.Tensor | None:
    """Return row numbers as a tensor to gather by; None where they are 0, 1, 2, ... and nothing has to move."""
    return None if path == list(range(len(path))) else torch.from_numpy(np.array(path)).to(device)


class Store:
    """One buffer for the keys and values of layers that agree in shape, dtype and device: moving rows is one call for all.

    Attributes:
        buffer: (layers * 2 * H, room, d); None before the first layer asks, and always for `layers` = 0.
    """

    def __init__(self, layers: int = 0):
        self.buffer: torch.Tensor | None = None
        self._parts: torch.Tensor | None = None
        self._layers = layers
        self._given = 0

    def part_for(
        self, make: Callable[..., torch.Tensor], shape: tuple[int, ...], like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a buffer and a layer's part `(2, *shape)` of it; a layer of another shape gets its own buffer."""
        if self._layers and self.buffer is None:
            self._parts = make(self._layers, 2, *shape, dtype=like.dtype, device=like.device)
            self.buffer = self._parts.flatten(0, -3)
        shared = self._parts
        wanted = (shape, like.dtype, like.device)
        agrees = shared is not None and (shared.shape[2:], shared.dtype, shared.device) == wanted
        if not agrees or self._given == self._layers:
            own = make(2, *shape, dtype=like.dtype, device=like.device)
            return own.flatten(0, -3), own
        self._given += 1
        return self.buffer, shared[self._given - 1]


class PathLayer(CacheLayerMixin):
    """One layer's keys and values: `(1, H, room, d)` each, of which the first `length` rows are in use.

    Attributes:
        buffers: what holds them, `(n, room, d)` each; both in one where their shapes agree.
        slots: while set, the rows (q,) that an update writes; all rows come back.
    """

    is_sliding = False

    def __init__(self, room: int = 0, static: bool = False, store: Store | None = None):
        super().__init__()
        self.length = 0
        self.slots: torch.Tensor | None = None
        self._room = room
        self._static = static
        self._store = store or Store()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate in the dtype, on the device and with the head widths of the first states."""
        self.dtype = key_states.dtype
        self.device = key_states.device
        room = self._room if self._static else max(self._room, key_states.shape[-2] + GROWTH)
        self._reserve(key_states, value_states, room, self._store)
        self.is_initialized = True

    def _reserve(self, keys: torch.Tensor, values: torch.Tensor, room: int, store: Store) -> None:
        """Make room for `room` rows like `keys` and `values`."""
        make = torch.zeros if self._static else torch.empty  # rows that a mask hides must still be numbers
        shapes = [torch.Size((*states.shape[:-2], room, states.shape[-1])) for states in (keys, values)]
        if shapes[0] == shapes[1] and keys.dtype == values.dtype:
            buffer, (self.keys, self.values) = store.part_for(make, shapes[0], keys)
            self.buffers = [buffer]
        else:
            self.keys = make(shapes[0], dtype=keys.dtype, device=keys.device)
            self.values = make(shapes[1], dtype=values.dtype, device=values.device)
            self.buffers = [self.keys.flatten(0, -3), self.values.flatten(0, -3)]

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
            keys = self.keys[..., : self.length, :]
            values = self.values[..., : self.length, :]
            # geometric, so growing costs O(1) a row over a decode
            self._reserve(keys, values, max(end + GROWTH, self.keys.shape[-2] * 3 // 2), Store())
            self.keys[..., : self.length, :] = keys
            self.values[..., : self.length, :] = values
        self.keys.narrow(-2, self.length, end - self.length).copy_(key_states)
        self.values.narrow(-2, self.length, end - self.length).copy_(value_states)
        self.length = end
        return self.keys.narrow(-2, 0, end), self.values.narrow(-2, 0, end)

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

    def __init__(self, room: int = 0, static: bool = False, n_alike: int = 0):
        """Reserve `room` rows per layer at the first update (0: a little more than the first update brings).

        Args:
            room: rows.
            static: fill the reserve with zeros, for passes that read all of it (see `glance.compiled`).
            n_alike: number of layers that are expected to agree in shape, dtype and device, and will share one `Store`.
        """
        store = Store(n_alike)
        super().__init__(layer_class_to_replicate=lambda: PathLayer(room, static, store))

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on."""
        for layer in self.layers:
            layer.length = min(layer.length, length)

    def keep_path(self, start: int, path: list[int], rows: torch.Tensor | None = None) -> None:
        """Keep the first `start` rows and, after them, the rows `start + p` for p in `path`, rising; forget the rest.

        `rows` is what `rows_of` makes of `path`, from a caller that has it.
        """
        count = len(path)
        if rows is None:
            rows = rows_of(path, torch.device("cpu"))
        if rows is not None:
            first = next(i for i, row in enumerate(path) if row != i)  # those before it lie where they should
            for buffer in {id(buffer): buffer for layer in self.layers for buffer in layer.buffers}.values():
                new = buffer.narrow(-2, start, path[-1] + 1)
                new.narrow(-2, first, count - first).copy_(new.index_select(-2, rows[first:].to(buffer.device)))
        for layer in self.layers:
            layer.length = start + count
