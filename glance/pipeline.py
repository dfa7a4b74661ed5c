"""The batch runner: papermill executes the notebooks in order, strictly, each reading the files of the one before.

papermill alone warns of an unknown parameter and runs on with the default; here it is an error, before anything runs, that
names the valid ones. Executed copies and their HTML go to `build/<run>/`; the sources are never touched.
"""

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from glance.exits import NotLossless, notebook_error, one_line
from glance.files import read_json, read_text
from glance.parameters import Parameter, check_values, checked_run_name, from_caller, plans, typed
from glance.paths import BUILD, NOTEBOOKS, RUNS
from glance.run.progress import Shown

PIPELINE = ("01-decode", "02-audit", "03-fit", "04-plots")
PROFILES = ("pocket", "paper", "quick")
AUDITED = 3.0  # what a prompt of the audit costs beside one of 01-decode, roughly: it is decoded again, with controls
__all__ = ["NotLossless", "NotebookFailed", "execute", "plan_run", "summary"]


class NotebookFailed(RuntimeError):
    """A notebook stopped with an error that is neither bad input nor a failed claim."""


def read_profile(profile: str | Path) -> dict[str, Any]:
    """Read a profile by name (pocket, paper, quick) or from a YAML file of parameters.

    Raises:
        ValueError: no such profile, or not a mapping.
    """
    import yaml

    path = NOTEBOOKS / f"{profile}.yaml" if str(profile) in PROFILES else Path(profile)
    if not path.is_file():
        raise ValueError(f"profile {str(profile)!r} is neither a file nor one of {', '.join(PROFILES)}")
    try:
        values = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a profile maps parameter names to values")
    return values


def notebook_parameters(notebook: str) -> dict[str, Parameter]:
    """Return a notebook's parameters, from its one `parameters` cell.

    Raises:
        ValueError: none or several such cells, a code cell before it, or another kernel than python3.
    """
    import papermill

    path = NOTEBOOKS / f"{notebook}.ipynb"
    document = read_json(path)
    code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    tagged = [i for i, cell in enumerate(code) if "parameters" in cell["metadata"].get("tags", [])]
    if tagged != [0]:
        raise ValueError(f"{path.name}: exactly one cell, the first code cell, carries the tag 'parameters'")
    if document["metadata"].get("kernelspec", {}).get("name") != "python3":
        raise ValueError(f"{path.name}: the kernel must be python3")
    return {
        name: Parameter(entry["inferred_type_name"], ast.literal_eval(entry["default"]), entry["help"])
        for name, entry in papermill.inspect_notebook(str(path)).items()
    }


def plan_run(
    profile: str | Path, overrides: Mapping[str, Any], only: Sequence[str] = (), run: str | None = None
) -> list[tuple[str, dict[str, Any]]]:
    """Decide which notebooks run with which parameters; nothing runs yet.

    Args:
        profile: pocket, paper, quick, or a YAML file; its run is named after it.
        overrides: values by parameter, as text or typed; a relative path among them means the caller's folder.
        only: notebooks, all of the pipeline where empty.
        run: the run's name instead.

    Raises:
        ValueError: an unknown notebook or parameter, with the valid ones named; a value of another type.
    """
    if not NOTEBOOKS.is_dir():
        raise ValueError(
            "this copy of glance has no notebooks: they come with the repository (clone it, then pip install -e .)"
        )
    if "run_name" in overrides:
        raise ValueError(f"the run's name is no -p: use --run {overrides['run_name']}")
    unknown = [name for name in only if name not in PIPELINE and name[:2] not in {n[:2] for n in PIPELINE}]
    if unknown:
        raise ValueError(f"notebook {unknown[0]!r} is not of the pipeline: {', '.join(PIPELINE)}")
    chosen = [n for n in PIPELINE if not only or n in only or n[:2] in {name[:2] for name in only}]
    known = {notebook: notebook_parameters(notebook) for notebook in PIPELINE}
    told = read_profile(profile)
    mine = overrides if str(profile) in PROFILES else {**told, **overrides}
    values = {"run_name": Path(profile).stem, **told, **overrides}
    values |= {name: from_caller(name, value) for name, value in mine.items()}
    if run is not None:
        values["run_name"] = run
    every = sorted({name for parameters in known.values() for name in parameters})
    strange = [name for name in values if name not in every]
    if strange:
        raise ValueError(f"no notebook has a parameter {strange[0]!r}; there are: {', '.join(every)}")
    kinds = {name: parameter.kind for parameters in known.values() for name, parameter in parameters.items()}
    values = {name: typed(name, value, kinds[name]) for name, value in values.items()}
    checked_run_name(values["run_name"])
    return [(n, {name: value for name, value in values.items() if name in known[n]}) for n in chosen]


def check_plan(plan: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, tuple[int, float]]:
    """Refuse before anything runs what a notebook of the plan would refuse.

    Returns:
        The stages that count prompts, in order: how many each has, and what a prompt costs beside one of 01-decode.

    Raises:
        ValueError: one line.
    """
    stages: dict[str, tuple[int, float]] = {}
    for notebook, given in plan:
        values = {name: parameter.default for name, parameter in notebook_parameters(notebook).items()} | dict(given)
        check_values(notebook, values)
        if notebook == "01-decode":
            main, sweep = plans(notebook, values)
            stages["decode"] = (len(main.task_list) * (main.n + 1), 1.0)
            stages["sweep"] = (len(sweep.task_list) * (sweep.n + 1), len(sweep.arms) / len(main.arms))
        elif notebook == "02-audit":
            names = ("audit float32", "audit bfloat16")
            for name, some in zip(names, plans(notebook, values), strict=False):
                stages[name] = (len(some.task_list) * some.n, AUDITED)
    return stages


def execute(plan: Sequence[tuple[str, Mapping[str, Any]]], *, say: Any = print) -> Path:
    """Execute a plan's notebooks in order; return the folder of executed copies.

    Raises:
        NotLossless: an exactness claim failed. ValueError: bad input. NotebookFailed: anything else.
    """
    stages = check_plan(plan)
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this environment's kernel, whatever is registered for the user
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    folder = BUILD / str(plan[0][1]["run_name"])
    folder.mkdir(parents=True, exist_ok=True)
    with Shown(folder / "progress.jsonl", stages) as shown:
        for number, (notebook, parameters) in enumerate(plan, start=1):
            say(f"[{number}/{len(plan)}] {notebook}")
            executed = folder / f"{notebook}.ipynb"
            try:
                _run_notebook(notebook, executed, parameters, shown)
            finally:
                with suppress(Exception):  # a half-written copy, or a full disk: the error at hand says more
                    export_html(executed)
    return folder


def _run_notebook(notebook: str, executed: Path, parameters: Mapping[str, Any], out: Any) -> None:
    """Execute one notebook into its copy; turn what stops it into the error that its exit code stands for."""
    import papermill
    from papermill.exceptions import PapermillExecutionError

    settings = {"kernel_name": "python3", "cwd": str(NOTEBOOKS), "progress_bar": False, "stdout_file": out}
    settings["extra_arguments"] = ["--IPKernelApp.log_level=40"]  # errors alone: its warnings are of sockets
    settings["start_timeout"] = 3600  # seconds for a kernel to come up: a limit for hangs, not for busy machines
    source = str(NOTEBOOKS / f"{notebook}.ipynb")
    try:
        _in_thread(partial(papermill.execute_notebook, source, str(executed), dict(parameters), **settings))
    except PapermillExecutionError as error:
        kind = notebook_error(error.ename, error.traceback)
        said = f"{notebook}: {' '.join(error.evalue.split())} (see {executed})"
        if kind is None:
            raise NotebookFailed(said) from error
        raise kind(said) from None
    except (OSError, ModuleNotFoundError):
        raise
    except Exception as error:  # DeadKernelError: killed, often for want of memory
        raise NotebookFailed(f"{notebook}: {type(error).__name__}: {one_line(error)} (see {executed})") from error


def _in_thread(work: Callable[[], Any]) -> None:
    """Run `work` in a thread of its own, so that it also runs from inside a notebook, where a loop is already running.

    The thread is a daemon: an interrupt leaves at once, and the notebook's kernel goes when it sees that its parent has.
    """
    done: Future = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    done.result()


def export_html(executed: Path) -> Path:
    """Write an executed notebook as HTML beside it."""
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter(embed_images=True).from_filename(str(executed))
    path = executed.with_suffix(".html")
    path.write_text(page, encoding="utf-8")
    return path


def summary(run: str) -> str:
    """Sum up a finished run in a few lines: tau and speedup per task, the audit's verdict, the law's slopes."""
    from glance.report import claims
    from glance.report.results import Results
    from glance.report.summary import number

    folder = RUNS / run
    table, audit, law = (_read(folder / f"{name}.json") for name in ("main_table", "audit", "law"))
    lines = ["", f"run {run}: {table['device']} {table['dtype']}, budget {table['budget']}"]
    for row in table["rows"]:
        if row["arm"] != "ar":
            word = "SLOWDOWN" if (row["speedup"] or 1) < 1 else "speedup"
            lines.append(
                f"  {row['task']:8s} {row['arm']:6s} tau {number(row['tau'], 5)}  {word} {number(row['speedup'])} "
                f"[{number(row['speedup_low'])}, {number(row['speedup_high'])}]  identical {row['identical']}/{row['n']}"
            )
    for row in table["pooled"]:
        lines.append(f"  {'all':8s} {row['arm']:6s} tau {number(row['tau'], 5)}  speedup {number(row['speedup'])}")
    lines.append(f"audit: {audit['verdict']} ({audit['dtype']}, {audit['n_prompts']} prompts)")
    fits = [*law["laws"].items(), ("all tasks", law["pooled"])]
    slopes = (f"{task} {'no fit' if fit['b1'] is None else format(fit['b1'], '.2f')}" for task, fit in fits)
    lines.append(f"law: slope b1 {', '.join(slopes)}")
    lines.append(claims.count(claims.ledger(Results(folder))))
    lines.append(f"files: {folder}, executed notebooks: {BUILD / run}")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing: run the notebook that writes it first")
    return read_json(path)
