"""What proposes a tree for a round: the protocol, and what a draft is. A file each for those who keep it.

A drafter is handed the last committed token and the fused states that are new since the round before, and returns
candidates. It never sees the target's answer, so it can cost speed but not exactness.

    block   the paper's: one pass of a block head prices every offset, and the tree is read off these marginals
    auto    the same head, with trees as wide as pays on this machine

Shapes: B block, K branch, N nodes, n new fused states, L kept layers, d width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from glance.target import Target
from glance.tree import CandidateTree


@dataclass(frozen=True)
class Draft:
    """A block's per-offset marginals: the K most probable tokens of each offset and their log-probabilities."""

    top_ids: np.ndarray  # (B-1, K) int64
    top_logprobs: np.ndarray  # (B-1, K) float32


NO_DRAFT = Draft(np.empty((0, 0), np.int64), np.empty((0, 0), np.float32))  # of a round that takes a plain step


class Drafter(Protocol):
    """Anything that proposes trees: `begin` once a prompt, then `draft` and `grow` once a round.

    One that learns from what was accepted has `observe(report)` too, and hears every `Round`; its entropy may still be nan.
    """

    layer_ids: tuple[int, ...]  # target layers whose states it reads; may be empty
    max_nodes: int  # of one tree; sizes the cache
    chain: bool  # whether its trees are always chains

    def begin(self, target: Target, lap: Callable[[str], None]) -> None:
        """Get ready for a prompt; `lap(name)` books the time since the last lap under `name`."""
        ...

    def draft(self, root: int, fused: torch.Tensor | None) -> Draft:
        """Price the block after `root`, given the fused states `(1, n, L * d)` of tokens committed since the last call."""
        ...

    def grow(self, draft: Draft) -> CandidateTree:
        """Build the candidate tree from a draft."""
        ...
