"""What an audit need not decode again: what it found before it was interrupted, and the oracle's texts of a run's folder.

An audit's findings are one JSON line per prompt, in a file named by everything that the findings depend on, so that changed
parameters, weights or versions start again. A run's row keeps its text's sha256: an arm's text of that hash is the oracle's.
A record that is stale in spite of its provenance can only fail to match, and then the oracle is decoded.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glance.files import append_lines, json_line, plain, read_json, read_lines, sha256, write_text
from glance.records import read_rows

Place = tuple[str, int]  # task and index of a prompt
SAME = ("commit", "versions", "machine", "device", "gpu", "dtype", "threads", "attention", "weights")
# parameters that the oracle's text depends on
SAME_PARAMETERS = ("target", "data", "max_new_tokens", "max_pixels", "template")


class Findings:
    """Findings of an audit, prompt by prompt.

    Args:
        folder: where the file is kept; None keeps nothing.
        identity: all that the findings depend on.
    """

    def __init__(self, folder: str | Path | None, identity: Mapping[str, Any]):
        self.done: dict[Place, dict[str, Any]] = {}
        self.path = None
        if folder is None:
            return
        key = sha256(json.dumps(plain(identity), sort_keys=True).encode())[:12]
        self.path = Path(folder) / f"audit-{key}.progress.jsonl"
        if self.path.is_file():
            self.done = {(row["task"], row["prompt"]): row for row in _whole_rows(self.path)}
            write_text(self.path, "".join(map(json_line, self.done.values())))
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a prompt's findings; they are on disk when this returns. Return them as they will be read again."""
        found = json.loads(json_line(row))
        self.done[row["task"], row["prompt"]] = found
        if self.path:
            append_lines(self.path, [found])
        return found

    def end(self) -> None:
        """Remove the file: the report has it all."""
        if self.path:
            self.path.unlink(missing_ok=True)


def _whole_rows(path: Path) -> list[dict[str, Any]]:
    """Read rows up to the first that a kill left half-written."""
    rows = []
    for line in read_lines(path):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def oracle_hashes(folder: str | Path, now: Mapping[str, Any]) -> dict[Place, str]:
    """Return the sha256 of the oracle's texts in a run's folder, where the run is of the same code, machine and weights.

    Args:
        now: provenance of the audit.
    """
    folder = Path(folder)
    if not (folder / "provenance.json").is_file() or not (folder / "prompts.jsonl").is_file():
        return {}
    before = read_json(folder / "provenance.json")
    now = plain(now)
    if any(before.get(key) != now.get(key) for key in SAME):
        return {}
    if any(before["parameters"].get(key) != now["parameters"].get(key) for key in SAME_PARAMETERS):
        return {}
    tasks = {name for name, of in now["data"].items() if before["data"].get(name) == of}
    rows = [row for row in read_rows(folder / "prompts.jsonl") if row["arm"] == "ar"]
    return {(row["task"], row["prompt"]): row["sha256"] for row in rows if f"{row['task']}.jsonl" in tasks}
