"""Block heads: saved and loaded without change, checked against the target, and their scalings honoured."""

import json
from types import SimpleNamespace

import dflash
import numpy as np
import pytest
import torch
import toys
from safetensors.torch import load_file, save_file
from toys import refused

import glance
from glance.head import block_embedding, block_logits, check_pair, load_block_head


@pytest.fixture(params=[False, True], ids=["first", "second"])
def kind(request):
    return request.param


def accepted(head, model, **settings):
    ids = toys.text_prompt()
    ids, stats = glance.generate(head, model, ids, 30, stop_token_ids=(), return_stats=True, **settings)
    return ids.tolist(), [(r.tree.tokens.tolist(), r.tree.parents.tolist(), r.accepted) for r in stats.rounds]


def test_a_saved_head_comes_back_the_same(tmp_path, qwen3, kind):
    head = toys.block_head(qwen3, second=kind)
    toys.save_head(head, tmp_path)
    loaded = load_block_head(tmp_path, device="cpu")
    assert type(loaded) is (dflash.DFlash2DraftModel if kind else dflash.DFlashDraftModel)
    assert not loaded.training and loaded.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    before, after = head.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for settings in ({}, {"branch_k": 1, "budget": 5}):
        assert accepted(loaded, qwen3, **settings) == accepted(head, qwen3, **settings)
    assert load_block_head(tmp_path, dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16


def edited(folder, **changes):
    """Change the drafting settings of a saved head; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        for where in (config["dflash_config"], config):
            where.pop(name, None)
        if value is not None:
            config[name] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"mask_token_id": None}, "no mask_token_id"),
        ({"block_size": 1}, "block_size is 1"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "missing_keys.*layers.2"),
        ({"target_layer_ids": [0, 1, 2]}, "mismatched_keys.*fc"),
    ],
)
def test_a_broken_folder_is_refused_at_load(tmp_path, qwen3, changes, told):
    toys.save_head(toys.block_head(qwen3), tmp_path)
    edited(tmp_path, **changes)
    assert str(tmp_path) in refused(lambda: load_block_head(tmp_path, device="cpu"), told)


def test_a_folder_without_config_or_weights_is_refused(tmp_path, qwen3):
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_block_head(tmp_path)
    toys.save_head(toys.block_head(qwen3), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("fc.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing_keys.*fc\.weight"):
        load_block_head(tmp_path, device="cpu")


def changed(head, **attributes):
    """Set attributes of a head, or of its config where the name starts with config_."""
    for name, value in attributes.items():
        where = head.config if name.startswith("config_") else head
        setattr(where, name.removeprefix("config_"), value)
    return head


@pytest.mark.parametrize(
    "change, told",
    [
        ({"target_layer_ids": [0, 4]}, r"\[4\] are outside the target's layers 0\.\.3"),
        ({"target_layer_ids": [-1, 2]}, r"\[-1\] are outside"),
        ({"target_layer_ids": [0, 1, 2]}, "reads 64 features, 3 kept layers give 96"),
        ({"mask_token_id": 272}, "mask_token_id 272 is outside the target's 272 embedding rows"),
        ({"mask_token_id": -1}, "mask_token_id -1 is outside"),
        ({"mask_token_id": None}, "has no mask_token_id"),
        ({"target_layer_ids": None}, "has no target_layer_ids"),
        ({"block_size": None}, "has no block_size"),
        ({"block_size": 1}, "block_size is 1"),
        ({"config_hidden_size": 48}, "hidden_size 48 is not the target's 32"),
        ({"config_vocab_size": 300}, "vocab_size 300"),
        ({"config_vocab_size": 200}, "vocab_size 200"),
        ({"config_dflash_config": {"kept_state": "layer_input"}}, "'layer_input' is not 'layer_output'"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_any_forward(qwen3, change, told):
    head = changed(toys.block_head(qwen3), **change)
    refused(lambda: check_pair(head, qwen3), told, model=qwen3)
    for call in (glance.generate, glance.chain_generate):
        refused(lambda call=call: call(head, qwen3, toys.text_prompt(), 8), told, model=qwen3)


def test_everything_that_does_not_fit_is_named_at_once(qwen3):
    head = changed(toys.block_head(qwen3), target_layer_ids=[0, 9], mask_token_id=999, config_hidden_size=48)
    with pytest.raises(ValueError, match=r"target_layer_ids.*; mask_token_id 999.*; hidden_size 48"):
        check_pair(head, qwen3)


def test_a_fitting_head_passes(qwen3, qwen3_vl, kind):
    for model in (qwen3, qwen3_vl):
        check_pair(toys.block_head(model, second=kind), model)
    check_pair(SimpleNamespace(block_size=4, mask_token_id=3, target_layer_ids=()), qwen3)


def test_output_scale_and_soft_cap_are_honoured(qwen3):
    hidden = torch.randn(1, 5, toys.WIDTH)
    raw = qwen3.lm_head(hidden)
    for settings, right in (
        ({}, raw),
        ({"output_multiplier": 0.5}, raw * 0.5),
        ({"final_logit_softcapping": 2.0}, torch.tanh(raw / 2) * 2),
        ({"output_multiplier": 3.0, "final_logit_softcapping": 2.0}, torch.tanh(raw * 1.5) * 2),
    ):
        head = toys.block_head(qwen3, **settings)
        assert torch.allclose(block_logits(head, qwen3)(hidden), right, atol=1e-5)
        _, stats = glance.generate(head, qwen3, toys.text_prompt(), 6, stop_token_ids=(), return_stats=True)
        if "final_logit_softcapping" in settings:  # the cap bounds how far probabilities can lie apart
            assert all(np.ptp(r.top_logprobs, axis=1).max() <= 4 + 1e-4 for r in stats.rounds)


def test_a_head_without_compute_logits_uses_the_targets_output_head(qwen3):
    hidden = torch.randn(1, 5, toys.WIDTH)
    assert torch.equal(block_logits(object(), qwen3)(hidden), qwen3.lm_head(hidden))


def test_the_block_is_embedded_raw_times_the_heads_scale(qwen3):
    ids = torch.tensor([[5, toys.MASK]])
    rows = qwen3.get_input_embeddings().weight[ids]
    assert torch.equal(block_embedding(toys.block_head(qwen3), qwen3)(ids), rows)
    scaled = toys.block_head(qwen3, input_embedding_scale=4.0)
    assert torch.equal(block_embedding(scaled, qwen3)(ids), rows * 4)
    assert torch.equal(block_embedding(object(), qwen3)(ids), rows)
    # Gemma scales inside its embedding module; the head gets the raw rows.
    gemma = toys.text_target("gemma2")
    assert torch.equal(block_embedding(toys.block_head(gemma), gemma)(ids), gemma.get_input_embeddings().weight[ids])


def test_the_marginals_are_what_the_head_says_of_the_block(qwen3, kind):
    """The first round's top-k, against one plain call of the head without any of our caches."""
    head, ids = toys.block_head(qwen3, second=kind), toys.text_prompt()
    _, stats = glance.generate(head, qwen3, ids, 8, stop_token_ids=(), return_stats=True)
    first, n = stats.rounds[0], ids.shape[1]
    states = qwen3(ids, output_hidden_states=True).hidden_states
    block = torch.tensor([[first.root] + [toys.MASK] * (head.block_size - 1)])
    hidden = head(
        target_hidden=torch.cat([states[i + 1] for i in head.target_layer_ids], -1),
        noise_embedding=qwen3.get_input_embeddings()(block),
        position_ids=torch.arange(n + head.block_size)[None],
    )[:, 1:]
    logp = head.compute_logits(hidden, qwen3.lm_head)[0].log_softmax(-1)
    top = logp.topk(8, -1)
    assert torch.allclose(torch.tensor(first.top_logprobs, dtype=torch.float32), top.values, atol=1e-4)
    assert first.top_ids.tolist() == top.indices.tolist()


def test_weights_that_the_class_does_not_know_are_named(tmp_path, qwen3):
    toys.save_head(toys.block_head(qwen3), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"selector.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights that DFlashDraftModel does not know, selector\.weight first"):
        load_block_head(tmp_path, torch.float32, "cpu")


def test_a_head_for_a_target_of_other_depth_is_refused(qwen3):
    head = toys.block_head(qwen3)
    head.config.num_target_layers = 9
    with pytest.raises(ValueError, match="num_target_layers 9 is not the target's 4"):
        check_pair(head, qwen3)
