"""What a round and a decode leave behind: `Round` and `Stats`, and the one schema of the rows that a run keeps of them.

A run is a folder, written by `glance.run.folder`. `prompts.jsonl` has one row per arm, task and prompt; `rounds.jsonl` one
row per round. The file knows nothing of models.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from glance.files import json_line, read_lines
from glance.tree import CandidateTree, make_tree

TIMINGS = ("decode_only", "legacy")  # conventions, see `glance.session`
PROMPT_FIELDS = {  # name: type, of one row of prompts.jsonl
    "arm": str,  # "ar", "chain", "tree", "tree-15", "auto"
    "task": str,
    "prompt": int,  # line of the task file, from 0
    "warmup": bool,  # a task's first sample: decoded, and dropped from every table
    "prompt_tokens": int,
    "n_tokens": int,
    "rounds": int,
    "tau": float,  # (n_tokens - 1) / rounds, nan as null
    "ms_per_token": float,  # decode_only
    "ms_per_token_legacy": float,
    "budget": int,  # nodes asked for; 0 for ar and auto
    "tree_size": float,  # mean nodes per round
    "finish": str,  # "stop" or "length"
    "repeats": float,  # share of the text's word 4-grams that occurred before in it
    "matches_ar": bool,  # ids equal to the ar arm's
    "text": str,
    "sha256": str,  # of the ids
    "device": str,
    "dtype": str,
}
ROUND_FIELDS = {  # of one row of rounds.jsonl
    "arm": str,
    "task": str,
    "prompt": int,
    "warmup": bool,
    "round": int,
    "entropy": float,  # nats, target's distribution at the root
    "accepted": int,
    "tau": int,  # tokens committed
    "tree_size": int,
    "truncated": bool,
    "extended": bool,
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
    entropy: (
        float  # nats, of the target's distribution at the root; computed many rounds at a time, so nan to a drafter's
    )
    # `observe`, and the number to everyone else: `on_round` and the `Stats` that a decode returns
    truncated: bool
    ms: dict[str, float]  # draft, tree, verify, commit
    top_ids: np.ndarray  # (B-1, K) the draft's marginals
    top_logprobs: np.ndarray  # (B-1, K)

    @property
    def tree_size(self) -> int:
        """Return N, the number of nodes."""
        return len(self.tree)

    @property
    def extended(self) -> bool:
        """Say whether the tree reaches past the block."""
        return bool(len(self.tree)) and max(self.tree.columns.depths) > len(self.top_ids)


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


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Read a record file; an absent file has no rows.

    Raises:
        ValueError: a line that is not a row of the file's schema; names file and line.
    """
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
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


def pack_tree(report: Any) -> dict[str, Any]:
    """Write a round's tree and walk compactly, for `rounds.jsonl`'s optional `tree`: all that a view needs."""
    columns = {name: getattr(report.tree, name).tolist() for name in ("tokens", "parents", "ranks")}
    columns["logps"] = [round(float(x), 4) for x in report.tree.logps]
    return {name: columns[name] if name in columns else getattr(report, name) for name in TREE_FIELDS}


def unpack_round(row: Mapping[str, Any]) -> SimpleNamespace:
    """Turn a row that kept its tree back into a round, as views take it; the marginals alone are not kept."""
    packed, depths = row["tree"], []
    for parent in packed["parents"]:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    tree = make_tree(packed["tokens"], packed["parents"], depths, packed["ranks"], packed["logps"])
    facts = {name: row[name] for name in ("entropy", "accepted", "truncated", "extended")}
    ms = {name.removesuffix("_ms"): row[name] for name in row if name.endswith("_ms")}
    return SimpleNamespace(**{**packed, **facts, "tree": tree, "index": row["round"], "ms": ms})


def round_row(report: Any, *, arm: str, task: str, prompt: int, warmup: bool, trees: bool = False) -> dict[str, Any]:
    """Flatten a decode's `Round` into a row."""
    row = {
        "arm": arm,
        "task": task,
        "prompt": prompt,
        "warmup": warmup,
        "round": report.index,
        "entropy": report.entropy,
        "accepted": report.accepted,
        "tau": len(report.committed),
        "tree_size": len(report.tree),
        "truncated": report.truncated,
        "extended": report.extended,
        **{f"{step}_ms": round(report.ms[step], 4) for step in ("draft", "tree", "verify", "commit")},
    }
    return row | ({"tree": pack_tree(report)} if trees else {})


def row_line(name: str, row: Mapping[str, Any]) -> str:
    """Check a row against its schema and serialise it."""
    fields = SCHEMAS[name]
    missing, strange = set(fields) - set(row), set(row) - set(fields) - set(OPTIONAL)
    if missing or strange:
        raise ValueError(f"{name}: a row has missing fields {sorted(missing)} and unknown fields {sorted(strange)}")
    return json_line(row)
