"""The `glance` command: the same functions that the notebooks call, with the flags of the paper's README.

What the exit codes mean stands in `glance.exits`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glance.exits import NotLossless, exit_code
from glance.paths import POCKET, RUNS

TARGET = str(POCKET / "target")
HEAD = str(POCKET / "head")
DATA = str(POCKET / "eval")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a target's text may not fit the terminal's encoding
    parser: list[argparse.ArgumentParser] = []
    code = exit_code(lambda: parser.append(_parser()), "glance")
    if code:
        return code
    arguments = parser[0].parse_args(argv)
    resumes = getattr(arguments, "resumes", False)
    return exit_code(lambda: arguments.run(arguments), arguments.command, resumes=resumes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="glance", description="Lossless speculative decoding for VLMs: the companion."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    _add_reproduce(commands)
    _add_main_table(commands)
    _add_audit(commands)
    _add_fit_law(commands)
    from glance import doctor
    from glance.bench import suite as bench
    from glance.pocket.cli import add_subcommands
    from glance.train import command

    command.add_command(commands)
    doctor.add_command(commands)
    bench.add_bench(commands)
    pocket = commands.add_parser("pocket", help="render, train and evaluate the embedded target")
    add_subcommands(pocket.add_subparsers(required=True, metavar="STEP"))
    return parser


def _add_reproduce(commands: Any) -> None:
    parser = commands.add_parser("reproduce", help="decode, audit, fit, plots: every table and figure")
    parser.add_argument("--profile", default="pocket", help="pocket, paper, quick, or a YAML file of parameters")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), dest="overrides")
    parser.add_argument("--only", nargs="+", default=[], metavar="NOTEBOOK", help="run these alone: 01-decode ...")
    parser.add_argument("--quick", action="store_true", help="the same in about two minutes, on few prompts")
    parser.add_argument("--run", dest="name", help="the run's name (default: the profile's)")
    parser.set_defaults(run=_reproduce, resumes=True)


def _reproduce(arguments: argparse.Namespace) -> int:
    from glance import pipeline

    profile = "quick" if arguments.quick else arguments.profile
    plan = pipeline.plan_run(profile, dict(arguments.overrides), arguments.only, arguments.name)
    pipeline.execute(plan)
    if not arguments.only:
        print(pipeline.summary(plan[0][1]["run_name"]))
    return 0


def _add_pair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=TARGET, help="a transformers checkpoint (default: the pocket target)")
    parser.add_argument("--head", default=HEAD, help="a block head's folder (default: the pocket head)")
    parser.add_argument("--data", default=DATA, help="a folder of task files (default: the pocket tasks)")
    parser.add_argument("--tasks", nargs="+", default=[], help="which (default: all of the folder)")
    parser.add_argument("--budget", type=int, default=63, help="nodes per round")
    parser.add_argument("--branch-k", type=int, default=8, help="candidates per offset")
    parser.add_argument("--max-new", type=int, default=128, help="tokens per answer at most")
    parser.add_argument("--max-pixels", type=int, help="scale larger images down")
    parser.add_argument("--device", help="cuda, mps or cpu (default: the first there is)")


def _plan(arguments: argparse.Namespace, **more: Any) -> Any:
    from glance.run.experiment import Plan

    settings = {"data": arguments.data, "tasks": tuple(arguments.tasks), "n": arguments.n, "budget": arguments.budget}
    settings |= {"branch_k": arguments.branch_k, "max_new_tokens": arguments.max_new}
    return Plan(max_pixels=arguments.max_pixels, **settings, **more)


def _add_main_table(commands: Any) -> None:
    parser = commands.add_parser("main-table", help="decode the tasks by every arm; print tau and speedup")
    _add_pair(parser)
    parser.add_argument("--n", type=int, default=100, help="prompts per task; one warm-up more is decoded")
    parser.add_argument("--chain", action="store_true", help="also the head as a width-1 chain")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: bfloat16 on cuda, float32 elsewhere)")
    parser.add_argument("--trees", action="store_true", help="keep each round's tree in the round log")
    parser.add_argument("--round-log", help="also copy the rounds to this file")
    parser.add_argument("--resume", action="store_true", help="accepted for habit: a run is always gone on with")
    parser.add_argument("--run-folder", type=Path, help="where rows are kept (default: data/runs/main-table)")
    parser.add_argument("--out", help="also write the table to this JSON file")
    parser.set_defaults(run=_main_table, resumes=True)


def _main_table(arguments: argparse.Namespace) -> int:
    from glance.files import write_json
    from glance.report.summary import main_table, not_lossless, table_text
    from glance.run.experiment import decode_tasks, load_pair

    arms = ("ar", "chain", "tree") if arguments.chain else ("ar", "tree")
    plan = _plan(arguments, arms=arms, temperature=arguments.temperature, trees=arguments.trees)
    folder = arguments.run_folder or RUNS / "main-table"
    plan.prompts()  # a bad task file stops here, before a model loads
    pair = load_pair(arguments.target, arguments.head, dtype=arguments.dtype, device=arguments.device)
    decode_tasks(pair, plan, folder)
    table = main_table(folder)
    print(table_text(table))
    if arguments.round_log:
        Path(arguments.round_log).write_bytes((folder / "rounds.jsonl").read_bytes())
    if arguments.out:
        write_json(arguments.out, table)
    differing = not_lossless(folder)
    if differing and pair.dtype == "float32" and not plan.temperature:
        raise NotLossless(f"{len(differing)} outputs differ from ar in fp32: {', '.join(differing[:5])}")
    return 0


def _add_audit(commands: Any) -> None:
    parser = commands.add_parser("audit", help="is every output the target's own greedy text? with controls")
    _add_pair(parser)
    parser.add_argument("--n", type=int, default=20, help="prompts per task")
    parser.add_argument("--dtype", default="float32", help="float32 (default), bfloat16 or float16")
    parser.add_argument(
        "--generate-n", type=int, default=2, help="prompts per task that transformers' own generate decodes too"
    )
    parser.add_argument("--out", help="write the report to this JSON file")
    parser.set_defaults(run=_audit, resumes=True)


def _audit(arguments: argparse.Namespace) -> int:
    from glance.files import write_json
    from glance.run.audit import audit, failures, lines
    from glance.run.experiment import load_pair

    plan = _plan(arguments)
    prompts = [prompt for prompt in plan.prompts() if prompt.index]
    pair = load_pair(arguments.target, arguments.head, dtype=arguments.dtype, device=arguments.device)
    folder = (
        Path(arguments.out).parent if arguments.out else RUNS / "audit"
    )  # what an interrupted audit found is kept here
    report = audit(pair, plan, prompts, generate_n=arguments.generate_n, folder=folder)
    if arguments.out:
        write_json(arguments.out, report)
    print("\n".join(lines(report)))
    if report["verdict"] == "fault":
        where = f"; see {arguments.out}" if arguments.out else ""
        raise NotLossless(f"the audit found a fault in {report['dtype']}: {'; '.join(failures(report))}{where}")
    return 0


def _add_fit_law(commands: Any) -> None:
    parser = commands.add_parser("fit-law", help="fit the draftability law to a round log")
    parser.add_argument("rounds", help="a rounds.jsonl")
    parser.add_argument("--cap", type=int, help="a block's reach: accepted lengths are censored there")
    parser.add_argument("--out", help="write the fits to this JSON file")
    parser.set_defaults(run=_fit_law)


def _fit_law(arguments: argparse.Namespace) -> int:
    from glance.files import write_json
    from glance.report.fit import fit_law

    report = fit_law(arguments.rounds, cap=arguments.cap)
    if arguments.out:
        write_json(arguments.out, report)
    for task, law in [*report["laws"].items(), ("all tasks", report["pooled"])]:
        print(json.dumps({"task": task, **{key: law[key] for key in ("b0", "b1", "rho", "r2_round", "holds")}}))
    return 0
