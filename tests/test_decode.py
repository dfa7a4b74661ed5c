"""Exactness on text: the tree's output is transformers' own greedy output, whatever the head, the tree and the cut."""

import warnings
from functools import partial
from math import isclose, isnan
from types import SimpleNamespace

import dflash.model
import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TextIteratorStreamer, TextStreamer

import glance
from glance.decode import decode, stop_ids, walk
from glance.session import Settings
from glance.tree import build_budget_tree

N = 48
B = 6  # the toys' block
PROMPT = toys.text_prompt(9)


@pytest.fixture(scope="module")
def greedy(qwen3):
    """The N greedy tokens after PROMPT, from transformers."""
    return toys.reference(qwen3, PROMPT, N)


@pytest.fixture(scope="module")
def stream(qwen3):
    """PROMPT and its continuation, longer than any test decodes."""
    return PROMPT[0].tolist() + toys.reference(qwen3, PROMPT, N + 40)


def run(head, model, ids=PROMPT, n=N, **changes):
    """Decode without stop tokens unless given; return the new tokens and the stats."""
    changes = {"stop_token_ids": (), "return_stats": True} | changes
    out, stats = glance.generate(head, model, ids, n, **changes)
    assert out[0, : ids.shape[1]].tolist() == ids[0].tolist()
    return out[0, ids.shape[1] :].tolist(), stats


def mixed(seed):
    """Return a `rank_of` between useless and perfect: ranks 0, 0, 0, 1, 2, 5 or out of reach, by place and offset."""
    return lambda start, offset: (0, 0, 0, 1, 2, 5, None)[(start * 31 + offset * 17 + seed * 7 + start * offset) % 7]


def check_books(stats, tokens):
    """The counting rules that hold in every decode."""
    assert stats.n_tokens == len(tokens) == 1 + sum(len(r.committed) for r in stats.rounds)
    assert tokens[1:] == [token for r in stats.rounds for token in r.committed]
    assert stats.n_rounds == len(stats.rounds) and [r.index for r in stats.rounds] == list(range(stats.n_rounds))
    assert isnan(stats.tau) if not stats.rounds else isclose(stats.tau, (len(tokens) - 1) / len(stats.rounds))
    assert not any(r.truncated for r in stats.rounds[:-1])
    for r in stats.rounds:
        assert len(r.committed) == r.accepted + (r.bonus is not None) and len(r.path) == r.accepted
        assert r.committed[: r.accepted] == [r.tree[i].token for i in r.path]
        assert r.path == (r.tree.path(r.path[-1]) if r.path else [])
        assert r.truncated == (r.bonus is None) and len(r.choices) == r.tree_size + 1


@pytest.mark.parametrize("branch_k", [1, 2, 8])
@pytest.mark.parametrize("budget", [0, 1, 2, 15, 31, 63])
def test_every_budget_and_branch_gives_the_greedy_text(qwen3, greedy, stream, budget, branch_k):
    taus = []
    for rank_of in (mixed(0), lambda start, offset: 0, lambda start, offset: None):
        head = toys.OracleHead(stream, B, rank_of)
        tokens, stats = run(head, qwen3, budget=budget, branch_k=branch_k)
        assert tokens == greedy
        check_books(stats, tokens)
        assert all(r.tree_size <= budget for r in stats.rounds)
        taus.append(stats.tau)
    assert taus[1] >= taus[0] >= taus[2] == 1.0


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "gpt2", "mistral", "gemma2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_text_family(family, attention):
    model = toys.text_target(family, attention=attention)
    greedy = toys.reference(model, PROMPT, 30)
    assert glance.greedy_generate(model, PROMPT, 30, stop_token_ids=())[0, 9:].tolist() == greedy
    oracle = toys.OracleHead(PROMPT[0].tolist() + greedy, B, mixed(1))
    for head in (oracle, toys.block_head(model), toys.block_head(model, second=True)):
        for extend in (0, 8):
            assert run(head, model, n=30, extend_budget=extend)[0] == greedy
        assert glance.chain_generate(head, model, PROMPT, 30, stop_token_ids=())[0, 9:].tolist() == greedy


@pytest.mark.parametrize("length", [1, 2, 3, 17, 90])
def test_every_prompt_length(qwen3, length):
    ids = toys.text_prompt(length, seed=length)
    greedy = toys.reference(qwen3, ids, 25)
    head = toys.OracleHead(ids[0].tolist() + greedy, B, mixed(2))
    assert run(head, qwen3, ids, 25)[0] == greedy
    assert run(toys.block_head(qwen3), qwen3, ids, 25)[0] == greedy
    assert run(head, qwen3, ids, 25, branch_k=1)[0] == greedy


@pytest.mark.parametrize("chain", [False, True])
def test_every_acceptance_length_of_the_block(qwen3, greedy, stream, chain):
    lengths = [*range(B), *reversed(range(B)), 0, 5, 0, 3]
    head = toys.OracleHead(stream, B, toys.accept_lengths(lengths, first=9))
    tokens, stats = run(head, qwen3, branch_k=1 if chain else 8)
    assert tokens == greedy
    assert [r.accepted for r in stats.rounds[:-1]] == lengths[: stats.n_rounds - 1]
    assert {r.accepted for r in stats.rounds} == set(range(B))


@pytest.mark.parametrize("limit", [25, 26, 27, 28, 29, 30])
def test_learned_positions_serve_to_their_last_one(limit):
    model = toys.text_target("gpt2", n_positions=9 + limit)
    greedy = toys.reference(model, PROMPT, limit)
    for head in (toys.OracleHead(PROMPT[0].tolist() + greedy, B), toys.block_head(model)):
        assert run(head, model, n=limit, extend_budget=6)[0] == greedy


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6), budget=st.integers(0, 40), branch=st.integers(1, 6), extend=st.sampled_from([0, 0, 9])
)
def test_any_mixture_of_mistakes(qwen3, greedy, stream, seed, budget, branch, extend):
    rng = torch.Generator().manual_seed(seed)
    ranks = torch.randint(-2, 4, (200, 40), generator=rng).tolist()
    head = toys.OracleHead(
        stream, B, lambda start, offset: None if ranks[start][offset] < -1 else max(0, ranks[start][offset])
    )
    tokens, stats = run(head, qwen3, n=30, budget=budget, branch_k=branch, extend_budget=extend)
    assert tokens == greedy[:30]
    check_books(stats, tokens)


def test_a_runner_up_is_never_committed(qwen3, greedy, stream):
    head = toys.OracleHead(stream, B, lambda start, offset: 1)  # the head's favourite is always wrong
    tokens, stats = run(head, qwen3)
    assert tokens == greedy and stats.tau > 2
    assert all(r.tree[i].rank == 1 for r in stats.rounds for i in r.path)
    tokens, stats = run(head, qwen3, branch_k=1)
    assert tokens == greedy and stats.tau == 1


@pytest.mark.parametrize("seed", range(10))
def test_trees_of_any_shape(qwen3, greedy, stream, seed):
    ids, stats = decode(toys.RandomDrafter(stream, seed), qwen3, PROMPT, Settings(N, stop_token_ids=()))
    assert ids[0, 9:].tolist() == greedy
    check_books(stats, greedy)
    assert stats.tau > 1.2


def test_extension_reaches_past_the_block(qwen3, greedy, stream):
    head = toys.OracleHead(stream, B)
    tokens, plain = run(head, qwen3, budget=15, branch_k=2)
    assert tokens == greedy and max(r.accepted for r in plain.rounds) == B - 1
    passes = len(head.calls)
    head = toys.OracleHead(stream, B)
    tokens, stats = run(head, qwen3, budget=15, extend_budget=8, branch_k=2)
    assert tokens == greedy and stats.tau > plain.tau
    assert all(r.extended and r.tree_size == 15 + 8 for r in stats.rounds)
    assert stats.rounds[0].accepted > B - 1 and int(stats.rounds[0].tree.depths.max()) <= 2 * (B - 1)
    assert len(head.calls) == 2 * stats.n_rounds and passes == plain.n_rounds
    check_books(stats, tokens)


def test_extension_waits_for_a_whole_spine(qwen3, greedy, stream):
    head = toys.OracleHead(stream, B)
    tokens, stats = run(head, qwen3, budget=B - 2, branch_k=1, extend_budget=8)
    assert tokens == greedy and not any(r.extended for r in stats.rounds)


@pytest.mark.parametrize("k", range(21))
def test_the_first_stop_token_ends_the_text(qwen3, greedy, stream, k):
    stop = greedy[k]
    expected = greedy[: greedy.index(stop) + 1]
    assert expected == toys.reference(qwen3, PROMPT, N, eos_token_id=stop, pad_token_id=0)
    for branch_k, rank_of in ((8, None), (1, None), (8, mixed(k))):
        head = toys.OracleHead(stream, B, rank_of or (lambda start, offset: 0))
        for given_as in (stop, [stop], {stop, 271}):
            tokens, stats = run(head, qwen3, branch_k=branch_k, stop_token_ids=given_as)
            assert tokens == expected and stats.finish == "stop"
            check_books(stats, tokens)
    out, stats = glance.greedy_generate(qwen3, PROMPT, N, stop_token_ids=stop, return_stats=True)
    assert out[0, 9:].tolist() == expected and stats.finish == "stop"


def test_stop_tokens_default_to_the_targets_own(greedy, stream):
    model = toys.text_target("qwen3")
    for eos in (greedy[7], [greedy[7], greedy[20]]):
        model.generation_config.eos_token_id = eos
        expected = greedy[: min(greedy.index(t) for t in stop_ids(model)) + 1]
        head = toys.OracleHead(stream, B)
        assert run(head, model, stop_token_ids=None)[0] == expected
        assert run(head, model, stop_token_ids=())[0] == greedy
        assert glance.greedy_generate(model, PROMPT, N)[0, 9:].tolist() == expected


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_the_limit_cuts_anywhere(qwen3, greedy, stream, limit):
    for extend in (0, 6):
        tokens, stats = run(toys.OracleHead(stream, B), qwen3, n=limit, extend_budget=extend)
        assert tokens == greedy[:limit] and stats.finish == "length"
        check_books(stats, tokens)
        assert stats.n_rounds == 0 if limit == 1 else stats.n_rounds >= 1
    assert glance.greedy_generate(qwen3, PROMPT, limit, stop_token_ids=())[0, 9:].tolist() == greedy[:limit]


@pytest.mark.parametrize("stop", [None, 5, 14])
@pytest.mark.parametrize("kind", ["first", "second", "knowing"])
def test_the_chain_is_dflashs_own_loop(qwen3, greedy, stream, kind, stop, monkeypatch):
    monkeypatch.setattr(dflash.model, "_cuda_time", lambda: 0.0)
    heads = {"first": toys.block_head(qwen3), "second": toys.block_head(qwen3, second=True)}
    head = heads.get(kind) or toys.OracleHead(stream, B, toys.accept_lengths([5, 0, 2, 1, 4, 3], first=9))
    stops = [] if stop is None else [greedy[stop]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its cache uses what transformers deprecates
        theirs = dflash.model.dflash_generate(head, qwen3, PROMPT, N, stops or None, return_stats=True)
    out, stats = glance.chain_generate(head, qwen3, PROMPT, N, stop_token_ids=stops, return_stats=True)
    assert out[0].tolist() == theirs.output_ids[0].tolist()
    # Where the limit is near, dflash shortens its block; up to there a round is a round.
    assert [len(r.committed) for r in stats.rounds] == theirs.acceptance_lengths
    assert all(r.tree_size == B - 1 and r.tree.spine() == list(range(B - 1)) for r in stats.rounds)


def test_the_chain_is_the_tree_of_width_one(qwen3, stream):
    head = toys.OracleHead(stream, B, mixed(4))
    chain = glance.chain_generate(head, qwen3, PROMPT, N, stop_token_ids=(), return_stats=True)
    tree = run(head, qwen3, budget=B - 1, branch_k=1)
    assert [r.tree for r in chain[1].rounds] == [r.tree for r in tree[1].rounds]


def test_a_wide_tree_accepts_what_a_narrow_one_does(qwen3, stream):
    narrow = run(toys.OracleHead(stream, B, mixed(5)), qwen3, budget=5, branch_k=1)[1]
    wide = run(toys.OracleHead(stream, B, mixed(5)), qwen3, budget=63)[1]
    assert wide.tau > narrow.tau


def test_a_random_head_is_exact_and_near_one(qwen3, greedy):
    for second in (False, True):
        tokens, stats = run(toys.block_head(qwen3, second=second), qwen3)
        assert tokens == greedy and 1.0 <= stats.tau < 1.3


def test_rounds_say_what_happened(qwen3, stream):
    seen = []
    _, stats = run(toys.OracleHead(stream, B, mixed(6)), qwen3, on_round=seen.append)
    assert seen == stats.rounds
    for r in stats.rounds:
        prefix = torch.tensor([stream[: r.start + 1]])
        logp = qwen3(prefix).logits[0, -1].log_softmax(-1)
        assert r.root == stream[r.start] and r.choices[0] == int(logp.argmax())
        assert isclose(r.entropy, float(-(logp.exp() * logp).sum()), abs_tol=1e-4)
        assert r.top_ids.shape == r.top_logprobs.shape == (B - 1, 8)
        assert r.tree == build_budget_tree(r.top_ids, r.top_logprobs, budget=63)
        assert set(r.ms) == {"draft", "tree", "verify", "commit"} and min(r.ms.values()) >= 0
        assert walk(r.tree, r.choices)[0][: r.accepted] == r.path


def test_both_timings_are_kept_and_one_is_reported(qwen3, stream):
    for timing in ("decode_only", "legacy"):
        for call in (
            lambda **kw: glance.generate(toys.OracleHead(stream, B), qwen3, PROMPT, 9, **kw),
            lambda **kw: glance.greedy_generate(qwen3, PROMPT, 9, **kw),
        ):
            stats = call(timing=timing, return_stats=True, stop_token_ids=())[1]
            assert stats.ms_per_token == stats.ms_by(timing) and stats.seconds["legacy"] > stats.seconds["decode_only"]
            assert isclose(stats.ms_by("legacy"), 1e3 * stats.seconds["legacy"] / 9)


def test_the_oracle_counts_itself(qwen3, greedy):
    out, stats = glance.greedy_generate(qwen3, PROMPT, N, stop_token_ids=(), return_stats=True)
    assert out[0, 9:].tolist() == greedy and stats.n_tokens == N and stats.tau == 1
    assert glance.greedy_generate(qwen3, PROMPT[0], N, stop_token_ids=()).tolist() == out.tolist()


def test_a_streamer_receives_every_token_in_order(qwen3, greedy, stream, capsys):
    class Collector:
        def __init__(self):
            self.puts, self.ended = [], 0

        def put(self, value):
            assert not self.ended
            self.puts.append(value.reshape(-1).tolist())

        def end(self):
            self.ended += 1

    tokenizer = toys.tokenizer()
    text = tokenizer.decode(greedy)
    calls = {
        "tree": lambda **kw: glance.generate(toys.OracleHead(stream, B, mixed(7)), qwen3, PROMPT, N, **kw),
        "chain": lambda **kw: glance.chain_generate(toys.OracleHead(stream, B), qwen3, PROMPT, N, **kw),
        "ar": lambda **kw: glance.greedy_generate(qwen3, PROMPT, N, **kw),
    }
    for call in calls.values():
        collector = Collector()
        call(stop_token_ids=(), streamer=collector)
        assert collector.puts[0] == PROMPT[0].tolist() and collector.ended == 1
        assert [token for put in collector.puts[1:] for token in put] == greedy
        written = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=3600)
        call(stop_token_ids=(), streamer=written)
        assert "".join(written) == text
        capsys.readouterr()
        call(stop_token_ids=(), streamer=TextStreamer(tokenizer, skip_prompt=True))
        assert capsys.readouterr().out == text + "\n"


def test_one_decode_inside_another_disturbs_neither(qwen3, greedy, stream):
    other = toys.text_prompt(5, seed=8)
    theirs = toys.reference(qwen3, other, 12)
    inner = []
    nested = lambda r: inner.append(run(toys.block_head(qwen3), qwen3, other, 12)[0])  # noqa: E731
    assert run(toys.OracleHead(stream, B, mixed(8)), qwen3, on_round=nested)[0] == greedy
    assert inner and all(tokens == theirs for tokens in inner)


def test_the_model_is_left_as_it_was(qwen3, stream):
    hooks = [len(module._forward_hooks) for module in qwen3.modules()]
    before = {name: value.clone() for name, value in qwen3.state_dict().items()}
    run(toys.OracleHead(stream, B, mixed(9)), qwen3)
    with pytest.raises(RuntimeError, match="stop here"):
        run(toys.OracleHead(stream, B), qwen3, on_round=lambda r: (_ for _ in ()).throw(RuntimeError("stop here")))
    assert hooks == [len(module._forward_hooks) for module in qwen3.modules()]
    assert all(torch.equal(before[name], value) for name, value in qwen3.state_dict().items())


@pytest.mark.parametrize("arm", ["tree", "chain", "ar"])
@pytest.mark.parametrize("fault", ["before", "in the prefill", "in a round"])
def test_a_streamer_is_told_of_the_end_also_where_a_decode_raises(arm, fault, qwen3, stream, monkeypatch):
    """A reader of a streamer in another thread would wait for ever otherwise."""

    class Ends:
        ended = 0

        def put(self, value):
            pass

        def end(self):
            self.ended += 1

    streamer = Ends()
    settings = {"streamer": streamer, "stop_token_ids": ()}
    prompt = PROMPT if fault != "before" else torch.full_like(PROMPT, 10**6)
    passes = [0]
    whole = qwen3.forward

    def failing(*args, **kwargs):
        passes[0] += 1
        if passes[0] > {"in the prefill": 0, "in a round": 2}.get(fault, 99):
            raise ValueError("no power")
        return whole(*args, **kwargs)

    monkeypatch.setattr(qwen3, "forward", failing)
    head = toys.OracleHead(stream, B, mixed(7))
    decoders = {
        "tree": lambda: glance.generate(head, qwen3, prompt, N, **settings),
        "chain": lambda: glance.chain_generate(head, qwen3, prompt, N, **settings),
        "ar": lambda: glance.greedy_generate(qwen3, prompt, N, **settings),
    }
    with pytest.raises(ValueError):
        decoders[arm]()
    assert streamer.ended == 1


@pytest.mark.parametrize("arm", ["tree", "chain", "ar"])
@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"max_new_tokens": 0}, {"timing": "no"}, {"no_setting": 1}])
def test_a_streamer_is_told_of_the_end_also_where_a_setting_is_refused(arm, wrong, qwen3, stream):
    told = []
    streamer = SimpleNamespace(put=lambda value: None, end=lambda: told.append("end"))
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        decoders(qwen3, stream)[arm](**{"max_new_tokens": N, "streamer": streamer, **wrong})
    assert told == ["end"]


@pytest.mark.parametrize("call", [{"budget": "many"}, {"budget": -1}, {"head": None}])
def test_a_streamer_is_told_of_the_end_also_where_a_drafter_is_refused(call, qwen3, stream):
    told = []
    streamer = SimpleNamespace(put=lambda value: None, end=lambda: told.append("end"))
    given = {"head": toys.OracleHead(stream, B), "target": qwen3, "input_ids": PROMPT, **call}
    with pytest.raises(ValueError):
        glance.generate(**given, streamer=streamer)
    assert told == ["end"]


@pytest.mark.parametrize("arm", ["tree", "chain", "ar"])
def test_a_tokenizers_output_is_decoded_whole_and_its_padding_refused(arm, qwen3, stream, greedy):
    call = decoders(qwen3, stream)[arm]
    out = call(max_new_tokens=N, stop_token_ids=(), attention_mask=torch.ones_like(PROMPT))
    assert out[0, PROMPT.shape[1] :].tolist() == greedy
    for place in (0, -1):
        mask = torch.ones_like(PROMPT)
        mask[0, place] = 0
        with pytest.raises(ValueError, match="1 padding tokens"):
            call(attention_mask=mask)
    with pytest.raises(TypeError, match=r"pixel_values is not a setting.*VisionPositions\.from_inputs"):
        call(pixel_values=torch.zeros(1))


def decoders(target, stream):
    """The three public decoders on one prompt, by arm."""
    head = toys.OracleHead(stream, B, mixed(7))
    return {
        "tree": partial(glance.generate, head, target, PROMPT),
        "chain": partial(glance.chain_generate, head, target, PROMPT),
        "ar": partial(glance.greedy_generate, target, PROMPT),
    }
