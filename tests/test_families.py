"""Exactness on every vision-language family: 1-3 images, adjacent and apart, text alone, chain and tree and extension."""

import pytest
import torch
import toys
import transformers

import glance
from glance.decode import decode
from glance.session import Settings
from glance.vl import VisionPositions

N = 24
B = 6
FAMILIES = (*toys.MROPE_FAMILIES, *toys.OUTER_FAMILIES, *toys.PLAIN_FAMILIES)
LAYOUTS = {
    "one": {"grids": [(2, 3)]},
    "square": {"grids": [(3, 3)]},
    "two adjacent": {"grids": [(1, 4), (3, 2)], "apart": False},
    "three apart": {"grids": [(2, 2), (1, 3), (4, 2)]},
    "text alone": {"grids": []},
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return toys.vision_target(request.param)


def quality(start, offset):
    """Right, second, fourth or out of reach: a head between useless and perfect."""
    return (0, 0, 1, 0, 3, None)[(start * 7 + offset * 5) % 6]


def texts(model, prompt, n=N):
    """Yield the new tokens of the oracle, chains, trees and extended trees on one prompt."""
    greedy = prompt.greedy(model, n)
    knowing = lambda rank_of: toys.OracleHead(prompt.ids[0].tolist() + greedy, B, rank_of)  # noqa: E731
    settings = {"positions": prompt.positions, "stop_token_ids": ()}
    start = prompt.ids.shape[1]
    cut = lambda ids: ids[0, start:].tolist()  # noqa: E731
    yield "greedy", greedy
    yield "oracle", cut(glance.greedy_generate(model, prompt.ids, n, **settings))
    for name, head in {"random": toys.block_head(model), "mixed": knowing(quality)}.items():
        yield f"{name} tree", cut(glance.generate(head, model, prompt.ids, n, **settings))
        yield f"{name} chain", cut(glance.chain_generate(head, model, prompt.ids, n, **settings))
    perfect = knowing(lambda start, offset: 0)
    yield (
        "extended",
        cut(glance.generate(perfect, model, prompt.ids, n, budget=15, branch_k=2, extend_budget=9, **settings)),
    )
    drafter = toys.RandomDrafter(prompt.ids[0].tolist() + greedy, seed=1)
    yield "random shapes", cut(decode(drafter, model, prompt.ids, Settings(n, stop_token_ids=()), prompt.positions)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_and_layout_is_exact(model, layout):
    prompt = toys.vision_prompt(model, **LAYOUTS[layout], seed=len(layout))
    found = dict(texts(model, prompt))
    greedy = found.pop("greedy")
    assert found == dict.fromkeys(found, greedy)


@pytest.mark.parametrize("budget, branch_k", [(0, 8), (1, 1), (2, 2), (15, 8), (31, 2), (63, 8)])
def test_every_budget_after_an_image(qwen3_vl, budget, branch_k):
    prompt = toys.vision_prompt(qwen3_vl, [(2, 3), (3, 1)])
    greedy = prompt.greedy(qwen3_vl, 30)
    for rank_of in (quality, lambda start, offset: 0, lambda start, offset: 1):
        head = toys.OracleHead(prompt.ids[0].tolist() + greedy, B, rank_of)
        settings = {"budget": budget, "branch_k": branch_k, "stop_token_ids": ()}
        ids = glance.generate(head, qwen3_vl, prompt.ids, 30, positions=prompt.positions, **settings)
        assert ids[0, prompt.ids.shape[1] :].tolist() == greedy


def test_eager_attention_is_exact_too():
    model = toys.vision_target("qwen3_vl", attention="eager")
    found = dict(texts(model, toys.vision_prompt(model, [(2, 3), (1, 2)])))
    assert found == dict.fromkeys(found, found["greedy"])


def test_a_one_token_text_prompt_on_a_vision_target(qwen3_vl):
    ids = torch.tensor([[65]])
    greedy = toys.reference(qwen3_vl, ids, N)
    for positions in (None, VisionPositions(None)):
        out = glance.generate(toys.block_head(qwen3_vl), qwen3_vl, ids, N, positions=positions, stop_token_ids=())
        assert out[0, 1:].tolist() == greedy


def test_one_adapter_serves_every_arm_and_again(qwen3_vl):
    prompt = toys.vision_prompt(qwen3_vl)
    held = {name: value.clone() for name, value in prompt.positions.inputs.items()}
    first, second = (dict(texts(qwen3_vl, prompt)) for _ in range(2))
    assert first == second
    assert all(torch.equal(held[name], value) for name, value in prompt.positions.inputs.items())


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "glm4v"])
def test_no_prompt_leaks_into_the_next(family):
    model = toys.vision_target(family)
    prompts = [toys.vision_prompt(model, grids, seed=i) for i, grids in enumerate([[(2, 3)], [(5, 1), (2, 2)], []])]
    fresh = [prompt.greedy(toys.vision_target(family), N) for prompt in prompts]

    def decoded(prompt, **settings):
        head = toys.OracleHead(prompt.ids[0].tolist() + fresh[prompts.index(prompt)], B, quality)
        settings = {"positions": prompt.positions, "stop_token_ids": ()} | settings
        return glance.generate(head, model, prompt.ids, N, **settings)[0, prompt.ids.shape[1] :].tolist()

    for order in ([0, 1, 2], [2, 1, 0], [1, 1, 2]):
        assert [decoded(prompts[i]) for i in order] == [fresh[i] for i in order]
        model.model.rope_deltas = torch.tensor([[7]])  # what another user of the model may leave behind
    inner = []  # one stream's rounds between another's
    assert decoded(prompts[0], on_round=lambda r: inner.append([decoded(prompts[1]), decoded(prompts[2])])) == fresh[0]
    assert inner and all(pair == fresh[1:] for pair in inner)


def video_prompt(model, family, frames=2, height=2, width=3):
    """Build a prompt with one video as the family's processor would: frames in one run, or one run per frame."""
    patch = model.config.vision_config.spatial_merge_size
    grid = torch.tensor([[frames, height * patch, width * patch]])
    token, kind = (toys.IMAGE if family.startswith("glm") else toys.VIDEO), 2
    run = [toys.VISION_START, *[token] * (height * width), toys.VISION_END, 48]
    if family in ("qwen2_vl", "qwen2_5_vl"):
        run = [toys.VISION_START, *[token] * (frames * height * width), toys.VISION_END]
        frames = 1
    edges = [264] if family.startswith("glm") else [11]
    ids = torch.tensor([[65, 66, *edges, *run * frames, 67, 68]])
    rng = torch.Generator().manual_seed(5)
    pixels = torch.randn(int(grid.prod()), 3 * 2 * 8 * 8, generator=rng)
    inputs = {"pixel_values_videos": pixels, "video_grid_thw": grid, "mm_token_type_ids": (ids == token).long() * kind}
    if family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = [1.5]
    return toys.Prompt(ids, VisionPositions.from_inputs(inputs), inputs, 0)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_video_is_exact(family):
    model = toys.vision_target(family)
    prompt = video_prompt(model, family)
    found = dict(texts(model, prompt))
    assert found == dict.fromkeys(found, found["greedy"])
    bare = {name: value for name, value in prompt.inputs.items() if name != "mm_token_type_ids"}
    by_hand = VisionPositions(None, video=bare)
    if family == "glm4v":  # its video stands on image placeholders: only the token types tell them apart
        toys.refused(lambda: by_hand.prefill_inputs(model, prompt.ids), "12 image tokens", model=model)
        return
    ids = glance.greedy_generate(model, prompt.ids, N, positions=by_hand, stop_token_ids=())
    assert ids[0, prompt.ids.shape[1] :].tolist() == found["greedy"]


def test_layers_that_share_keys_and_values_are_exact():
    model = toys.vision_target("gemma4", num_kv_shared_layers=2)
    for prompt in (toys.vision_prompt(model), toys.vision_prompt(model, [])):
        found = dict(texts(model, prompt))
        assert found == dict.fromkeys(found, found["greedy"])


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_tokens_of_one_picture_see_each_other(family):
    """The greedy text depends on it, and follows generate's with it."""
    model = toys.vision_target(family)
    prompt = toys.vision_prompt(model, [(2, 2), (2, 2)], seed=3)
    logits = []
    for typed in (True, False):
        inputs = prompt.positions.prefill_inputs(model, prompt.ids)
        if not typed:
            inputs = {name: value for name, value in inputs.items() if "token_type_ids" not in name}
        with torch.inference_mode():
            logits.append(model(prompt.ids, **inputs).logits)
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    with torch.inference_mode():
        theirs = model(prompt.ids, attention_mask=torch.ones_like(prompt.ids), **prompt.inputs).logits
    torch.testing.assert_close(logits[0], theirs)


def mllama():
    """A tiny Llama 3.2 Vision: images enter through cross-attention layers."""
    text = {**toys.TEXT, "cross_attention_layers": [1], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    vision = {"hidden_size": 16, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2, "image_size": 32}
    vision |= {"intermediate_size": 16, "vision_output_dim": 32, "patch_size": 8, "intermediate_layers_indices": [0]}
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=toys.IMAGE)
    return transformers.MllamaForConditionalGeneration(config).eval()


def rope(kind, **more):
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **more}


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 40}


@pytest.mark.parametrize("call", ["oracle", "tree", "chain"])
@pytest.mark.parametrize(
    ("model", "told"),
    [
        (mllama, "cross-attention layers"),
        (
            lambda: toys.text_target("llama", max_position_embeddings=40, rope_parameters=rope("dynamic")),
            "dynamic rope",
        ),
        (lambda: toys.text_target("llama", rope_parameters=rope("longrope", **LONG)), "longrope rope"),
    ],
    ids=["mllama", "dynamic", "longrope"],
)
def test_what_generate_does_otherwise_is_refused_before_any_forward(model, told, call):
    model = model()
    head = toys.OracleHead([0] * 60, B)
    decoders = {
        "oracle": lambda n: glance.greedy_generate(model, toys.text_prompt(20), n, stop_token_ids=()),
        "tree": lambda n: glance.generate(head, model, toys.text_prompt(20), n, stop_token_ids=()),
        "chain": lambda n: glance.chain_generate(head, model, toys.text_prompt(20), n, stop_token_ids=()),
    }
    toys.refused(lambda: decoders[call](21), told, model=model)
    if told != "cross-attention layers":  # within the original length it is harmless
        assert decoders[call](20)[0, 20:].tolist() == toys.reference(model, toys.text_prompt(20), 20)
