"""`data/pocket/CARD.md`: what the target is, how it was trained, how well it reads, what it cannot do, and its hashes.

Every figure comes from `evaluation.json` (written by `evaluate`), the training log and the files themselves; nothing is
typed in by hand. This file holds sentences and tables, no measuring.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from glance.files import read_json, read_lines, write_text
from glance.pocket.canvas import FONTS
from glance.pocket.model import POINTER_LAYER, READING_LAYERS
from glance.pocket.render import TASKS
from glance.pocket.words import read_list
from glance.report import writer

LIMITS = {  # what the project asks of the shipped target: task -> (score, bound, is an upper bound)
    "chartqa": [("character_error", 0.02, True)],
    "docvqa": [("character_error", 0.02, True)],
    "infovqa": [("character_error", 0.02, True)],
    "textvqa": [("word_list_error", 0.04, True)],
    "caption": [("grounded", 0.95, False), ("repeats", 0.05, True)],
}
LOOKUP_EXACT = 0.85
TRANSCRIPTION_ERROR = 0.01
MEDIAN_TOKENS = 60


def hash_file(path: Path) -> str:
    """Return a file's sha256, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hash_folder(folder: Path) -> str:
    """Return one sha256 over the names and hashes of a folder's files, in order."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()} {hash_file(path)}\n".encode())
    return digest.hexdigest()


def list_hashes(data: Path) -> dict[str, str]:
    """Return the hashes of what is shipped: each file of target and head, each set, the word lists."""
    folders = [folder for folder in ("target", "head") if (data / folder).is_dir()]
    hashes = {f"{name}/{path.name}": hash_file(path) for name in folders for path in sorted((data / name).iterdir())}
    return hashes | {f"{name}/": hash_folder(data / name) for name in ("eval", "seen", "words")}


def tabulate(head: list[str], rows: list[list]) -> str:
    """Return a Markdown table."""
    cells = ([str(cell) for cell in row] for row in rows)
    return writer.markdown(writer.frame(cells, head)).rstrip("\n")


def show(value: float | None, digits: int = 4) -> str:
    """Return a number as the tables write it."""
    return "-" if value is None else f"{value:.{digits}f}"


def tabulate_tasks(tasks: dict) -> str:
    """Return the table of the reading scores by task."""
    head = [
        "task",
        "prompts",
        "character error",
        "exact",
        "value exact",
        "entropy (nats)",
        "median tokens",
        "unfinished",
    ]
    rows = []
    for task, row in tasks.items():
        scores = row["all"]
        error = scores.get("character_error")
        exact = scores.get("exact")
        value = row["by_kind"].get("lookup", {}).get("value_exact")
        numbers = [show(error), show(exact, 3), show(value, 3), show(row["entropy_nats"])]
        rows.append([task, scores["prompts"], *numbers, row["median_tokens"], show(row["not_stopped"], 3)])
    return tabulate(head, rows)


def tabulate_groups(tasks: dict, key: str) -> str:
    """Return the table of character error by kind, font or size."""
    values = sorted({value for row in tasks.values() for value in row[f"by_{key}"]}, key=lambda v: (len(v), v))
    rows = []
    for task, row in tasks.items():
        groups = row[f"by_{key}"]
        if task != "caption":
            rows.append([task, *(show(groups.get(value, {}).get("character_error")) for value in values)])
    return tabulate(["task", *values], rows)


def check_limits(tasks: dict) -> str:
    """Return the table of what was asked for, what was measured and whether it holds."""
    rows = []

    def add(what: str, bound: float, value: float | None, is_upper: bool) -> None:
        if value is not None:
            holds = value <= bound if is_upper else value >= bound
            rows.append([what, ("<= " if is_upper else ">= ") + str(bound), show(value), "yes" if holds else "no"])

    for task, limits in LIMITS.items():
        for score, bound, is_upper in limits:
            add(f"{task}: {score.replace('_', ' ')}", bound, tasks[task]["all"].get(score), is_upper)
    for task in ("chartqa", "docvqa", "infovqa"):
        kinds = tasks[task]["by_kind"]
        add(f"{task}: transcriptions", TRANSCRIPTION_ERROR, kinds.get("table", {}).get("character_error"), True)
        add(f"{task}: look-ups exact", LOOKUP_EXACT, kinds.get("lookup", {}).get("value_exact"), False)
    for task in TASKS:
        add(f"{task}: median tokens", MEDIAN_TOKENS, tasks[task]["median_tokens"], False)
    return tabulate(["asked", "bound", "measured", "holds"], rows)


def describe_training(training: dict) -> str:
    """Return the table of the training stages from the summary of the log."""
    head = ["stage", "pages", "batch", "steps", "minutes", "last log row"]
    rows = []
    for stage in training["stages"]:
        mixture = ", ".join(f"{kind} {weight:g}" for kind, weight in stage["mixture"].items())
        last = ", ".join(f"{name} {value}" for name, value in stage["losses"].items())
        rows.append([stage["name"], mixture, stage["batch"], stage["steps"], round(stage["seconds"] / 60, 1), last])
    return tabulate(head, rows)


def describe_replanning(training: dict) -> str:
    """Say which stages were begun with another length than they had in the end ("" where none was)."""
    return "".join(
        f" Stage {stage['name']} was begun with {stage['first_planned_steps']:,} steps planned; its length, and with it the"
        f" fall of the learning rate, was set to {stage['steps']:,} on the way."
        for stage in training["stages"]
        if "first_planned_steps" in stage
    )


def summarise_log(log: Path, plan: list[dict]) -> dict:
    """Summarise a training log: seconds and last losses of each stage of the plan."""
    rows = [json.loads(line) for line in read_lines(log) if line.strip()]
    stages = []
    before = 0
    for stage in plan:
        last = [row for row in rows if row["stage"] == stage["name"]][-1]
        losses = {name: last[name] for name in ("language", "pointer", "characters", "things") if name in last}
        first = next(row for row in rows if row["stage"] == stage["name"])["of"]
        replanned = {} if first == stage["steps"] else {"first_planned_steps": first}
        stages.append({**stage, **replanned, "seconds": last["seconds"] - before, "losses": losses})
        before = last["seconds"]
    return {"seconds": before, "stages": stages}


def describe_reading(evaluation: dict) -> str:
    """Return the card's section of measurements."""
    tasks = evaluation["eval"]
    seen = evaluation.get("seen", {})
    caption = tasks["caption"]["all"]
    sign = tasks["textvqa"]["all"]
    names = sorted(tasks, key=lambda task: -tasks[task]["entropy_nats"])
    order = " > ".join(f"{task} {show(tasks[task]['entropy_nats'])}" for task in names)
    return f"""## How well (words never seen in training)
{tabulate_tasks(tasks)}

Textvqa: word list character error {show(sign["word_list_error"])}, word list exact {show(sign["word_list_exact"], 3)},
colour named right {show(sign["colour_exact"], 3)}. Captions: {caption["mentions"]} colour+shape mentions, in the scene
{show(caption["grounded"], 3)}, right in size and place too {show(caption["fitting"], 3)}, repeats
{show(caption["repeats"], 3)}, shapes left out {show(caption["missed"], 3)}. Entropy from most to least free: {order}.
Where an answer may be phrased in several ways (docvqa, infovqa, textvqa), the error is counted against the nearest one.

### Asked for and measured
{check_limits(tasks)}

### Character error by kind
{tabulate_groups(tasks, "kind")}

### Character error by font
{tabulate_groups(tasks, "font")}

### Character error by size (px per em)
{tabulate_groups(tasks, "size")}

### Words of the training lexicon, for comparison
{tabulate_tasks(seen)}
"""


def describe_making(training: dict) -> str:
    """Return the card's section on training."""
    return f"""## How it was trained
{describe_training(training)}

In all {training["seconds"] / 60:.0f} minutes on two CPU cores that had other work too, seed {training["seed"]}.
{describe_replanning(training)}

`eval/` had a say in this: *polish* was kept because it scored better there than the stage before, and *forms* was added,
with its mixture, because docvqa and textvqa still missed their bounds there. The figures above are those of its last step;
they are a little favourable all the same.

Throw-away heads taught the cells their characters and colours, and pointed each answer token to the place on the page
that it comes from; they are not shipped. The pointer reads the state after language layer {POINTER_LAYER} (counted from 0),
and heads of layers {READING_LAYERS[0]} and {READING_LAYERS[1]} were taught to attend there. Deepstack is added after layer 0
only, so from layer 1 on a kept state equals the next layer's input; a block head does well to keep layer {POINTER_LAYER}.
"""


def describe_head(data: Path) -> str:
    """Return the card's section on the block head, from `head.json`; says so where no head is shipped yet."""
    if not (data / "head.json").is_file():
        return "## The block head\nNone is shipped beside this target."
    head = read_json(data / "head.json")
    figures = head["figures"]
    settings = head["settings"]
    columns = ["task", "arm", "tau", "tau, no cut rounds", "ms/token", "speedup", "repeated 4-grams", "identical"]
    rows = []
    for row in [*figures["rows"], *figures["pooled"]]:
        numbers = (show(row[key], 2) for key in ("tau", "tau_uncut", "ms_per_token", "speedup"))
        same = f"{row['identical']} of {row['n']}"
        rows.append([row.get("task", "all"), row["arm"], *numbers, show(row["repeats"], 3), same])
    accepted = head["acceptance"]
    offsets = [
        [offset, show(decode, 3), show(forced, 3)]
        for offset, (decode, forced) in enumerate(
            zip(accepted["decode"], accepted["teacher_forced"], strict=True), start=1
        )
    ]
    return f"""## The block head
`head/` is a `dflash.DFlashDraftModel` of {settings["layers"]} layers for this target: block {settings["block"]}, kept layers
{settings["kept"]}, trained by `glance pocket train-head` on the target's own greedy text. Measured on {figures["n"]} prompts
per task of `eval/` in fp32, all arms in one process; speedups move with the machine and what else it does.

{tabulate(columns, rows)}

Accepted up to an offset, in real decoding and teacher-forced (share of rounds):

{tabulate(["offset", "decode", "teacher-forced"], offsets)}
"""


def write_card(data: Path, parameters: int) -> str:
    """Write `CARD.md` from `evaluation.json` and `training.json` of the pocket's data folder and return it."""
    evaluation = read_json(data / "evaluation.json")
    training = read_json(data / "training.json")
    hashes = "\n".join(f"- `{name}` {value}" for name, value in list_hashes(data).items())
    text = f"""# The pocket target

A vision-language model of {parameters:,} parameters that reads rendered pages, made so that everything here runs on a
laptop without a download. It is transformers' own `Qwen3VLForConditionalGeneration`, trained from nothing by
`glance.pocket` on pages that `glance.pocket.render` draws. Every figure below was measured on the files in this folder
(`glance pocket evaluate`); this page is written by `glance.pocket.card`.

## What it reads
Five tasks that mirror the paper's. Each page is 256 x 192 px (48 image tokens), in one of {len(FONTS)} faces
({", ".join(FONTS)}: DejaVu, as matplotlib ships it), 13 px to 24 px, at arbitrary pixel offsets. Page words are spelt
character by character, so any word can be read; the words of the answers' own sentences are one token each. Values are
transcribed first and then said again; a look-up names the asked value in that sentence. `eval/` holds words that
training never saw: {len(read_list("held"))} real words and the pseudo-words whose CRC-32 is divisible by 16; `seen/` has
words of the training lexicon ({len(read_list("train")):,} real words and the other pseudo-words) on pages that training
did not draw.

{describe_reading(evaluation)}
{describe_making(training)}
{describe_head(data)}
## What it cannot do
It reads pages like these and nothing else: no photographs, no handwriting, no other size of image, no question that is not
one of the tasks' own. It does not compare or add: a look-up is found in what it has just transcribed. Captions name eight
colours and four shapes.

## Licences
Weights, pages and code: the project's own. Words: a cut of SCOWL (Debian's `wamerican`), `words/COPYRIGHT`; offensive
words were taken out. Fonts are matplotlib's and are not shipped here.

## Hashes (sha256; of a folder: over its files' names and hashes)
{hashes}
"""
    write_text(data / "CARD.md", text)
    return text
