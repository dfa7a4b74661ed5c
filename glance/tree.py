"""The candidate tree: the `budget` most probable paths of one block, and what attention needs to verify them in one pass.

A block fills B-1 offsets; at each offset the drafter names K tokens with log-probabilities. A path that takes rank r_d
at offsets d = 1..D is given the product of its marginals, and the tree holds the N paths of highest probability. It is
prefix-closed (a path is never more probable than its prefix) and lists parents before children.

Conventions that decide numbers:

- Nodes are numbered 0..N-1 in order of selection. Parent -1 is the root, the last committed token, which is no node.
- `depth` of a node is its offset: 1 for a child of the root. Its place in the stream is the root's place + its depth.
- Order, and so ties: higher path probability first, then smaller depth, then smaller parent, then smaller rank.
- In masks, row and column 0 are the root and node i is row and column i + 1.

Shapes: B block, D = B-1 offsets, K branch, N nodes. The file knows nothing of tokens' meaning, models or tensors; numpy is
enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from heapq import heappop, heappush, heapreplace
from math import inf, isnan
from typing import Any, NamedTuple

import numpy as np

ROOT = -1


class Node(NamedTuple):
    """One node: its token, parent (-1 = the root), depth (= offset), rank among the offset's top-k, path log-probability."""

    token: int
    parent: int
    depth: int
    rank: int
    logp: float


class Columns(NamedTuple):
    """The nodes' fields side by side, N plain numbers each: what a round reads."""

    tokens: Sequence[int]
    parents: Sequence[int]
    depths: Sequence[int]
    ranks: Sequence[int]
    logps: Sequence[float]


class CandidateTree(Sequence):
    """A prefix-closed tree of N candidate tokens; indexing gives `Node` objects.

    Attributes:
        columns: the nodes' fields as plain numbers, see `Columns`.
        tokens, parents, depths, ranks: the same as arrays, (N,) int64; parent -1 is the root, depth 1 a child of the root.
        logps: (N,) float64, log-probability of the path from the root.
    """

    def __init__(self, tokens: Sequence, parents: Sequence, depths: Sequence, ranks: Sequence, logps: Sequence):
        fields = (tokens, parents, depths, ranks, logps)
        self.columns = Columns(*(field.tolist() if hasattr(field, "tolist") else field for field in fields))

    tokens = cached_property(lambda self: np.array(self.columns.tokens, np.int64))
    parents = cached_property(lambda self: np.array(self.columns.parents, np.int64))
    depths = cached_property(lambda self: np.array(self.columns.depths, np.int64))
    ranks = cached_property(lambda self: np.array(self.columns.ranks, np.int64))
    logps = cached_property(lambda self: np.array(self.columns.logps, np.float64))

    def __len__(self) -> int:
        return len(self.columns.tokens)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        return Node(*(column[index] for column in self.columns))

    def __iter__(self) -> Iterator[Node]:
        return map(Node._make, zip(*self.columns, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CandidateTree) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def first(self, n: int) -> CandidateTree:
        """Return the tree of the first n nodes."""
        return CandidateTree(*(column[:n] for column in self.columns))

    def path(self, node: int) -> list[int]:
        """List the node indices from the root's child down to `node`; empty for the root itself (-1)."""
        found: list[int] = []
        while node != ROOT:
            found.append(node)
            node = self.columns.parents[node]
        return found[::-1]

    def spine(self) -> list[int]:
        """List the nodes that follow rank 0 from the root down: the drafter's own greedy path, as far as the tree has it."""
        found: list[int] = []
        for i, node in enumerate(self):
            if node.rank == 0 and node.parent == (found[-1] if found else ROOT):
                found.append(i)
        return found

    def graft(self, leaf: int, other: CandidateTree) -> CandidateTree:
        """Hang `other`'s nodes below node `leaf` (-1 = root), after all of this tree's nodes."""
        at = Node(0, 0, 0, 0, 0.0) if leaf == ROOT else self[leaf]
        moved = (
            (token, leaf if parent == ROOT else parent + len(self), depth + at.depth, rank, logp + at.logp)
            for token, parent, depth, rank, logp in other
        )
        return as_tree([*self, *moved])

    def __repr__(self) -> str:  # `glance.view` puts an indented tree in its place
        return f"CandidateTree({len(self)} nodes)"


def make_tree(tokens: Any, parents: Any, depths: Any, ranks: Any, logps: Any) -> CandidateTree:
    """Build a tree from five sequences or arrays of length N."""
    integers = np.array([tokens, parents, depths, ranks], dtype=np.int64).reshape(4, -1)
    return CandidateTree(*integers.tolist(), np.array(logps, dtype=np.float64).tolist())


NO_TREE = make_tree([], [], [], [], [])


def build_budget_tree(top_ids: Any, top_logprobs: Any, *, budget: int, branch_k: int = 8) -> CandidateTree:
    """Build the tree of the `budget` most probable paths under the block's per-offset marginals (paper, section 3).

    Args:
        top_ids: (D, K) token ids, per offset the most probable first; numpy, torch or nested lists.
        top_logprobs: (D, K) their log-probabilities; -inf marks an absent candidate.
        budget: N, the most nodes to take; fewer come back when the block has fewer paths.
        branch_k: how many of the K candidates an offset may use.

    Returns:
        A `CandidateTree` of min(budget, number of paths) nodes. No other prefix-closed tree of that size has a larger
        sum of path probabilities, which is the expected number of accepted tokens if the marginals are right.

    Raises:
        ValueError: shapes that differ, a negative budget or branch, or a NaN.

    >>> nodes = build_budget_tree([[5, 6], [7, 8]], [[-0.1, -2.5], [-0.2, -1.0]], budget=3)
    >>> [(node.token, node.parent, node.depth) for node in nodes]
    [(5, -1, 1), (7, 0, 2), (8, 0, 2)]
    """
    return best_paths(*_checked_marginals(top_ids, top_logprobs, budget, branch_k), budget)


def best_paths(ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], budget: int) -> CandidateTree:
    """Build the tree of `build_budget_tree` from D lists of as many ids and falling log-probabilities; refuse NaN rows."""
    none = -inf
    rows = [[none], *([*row, none] for row in logprobs)]  # by depth; absent past the last rank
    heads = [*(row[0] for row in rows[1:]), none]  # of rank 0, by the parent's depth; absent past the last offset
    if isnan(sum(heads)):
        raise ValueError("the log-probabilities have NaN entries; -inf is how a candidate is absent")
    taken: list[tuple[float, int, int, int, float]] = []
    # An entry is (path's cost, depth, parent, rank, parent's cost), a cost being -log-probability: the order of the module
    # docstring. Only the best untried child of an expanded node is ever in the heap: its next sibling follows it.
    heap = [(-heads[0], 1, ROOT, 0, 0.0)] if heads[0] > none else []
    for node in range(budget):
        if not heap:
            break
        entry = cost, depth, parent, rank, before = heap[0]
        rank += 1
        logprob = rows[depth][rank]
        if logprob > none:
            heapreplace(heap, (before - logprob, depth, parent, rank, before))
        else:
            heappop(heap)
        logprob = heads[depth]
        if logprob > none:
            heappush(heap, (cost - logprob, depth + 1, node, 0, cost))
        taken.append(entry)
    if not taken:
        return NO_TREE
    costs, depths, parents, ranks, _ = zip(*taken, strict=True)
    tokens = [ids[depth - 1][rank] for depth, rank in zip(depths, ranks, strict=True)]
    return CandidateTree(tokens, parents, depths, ranks, [-cost for cost in costs])


def children_of(nodes: Sequence) -> dict[int, dict[int, int]]:
    """Map each parent that has children (-1 = the root) to its children, as `{token: node index}`.

    >>> children_of(build_budget_tree([[5, 6]], [[-0.1, -2.5]], budget=2))
    {-1: {5: 0, 6: 1}}
    """
    children: dict[int, dict[int, int]] = {}
    for i, node in enumerate(as_tree(nodes)):
        children.setdefault(node.parent, {})[node.token] = i
    return children


def ancestor_matrix(nodes: Sequence) -> np.ndarray:
    """Say who sees whom: (N+1, N+1) bool, true where the column is the row itself or an ancestor; row 0 is the root.

    >>> ancestor_matrix(build_budget_tree([[5, 6]], [[-0.1, -2.5]], budget=2)).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    return tree_mask(nodes) == 0


def tree_mask(nodes: Sequence, *, prefix: int = 0) -> np.ndarray:
    """Build the additive mask of the verify pass: 0 where a row may look, -inf where it may not.

    Args:
        nodes: the tree.
        prefix: number of tokens before the root, all of them visible to every row.

    Returns:
        (N+1, prefix+N+1) float32.

    >>> tree_mask(build_budget_tree([[5, 6]], [[-0.1, -2.5]], budget=2), prefix=1).tolist()[1]
    [0.0, 0.0, 0.0, -inf]
    """
    parents = as_tree(nodes).columns.parents
    n = len(parents) + 1
    mask = np.empty((n, prefix + n), dtype=np.float32)
    mask[:, : prefix + 1] = 0
    mask[:, prefix + 1 :] = -inf
    for i, parent in enumerate(parents, start=1):
        mask[i] = mask[parent + 1]  # what the parent sees, and the node itself
        mask[i, prefix + i] = 0
    return mask


def as_tree(nodes: Sequence) -> CandidateTree:
    """Take a tree as it is, and build one from any sequence of `Node`s."""
    if isinstance(nodes, CandidateTree):
        return nodes
    columns = list(zip(*nodes, strict=True)) or [()] * len(Node._fields)
    return make_tree(*columns)


def _checked_marginals(top_ids: Any, top_logprobs: Any, budget: int, branch_k: int) -> tuple[list, list]:
    """Return ids and log-probabilities, D lists each of at most `branch_k`, sorted by falling log-probability, or raise."""
    if budget < 0 or branch_k < 0:
        raise ValueError(f"budget and branch_k must not be negative, got budget={budget}, branch_k={branch_k}")
    ids = np.asarray(top_ids, dtype=np.int64)
    logprobs = np.asarray(top_logprobs, dtype=np.float64)
    if logprobs.size == 0:
        return [], []
    if ids.shape != logprobs.shape or ids.ndim != 2:
        raise ValueError(f"top_ids and top_logprobs must share one shape (D, K), got {ids.shape} and {logprobs.shape}")
    if nans := int(np.isnan(logprobs).sum()):
        raise ValueError(f"top_logprobs has {nans} NaN entries; -inf is how a candidate is absent")
    if (logprobs[:, 1:] > logprobs[:, :-1]).any():
        order = np.argsort(-logprobs, axis=1, kind="stable")
        ids = np.take_along_axis(ids, order, 1)
        logprobs = np.take_along_axis(logprobs, order, 1)
    return (ids[:, :branch_k].tolist(), logprobs[:, :branch_k].tolist()) if branch_k else ([], [])
