"""Bad input gets one line that names what is wrong and what would be right, before any forward where it can be known."""

import warnings

import numpy as np
import pytest
import torch
import toys
from toys import refused

import glance
from glance.target import StreamPositions
from glance.vl import VisionPositions

ARMS = ("tree", "chain", "ar")


@pytest.fixture(scope="module")
def head(qwen3):
    return toys.block_head(qwen3)


def arm(name, head, model, ids, n=8, **settings):
    if name == "ar":
        return glance.greedy_generate(model, ids, n, **settings)
    return (glance.generate if name == "tree" else glance.chain_generate)(head, model, ids, n, **settings)


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize(
    "ids, told",
    [
        (torch.zeros(2, 5, dtype=torch.long), r"one prompt, \(1, P\) or \(P,\), got shape \(2, 5\)"),
        (torch.zeros(1, 2, 5, dtype=torch.long), r"got shape \(1, 2, 5\)"),
        (torch.zeros(1, 0, dtype=torch.long), "input_ids is empty"),
        ([], "input_ids is empty"),
        (torch.tensor([[3, 272]]), r"must lie in 0\.\.271, got 3\.\.272"),
        (torch.tensor([[-1, 3]]), r"must lie in 0\.\.271, got -1\.\.3"),
        (torch.tensor([[1.5, 3.0]]), "integer"),
    ],
)
def test_prompts(qwen3, head, name, ids, told):
    refused(lambda: arm(name, head, qwen3, ids), told, model=qwen3)


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize(
    "settings, told",
    [
        ({"n": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"n": -3}, "max_new_tokens must be at least 1, got -3"),
        ({"timing": "wall"}, "timing must be one of decode_only, legacy, got 'wall'"),
        ({"temperature": 1e-40}, "where logits can be scaled in float32; got 1e-40"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": float("inf")}, "temperature must be 0"),
        ({"temperature": -0.5}, "temperature must be 0 \\(greedy\\) or lie in"),
        ({"temperature": float("nan")}, "temperature .* got nan"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\].*top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -1}, "top_k=-1"),
    ],
)
def test_settings(qwen3, head, name, settings, told):
    refused(lambda: arm(name, head, qwen3, toys.text_prompt(), **settings), told, model=qwen3)


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"budget": -1}, "budget must not be negative, got -1"),
        ({"extend_budget": -2}, "extend_budget must not be negative, got -2"),
        ({"branch_k": 0}, "branch_k must be at least 1, got 0"),
    ],
)
def test_tree_settings(qwen3, head, settings, told):
    refused(lambda: glance.generate(head, qwen3, toys.text_prompt(), 8, **settings), told, model=qwen3)


def test_an_unknown_setting_is_named(qwen3, head):
    for name in ARMS:
        with pytest.raises(TypeError, match="max_tokens"):
            arm(name, head, qwen3, toys.text_prompt(), max_tokens=5)


def test_the_oracle_does_not_sample(qwen3):
    told = "the oracle is greedy: temperature must be 0, got 0.7"
    refused(lambda: glance.greedy_generate(qwen3, toys.text_prompt(), 8, temperature=0.7), told, model=qwen3)


@pytest.mark.parametrize("name", ARMS)
def test_placeholders_without_pixels(qwen3_vl, name):
    prompt, head = toys.vision_prompt(qwen3_vl, [(2, 3)]), toys.block_head(qwen3_vl)
    for positions in (None, StreamPositions(), VisionPositions(None)):
        told = r"6 image tokens \(id 261\) .* 0 (rows|pixel)"
        refused(
            lambda positions=positions: arm(name, head, qwen3_vl, prompt.ids, positions=positions), told, model=qwen3_vl
        )
    video = torch.where(prompt.ids == toys.IMAGE, toys.VIDEO, prompt.ids)
    refused(lambda: arm(name, head, qwen3_vl, video), "6 video tokens", model=qwen3_vl)


@pytest.mark.parametrize("name", ARMS)
def test_pixels_that_do_not_match_the_prompt(qwen3_vl, name):
    prompt, head = toys.vision_prompt(qwen3_vl, [(2, 3)]), toys.block_head(qwen3_vl)
    pixels, grid = prompt.inputs["pixel_values"], prompt.inputs["image_grid_thw"]
    text = prompt.ids[prompt.ids != toys.IMAGE][None]
    cut = torch.cat([prompt.ids[:, :4], prompt.ids[:, 5:]], 1)
    for ids, positions, told in (
        (text, VisionPositions(pixels, grid), "0 image tokens .* 24 rows of pixel_values"),
        (cut, VisionPositions(pixels, grid), "5 image tokens .*asks for 6"),
        (prompt.ids, VisionPositions(pixels[:-4], grid), "names 24 patches, pixel_values has 20 rows"),
        (prompt.ids, VisionPositions(pixels, grid * torch.tensor([1, 1, 2])), "names 48 patches"),
        (prompt.ids, VisionPositions(pixels, grid, mm_token_type_ids=text), "mm_token_type_ids is"),
        (prompt.ids, VisionPositions(pixels), "image_grid_thw"),
        (prompt.ids, VisionPositions(None, grid), "6 image tokens .* 0 rows"),
    ):
        call = lambda ids=ids, positions=positions: arm(name, head, qwen3_vl, ids, positions=positions)  # noqa: E731
        refused(call, told, model=qwen3_vl)


def test_pixels_for_a_text_target(qwen3, qwen3_vl, head):
    prompt = toys.vision_prompt(qwen3_vl)
    refused(lambda: arm("tree", head, qwen3, prompt.ids, positions=prompt.positions), "0 image tokens", model=qwen3)


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(name, value):
    model = toys.text_target("qwen3")
    model.lm_head.weight[7] = value
    told = r"logits are not finite \(nan or inf\)"
    head = toys.OracleHead([0] * 200)
    refused(lambda: arm(name, head, model, toys.text_prompt()), told, forwards=1, model=model)
    if name != "ar":
        refused(lambda: arm(name, head, model, toys.text_prompt(), temperature=1.0), told, forwards=1, model=model)


def test_a_head_whose_logits_are_not_finite(qwen3):
    head = toys.block_head(qwen3)
    head.norm.weight.fill_(float("nan"))
    for name in ("tree", "chain"):
        refused(lambda name=name: arm(name, head, qwen3, toys.text_prompt()), "NaN")


def test_a_target_whose_own_greedy_differs_is_said(head):
    model = toys.text_target("qwen3")
    model.generation_config.repetition_penalty = 1.05
    for name in ARMS:
        with pytest.warns(UserWarning, match="repetition_penalty=1.05"):
            arm(name, head, model, toys.text_prompt(), stop_token_ids=())
    model.generation_config.repetition_penalty = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arm("tree", head, model, toys.text_prompt(), stop_token_ids=())


@pytest.mark.parametrize(
    "made", [int, np.int64, np.uint8, torch.tensor, lambda i: [np.int32(i)], lambda i: torch.tensor([i])]
)
def test_a_stop_id_may_be_any_whole_number(qwen3, made):
    prompt = toys.text_prompt()
    greedy = glance.greedy_generate(qwen3, prompt, 8, stop_token_ids=())
    stop = int(greedy[0, prompt.numel() + 3])
    expected = glance.greedy_generate(qwen3, prompt, 8, stop_token_ids=[stop])
    assert glance.greedy_generate(qwen3, prompt, 8, stop_token_ids=made(stop)).equal(expected)
    assert expected.numel() <= prompt.numel() + 4


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("value", [1.5, "7", [[3]], torch.tensor(1.5), [None]])
def test_a_stop_id_that_is_no_whole_number(qwen3, head, name, value):
    told = "stop_token_ids must be a whole number or several"
    refused(lambda: arm(name, head, qwen3, toys.text_prompt(), stop_token_ids=value), told, model=qwen3)
