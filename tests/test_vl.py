"""M-RoPE positions against the formula and the families' own index, and what `load_target` hands back."""

import json
import logging

import numpy as np
import pytest
import torch
import toys
import transformers
from PIL import Image

import glance
from glance.target import StreamPositions, Target, check_mask
from glance.vl import VisionPositions, image_only, load_processor, load_target

GRIDS = [[(3, 3)], [(2, 5)], [(5, 1), (2, 2)], [(1, 4), (3, 2), (2, 2)], []]
LOADED = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "paddleocr_vl", "llava"]


@pytest.mark.parametrize("family", toys.MROPE_FAMILIES)
def test_the_delta_is_what_the_grids_say(family):
    model = toys.vision_target(family)
    for grids in GRIDS:
        prompt = toys.vision_prompt(model, grids, apart=len(grids) != 2)
        with Target(model, prompt.positions or StreamPositions()) as target:
            target.prefill(prompt.ids)
            assert target.delta == prompt.delta == -sum(h * w - max(h, w) for h, w in grids)
            assert target.length == prompt.ids.shape[1]


@pytest.mark.parametrize("family", toys.MROPE_FAMILIES)
def test_positions_are_the_familys_own_and_asked_for_by_keyword(family, monkeypatch):
    model = toys.vision_target(family)
    prompt = toys.vision_prompt(model, [(2, 3), (4, 1)])
    own, delta = model.model.get_rope_index(
        prompt.ids, **{k: v for k, v in prompt.inputs.items() if k != "pixel_values"}
    )
    index = model.model.get_rope_index
    asked = []

    def by_keyword(*, input_ids, mm_token_type_ids, image_grid_thw):
        asked.append(mm_token_type_ids)
        return index(input_ids=input_ids, mm_token_type_ids=mm_token_type_ids, image_grid_thw=image_grid_thw)

    monkeypatch.setattr(model.model, "get_rope_index", by_keyword)
    bare = VisionPositions(prompt.inputs["pixel_values"], prompt.inputs["image_grid_thw"])
    for positions in (prompt.positions, bare):
        inputs = positions.prefill_inputs(model, prompt.ids)
        assert torch.equal(inputs["position_ids"], own) and int(delta) == prompt.delta
        assert torch.equal(asked[-1], (prompt.ids == toys.IMAGE).long())


@pytest.mark.parametrize("family", toys.PLAIN_FAMILIES)
def test_plain_families_get_plain_positions(family):
    model = toys.vision_target(family)
    prompt = toys.vision_prompt(model, [(1, 1), (1, 1)])
    inputs = prompt.positions.prefill_inputs(model, prompt.ids)
    assert inputs["position_ids"].tolist() == [list(range(prompt.ids.shape[1]))]


def test_after_an_image_places_and_positions_part(qwen3_vl):
    prompt = toys.vision_prompt(qwen3_vl, [(2, 5)])
    check_mask(qwen3_vl, prompt.ids)  # two passes, once per target
    drafts = []
    with toys.forwards(qwen3_vl) as passes:
        head = toys.OracleHead(prompt.ids[0].tolist() + prompt.greedy(qwen3_vl, 20), 6)
        settings = {"positions": prompt.positions, "stop_token_ids": ()}
        passes.clear()
        settings["on_round"] = drafts.append
        glance.generate(head, qwen3_vl, prompt.ids, 20, **settings)
    assert len(passes) == 1 + len(drafts)
    for round_, asked in zip(drafts, passes[1:], strict=True):
        last = prompt.ids.shape[1] + 20 - 1  # nodes past the text's end ask for no position beyond it
        places = np.minimum(round_.start + np.array([0, *round_.tree.depths]), last)
        assert asked["position_ids"].tolist() == [[(places + prompt.delta).tolist()]] * 3
        assert "cache_position" not in asked


@pytest.fixture(scope="module", params=LOADED)
def folder(request, tmp_path_factory):
    """A saved checkpoint of each family."""
    return toys.save_target(toys.vision_target(request.param), tmp_path_factory.mktemp(request.param))


def picture(width, height):
    rng = np.random.default_rng(width * height)
    return Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))


def chat(processor, *images):
    content = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": "Read it."}]
    settings = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return processor.apply_chat_template([{"role": "user", "content": content}], **settings)


def expected_ids(tokens_per_image):
    """The chat template written out: one placeholder per merged patch."""
    text = list(toys.tokenizer()("user\n")["input_ids"])
    ids = [toys.IM_START, *text]
    for n in tokens_per_image:
        ids += [toys.VISION_START, *[toys.IMAGE] * n, toys.VISION_END]
    tail = toys.tokenizer()("Read it.<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    return ids + tail


def test_a_saved_target_loads_with_a_processor_and_decodes(folder, caplog, tmp_path):
    with caplog.at_level(logging.INFO, logger="glance.vl"):
        target, processor = load_target(folder, device="cpu")
    family = target.config.model_type
    assert "processor: " in caplog.text and not target.training and target.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in target.parameters())
    assert isinstance(processor, transformers.ProcessorMixin)
    images = [picture(64, 48), picture(32, 80)]
    inputs = chat(processor, *images)
    if family == "llava":
        counts = [16, 16]
    else:
        counts = [int(n) // 4 for n in inputs["image_grid_thw"].prod(-1)]
        types = inputs["mm_token_type_ids"]
        assert torch.equal(types, (inputs["input_ids"] == toys.IMAGE).long())
    assert inputs["input_ids"][0].tolist() == expected_ids(counts)
    alone = type(processor.image_processor).from_pretrained(folder)(images, return_tensors="pt")
    assert type(processor.image_processor).__name__.endswith("Pil") or transformers.utils.is_torchvision_available()
    assert all(torch.equal(inputs[name], alone[name]) for name in alone)

    positions = VisionPositions.from_inputs(inputs)
    head = toys.block_head(target)
    given = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    greedy = toys.reference(target, inputs["input_ids"], 12, **given)
    start = inputs["input_ids"].shape[1]
    for call in (glance.generate, glance.chain_generate):
        ids = call(head, target, inputs["input_ids"], 12, positions=positions, stop_token_ids=())
        assert ids[0, start:].tolist() == greedy

    processor.save_pretrained(tmp_path)  # and it comes back from what it saved
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    again = load_processor(tmp_path)
    assert type(again).__name__ == type(processor).__name__
    second = chat(again, *images)
    assert all(torch.equal(torch.as_tensor(inputs[k]), torch.as_tensor(second[k])) for k in inputs)
    assert chat(processor)["input_ids"][0].tolist() == expected_ids([])


def test_a_text_folder_gives_the_tokenizer(tmp_path, qwen3):
    toys.save_target(qwen3, tmp_path)
    target, tokenizer = load_target(tmp_path, dtype=torch.float32, device="cpu", attn_implementation="eager")
    assert target.config._attn_implementation == "eager" and not target.training
    ids = torch.tensor([tokenizer("Read it.")["input_ids"]])
    assert tokenizer.decode(ids[0]) == "Read it."
    out = glance.generate(toys.block_head(target), target, ids, 9, stop_token_ids=())
    assert out[0, 8:].tolist() == toys.reference(qwen3, ids, 9)
    assert load_target(tmp_path, dtype=torch.bfloat16, device="cpu")[0].dtype == torch.bfloat16


def test_with_torchvision_the_processor_is_the_stock_one(tmp_path, monkeypatch, qwen3_vl, caplog):
    stock = type("Qwen3VLProcessor", (), {"image_processor": object()})()
    monkeypatch.setattr(transformers.utils, "is_torchvision_available", lambda: True)
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda path: stock)
    with caplog.at_level(logging.INFO, logger="glance.vl"):
        assert load_processor(toys.save_target(qwen3_vl, tmp_path)) is stock
    assert "stock Qwen3VLProcessor" in caplog.text


def test_a_stock_class_without_video_is_left_alone():
    assert image_only(transformers.LlavaProcessor) is transformers.LlavaProcessor
    assert issubclass(image_only(transformers.Qwen3VLProcessor), transformers.Qwen3VLProcessor)


def test_what_is_no_checkpoint_is_refused(tmp_path, qwen3_vl):
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_target(tmp_path)
    toys.save_target(qwen3_vl, tmp_path)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    settings["image_processor_type"] = "HouseMadeImageProcessor"
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"torchvision.*HouseMadeImageProcessorPil"):
        load_target(tmp_path, device="cpu")


@pytest.mark.skipif(transformers.utils.is_torchvision_available(), reason="torchvision is there: nothing is missing")
@pytest.mark.parametrize("name", ["SmolVLMImageProcessor", "Idefics3ImageProcessor"])
def test_a_class_that_needs_torchvision_is_refused_in_one_line(tmp_path, qwen3_vl, name):
    """transformers puts a dummy in such a class's place, which raises ImportError when it is used."""
    toys.save_target(qwen3_vl, tmp_path)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | {"image_processor_type": name}))
    with pytest.raises(ValueError, match=rf"need torchvision \(no {name}Pil without it"):
        load_processor(tmp_path)


def test_a_padded_prompt_is_refused(qwen3_vl):
    prompt = toys.vision_prompt(qwen3_vl)
    mask = torch.ones_like(prompt.ids)
    VisionPositions.from_inputs({**prompt.inputs, "attention_mask": mask})
    mask[0, :2] = 0
    with pytest.raises(ValueError, match="2 padding tokens"):
        VisionPositions.from_inputs({**prompt.inputs, "attention_mask": mask})
