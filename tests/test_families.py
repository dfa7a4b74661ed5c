"""Exactness on every vision-language family: 1-3 images, adjacent and apart, text alone, chain and tree and extension."""

import pytest
import torch
import toys

import glance
from glance.decode import decode
from glance.session import Settings
from glance.vl import VisionPositions

N = 24
B = 6
FAMILIES = (*toys.MROPE_FAMILIES, *toys.PLAIN_FAMILIES)
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
        with pytest.raises(ValueError, match="12 image tokens"):
            by_hand.prefill_inputs(model, prompt.ids)
        return
    ids = glance.greedy_generate(model, prompt.ids, N, positions=by_hand, stop_token_ids=())
    assert ids[0, prompt.ids.shape[1] :].tolist() == found["greedy"]
