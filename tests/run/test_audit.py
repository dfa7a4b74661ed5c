"""The audit: exact is exact, planted faults are seen, and near-ties are told from faults by a margin that was measured."""

import json

import pytest
import torch
import toy_run

from glance import cli
from glance.decode import decode
from glance.run.audit import audit, max_ulp, oracle_logits, tree_block_logits, verdict
from glance.run.experiment import Plan, decode_arm, load_pair, prepare
from glance.run.faults import FAULTS, KnownText
from glance.session import Settings


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    toy_run.write_pair(folder)
    toy_run.write_tasks(folder / "data")
    return folder


@pytest.fixture(scope="module")
def plan(made):
    return Plan(str(made / "data"), n=4, max_new_tokens=32, budget=63, branch_k=8)


@pytest.fixture(scope="module")
def pair(made):
    return load_pair(str(made / "target"), str(made / "head"), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def report(pair, plan):
    return audit(pair, plan, plan.prompts(), say=lambda line: None)


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
        broken = audit(pair, plan, plan.prompts(), say=lambda line: None, faults=False)
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
    "faults": [],
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "exact"),
        ({"divergences": [{"kind": "near-tie"}]}, "near-ties only"),
        ({"divergences": [{"kind": "near-tie"}, {"kind": "fault"}]}, "fault"),
        ({"faults": [{"caught": False}]}, "fault"),
        ({"dtype": "float32"}, "fault"),
        ({"controls": BASE["controls"] | {"oracle_repeat": {"identical": 1, "of": 2}}}, "fault"),
    ],
)
def test_the_verdicts_logic(changes, expected):
    assert verdict(BASE | changes) == expected


def test_a_bf16_divergence_is_judged_by_its_margin(made, plan, monkeypatch):
    low = load_pair(str(made / "target"), str(made / "head"), dtype="bfloat16", device="cpu")
    from glance.run import audit as module

    honest = module.decode_arm

    def planted(arm, *args):
        tokens, stats = honest(arm, *args)
        return ([*tokens[:-1], (tokens[-1] + 1) % 200], stats) if arm == "chain" else (tokens, stats)

    monkeypatch.setattr(module, "decode_arm", planted)
    rows = audit(low, plan, plan.prompts(), say=lambda line: None, faults=False)
    assert {row["kind"] for row in rows["divergences"] if row["arm"] == "chain"} <= {"fault", "near-tie"}
    for row in rows["divergences"]:
        assert (row["kind"] == "near-tie") == (row["margin"] <= rows["noise"])


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
    command = ["audit", "--target", str(made / "target"), "--head", str(made / "head"), "--data", str(made / "data")]
    command += ["--n", "4", "--max-new", "32", "--tasks", "docvqa"]
    assert cli.main([*command, "--out", str(tmp_path / "good.json")]) == 0
    with FAULTS["delta forced to 0"][0](None):
        assert cli.main([*command, "--out", str(tmp_path / "bad.json")]) == 1
    assert json.loads((tmp_path / "bad.json").read_text())["verdict"] == "fault"
