"""The command: flags of the paper's README, help for every part, exit codes, and a doctor that finds what is planted."""

import json
import subprocess
import sys

import pytest
import torch
import toy_run

from glance import cli, doctor
from glance.run.experiment import Plan, load_pair

COMMANDS = ("reproduce", "main-table", "audit", "fit-law", "doctor", "train-head", "bench", "pocket")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0 and "usage: glance" in capsys.readouterr().out


def test_the_flags_of_the_papers_readme_are_there(capsys):
    wanted = "--target --head --data --tasks --n --budget --round-log --out --chain --branch-k --max-new --max-pixels"
    for command, flags in {
        "main-table": f"{wanted} --temperature --dtype --device --resume",
        "audit": "--target --head --data --n --out --dtype --generate-n",
        "fit-law": "--out --cap",
        "reproduce": "--profile -p --only --quick --run",
    }.items():
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        text = capsys.readouterr().out
        assert [flag for flag in flags.split() if flag not in text] == []


def test_python_m_glance_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "glance", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and all(command in done.stdout for command in COMMANDS)


def test_bad_input_is_one_line_and_code_2(made, tmp_path, capsys):
    command = [
        "main-table",
        *toy_run.flags(made),
    ]
    assert cli.main([*command, "--n", "50", "--run-folder", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "51 prompts were asked for" in error and "\n" not in error
    assert cli.main(["main-table", "--data", str(tmp_path / "nowhere")]) == 2
    assert cli.main(["fit-law", str(tmp_path / "none.jsonl")]) == 2
    assert cli.main(["reproduce", "-p", "buget", "3"]) == 2


def test_main_table_then_fit_law(made, tmp_path, capsys):
    command = [
        "main-table",
        *toy_run.flags(made),
    ]
    command += ["--n", "3", "--max-new", "16", "--chain", "--tasks", "docvqa", "--run-folder", str(tmp_path / "run")]
    assert cli.main([*command, "--out", str(tmp_path / "table.json")]) == 0
    rows = (tmp_path / "run" / "prompts.jsonl").read_bytes()
    for again in (command, [*command, "--resume"]):
        assert cli.main(again) == 0, "the same command resumes"
        assert (tmp_path / "run" / "prompts.jsonl").read_bytes() == rows
    assert cli.main([*command, "--budget", "7"]) == 2, "another run is not mixed with by accident"
    assert {row["arm"] for row in json.loads((tmp_path / "table.json").read_text())["rows"]} == {"ar", "chain", "tree"}
    code = cli.main(
        ["fit-law", str(tmp_path / "run" / "rounds.jsonl"), "--cap", "5", "--out", str(tmp_path / "law.json")]
    )
    assert code in (0, 2), "a random head may accept too little for a fit; then one line says so"
    capsys.readouterr()


def test_the_doctor_is_content_with_this_machine(capsys):
    levels = {finding.what: finding.level for finding in [*doctor.check_versions(), *doctor.check_exactness()]}
    assert (
        levels["torch"]
        == levels["transformers"]
        == levels["dflash"]
        == levels["exactness"]
        == levels["tree mask"]
        == "ok"
    )


def test_the_doctor_sees_a_broken_mask(monkeypatch):
    from glance.verify import VerifyPass

    honest = VerifyPass.mask_of

    def blank(self, tree, length):
        mask = honest(self, tree, length)
        return None if mask is None else torch.zeros_like(mask)

    monkeypatch.setattr(VerifyPass, "mask_of", blank)
    levels = {finding.what: finding.level for finding in doctor.check_exactness()}
    assert levels["tree mask"] == "fail"


def test_the_doctor_lists_causes_for_a_head_that_accepts_little(made):
    pair = load_pair(str(made / "target"), str(made / "head"), dtype="float32", device="cpu")
    plan = Plan(str(made / "data"), n=1, max_new_tokens=12)
    found = list(doctor.check_pair_acceptance(pair, plan, plan.prompts()))
    assert {"tau", "layers", "template", "positions", "pair"} <= {finding.what for finding in found}
    assert not any(finding.level == "fail" for finding in found)


def test_the_doctor_needs_both_or_neither(capsys):
    assert cli.main(["doctor", "--target", "x"]) == 2


def test_answers_that_never_start_a_round_are_a_dash(made, tmp_path, capsys, monkeypatch):
    from glance import pipeline
    from glance.files import write_json
    from glance.report import claims, results

    command = [
        "main-table",
        *toy_run.flags(made),
    ]
    command += ["--n", "2", "--max-new", "1", "--chain", "--run-folder", str(tmp_path / "run")]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "nan" not in printed and "tau -" in printed
    table = json.loads((tmp_path / "run" / "main_table.json").read_text())
    assert all(row["tau"] is None for row in table["rows"] if row["arm"] != "ar")
    write_json(tmp_path / "run" / "audit.json", {"verdict": "exact", "dtype": "float32", "n_prompts": 4})
    write_json(tmp_path / "run" / "law.json", {"laws": {}, "pooled": {"b1": None}})
    monkeypatch.setattr(pipeline, "RUNS", tmp_path)
    monkeypatch.setattr(results, "Results", lambda folder: None)
    monkeypatch.setattr(claims, "ledger", lambda results: [])
    monkeypatch.setattr(claims, "count", lambda rows: "")
    said = pipeline.summary("run")
    assert "tau     -" in said and "nan" not in said
