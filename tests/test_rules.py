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
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "constraints": ["a word"],
    "force_words_ids": [[7]],
    "token_healing": True,
    "stop_strings": ["end"],
    "max_time": 1.0,
}
NO_PROCESSOR = {  # another search, a second pass, another prompt, or another end
    "num_beams",
    "watermarking_config",
    "guidance_scale",
    "penalty_alpha",
    "dola_layers",
    "constraints",
    "force_words_ids",
    "token_healing",
    "stop_strings",
    "max_time",
}
NO_RULES = {  # further fields, with a value that is not the default: greedy text does not depend on them
    "do_sample": True,
    "early_stopping": True,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.3,
    "top_h": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "length_penalty": 2.0,
    "renormalize_logits": True,
    "remove_invalid_values": True,
    "diversity_penalty": 0.5,
    "use_cache": False,
    "cache_implementation": "static",
    "prompt_lookup_num_tokens": 2,
    "max_matching_ngram_size": 3,
    "prefill_chunk_size": 4,
}
NOT_OF_A_TEXT = {  # limits and ids that a decode is given, what is returned, and how a pass or an assistant is run
    *("max_length", "max_new_tokens", "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"),
    *("num_return_sequences", "return_dict_in_generate", "output_attentions", "output_hidden_states"),
    *("output_scores", "output_logits", "num_beam_groups", "low_memory", "cache_config", "max_cache_len"),
    *("compile_config", "disable_compile", "continuous_batching_config", "use_mtp", "is_assistant"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("speculation_type", "transformers_version"),
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
    """Each rule is one for `generate`: it builds a processor for greedy decoding by it."""
    for name, value in RULES.items():
        config = GenerationConfig(eos_token_id=3, max_length=80)
        setattr(config, name, value)
        config._eos_token_tensor = torch.tensor([3])
        if name in NO_PROCESSOR:
            continue
        built = qwen3._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=9,
            encoder_input_ids=toys.text_prompt(),
            logits_processor=LogitsProcessorList(),
            device="cpu",
        )
        assert len(built) == 1, name


def test_every_field_of_a_generation_config_is_a_rule_or_is_not():
    """A release of transformers that adds a field must be looked at."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - set(NEUTRAL) - set(NO_RULES) - NOT_OF_A_TEXT == set()
    assert not set(NEUTRAL) & (set(NO_RULES) | NOT_OF_A_TEXT)


@pytest.mark.parametrize("name", NO_RULES)
def test_what_is_no_rule_leaves_generates_greedy_text_alone(name, qwen3, monkeypatch):
    plain = toys.reference(qwen3, toys.text_prompt(), 12)
    config = GenerationConfig()
    setattr(config, name, NO_RULES[name])
    monkeypatch.setattr(qwen3, "generation_config", config)
    assert generation_rules(qwen3) == {}
    assert toys.reference(qwen3, toys.text_prompt(), 12) == plain


def test_training_texts_are_decodings_texts(qwen3, monkeypatch):
    prompts = [{"input_ids": toys.text_prompt(6, seed=i)} for i in range(3)]
    plain = [glance.greedy_generate(qwen3, p["input_ids"], 12, stop_token_ids=())[0, 6:].tolist() for p in prompts]
    config = GenerationConfig(suppress_tokens=sorted({row[0] for row in plain}), repetition_penalty=5.0)
    monkeypatch.setattr(qwen3, "generation_config", config)
    texts, _ = answer(qwen3, prompts, 12)
    assert texts == plain and qwen3.generation_config is config
