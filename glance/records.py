"""What a round and a decode leave behind: `Round` and `Stats`, and the one schema of the rows that a run keeps of them.

A run is a folder, written by `glance.run.folder`. `prompts.jsonl` has one row per arm, task and prompt; `rounds.jsonl` one
row per round. `tau` is tokens per round over a prompt, wherever it stands; a round's count of tokens is `committed`.

A prompt's row knows its rounds: how many lines `rounds.jsonl` has of it, and the hash of these lines. Readers compare: a
file that was cut, doubled or edited is refused. The file knows nothing of models.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from glance.files import json_line, read_lines, sha256
from glance.tree import CandidateTree, make_tree

TIMINGS = ("decode_only", "legacy")  # conventions, see `glance.session`
PROMPT_FIELDS = {  # name: type, of one row of prompts.jsonl
    "arm": str,  # "ar", "chain", "tree", "tree-15", "auto"
    "task": str,
    "prompt": int,  # line of the task file, from 0
    "warmup": bool,  # a task's first sample: decoded, and dropped from every table
    "prompt_tokens": int,
    "n_tokens": int,
    "rounds": int,  # steps for ar
    "tau": float,  # (n_tokens - 1) / rounds, nan as null
    "ms_per_token": float,  # decode_only
    "ms_per_token_legacy": float,
    "budget": int,  # nodes asked for; 0 for ar and auto
    "tree_size": float,  # mean nodes per round
    "finish": str,  # "stop" or "length"
    "repeats": float,  # share of the answer's token 4-grams that occurred before in it
    "looped": bool,  # repeats is `glance.metrics.LOOP_SHARE` or more
    "matches_ar": bool,  # ids equal to the ar arm's
    "text": str,
    "sha256": str,  # of the ids
    "device": str,
    "dtype": str,
    "rounds_kept": int,  # lines of rounds.jsonl: 0 for ar
    "rounds_sha256": str,  # of these lines
}
ROUND_FIELDS = {  # of one row of rounds.jsonl
    "arm": str,
    "task": str,
    "prompt": int,
    "warmup": bool,
    "looped": bool,  # the answer's, so that a law can be fitted without loops
    "round": int,
    "entropy": float,  # nats, target's distribution at the root
    "accepted": int,
    "committed": int,  # tokens: accepted and bonus, after the cut
    "tree_size": int,
    "truncated": bool,
    "offsets": int,  # that the head drafted
    "extended": bool,  # the tree reaches past them
    "draft_ms": float,
    "tree_ms": float,
    "verify_ms": float,
    "commit_ms": float,
}
TREE_FIELDS = {  # of `tree`, which a row of rounds.jsonl has where `Plan.trees` asked for it; nodes in order of selection
    "start": int,  # the root's place in the stream
    "root": int,  # id of the last committed token
    "tokens": list,  # (N,) ids
    "parents": list,  # (N,) node indices, -1 the root; depths follow from them
    "ranks": list,  # (N,)
    "logps": list,  # (N,) of the path from the root, to 4 digits
    "choices": list,  # (N+1,) the target's own choice after the root, then after each node
    "path": list,  # accepted nodes, in order
    "bonus": int,  # null where the round was cut before it
    "committed": list,  # ids of path and bonus
}
OPTIONAL = {"tree": TREE_FIELDS}
SCHEMAS = {"prompts.jsonl": PROMPT_FIELDS, "rounds.jsonl": ROUND_FIELDS}
AGAIN = "run 01-decode again (`glance main-table --resume`): it decodes again what is not whole"


@dataclass
class Round:
    """What happened in one round, in plain numbers and numpy arrays: what listeners hear, views show and records keep."""

    index: int  # 0-based
    start: int  # the root's place in the stream
    root: int  # the last committed token
    tree: CandidateTree
    accepted: int  # nodes committed, the bonus not among them, after the cut
    path: list[int]  # their indices
    bonus: int | None  # the target's own token after the path; None when the cut took it
    committed: list[int]  # path tokens and bonus, after the cut
    choices: list[int]  # (N+1,) what the target chose after the root and after each node
    # Nats, of the target's distribution at the root. Nan while a drafter's `observe` hears the round, and known to
    # `on_round` and in `Stats`: entropies are computed many rounds at a time.
    entropy: float
    truncated: bool
    ms: dict[str, float]  # draft, tree, verify, commit
    offsets: int  # that the head drafted: B-1, or 0 without a draft
    top_ids: np.ndarray  # (B-1, K) the draft's marginals; (0, 0) of a round read back, for files do not keep them
    top_logprobs: np.ndarray  # (B-1, K)

    @property
    def tree_size(self) -> int:
        """Return N, the number of nodes."""
        return len(self.tree)

    @property
    def extended(self) -> bool:
        """Say whether the tree reaches past the block."""
        return bool(len(self.tree)) and max(self.tree.columns.depths) > self.offsets


@dataclass
class Stats:
    """What a decode measured. `tau` is tokens per round; `ms_per_token` follows the timing asked for."""

    n_tokens: int = 0
    finish: str = "length"  # "length" or "stop"
    rounds: list[Round] = field(default_factory=list)
    n_rounds: int = 0  # plain steps for the oracle
    timing: str = "decode_only"
    seconds: dict[str, float] = field(default_factory=dict)  # by timing convention

    @property
    def tau(self) -> float:
        """Return tokens committed per round, the prefill's token left out; nan without a round."""
        return (self.n_tokens - 1) / self.n_rounds if self.n_rounds else float("nan")

    @property
    def ms_per_token(self) -> float:
        """Return milliseconds per output token under the timing convention asked for."""
        return self.ms_by(self.timing)

    def ms_by(self, timing: str) -> float:
        """Return milliseconds per output token under `timing`."""
        return 1e3 * self.seconds[timing] / self.n_tokens


def answer_key(row: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return what names an answer in both files: arm, task, prompt."""
    return row["arm"], row["task"], row["prompt"]


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Read a record file; an absent file has no rows.

    Raises:
        ValueError: a line that is not a row of the file's schema; names file and line.
    """
    path = Path(path)
    return parse_rows(path, read_lines(path)) if path.exists() else []


def parse_rows(path: Path, lines: Iterable[str]) -> list[dict[str, Any]]:
    """Turn a record file's lines into rows; raises as `read_rows`."""
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            raise ValueError(f"{path}:{number}: not JSON: {line[:60]!r}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: not a row: {line[:60]!r}")
        missing = sorted(set(SCHEMAS.get(path.name, ())) - set(row))
        if missing:
            raise ValueError(f"{path}:{number}: missing {', '.join(missing)}")
        rows.append(row)
    return rows


def whole_lines(path: str | Path) -> list[str]:
    """Read a record file's lines without a half-written last one, which is what a kill in mid-write leaves."""
    path = Path(path)
    if not path.exists():
        return []
    lines = read_lines(path)
    with path.open("rb") as file:
        file.seek(0, 2)
        if lines and file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                lines.pop()
    return lines


def lines_sha256(lines: Iterable[str]) -> str:
    """Hash lines as they stand in a file."""
    return sha256("".join(line + "\n" for line in lines).encode())


def match_rounds(
    prompts: Sequence[Mapping[str, Any]], rounds: Sequence[Mapping[str, Any]], lines: Sequence[str]
) -> dict[tuple[str, str, int], tuple[int, list[int]]]:
    """Find the answers that are whole: those with a row whose count and hash of rounds some lines meet.

    Two writers double rows. The k-th line of one round of an answer belongs to the answer's k-th copy, and the first row
    that one of the copies meets is taken.

    Args:
        prompts: rows of prompts.jsonl.
        rounds, lines: rows of rounds.jsonl, and the same as text.

    Returns:
        Per whole answer: the place of its row in `prompts`, and the places of its rounds in `rounds`.
    """
    copies: dict[tuple, list[int]] = {}
    seen: Counter = Counter()
    for place, row in enumerate(rounds):
        key = answer_key(row)
        copy = seen[key, row["round"]]
        seen[key, row["round"]] += 1
        copies.setdefault((key, copy), []).append(place)
    whole: dict[tuple[str, str, int], tuple[int, list[int]]] = {}
    for place, row in enumerate(prompts):
        key = answer_key(row)
        copy = 0
        while key not in whole and (copy == 0 or (key, copy) in copies):
            found = copies.get((key, copy), [])
            same = len(found) == row["rounds_kept"]
            if same and lines_sha256(lines[i] for i in found) == row["rounds_sha256"]:
                whole[key] = (place, found)
            copy += 1
    return whole


def read_prompts(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of a prompts.jsonl, one per arm, task and prompt.

    Raises:
        ValueError: a bad line, or doubled rows.
    """
    rows = read_rows(path)
    doubled = len(rows) - len({answer_key(row) for row in rows})
    if doubled:
        raise ValueError(f"{path} has {doubled} doubled rows, as two runs in one folder leave them: {AGAIN}")
    return rows


def read_rounds(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of a rounds.jsonl, every answer's whole, as the prompts.jsonl beside it says.

    Rounds without a row there are of an interrupted prompt and left out. A log without a prompts.jsonl is taken as it is.

    Raises:
        ValueError: a bad line, or rounds that are lost, doubled or changed; one line that says what to do.
    """
    path = Path(path)
    beside = path.with_name("prompts.jsonl")
    if path.name != "rounds.jsonl" or not beside.is_file():
        return read_rows(path)
    lines = whole_lines(path)
    rounds = parse_rows(path, lines)
    prompts = read_prompts(beside)
    whole = match_rounds(prompts, rounds, lines)
    kept = [rounds[i] for _, places in whole.values() for i in places]
    counts = Counter(answer_key(row) for row in rounds)
    for row in prompts:
        key = answer_key(row)
        if key not in whole or counts[key] != row["rounds_kept"]:
            broken = sum(answer_key(r) not in whole or counts[answer_key(r)] != r["rounds_kept"] for r in prompts)
            one = f"{'/'.join(map(str, key))} has {counts[key]} of {row['rounds_kept']}"
            raise ValueError(
                f"{path}: the rounds of {broken} of {len(prompts)} answers are not what was written (such as {one}): {AGAIN}"
            )
    return kept


def pack_tree(report: Round) -> dict[str, Any]:
    """Write a round's tree and walk compactly, for `rounds.jsonl`'s optional `tree`: all that a view needs."""
    columns = {name: getattr(report.tree, name).tolist() for name in ("tokens", "parents", "ranks")}
    columns["logps"] = [round(float(x), 4) for x in report.tree.logps]
    return {name: columns[name] if name in columns else getattr(report, name) for name in TREE_FIELDS}


def unpack_round(row: Mapping[str, Any]) -> Round:
    """Turn a row that kept its tree back into the round that it was written from; the marginals alone are not kept."""
    packed = row["tree"]
    depths: list[int] = []
    for parent in packed["parents"]:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return Round(
        index=row["round"],
        start=packed["start"],
        root=packed["root"],
        tree=make_tree(packed["tokens"], packed["parents"], depths, packed["ranks"], packed["logps"]),
        accepted=row["accepted"],
        path=packed["path"],
        bonus=packed["bonus"],
        committed=packed["committed"],
        choices=packed["choices"],
        entropy=row["entropy"],
        truncated=row["truncated"],
        ms={name.removesuffix("_ms"): row[name] for name in row if name.endswith("_ms")},
        offsets=row["offsets"],
        top_ids=np.empty((0, 0), np.int64),
        top_logprobs=np.empty((0, 0), np.float32),
    )


def round_row(
    report: Round, *, arm: str, task: str, prompt: int, warmup: bool, looped: bool = False, trees: bool = False
) -> dict[str, Any]:
    """Flatten a decode's `Round` into a row."""
    row = {
        "arm": arm,
        "task": task,
        "prompt": prompt,
        "warmup": warmup,
        "looped": looped,
        "round": report.index,
        "entropy": report.entropy,
        "accepted": report.accepted,
        "committed": len(report.committed),
        "tree_size": len(report.tree),
        "truncated": report.truncated,
        "offsets": report.offsets,
        "extended": report.extended,
        **{f"{step}_ms": round(report.ms[step], 4) for step in ("draft", "tree", "verify", "commit")},
    }
    return row | ({"tree": pack_tree(report)} if trees else {})


def row_line(name: str, row: Mapping[str, Any]) -> str:
    """Check a row against its schema and serialise it."""
    fields = SCHEMAS[name]
    missing = set(fields) - set(row)
    strange = set(row) - set(fields) - set(OPTIONAL)
    if missing or strange:
        raise ValueError(f"{name}: a row has missing fields {sorted(missing)} and unknown fields {sorted(strange)}")
    return json_line(row)
