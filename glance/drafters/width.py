"""How many nodes a round takes: the rule of `budget="auto"`.

What a node is expected to add is known before it is verified, since nodes come in order of path probability. What a pass
costs is a property of machine, target and prefix. A round takes the tree with the most expected tokens per millisecond.
That a tree's size should follow its cost is public work: Sequoia (arXiv 2402.12374), CaDDTree (arXiv 2606.01813).

The rule in four formulas. `q_i` is the head's probability of the path to node i, `d_i` the node's depth.

1. Cost of a round with n nodes:

       ms(n) = draft_ms + verify_ms(n)

   Both are measured, see `glance.drafters.costs`.

2. Trust, how often the head is right over how often it says so, at most 1:

       trust = (1 + sum of hits) / (1 + sum of M)

   The sums run over the root and the accepted nodes that have children in the tree. M is the children's summed marginal
   probability; a hit says that the target's choice was among them. A round's evidence counts FORGET times less with each
   later round. The ones are a first hit of a head that is right.

3. Gain, the tokens that a round with n nodes is expected to commit:

       tokens(n) = 1 + sum over i <= n of q_i * trust ** d_i

   A round takes the n that maximises tokens(n) / ms(n). Trust decides how many nodes are taken, never which.

4. When to draft. Over the drafted rounds so far, each RECALL times less with every later one,

       T = sum of tokens(n),  S = sum of ms(n)

   A drafted round is lost if it committed fewer tokens than plain steps would have in its time, and T * plain_ms < S too.
   After PATIENCE lost rounds in a row, or after one tree without a node, skip drafting for

       lost_ms / (PROBE_SHARE * plain_ms)

   rounds, where lost_ms is what the last of them lost against plain steps. The next round drafts again, as a probe, and
   is lost unless it pays by itself.

Everything but the costs is a function of the rounds so far: equal rounds and costs give equal trees. Exactness does not
depend on any of it.
"""

from collections.abc import Sequence
from math import ceil, exp

from glance.drafters.costs import GRID, RoundCosts
from glance.records import Round
from glance.tree import ROOT, CandidateTree

SPARE = 8  # nodes that a tree is built beyond the size last taken
FORGET = 0.9  # weight of a round's evidence, one round later
PATIENCE = 2  # lost rounds in a row that end drafting
RECALL = 0.8  # weight of a drafted round in T and S, one drafted round later
PROBE_SHARE = 0.01  # of the time of plain rounds, for finding out whether drafting pays again


class Width:
    """Decides each round's tree size, and whether to draft at all, from costs and from the rounds so far.

    Attributes:
        room: how many nodes are worth building next: the size last taken, and SPARE more.
    """

    def __init__(self, costs: RoundCosts, most: int = GRID[-1]):
        """Choose among trees of up to `most` nodes."""
        self._ms = (costs.draft_ms + costs.verify(most)).tolist()  # (most + 1,) of a drafted round
        self._plain_ms = costs.plain_ms or costs.verify_ms[0]
        self._hits = 0.0
        self._expected = 0.0  # sum of M
        self._tokens = 0.0  # T
        self._spent_ms = 0.0  # S
        self._plain_rounds_left = 0  # before the next draft
        self._lost = 0  # drafted rounds lost in a row; from PATIENCE on the next draft is a probe
        self.room = most

    def wants_draft(self) -> bool:
        """Say whether the next round should draft."""
        return self._plain_rounds_left == 0

    @property
    def trust(self) -> float:
        """Return how often a step of the head is right, over how often it says so; at most 1."""
        return min(1.0, (self._hits + 1) / (self._expected + 1))

    def size(self, logps: Sequence[float], depths: Sequence[int]) -> int:
        """Return the n of most expected tokens per millisecond, for nodes in order of selection.

        Call it once per drafted round: it updates `room`, and the first call starts T and S.

        Args:
            logps: (n,) the head's path log-probabilities.
            depths: (n,) from 1.
        """
        trust = self.trust
        tokens = 1.0
        best_rate = 1.0 / self._ms[0]
        best_size = 0
        best_tokens = 1.0
        for n, (logp, depth) in enumerate(zip(logps, depths, strict=True), start=1):
            tokens += exp(logp) * trust**depth
            rate = tokens / self._ms[n]
            if rate > best_rate:
                best_rate = rate
                best_size = n
                best_tokens = tokens
        if not self._spent_ms:  # nothing drafted yet: the head's own word counts as a first round
            self._tokens = best_tokens
            self._spent_ms = self._ms[best_size]
        self.room = min(best_size + SPARE, len(self._ms) - 1)
        return best_size

    def observe(self, report: Round) -> None:
        """Learn from a finished round."""
        self._hits *= FORGET
        self._expected *= FORGET
        if not report.offsets:
            self._plain_rounds_left -= 1
            return
        paths = list(map(exp, report.tree.columns.logps))
        self._weigh_steps(report, paths)
        self._weigh_round(report, paths)

    def _weigh_steps(self, report: Round, paths: Sequence[float]) -> None:
        """Add the walk's steps to the evidence for trust."""
        below = _mass_below(report.tree, paths)
        for step, at in enumerate([ROOT, *report.path]):
            hit = step < len(report.path)
            if at in below and (hit or report.bonus is not None):  # after a cut nobody knows
                self._hits += hit
                self._expected += min(1.0, below[at] / (1.0 if at == ROOT else paths[at]))

    def _weigh_round(self, report: Round, paths: Sequence[float]) -> None:
        """Recompute the round's expectation with the updated trust; decide whether it was lost."""
        trust = self.trust
        depths = report.tree.columns.depths
        tokens = 1 + sum(path * trust**depth for path, depth in zip(paths, depths, strict=True))
        ms = self._ms[len(paths)]
        self._tokens = RECALL * self._tokens + tokens
        self._spent_ms = RECALL * self._spent_ms + ms
        lost_ms = ms - len(report.committed) * self._plain_ms
        is_probe = self._lost >= PATIENCE
        pays_on_average = self._tokens * self._plain_ms >= self._spent_ms
        if lost_ms <= 0 or (pays_on_average and not is_probe):
            self._lost = 0
            return
        self._lost += 1 if paths else PATIENCE
        if self._lost >= PATIENCE:
            self._plain_rounds_left = ceil(lost_ms / (PROBE_SHARE * self._plain_ms))


def _mass_below(tree: CandidateTree, paths: Sequence[float]) -> dict[int, float]:
    """Map each parent that has children to the sum of its children's path probabilities."""
    below: dict[int, float] = {}
    for parent, path in zip(tree.columns.parents, paths, strict=True):
        below[parent] = below.get(parent, 0.0) + path
    return below
