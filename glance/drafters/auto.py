"""`budget="auto"`: each round takes the tree size that pays for itself.

Nodes come in order of path probability, so what node i is expected to add is known before it is verified; what a pass of
N + 1 rows costs is a property of machine, target and prefix. Of the trees that it has room for, a round takes the one with
the most expected tokens per second. That a tree's size should follow its cost is public work: Sequoia (arXiv 2402.12374),
CaDDTree (arXiv 2606.01813).

Conventions that decide numbers:

- Cost: the median of a few timed passes on a grid of sizes, made non-decreasing (isotonic fit), straight lines between.
  Each verify pass follows a draft, as in a round; the plain step follows plain steps, and finds its weights in the
  processor's caches. Measured once per target, device, dtype, attention, threads, kind and size of head, branch, most nodes
  and prefix length (to a factor of two), at the first round that needs it, after the first draft; booked as `calibrate`,
  outside `decode_only`.
- Gain: the head's path probabilities, each multiplied by trust ** depth. Trust is what the rounds of this decode showed. At
  the root and at every accepted node with children in the tree, the children's marginals sum to a mass M, and the target's
  choice is among them (a hit) or not; with sums over rounds, each older round weighted by FORGET, and one pseudo-hit for a
  head that is right, trust = (hits + 1) / (sum M + 1), at most 1. It decides how many nodes are taken, never which.
- Room: a tree is built to the size last taken and SPARE more, and cut to the size that pays best of these.
- Drafting: a drafted round is lost if it brought fewer tokens per second than plain steps and such rounds are expected to.
  After PATIENCE lost in a row, or one whose draft had no node worth its cost, plain steps follow without a draft: so many
  that what this round lost is PROBE_SHARE of their time. The next round drafts again, as a probe: it must pay by itself.
  Expected means: by the tree that was verified, priced again with the round's own outcome among the evidence, which is
  steadier than the outcome. Recent rounds count most (RECALL); the head's own word before the first counts as one more.
  States of skipped rounds wait for the next draft.

Everything but the costs is a function of the rounds so far: equal rounds and costs give equal trees. Exactness does not
depend on any of it.

Shapes: D offsets, K branch, N nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, exp
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from glance.drafters import NO_DRAFT, Draft
from glance.drafters.block import BlockDrafter
from glance.records import Round
from glance.session import Choice, Settings
from glance.target import Target
from glance.tree import NO_TREE, ROOT, CandidateTree, best_paths, build_budget_tree

GRID = (0, 1, 3, 7, 15, 31, 63, 127)  # tree sizes that are timed
REPEATS = 9
SPARE = 8  # nodes that a tree is built beyond the size last taken
FORGET = 0.9  # weight of a round's evidence, one round later
PATIENCE = 2  # lost rounds in a row that end drafting
RECALL = 0.8  # weight of a drafted round in the rate of drafted rounds, one drafted round later
PROBE_SHARE = 0.01  # of the time of plain rounds, for finding out whether drafting pays again


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
        at, (nodes, ms) = np.arange(n + 1), (np.array(self.nodes), np.array(self.verify_ms))
        if n > nodes[-1] and len(nodes) > 1:
            slope = (ms[-1] - ms[-2]) / (nodes[-1] - nodes[-2])
            nodes, ms = np.append(nodes, n), np.append(ms, ms[-1] + slope * (n - nodes[-1]))
        return np.interp(at, nodes, ms)


def fit_monotone(values: Sequence[float]) -> np.ndarray:
    """Return the non-decreasing sequence nearest to `values` in least squares (pool adjacent violators).

    >>> fit_monotone([1.0, 3.0, 2.0, 4.0]).tolist()
    [1.0, 2.5, 2.5, 4.0]
    """
    pools: list[list[float]] = []  # [mean, count]
    for value in values:
        pools.append([float(value), 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [[(a * n + b * m) / (n + m), n + m]]
    return np.concatenate([np.full(int(n), mean) for mean, n in pools]) if pools else np.empty(0)


class Width:
    """Decides each round's tree size, and whether to draft at all, from costs and from the rounds so far.

    Attributes:
        room: how many nodes are worth building next.
    """

    def __init__(self, costs: RoundCosts, most: int = GRID[-1]):
        """Choose among trees of up to `most` nodes."""
        self._ms = (costs.draft_ms + costs.verify(most)).tolist()  # (most + 1,) of a drafted round
        self._plain_ms = costs.plain_ms or costs.verify_ms[0]
        self._hits = self._expected = 0.0  # evidence of the walk's steps, forgetting
        self._tokens = self._spent_ms = 0.0  # what drafted rounds commit and cost, forgetting
        self._left = 0  # plain rounds before the next draft
        self._lost = 0  # drafted rounds lost in a row; from PATIENCE on the next draft is a probe
        self.room = most

    def wants_draft(self) -> bool:
        """Say whether the next round should draft."""
        return self._left == 0

    @property
    def trust(self) -> float:
        """Return how often a step of the head is right, over how often it says so; at most 1."""
        return min(1.0, (self._hits + 1) / (self._expected + 1))

    def size(self, logps: Sequence[float], depths: Sequence[int]) -> int:
        """Return the N of most expected tokens per second, for nodes in order of selection.

        What it returns is taken to be verified: it sets `room`, and the first call what drafted rounds should bring.

        Args:
            logps: (n,) the head's path log-probabilities.
            depths: (n,) from 1.
        """
        trust, tokens = self.trust, 1.0
        best = 1.0 / self._ms[0], 0, 1.0  # rate, N, tokens
        for n, (logp, depth) in enumerate(zip(logps, depths, strict=True), start=1):
            tokens += exp(logp) * trust**depth
            if tokens / self._ms[n] > best[0]:
                best = tokens / self._ms[n], n, tokens
        _, n, tokens = best
        if not self._spent_ms:  # nothing drafted yet
            self._tokens, self._spent_ms = tokens, self._ms[n]
        self.room = min(n + SPARE, len(self._ms) - 1)
        return n

    def observe(self, report: Round) -> None:
        """Learn from a round."""
        self._hits, self._expected = FORGET * self._hits, FORGET * self._expected
        if not len(report.top_ids):
            self._left -= 1
            return
        tree = report.tree
        parents = tree.columns.parents
        depths = tree.columns.depths
        paths = list(map(exp, tree.columns.logps))
        below: dict[int, float] = {}  # parent -> summed path probabilities of its children
        for parent, path in zip(parents, paths, strict=True):
            below[parent] = below.get(parent, 0.0) + path
        for step, at in enumerate([ROOT, *report.path]):
            hit = step < len(report.path)
            if at in below and (hit or report.bonus is not None):  # after a cut nobody knows
                self._hits += hit
                self._expected += min(1.0, below[at] / (1.0 if at == ROOT else paths[at]))
        trust, ms = self.trust, self._ms[len(paths)]
        tokens = 1 + sum(path * trust**depth for path, depth in zip(paths, depths, strict=True))
        self._tokens, self._spent_ms = RECALL * self._tokens + tokens, RECALL * self._spent_ms + ms
        lost_ms = ms - len(report.committed) * self._plain_ms
        if lost_ms <= 0 or (self._lost < PATIENCE and self._tokens * self._plain_ms >= self._spent_ms):
            self._lost = 0
            return
        self._lost += 1 if paths else PATIENCE
        if self._lost >= PATIENCE:
            self._left = ceil(lost_ms / (PROBE_SHARE * self._plain_ms))


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
        self._target, self._lap = target, lap
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


_MEASURED: WeakKeyDictionary = WeakKeyDictionary()  # model -> {what else costs depend on: RoundCosts}


def costs_of(block: BlockDrafter, target: Target, root: int, draft: Draft) -> RoundCosts:
    """Return what passes cost at the target's present prefix; measured when none of its kind was before."""
    head, config = block.head, target.model.config.get_text_config(decoder=True)
    kind = (
        target.device,
        target.dtype,
        config._attn_implementation,
        torch.get_num_threads(),
        target.length.bit_length(),
    )
    size = sum(weight.numel() for weight in head.parameters()) if hasattr(head, "parameters") else 0
    kind += (target.static is not None, type(head).__name__, size, head.block_size, block.branch_k, block.budget)
    known = _MEASURED.setdefault(target.model, {})
    if kind not in known:
        known[kind] = measure_costs(block, target, root, draft)
    return known[kind]


def measure_costs(block: BlockDrafter, target: Target, root: int, draft: Draft) -> RoundCosts:
    """Time passes on the grid of tree sizes, as far as the drafter's trees reach."""
    trees = [build_budget_tree(draft.top_ids, draft.top_logprobs, budget=n, branch_k=block.branch_k) for n in GRID]
    trees = list({len(tree): tree for tree in trees if len(tree) <= block.budget}.values())
    plain_ms, draft_ms, verify_ms = time_passes(block, target, root, trees, REPEATS)
    return RoundCosts(tuple(map(len, trees)), tuple(fit_monotone(verify_ms).tolist()), draft_ms, plain_ms)


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
