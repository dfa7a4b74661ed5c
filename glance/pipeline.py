"""The batch runner: papermill executes the notebooks in order, strictly, each reading the files of the one before.

papermill alone warns of an unknown parameter and runs on with the default; here it is an error, before anything runs, that
names the valid ones. Executed copies and their HTML go to `build/<run>/`; the sources are never touched.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from glance.files import read_json, read_text
from glance.paths import BUILD, NOTEBOOKS, RUNS

PIPELINE = ("01-decode", "02-audit", "03-fit", "04-plots")
PROFILES = ("pocket", "paper", "quick")


class NotLossless(AssertionError):
    """A claim that must hold did not: some output differs from the target's own greedy text."""


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


def notebook_parameters(notebook: str) -> dict[str, str]:
    """Return a notebook's parameters and their help, from its one `parameters` cell.

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
    return {name: entry["help"] for name, entry in papermill.inspect_notebook(str(path)).items()}


def plan_run(
    profile: str | Path, overrides: Mapping[str, Any], only: Sequence[str] = (), run: str | None = None
) -> list[tuple[str, dict[str, Any]]]:
    """Decide which notebooks run with which parameters; nothing runs yet.

    Raises:
        ValueError: an unknown notebook or parameter, with the valid ones named.
    """
    unknown = [name for name in only if name not in PIPELINE and name[:2] not in {n[:2] for n in PIPELINE}]
    if unknown:
        raise ValueError(f"notebook {unknown[0]!r} is not of the pipeline: {', '.join(PIPELINE)}")
    chosen = [n for n in PIPELINE if not only or n in only or n[:2] in {name[:2] for name in only}]
    known = {notebook: notebook_parameters(notebook) for notebook in PIPELINE}
    values = {**read_profile(profile), **overrides, "run_name": run or Path(profile).stem}
    every = sorted({name for parameters in known.values() for name in parameters})
    strange = [name for name in values if name not in every]
    if strange:
        raise ValueError(f"no notebook has a parameter {strange[0]!r}; there are: {', '.join(every)}")
    return [(n, {name: value for name, value in values.items() if name in known[n]}) for n in chosen]


def execute(plan: Sequence[tuple[str, Mapping[str, Any]]], *, say: Any = print) -> Path:
    """Execute a plan's notebooks in order; return the folder of executed copies.

    Raises:
        NotLossless: an exactness claim failed. ValueError: bad input. NotebookFailed: anything else.
    """
    import papermill
    from papermill.exceptions import PapermillExecutionError

    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this environment's kernel, whatever is registered for the user
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    folder = BUILD / str(plan[0][1]["run_name"])
    folder.mkdir(parents=True, exist_ok=True)
    for number, (notebook, parameters) in enumerate(plan, start=1):
        say(f"[{number}/{len(plan)}] {notebook}")
        executed = folder / f"{notebook}.ipynb"
        settings = {"kernel_name": "python3", "cwd": str(NOTEBOOKS), "progress_bar": False, "stdout_file": sys.stdout}
        settings["extra_arguments"] = ["--IPKernelApp.log_level=40"]  # errors alone: its warnings are of sockets
        try:
            source = str(NOTEBOOKS / f"{notebook}.ipynb")
            _in_thread(partial(papermill.execute_notebook, source, str(executed), dict(parameters), **settings))
        except PapermillExecutionError as error:
            kinds = {"NotLossless": NotLossless, "ValueError": ValueError, "Missing": ValueError}
            raise kinds.get(error.ename, NotebookFailed)(f"{notebook}: {error.evalue} (see {executed})") from None
        finally:
            if executed.exists() and executed.stat().st_size:
                export_html(executed)
    return folder


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

    folder = RUNS / run
    table, audit, law = (_read(folder / f"{name}.json") for name in ("main_table", "audit", "law"))
    lines = ["", f"run {run}: {table['device']} {table['dtype']}, budget {table['budget']}"]
    for row in table["rows"]:
        if row["arm"] != "ar":
            word = "speedup" if row["speedup"] >= 1 else "SLOWDOWN"
            lines.append(
                f"  {row['task']:8s} {row['arm']:6s} tau {row['tau']:5.2f}  {word} {row['speedup']:.2f} "
                f"[{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]  identical {row['identical']}/{row['n']}"
            )
    for row in table["pooled"]:
        lines.append(f"  {'all':8s} {row['arm']:6s} tau {row['tau']:5.2f}  speedup {row['speedup']:.2f}")
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
