"""Values are compared with a parameter's annotation: what is meant without doubt is taken, the rest refused at once."""

import pytest
import toy_run
from hypothesis import given
from hypothesis import strategies as st

from glance import cli, pipeline
from glance.parameters import check_values, checked_run_name, typed


@pytest.mark.parametrize(
    ("kind", "value", "meant"),
    [
        ("int", "1e6", 1_000_000),
        ("int", "1e1", 10),
        ("int", 10.0, 10),
        ("int", "010", 10),
        ("float", "3", 3.0),
        ("str", "2024", "2024"),
        ("str", 2024, "2024"),
        ("str", None, ""),
        ("bool", "yes", True),
        ("bool", "off", False),
        ("list[str]", "docvqa", ["docvqa"]),
        ("list[str]", "[docvqa, on]", ["docvqa", "on"]),
        ("list[str]", "[]", []),
        ("list[int]", "3", [3]),
        ("list[int]", 3, [3]),
        ("list[int]", "3,7", [3, 7]),
        ("list[int]", "[1e1, 7]", [10, 7]),
    ],
)
def test_what_is_meant_without_doubt_is_taken(kind, value, meant):
    found = typed("x", value, kind)
    assert found == meant and type(found) is type(meant)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *[("int", value) for value in ("2.5", 2.5, "[", "", "many", True, None, "nan", "1e99", [3], {})],
        *[("float", value) for value in ("inf", "x", True, None, [1.0])],
        *[("str", value) for value in (True, 1.5, ["a"], {})],
        *[("bool", value) for value in ("maybe", 2, None, [])],
        *[("list[int]", value) for value in ("2.5", "[3", "3,,7", [3, "x"], [[3]], {"a": 1}, True)],
        *[("list[str]", value) for value in ({"a": 1}, [["a"]], "a,,b", "[a", True)],
    ],
)
def test_the_rest_is_refused_in_one_line_that_names_it(kind, value):
    with pytest.raises(ValueError, match=r"^name is .*, got ") as caught:
        typed("name", value, kind)
    assert "\n" not in str(caught.value)


@given(st.integers(-(10**12), 10**12))
def test_a_whole_number_stays_itself_however_it_is_written(number):
    for text in (str(number), f"{number}.0", f"{number}e0", f"{number:,}".replace(",", "_"), number):
        assert typed("n", text, "int") == number


@given(st.one_of(st.text(), st.floats(), st.booleans(), st.none(), st.lists(st.integers())))
def test_any_value_is_typed_or_refused(value):
    kinds = {"int": int, "float": float, "str": str, "bool": bool, "list[int]": list, "list[str]": list}
    for kind, made in kinds.items():
        try:
            found = typed("x", value, kind)
        except ValueError:
            continue
        assert type(found) is made


def test_every_parameter_of_every_notebook_has_its_default_by_its_annotation():
    for notebook in pipeline.PIPELINE:
        for name, entry in pipeline.notebook_parameters(notebook).items():
            assert typed(name, entry.default, entry.kind) == entry.default, (notebook, name)


@pytest.fixture
def started(monkeypatch):
    """Count notebooks that were started: a refusal starts none."""
    begun = []
    monkeypatch.setattr(pipeline, "_run_notebook", lambda notebook, *rest: begun.append(notebook))
    return begun


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-p", "n", "2.5"], "n is a whole number"),
        (["-p", "n", "["], "n is a whole number"),
        (["-p", "n", "0"], "n must be at least 1"),
        (["-p", "budget", "2.5"], "budget is a whole number"),
        (["-p", "tasks", "[docvqa"], "tasks is a list of names"),
        (["-p", "tasks", "docvka"], "no task docvka"),
        (["-p", "sweep_budgets", "[]"], "sweep_budgets needs at least one budget"),
        (["-p", "sweep_budgets", "[15, 15]"], "twice: tree-15"),
        (["-p", "sweep_budgets", "-1"], "none of them negative"),
        (["-p", "max_pixels", "-5"], "max_pixels must be at least 0"),
        (["-p", "max_new_tokens", "0"], "max_new_tokens must be at least 1"),
        (["-p", "dtype", "float8"], "dtype must be one of"),
        (["-p", "device", "abacus"], "device must be cuda, mps or cpu"),
        (["-p", "device", "cuda:99"], "cuda devices"),
        (["-p", "target", "data/pocket/taget"], "there is no such folder"),
        (["-p", "n_boot", "0"], "n_boot must be at least 1"),
        (["-p", "run_name", "x"], "use --run x"),
        (["--run", "../escape"], "one folder's name"),
        (["--run", ""], "one folder's name"),
        (["--profile", "nowhere.yaml"], "neither a file"),
    ],
)
def test_the_command_refuses_before_anything_starts(started, capsys, arguments, says):
    assert cli.main(["reproduce", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error and "\n" not in error and started == []


def test_the_default_run_and_what_is_meant_pass_the_check(started, monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline, "BUILD", tmp_path)
    plan = pipeline.plan_run("pocket", {"max_pixels": "1e6", "n": "1e1", "tasks": "docvqa", "sweep_budgets": "3"})
    values = dict(plan)["01-decode"]
    assert (values["max_pixels"], values["n"], values["tasks"], values["sweep_budgets"]) == (10**6, 10, ["docvqa"], [3])
    pipeline.execute(plan, say=lambda line: None)
    assert started == list(pipeline.PIPELINE)


def test_a_relative_path_means_the_callers_folder(monkeypatch, tmp_path):
    toy_run.write_tasks(tmp_path / "mytasks", n=2)
    (tmp_path / "pair" / "target").mkdir(parents=True)
    (tmp_path / "mine.yaml").write_text("data: mytasks\n")
    monkeypatch.chdir(tmp_path)
    told = {"data": "mytasks", "target": "pair/target", "head": "data/pocket/head"}
    for plan in (pipeline.plan_run("pocket", told), pipeline.plan_run("mine.yaml", told)):
        for notebook in ("01-decode", "02-audit"):
            values = dict(plan)[notebook]
            assert values["data"] == str(tmp_path / "mytasks")
            assert values["target"] == str(tmp_path / "pair" / "target")
            assert values["head"] == "data/pocket/head", "not in the caller's folder: the project's"
    assert dict(pipeline.plan_run("mine.yaml", {}))["01-decode"]["data"] == str(tmp_path / "mytasks")


@given(st.text(max_size=12))
def test_a_run_name_never_leaves_its_folder(name):
    from glance.paths import RUNS

    try:
        kept = checked_run_name(name)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert (RUNS / kept).parent == RUNS and kept not in ("", ".", "..")


def test_fit_values_are_checked():
    with pytest.raises(ValueError, match="cap must be at least -1, got -2"):
        check_values("03-fit", {"cap": -2, "n_boot": 1, "seed": 0})
