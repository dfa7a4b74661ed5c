"""Planted faults: the mistakes that users of such decoders have met, made on purpose, to show that the audit sees them.

Each is a context that breaks one thing in the decoder and mends it on leaving; the oracle shares none of what they break.
A head that reads a wrong layer is planted too: it must cost acceptance and never exactness.

The faults that must show are planted under `KnownText`, a drafter that knows the right text and hides it among decoys, so
that paths are long and lie scattered in the tree whatever the head is worth.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from glance.cache import PathCache
from glance.drafters import Draft
from glance.target import Target
from glance.tree import CandidateTree, build_budget_tree
from glance.verify import VerifyPass


class KnownText:
    """A drafter whose trees hold the right text at rank 1, behind a decoy at every offset.

    Args:
        text: the tokens after the prompt, the first included.
        prompt_tokens: the prompt's length.
        budget, branch_k, offsets: of the trees.
        vocabulary: number of token ids.
    """

    layer_ids: tuple[int, ...] = ()
    chain = False

    def __init__(self, text: list[int], prompt_tokens: int, budget: int, branch_k: int, offsets: int, vocabulary: int):
        self._text = text
        self._prompt_tokens = prompt_tokens
        self._vocabulary = vocabulary
        self.max_nodes = budget
        self._branch_k = max(2, branch_k)
        self._offsets = offsets

    def begin(self, target: Target, lap: Callable[[str], None]) -> None:
        """Keep hold of the target, whose length says how far the text has come."""
        self._target = target

    def draft(self, root: int, fused: torch.Tensor | None) -> Draft:
        """Return decoys with the right text among them; past its end, decoys alone."""
        at = self._target.length - self._prompt_tokens + 1
        ahead = np.array(self._text[at : at + self._offsets] or [0])
        ids = (ahead[:, None] + np.arange(1, self._branch_k + 1)) % self._vocabulary
        ids[:, 1] = ahead
        share = np.array([0.4, 0.39, *[0.2 / self._branch_k] * (self._branch_k - 2)])
        return Draft(ids, np.tile(np.log(share), (len(ahead), 1)))

    def grow(self, draft: Draft) -> CandidateTree:
        """Build the tree."""
        return build_budget_tree(draft.top_ids, draft.top_logprobs, budget=self.max_nodes, branch_k=self._branch_k)


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
        def shifted(self: VerifyPass, tree: Any, length: int):
            mask = mask_of(self, tree, length)
            return None if mask is None else mask.roll(1, dims=-1)

        return shifted

    return _patched(VerifyPass, "mask_of", made)


def path_gather_skipped(head: Any):
    """Keep the first rows of a verify pass instead of the accepted path's."""

    def made(keep_path: Callable) -> Callable:
        return lambda self, start, path, rows=None: keep_path(self, start, list(range(len(path))))

    return _patched(PathCache, "keep_path", made)


@contextmanager
def wrong_layer_read(head: Any) -> Iterator[None]:
    """Let the head read each kept state one layer too early (layer 0 for the first)."""
    original = head.target_layer_ids
    head.target_layer_ids = [max(0, layer - 1) for layer in original]
    try:
        yield
    finally:
        head.target_layer_ids = original


DELTA = "delta forced to 0"
NEEDS = {  # tokens that a text must have: one of the prefill, then those that the fault can change
    DELTA: 2,
    "mask shifted by one": 2,
    "path gather skipped": 4,  # a round whose path is gathered gives two, and the next round one
    "wrong layer read": 2,
}
FAULTS: dict[str, tuple[Callable[[Any], Any], bool]] = {  # name: how it is planted, whether the audit must fail
    DELTA: (delta_forced_to_zero, True),
    "mask shifted by one": (mask_shifted_by_one, True),
    "path gather skipped": (path_gather_skipped, True),
    "wrong layer read": (wrong_layer_read, False),
}
