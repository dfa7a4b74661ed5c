"""A run's folder: how rows are written so that a kill loses nothing, and where they came from.

`rounds.jsonl` gets a prompt's rounds before `prompts.jsonl` gets its row; `provenance.json` says what made them. Rows are
flushed per prompt, and the prompt's row is the seal: rounds without one are of an interrupted prompt and are dropped on
resume. The file knows nothing of models.
"""

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from glance.files import plain, read_json, write_json
from glance.paths import ROOT
from glance.records import SCHEMAS, read_rows, row_line

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
            _refuse_other(read_json(path), provenance, path)
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
            scratch.write_text("".join(row_line("rounds.jsonl", row) for row in sealed), encoding="utf-8")
            os.replace(scratch, path)


def provenance(parameters: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """Say what makes a run's numbers: parameters, commit, versions, machine; `facts` adds device, dtype, data hashes."""
    return {
        "parameters": dict(parameters),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in VERSIONED}},
        "machine": {"platform": platform.platform(), "processor": _processor(), "cpus": os.cpu_count()},
        **facts,
    }


def _append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = "".join(row_line(path.name, row) for row in rows)
    with path.open("a", encoding="utf-8") as file:
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


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
    new = plain(new)
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


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Name the CPU where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
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
