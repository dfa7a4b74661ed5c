"""Made-up rounds, for every test of what hears, keeps or shows a round; no model, and no torch."""

from typing import Any

import numpy as np

from glance.records import Round
from glance.tree import NO_TREE, CandidateTree, children_of

TIMES = {"draft": 2.1, "tree": 0.3, "verify": 9.8, "commit": 0.2}
NO_MARGINALS = np.zeros((0, 0))


def made_round(tree: CandidateTree = NO_TREE, **changes: Any) -> Round:
    """Return a round over `tree`: by default nothing is accepted, a bonus of 0 is committed, and no marginals are kept.

    Args:
        changes: fields of `Round`. What is not named follows from `path` and `bonus`.
    """
    fields = {"index": 0, "start": 0, "root": 0, "path": [], "bonus": 0, "entropy": 0.2, "ms": TIMES} | changes
    path = fields["path"]
    bonus = fields["bonus"]
    tokens = [tree.columns.tokens[node] for node in path]
    depths = tree.columns.depths
    defaults = {
        "accepted": len(path),
        "committed": tokens if bonus is None else [*tokens, bonus],
        "choices": choices_of(tree, path, bonus),
        "truncated": bonus is None,
        "offsets": len(fields["top_ids"]) if "top_ids" in fields else max(depths, default=0),
        "top_ids": NO_MARGINALS,
        "top_logprobs": NO_MARGINALS,
    }
    return Round(tree=tree, **(defaults | fields))


def choices_of(tree: CandidateTree, path: list[int], bonus: int | None) -> list[int]:
    """Return a target's choices (N+1,) that lead along `path`, and to `bonus` wherever else."""
    choices = [-1 if bonus is None else bonus] * (len(tree) + 1)
    for at, node in zip([-1, *path], path, strict=False):
        choices[at + 1] = tree.columns.tokens[node]
    return choices


def path_along(tree: CandidateTree, text: list[int]) -> list[int]:
    """Return the nodes that a walk accepts where the target says `text`."""
    children = children_of(tree)
    node = -1
    path = []
    for token in text:
        if token not in children.get(node, {}):
            break
        node = children[node][token]
        path.append(node)
    return path
