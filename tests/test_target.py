"""Kept states against transformers' own hidden states, and what cannot be verified as a tree refused by name."""

from functools import wraps
from types import SimpleNamespace

import pytest
import torch
import toys
import transformers
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

import glance
from glance.decode import decode
from glance.drafters.block import BlockDrafter
from glance.session import Settings
from glance.states import KeptStates, fuse
from glance.target import StreamPositions, Target
from glance.tree import NO_TREE, build_budget_tree
from glance.verify import state_of

HEAD = SimpleNamespace(block_size=6, mask_token_id=toys.MASK, target_layer_ids=(0, 2))
FAMILIES = ["qwen3", "gpt2", "gemma2", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "llava", "idefics3"]


def make(family):
    """Return a target and a prompt for it."""
    if family in ("qwen3", "gpt2", "gemma2"):
        return toys.text_target(family), toys.Prompt(toys.text_prompt(), None, {}, 0)
    model = toys.vision_target(family)
    return model, toys.vision_prompt(model, [(2, 3), (3, 1)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer_ids", [(0, 1, 2, 3), (3,), (2, 0), ()])
def test_kept_states_are_the_layers_outputs(family, layer_ids):
    model, prompt = make(family)
    inputs = (prompt.positions or StreamPositions()).prefill_inputs(model, prompt.ids)
    states = model(prompt.ids, output_hidden_states=True, **inputs).hidden_states
    with Target(model, prompt.positions or StreamPositions(), layer_ids) as target:
        logits, kept = target.prefill(prompt.ids)
        assert logits.shape == (1, toys.VOCAB)
        if not layer_ids:
            assert kept is None
            return
        assert torch.equal(kept, torch.cat([states[i + 1] for i in layer_ids], -1))
        with pytest.raises(RuntimeError, match="no state"):  # handed over, not held
            target.kept.take()


def test_deepstack_layers_are_kept_before_the_addition(qwen3_vl):
    prompt = toys.vision_prompt(qwen3_vl)
    entered = []
    layers = qwen3_vl.model.language_model.layers
    hook = layers[1].register_forward_pre_hook(lambda module, args, kw: entered.append(args[0]), with_kwargs=True)
    with Target(qwen3_vl, prompt.positions, (0,)) as target:
        _, kept = target.prefill(prompt.ids)
    hook.remove()
    image = prompt.ids[0] == toys.IMAGE
    assert torch.equal(kept[:, ~image], entered[0][:, ~image])  # layer 1 is fed layer 0's output ...
    assert not torch.allclose(kept[:, image], entered[0][:, image], atol=1e-3)  # ... plus deepstack at the images


class Collecting(BlockDrafter):
    """A block drafter that keeps the fused states it was handed."""

    def begin(self, target, lap):
        super().begin(target, lap)
        self.read = []

    def draft(self, root, fused):
        self.read.append(fused)
        return super().draft(root, fused)


@pytest.mark.parametrize("family", ["qwen3", "qwen2_vl", "qwen3_vl", "glm4v", "idefics3"])
def test_states_of_decoding_are_the_states_of_one_long_pass(family):
    model, prompt = make(family)
    stream = prompt.ids[0].tolist() + prompt.greedy(model, 40)
    head = toys.OracleHead(stream, 6, lambda start, offset: (0, 1, 0, 2, None)[(start + offset) % 5], (0, 3, 1))
    drafter = Collecting(head, 31, 8)
    ids, _ = decode(drafter, model, prompt.ids, Settings(40, stop_token_ids=()), prompt.positions)
    read = torch.cat(drafter.read, 1)
    inputs = (prompt.positions or StreamPositions()).prefill_inputs(model, prompt.ids)
    position_ids, n = inputs.pop("position_ids"), ids.shape[1]
    after = torch.arange(prompt.ids.shape[1], n) + prompt.delta
    position_ids = torch.cat([position_ids, after.expand(*position_ids.shape[:-1], -1)], -1)
    with KeptStates(model, (0, 3, 1)) as kept:
        model(ids, position_ids=position_ids, **inputs)
        whole = fuse(kept.take())
    assert read.shape[1] < n and torch.allclose(read, whole[:, : read.shape[1]], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("model", "short"),
    [("qwen3", True), ("qwen3_vl", True), ("gemma2", False)],  # gemma2 caps its logits outside the decoder
)
def test_the_short_way_is_taken_where_it_gives_the_models_own_bits(model, short):
    model = toys.vision_target(model) if model == "qwen3_vl" else toys.text_target(model, sliding_window=512)
    tree, seen = build_budget_tree([[5, 6], [7, 8]], [[-0.1, -2.5], [-0.2, -1.0]], budget=4), []
    logits = []
    states = []
    for _ in range(2):
        with torch.inference_mode(), Target(model, StreamPositions(), (0, 1), room=64) as target:
            target.prefill(toys.text_prompt(8))
            hook = model.register_forward_pre_hook(lambda *_: seen.append(1))
            logits.append(target.verify(3, tree))
            hook.remove()
            assert [layer.get_seq_length() for layer in target.cache.layers] == [8 + 5] * len(target.cache.layers)
            states.append(target.keep(tree.path(len(tree) - 1)))
            assert state_of(model).short_way == {(False, False, 0): short}
    assert torch.equal(*logits) and torch.equal(*states)
    assert len(seen) == (1 if short else 2)
    with torch.inference_mode(), Target(model, StreamPositions(), (0, 1), room=64) as target:
        target.prefill(toys.text_prompt(8))
        target.verify(3, NO_TREE)
    assert state_of(model).short_way == {
        (False, False, 0): short,
        (True, True, 0): short,
    }  # another kind, tried by itself


def test_a_model_with_a_forward_or_hooks_of_its_own_is_run_as_it_is():
    model, ids = toys.text_target("qwen3"), toys.text_prompt(8)
    head = toys.block_head(model)
    plain = glance.generate(head, model, ids, 12, stop_token_ids=())  # settles the short way
    banned = int(plain[0, 9])

    def ban(module, args, output):
        output.logits[..., banned] = -float("inf")

    hook = model.register_forward_hook(ban)
    without = glance.generate(head, model, ids, 12, stop_token_ids=())
    assert banned not in without[0, 8:] and torch.equal(
        without, glance.greedy_generate(model, ids, 12, stop_token_ids=())
    )
    hook.remove()
    assert torch.equal(glance.generate(head, model, ids, 12, stop_token_ids=()), plain)


def test_a_pass_with_a_placeholder_among_its_tokens_takes_the_models_forward(qwen3_vl):
    calls = []
    with torch.inference_mode(), Target(qwen3_vl, StreamPositions(), room=64) as target:
        target.prefill(toys.text_prompt(8))
        hook = qwen3_vl.register_forward_pre_hook(lambda *_: calls.append(1))
        for token in (3, 3, toys.IMAGE):
            target.verify(token, NO_TREE)
            target.keep([])
        hook.remove()
    assert (
        state_of(qwen3_vl).short_way[True, True, 0] and len(calls) == 2
    )  # the first of its kind, and the placeholder's


def test_a_decoder_that_refuses_its_inputs_is_not_called_again(monkeypatch):
    model, calls = toys.text_target("qwen3"), []
    ids, own = toys.text_prompt(8), type(model).forward
    expected = glance.greedy_generate(model, ids, 12, stop_token_ids=())
    decoder = model.get_decoder()
    asked = decoder.forward

    def refuse(*args, **kwargs):
        calls.append(1)
        raise KeyError("more, please")

    @wraps(own)
    def forward(self, *args, **kwargs):  # the model's own forward still has its decoder
        decoder.forward = asked
        try:
            return own(self, *args, **kwargs)
        finally:
            decoder.forward = refuse

    monkeypatch.setattr(type(model), "forward", forward)
    out = glance.generate(toys.block_head(model), model, ids, 12, stop_token_ids=())
    assert torch.equal(out, expected) and len(calls) == 1


def test_only_the_kept_layers_are_asked_for():
    qwen3 = toys.text_target(
        "qwen3"
    )  # a fresh one: transformers leaves recorders on layers it was asked for all states
    with toys.forwards(qwen3) as passes:
        glance.generate(toys.block_head(qwen3), qwen3, toys.text_prompt(), 8, stop_token_ids=())
    assert passes and not any(asked.get("output_hidden_states") for asked in passes)
    hooked = [i for i, layer in enumerate(qwen3.model.layers) if layer._forward_hooks]
    assert hooked == []
    with KeptStates(qwen3, (2, 0, 2)):
        assert [i for i, layer in enumerate(qwen3.model.layers) if layer._forward_hooks] == [0, 2]


def test_layers_that_return_nothing_are_reported(qwen3):
    with KeptStates(qwen3, (1,)) as kept, pytest.raises(RuntimeError, match=r"no state for layers \[1\]"):
        kept.take()
    with pytest.raises(ValueError, match=r"\[-1, 4\] are outside the target's layers 0\.\.3"):
        KeptStates(qwen3, (-1, 0, 4))


def decode_refused(model, told, call=glance.generate, n=32):
    """Assert that a decode is refused with one line that says `told`, before any forward."""
    toys.refused(lambda: call(HEAD, model, toys.text_prompt(8), n, stop_token_ids=()), told, model=model)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2"])
@pytest.mark.parametrize("call", [glance.generate, glance.chain_generate])
def test_a_window_shorter_than_the_decode_is_refused(family, call):
    windows = {"sliding_window": 8} | (
        {"use_sliding_window": True, "max_window_layers": 2} if family == "qwen2" else {}
    )
    model = toys.text_target(family, **windows)
    decode_refused(model, r"sliding_attention layers with a window of 8.*reaches \d+ tokens", call)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2"])
def test_a_window_that_never_bites_is_exact(family):
    windows = {"use_sliding_window": True, "max_window_layers": 2} if family == "qwen2" else {}
    ids = toys.text_prompt(8)
    reach = 8 + 30 + 20 + 1
    model = toys.text_target(family, sliding_window=reach, **windows)
    greedy = toys.reference(model, ids, 30)
    head = toys.OracleHead(ids[0].tolist() + greedy, 6, lambda start, offset: (0, 0, 1, None)[(start + offset) % 4])
    assert glance.generate(head, model, ids, 30, budget=20, stop_token_ids=())[0, 8:].tolist() == greedy
    decode_refused(toys.text_target(family, sliding_window=reach - 1, **windows), "window", n=30)


RECURRENT = {
    "qwen3_next": ("Qwen3NextConfig", {"layer_types": ["linear_attention", "full_attention"] * 2}, "linear_attention"),
    "qwen3_5": ("Qwen3_5TextConfig", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}, "linear_attention|conv"),
    "mamba": ("MambaConfig", {}, "linear_attention|recurrent"),
    "falcon_h1": ("FalconH1Config", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, "hybrid|recurrent"),
    "recurrent_gemma": ("RecurrentGemmaConfig", {}, "recurrent"),
    "rwkv": ("RwkvConfig", {}, "recurrent"),
    "jamba": ("JambaConfig", {}, "linear_attention|recurrent"),
    "llama4": ("Llama4TextConfig", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
}


@pytest.mark.parametrize("family", RECURRENT)
def test_layers_with_a_state_are_refused_by_name(family):
    name, changes, told = RECURRENT[family]
    config = getattr(transformers, name)(**{"vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 4} | changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    decode_refused(model, told)


@pytest.mark.parametrize(
    "name, changes, told",
    [
        ("BloomConfig", {"n_layer": 2, "n_head": 4}, "BloomForCausalLM.forward takes no position_ids"),
        ("FalconConfig", {"num_attention_heads": 4, "alibi": True}, r"FalconForCausalLM.forward biases .*\(alibi\)"),
        ("GPTNeoConfig", {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]}, "local"),
    ],
)
def test_positions_that_are_places_are_refused(name, changes, told):
    config = getattr(transformers, name)(vocab_size=272, hidden_size=32, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    decode_refused(model, told)


def test_flash_attention_is_refused_for_trees_by_name(qwen3, monkeypatch):
    for name in ("flash_attention_2", "flex_attention"):
        monkeypatch.setattr(qwen3.config, "_attn_implementation_internal", name)
        decode_refused(qwen3, f"attn_implementation='{name}' takes no tree mask.*chain_generate still runs")


def causal_without_mask(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Stand in for flash attention: plain causal order at the end of the keys, whatever mask is passed."""
    assert attention_mask is None
    groups, (q, k) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    mask = torch.ones(q, k, dtype=torch.bool).tril(k - q)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def test_a_chain_needs_no_mask_and_runs_without_one():
    AttentionInterface.register("toy_causal", causal_without_mask)
    AttentionMaskInterface.register("toy_causal", lambda *args, **kwargs: None)
    plain, flash = toys.text_target("qwen3"), toys.text_target("qwen3", attention="toy_causal")
    ids = toys.text_prompt()
    greedy = toys.reference(plain, ids, 30)
    decode_refused(flash, "toy_causal")
    head = toys.OracleHead(ids[0].tolist() + greedy, 6, lambda start, offset: (0, 0, 0, None)[(start + offset) % 4])
    out, stats = glance.chain_generate(head, flash, ids, 30, stop_token_ids=(), return_stats=True)
    assert out[0, 9:].tolist() == greedy and stats.tau > 1.5
    assert glance.greedy_generate(flash, ids, 30, stop_token_ids=())[0, 9:].tolist() == greedy
