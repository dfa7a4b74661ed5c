"""The pocket target: its forward is the stock one, training learns and resumes exactly, the shipped files read."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glance.paths import DATA
from glance.pocket import card, cli
from glance.pocket.batches import PageStream, collate, encode_prompt
from glance.pocket.evaluate import answer_rows, load_pocket
from glance.pocket.model import (
    BatchForward,
    build_image_processor,
    cut_patches,
    double_frames,
    save_target,
    stack_pixels,
)
from glance.pocket.render import TASKS, sample
from glance.pocket.scores import score_caption, score_reading
from glance.pocket.train_target import PLAN, STRIPS, Run, Stage, train_target

POCKET = DATA / "pocket"
TINY = (
    Stage("vision", STRIPS, 6, 5, 2e-3, 2e-3, 2e-3, language=False, warmup=1),
    Stage("transcription", STRIPS, 6, 4, 1e-3, 2e-3, 1e-3, warmup=1),
)


@pytest.fixture(scope="module")
def run():
    return Run(0, PLAN)


@pytest.fixture(scope="module")
def shipped():
    return load_pocket(POCKET / "target")


@pytest.mark.parametrize("task", ["caption", "lines64"])
def test_patches_equal_the_processors(task):
    image = sample(task, 5).image
    processed = build_image_processor()(images=[image], return_tensors="pt")
    ours = double_frames(cut_patches(stack_pixels([image])))
    assert processed["image_grid_thw"].tolist() == [[1, image.height // 16, 16]]
    torch.testing.assert_close(ours, processed["pixel_values"], atol=1e-6, rtol=0)


def test_batched_forward_equals_the_stock_forward(run):
    model = run.model.eval()
    batch = collate(run.tokenizer, [sample("docvqa", 0), sample("chartqa", 1)])
    cells = 48
    for i in range(2):
        ids = batch.ids[i : i + 1]
        with torch.no_grad():
            states, _ = run.forward(batch.pixels[i : i + 1], ids, batch.start)
            stock = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == model.config.image_token_id).long(),
                pixel_values=double_frames(cut_patches(batch.pixels[i : i + 1])),
                image_grid_thw=torch.tensor([[1, 12, 16]]),
            )
        assert (ids == model.config.image_token_id).sum() == cells
        torch.testing.assert_close(model.lm_head(states), stock.logits, atol=2e-4, rtol=1e-4)


def test_prompt_ids_are_the_chat_templates(run):
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What does the sign say?"}]}]
    text = run.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = run.tokenizer(text)["input_ids"]
    place = ids.index(run.tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    expanded = ids[:place] + [ids[place]] * 48 + ids[place + 1 :]
    assert expanded == encode_prompt(run.tokenizer, "What does the sign say?", 48)


def test_labels_and_pointers_are_shifted_alike(run):
    page = sample("chartqa", 2)
    batch = collate(run.tokenizer, [page])
    asked = batch.labels[0] >= 0
    assert run.tokenizer.decode(batch.labels[0][asked]) == page.answer + "<|im_end|>"
    slots = page.canvas.label_slots()
    from glance.pocket.canvas import CHARACTERS

    for label, (cell, slot) in zip(batch.labels[0][asked].tolist(), batch.pointers[0][asked].tolist(), strict=True):
        if slot >= 0:
            assert run.tokenizer.decode([label]).strip()[0] == CHARACTERS[slots[cell, slot]]


def test_stream_resumes_at_any_step(run):
    whole = iter(PageStream(run.tokenizer, STRIPS, 3, "vision", 1))
    batches = [next(whole) for _ in range(11)]
    late = next(iter(PageStream(run.tokenizer, STRIPS, 3, "vision", 1, first_step=10)))
    assert torch.equal(late.pixels, batches[10].pixels) and torch.equal(late.ids, batches[10].ids)


def test_a_few_steps_lower_the_loss(tmp_path):
    stage = replace(TINY[1], steps=30, batch=8)
    trained = train_target(tmp_path, plan=(stage,), every=10, probes=2, workers=0)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert rows[-1]["language"] < 0.8 * rows[0]["language"]
    assert (tmp_path / "snapshot" / "model.safetensors").is_file() and trained.step == 30


def test_resuming_is_bit_identical(tmp_path):
    straight = train_target(tmp_path / "a", plan=TINY, every=50, probes=1, workers=0)
    while True:  # stop after every single step
        stopped = train_target(tmp_path / "b", plan=TINY, every=50, probes=1, workers=0, max_seconds=0)
        if (stopped.stage, stopped.step) == (1, 4):
            break
    for (name, one), two in zip(straight.model.named_parameters(), stopped.model.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_checkpoint_of_another_run_is_refused(tmp_path):
    train_target(tmp_path, plan=TINY[:1], every=50, probes=1, workers=0, max_seconds=0)
    with pytest.raises(ValueError, match="a checkpoint of another run"):
        train_target(tmp_path, plan=TINY[:1], seed=9, workers=0)
    with pytest.raises(ValueError, match="a checkpoint of another run"):
        train_target(tmp_path, plan=(replace(TINY[0], batch=7),), workers=0)


def test_the_checkpoint_says_its_precision_and_no_other_goes_on(tmp_path):
    for made, here in (("float32", "bfloat16"), ("bfloat16", "float32")):
        folder = tmp_path / made
        folder.mkdir()
        Run(1, TINY[:1], precision=made).save(folder / "checkpoint.pt")  # without a step: bfloat16 may be slow here
        assert torch.load(folder / "checkpoint.pt")["precision"] == made
        with pytest.raises(ValueError, match=f"a checkpoint made in {made}, and this machine trains in {here}"):
            train_target(folder, plan=TINY[:1], workers=0, precision=here)


def test_in_float32_nothing_is_taken_in_bfloat16():
    """Neither a product of the model nor a step of its optimisers: where bfloat16 is slow one would be felt."""
    run = Run(0, TINY[1:], precision="float32")
    seen = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.update((func.__name__, one.dtype) for one in tree_leaves(out) if isinstance(one, torch.Tensor))
            return out

    with Products():
        run.take_step(next(iter(PageStream(run.tokenizer, STRIPS, 2, "transcription", 1))))
    assert {"mm.default", "addmm.default"} & {name for name, _ in seen}
    assert not [name for name, dtype in seen if dtype in (torch.bfloat16, torch.float16)]


def test_saved_target_reloads_and_names_the_stock_processor(run, tmp_path):
    save_target(run.model, run.tokenizer, tmp_path)
    model, tokenizer = load_pocket(tmp_path)
    assert sum(p.numel() for p in model.parameters()) <= 15e6
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = "The value of Xyzzy is 12.4.\n"
    assert tokenizer(text)["input_ids"] == run.tokenizer(text)["input_ids"]
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert settings["processor_class"] == "Qwen3VLProcessor"
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_commands_say_what_is_wrong_in_one_line(tmp_path, capsys):
    assert cli.main(["evaluate", "--data", str(tmp_path)]) == 2
    assert re.fullmatch(r"error: .*no target here.*\n", capsys.readouterr().err)
    assert cli.main(["render", "--show", "poem", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.main(["render", "--show", "chartqa", "--seed", "4", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "chartqa-4.png").is_file() and "The chart" in capsys.readouterr().out


def test_shipped_target_reads_fresh_pages(shipped):
    model, tokenizer = shipped
    errors = {}
    for task in ("chartqa", "docvqa", "infovqa"):
        pages = [sample(task, 10**6 + seed, "eval") for seed in range(6)]
        answers = answer_rows(model, tokenizer, [p.image for p in pages], [p.prompt for p in pages])
        rows = [{"answer": p.answer, "kind": p.kind, "parts": p.parts} for p in pages]
        errors[task] = np.mean(
            [score_reading(r, a["text"])["character_error"] for r, a in zip(rows, answers, strict=True)]
        )
    assert max(errors.values()) < 0.1, errors
    page = sample("caption", 10**6, "eval")
    (answer,) = answer_rows(model, tokenizer, [page.image], [page.prompt])
    scores = score_caption({"objects": page.objects}, answer["text"])
    assert scores["grounded"] >= 0.7 * scores["mentions"] > 0


def test_shipped_target_needs_the_picture(shipped):
    model, tokenizer = shipped
    pages = [sample("chartqa", 10**6 + seed, "eval") for seed in range(2)]
    answers = answer_rows(model, tokenizer, [p.image for p in reversed(pages)], [p.prompt for p in pages])
    for page, answer in zip(pages, answers, strict=True):
        assert score_reading({"answer": page.answer, "kind": page.kind}, answer["text"])["character_error"] > 0.2


def test_shipped_batched_forward_agrees_with_generation(shipped):
    model, tokenizer = shipped
    page = sample("infovqa", 10**6, "eval")
    (answer,) = answer_rows(model, tokenizer, [page.image], [page.prompt])
    prompt = encode_prompt(tokenizer, page.prompt, 48)
    ids = torch.tensor([prompt + tokenizer(answer["text"])["input_ids"]])
    with torch.no_grad():
        states, _ = BatchForward(model)(
            stack_pixels([page.image]), ids, start=prompt.index(model.config.image_token_id)
        )
    guesses = model.lm_head(states)[0, len(prompt) - 1 :].argmax(-1).tolist()
    assert guesses[:-1] == ids[0, len(prompt) :].tolist() and guesses[-1] == tokenizer.eos_token_id


def test_hashes_in_the_card_match_the_files():
    text = (POCKET / "CARD.md").read_text()
    for name, value in card.list_hashes(POCKET).items():
        assert f"`{name}` {value}" in text, name
    result = json.loads((POCKET / "evaluation.json").read_text())
    assert set(result["eval"]) == set(TASKS)
    assert card.tabulate_tasks(result["eval"]) in text
