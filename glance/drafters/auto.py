"""`budget="auto"`: a block head whose trees are as wide as pays on this machine.

The rule stands in `glance.drafters.width`, what passes cost in `glance.drafters.costs`. Costs are measured at the first
round that needs them, after the first draft; the time is booked as `calibrate`, outside `decode_only`. States of rounds
that skip drafting wait for the next draft.
"""

from collections.abc import Callable
from typing import Any

import torch

from glance.drafters import NO_DRAFT, Draft
from glance.drafters.block import BlockDrafter
from glance.drafters.costs import GRID, RoundCosts, costs_of
from glance.drafters.width import Width
from glance.records import Round
from glance.target import Target
from glance.tree import NO_TREE, CandidateTree, best_paths


class AutoDrafter:
    """A block head whose trees are as wide as pays; a `BlockDrafter` underneath.

    Args:
        head: a block head.
        branch_k: candidates per offset.
        max_nodes: the most nodes of one tree, at least 1.
        costs: known costs; None measures them at the first prompt of their kind.
    """

    chain = False

    def __init__(self, head: Any, branch_k: int = 8, *, max_nodes: int = GRID[-1], costs: RoundCosts | None = None):
        if max_nodes < 1:
            raise ValueError(f"max_nodes must be at least 1, got {max_nodes}")
        self._block = BlockDrafter(head, max_nodes, branch_k)
        self._costs = costs
        self.chain = self._block.chain
        self.layer_ids = self._block.layer_ids
        self.max_nodes = max_nodes

    def begin(self, target: Target, lap: Callable[[str], None]) -> None:
        """Get ready for a prompt: no evidence, no states waiting."""
        self._block.begin(target, lap)
        self._target = target
        self._lap = lap
        self._waiting: list[torch.Tensor] = []
        self._width: Width | None = None

    def draft(self, root: int, fused: torch.Tensor | None) -> Draft:
        """Draft, or in a round that skips it, keep the new states for later and return no offsets."""
        if fused is not None:
            self._waiting.append(fused)
        if self._width and not self._width.wants_draft():
            return NO_DRAFT
        fused = torch.cat(self._waiting, dim=1) if len(self._waiting) > 1 else fused
        self._waiting.clear()
        draft = self._block.draft(root, fused)
        if self._width is None:
            self._lap("draft")
            costs = self._costs or costs_of(self._block, self._target, root, draft)
            self._width = Width(costs, self._block.budget)
            self._lap("calibrate")
        return draft

    def grow(self, draft: Draft) -> CandidateTree:
        """Build the tree of the best paths, as far as it pays."""
        if not len(draft.top_ids):
            return NO_TREE
        width = self._width
        tree = best_paths(draft.top_ids.tolist(), draft.top_logprobs.tolist(), width.room)
        return tree.first(width.size(tree.columns.logps, tree.columns.depths))

    def observe(self, report: Round) -> None:
        """Learn from a finished round."""
        self._width.observe(report)
