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
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from math import isnan
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


@dataclass(frozen=True, eq=False, repr=False)
class CandidateTree(Sequence):
    """A prefix-closed tree of N candidate tokens, as five arrays of shape (N,); indexing gives `Node` objects."""

    tokens: np.ndarray  # (N,) int64
    parents: np.ndarray  # (N,) int64, -1 = root, always smaller than the node's own index
    depths: np.ndarray  # (N,) int64, 1 = child of the root
    ranks: np.ndarray  # (N,) int64
    logps: np.ndarray  # (N,) float64, log-probability of the path from the root

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]  # IndexError for what is out of range, negative indices as usual
        return Node(
            int(self.tokens[i]), int(self.parents[i]), int(self.depths[i]), int(self.ranks[i]), float(self.logps[i])
        )

    def __iter__(self) -> Iterator[Node]:
        columns = (self.tokens, self.parents, self.depths, self.ranks, self.logps)
        return map(Node._make, zip(*(column.tolist() for column in columns), strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CandidateTree) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def path(self, node: int) -> list[int]:
        """List the node indices from the root's child down to `node`; empty for the root itself (-1)."""
        found: list[int] = []
        while node != ROOT:
            found.append(node)
            node = int(self.parents[node])
        return found[::-1]

    def spine(self) -> list[int]:
        """List the nodes that follow rank 0 from the root down: the drafter's own greedy path, as far as the tree has it."""
        found: list[int] = []
        for i, (parent, rank) in enumerate(zip(self.parents.tolist(), self.ranks.tolist(), strict=True)):
            if rank == 0 and parent == (found[-1] if found else ROOT):
                found.append(i)
        return found

    def graft(self, leaf: int, other: CandidateTree) -> CandidateTree:
        """Hang `other`'s nodes below node `leaf` (-1 = root), after all of this tree's nodes."""
        n, base_depth, base_logp = len(self), 0, 0.0
        if leaf != ROOT:
            base_depth, base_logp = int(self.depths[leaf]), float(self.logps[leaf])
        return CandidateTree(
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.parents, np.where(other.parents == ROOT, leaf, other.parents + n)]),
            np.concatenate([self.depths, other.depths + base_depth]),
            np.concatenate([self.ranks, other.ranks]),
            np.concatenate([self.logps, other.logps + base_logp]),
        )

    def __repr__(self) -> str:
        from glance.view import tree_text

        return tree_text(self)

    def _repr_html_(self) -> str:
        from glance.view import tree

        return tree(self)._repr_html_()


def make_tree(tokens: Any, parents: Any, depths: Any, ranks: Any, logps: Any) -> CandidateTree:
    """Build a tree from five sequences of length N."""
    integers = np.array([tokens, parents, depths, ranks], dtype=np.int64).reshape(4, -1)
    return CandidateTree(*integers, np.array(logps, dtype=np.float64))


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
    ids, rows = _checked_marginals(top_ids, top_logprobs, budget, branch_k)
    n_offsets, width = len(rows), len(rows[0]) if rows else 0
    heads = [row[0] for row in rows] if width else []  # a rank-0 child's cost, by offset
    taken: list[tuple[float, int, int, int, float]] = []
    # An entry is (path's cost, depth, parent, rank, parent's cost), a cost being -log-probability: the order of the module
    # docstring. Only the best untried child of an expanded node is ever in the heap: its next sibling follows it.
    heap = [(heads[0], 1, ROOT, 0, 0.0)] if heads and heads[0] < np.inf else []
    while heap and len(taken) < budget:
        entry = cost, depth, parent, rank, before = heap[0]
        if rank + 1 < width and (step := rows[depth - 1][rank + 1]) < np.inf:
            heapreplace(heap, (before + step, depth, parent, rank + 1, before))
        else:
            heappop(heap)
        if depth < n_offsets and heads[depth] < np.inf:
            heappush(heap, (cost + heads[depth], depth + 1, len(taken), 0, cost))
        taken.append(entry)
    if not taken:
        return NO_TREE
    paths, *columns, _ = zip(*taken, strict=True)
    depths, parents, ranks = np.array(columns)
    return CandidateTree(ids[depths - 1, ranks], parents, depths, ranks, -np.array(paths))


def children_of(nodes: Sequence) -> dict[int, dict[int, int]]:
    """Map each parent that has children (-1 = the root) to its children, as `{token: node index}`.

    >>> children_of(build_budget_tree([[5, 6]], [[-0.1, -2.5]], budget=2))
    {-1: {5: 0, 6: 1}}
    """
    children: dict[int, dict[int, int]] = {}
    tree = as_tree(nodes)
    for i, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        children.setdefault(parent, {})[token] = i
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
    parents = as_tree(nodes).parents.tolist()
    n = len(parents) + 1
    mask = np.full((n, prefix + n), -np.inf, dtype=np.float32)
    mask[:, : prefix + 1] = 0
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


def _checked_marginals(top_ids: Any, top_logprobs: Any, budget: int, branch_k: int) -> tuple[np.ndarray, list]:
    """Return ids (D, K) and costs, D rows of at most `branch_k`, sorted by rising cost, or raise."""
    if budget < 0 or branch_k < 0:
        raise ValueError(f"budget and branch_k must not be negative, got budget={budget}, branch_k={branch_k}")
    ids, costs = np.asarray(top_ids, dtype=np.int64), -np.asarray(top_logprobs, dtype=np.float64)
    if costs.size == 0:
        return np.empty((0, 0), np.int64), []
    if ids.shape != costs.shape or ids.ndim != 2:
        raise ValueError(f"top_ids and top_logprobs must share one shape (D, K), got {ids.shape} and {costs.shape}")
    rows = costs.tolist()
    if isnan(sum(map(sum, rows))) and (nans := int(np.isnan(costs).sum())):
        raise ValueError(f"top_logprobs has {nans} NaN entries; -inf is how a candidate is absent")
    if rows != list(map(sorted, rows)):
        order = np.argsort(costs, axis=1, kind="stable")
        ids, rows = np.take_along_axis(ids, order, 1), np.take_along_axis(costs, order, 1).tolist()
    return ids, rows if len(rows[0]) <= branch_k else [row[:branch_k] for row in rows]
