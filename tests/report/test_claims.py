"""Each claim's rule on made-up inputs for each verdict, and the ledger as a whole."""

import json
import shutil

import numpy as np
import pytest
import synthetic_run

from glance.files import write_json
from glance.report import claims
from glance.report.claims import CLAIMS, FAILS, HOLDS, UNMEASURED, judge, ledger
from glance.report.results import Missing, Results, paper_rows
from glance.tasks import TASKS

ASCENDING = dict(zip(TASKS, (3.0, 3.5, 4.0, 5.0, 6.0), strict=True))
SLOPES = dict(zip(TASKS, (0.8, 1.2, 1.9, 2.6, 3.5), strict=True))


def made_up(tmp_path, taus=None, speeds=None, law=None, audit=None, sweep=None, equal=None, n=6, tasks=TASKS):
    """Return results with these taus and speedups over ar, by arm a number or one per task; the rest stays missing."""
    results = Results(tmp_path)
    results.__dict__["prompts"] = _rows(taus or {}, speeds or {}, equal or {}, n, tasks)
    for name, value in (("law", law), ("audit", audit), ("sweep", sweep)):
        if value is not None:
            results.__dict__[name] = value
    return results


def _rows(taus, speeds, equal, n, tasks):
    rng, rows = np.random.default_rng(0), []
    arms = dict.fromkeys(["ar", *taus, *speeds])
    for arm in arms:
        for task in tasks:
            tau, speed = (side.get(arm, 1.0) for side in (taus, speeds))
            tau, speed = (x[task] if isinstance(x, dict) else x for x in (tau, speed))
            for prompt in range(1, n + 1):
                n_tokens = 100 + 5 * prompt
                rounds = max(1, round((n_tokens - 1) / tau * rng.normal(1, 0.01)))
                ms = 4.0 / speed * rng.normal(1, 0.01)
                row = {"arm": arm, "task": task, "prompt": prompt, "n_tokens": n_tokens, "rounds": rounds}
                rows.append(row | {"ms_per_token": ms, "matches_ar": equal.get(arm, True)})
    return rows


def laws(slopes=SLOPES, holds=True):
    entries = {t: {"b1": b, "b1_ci": [b - 0.2, b + 0.2], "holds": holds} for t, b in slopes.items()}
    return {"cap": 15, "laws": entries, "pooled": {"b1": 1.0, "b1_ci": [0.9, 1.1], "holds": holds}}


def audited(same=30, verdict="exact", dtype="float32"):
    return {
        "verdict": verdict,
        "dtype": dtype,
        "arms": {"chain": {"identical": 30, "of": 30}, "tree": {"identical": same, "of": 30}},
    }


def reversed_over_tasks(values):
    return dict(zip(TASKS, reversed(values.values()), strict=True))


def nested(tmp_path, name, value):
    """Put a law, or prompts' rows, into a run inside the run."""
    (tmp_path / name).mkdir()
    if name == "second-target":
        write_json(tmp_path / name / "law.json", value)
    else:
        text = "".join(json.dumps(_whole(row)) + "\n" for row in _rows(value, {}, {}, 6, TASKS))
        (tmp_path / name / "prompts.jsonl").write_text(text)
    return made_up(tmp_path)


def _whole(row):
    from glance.records import PROMPT_FIELDS

    return {**dict.fromkeys(PROMPT_FIELDS, 0), **row, "warmup": False}


def swept(tmp_path, at31, at63):
    return made_up(tmp_path, sweep=made_up(tmp_path, speeds={"tree-15": 1.5, "tree-31": at31, "tree-63": at63}))


def only_free(value, other):
    return {task: value if task in claims.FREE else other for task in TASKS}


CASES = [  # the claim's first words, a maker of results from a folder, the verdict
    ("output equals", lambda f: made_up(f, audit=audited()), HOLDS),
    ("output equals", lambda f: made_up(f, audit=audited(29, "fault")), FAILS),
    ("output equals", lambda f: made_up(f, audit=audited(30, "fault")), FAILS),  # a control or a planted fault failed
    ("output equals", lambda f: made_up(f, audit=audited(dtype="bfloat16")), UNMEASURED),
    ("output equals", lambda f: made_up(f, audit=audited(30, "not exercised")), UNMEASURED),
    ("output equals", made_up, UNMEASURED),
    ("accepted length is ordered", lambda f: made_up(f, {"tree": ASCENDING}), HOLDS),
    ("accepted length is ordered", lambda f: made_up(f, {"tree": reversed_over_tasks(ASCENDING)}), FAILS),
    ("accepted length is ordered", lambda f: made_up(f, {"tree": 4.0}), FAILS),  # nothing between them but noise
    ("accepted length is ordered", lambda f: made_up(f, {"tree": ASCENDING}, tasks=TASKS[:4]), UNMEASURED),
    ("accepted length is ordered", lambda f: made_up(f, {"tree": ASCENDING}, n=2), UNMEASURED),
    ("faster than autoregression", lambda f: made_up(f, speeds={"tree": 1.5}), HOLDS),
    ("faster than autoregression", lambda f: made_up(f, speeds={"tree": only_free(0.9, 1.5)}), HOLDS),
    ("faster than autoregression", lambda f: made_up(f, speeds={"tree": only_free(1.5, 0.9)}), FAILS),
    ("faster than autoregression", lambda f: made_up(f, speeds={"tree": 1.001}), FAILS),  # 1 is inside the interval
    ("faster than autoregression", lambda f: made_up(f, speeds={"chain": 1.5}), UNMEASURED),
    ("faster than the production", lambda f: made_up(f, speeds={"tree": 1.6, "eagle3": 1.4}), HOLDS),
    ("faster than the production", lambda f: made_up(f, speeds={"tree": 1.4, "eagle3": 1.6}), FAILS),
    ("faster than the production", lambda f: made_up(f, speeds={"tree": 1.6}), UNMEASURED),
    ("free-running", lambda f: made_up(f, speeds={"tree": 1.4, "eagle3": only_free(1.6, 1.2)}), HOLDS),
    ("free-running", lambda f: made_up(f, speeds={"tree": 1.4, "eagle3": 1.2}), FAILS),
    ("free-running", lambda f: made_up(f, speeds={"tree": 1.4}), UNMEASURED),
    ("the wide tree", lambda f: made_up(f, {"tree": 3.0, "chain": 2.0}), HOLDS),
    ("the wide tree", lambda f: made_up(f, {"tree": ASCENDING, "chain": 2.0}), FAILS),  # far from constant
    ("the wide tree", lambda f: made_up(f, {"tree": 2.0, "chain": 2.0}), FAILS),
    ("the wide tree", lambda f: made_up(f, {"tree": 2.0}), UNMEASURED),
    ("speedup rises", lambda f: swept(f, 2.0, 2.05), HOLDS),
    ("speedup rises", lambda f: swept(f, 2.0, 1.4), FAILS),  # it falls
    ("speedup rises", lambda f: swept(f, 1.4, 1.4), FAILS),
    ("speedup rises", lambda f: swept(f, 1.6, 2.4), FAILS),  # it goes on rising
    ("speedup rises", lambda f: made_up(f, sweep=made_up(f, speeds={"tree-15": 1.5})), UNMEASURED),
    ("accepted length falls", lambda f: made_up(f, law=laws()), HOLDS),
    ("accepted length falls", lambda f: made_up(f, law=laws(reversed_over_tasks(SLOPES))), FAILS),
    ("accepted length falls", lambda f: made_up(f, law=laws(holds=False)), FAILS),
    (
        "accepted length falls",
        lambda f: made_up(f, law=laws(dict(zip(TASKS, np.linspace(1, 1.2, 5), strict=True)))),
        FAILS,
    ),
    ("accepted length falls", lambda f: made_up(f, law=laws({"docvqa": 1.0})), UNMEASURED),
    ("the law transfers", lambda f: nested(f, "second-target", laws()), HOLDS),
    ("the law transfers", lambda f: nested(f, "second-target", laws(holds=False)), FAILS),
    ("the law transfers", made_up, UNMEASURED),
    ("block head", lambda f: made_up(f, {"tree": 4.0, "ar-head": 1.6}), HOLDS),
    ("block head", lambda f: made_up(f, {"tree": 1.5, "ar-head": 1.6}), FAILS),
    ("block head", lambda f: made_up(f, {"tree": 4.0}), UNMEASURED),
    ("the matched-training", lambda f: nested(f, "second-corpus", {"tree": 2.0, "ar-head": 1.3}), HOLDS),
    ("the matched-training", lambda f: nested(f, "second-corpus", {"tree": 1.3, "ar-head": 2.0}), FAILS),
    ("the matched-training", made_up, UNMEASURED),
    ("a two-model", lambda f: made_up(f, speeds={"two-model": 0.6}), HOLDS),
    ("a two-model", lambda f: made_up(f, speeds={"two-model": only_free(0.6, 1.3)}), FAILS),
    ("a two-model", made_up, UNMEASURED),
    ("relaxed", lambda f: made_up(f, {"relaxed-a": 3.0}, equal={"relaxed-a": False}), HOLDS),
    ("relaxed", lambda f: made_up(f, {"relaxed-a": 3.0}), FAILS),
    ("relaxed", made_up, UNMEASURED),
    ("fused states", lambda f: made_up(f, {"tree": 4.0, "text-only": only_free(3.8, 3.0)}), HOLDS),
    ("fused states", lambda f: made_up(f, {"tree": 4.0, "text-only": only_free(3.0, 3.8)}), FAILS),
    ("fused states", lambda f: made_up(f, {"tree": 4.0, "text-only": 4.4}), FAILS),
    ("fused states", lambda f: made_up(f, {"tree": 4.0}), UNMEASURED),
]


@pytest.mark.parametrize(("words", "make", "verdict"), CASES, ids=[f"{i}-{w}-{v}" for i, (w, _, v) in enumerate(CASES)])
def test_rule(words, make, verdict, tmp_path):
    (claim,) = (claim for claim in CLAIMS if claim.text.startswith(words))
    found, measured = judge(claim, make(tmp_path))
    assert found == verdict
    assert measured and "\n" not in measured
    if verdict == UNMEASURED:
        assert str(tmp_path) not in measured


def test_every_claim_has_a_case_for_each_verdict():
    for claim in CLAIMS:
        assert {v for words, _, v in CASES if claim.text.startswith(words)} == {HOLDS, FAILS, UNMEASURED}, claim.text


def test_every_row_of_the_paper_has_one_rule_and_every_rule_a_row():
    for row in paper_rows("claims"):
        assert sum(row["claim"].startswith(claim.text) for claim in CLAIMS) == 1, row["claim"]
    assert len(CLAIMS) == len(paper_rows("claims"))


def test_a_row_without_a_rule_is_an_error(tmp_path, monkeypatch):
    rows = paper_rows("claims")
    monkeypatch.setattr(claims, "paper_rows", lambda name: [*rows[1:], {**rows[0], "claim": "it also makes coffee"}])
    with pytest.raises(ValueError, match="it also makes coffee"):
        ledger(made_up(tmp_path))
    monkeypatch.setattr(claims, "paper_rows", lambda name: rows[1:])
    with pytest.raises(ValueError, match="13 rows"):
        ledger(made_up(tmp_path))


def test_a_rule_that_breaks_is_not_a_verdict(tmp_path):
    def broken(results):
        raise KeyError("b1")

    with pytest.raises(KeyError):
        judge(claims.Claim("x", "y", broken), made_up(tmp_path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from glance.report.fit import fit_law

    folder = synthetic_run.write_run(tmp_path_factory.mktemp("made-up") / "run", n=9)
    fit_law(folder / "rounds.jsonl", n_boot=100, out=folder / "law.json")
    return folder


def test_ledger_shows_v1_and_mentions_v2(folder, tmp_path):
    path = claims.write_ledger(Results(folder), tmp_path)
    text = path.read_text()
    assert path.read_bytes() == claims.write_ledger(Results(folder), tmp_path / "again").read_bytes()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(paper_rows("claims"))
    assert len({line.count("|") for line in table}) == 1
    ordered = next(line for line in table if "ordered by grounding" in line)
    assert "2.91 < 3.32 < 3.68 < 3.93 < 4.62" in ordered and "(v1); v2 measured again: 2.92 < 3.57" in ordered
    assert "up to 2.93x (v1); v2 measured again: up to 3.05x" in text
    assert "1.45x to 1.49x on every task (v1)" in text
    assert str(folder.parent) not in text
    for entry, row in zip(ledger(Results(folder)), paper_rows("claims"), strict=True):
        assert entry.claim == row["claim"] and row["reported"] in entry.reported
        assert entry.verdict in (HOLDS, FAILS, UNMEASURED) and entry.decided


def test_a_bare_run_is_judged_as_far_as_it_goes(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    for name in ("law.json", "audit.json"):
        (tmp_path / "run" / name).unlink()
    verdicts = {entry.claim: entry for entry in ledger(Results(tmp_path / "run"))}
    assert verdicts["output equals greedy decoding on every audited prompt in fp32"].measured == (
        "the run has no audit.json: run 02-audit first"
    )
    assert sum(entry.verdict == UNMEASURED for entry in verdicts.values()) >= 8
    with pytest.raises(Missing, match=r"no main_table.json: run 01-decode first"):
        (tmp_path / "run" / "main_table.json").unlink()
        claims.write_ledger(Results(tmp_path / "run"), tmp_path)
