"""Planted faults: the mistakes that users of such decoders have met, made on purpose, to show that the audit sees them.

Each is a context that breaks one thing in the decoder and mends it on leaving; the oracle shares none of what they break.
A head that reads a wrong layer is planted too: it must cost acceptance and never exactness.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from glance.cache import PathLayer
from glance.target import Target


@contextmanager
def _patched(owner: type, name: str, made: Callable[[Callable], Callable]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, made(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def delta_forced_to_zero(head: Any):
    """Forget the images' shift of rope positions after the prefill."""

    def made(prefill: Callable) -> Callable:
        def forgetful(self: Target, input_ids: torch.Tensor):
            result = prefill(self, input_ids)
            self.delta = 0
            return result

        return forgetful

    return _patched(Target, "prefill", made)


def mask_shifted_by_one(head: Any):
    """Shift the tree's mask by one column: every row sees its neighbour's ancestors."""

    def made(mask_of: Callable) -> Callable:
        def shifted(self: Target, tree: Any):
            mask = mask_of(self, tree)
            return None if mask is None else mask.roll(1, dims=-1)

        return shifted

    return _patched(Target, "_mask", made)


def path_gather_skipped(head: Any):
    """Keep the first rows of a verify pass instead of the accepted path's."""

    def made(keep_path: Callable) -> Callable:
        return lambda self, start, rows, count: keep_path(self, start, None, count)

    return _patched(PathLayer, "keep_path", made)


@contextmanager
def wrong_layer_read(head: Any) -> Iterator[None]:
    """Let the head read each kept state one layer too early (layer 0 for the first)."""
    original = head.target_layer_ids
    head.target_layer_ids = [max(0, layer - 1) for layer in original]
    try:
        yield
    finally:
        head.target_layer_ids = original


FAULTS: dict[str, tuple[Callable[[Any], Any], bool]] = {  # name: how it is planted, whether the audit must fail
    "delta forced to 0": (delta_forced_to_zero, True),
    "mask shifted by one": (mask_shifted_by_one, True),
    "path gather skipped": (path_gather_skipped, True),
    "wrong layer read": (wrong_layer_read, False),
}
