"""The records a run leaves: the one schema, how rows are written so that a kill loses nothing, and where they came from.

A run is a folder. `prompts.jsonl` has one row per arm, task and prompt; `rounds.jsonl` one row per round, written before
its prompt's row; `provenance.json` says what made them. Rows are flushed per prompt, and the prompt's row is the seal:
rounds without one are of an interrupted prompt and are dropped on resume. The file knows nothing of models.
"""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from glance.paths import ROOT, named
from glance.tree import make_tree

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
VERSIONED = ("torch", "transformers", "dflash", "numpy", "glance-companion")


class Run:
    """A run's folder, open for appending rows.

    Args:
        folder: made if it does not exist.
        provenance: what the run is; a folder that holds another run's is refused.
    """

    def __init__(self, folder: str | Path, provenance: Mapping[str, Any]):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "provenance.json"
        if path.exists():
            _refuse_other(json.loads(path.read_text()), provenance, path)
        else:
            write_json(path, provenance)
        for name in SCHEMAS:
            _repair_tail(self.folder / name)
        done = read_rows(self.folder / "prompts.jsonl")
        self.done = {(row["arm"], row["task"], row["prompt"]): row for row in done}
        self._drop_unsealed_rounds()

    def add(self, prompt: Mapping[str, Any], rounds: Iterable[Mapping[str, Any]]) -> None:
        """Append a prompt's rounds, then its row; both are on disk when this returns."""
        _append(self.folder / "rounds.jsonl", rounds)
        _append(self.folder / "prompts.jsonl", [prompt])
        self.done[prompt["arm"], prompt["task"], prompt["prompt"]] = dict(prompt)

    def _drop_unsealed_rounds(self) -> None:
        path = self.folder / "rounds.jsonl"
        rows = read_rows(path)
        sealed = [row for row in rows if (row["arm"], row["task"], row["prompt"]) in self.done]
        if len(sealed) < len(rows):
            scratch = path.with_suffix(".scratch")
            scratch.write_text("".join(_line("rounds.jsonl", row) for row in sealed), encoding="utf-8")
            os.replace(scratch, path)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Read a record file; an absent file has no rows.

    Raises:
        ValueError: a line that is not a row of the file's schema; names file and line.
    """
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            raise ValueError(f"{path}:{number}: not JSON: {line[:60]!r}") from None
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


def provenance(parameters: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """Say what makes a run's numbers: parameters, commit, versions, machine; `facts` adds device, dtype, data hashes."""
    return {
        "parameters": dict(parameters),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in VERSIONED}},
        "machine": {"platform": platform.platform(), "processor": _processor(), "cpus": os.cpu_count()},
        **facts,
    }


def sha256(ids: Iterable[int] | bytes) -> str:
    """Hash ids (as int64, little-endian) or bytes."""
    data = ids if isinstance(ids, bytes) else np.asarray(list(ids), dtype="<i8").tobytes()
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: str | Path) -> str:
    """Hash a file's bytes."""
    return sha256(Path(path).read_bytes())


def write_json(path: str | Path, value: Any) -> Path:
    """Write readable JSON in one step, so that a kill leaves the old file or the new one; nan becomes null."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(path.suffix + ".scratch")
    scratch.write_text(json.dumps(_plain(value), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(scratch, path)
    return path


def written(paths: str | Path | Iterable[str | Path]) -> Any:
    """Tabulate files, or all below a folder, in a data frame for a notebook's end: name, rows, bytes, head of sha256."""
    import pandas as pd

    if isinstance(paths, (str, Path)):
        paths = sorted(path for path in Path(paths).rglob("*") if path.is_file())
    rows = []
    for path in map(Path, paths):
        data = path.read_bytes()
        count = data.count(b"\n") if path.suffix in (".jsonl", ".json", ".csv", ".md", ".tex") else None
        rows.append({"file": named(path), "rows": count, "bytes": len(data), "sha256": sha256(data)[:8]})
    return pd.DataFrame(rows, columns=["file", "rows", "bytes", "sha256"]).astype({"rows": "Int64"})


def repeated_share(text: str, n: int = 4) -> float:
    """Return the share of a text's word n-grams that occurred earlier in it: 0 for none.

    >>> repeated_share("a b c a b c", n=2)
    0.4
    """
    words = text.split()
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def _append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = "".join(_line(path.name, row) for row in rows)
    with path.open("a", encoding="utf-8") as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def _line(name: str, row: Mapping[str, Any]) -> str:
    """Check a row against its schema and serialise it."""
    fields = SCHEMAS[name]
    missing, strange = set(fields) - set(row), set(row) - set(fields) - set(OPTIONAL)
    if missing or strange:
        raise ValueError(f"{name}: a row has missing fields {sorted(missing)} and unknown fields {sorted(strange)}")
    return json.dumps(_plain(row), ensure_ascii=False) + "\n"


def _repair_tail(path: Path) -> None:
    """Cut a half-written last line: what a kill in mid-write leaves."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        scratch = path.with_suffix(".scratch")
        scratch.write_bytes(whole)
        os.replace(scratch, path)


def _refuse_other(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """Raise where parameters, versions, device, dtype or data differ: rows of two runs do not mix in one folder."""
    new = _plain(new)
    differing = []
    for group in ("parameters", "versions", "device", "dtype", "attention", "data"):
        before, now = old.get(group), new.get(group)
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
            differing += [f"{key}: {before.get(key)!r} there, {now.get(key)!r} now" for key in keys]
        else:
            differing.append(f"{group}: {before!r} there, {now!r} now")
    if differing:
        raise ValueError(f"{path.parent} holds another run ({'; '.join(differing[:4])}): name a new run, or delete it")


def _plain(value: Any) -> Any:
    """Turn numpy scalars, paths and nan into JSON's own."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Name the CPU where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """Name the commit, with a + where the tree differs from it; None outside a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
