"""Figures and tables of a made-up run: equal bytes, columns, slowdowns in words, one clear line for what is missing."""

import csv
import io
import json
import shutil
import warnings
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import synthetic_run

from glance import files, records
from glance.files import write_json
from glance.metrics import drop_warmup
from glance.paths import NOTEBOOKS
from glance.report import plots, style, tables
from glance.report.fit import fit_law
from glance.report.results import MADE_BY, Missing, Results

FIGURES = {
    "law": plots.law_figure,
    "depth": plots.depth_figure,
    "width": plots.width_figure,
    "budget": plots.budget_figure,
    "time": plots.time_figure,
}


@pytest.fixture(autouse=True)
def strict():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = synthetic_run.write_run(tmp_path_factory.mktemp("made-up") / "run", n=8)
    fit_law(folder / "rounds.jsonl", n_boot=200, out=folder / "law.json")
    return folder


@pytest.mark.parametrize("name", FIGURES)
def test_equal_data_give_equal_bytes(folder, tmp_path, name):
    first = style.save(FIGURES[name](Results(folder)), name, tmp_path / "first")
    again = style.save(FIGURES[name](Results(folder)), name, tmp_path / "again")
    assert sorted(first) == ["pdf", "png", "svg"]
    for kind in first:
        assert first[kind].read_bytes() == again[kind].read_bytes()
    ElementTree.parse(first["svg"])


@pytest.mark.parametrize("name", FIGURES)
def test_figures_have_a_printed_width_and_leave_no_style_behind(folder, name):
    import matplotlib

    before = dict(matplotlib.rcParams)
    figure = FIGURES[name](Results(folder))
    assert figure.get_size_inches()[0] in (style.COLUMN_IN, style.PAGE_IN)
    assert dict(matplotlib.rcParams) == before


def test_looks_are_seaborns_palette_and_told_apart_without_colour():
    import seaborn

    palette = {*seaborn.color_palette("colorblind").as_hex()}
    for looks in (style.ARMS, style.TASKS):
        assert {look.color.lower() for look in looks.values()} <= palette
        for cue in ("label", "color", "marker", "dash"):
            assert len({getattr(look, cue) for look in looks.values()}) == len(looks)
    assert style.look("tree-text").label == "tree-text"


@pytest.mark.parametrize("name", [name for name in MADE_BY if name != "provenance.json"])
def test_a_missing_file_gives_one_line_that_names_it_and_its_notebook(folder, tmp_path, name):
    shutil.copytree(folder, tmp_path / "run")
    for path in (tmp_path / "run").rglob(name):
        path.unlink()
    results = Results(tmp_path / "run")
    drawn = [*FIGURES.values(), tables.main_table, tables.audit_table, tables.law_table]
    lines = []
    for draw in drawn:
        try:
            draw(results)
        except Missing as lack:
            lines.append(str(lack))
    assert lines
    for line in lines:
        assert name in line and MADE_BY[name] in line and "\n" not in line


def test_a_run_without_its_sweep_or_without_rows_says_so(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "sweep")
    with pytest.raises(Missing, match=r"sweep has no prompts.jsonl"):
        plots.budget_figure(Results(tmp_path / "run"))
    (tmp_path / "run" / "prompts.jsonl").write_text("")
    with pytest.raises(Missing, match="none after the warm-up"):
        plots.width_figure(Results(tmp_path / "run"))


def test_main_table_keeps_ours_and_the_papers_apart(folder):
    table = tables.main_table(Results(folder))
    rows = list(csv.DictReader(io.StringIO(table.csv())))
    assert len(rows) == 5 * 4 + 3
    by = {(row["task"], row["arm"]): row for row in rows}
    tree, paper_alone = by["ChartQA", "tree"], by["ChartQA", "EAGLE3 head, in the paper alone"]
    assert (tree["paper_tau_v1"], tree["paper_tau_v2"], tree["paper_speedup_v1"]) == ("4.62", "4.69", "2.93")
    assert float(tree["tau"]) == Results(folder).row("chartqa", "tree")["tau"]
    assert float(tree["speedup_low"]) <= float(tree["speedup"]) <= float(tree["speedup_high"])
    assert not paper_alone["tau"] and paper_alone["paper_tau_v2"] == "4.5"
    assert not any(by["ChartQA", "chain"][key] for key in by["ChartQA", "chain"] if key.startswith("paper"))
    assert not by["all tasks", "tree"]["paper_tau_v1"]
    groups = [key.startswith("paper") for key in table.columns]
    assert groups == sorted(groups), "the paper's columns stand together, after ours"
    assert r"\multicolumn{4}{c}{paper}" in table.latex() and "Qwen3-VL-8B" in table.note


def test_every_form_of_a_table_has_the_same_rows(folder, tmp_path):
    for make in (tables.main_table, tables.audit_table, tables.law_table):
        table = make(Results(folder))
        paths = tables.write(table, tmp_path)
        assert sorted(paths) == ["csv", "md", "tex"]
        body = [line for line in paths["md"].read_text().splitlines() if line.startswith("|")]
        assert len(body) == len(table.rows) + 2
        assert len({line.replace("\\|", "").count("|") for line in body}) == 1
        assert len(list(csv.reader(io.StringIO(paths["csv"].read_text())))) == len(table.rows) + 1
        assert paths["tex"].read_text().count(r" \\") == len(table.rows) + 2
        assert {p.read_bytes() for p in tables.write(make(Results(folder)), tmp_path / "2").values()} == {
            p.read_bytes() for p in paths.values()
        }


NAMES = [
    "ours",
    "my-task",
    "\u6587\u6863",
    "x$y^{z$",
    "pooled",
    "_under",
    "receipts-of-many-shops-in-2024",
    "a%b",
    "caption",
]
NAMES += ["maths", "menus", "tab~\\le"]


@pytest.fixture(scope="module")
def named(folder, tmp_path_factory):
    """Return a run whose twelve tasks a user named; one of them never began a round."""
    named = tmp_path_factory.mktemp("named") / "run"
    shutil.copytree(folder, named)
    for path in sorted(named.rglob("*s.jsonl")):  # prompts before their rounds
        by_task = {}
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            by_task.setdefault(row["task"], []).append(row)
        source = list(by_task.values())
        rows = [{**row, "task": name} for i, name in enumerate(NAMES) for row in source[i % len(source)]]
        if path.name == "rounds.jsonl":
            synthetic_run.rewrite_rounds(path.parent, [row for row in rows if row["task"] != "menus"])
            continue
        rows = [row | {"n_tokens": 1, "rounds": 0, "tau": None} if row["task"] == "menus" else row for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    fit_law(named / "rounds.jsonl", n_boot=50, out=named / "law.json")
    return named


@pytest.mark.parametrize("name", FIGURES)
def test_names_of_any_kind_are_drawn_as_they_are(named, name):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        figure = FIGURES[name](Results(named))
        FigureCanvasAgg(figure).draw()
    told = {str(warning.message) for warning in told}
    assert all("no font here has glyphs" in line for line in told), "no box is drawn without a word"
    box = figure.get_tightbbox()
    assert box.width <= figure.get_size_inches()[0] * 1.01 and box.height <= figure.get_size_inches()[1] * 1.01
    if name == "width":
        figure.canvas.draw()
        ticks = [label.get_text() for label in figure.axes[1].get_xticklabels()]
        assert len(ticks) == 12 and r"x\$y^{z\$" in ticks
        assert [text.get_text() for text in figure.axes[0].texts].count(
            "-"
        ) == 2  # chain and tree of the task without a tau


def test_tasks_of_the_users_own_are_told_apart_and_the_papers_keep_their_looks():
    looks = style.task_looks(NAMES)
    assert looks["caption"] == style.TASKS["caption"]
    own = [look[1:] for name, look in looks.items() if name != "caption"]
    assert len({str(cues) for cues in own}) == len(own) == 11
    for cue in range(2):
        assert len({str(cues[cue]) for cues in own[:9]}) == 9


def test_a_task_named_pooled_leaves_the_pooled_law_alone(named):
    law = Results(named).law
    assert law["pooled"]["n"] == sum(one["n"] for one in law["laws"].values()) > law["laws"]["pooled"]["n"]
    table = tables.law_table(Results(named))
    assert [row["name"] for row in table.rows][-1] == "all tasks" and "pooled" in [row["name"] for row in table.rows]


def test_the_chance_by_depth_is_counted(folder):
    law = Results(folder).law["laws"]["docvqa"]
    rows = [row for row in drop_warmup(records.read_rows(folder / "rounds.jsonl")) if row["arm"] == "tree"]
    accepted = [row["accepted"] for row in rows if row["task"] == "docvqa" and not row["truncated"]]
    table = law["depths"]["all"]
    for depth, trials, chance, low, high in zip(*table.values(), strict=True):
        assert trials == sum(a >= depth - 1 for a in accepted)
        assert chance == pytest.approx(sum(a >= depth for a in accepted) / trials)
        assert low <= chance + 1e-9 and chance <= high + 1e-9
    halves = [law["depths"][half]["trials"][0] for half in ("low", "high")]
    assert sum(halves) == len(accepted) and law["geometric"]["fitted"] == "geometric" and law["fitted"] == "mean"


def test_an_interval_is_the_same_wherever_it_is_printed(folder):
    from glance.report.claims import ledger
    from glance.report.summary import short_table

    results = Results(folder)
    row = results.row("infovqa", "tree")
    assert results.speedup("tree", "ar", ["infovqa"]) == (row["speedup"], row["speedup_low"], row["speedup_high"])
    assert results.tau("tree", ["infovqa"])[1:] == (row["tau_low"], row["tau_high"])
    printed = f"{row['speedup']:.2f}x [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
    assert printed in short_table(results.main)
    assert any(f"InfoVQA {printed}" in entry.measured for entry in ledger(results))
    assert printed.replace("x ", " ") in tables.main_table(results).markdown()


def test_a_part_of_a_table(folder):
    part = tables.main_table(Results(folder)).only("task", "tau", arm="tree")
    assert list(part.columns) == ["task", "tau"] and len(part.rows) == 6


def test_latex_escapes_what_latex_reads():
    table = tables.Table("t", "50% & more", {"a_b": "a_b", "paper": "p"}, [{"a_b": "x_{1}", "paper": "#1"}], "$")
    for text in (r"50\% \& more", r"a\_b", r"x\_\{1\}", r"\#1", r"\$"):
        assert text in table.latex()
    text = tables.Table("t", "x^2 ~ \\y", {"a": "a"}, [{"a": "<b|c>"}], "").latex()
    assert r"x\textasciicircum{}2 \textasciitilde{} \textbackslash{}y" in text
    assert r"\textless{}b\textbar{}c\textgreater{}" in text


def test_a_slowdown_is_printed_as_a_slowdown(tmp_path):
    folder = synthetic_run.write_run(tmp_path / "slow", n=4, cheap=8.0)
    results = Results(folder)
    table = tables.main_table(results)
    text = table.only("task", "arm", "speedup", arm="tree").markdown()
    assert text.count("SLOWDOWN") == 6
    assert all(row["speedup"] < 1 for row in table.rows if row["arm"] == "tree")
    axes = plots.budget_figure(results).axes[0]
    assert "slower than plain greedy decoding" in [text.get_text() for text in axes.texts]
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 1


def test_audit_table_tells_what_failed(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    audit = json.loads((folder / "audit.json").read_text())
    audit["faults"][0] |= {"diverged": 0, "caught": False}
    audit["bfloat16"] = None
    why = {"of": 0, "caught": None, "why": "no text has 4 tokens"}
    audit["faults"].append({"fault": "path gather skipped", "must_fail": True, "diverged": 0, "applies": True, **why})
    audit["faults"].append({"fault": "another", "must_fail": True, "diverged": 0, "applies": False, **why})
    audit["generate"] = {"arms": {"ar": {"identical": 9, "of": 10}, "tree": {"identical": 10, "of": 10}}}
    write_json(tmp_path / "run" / "audit.json", audit)
    table = tables.audit_table(Results(tmp_path / "run"))
    assert list(table.columns) == ["check", "dtype", "measured", "paper"]
    text = table.markdown()
    assert "NOT AS IT MUST" in text and "bfloat16 |" in text
    assert "not exercised: no text has 4 tokens" in text and "does not apply: no text has 4 tokens" in text
    assert "equals transformers' own generate" in text and "9 of 10 prompts" in text
    assert [row["paper"] for row in table.rows if row.get("paper")] == ["60 of 60 prompts (v2)"]


def test_intervals_are_of_the_pooled_numbers(folder):
    results = Results(folder)
    for task in results.tasks:
        row = results.row(task, "tree")
        assert results.tau("tree", [task]).value == pytest.approx(row["tau"])
        assert results.speedup("tree", tasks=[task]).value == pytest.approx(row["speedup"])
        assert results.tau("tree", [task]).low < row["tau"] < results.tau("tree", [task]).high
    pooled = {row["arm"]: row["speedup"] for row in results.main["pooled"]}
    assert results.speedup("tree").value == pytest.approx(pooled["tree"])
    chain = results.tau("tree").value / results.tau("chain").value
    assert results.tau_ratio("tree", "chain").value == pytest.approx(chain)


def test_the_steps_of_a_round_add_up_to_its_time(folder):
    sweep = Results(folder).sweep
    split = sweep.split("tree-15")
    mine = [row for row in sweep.prompts if row["arm"] == "tree-15"]
    whole = sum(row["ms_per_token"] * row["n_tokens"] for row in mine) / sum(row["rounds"] for row in mine)
    assert sum(split.values()) == pytest.approx(whole) and min(split.values()) >= 0
    assert sweep.split("tree-0")["draft"] == 0


def test_fit_law_takes_the_trees_whole_rounds_and_the_chains_reach(folder):
    law = json.loads((folder / "law.json").read_text())
    kept = [row for row in drop_warmup(records.read_rows(folder / "rounds.jsonl")) if row["arm"] == "tree"]
    whole = [row for row in kept if not row["truncated"]]
    pooled = law["pooled"]
    assert law["cap"] == synthetic_run.BLOCK - 1 and law["arm"] == "tree"
    assert (pooled["n"], pooled["n_truncated"]) == (len(whole), len(kept) - len(whole)) and pooled["n_truncated"] > 0
    assert pooled["at_cap"] == pytest.approx(np.mean([row["accepted"] == 15 for row in whole]))
    deciles = pooled["deciles"]
    assert np.dot(deciles["count"], deciles["accepted"]) == pytest.approx(sum(row["accepted"] for row in whole))
    assert np.dot(deciles["count"], deciles["at_cap"]) == pytest.approx(pooled["at_cap"] * len(whole))
    assert (np.array(deciles["low"]) <= deciles["accepted"]).all() and (
        deciles["accepted"] <= np.array(deciles["high"])
    ).all()
    free = fit_law(folder / "rounds.jsonl", cap=0, n_boot=50)
    assert free["cap"] is None and free["pooled"]["b0"] < pooled["b0"]


def test_a_task_without_a_fit_stops_no_other(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "run" / "rounds.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["accepted"] = 0 if row["task"] == "docvqa" else row["accepted"]
    synthetic_run.rewrite_rounds(tmp_path / "run", rows)
    laws = fit_law(path, n_boot=50, out=tmp_path / "run" / "law.json")["laws"]
    assert "no finite fit" in laws["docvqa"]["failed"] and laws["docvqa"]["b1"] is None and laws["caption"]["b1"] > 0
    results = Results(tmp_path / "run")
    assert "does not hold: no finite fit" in tables.law_table(results).markdown()
    shown = [text.get_text() for axes in plots.law_figure(results).axes for text in axes.texts]
    assert any("no finite fit" in text for text in shown)


def test_fit_law_refuses_what_it_cannot_fit(folder, tmp_path):
    with pytest.raises(ValueError, match="no such round log"):
        fit_law(tmp_path / "rounds.jsonl")
    with pytest.raises(ValueError, match=r"no rounds of arm 'lookup'.*chain, tree"):
        fit_law(folder / "rounds.jsonl", arm="lookup")


def test_a_recorded_tree_is_drawn_and_without_one_there_is_none(folder, tmp_path):
    assert plots.tree_pictures(Results(folder)) == []
    shutil.copytree(folder, tmp_path / "run")
    rows = records.read_rows(tmp_path / "run" / "rounds.jsonl")
    synthetic_run.rewrite_rounds(tmp_path / "run", [*rows, synthetic_run.packed_round()])
    (figure,) = plots.tree_pictures(Results(tmp_path / "run"), "t{}".format)
    first, again = (style.save(figure, "tree", tmp_path / name)["svg"].read_bytes() for name in "ab")
    assert first == again and b"t99" in first


def test_written_tabulates_files(tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.png").write_bytes(b"\x89PNG")
    frame = tables.written(tmp_path)
    assert [name.rsplit("/")[-1] for name in frame["file"]] == ["a.csv", "b.png"]
    assert frame["rows"][0] == 2 and frame["rows"].isna()[1] and frame["bytes"].tolist() == [4, 4]
    assert frame["sha256"][0] == files.file_sha256(tmp_path / "a.csv")[:8]
    assert len(tables.written([tmp_path / "a.csv"])) == 1


def test_another_run_never_overwrites_the_figures_of_the_default_one():
    assert style.figures_folder("pocket") == style.FIGURES
    assert style.figures_folder("quick") == style.FIGURES / "quick"


@pytest.mark.parametrize(
    ("name", "files"),
    [("03-fit", ["law.json"]), ("04-plots", ["claims.md", "table-main.tex", "table-audit.csv", "law.pdf", "time.svg"])],
)
def test_notebooks_write_their_files(folder, tmp_path, name, files):
    shutil.copytree(folder, tmp_path / "run")
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    state = {"display": lambda *_: None}
    for number, cell in enumerate(code):
        exec(compile(cell, f"{name}[{number}]", "exec"), state)
        if number == 0:
            state["run_name"] = str(tmp_path / "run")  # an absolute run keeps its figures beside its rows
    for file in files:
        assert (tmp_path / "run" / file).stat().st_size


@pytest.mark.parametrize("name", ["03-fit", "04-plots"])
def test_notebooks_are_clean_and_short(name):
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert [cell["id"] for cell in notebook["cells"]] == [str(i) for i in range(len(notebook["cells"]))]
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            assert len(cell["source"]) <= 12 and "def " not in source and "class " not in source and "../" not in source
    assert not notebook["metadata"].get("papermill")


def test_the_benchmark_becomes_a_table_or_says_what_to_run(tmp_path):
    with pytest.raises(Missing, match="make bench"):
        tables.bench_table(tmp_path)
    facts = {"machine": {"processor": "a processor"}, "threads": 3, "versions": {"torch": "9.9"}}
    write_json(tmp_path / "machine.json", facts)
    head = "section,case,variant,prefix,nodes,ms,base,ratio,tau,bound,repeats"
    (tmp_path / "pocket.csv").write_text(f"{head}\npocket,docvqa,tree-7,62,7,0.5,oracle,0.4,5.1,2.6,3\n")
    (tmp_path / "oracle.csv").write_text(f"{head}\noracle,,generate,100,,2.5,generate,1,,,3\n")
    first, second = (table := tables.bench_table(tmp_path)).rows
    assert (first["section"], first.get("of_bound")) == ("oracle", None)
    assert second["of_bound"] == pytest.approx(1 / 0.4 / 2.6) and "0.962" in table.markdown()
    assert "a processor, 3 threads, torch 9.9" in table.note


def test_the_width_that_chooses_itself_stands_beside_the_budgets(folder):
    left, right = plots.budget_figure(Results(folder)).axes
    ticks = [[tick.get_text() for tick in axes.get_xticklabels()] for axes in (left, right)]
    assert ticks[0] == [*ticks[1], "auto"]
    speedup = Results(folder).sweep.speedup("auto")
    (line,) = left.containers[0].lines[:1]
    assert line.get_ydata()[0] == speedup.value and 0 < speedup.low <= speedup.high < left.get_ylim()[1]
