"""The target's own rules of generation: each that changes a greedy choice is named, against transformers' own processors."""

import warnings

import pytest
import torch
import toys
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList

import glance
from glance.session import NEUTRAL, generation_rules
from glance.train.distill import answer

RULES = {
    "repetition_penalty": 1.3,
    "encoder_repetition_penalty": 1.4,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "min_length": 60,
    "min_new_tokens": 20,
    "num_beams": 2,
    "guidance_scale": 1.5,
    "sequence_bias": [[[7], -9.0]],
    "bad_words_ids": [[7]],
    "suppress_tokens": [7, 8],
    "begin_suppress_tokens": [7],
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 7,
    "exponential_decay_length_penalty": (4, 1.5),
    "watermarking_config": {"bias": 2.0},
}


def test_every_rule_has_an_example():
    assert set(RULES) == set(NEUTRAL)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_warned_about_by_name(name, qwen3, monkeypatch):
    config = GenerationConfig()
    setattr(config, name, RULES[name])
    monkeypatch.setattr(qwen3, "generation_config", config)
    assert list(generation_rules(qwen3)) == [name]
    for decode in (
        lambda: glance.greedy_generate(qwen3, toys.text_prompt(), 2),
        lambda: glance.generate(toys.block_head(qwen3), qwen3, toys.text_prompt(), 2),
    ):
        with pytest.warns(UserWarning, match=f"generation_config has {name}="):
            decode()


def test_neutral_rules_are_not_warned_about(qwen3, monkeypatch):
    config = GenerationConfig()
    for name, value in NEUTRAL.items():
        setattr(config, name, value)
    monkeypatch.setattr(qwen3, "generation_config", config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        glance.greedy_generate(qwen3, toys.text_prompt(), 2)


def test_what_transformers_builds_processors_for_is_known(qwen3):
    """Every field that makes `generate` build a processor for greedy decoding is among the rules."""
    for name, value in RULES.items():
        config = GenerationConfig(eos_token_id=3, max_length=80)
        setattr(config, name, value)
        config._eos_token_tensor = torch.tensor([3])
        if name in ("num_beams", "watermarking_config", "guidance_scale"):
            continue  # another search, or a second pass
        built = qwen3._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=9,
            encoder_input_ids=toys.text_prompt(),
            logits_processor=LogitsProcessorList(),
            device="cpu",
        )
        assert len(built) == 1, name


def test_training_texts_are_decodings_texts(qwen3, monkeypatch):
    prompts = [{"input_ids": toys.text_prompt(6, seed=i)} for i in range(3)]
    plain = [glance.greedy_generate(qwen3, p["input_ids"], 12, stop_token_ids=())[0, 6:].tolist() for p in prompts]
    config = GenerationConfig(suppress_tokens=sorted({row[0] for row in plain}), repetition_penalty=5.0)
    monkeypatch.setattr(qwen3, "generation_config", config)
    texts, _ = answer(qwen3, prompts, 12)
    assert texts == plain and qwen3.generation_config is config
