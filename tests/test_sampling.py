"""Sampling: what is committed follows the target's own law, the first token included, whatever the tree proposes."""

import numpy as np
import pytest
import torch
import toys

import glance
from glance.session import Choice, Settings

V = 16
P_VALUE = 1e-3  # seeds are fixed: a test that passes keeps passing
PROMPT = torch.tensor([[3, 1, 4]])


@pytest.fixture(scope="module")
def target():
    """One layer over sixteen tokens, with a law that is far from flat and far from certain."""
    model = toys.text_target("llama", vocab_size=V, num_hidden_layers=1, hidden_size=16, num_attention_heads=2, seed=4)
    model.lm_head.weight.mul_(1.3)
    return model


@pytest.fixture(scope="module")
def head(target):
    return toys.block_head(target, block=4, layer_ids=(0,))


def law(model, prefixes, temperature=1.0, top_k=0, top_p=1.0):
    """Return the exact next-token law `(n, V)` after each prefix, with our own top-k and nucleus."""
    probs = (model(prefixes).logits[:, -1].double() / temperature).softmax(-1).numpy()
    for row in probs:
        order = np.argsort(-row)
        kept = order[: top_k or V]
        shares = row[kept] / row[kept].sum()
        kept = kept[np.cumsum(shares) - shares < top_p]
        row[np.setdiff1d(order, kept)] = 0
    return probs / probs.sum(1, keepdims=True)


def fits(counts, expected):
    """Return the chi-square p-value; cells that expect under 5 are pooled, and what is impossible must not occur."""
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    counts, expected = np.ravel(counts), np.ravel(expected) * counts.sum()
    assert not counts[expected == 0].any()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    right = np.append(expected[~rare], expected[rare].sum())
    keep = right > 0
    return stats.chisquare(observed[keep], right[keep]).pvalue


@pytest.mark.parametrize("temperature, top_k, top_p", [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 5, 1.0), (1.3, 9, 0.7)])
def test_a_choice_is_a_draw_from_the_exact_law(target, temperature, top_k, top_p):
    settings = Settings(temperature=temperature, top_k=top_k, top_p=top_p, generator=torch.Generator().manual_seed(1))
    logits = target(PROMPT).logits[0, -1:].expand(20_000, V)
    ids = Choice(settings)(logits)
    exact = law(target, PROMPT, temperature, top_k, top_p)[0]
    assert fits(np.bincount(ids, minlength=V), exact) > P_VALUE


@pytest.mark.parametrize("budget, branch_k, extend", [(12, 4, 0), (3, 1, 3), (0, 1, 0)])
def test_the_first_three_tokens_follow_the_joint_law(target, head, budget, branch_k, extend):
    n, rng = 600, torch.Generator().manual_seed(budget + 1)
    pairs, thirds = np.zeros((V, V)), np.zeros(V)
    taken = rounds = 0
    for _ in range(n):
        ids, stats = glance.generate(
            head, target, PROMPT, 3, budget=budget, branch_k=branch_k, extend_budget=extend,
            temperature=1.0, generator=rng, stop_token_ids=(), return_stats=True,
        )  # fmt: skip
        first, second, third = ids[0, 3:].tolist()
        pairs[first, second] += 1
        thirds[third] += 1
        taken, rounds = taken + sum(r.accepted for r in stats.rounds), rounds + stats.n_rounds
    assert budget == 0 or taken > 0.05 * rounds  # the tree was of use, or this shows nothing
    first = law(target, PROMPT)[0]
    second = law(target, torch.tensor([[*PROMPT[0], a] for a in range(V)]))
    third = law(target, torch.tensor([[*PROMPT[0], a, b] for a in range(V) for b in range(V)])).reshape(V, V, V)
    joint = first[:, None] * second
    assert fits(pairs.sum(1), first) > P_VALUE
    assert fits(pairs, joint) > P_VALUE
    assert fits(thirds, (joint[..., None] * third).sum((0, 1))) > P_VALUE


def test_every_token_of_a_long_text_is_a_draw_given_its_own_prefix(target, head):
    """15,000 draws at T = 1: each is mapped to a uniform number by the exact law of its own prefix."""
    rng, uniform = torch.Generator().manual_seed(7), np.random.default_rng(0)
    bins, taken = np.zeros(20), 0
    for _ in range(50):
        settings = {"budget": 12, "branch_k": 4, "temperature": 1.0, "generator": rng, "stop_token_ids": ()}
        ids, stats = glance.generate(head, target, PROMPT, 300, return_stats=True, **settings)
        taken += sum(r.accepted for r in stats.rounds)
        probs = target(ids).logits[0, 2:-1].double().softmax(-1).numpy()
        new, rows = ids[0, 3:].numpy(), np.arange(300)
        below = np.cumsum(probs, 1)[rows, new] - probs[rows, new]
        places = below + uniform.random(300) * probs[rows, new]  # uniform on (0, 1) if and only if the law is right
        bins += np.histogram(places, bins=20, range=(0, 1))[0]
    assert taken > 500 and bins.sum() == 15_000
    assert fits(bins, np.full(20, 1 / 20)) > P_VALUE


def test_top_k_and_nucleus_bound_every_committed_token(target, head):
    settings = {"temperature": 1.5, "top_k": 4, "top_p": 0.6, "generator": torch.Generator().manual_seed(3)}
    ids = glance.generate(head, target, PROMPT, 60, budget=12, branch_k=4, stop_token_ids=(), **settings)[0]
    for place in range(3, 63):
        assert law(target, ids[None, :place], 1.5, 4, 0.6)[0][ids[place]] > 0


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1e-4}, {"temperature": 1.0, "top_k": 1}])
def test_a_cold_draw_is_greedy(qwen3, settings):
    ids = toys.text_prompt()
    greedy = toys.reference(qwen3, ids, 30)
    head = toys.OracleHead(ids[0].tolist() + greedy, 6, lambda start, offset: (0, 0, 1, None)[(start + offset) % 4])
    out, stats = glance.generate(head, qwen3, ids, 30, stop_token_ids=(), return_stats=True, **settings)
    assert out[0, 9:].tolist() == greedy and stats.tau > 1.5


def test_a_seeded_generator_repeats(target, head):
    def draw(seed, **settings):
        rng = torch.Generator().manual_seed(seed)
        settings = {"temperature": 1.0, "generator": rng, "stop_token_ids": ()} | settings
        return glance.generate(head, target, PROMPT, 40, **settings).tolist()

    assert draw(1) == draw(1) != draw(2)
    chain = [
        glance.chain_generate(
            head, target, PROMPT, 20, temperature=0.8, generator=torch.Generator().manual_seed(5), stop_token_ids=()
        ).tolist()
        for _ in range(2)
    ]
    assert chain[0] == chain[1]


def test_sampling_stops_at_stop_tokens(target, head):
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        ids, stats = glance.generate(
            head, target, PROMPT, 40, temperature=1.0, generator=rng, stop_token_ids=[7], return_stats=True
        )
        text = ids[0, 3:].tolist()
        assert len(text) == (text.index(7) + 1 if 7 in text else 40)
        assert stats.finish == ("stop" if 7 in text else "length")
