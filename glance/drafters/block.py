"""The paper's drafter: one pass of a block head prices every offset of the block at once, and the tree is read off these
marginals. A chain is the same drafter with one branch.

Shapes: B block, K branch, N nodes, n new fused states, L kept layers, d width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from glance.cache import PathCache
from glance.drafters import NO_DRAFT, Draft
from glance.head import block_embedding, block_logits, check_head, check_head_mode, check_pair
from glance.session import fetch
from glance.target import Target
from glance.tree import NO_TREE, CandidateTree, best_paths


@dataclass
class BlockDrafter:
    """One pass of a block head per round; the tree is the `budget` best paths of its marginals.

    Args:
        head: a block head (see `glance.head`).
        budget: N, nodes per tree; 0 decodes plain steps.
        branch_k: candidates per offset; 1 makes the tree a chain.
        extend_budget: further nodes past the block. When the drafter's greedy spine fills the block, a second pass with
            the spine revealed prices B-1 more offsets, and a subtree of this many nodes hangs off the spine's leaf.
    """

    head: Any
    budget: int = 63
    branch_k: int = 8
    extend_budget: int = 0
    chain: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_head(self.head)
        for name in ("budget", "extend_budget"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.branch_k < 1:
            raise ValueError(f"branch_k must be at least 1, got {self.branch_k}")
        self.chain = self.branch_k == 1

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The target layers that the head reads."""
        return tuple(self.head.target_layer_ids)

    @property
    def max_nodes(self) -> int:
        """The most nodes of one tree."""
        return self.budget + self.extend_budget

    def begin(self, target: Target, lap: Callable[[str], None]) -> None:
        """Check the pair, and start with an empty context."""
        check_pair(self.head, target.model)
        check_head_mode(self.head)
        self._target = target
        self._lap = lap
        self._cache = PathCache()
        self._root = 0
        self._row = torch.empty(1, 0)
        # [last known token, MASK x (B-1)], made once
        self._block = torch.full((1, self.head.block_size), self.head.mask_token_id, device=target.device)
        weight = next(iter(self.head.parameters()), None) if hasattr(self.head, "parameters") else None
        self._home = (target.device, target.dtype) if weight is None else (weight.device, weight.dtype)
        self._embed = block_embedding(self.head, target.model)
        self._logits = block_logits(self.head, target.model)

    def draft(self, root: int, fused: torch.Tensor | None) -> Draft:
        """Fill the block after `root` in one pass; one transfer to the host."""
        if self.budget == 0:
            return NO_DRAFT
        self._root = root
        return self._price([root], fused)

    def grow(self, draft: Draft) -> CandidateTree:
        """Take the `budget` best paths; where the spine fills the block, extend past it."""
        if not len(draft.top_ids):
            return NO_TREE
        tree = best_paths(draft.top_ids.tolist(), draft.top_logprobs.tolist(), self.budget)
        spine = tree.spine() if self.extend_budget else []
        if not spine or len(spine) < self.head.block_size - 1:
            return tree
        self._lap("tree")
        beyond = self._price([self._root, *(tree.columns.tokens[node] for node in spine)], None)
        self._lap("draft")
        subtree = best_paths(beyond.top_ids.tolist(), beyond.top_logprobs.tolist(), self.extend_budget)
        return tree.graft(spine[-1], subtree)

    def _price(self, known: list[int], fused: torch.Tensor | None) -> Draft:
        """Run the head on `[known..., MASK x (B-1)]`, known starting at the root; price the masked offsets."""
        head, model, (device, dtype) = self.head, self._target.model, self._home
        place = self._target.length
        n_masked = head.block_size - 1  # place: the root's, since it is not yet committed
        ids = self._block
        ids[:, :1].fill_(known[-1])
        if len(known) > 1:
            ids = torch.cat([torch.tensor([known[:-1]], device=ids.device), ids], dim=1)
        if fused is None:  # nothing new was committed since the last pass
            fused = torch.empty(1, 0, len(self.layer_ids) * model.get_input_embeddings().weight.shape[1])
        hidden = head(
            target_hidden=fused.to(device, dtype),
            noise_embedding=self._embed(ids).to(device, dtype),
            position_ids=self._places(place - fused.shape[1], place + ids.shape[1]),
            past_key_values=self._cache,
            use_cache=True,
        )[:, -n_masked:].to(self._target.device, self._target.dtype)
        self._cache.truncate(place)
        logprobs = self._logits(hidden)[0].float().log_softmax(-1)  # (B-1, V)
        if self.chain and hasattr(head, "propose"):  # a head with its own way through the block: dflash's second kind
            anchor = ids[:, len(known) - 1]
            top_ids = head.propose(hidden, anchor, model.get_output_embeddings(), 0.0)[0].T  # (B-1, 1)
            top_logprobs = logprobs.gather(-1, top_ids)
        else:
            top_logprobs, top_ids = logprobs.topk(min(self.branch_k, logprobs.shape[-1]), dim=-1)  # (B-1, K)
        return Draft(*fetch(top_ids, top_logprobs))

    def _places(self, start: int, end: int) -> torch.Tensor:
        """Return a stream's places `(1, end - start)`, cut from a longer row that is made when it is too short."""
        if self._row.shape[1] < end:
            self._row = torch.arange(2 * end, device=self._home[0])[None]
        return self._row.narrow(1, start, end - start)
