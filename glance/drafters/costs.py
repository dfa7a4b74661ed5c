"""What the passes of a round cost on this machine: a draft, a verify pass by number of nodes, a plain step.

Conventions that decide numbers:

- A cost is the median of a few timed passes on a grid of tree sizes. The medians are made non-decreasing by an isotonic
  fit; between the sizes of the grid the cost is a straight line.
- A verify pass is timed after a draft, as in a round. A plain step is timed after plain steps: it finds its weights in the
  processor's caches.
- Costs are measured once per target, device, dtype, attention, number of threads, kind and size of head, branch, most
  nodes, and prefix length (to a factor of two).

Shapes: N nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from glance.drafters import Draft
from glance.drafters.block import BlockDrafter
from glance.session import Choice, Settings
from glance.target import Target
from glance.tree import NO_TREE, CandidateTree, build_budget_tree

GRID = (0, 1, 3, 7, 15, 31, 63, 127)  # tree sizes that are timed
REPEATS = 9


@dataclass(frozen=True)
class RoundCosts:
    """What passes cost in milliseconds: a draft, a verify pass by number of nodes, a plain step."""

    nodes: tuple[int, ...]  # rising, from 0
    verify_ms: tuple[float, ...]  # after a draft; never falling
    draft_ms: float
    plain_ms: float | None = None  # of a plain step among plain steps; None: verify_ms[0]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.nodes))
        if not rising or self.nodes[:1] != (0,) or len(self.nodes) != len(self.verify_ms):
            raise ValueError(f"nodes must rise from 0 and go with verify_ms, got {self.nodes} and {self.verify_ms}")
        falls = any(a > b for a, b in pairwise(self.verify_ms))
        if falls or min(*self.verify_ms, self.plain_ms or 1.0) <= 0 or self.draft_ms < 0 or self.plain_ms == 0:
            raise ValueError(f"costs must be positive and verify_ms must not fall, got {self}")

    def verify(self, n: int) -> np.ndarray:
        """Return the costs `(n + 1,)` of passes of 0..n nodes; beyond the grid the last slope goes on."""
        nodes = np.array(self.nodes)
        ms = np.array(self.verify_ms)
        if n > nodes[-1] and len(nodes) > 1:
            slope = (ms[-1] - ms[-2]) / (nodes[-1] - nodes[-2])
            ms = np.append(ms, ms[-1] + slope * (n - nodes[-1]))
            nodes = np.append(nodes, n)
        return np.interp(np.arange(n + 1), nodes, ms)


_MEASURED: WeakKeyDictionary = WeakKeyDictionary()  # model -> {what else costs depend on: RoundCosts}


def costs_of(block: BlockDrafter, target: Target, root: int, draft: Draft) -> RoundCosts:
    """Return what passes cost at the target's present prefix; measured when none of its kind was before."""
    head = block.head
    config = target.model.config.get_text_config(decoder=True)
    kind = (
        target.device,
        target.dtype,
        config._attn_implementation,
        torch.get_num_threads(),
        target.length.bit_length(),
    )
    size = sum(weight.numel() for weight in head.parameters()) if hasattr(head, "parameters") else 0
    kind += (target.compiled, type(head).__name__, size, head.block_size, block.branch_k, block.budget)
    known = _MEASURED.setdefault(target.model, {})
    if kind not in known:
        known[kind] = measure_costs(block, target, root, draft)
    return known[kind]


def measure_costs(block: BlockDrafter, target: Target, root: int, draft: Draft) -> RoundCosts:
    """Time passes on the grid of tree sizes, up to the drafter's largest tree."""
    from scipy.optimize import isotonic_regression

    trees = [build_budget_tree(draft.top_ids, draft.top_logprobs, budget=n, branch_k=block.branch_k) for n in GRID]
    trees = list({len(tree): tree for tree in trees if len(tree) <= block.budget}.values())
    plain_ms, draft_ms, verify_ms = time_passes(block, target, root, trees, REPEATS)
    return RoundCosts(tuple(map(len, trees)), tuple(isotonic_regression(verify_ms).x.tolist()), draft_ms, plain_ms)


def time_passes(
    block: BlockDrafter,
    target: Target,
    root: int,
    trees: Sequence[CandidateTree],
    repeats: int,
    fused: torch.Tensor | None = None,
) -> tuple[float, float, list[float]]:
    """Time passes behind the committed tokens, which stay as they are; each in the order in which its loop makes it.

    Args:
        fused: states that every timed draft reads as new; None for none.

    Returns:
        Medians in milliseconds: a plain step after plain steps; a draft; a verify pass of each tree, each after a draft.
    """

    choose = Choice(Settings())

    def verify(tree: CandidateTree) -> float:
        ms = _timed(lambda: choose(target.verify(root, tree)))
        target.cache.truncate(target.length)
        return ms

    rows = [[(_timed(lambda: block.draft(root, fused)), verify(tree)) for tree in trees] for _ in range(repeats + 1)]
    plain = [verify(NO_TREE) for _ in range(2 * repeats + 1)]
    drafts, verified = np.array(rows[1:]).transpose(2, 0, 1)  # (repeats, trees) each
    return float(np.median(plain[1:])), float(np.median(drafts)), np.median(verified, axis=0).tolist()


def _timed(run: Callable[[], Any]) -> float:
    began = perf_counter()
    run()
    return 1e3 * (perf_counter() - began)
