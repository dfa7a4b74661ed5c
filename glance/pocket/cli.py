"""`glance pocket render | train-target | train-head | evaluate`: the commands over this folder's functions.

`add_subcommands` hangs them on a parser, `main` runs them alone (`python -m glance.pocket.cli`). Heavy imports wait until a
command runs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from glance.exits import exit_code
from glance.files import write_json
from glance.pocket.words import DATA


def run_render(args: argparse.Namespace) -> None:
    """Write evaluation sets, or one page to look at."""
    from glance.pocket.evalset import EVAL_ROWS, SEEN_ROWS, write_set
    from glance.pocket.render import TASKS, sample

    if args.show:
        page = sample(args.show, args.seed, args.split)
        args.out.mkdir(parents=True, exist_ok=True)
        page.image.save(args.out / f"{page.task}-{page.seed}.png")
        print(f"{page.prompt}\n{page.answer}")
        return
    write_set(args.out / "eval", "eval", args.rows or EVAL_ROWS)
    write_set(args.out / "seen", "seen", args.rows or SEEN_ROWS, tuple(t for t in TASKS if t != "caption"))


def run_train(args: argparse.Namespace) -> None:
    """Train the target in a folder; write it to `--out` when the plan is done, or so far with `--snapshot`."""
    from dataclasses import asdict

    from glance.pocket.card import summarise_log
    from glance.pocket.model import save_target
    from glance.pocket.train_target import train_target

    run = train_target(args.work, seed=args.seed, every=args.every, max_seconds=args.minutes * 60)
    done = run.stage == len(run.plan) - 1 and run.step == run.plan[-1].steps
    if not done and not args.snapshot:
        print(f"stopped in stage {run.plan[run.stage].name} at step {run.step}; the same command goes on from there")
        return
    save_target(run.model, run.tokenizer, args.out / "target")
    begun = [asdict(stage) for stage in run.plan[: run.stage + 1]]
    summary = {"seed": run.seed, **summarise_log(args.work / "log.jsonl", begun)}
    write_json(args.out / "training.json", summary)


def run_train_head(args: argparse.Namespace) -> None:
    """Train the head in a folder, from its checkpoint where there is one; write it to `--out` and take its figures."""
    from glance.pocket.train_head import measure_head, ship_head, train_pocket_head
    from glance.train.acceptance import acceptance_text

    print(acceptance_text(train_pocket_head(args.work, prompts=args.prompts, target=args.out / "target")))
    ship_head(args.work, args.out)
    measure_head(args.out, args.rows, args.work / "figures")


def run_evaluate(args: argparse.Namespace) -> None:
    """Measure the target on its evaluation sets; write `evaluation.json` and `CARD.md`."""
    from glance.pocket.card import write_card
    from glance.pocket.evaluate import evaluate, load_pocket

    model, _ = load_pocket(args.data / "target")
    sets = {name: args.data / name for name in ("eval", "seen") if (args.data / name).is_dir()}
    if not sets:
        raise FileNotFoundError(f"{args.data}: neither eval/ nor seen/ is there; `glance pocket render` writes them")
    result = evaluate(args.data / "target", sets, args.limit)
    print(json.dumps({task: row["all"] for task, row in result["eval"].items()}, indent=1))
    if args.limit is None:
        write_json(args.data / "evaluation.json", result)
        write_card(args.data, sum(p.numel() for p in model.parameters()))


def add_subcommands(subparsers) -> None:
    """Hang the commands on argparse subparsers."""
    render = subparsers.add_parser("render", help="draw the evaluation sets, or one page to look at")
    render.add_argument("--out", type=Path, default=DATA)
    render.add_argument("--rows", type=int, help="rows per task (default: as shipped)")
    render.add_argument("--show", metavar="TASK", help="draw one page of a task and print its question and answer")
    render.add_argument("--seed", type=int, default=0)
    render.add_argument("--split", default="eval")
    render.set_defaults(run=run_render)
    train = subparsers.add_parser("train-target", help="train the target, from its checkpoint where there is one")
    train.add_argument("--work", type=Path, default=DATA.parent / "cache" / "pocket-target", help="log and checkpoint")
    train.add_argument("--out", type=Path, default=DATA, help="gets target/ and training.json when done")
    train.add_argument("--seed", type=int, default=1)
    train.add_argument("--every", type=int, default=100, help="steps between log rows")
    train.add_argument("--minutes", type=float, default=math.inf, help="stop after this long, resumable")
    train.add_argument("--snapshot", action="store_true", help="write target/ even where the plan is not done")
    train.set_defaults(run=run_train, resumes=True)
    head = subparsers.add_parser(
        "train-head", help="train the head on the target in `--out`, ship it, take its figures"
    )
    head.add_argument("--work", type=Path, default=DATA.parent / "runs" / "pocket-head", help="log and checkpoint")
    head.add_argument("--out", type=Path, default=DATA, help="has target/ and eval/, gets head/ and head.json")
    head.add_argument("--prompts", type=int, default=11000, help="pages to learn from")
    head.add_argument(
        "--rows", type=int, default=135, help="evaluation pages of each task for the figures, after one more"
    )
    head.set_defaults(run=run_train_head, resumes=True)
    evaluate = subparsers.add_parser("evaluate", help="measure the target; write evaluation.json and CARD.md")
    evaluate.add_argument("--data", type=Path, default=DATA)
    evaluate.add_argument("--limit", type=int, help="rows per task; writes no files")
    evaluate.set_defaults(run=run_evaluate)


def main(argv: list[str] | None = None) -> int:
    """Run one command; a bad argument or file gives one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="glance pocket", description=__doc__.split("\n")[0])
    add_subcommands(parser.add_subparsers(required=True, metavar="COMMAND"))
    args = parser.parse_args(argv)
    return exit_code(lambda: args.run(args), "pocket", resumes=getattr(args, "resumes", False))


if __name__ == "__main__":
    sys.exit(main())
