"""Automatic width: the tree size that pays is taken, evidence is learned, a useless head costs little, output is exact."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made import made_round
from toys import (
    MROPE_FAMILIES,
    PLAIN_FAMILIES,
    OracleHead,
    block_head,
    forwards,
    text_prompt,
    text_target,
    vision_prompt,
    vision_target,
)

import glance
from glance.decode import decode, greedy_generate
from glance.drafters import costs as costs_module
from glance.drafters.auto import AutoDrafter
from glance.drafters.costs import GRID, RoundCosts
from glance.drafters.width import PATIENCE, PROBE_SHARE, SPARE, Width
from glance.records import Round
from glance.session import Settings
from glance.tree import build_budget_tree

COSTS = RoundCosts((0, 1, 3, 7, 15, 31, 63, 127), (3.5, 3.6, 3.7, 3.9, 4.3, 5.0, 7.0, 12.0), 1.6)
FREE = RoundCosts((0, 127), (1.0, 1.0), 0.0)  # nodes cost nothing: always the widest tree


def test_costs_between_and_beyond_the_grid():
    costs = RoundCosts((0, 2, 4), (1.0, 1.0, 3.0), 0.5)
    assert costs.verify(6).tolist() == [1, 1, 1, 2, 3, 4, 5]
    assert RoundCosts((0,), (2.0,), 0.5).verify(3).tolist() == [2, 2, 2, 2]
    for nodes, ms, draft in (
        ((1, 2), (1, 1), 0),
        ((0, 0), (1, 1), 0),
        ((0, 1), (1,), 0),
        ((0, 1), (2, 1), 0),
        ((0,), (0,), 0),
        ((0,), (1,), -1),
    ):
        with pytest.raises(ValueError, match="must"):
            RoundCosts(nodes, ms, draft)


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1), max_size=30), st.floats(0, 5), st.lists(st.floats(0.1, 5), min_size=3, max_size=3))
def test_the_size_is_the_best_of_all(probabilities, draft_ms, ms):
    logps = np.log(np.array(sorted(probabilities, reverse=True)))
    costs = RoundCosts((0, 10, 20), tuple(sorted(ms)), draft_ms)
    n = Width(costs).size(logps, np.ones(len(logps)))
    rates = [(1 + np.exp(logps[:i]).sum()) / (draft_ms + costs.verify(i)[-1]) for i in range(len(logps) + 1)]
    assert rates[n] == pytest.approx(max(rates))


def marginals(top: float = 0.8, offsets: int = 6) -> np.ndarray:
    """Log-probabilities (D, 8): `top`, then halves of what is left."""
    return np.log(np.tile([top, *((1 - top) * 0.5 ** np.arange(1, 8))], (offsets, 1)))


def report_of(logps: np.ndarray, budget: int, accepted: int, bonus: int | None = 0) -> Round:
    """A round in which the target followed the spine for `accepted` nodes and then left the tree."""
    ids = np.arange(logps.size).reshape(logps.shape)
    tree = build_budget_tree(ids, logps, budget=budget)
    path = tree.spine()[:accepted]
    return made_round(tree, path=path, bonus=bonus, top_ids=ids, top_logprobs=logps)


PLAIN = made_round()


def test_without_evidence_the_head_is_believed():
    assert Width(COSTS).trust == 1


@pytest.mark.parametrize("truth", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("claim", [0.3, 0.6, 0.9])
def test_trust_brings_a_claim_down_to_the_truth(claim, truth):
    """Fed with hits at the true rate, trust times the claimed mass comes close to it where the head claims too much."""
    rng, width = np.random.default_rng(0), Width(COSTS)
    logps = np.log(np.full((1, 1), claim))
    seen = []
    for _ in range(400):
        width.observe(report_of(logps, budget=1, accepted=int(rng.random() < truth)))
        seen.append(claim * width.trust)
    assert np.mean(seen[100:]) == pytest.approx(min(claim, truth), abs=0.12)


def test_trust_counts_with_depth():
    """A head that is right half as often as it says is expected to reach depth d with half its word to the power d."""
    free, logps = RoundCosts((0, 2), (1.0, 1.2), 0.0), np.log([0.9, 0.81])
    believed, doubted = Width(free), Width(free)
    for _ in range(200):
        doubted.observe(report_of(np.log(np.full((1, 1), 0.9)), budget=1, accepted=0))
    assert doubted.trust < 0.15 and believed.size(logps, [1, 2]) == 2
    gains = doubted.trust ** np.array([1, 2]) * np.exp(logps)
    rates = [(1 + gains[:n].sum()) / free.verify(n)[-1] for n in range(3)]
    assert doubted.size(logps, [1, 2]) == int(np.argmax(rates))


def test_a_cut_round_says_nothing_about_its_last_step():
    one, other = Width(COSTS), Width(COSTS)
    one.observe(report_of(marginals(), 10, accepted=2, bonus=None))
    other.observe(report_of(marginals(), 10, accepted=2, bonus=0))
    assert one.trust == 1, "two steps, both right"
    assert 3 / 4 <= other.trust < 1, "the third was wrong"


def test_equal_rounds_give_equal_decisions():
    rng = np.random.default_rng(1)
    rounds = [
        report_of(marginals(rng.uniform(0.3, 0.95)), int(rng.integers(1, 20)), int(rng.integers(0, 2)))
        for _ in range(30)
    ]

    def decisions():
        width, made = Width(COSTS), []
        for report in rounds:
            if width.wants_draft():
                tree = build_budget_tree(*[report.top_logprobs] * 2, budget=50)
                made.append((width.size(tree.logps, tree.depths), True))
                width.observe(report)
            else:
                made.append((0, False))
                width.observe(PLAIN)
        return made

    assert decisions() == decisions()


@pytest.mark.parametrize("top", [0.3, 0.6, 0.95])
def test_a_useless_head_costs_its_share_and_comes_back(top):
    width, logps, plain = Width(COSTS), marginals(top), COSTS.verify_ms[0]
    lost, first, n_plain = [], 0, 0
    for _ in range(2000):
        if width.wants_draft():
            tree = build_budget_tree(*[logps] * 2, budget=50)
            n = width.size(tree.logps, tree.depths)
            width.observe(report_of(logps, budget=n, accepted=0))
            lost.append(COSTS.draft_ms + COSTS.verify(n)[-1] - plain)
            first += not n_plain
        else:
            n_plain += 1
            width.observe(PLAIN)
    assert first <= 7 + PATIENCE, "a confident head is given the benefit of the doubt, and not for long"
    assert sum(lost[first:]) <= 1.2 * PROBE_SHARE * n_plain * plain
    for _ in range(int(2 / PROBE_SHARE)):
        if not width.wants_draft():
            width.observe(PLAIN)
    for _ in range(40):
        assert width.wants_draft(), "one probe that pays, and every round drafts again"
        width.observe(report_of(marginals(0.9), budget=6, accepted=6))


def test_two_lost_rounds_in_a_row_end_drafting_and_one_does_not():
    doubtful = np.log(
        np.full((1, 1), 0.5)
    )  # brings 1.5 tokens at the price of 1.5 plain steps, and less when it is wrong
    width = Width(COSTS)
    width.observe(report_of(doubtful, budget=1, accepted=0))
    assert width.wants_draft()
    width.observe(report_of(marginals(0.95), budget=6, accepted=6))
    width.observe(report_of(doubtful, budget=1, accepted=0))
    assert width.wants_draft(), "a good round between them"
    for _ in range(20):
        if width.wants_draft():
            width.observe(report_of(doubtful, budget=1, accepted=0))
    assert not width.wants_draft()


def test_a_draft_without_a_node_worth_its_cost_ends_drafting_at_once():
    width, hopeless = Width(COSTS), np.log(np.full((1, 1), 0.001))
    assert width.size(hopeless[0], [1]) == 0
    width.observe(report_of(hopeless, budget=0, accepted=0))
    assert not width.wants_draft()


@pytest.mark.parametrize("max_nodes", [1, 5])
def test_a_limit_below_the_grid_is_kept(max_nodes):
    model, ids = text_target(), text_prompt(11)
    head = OracleHead(stream_of(model, ids, 40), rank_of=lambda start, offset: (start + offset) % 3)
    out, stats = decode(AutoDrafter(head, max_nodes=max_nodes), model, ids, Settings(40))
    assert (
        torch.equal(out, greedy_generate(model, ids, 40)) and max(map(len, (r.tree for r in stats.rounds))) <= max_nodes
    )
    with pytest.raises(ValueError, match="max_nodes"):
        AutoDrafter(head, max_nodes=0)


def test_a_tree_has_room_to_grow():
    width = Width(COSTS)
    assert width.room == GRID[-1] and Width(COSTS, 20).room == 20
    n = width.size(np.log([0.9, 0.8, 0.7]), [1, 2, 3])
    assert n == 3 and width.room == 3 + SPARE


# --- decoding


def stream_of(model, ids, n):
    """Prompt and greedy text, and further than any block reaches."""
    return greedy_generate(model, ids, n + 40)[0].tolist()


@pytest.mark.parametrize("costs", [None, FREE, COSTS])
@pytest.mark.parametrize("quality", ["perfect", "mixed", "wrong", "late"])
@pytest.mark.parametrize("branch_k", [1, 8])
def test_exact_whatever_the_head_and_the_costs(costs, quality, branch_k):
    model, ids, n = text_target(), text_prompt(11), 200 if quality == "late" else 60
    stream = stream_of(model, ids, n)
    rank_of = {
        "perfect": lambda start, offset: 0,
        "mixed": lambda start, offset: (start * 7 + offset * 3) % 5 if (start + offset) % 4 else None,
        "wrong": lambda start, offset: None,
        "late": lambda start, offset: 0 if start > 40 else None,
    }[quality]
    head = OracleHead(stream, rank_of=rank_of)  # which checks that it reads the states of every place, each once
    out, stats = decode(AutoDrafter(head, branch_k, costs=costs), model, ids, Settings(n))
    assert out[0].tolist() == stream[: 11 + n]
    assert stats.n_tokens == n and sum(len(r.committed) for r in stats.rounds) == n - 1
    if quality == "wrong" and costs is COSTS:
        assert len(head.calls) <= 10 and all(not len(r.tree) for r in stats.rounds if not len(r.top_ids))
    if quality == "late" and costs is COSTS:
        assert stats.rounds[-2].accepted >= 4, "the head came good, and the width came back"
    if quality == "perfect" and costs is FREE:
        assert stats.n_rounds <= 10


@pytest.mark.parametrize("family", [*MROPE_FAMILIES, *PLAIN_FAMILIES])
def test_exact_on_every_family(family):
    model = vision_target(family)
    prompt = vision_prompt(model)
    greedy = greedy_generate(model, prompt.ids, 24, positions=prompt.positions)
    out = glance.generate(block_head(model), model, prompt.ids, 24, budget="auto", positions=prompt.positions)
    assert torch.equal(out, greedy)


def test_the_tree_is_the_head_s_own_and_of_the_best_size():
    model, ids = text_target(), text_prompt(11)
    head = OracleHead(stream_of(model, ids, 60), rank_of=lambda start, offset: (start + offset) % 3)
    _, stats = decode(AutoDrafter(head, costs=COSTS), model, ids, Settings(60))
    width, sizes = Width(COSTS), []
    for report in stats.rounds:
        if len(report.top_ids):
            wide = build_budget_tree(report.top_ids, report.top_logprobs, budget=127)
            gains = np.exp(wide.logps) * width.trust**wide.depths
            rates = np.append(1, 1 + gains.cumsum()) / (COSTS.draft_ms + COSTS.verify(127))
            sizes.append(int(rates[: width.room + 1].argmax()))
            assert report.tree == build_budget_tree(report.top_ids, report.top_logprobs, budget=sizes[-1])
            width.size(wide.logps[: width.room], wide.depths[: width.room])
        width.observe(report)
    assert len(set(sizes)) > 1


def test_costs_are_measured_once_a_target_and_prefix(monkeypatch):
    measured = []
    measure = costs_module.measure_costs

    def measure_and_tell(*args):
        measured.append(measure(*args))
        return measured[-1]

    monkeypatch.setattr(costs_module, "measure_costs", measure_and_tell)
    model = text_target()
    head = block_head(model)
    for length in (9, 10, 12):
        glance.generate(head, model, text_prompt(length), 5, budget="auto")
    assert len(measured) == 1
    glance.generate(head, model, text_prompt(40), 5, budget="auto")
    glance.generate(head, text_target(), text_prompt(9), 5, budget="auto")
    assert len(measured) == 3
    assert all(costs.nodes[0] == 0 and (np.diff(costs.verify_ms) >= 0).all() for costs in measured)


def test_measuring_leaves_the_decode_as_it_was():
    model, ids = text_target(), text_prompt(20)
    head = block_head(model)
    with forwards(model) as first:
        out, stats = glance.generate(head, model, ids, 30, budget="auto", return_stats=True)
    with forwards(model) as second:
        again = glance.generate(head, model, ids, 30, budget="auto")
    assert torch.equal(out, again) and len(first) > len(second)
    assert set(stats.rounds[0].ms) == {"draft", "tree", "verify", "commit", "calibrate"}
    assert "calibrate" not in stats.rounds[1].ms


@pytest.mark.parametrize("changes", [{"budget": "wide"}, {"budget": "auto", "extend_budget": 8}])
def test_other_words_are_refused(changes):
    model = text_target()
    with pytest.raises(ValueError, match="auto"):
        glance.generate(block_head(model), model, text_prompt(), 5, **changes)
