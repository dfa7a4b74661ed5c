"""The audit: exact is exact, planted faults are seen, and near-ties are told from faults by a margin that was measured."""

import json
from dataclasses import replace

import pytest
import torch
import toy_run
import toys
from transformers import GenerationConfig

from glance import cli
from glance.decode import decode
from glance.run import audit as module
from glance.run.audit import audit, max_ulp, oracle_logits, tree_block_logits, verdict
from glance.run.control import generate_text
from glance.run.experiment import Pair, Plan, decode_arm, decode_tasks, load_pair, prepare
from glance.run.faults import DELTA, FAULTS, NEEDS, KnownText
from glance.session import Settings
from glance.vl import VisionPositions


def quiet(line):
    """Say nothing."""


@pytest.fixture(scope="module")
def plan(made):
    return Plan(str(made / "data"), n=4, max_new_tokens=32, budget=63, branch_k=8)


@pytest.fixture(scope="module")
def pair(made):
    return load_pair(str(made / "target"), str(made / "head"), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def report(pair, plan):
    return audit(pair, plan, plan.prompts(), say=quiet)


def test_fp32_is_exact_with_every_control(report):
    assert report["verdict"] == "exact" and report["divergences"] == []
    assert all(count == {"identical": 10, "of": 10} for count in report["arms"].values())
    assert report["controls"]["oracle_repeat"] == {"identical": 10, "of": 10}
    assert report["controls"]["block_pass"]["argmax_changed"] == 0
    assert 0 < report["noise"] < 1e-3, "packed rows differ by rounding alone"
    assert report["provenance"]["versions"]["torch"] and json.dumps(report["arms"])


def test_row_invariance_lists_every_packing(report):
    rows = {(row["rows"], row["masked"]) for row in report["row_invariance"]}
    assert rows == {(1, False), *((n, masked) for n in (2, 8, 16, 64) for masked in (False, True))}
    assert report["row_invariance"][0]["bitwise_equal"] and report["row_invariance"][0]["max_ulp"] == 0
    assert all(row["max_abs"] < 1e-3 for row in report["row_invariance"])


def test_planted_faults_are_seen_and_a_wrong_layer_is_not_one(report):
    assert {row["fault"]: row["caught"] for row in report["faults"]} == dict.fromkeys(FAULTS, True)
    assert [row["diverged"] > 0 for row in report["faults"]] == [must for _, must in FAULTS.values()]


@pytest.mark.parametrize("name", [name for name, (_, must_fail) in FAULTS.items() if must_fail])
def test_an_audit_under_a_fault_fails(pair, plan, name):
    with FAULTS[name][0](pair.head):
        broken = audit(pair, plan, plan.prompts(), say=quiet, faults=False)
    assert broken["verdict"] == "fault"
    row = broken["divergences"][0]
    assert row["kind"] == "fault" and row["sha256_greedy"] != row["sha256_other"]
    assert row["greedy_id"] != row["other_id"] and row["margin"] >= 0


def test_a_drafter_that_knows_the_text_is_exact_and_scatters_its_paths(pair, plan):
    ids, positions = prepare(pair, plan.prompts()[0], plan)
    greedy = decode_arm("ar", pair, ids, positions, plan)[0]
    drafter = KnownText(greedy, ids.shape[1], 31, 4, 5, pair.target.get_input_embeddings().weight.shape[0])
    out, stats = decode(drafter, pair.target, ids, Settings(plan.max_new_tokens), positions)
    assert out[0, ids.shape[1] :].tolist() == greedy and stats.tau > 2
    assert any(round.path != list(range(len(round.path))) for round in stats.rounds), "rows of a path must be gathered"


def test_faults_leave_no_trace(pair, plan):
    ids, positions = prepare(pair, plan.prompts()[0], plan)
    greedy = decode_arm("ar", pair, ids, positions, plan)[0]
    for plant, _ in FAULTS.values():
        with plant(pair.head):
            pass
    assert decode_arm("tree", pair, ids, positions, plan)[0] == greedy


def test_block_passes_meet_the_oracles_logits(pair, plan):
    ids, positions = prepare(pair, plan.prompts()[1], plan)
    greedy = decode_arm("ar", pair, ids, positions, plan)[0]
    alone, packed = oracle_logits(pair, ids, positions, greedy), tree_block_logits(pair, ids, positions, greedy, plan)
    assert alone.shape == packed.shape and alone.argmax(-1).tolist() == greedy
    torch.testing.assert_close(alone, packed, atol=1e-3, rtol=1e-3)


BASE = {
    "dtype": "bfloat16",
    "controls": {"oracle_repeat": {"identical": 2, "of": 2}, "block_pass": {"argmax_changed": 3}},
    "divergences": [],
    "generate": {"divergences": []},
    "faults": [],
}
OPEN = {"fault": "mask shifted by one", "caught": None, "applies": True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "exact"),
        ({"divergences": [{"kind": "near-tie"}]}, "near-ties only"),
        ({"divergences": [{"kind": "near-tie"}, {"kind": "fault"}]}, "fault"),
        ({"faults": [{"fault": "mask shifted by one", "caught": False}]}, "fault"),
        ({"faults": [OPEN]}, "not exercised"),
        ({"faults": [OPEN | {"applies": False}]}, "exact"),
        ({"faults": [OPEN], "divergences": [{"kind": "fault"}]}, "fault"),
        ({"generate": {"divergences": [{"kind": "fault"}]}}, "fault"),
        ({"generate": {"divergences": [{"kind": "near-tie"}]}}, "near-ties only"),
        ({"dtype": "float32"}, "fault"),
        ({"controls": BASE["controls"] | {"oracle_repeat": {"identical": 1, "of": 2}}}, "fault"),
    ],
)
def test_the_verdicts_logic(changes, expected):
    assert verdict(BASE | changes) == expected


@pytest.mark.parametrize("kind", ["fault", "near-tie"])
def test_a_bf16_divergence_is_judged_by_its_margin(made, monkeypatch, kind):
    """One token of the chain is wrong, where the target is surest; the noise is as measured, or made wide."""
    low = load_pair(str(made / "target"), str(made / "head"), dtype="bfloat16", device="cpu")
    plan = Plan(str(made / "data"), tasks=("docvqa",), n=1, max_new_tokens=12, budget=15)
    prompt = plan.prompts()[1]
    ids, positions = prepare(low, prompt, plan)
    greedy = decode_arm("ar", low, ids, positions, plan)[0]
    top = oracle_logits(low, ids, positions, greedy).topk(2).values
    at = int((top[:, 0] - top[:, 1]).argmax())
    wrong = [*greedy[:at], (greedy[at] + 1) % 200, *greedy[at + 1 :]]
    monkeypatch.setattr(module, "decode_arm", lambda arm, *_: (wrong if arm == "chain" else greedy, None))
    if kind == "near-tie":
        honest = module.causal_block_logits

        def noisy(pair, ids, positions, text, rows):
            logits = honest(pair, ids, positions, text, rows)
            return logits.sort().values if rows > 1 else logits  # margins of packed rows move by more than any margin

        monkeypatch.setattr(module, "causal_block_logits", noisy)
    found = audit(low, plan, [prompt], say=quiet, faults=False, generate_n=0)
    (row,) = found["divergences"]
    assert (row["kind"], row["arm"], row["index"]) == (kind, "chain", at)
    assert (row["margin"] <= found["noise"]) == (kind == "near-tie")
    assert found["verdict"] == {"fault": "fault", "near-tie": "near-ties only"}[kind]
    said = "\n".join(module.lines(found))
    assert repr(row["greedy_text"]) in said and repr(row["other_text"]) in said, "the decoded text is shown"


def test_tf32_is_refused(pair, plan, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with pytest.raises(ValueError, match="TF32 is on"):
        audit(pair, plan, plan.prompts())


def test_ulp_counts_representable_steps():
    one = torch.tensor([1.0, -1.0, 0.0])
    assert max_ulp(one, one) == 0
    assert max_ulp(one, torch.nextafter(one, torch.tensor(9.0))) == 1
    assert max_ulp(torch.tensor([-0.0]), torch.tensor([0.0])) <= 1


def test_the_command_writes_its_report_and_fails_on_a_fault(made, tmp_path, monkeypatch):
    command = [
        "audit",
        *toy_run.flags(made),
    ]
    command += ["--n", "4", "--max-new", "32", "--tasks", "docvqa"]
    assert cli.main([*command, "--out", str(tmp_path / "good.json")]) == 0
    with FAULTS["delta forced to 0"][0](None):
        assert cli.main([*command, "--out", str(tmp_path / "bad.json")]) == 1
    assert json.loads((tmp_path / "bad.json").read_text())["verdict"] == "fault"


def text_pair(family="qwen3", seed=0):
    target = toys.text_target(family, seed=seed)
    return Pair(target, toys.tokenizer(), toys.block_head(target), {"target": "text", "head": "toy"})


def write_text_tasks(folder):
    folder.mkdir()
    rows = [json.dumps({"prompt": "word " * (i + 1)}) + "\n" for i in range(3)]
    (folder / "caption.jsonl").write_text("".join(rows))
    return folder


@pytest.mark.parametrize("kind", ["text", "vl"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 12, 40])
def test_planted_faults_are_seen_whenever_they_can_show(made, pair, tmp_path, kind, tokens):
    """However short the texts, an honest decoder is no fault; what was planted was seen, and long texts plant all."""
    if kind == "text":
        pair = text_pair()
    data = write_text_tasks(tmp_path / "data") if kind == "text" else made / "data"
    plan = Plan(str(data), n=2, max_new_tokens=tokens, budget=15, branch_k=4)
    prompts = [prompt for prompt in plan.prompts() if prompt.index]
    report = audit(pair, plan, prompts, say=quiet)
    faults = {row["fault"]: row for row in report["faults"]}
    assert all(row["caught"] is not False for row in faults.values())
    open_ = [row for row in faults.values() if row["caught"] is None and row["applies"]]
    assert report["verdict"] == ("not exercised" if open_ else "exact")
    assert all(row["why"] for row in faults.values() if row["caught"] is None)
    if kind == "text":
        assert not faults[DELTA]["applies"] and faults[DELTA]["of"] == 0
    for name, needs in NEEDS.items():
        if tokens < needs:
            assert faults[name]["of"] == 0 and faults[name]["caught"] is None
        elif tokens == 40 and faults[name]["applies"]:
            assert faults[name]["caught"]


def test_prompts_without_images_on_a_target_that_sees_are_told_what_to_add(pair, tmp_path):
    plan = Plan(str(write_text_tasks(tmp_path / "data")), n=2, max_new_tokens=40, budget=15, branch_k=4)
    report = audit(pair, plan, plan.prompts(), say=quiet)
    assert report["verdict"] == "not exercised" and not module.failures(report)
    assert any("audit prompts with images" in line for line in module.lines(report))


def test_a_fault_that_goes_unseen_over_many_tokens_fails(pair, plan, monkeypatch):
    monkeypatch.setitem(FAULTS, "mask shifted by one", (FAULTS["wrong layer read"][0], True))
    report = audit(pair, plan, plan.prompts()[1:4], say=quiet, generate_n=0)
    assert report["verdict"] == "fault"
    assert module.failures(report) == ["planted faults did not behave as they must: mask shifted by one"]


def test_generate_sees_a_fault_that_oracle_and_arms_share(pair, plan):
    """The position adapter is common to the oracle and every arm: generate alone can tell."""
    prompts = plan.prompts()[1:4]
    arms = audit(pair, plan, prompts, say=quiet, faults=False)["generate"]["arms"]
    assert arms == {arm: {"identical": 2, "of": 2} for arm in plan.arms}
    with pytest.MonkeyPatch.context() as patch:
        honest = VisionPositions.prefill_inputs

        def plain(self, model, ids):
            inputs = honest(self, model, ids)
            flat = torch.arange(ids.shape[1])
            return {**inputs, "position_ids": flat.expand_as(inputs["position_ids"])}

        patch.setattr(VisionPositions, "prefill_inputs", plain)
        report = audit(pair, plan, prompts, say=quiet, faults=False)
    assert report["divergences"] == [] and report["verdict"] == "fault"
    assert [reason for reason in module.failures(report) if "own generate on 2 prompts" in reason]
    rows = report["generate"]["divergences"]
    assert {(row["arm"], row["kind"]) for row in rows} == {("transformers generate", "fault")}


def test_the_targets_own_rules_do_not_reach_the_control(pair, plan, monkeypatch):
    prompt = plan.prompts()[1]
    plain = generate_text(pair, prompt, plan)
    config = GenerationConfig(repetition_penalty=5.0, suppress_tokens=sorted(set(plain)))
    monkeypatch.setattr(pair.target, "generation_config", config)
    assert generate_text(pair, prompt, plan) == plain and pair.target.generation_config is config


def count_decodes(monkeypatch, stop_after=None):
    honest, seen = module.decode_arm, []

    def counted(arm, *rest):
        if len(seen) == stop_after:
            raise KeyboardInterrupt
        seen.append(arm)
        return honest(arm, *rest)

    monkeypatch.setattr(module, "decode_arm", counted)
    return seen


def test_an_interrupted_audit_goes_on_where_it_stopped(pair, plan, tmp_path, monkeypatch):
    prompts = plan.prompts()[:4]
    settings = {"say": quiet, "faults": False, "folder": tmp_path, "generate_n": 1}
    with monkeypatch.context() as patch:
        whole = audit(pair, plan, prompts, **settings)
        assert list(tmp_path.iterdir()) == [], "a finished audit leaves no progress"
        count_decodes(patch, stop_after=7)
        with pytest.raises(KeyboardInterrupt):
            audit(pair, plan, prompts, **settings)
    (left,) = tmp_path.iterdir()
    with left.open("a") as file:
        file.write('{"task": "cap')  # what a kill leaves
    with monkeypatch.context() as patch:
        seen = count_decodes(patch)
        other = replace(plan, max_new_tokens=31)
        audit(pair, other, other.prompts()[:4], **settings)
        assert len(seen) == 4 * 3, "other parameters start again"
        seen.clear()
        again = audit(pair, plan, prompts, **settings)
        assert len(seen) == 2 * 3, "two prompts were through"
    assert again == whole and list(tmp_path.iterdir()) == []


def test_the_oracles_texts_of_a_run_are_not_decoded_again(pair, plan, tmp_path, monkeypatch):
    few = replace(plan, n=1, max_new_tokens=16)
    decode_tasks(pair, few, tmp_path / "run", say=quiet)
    settings = {"say": quiet, "faults": False, "oracle_of": tmp_path / "run", "generate_n": 0}
    seen = count_decodes(monkeypatch)
    report = audit(pair, few, few.prompts(), **settings)
    assert report["oracle"] == {"shared": 4, "decoded": 0} and "ar" not in seen
    assert report["verdict"] == "exact" and report["controls"]["oracle_repeat"] == {"identical": 4, "of": 4}
    shorter = replace(few, max_new_tokens=15)
    assert audit(pair, shorter, few.prompts(), **settings)["oracle"] == {"shared": 0, "decoded": 4}
    with FAULTS["mask shifted by one"][0](pair.head):
        broken = audit(pair, few, few.prompts(), **settings)
    assert broken["verdict"] == "fault", "an arm's text of another hash is not taken for the oracle's"
    path = tmp_path / "run" / "provenance.json"
    before = json.loads(path.read_text())
    path.write_text(json.dumps(before | {"versions": before["versions"] | {"torch": "1.0"}}))
    assert audit(pair, few, few.prompts(), **settings)["oracle"] == {"shared": 0, "decoded": 4}


@pytest.mark.parametrize(
    ("fast", "chosen"),
    [
        ({"bfloat16", "float16"}, ("bfloat16", 6)),
        ({"bfloat16"}, ("bfloat16", 6)),
        ({"float16"}, ("float16", 6)),
        (set(), ("bfloat16", 1)),
    ],
)
def test_low_precision_follows_the_machine(monkeypatch, fast, chosen):
    monkeypatch.setattr(module, "is_fast", lambda dtype, device: str(dtype).removeprefix("torch.") in fast)
    dtype, n, why = module.choose_low("cpu", 6)
    assert (dtype, n) == chosen and f"{n}" in why


def test_the_command_on_short_answers_is_not_a_fault(made, tmp_path, capsys):
    command = [
        "audit",
        *toy_run.flags(made),
    ]
    assert cli.main([*command, "--n", "1", "--max-new", "2", "--out", str(tmp_path / "report.json")]) == 0
    said = capsys.readouterr().out
    assert "verdict: not exercised" in said and "a larger --max-new" in said and "transformers' own generate" in said
