"""One log with known answers, and properties of the intervals."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glance.metrics import (
    acceptance,
    acceptance_length,
    break_even_tau,
    drop_warmup,
    geomean,
    paired_bootstrap,
    speedup,
)

HERE = {"device": "cpu", "dtype": "float32", "torch": "2.13.0", "process": "a"}


def row(arm, task, prompt, n_tokens, rounds, ms, **more):
    counts = {"n_tokens": n_tokens, "rounds": rounds, "ms_per_token": ms, "warmup": prompt == 0}
    return {**HERE, "arm": arm, "task": task, "prompt": prompt, **counts, **more}


LOG = [
    row("ar", "docvqa", 0, 11, 10, 500.0),
    row("tree", "docvqa", 0, 11, 1, 1.0),
    row("ar", "docvqa", 1, 10, 9, 10.0),
    row("tree", "docvqa", 1, 10, 3, 5.0),
    row("ar", "docvqa", 2, 31, 30, 20.0),
    row("tree", "docvqa", 2, 31, 5, 5.0),
    row("ar", "caption", 1, 21, 20, 9.0),
    row("tree", "caption", 1, 21, 10, 10.0),
]


def of(arm, task="docvqa"):
    return [r for r in LOG if r["arm"] == arm and r["task"] == task]


def test_warmup_marked_or_first_of_each_arm_and_task():
    assert [r["prompt"] for r in drop_warmup(LOG)] == [1, 1, 2, 2, 1, 1]
    assert drop_warmup(drop_warmup(LOG)) == drop_warmup(LOG)
    unmarked = [{"arm": arm, "task": task, "prompt": i} for i in range(101) for arm in "xy" for task in "pq"]
    assert len(drop_warmup(unmarked)) == 4 * 100 and {r["prompt"] for r in drop_warmup(unmarked)} == set(range(1, 101))
    assert drop_warmup([]) == []
    with pytest.raises(ValueError, match="1 of 2 rows lack 'warmup'"):
        drop_warmup([{"warmup": True}, {}])


def test_tau_pools_rounds_counts_the_bonus_and_is_one_for_autoregression():
    assert acceptance_length(of("ar")) == 1
    assert acceptance_length(of("tree")) == (9 + 30) / (3 + 5) != np.mean([9 / 3, 30 / 5])
    assert acceptance_length(r for r in of("tree")) == acceptance_length(drop_warmup(of("tree")))


def test_tau_of_a_prompt_without_rounds():
    one_token = {"n_tokens": 1, "rounds": 0}
    assert acceptance_length([one_token, {"n_tokens": 7, "rounds": 2}]) == 3
    for rows in ([one_token], []):
        with pytest.raises(ValueError, match="no round"):
            acceptance_length(rows)


def test_one_run_read_three_ways():
    read = acceptance([{"n_tokens": 32, "rounds": 10}], reach=14)
    assert read == pytest.approx({"tau": 3.1, "accepted_length": 2.1, "acceptance_rate": 0.15})
    with pytest.raises(ValueError, match="reach=0"):
        acceptance(of("tree"), reach=0)


@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=9), min_size=1, max_size=9))
def test_tau_is_the_mean_of_committed_over_all_rounds(prompts):
    rows = [{"n_tokens": 1 + sum(a + 1 for a in accepted), "rounds": len(accepted)} for accepted in prompts]
    everything = [a for accepted in prompts for a in accepted]
    assert math.isclose(acceptance_length(rows), 1 + np.mean(everything))
    assert math.isclose(acceptance(rows, reach=7)["acceptance_rate"], np.mean(everything) / 7, abs_tol=1e-12)


def test_speedup_per_task_pools_tokens_and_combines_by_geometric_mean():
    ratios = speedup(LOG, "tree")
    assert ratios == pytest.approx({"docvqa": (100 + 620) / (50 + 155), "caption": 0.9})
    assert geomean(ratios.values()) == pytest.approx(math.sqrt(ratios["docvqa"] * 0.9))
    assert speedup(LOG, "ar") == {"docvqa": 1, "caption": 1}
    assert break_even_tau(acceptance_length(of("tree", "caption")), ratios["caption"]) == pytest.approx(20 / 9)


def test_any_iterable_of_mappings_and_a_frame_by_its_records():
    pandas = pytest.importorskip("pandas", reason="the notebooks hold rows in data frames")
    lines = (json.loads(json.dumps(r)) for r in LOG)
    frame = pandas.DataFrame(LOG)
    assert speedup(lines, "tree") == speedup(frame.to_dict("records"), "tree") == speedup(LOG, "tree")
    with pytest.raises(ValueError, match="to_dict"):
        speedup(frame, "tree")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "cuda"}, "mix device.*'cpu', 'cuda'"),
        ({"dtype": "bfloat16"}, "mix dtype"),
        ({"torch": "2.12.0"}, "mix torch"),
        ({"timing": "legacy"}, "mix timing"),
        ({"process": "b"}, "different processes"),
        ({"prompt": 3}, "each prompt needs"),
        ({"prompt": 2}, "each prompt needs"),
        ({"arm": "chain"}, "each prompt needs"),
        ({"ms_per_token": 0.0}, "must be positive"),
        ({"ms_per_token": float("nan")}, "must be positive"),
    ],
)
def test_speedup_refuses_unequal_terms(change, words):
    with pytest.raises(ValueError, match=words) as caught:
        speedup([*LOG[:3], {**LOG[3], **change}, *LOG[4:]], "tree")
    assert "\n" not in str(caught.value)


def test_speedup_needs_the_device_and_the_arm():
    with pytest.raises(ValueError, match="1 of 8 rows lack 'device'"):
        speedup([{k: v for k, v in LOG[0].items() if k != "device"}, *LOG[1:]], "tree")
    with pytest.raises(ValueError, match="'eagle'"):
        speedup(LOG, "eagle")


def test_tau_of_several_arms_is_refused():
    with pytest.raises(ValueError, match=r"\['ar', 'tree'\]"):
        acceptance_length(LOG)
    with pytest.raises(ValueError, match="lack 'rounds'"):
        acceptance_length([{"n_tokens": 3}])


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_geomean_is_symmetric_in_ratios(values):
    assert math.isclose(geomean(values) * geomean(1 / v for v in values), 1)
    assert min(values) * (1 - 1e-9) <= geomean(values) <= max(values) * (1 + 1e-9)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [2.0, -1.0], [float("nan")], [float("inf")]])
def test_geomean_refuses_what_has_none(values):
    with pytest.raises(ValueError, match="positive finite"):
        geomean(values)


def test_bootstrap_covers_the_true_ratio_and_equals_scipy():
    scipy_stats = pytest.importorskip("scipy.stats", reason="scipy is the oracle of this test")
    covered, rng = 0, np.random.default_rng(0)
    for seed in range(100):
        base = rng.gamma(4, 5, 60)
        ours = base * rng.gamma(25, 0.02, 60)
        interval = paired_bootstrap(ours, base, n_boot=400, seed=seed)
        covered += interval.low < 0.5 < interval.high
    assert covered >= 87  # 95 expected, standard error 2.2
    oracle = scipy_stats.bootstrap(
        (ours, base),
        lambda a, b, axis: a.mean(axis) / b.mean(axis),
        paired=True,
        method="percentile",
        n_resamples=4000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    ours_interval = paired_bootstrap(ours, base, n_boot=4000)
    assert np.allclose(ours_interval[1:], oracle, atol=0.1 * (oracle.high - oracle.low))


def test_pairing_is_what_narrows_the_interval():
    rng = np.random.default_rng(0)
    base = rng.gamma(1, 10, 80)
    ours = base * rng.normal(0.5, 0.02, 80)
    paired, broken = paired_bootstrap(ours, base), paired_bootstrap(rng.permutation(ours), base)
    assert paired.high - paired.low < 0.1 * (broken.high - broken.low)
    assert paired == paired_bootstrap(ours, base) != paired_bootstrap(ours, base, seed=1)
    assert paired.low <= paired.value <= paired.high


def test_strata_keep_each_task_at_its_own_places():
    tasks = np.array(["docvqa", "caption"] * 10)
    ours, base = np.where(tasks == "docvqa", 4.0, 9.0), np.ones(20)

    def over_tasks(a, b):
        return geomean(a[tasks == t].mean() / b[tasks == t].mean() for t in ("docvqa", "caption"))

    assert paired_bootstrap(ours, base, over_tasks, strata=tasks, n_boot=50) == pytest.approx((6, 6, 6))
    loose = paired_bootstrap(ours, base, n_boot=200)
    assert loose.low < 6.5 < loose.high


def test_bootstrap_of_pools_with_columns():
    tree, ar = ([[r["n_tokens"] - 1, r["rounds"]] for r in drop_warmup(of(arm))] for arm in ("tree", "ar"))
    ratio = paired_bootstrap(tree, ar, lambda a, b: (np.divide(*a.sum(0))) / np.divide(*b.sum(0)), n_boot=50)
    assert ratio.value == acceptance_length(of("tree")) and (ratio.low, ratio.high) == (3, 6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1.0], [1.0]), "two prompts"),
        (([1.0, 2.0], [1.0]), "got 2, 1"),
        (([1.0, math.nan], [1.0, 2.0]), "finite"),
        (([1.0, 2.0], [1.0, 2.0], None, 0.0), "level=0"),
    ],
)
def test_bootstrap_refuses_what_is_not_pairs(arguments, words):
    ours, base, *rest = arguments
    with pytest.raises(ValueError, match=words):
        paired_bootstrap(ours, base, **({"level": rest[1]} if rest else {}))
