"""Training a block head: its blocks and mask, its data, its steps, its resume, the command, and bad input."""

import argparse
import json
import math
from dataclasses import fields, replace

import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import glance
from glance.states import KeptStates, fuse
from glance.target import StreamPositions, Target
from glance.train import command
from glance.train import loop as training
from glance.train.acceptance import acceptance_text
from glance.train.blocks import (
    IGNORE,
    TrainSettings,
    choose_mask_token,
    draw_blocks,
    hang_blocks,
    new_head,
    run_blocks,
    spread_layers,
)
from glance.train.command import split_tasks
from glance.train.distill import AnswerCache, Example, answer, build_examples, plain_attention, read_states
from glance.train.loop import HeadRun, train_head
from glance.tree import make_tree

SMALL = TrainSettings(
    block=6, layers=2, kept=(0, 2), steps=12, batch=4, anchors=4, every=6, precision="float32", max_new_tokens=24
)


def text_prompts(count: int = 10) -> list[dict]:
    """Random prompts of several lengths, as `encode` returns them."""
    return [{"input_ids": toys.text_prompt(5 + i % 4, seed=i)} for i in range(count)]


def vision_prompts(model, count: int = 4) -> list[dict]:
    """Random prompts with one or two images."""
    made = [toys.vision_prompt(model, [(2, 3)] if i % 2 else [(2, 2), (3, 2)], seed=i) for i in range(count)]
    return [{"input_ids": prompt.ids, **prompt.inputs} for prompt in made]


@pytest.fixture(scope="module")
def examples(qwen3):
    """Ten examples of the tiny text target's own text."""
    cache = AnswerCache(None, qwen3, 24)
    return build_examples(qwen3, text_prompts(), (0, 2), max_new_tokens=24, cache=cache, batch=3)


def greedy_texts(model, prompts):
    return [
        toys.reference(model, p["input_ids"], 12, **{k: v for k, v in p.items() if k != "input_ids"}) for p in prompts
    ]


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_tokens_of_a_picture_see_each_other_in_training_too(family):
    """Families whose masks follow token types: answers and states of a batch are decoding's."""
    model = toys.vision_target(family)
    prompts = vision_prompts(model, 4)
    texts, answered = answer(model, prompts, 5, (0, 2))
    for i, prompt in enumerate(prompts):
        positions = glance.VisionPositions.from_inputs(prompt)
        alone = glance.greedy_generate(model, prompt["input_ids"], 5, positions=positions)[0]
        assert texts[i] == alone[prompt["input_ids"].shape[1] :].tolist()
        inputs = positions.prefill_inputs(model, prompt["input_ids"])
        with torch.inference_mode(), KeptStates(model, (0, 2)) as kept:
            model(input_ids=prompt["input_ids"], use_cache=False, **inputs)
            states = fuse(kept.take())[0]
        torch.testing.assert_close(answered[i][: len(states)], states, rtol=1e-4, atol=1e-4)
    ids = [torch.cat([p["input_ids"][0], torch.tensor(text)]) for p, text in zip(prompts, texts, strict=True)]
    for read, told in zip(read_states(model, (0, 2), prompts, ids), answered, strict=True):
        torch.testing.assert_close(read[:-1], told, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["text", "vision"])
def test_answers_in_a_batch_are_the_targets_own_greedy_text(family, qwen3, qwen3_vl):
    model, prompts = (qwen3, text_prompts(5)) if family == "text" else (qwen3_vl, vision_prompts(qwen3_vl))
    texts, _ = answer(model, prompts, 12)
    assert texts == greedy_texts(model, prompts)


@pytest.mark.parametrize("family", ["text", "vision"])
def test_training_states_are_the_decoders_states(family, qwen3, qwen3_vl):
    """States gathered while answering, read in one batch, and read by a decode of the same tokens are the same numbers."""
    model, prompts = (qwen3, text_prompts(3)) if family == "text" else (qwen3_vl, vision_prompts(qwen3_vl, 3))
    layers = (0, 2, 3)
    texts, answered = answer(model, prompts, 10, layers)
    ids = [torch.cat([p["input_ids"][0], torch.tensor(text)]) for p, text in zip(prompts, texts, strict=True)]
    read = read_states(model, layers, prompts, ids)
    for i, prompt in enumerate(prompts):
        positions = glance.VisionPositions.from_inputs(prompt) if "pixel_values" in prompt else StreamPositions()
        with torch.inference_mode(), Target(model, positions, layers) as target:
            _, fused = target.prefill(prompt["input_ids"])
            parts = [fused]
            for token in texts[i][:-1]:
                target.verify(token, make_tree([], [], [], [], []))
                parts.append(target.keep([]))
        decoded = torch.cat(parts, 1)[0]
        torch.testing.assert_close(read[i][:-1], decoded, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(answered[i], decoded, rtol=1e-4, atol=1e-4)


def test_many_blocks_in_one_pass_say_what_each_says_alone(qwen3, examples):
    """Packed blocks of several sequences equal the head run as the decoder runs it: one block, its own context, no mask."""
    head = new_head(qwen3, SMALL, toys.MASK)
    for revealed in (0, 3):
        anchors = [[e.start, e.start + 4, len(e.ids) - 3 - revealed] for e in examples[:3]]
        blocks = hang_blocks([_float(e) for e in examples[:3]], anchors, 6, toys.MASK, revealed)
        packed = run_blocks(head, qwen3, blocks).view(3, 3, 6 + revealed, -1)
        for i, places in enumerate(anchors):
            for j, place in enumerate(places):
                known = examples[i].ids[place : place + 1 + revealed]
                ids = torch.cat([known, torch.full((5,), toys.MASK)])
                alone = head(
                    target_hidden=examples[i].states[None, :place].float(),
                    noise_embedding=qwen3.get_input_embeddings()(ids)[None],
                    position_ids=torch.arange(place + len(ids))[None],
                )
                torch.testing.assert_close(packed[i, j], alone[0], rtol=1e-4, atol=1e-4)


def test_labels_are_the_tokens_that_follow_the_anchor(examples):
    example = examples[0]
    last = len(example.ids) - 2
    blocks = hang_blocks([example], [[example.start, last]], 6, toys.MASK)
    assert blocks.ids[0, :, 0].tolist() == [int(example.ids[example.start]), int(example.ids[last])]
    assert (blocks.ids[0, :, 1:] == toys.MASK).all()
    assert blocks.labels[0, 0].tolist() == [IGNORE, *example.ids[example.start + 1 : example.start + 6].tolist()]
    assert blocks.labels[0, 1].tolist() == [IGNORE, int(example.ids[-1]), *[IGNORE] * 4]


def test_a_step_draws_the_same_batch_every_time_and_an_epoch_every_sequence_once(examples):
    settings = TrainSettings(block=6, batch=2, anchors=3, reveal=0.5, seed=3)
    for step in range(8):
        one, two = (draw_blocks(examples, settings, toys.MASK, step) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(one[:4], two[:4], strict=True))
    firsts = {tuple(e.ids.tolist()): i for i, e in enumerate(examples)}
    steps = [
        draw_blocks(examples, TrainSettings(block=6, batch=2, anchors=1, reveal=0), toys.MASK, k) for k in range(5)
    ]
    starts = [(int(i), int(a)) for step in steps for i, a in zip(step.ids[:, 0, 0], step.anchors[:, 0], strict=True)]
    assert sorted(starts) == sorted((int(e.ids[e.start]), e.start) for e in examples) and len(firsts) == 10


@pytest.mark.parametrize("scout", [0.0, 0.5])
def test_a_few_steps_lower_the_loss_from_scratch(scout, qwen3, examples):
    settings = TrainSettings(block=6, layers=2, kept=(0, 2), steps=30, batch=8, anchors=6, warmup=5, scout=scout)
    run = HeadRun(new_head(qwen3, settings, toys.MASK), qwen3, settings, toys.MASK, {})
    losses = [run.advance(examples) for _ in range(30)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_stopped_run_resumes_bit_for_bit(qwen3, examples, tmp_path):
    def begin():
        return HeadRun(new_head(qwen3, SMALL, toys.MASK), qwen3, SMALL, toys.MASK, {"seed": 0})

    whole, half = begin(), begin()
    straight = [whole.advance(examples) for _ in range(8)]
    [half.advance(examples) for _ in range(4)]
    half.save(tmp_path / "checkpoint.pt")
    rest = begin()
    rest.load(tmp_path / "checkpoint.pt")
    assert [rest.advance(examples) for _ in range(4)] == straight[4:]
    for one, two in zip(whole.head.parameters(), rest.head.parameters(), strict=True):
        assert torch.equal(one, two)


def test_plain_attention_says_the_same_and_is_put_back(qwen3, qwen3_vl):
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    for model, prompts in ((qwen3, text_prompts(4)), (qwen3_vl, vision_prompts(qwen3_vl))):
        texts, states = answer(model, prompts, 8, (1,))
        with plain_attention():
            again, other = answer(model, prompts, 8, (1,))
        assert texts == again
        torch.testing.assert_close(states, other, rtol=1e-4, atol=1e-4)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is stock


def test_answers_are_cached_and_a_build_goes_on_where_it_stopped(qwen3, tmp_path, monkeypatch):
    path = tmp_path / "answers.jsonl"
    build = lambda: build_examples(  # noqa: E731
        qwen3, text_prompts(6), (0, 2), max_new_tokens=8, cache=AnswerCache(path, qwen3, 8), batch=2
    )
    first = build()
    path.write_text("\n".join(path.read_text().splitlines()[:4]) + '\n{"prompt": "half')  # killed while it wrote
    asked = []
    monkeypatch.setattr("glance.train.distill.answer", lambda t, p, *rest: asked.append(len(p)) or answer(t, p, *rest))
    second = build()
    assert sum(asked) == 3
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one.ids, two.ids)
        torch.testing.assert_close(one.states, two.states[: len(one.states)], rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match="another run"):
        AnswerCache(path, toys.text_target("qwen3", seed=5), 8)


def write_text_task(folder, rows: int):
    folder.mkdir()
    (folder / "words.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(rows)))
    return folder


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    return parser


def test_the_command_trains_a_head_for_a_text_target_that_decodes_exactly(qwen3, tmp_path, parser, capsys):
    target, data = toys.save_target(qwen3, tmp_path / "target"), write_text_task(tmp_path / "data", 10)
    flags = "--steps 8 --every 4 --block 6 --layers 2 --batch 4 --anchors 4 --max-new-tokens 16 --held-out 2 --budget 7"
    command = ["train-head", "--target", str(target), "--data", str(data), "--out", str(tmp_path / "head")]
    arguments = parser.parse_args(command + flags.split())
    assert arguments.run(arguments) == 0
    assert "teacher-forced" in capsys.readouterr().out
    head = glance.load_block_head(tmp_path / "head")
    assert head.config.dflash_config["kept_state"] == "layer_output" and head.block_size == 6
    ids = toys.text_prompt(7)
    out, stats = glance.generate(head, qwen3, ids, 20, budget=7, return_stats=True)
    assert out[0, 7:].tolist() == toys.reference(qwen3, ids, 20) and stats.n_rounds <= 19
    acceptance = json.loads((tmp_path / "head" / "acceptance.json").read_text())
    assert len(acceptance["decode"]) == 5 and acceptance["gap"] <= 0.02
    assert len((tmp_path / "head" / "log.jsonl").read_text().splitlines()) == 2


def test_teacher_forced_acceptance_is_the_decoders(qwen3, examples):
    """A head that overfits accepts long chains; the pass over the finished text says the same, offset by offset."""
    settings = TrainSettings(
        block=6, layers=2, kept=(0, 2), steps=60, batch=10, anchors=12, warmup=5, precision="float32", budget=7
    )
    run = HeadRun(new_head(qwen3, settings, toys.MASK), qwen3, settings, toys.MASK, {})
    [run.advance(examples) for _ in range(60)]
    result = training.compare_acceptance(run.head.eval(), qwen3, text_prompts(4), settings, toys.MASK)
    assert result["decode"] == result["teacher_forced"] and result["gap"] == 0
    assert result["tau_chain"] > 1.1, "nothing was accepted: the test says nothing"


def test_what_does_not_fit_is_refused_in_one_line(qwen3, tmp_path):
    with pytest.raises(ValueError, match="outside the target's layers"):
        new_head(qwen3, TrainSettings(kept=(1, 9)), toys.MASK)
    with pytest.raises(ValueError, match="block must be a whole number of at least 2, got 1"):
        TrainSettings(block=1)
    with pytest.raises(ValueError, match="no task files"):
        split_tasks(tmp_path, 2)
    with pytest.raises(ValueError, match="words has 2 prompts, 2 of each task are held out"):
        split_tasks(write_text_task(tmp_path / "few", 2), 2)
    with pytest.raises(ValueError, match="0 prompts to train on"):
        train_head(qwen3, None, [], text_prompts(1), tmp_path / "none", SMALL)
    assert not (tmp_path / "none").exists()


def test_a_checkpoint_of_another_run_is_refused(qwen3, tmp_path):
    held_out = text_prompts(1)
    train_head(qwen3, None, text_prompts(4), held_out, tmp_path / "run", SMALL, report=lambda line: None)
    other = TrainSettings(**{**vars(SMALL), "seed": 7})
    with pytest.raises(ValueError, match="checkpoint of another run: seed 0 there, 7 here"):
        train_head(qwen3, None, text_prompts(4), held_out, tmp_path / "run", other, report=lambda line: None)


def test_layers_and_mask_token_are_chosen_by_the_target(qwen3, qwen3_vl):
    assert spread_layers(qwen3) == (0, 1, 2)
    assert min(spread_layers(qwen3_vl)) >= len(qwen3_vl.config.vision_config.deepstack_visual_indexes)
    assert choose_mask_token(qwen3, toys.tokenizer()) == toys.VOCAB - 1, "a padded row, which no text uses"
    assert choose_mask_token(qwen3, None) == 0


def _float(example: Example) -> Example:
    return Example(example.ids, example.start, example.states.float())


LEAST = {
    "block": 2, "layers": 1, "steps": 1, "batch": 1, "anchors": 1, "every": 1, "max_new_tokens": 2, "warmup": 0,
    "patience": 0, "budget": 1, "seed": 0, "decay": 0, "scout": 0, "clip": 0, "minutes": 0, "reveal": 0,
}  # fmt: skip


def test_every_setting_has_a_least_value_or_names_its_choices():
    names = {item.name for item in fields(TrainSettings)}
    assert names == {*LEAST, "rate", "matrix_rate", "kept", "precision"}


@pytest.mark.parametrize("name", [*LEAST, "rate", "matrix_rate"])
def test_settings_below_what_makes_sense_are_refused_by_name(name):
    TrainSettings(**{name: LEAST.get(name, 1e-6)})
    for wrong in (LEAST.get(name, 1) - 1, float("nan")):
        with pytest.raises(ValueError, match=f"^{name} "):
            TrainSettings(**{name: wrong})


WORDS = st.sampled_from([True, None, "x", "3", (), (1,), (-1,), (0.5,), float("nan"), math.inf, -math.inf, 1e300])
VALUES = st.one_of(WORDS, st.integers(-2, 6), st.floats(-2, 6), st.sampled_from(["auto", "float16", "float32"]))


@settings(max_examples=150)
@given(st.sampled_from([item.name for item in fields(TrainSettings)]), VALUES)
def test_a_setting_trains_or_is_refused_by_name(qwen3, examples, name, value):
    """Whatever stands in a field: one line that names it before anything loads, or a step with a finite loss."""
    try:
        made = replace(SMALL, **{name: value})
    except ValueError as error:
        assert str(error).startswith(f"{name} ") and "\n" not in str(error)
        return
    if name in ("block", "layers", "kept"):
        return  # the head's shape is the target's to judge: see new_head
    run = HeadRun(new_head(qwen3, replace(made, layers=1), toys.MASK), qwen3, made, toys.MASK, {})
    assert math.isfinite(run.advance(examples))
    rates = [group["lr"] for optimiser in run.optimisers for group in optimiser.param_groups]
    assert all(0 < rate < math.inf for rate in rates) and 0 < run.progress <= 1


def test_nought_means_none_for_warmup_decay_clip_and_minutes(qwen3, examples):
    settings = TrainSettings(
        block=6,
        layers=1,
        kept=(0,),
        steps=3,
        batch=4,
        anchors=2,
        warmup=0,
        decay=0,
        clip=0,
        minutes=0,
        precision="float32",
    )
    few = [Example(e.ids, e.start, e.states[:, :32]) for e in examples]
    run = HeadRun(new_head(qwen3, settings, toys.MASK), qwen3, settings, toys.MASK, {})
    losses = [run.advance(few) for _ in range(3)]
    assert all(map(math.isfinite, losses)) and run.progress == 1


def test_held_out_answers_of_one_token_leave_the_loss_to_judge(qwen3, tmp_path, monkeypatch):
    for module in ("loop", "acceptance"):
        none = lambda *args: [(torch.zeros(4, dtype=torch.long), [])]  # noqa: E731
        monkeypatch.setattr(f"glance.train.{module}.decode_rounds", none)
    said = []
    result = train_head(qwen3, None, text_prompts(6), text_prompts(2), tmp_path, SMALL, report=said.append)
    assert math.isnan(result["tau_chain"]) and result["rounds"] == 0
    assert "tau_chain -" in acceptance_text(result) and "nan" not in acceptance_text(result)
    assert any("no whole round in the held-out answers" in line for line in said)
    assert (tmp_path / "model.safetensors").is_file()
    for name in ("acceptance.json", "log.jsonl"):
        assert "NaN" not in (tmp_path / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("changed", ["prompts", "held out"])
def test_other_data_of_equal_count_is_another_run(changed, qwen3, tmp_path, monkeypatch):
    train_head(qwen3, None, text_prompts(6), text_prompts(2), tmp_path, SMALL, report=lambda line: None)
    others = [{"input_ids": toys.text_prompt(7, seed=90 + i)} for i in range(6)]
    prompts, held_out = (others, text_prompts(2)) if changed == "prompts" else (text_prompts(6), others[:2])
    monkeypatch.setattr(training, "learn_from", lambda *args: pytest.fail("the target was asked first"))
    with pytest.raises(ValueError, match=f"{changed.replace(' ', '_')} '.*' there, '.*' here"):
        train_head(qwen3, None, prompts, held_out, tmp_path, SMALL, report=lambda line: None)


def test_the_precision_of_a_run_is_recorded_and_another_is_another_run(qwen3, tmp_path, monkeypatch):
    settings = replace(SMALL, precision="auto")
    for choice in ("float32", "bfloat16"):
        monkeypatch.setattr(
            training, "training_precision", lambda asked, device, c=choice: c if asked == "auto" else asked
        )
        if choice == "float32":
            result = train_head(
                qwen3, None, text_prompts(6), text_prompts(2), tmp_path, settings, report=lambda line: None
            )
            assert result["precision"] == "float32"
            config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
            assert config["dflash_config"]["trained_in"] == "float32"
            checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
            assert checkpoint["owner"]["precision"] == "float32"
            continue
        with pytest.raises(ValueError, match="precision 'float32' there, 'bfloat16' here"):
            train_head(qwen3, None, text_prompts(6), text_prompts(2), tmp_path, settings, report=lambda line: None)


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_its_checkpoint(qwen3, tmp_path, monkeypatch):
    steps = iter([2.0] * 6 + [math.nan])

    def advance(run, examples):
        run.step += 1
        return next(steps)

    monkeypatch.setattr(HeadRun, "advance", advance)
    with pytest.raises(
        ValueError, match=r"^step 7: the loss is nan; lower rate and matrix_rate \(now 0.002 and 0.003\)"
    ):
        train_head(qwen3, None, text_prompts(6), text_prompts(2), tmp_path, SMALL, report=lambda line: None)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 6


@pytest.mark.parametrize("held_out", [0, -1])
def test_none_held_out_is_refused(tmp_path, held_out):
    write_text_task(tmp_path / "data", 6)
    with pytest.raises(ValueError, match=f"held-out must be at least 1 prompt of each task, got {held_out}"):
        split_tasks(tmp_path / "data", held_out)


def test_plain_attention_leaves_the_table_of_attentions_as_it_found_it(monkeypatch):
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})
    with plain_attention(), plain_attention():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not stock
    assert not ALL_ATTENTION_FUNCTIONS._local_mapping
    own = lambda *args: None  # noqa: E731
    ALL_ATTENTION_FUNCTIONS["sdpa"] = own
    with plain_attention():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not own
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
